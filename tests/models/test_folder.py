"""What the folder of a model says about itself: which files are read, what its labels are, and what it is."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from compress.errors import TeacherError
from compress.models.checkpoints import check
from compress.models.folder import IGNORED, ModelFolder, find_weights, identify, identify_kind
from tests import tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(tiny.checkpoint(tmp_path / "model", tiny.bert(3)))


def change(folder: Path, name: str = "config.json", **values: Any) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def shard(folder: Path, count: int = 3) -> list[Path]:
    """Split the weights of a folder into shards, as transformers saves large models."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = [folder / f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    names = sorted(weights)
    for number, file in enumerate(files):
        save_file({name: weights[name] for name in names[number::count]}, file, {"format": "pt"})
    listed = {name: files[at % count].name for at, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    return files


# Labels


@pytest.mark.parametrize(
    ("settings", "labels"),
    [
        ({}, ("LABEL_0", "LABEL_1", "LABEL_2")),
        ({"id2label": None}, ("LABEL_0", "LABEL_1")),
        ({"id2label": None, "num_labels": 3}, ("LABEL_0", "LABEL_1", "LABEL_2")),
        ({"id2label": {"2": "c", "0": "a", "1": "b"}}, ("a", "b", "c")),
        ({"id2label": {"0": "a", "1": "b", "2": "c"}, "num_labels": 3}, ("a", "b", "c")),
        ({"id2label": {"0": 10, "1": 7, "2": "7.5"}}, ("10", "7", "7.5")),
        ({"id2label": {"0": "two words", "1": "two\nlines", "2": ""}}, ("two words", "two\nlines", "")),
        ({"id2label": {"0": "a", "1": "b", "2": "c"}, "label2id": {"a": "0", "b": 1, "C": 9}}, ("a", "b", "c")),
    ],
    ids=str,
)
def test_labels_are_read_as_transformers_reads_them(
    settings: dict[str, Any], labels: tuple[str, ...], folder: Path
) -> None:
    change(folder, **{"label2id": None} | settings)
    source = ModelFolder(folder)
    source.check()
    assert source.labels() == labels
    assert source.outputs == len(labels)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"id2label": {"0": "a", "2": "b", "5": "c"}}, "0, 2, 5"),
        ({"id2label": {"1": "a", "2": "b", "3": "c"}}, "1, 2, 3"),
        ({"id2label": {str(n): f"x{n}" for n in range(1, 90)}}, "1, 2, 3, 4, ..., 89"),
        ({"id2label": {"a": "A"}}, "'a'"),
        ({"id2label": {"0": "a", "-1": "b"}}, "'-1'"),
        ({"id2label": {"0": "a", "01": "b"}}, "'01'"),
        ({"id2label": {"0.0": "a", "1.0": "b"}}, "'0.0'"),
        ({"id2label": {"a": 0, "b": 1}}, "'a'"),
        ({"id2label": ["a", "b"]}, "a list"),
        ({"id2label": {"0": "same", "1": "b", "2": "same"}}, "'same'"),
        ({"id2label": {"0": 1, "1": "1"}}, "'1'"),
        ({"id2label": {"0": None, "1": "b"}}, "None"),
        ({"id2label": {"0": True, "1": "b"}}, "True"),
        ({"id2label": {"0": ["a"], "1": "b"}}, r"\['a'\]"),
        ({"id2label": {"0": "a", "1": "b"}, "num_labels": 3}, "num_labels is 3"),
        ({"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 1, "b": 0}}, "label2id"),
    ],
    ids=str,
)
def test_labels_that_cannot_be_right_are_refused(settings: dict[str, Any], named: str, folder: Path) -> None:
    change(folder, **{"label2id": None} | settings)
    with pytest.raises(TeacherError, match=rf"config\.json: .*{named}"):
        ModelFolder(folder).check()
        ModelFolder(folder).labels()


# Settings that transformers ignores


@pytest.mark.parametrize(
    "settings",
    [
        {"position_embedding_type": "relative_key"},
        {"position_embedding_type": "relative_key_query"},
        {"position_embedding_type": "alibi"},
        {"pruned_heads": {"0": [1]}},
        {"tie_encoder_decoder": True},
        {"adapters": {"adapters": {"task": "0123"}, "config_map": {}}},
        {"use_conv": True},
        {"problem_type": "multiclass"},
        {"auto_map": {"AutoModel": "modeling.Model"}},
        {"quantization_config": {"quant_method": "gptq"}},
        {"compression_config": {"quant_method": "compressed-tensors"}},
    ],
    ids=str,
)
def test_settings_that_change_the_model_are_refused(settings: dict[str, Any], folder: Path) -> None:
    change(folder, **settings)
    with pytest.raises(TeacherError, match=next(iter(settings))):
        check(str(folder))


