"""Students are listed from a config alone, with their sizes, or the reason why they cannot be built."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, BertConfig, FunnelConfig, GPT2Config, MixtralConfig, T5Config

from compress.commands.students import Listing, list_students
from compress.config.recipe import Recipe
from compress.errors import StudentError, TeacherError
from compress.exporters.int8 import quantize_dynamic
from compress.exporters.onnx import to_onnx
from compress.models.flops import COUNTED_TOKENS, ModelSize, count_parameters, flops_per_token, measure_size
from tests import command, tiny

PAPERS = ("tinybert", "hinton", "distilbert", "minilm", "minilm-v1")


def config_only(folder: Path, config: Any) -> str:
    config.save_pretrained(folder)
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    return str(folder)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Listing:
    folder = config_only(tmp_path_factory.mktemp("bert-base"), BertConfig())
    return list_students(folder, [Recipe.load(name) for name in PAPERS])


def of(listing: Listing, recipe: str) -> ModelSize:
    (size,) = [each.size for each in listing.recipes if recipe in each.by]
    return size


def test_the_teacher_is_measured_from_its_config(base: Listing) -> None:
    """BERT-base: 110M parameters, 22.5 GFLOP of 128 tokens."""
    assert base.size.parameters == 109_482_240
    assert base.size.embedding_parameters == (30_522 + 512 + 2) * 768
    layer = 4 * 768**2 + 2 * COUNTED_TOKENS * 768 + 2 * 768 * 3072
    assert base.size.flops_per_token == 2 * (12 * layer + 768**2 / COUNTED_TOKENS)
    assert base.size.fp32_mb == pytest.approx(437.93, abs=0.01)


@pytest.mark.parametrize(
    ("recipe", "count"), [("tinybert", 14_350_248), ("distilbert", 66_955_008), ("minilm", 22_713_216)]
)
def test_students_have_the_published_sizes(base: Listing, recipe: str, count: int) -> None:
    assert of(base, recipe).parameters == count


def test_recipes_for_any_kind_of_task_are_listed(tmp_path: Path) -> None:
    recipes = [Recipe.load(name) for name in ("leaf", "dpr", "listnet", "hinton")]
    listing = list_students(config_only(tmp_path / "bert", BertConfig(num_hidden_layers=12)), recipes)
    assert listing.refused == ()
    assert {name for each in listing.recipes for name in each.by} == {"leaf", "dpr", "listnet", "hinton"}


def test_equal_students_share_a_line(base: Listing) -> None:
    assert {each.by for each in base.recipes} == {("hinton", "distilbert"), ("minilm", "minilm-v1"), ("tinybert",)}
    costs = [each.size.flops_per_token for each in base.recipes]
    assert costs == sorted(costs, reverse=True)
    assert base.refused == ()


def test_variants_are_listed(base: Listing) -> None:
    settings = {each.by[0]: each.size for each in base.variants}
    assert len(settings) == 8, "three depths by three widths, without the teacher itself"
    half = settings["student.layers=6 student.hidden=384 student.heads=6 student.ffn=1536"]
    assert (half.layers, half.hidden, half.heads, half.ffn) == (6, 384, 6, 1536)
    assert settings["student.layers=6"].parameters == 66_955_008


def test_variants_of_gpt2_are_narrower_though_its_config_states_no_ffn(tmp_path: Path) -> None:
    listing = list_students(config_only(tmp_path, GPT2Config(n_layer=4, n_embd=64, n_head=4, vocab_size=99)), [])
    assert {(each.size.layers, each.size.hidden, each.size.ffn) for each in listing.variants} == {
        (layers, hidden, 4 * hidden) for layers in (4, 2, 1) for hidden in (64, 32, 16)
    } - {(4, 64, 256)}


def test_odd_sizes_have_no_halves(tmp_path: Path) -> None:
    teacher = config_only(tmp_path, tiny.config("bert", layers=3, heads=1))
    assert list_students(teacher, []).variants == ()


# Why not


def test_refused_recipes_have_a_reason(tmp_path: Path) -> None:
    """Attention of 12 heads is not compared with 16, 48 do not share 1024; no BERT begins as an XLNet."""
    large = config_only(tmp_path / "large", BertConfig(hidden_size=1024, num_attention_heads=16))
    listing = list_students(large, [Recipe.load(name) for name in PAPERS])
    why = {each.recipe: each.why for each in listing.refused}
    assert why.keys() == {"minilm", "minilm-v1"}
    assert "the student has heads 12 and the teacher 16" in why["minilm-v1"]
    other = config_only(tmp_path / "other", tiny.config("xlnet"))
    (refused,) = list_students(other, [Recipe.load("hinton"), Recipe.load("distilbert-general")]).refused
    assert refused.recipe == "distilbert-general"


def test_a_family_without_the_head_a_stage_needs(tmp_path: Path) -> None:
    stages = [{"pretrain": "mlm", "head": "masked_lm", "lr": 1e-3, "objective": [{"loss": "bert.masked_lm"}]}]
    (refused,) = list_students(config_only(tmp_path, GPT2Config()), [written(tmp_path, stages)]).refused
    assert "gpt2 has no masked_lm head" in refused.why


def written(folder: Path, stages: list[dict[str, Any]], **more: Any) -> Recipe:
    paper = {"title": "A", "authors": "B", "year": 2020, "url": "https://example.org"}
    path = folder / "mine.yaml"
    path.write_text(json.dumps({"paper": paper, "about": "C", "stages": stages, **more}), encoding="utf-8")
    return Recipe.load(str(path))


def test_students_from_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = config_only(tmp_path / "other", tiny.config("distilbert", hidden=16))
    stages = [{"finetune": "task", "lr": 1e-3}]
    teacher = config_only(tmp_path / "teacher", tiny.config("bert"))
    (found,) = list_students(teacher, [written(tmp_path, stages, student={"init": other})]).recipes
    assert (found.size.family, found.size.hidden) == ("distilbert", 16)
    (refused,) = list_students(teacher, [written(tmp_path, stages, student={"init": "./nowhere"})]).refused
    assert "no such folder" in refused.why


def test_teaching_assistants_have_their_own_line(tmp_path: Path) -> None:
    relations = {"loss": "minilm.value_relations", "layers": "last", "heads": 4}
    lesson = {"data": "text", "lr": 1e-3, "objective": [relations]}
    stages = [
        {"distill": "assistant", "student": {"hidden": 16, "ffn": 32}, **lesson},
        {"distill": "small", "teacher": "previous", "student": {"hidden": 16, "ffn": 32, "layers": 1}, **lesson},
    ]
    listing = list_students(config_only(tmp_path, tiny.config("bert")), [written(tmp_path, stages)])
    found = {each.by: (each.size.layers, each.size.hidden) for each in listing.recipes}
    assert found == {("mine: assistant",): (2, 16), ("mine",): (1, 16)}


# What is counted


@pytest.mark.parametrize("family", [*tiny.FAMILIES, "gpt2"])
def test_cost_is_extrapolated_from_two_layers(family: str) -> None:
    settings = {"n_layer": 5, "n_embd": 32, "n_head": 4}
    config = GPT2Config(**settings) if family == "gpt2" else tiny.config(family, layers=5)
    model = AutoModel.from_config(config)
    size = measure_size(model)
    assert size.flops_per_token == pytest.approx(flops_per_token(model, COUNTED_TOKENS), rel=1e-9)
    assert size.parameters == count_parameters(model)
    assert 0 < size.embedding_parameters < size.parameters


def test_of_an_encoder_decoder_the_encoder_is_counted() -> None:
    config = T5Config(vocab_size=50, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4)
    with torch.device("meta"):
        size = measure_size(AutoModel.from_config(config))
    assert size.flops_per_token == 2 * 3 * (4 * 32 * 32 + 2 * COUNTED_TOKENS * 32 + 2 * 32 * 64)


def test_the_megabytes_are_those_of_the_files(tmp_path: Path) -> None:
    """But for the head, names, and the graph itself."""
    model = tiny.model("albert", hidden=256, layers=6, intermediate_size=1024)
    to_onnx(model, tmp_path / "fp32.onnx")
    quantize_dynamic(tmp_path / "fp32.onnx", tmp_path / "int8.onnx")
    size = measure_size(model.albert)
    for expected, name in ((size.fp32_mb, "fp32"), (size.int8_mb, "int8")):
        found = (tmp_path / f"{name}.onnx").stat().st_size / 1e6
        assert expected < found < expected + 0.3


# Asking


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("compress.commands.students.names", lambda: PAPERS)
    monkeypatch.setattr("compress.commands.students.list_students", cache(list_students))
    teacher = config_only(tmp_path / "t", tiny.config("bert", layers=4))
    few, result = (command.run("students", teacher, *more) for more in ([], ["--wide"]))
    assert (few.code, result.code) == (0, 0)
    for text, cells in ((few.out, 8), (result.out, 14)):
        assert "…" not in text, "no number is cut"
        (own,) = (line.split() for line in text.splitlines() if line.startswith("the teacher  "))
        assert (len(own), own[-1]) == (cells, "100%")
        assert "Not from this teacher:" in text
    assert max(map(len, few.out.splitlines())) <= 80
    listed = json.loads(command.run("students", teacher, "--json").out)
    assert listed["size"]["layers"] == 4
    assert {name for each in listed["recipes"] for name in each["by"]} >= {"hinton", "distilbert"}


@pytest.mark.parametrize(
    ("teacher", "expected"),
    [
        ("./nowhere", "no such folder"),
        ("somebody/some-model", "the hub cannot be reached"),
    ],
)
def test_a_teacher_that_cannot_be_found(
    teacher: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    result = command.run("students", teacher)
    assert (result.code, result.out) == (2, "")
    assert expected in result.err


@pytest.mark.parametrize("config", ["{", "[]", '{"model_type": "unheard-of"}'])
def test_a_config_that_is_none(tmp_path: Path, config: str) -> None:
    with pytest.raises(TeacherError, match=r"has no config\.json"):
        list_students(str(tmp_path), [])
    (tmp_path / "config.json").write_text(config, encoding="utf-8")
    with pytest.raises(TeacherError, match=r"cannot be (read|loaded)|holds a list"):
        list_students(str(tmp_path), [])


def test_a_teacher_with_experts_keeps_its_groups_of_heads(tmp_path: Path) -> None:
    config = MixtralConfig(
        vocab_size=50, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, num_local_experts=4, max_position_embeddings=64,
    )  # fmt: skip
    listing = list_students(config_only(tmp_path, config), [Recipe.load(name) for name in ("hinton", "prune-taylor")])
    (size,) = [each.size for each in listing.recipes]
    assert (size.layers, size.heads) == (2, 4)
    assert listing.variants
    assert [refused.recipe for refused in listing.refused] == ["prune-taylor"]
    assert "no slice plan for 'mixtral'" in listing.refused[0].why


def test_a_teacher_whose_layers_cannot_be_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StudentError, match=r"student\.layers: funnel: This model does not support"):
        list_students(config_only(tmp_path, FunnelConfig(architectures=["FunnelModel"])))
