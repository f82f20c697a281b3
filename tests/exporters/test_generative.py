"""What GPT-2, T5 and those of Llama's shape write from the files is what transformers writes."""

import json
import shutil
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pandas
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertLMHeadModel,
)

from compress.benchmark import arguments
from compress.errors import BundleError, ExportError
from compress.exporters.artifact import Bundle
from compress.exporters.checkpoint import Checkpoint, load_source
from compress.exporters.decoders import tie_matrices
from compress.exporters.generation import check, write
from compress.exporters.rewrite.saturation import list_saturating
from compress.exporters.session import open_session, read_model
from compress.exporters.text_generator import TextGenerator, TextWriter
from compress.records.latency import DeviceError
from tests import generative, tiny
from tests.command import run

VOCABULARY, END = len(tiny.SPECIAL) + len(tiny.WORDS), 3


def gpt2(**changed: Any) -> Any:
    tokens = {"vocab_size": VOCABULARY, "bos_token_id": 2, "eos_token_id": END, "initializer_range": 0.3}
    return generative.gpt2(**{**tokens, **changed})


def t5(**changed: Any) -> Any:
    distances = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16}
    sizes = {"vocab_size": VOCABULARY, "d_kv": 12, "num_decoder_layers": 2, "eos_token_id": END}
    return generative.t5(layers=3, **{**sizes, **distances, "initializer_factor": 3.0, **changed})


def like_llama(family: str, **changed: Any) -> Any:
    """Two of its four heads share keys and values."""
    tokens = {"bos_token_id": 2, "eos_token_id": END, "pad_token_id": 0, "initializer_range": 0.3}
    changed = {**tiny.LIKE_LLAMA[family], "num_key_value_heads": 2, **tokens, **changed}
    return tiny.model(family, head=AutoModelForCausalLM, **changed)


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
MODELS = {
    **{family: partial(like_llama, family) for family in tiny.LIKE_LLAMA},
    "llama, tied, llama3": partial(like_llama, "llama", tie_word_embeddings=True, rope_parameters=LLAMA3),
    "llama, own keys": partial(like_llama, "llama", num_key_value_heads=4, attention_bias=False, mlp_bias=False),
    "gpt2": gpt2,
    "gpt2, scaled by layer": lambda: gpt2(scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True),
    "gpt2, own head": lambda: gpt2(tie_word_embeddings=False),
    "t5": t5,
    "t5, gated, own head": lambda: t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
}


def written(model: Any, folder: Path) -> Bundle:
    return write(folder, model=model, tokenizer=tiny.tokenizer(), max_length=32, card={"name": "tiny"})


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bundle]:
    """Bundles of MODELS that tests only read, each written once."""
    folder = tmp_path_factory.mktemp("bundles")
    return cache(lambda kind: written(MODELS[kind](), folder / kind))


def expected(model: Any, ids: Sequence[int], new: int) -> list[int]:
    """What transformers writes: the likeliest token each time."""
    settings = {"max_new_tokens": new, "do_sample": False, "num_beams": 1}
    given = torch.tensor([ids])
    found = model.generate(given, attention_mask=torch.ones_like(given), **settings)[0].tolist()
    return found[1:] if model.config.is_encoder_decoder else found[len(ids) :]


@pytest.mark.parametrize("kind", MODELS)
def test_generation_equals_transformers(kind: str, bundles: Callable[[str], Bundle]) -> None:
    model, folder = MODELS[kind](), bundles(kind).path
    generator = TextGenerator.open(folder, "fp32")
    prompts = [[7], [7, 20, 9, 31, 8], list(range(5, 40))]
    answers = [generator.generate(ids, new=20) for ids in prompts]
    assert answers == [expected(model, ids, 20) for ids in prompts]
    assert len({tuple(answer) for answer in answers}) == 3
    assert check(model, folder) < 1e-4
    if not model.config.is_encoder_decoder:
        heads = getattr(model.config, "num_key_value_heads", 4)
        assert generator.begin([7])["past_key_values.0.key"].shape[:2] == (1, heads), "as many as there are keys"