@pytest.mark.parametrize(
    "settings",
    [
        {"position_embedding_type": "absolute"},
        {"pruned_heads": {}, "tie_encoder_decoder": False, "adapters": {"adapters": {}, "fusions": {}}},
        {"finetuning_task": "sst2", "unheard_of": 3, "model_max_length": 12},
        {"problem_type": "multi_label_classification"},
        {"model_type": "modernbert", "position_embedding_type": "sans_pos"},
        {"sentence_transformers": {"version": "5.1.0", "activation_fn": "torch.nn.modules.activation.Sigmoid"}},
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
    ],
    ids=str,
)
def test_other_settings_are_accepted(settings: dict[str, Any], folder: Path) -> None:
    change(folder, **settings)
    check(str(folder))


def test_the_families_that_honour_a_setting_declare_it() -> None:
    rotary = {"modernbert", "modernbert-decoder"}  # mmBERT's config has `sans_pos`, which nothing reads
    for name, (_, _, families) in IGNORED.items():
        assert all(name in CONFIG_MAPPING[family].__dataclass_fields__ for family in {*families} - rotary), name
        common = ("bert", "roberta", "electra", "albert", "xlm-roberta", "ernie", "camembert", "t5", "distilbert")
        assert not any(name in CONFIG_MAPPING[family].__dataclass_fields__ for family in common), name


# What a folder is


MODULE = "sentence_transformers.base.modules.transformer.Transformer"
SAVED: Mapping[str, tuple[list[str], dict[str, Any] | None]] = {
    "sentence_encoder": ([MODULE, "sentence_transformers.models.Pooling"], None),
    "sentence_encoder, tokens only": ([MODULE], {"model_type": "SentenceTransformer"}),
    "cross_encoder": ([MODULE], {"model_type": "CrossEncoder", "prompts": {}, "default_prompt_name": None}),
    "cross_encoder, as saved": (
        [MODULE],
        {
            "__version__": {"sentence_transformers": "6.2.0"},
            "model_type": "CrossEncoder",
            "activation_fn": "torch.nn.modules.activation.Sigmoid",
            "keep_in_fp32_modules": ["0.model.classifier"],
        },
    ),
    "cross_encoder, unused prompt": ([MODULE], {"model_type": "CrossEncoder", "prompts": {"query": "q: "}}),
}
REFUSED: Mapping[str, tuple[list[str], dict[str, Any] | None]] = {
    "LogitScore": ([MODULE, "sentence_transformers.cross_encoder.modules.LogitScore"], {"model_type": "CrossEncoder"}),
    "default_prompt_name": (
        [MODULE],
        {"model_type": "CrossEncoder", "prompts": {"query": "q: "}, "default_prompt_name": "query"},
    ),
    "activation_fn": ([MODULE], {"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.activation.GELU"}),
    "truncate_dim": ([MODULE], {"model_type": "CrossEncoder", "truncate_dim": 8}),
    "SparseEncoder": ([MODULE, "sentence_transformers.sparse_encoder.SpladePooling"], {"model_type": "SparseEncoder"}),
    "MultiVectorEncoder": ([MODULE], {"model_type": "MultiVectorEncoder"}),
    "pylate": ([MODULE, "pylate.models.Dense.Dense"], None),
}


def write_modules(folder: Path, types: list[str], settings: dict[str, Any] | None) -> None:
    listed = [{"idx": at, "name": str(at), "path": "", "type": kind} for at, kind in enumerate(types)]
    (folder / "modules.json").write_text(json.dumps(listed))
    if settings is not None:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("case", SAVED)
def test_the_modules_say_what_a_folder_is(case: str, folder: Path) -> None:
    assert identify_kind(folder) == "transformers"
    write_modules(folder, *SAVED[case])
    assert identify_kind(folder) == case.partition(",")[0]


@pytest.mark.parametrize("case", REFUSED)
def test_other_modules_are_refused_by_name(case: str, folder: Path) -> None:
    write_modules(folder, *REFUSED[case])
    with pytest.raises(TeacherError, match=case):
        identify_kind(folder)


@pytest.mark.parametrize("name", ["adapter_config.json", "model_head.pkl", "config_setfit.json", "quant_config.json"])
def test_what_stands_beside_a_model_is_not_ignored(name: str, folder: Path) -> None:
    (folder / name).write_text("{}")
    with pytest.raises(TeacherError, match=name):
        check(str(folder))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sentence_transformers": {"activation_fn": "torch.nn.ReLU"}}, "activation_fn is 'torch.nn.ReLU'"),
        (
            {"sbert_ce_default_activation_function": "torch.nn.ReLU"},
            "sbert_ce_default_activation_function is 'torch.nn.ReLU'",
        ),
        ({"sbert_ce_default_activation_function": 3}, "'sbert_ce_default_activation_function' is 3; expected str"),
        ({"sentence_transformers": "5.1.0"}, "'sentence_transformers' is '5.1.0'; expected dict"),
    ],
)
def test_an_activation_in_the_config_of_a_cross_encoder_is_read(
    settings: dict[str, Any], message: str, folder: Path
) -> None:
    change(folder, **settings)
    with pytest.raises(TeacherError, match=re.escape(message)):
        check(str(folder))


def test_adapters_beside_the_first_module_are_refused(folder: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    folder.rename(whole / "0_Transformer")
    listed = [{"idx": 0, "name": "0", "path": "0_Transformer", "type": MODULE}]
    (whole / "modules.json").write_text(json.dumps(listed))
    (whole / "0_Transformer" / "adapter_config.json").write_text("{}")
    with pytest.raises(TeacherError, match=r"0_Transformer.adapter_config\.json"):
        check(str(whole))


def test_a_folder_of_adapters_alone_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(TeacherError, match=r"adapter_config\.json.*merge"):
        check(str(tmp_path))


# Weight files


def test_the_files_that_transformers_reads_are_found(folder: Path) -> None:
    single = folder / "model.safetensors"
    for stray in ("model-00001-of-00002.safetensors", "consolidated.safetensors", "pytorch_model.bin", "optimizer.pt"):
        (folder / stray).write_bytes(b"x")
    assert find_weights(folder).files == (single,)
    files = shard(folder)
    (folder / "model-00001-of-00002.safetensors").unlink()
    found = find_weights(folder, allow_pickle=True)
    assert found.files == tuple(files)
    assert found.index == folder / "model.safetensors.index.json"
    found.index.unlink()
    assert find_weights(folder, allow_pickle=True).pickled
    with pytest.raises(TeacherError, match="only pickled weights"):
        find_weights(folder)
    (folder / "pytorch_model.bin").rename(folder / "pytorch_model_fsdp.bin")
    with pytest.raises(TeacherError, match=r"has no model\.safetensors\.index\.json"):
        find_weights(folder, allow_pickle=True)
    (folder / "pytorch_model_fsdp.bin").unlink()
    with pytest.raises(TeacherError, match=r"model\.safetensors\.index\.json"):
        find_weights(folder)


def test_the_file_that_a_config_names_is_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    with pytest.raises(TeacherError, match=r"other\.safetensors is not read"):
        find_weights(folder)
    change(folder, transformers_weights="other.safetensors")
    assert find_weights(folder).files == (folder / "other.safetensors",)
    change(folder, transformers_weights="../other.safetensors")
    with pytest.raises(TeacherError, match="transformers_weights"):
        find_weights(folder)


def test_missing_shards_are_named(folder: Path) -> None:
    gone = shard(folder)[1]
    gone.unlink()
    with pytest.raises(TeacherError, match=rf"1 are missing, such as {gone.name}"):
        check(str(folder))


# The digest


def _write(name: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps({"changed": True}))

    return write


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "model.safetensors", "tokenizer.json", "merges.txt", "spiece.model", "generation_config.json"),
        *("sentence_roberta_config.json", "config_sentence_transformers.json", "chat_template.jinja"),
        *("the_map/model.safetensors", "the_map/pytorch_model.bin", "the_map/config.json"),
    ],
)
def test_what_is_read_changes_the_digest(name: str, folder: Path) -> None:
    write_modules(folder, [MODULE], None)
    listed = json.loads((folder / "modules.json").read_text())
    listed.append({"idx": 1, "name": "1", "path": "the_map", "type": "sentence_transformers.models.Dense"})
    (folder / "modules.json").write_text(json.dumps(listed))
    before = identify(folder)
    _write(name)(folder)
    assert identify(folder) != before


@pytest.mark.parametrize(
    "name",
    [
        *("README.md", "LICENSE", "consolidated.safetensors", "pytorch_model.bin", "optimizer.pt", "training_args.bin"),
        *("onnx/model.onnx", "trainer_state.json", "report.json", "manifest.json"),
    ],
)
def test_what_is_not_read_does_not(name: str, folder: Path) -> None:
    before = identify(folder)
    _write(name)(folder)
    assert identify(folder) == before


def test_the_index_and_the_places_of_files_are_part_of_the_digest(folder: Path) -> None:
    whole = identify(folder)
    files = shard(folder)
    before = identify(folder)
    assert before != whole
    change(folder, "model.safetensors.index.json", metadata={"total_size": 1})
    assert identify(folder) != before
    before = identify(folder)
    first, second = files[0].read_bytes(), files[1].read_bytes()
    files[0].write_bytes(second)
    files[1].write_bytes(first)
    assert identify(folder) != before