def test_generation_stops_at_end_tokens(bundles: Callable[[str], Bundle], tmp_path: Path) -> None:
    likely = expected(gpt2(), [7, 8], 8)
    model, folder = gpt2(eos_token_id=likely[3]), tmp_path / "made"
    shutil.copytree(bundles("gpt2").path, folder)
    for ends in (likely[3], [VOCABULARY + 5, likely[3]]):
        model.config.eos_token_id = model.generation_config.eos_token_id = ends
        model.config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        found = TextGenerator.open(folder, "fp32").generate([7, 8], new=8)
        assert found == likely[: likely.index(likely[3]) + 1]


def test_padding_on_the_left_does_not_matter(bundles: Callable[[str], Bundle]) -> None:
    session = TextGenerator.open(bundles("gpt2").path, "fp32").decoder
    empty = {n.name: np.zeros((2, 4, 0, 8), np.float32) for n in session.get_inputs() if "past" in n.name}
    mask = np.array([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    places = np.maximum(mask.cumsum(1) - 1, 0)
    ids = np.array([[0, 0, 7, 8, 9], [5, 6, 7, 8, 9]])
    (both,) = session.run(["logits"], {"input_ids": ids, "attention_mask": mask, "position_ids": places, **empty})
    alone = {name: value[:1] for name, value in empty.items()}
    feeds = {"input_ids": ids[:1, 2:], "attention_mask": mask[:1, 2:], "position_ids": places[:1, 2:]}
    (one,) = session.run(["logits"], feeds | alone)
    np.testing.assert_allclose(both[0, 2:], one[0], atol=1e-5)


def test_names_are_those_of_optimum(bundles: Callable[[str], Bundle]) -> None:
    made = bundles("gpt2").path
    assert sorted(path.name for path in (made / "onnx").iterdir()) == ["model.onnx", "model_quantized.onnx"]
    session = open_session(made / "onnx/model.onnx")
    past = [f"{layer}.{part}" for layer in (0, 1) for part in ("key", "value")]
    assert [each.name for each in session.get_inputs()] == [
        "input_ids", "attention_mask", "position_ids", *(f"past_key_values.{name}" for name in past)
    ]  # fmt: skip
    assert [each.name for each in session.get_outputs()] == ["logits", *(f"present.{name}" for name in past)]
    assert session.get_inputs()[3].shape == ["batch_size", 4, "past_sequence_length", 8]

    made = bundles("t5").path
    assert AutoTokenizer.from_pretrained(made).model_input_names == ["input_ids", "attention_mask"]
    names = ("decoder_model_merged", "decoder_model_merged_quantized", "encoder_model", "encoder_model_quantized")
    assert sorted(path.stem for path in (made / "onnx").iterdir()) == list(names)
    session = open_session(made / "onnx/decoder_model_merged.onnx")
    past = [f"{n}.{kind}.{part}" for n in (0, 1) for kind in ("decoder", "encoder") for part in ("key", "value")]
    assert {each.name for each in session.get_inputs()} == {
        "encoder_attention_mask", "input_ids", "encoder_hidden_states", "use_cache_branch",
        *(f"past_key_values.{name}" for name in past),
    }  # fmt: skip
    assert [each.name for each in session.get_outputs()] == ["logits", *(f"present.{name}" for name in past)]


def weights(path: Path) -> int:
    return sum(int(np.prod(each.dims)) for each in read_model(path).graph.initializer)


def test_shared_matrices_are_stored_once(tmp_path: Path) -> None:
    model = t5(vocab_size=4096)
    made = written(model, tmp_path / "made").path
    decoder = sum(parameter.numel() for parameter in model.decoder.parameters())  # the head is its embedding
    assert 0.99 * decoder < weights(made / "onnx/decoder_model_merged.onnx") < 1.02 * decoder
    assert weights(made / "onnx/decoder_model_merged_quantized.onnx") < 2.1 * decoder  # a table and a head of int8


def test_tied_matrices_become_a_transpose() -> None:
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    tables = [onnx.numpy_helper.from_array(value, name) for value, name in ((table, "words"), (table.T, "head"))]
    value = onnx.helper.make_tensor_value_info
    node = onnx.helper.make_node("MatMul", ["x", "head"], ["y"])
    ends = [value("x", 1, [1, 3])], [value("y", 1, [1, 4])]
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "graph", *ends, [*tables]))
    assert [each.name for each in tie_matrices(model).graph.initializer] == ["words", "head"]  # small ones stay
    found = tie_matrices(model, smallest=12)
    assert [each.name for each in found.graph.initializer] == ["words"]
    assert [node.op_type for node in found.graph.node] == ["Transpose", "MatMul"]
    onnx.checker.check_model(found)


def test_dynamic_rotary_positions_are_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ExportError, match="positions are of type dynamic, which depends on the length"):
        written(like_llama("llama", rope_parameters=rope), tmp_path / "made")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("kind", ["gpt2", "t5", "llama"])
def test_int8_generates_too(kind: str, bundles: Callable[[str], Bundle]) -> None:
    made = bundles(kind)
    exact, small = (TextGenerator.open(made.path, each) for each in ("fp32", "int8"))
    pasts = [each.begin([7, 8, 9]) for each in (exact, small)]
    one, other = (each.step(past, [5, 6])[0] for each, past in zip((exact, small), pasts, strict=True))
    assert np.corrcoef(one.ravel(), other.ravel())[0, 1] > 0.95
    assert abs(one - other).max() > 1e-4
    (text,) = made.complete(["a good film"], new=5)
    assert isinstance(text, str)
    assert len(small.generate([7, 8], new=5)) <= 5
    for file in made.path.glob("onnx/*_quantized.onnx"):
        assert list_saturating(file) == [], "also where equal biases, here all zero, are one tensor"


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_checkpoint_becomes_a_bundle_that_completes_texts(kind: str, tmp_path: Path) -> None:
    model = MODELS[kind]()
    found = load_source(tiny.checkpoint(tmp_path / "model", model), max_length=32)
    assert isinstance(found, Checkpoint)
    made = found.write(tmp_path / "made", opset=18)
    assert Bundle.load(made.path) == made
    assert (made.manifest.kind, made.manifest.max_length) == ("generative", 32)
    file = made.path / "onnx/model.onnx"
    assert {entry.version for entry in read_model(file).opset_import if not entry.domain} == {18}
    (text,) = made.complete(["a good film"], new=5)
    assert isinstance(text, str)
    ids = AutoTokenizer.from_pretrained(made.path)("a good film")["input_ids"]
    assert TextGenerator.open(made.path, "fp32").generate(ids, new=5) == expected(model, ids, 5)
    file.write_bytes(b"")
    with pytest.raises(BundleError, match=r"onnx/model\.onnx: 0 bytes"):
        Bundle.load(made.path)


@pytest.mark.parametrize("side", ["right", "left"])
def test_long_texts_leave_room_for_what_is_written(side: str, tmp_path: Path) -> None:
    made = load_source(tiny.checkpoint(tmp_path / "model", gpt2()), max_length=64).write(tmp_path / "made")
    settings = json.loads((made.path / "tokenizer_config.json").read_text(encoding="utf-8"))
    path = made.path / "tokenizer_config.json"
    path.write_text(json.dumps(settings | {"truncation_side": side}), encoding="utf-8")
    text = "a good film " * 20
    (row,) = TextWriter.open(made.path, "fp32", max_length=64, new=4).encoder.encode([text], 60)
    longest = TextWriter.open(made.path, "fp32", max_length=64, new=4)
    assert longest.complete([text]) == [longest.encoder.decode(longest.generator.generate(row["input_ids"], new=4))]
    assert len(row["input_ids"]) == 60
    assert TextWriter.open(made.path, "fp32", max_length=64, new=61).complete([text])
    with pytest.raises(BundleError, match="new 64: leaves no token of a text; this model has 64 positions"):
        TextWriter.open(made.path, "fp32", max_length=64, new=64).complete([text])


def test_unsupported_models_and_prompts_are_refused(bundles: Callable[[str], Bundle], tmp_path: Path) -> None:
    for family in ("gpt2", "llama"):
        generator = TextGenerator.open(bundles(family).path, "fp32")
        with pytest.raises(BundleError, match="60 tokens and 5 new ones; this model has 64 positions"):
            generator.generate([7] * 60, new=5)
    with pytest.raises(BundleError, match="cannot complete an empty text"):
        generator.generate([], new=5)
    other = BertLMHeadModel(BertConfig(vocab_size=VOCABULARY, hidden_size=16, num_attention_heads=2, is_decoder=True))
    with pytest.raises(
        ExportError, match="BertLMHeadModel: cannot be exported as a generative model; expected one of gpt2, llama"
    ):
        written(other, tmp_path / "other")
    broken = gpt2()
    broken.transformer.h[0].mlp.c_fc.weight.data[0, 0] = float("nan")
    with pytest.raises(ExportError, match="may hold NaN"):
        written(broken, tmp_path / "broken")
    assert [path.name for path in tmp_path.iterdir() if path.name != "home"] == []
    folder = Path(shutil.copytree(bundles("t5").path, tmp_path / "t5"))
    with pytest.raises(DeviceError, match="generates text token by token"):
        arguments.list_files([folder])
    for name in ("config.json", "generation_config.json"):
        result = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({key: result[key] for key in result if key != "decoder_start_token_id"}))
    with pytest.raises(BundleError, match="has no decoder_start_token_id"):
        TextGenerator.open(folder, "fp32").generate([7], new=3)


def test_predict_writes_on(bundles: Callable[[str], Bundle], tmp_path: Path) -> None:
    made = bundles("t5")
    texts = ["a good film", "never dull"]
    (tmp_path / "rows.csv").write_text("id,text\n1,a good film\n2,never dull\n")
    expected = made.complete(texts, new=5)
    asked = run("predict", str(made.path), *texts, "--new-tokens", "5")
    assert asked.out.splitlines() == [f"{answer}\t{text}" for answer, text in zip(expected, texts, strict=True)]
    for suffix in ("csv", "jsonl", "parquet"):
        file = tmp_path / f"answers.{suffix}"
        run(
            "predict", str(made.path), "--input", str(tmp_path / "rows.csv"), "--output", str(file), "--new-tokens", "5"
        )
        assert [str(row["prediction"]) for row in pandas_rows(file)] == expected


def pandas_rows(file: Path) -> list[dict[str, object]]:
    read = {".csv": pandas.read_csv, ".jsonl": partial(pandas.read_json, lines=True), ".parquet": pandas.read_parquet}
    rows: list[dict[str, object]] = read[file.suffix](file).to_dict("records")
    return rows


def test_what_a_language_model_does_not_do_is_refused(bundles: Callable[[str], Bundle], tmp_path: Path) -> None:
    made = str(bundles("gpt2").path)
    labels = str(tiny.bundle(tmp_path / "labels").path)
    for words, part in (
        ([made, "a", "--against", "x.txt"], "expected one that computes vectors"),
        ([made, "a", "--prompt-name", "query"], "expected one that computes vectors"),
        ([labels, "a", "--new-tokens", "3"], "does not write text"),
        ([made, "a", "--precision", "w8"], "w8"),
    ):
        refused = run("predict", *words)
        assert refused.code == 2
        assert part in " ".join(refused.err.split())
