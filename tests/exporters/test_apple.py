"""Core ML and Core AI: operators are computed as torch computes them; files are read back and answer alike."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForQuestionAnswering, AutoModelForTokenClassification

from compress.commands import export as commands
from compress.errors import ExportError
from compress.exporters.artifact import Bundle
from compress.exporters.writers import aimodel, apple, mil
from compress.exporters.writers.context import ExportResult, FixedOptions
from compress.exporters.writers.mil import MIL_OPERATORS
from tests import command, tiny
from tests.exporters.test_formats import BESIDE, LENGTH, QA, TAGGING, bundle, names

X = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
T = torch.from_numpy(X)
W, B = X[0], X[0, :, 0]
FULL = [0, 0, 0]
BINARY = {
    "equal": "eq", "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "mul": "mul",
    "not_equal": "ne", "real_div": "div", "sub": "sub",
}  # fmt: skip
SAME = {
    "add": "add", "divide": "div", "equal": "eq", "floor_divide": "floor_divide", "greater": "gt", "maximum": "maximum",
    "minimum": "minimum", "mul": "mul", "not_equal": "ne", "sub": "sub",
}  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that tests only read."""
    return bundle(tmp_path_factory.mktemp("written") / "bundle").path


def needs(to: str) -> None:
    pytest.importorskip(TARGETS[to].packages[0].replace("-", "_"), reason=f"the extra {to} is not installed")


TARGETS = {"coreml": apple.CORE_ML, "coreai": apple.CORE_AI}


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("abs", {"x": X}, T.abs()),
        ("add", {"x": X, "y": W}, T + T[0]),
        ("cast", {"x": X, "dtype": "int32"}, T.int()),
        ("cast", {"x": X, "dtype": "fp16"}, T.half()),
        ("concat", {"values": [X, X], "axis": np.int32(1), "interleave": False}, torch.cat([T, T], 1)),
        ("concat", {"values": [np.int32(1), np.array([4])], "axis": 0, "interleave": False}, torch.tensor([1, 4])),
        ("cumsum", {"x": X, "axis": 1, "exclusive": False, "reverse": False}, T.cumsum(1)),
        ("expand_dims", {"x": X, "axes": [1, 2]}, T[:, None, None]),
        ("fill", {"shape": [2, 1], "value": 3.0}, torch.full((2, 1), 3.0)),
        ("gather", {"x": W, "indices": np.array([[2, 0]]), "axis": 0, "batch_dims": 0}, T[0][torch.tensor([[2, 0]])]),
        ("gather_along_axis", {"x": W, "indices": np.array([[1], [0], [3]]), "axis": 1},
         T[0].gather(1, torch.tensor([[1], [0], [3]]))),
        ("gelu", {"x": X, "mode": "EXACT"}, functional.gelu(T)),
        ("gelu", {"x": X, "mode": "TANH_APPROXIMATION"}, functional.gelu(T, approximate="tanh")),
        ("gelu", {"x": X, "mode": "SIGMOID_APPROXIMATION"}, T * torch.sigmoid(1.702 * T)),
        ("layer_norm", {"x": X, "axes": [-1], "gamma": W[0], "beta": W[1], "epsilon": 1e-5},
         functional.layer_norm(T, (4,), T[0, 0], T[0, 1], 1e-5)),
        ("layer_norm", {"x": X, "axes": [-1], "epsilon": 1e-5}, functional.layer_norm(T, (4,))),
        ("linear", {"x": X, "weight": W, "bias": B}, functional.linear(T, T[0], T[0, :, 0])),
        ("matmul", {"x": X, "y": X, "transpose_x": False, "transpose_y": True}, T @ T.mT),
        ("matmul", {"x": X, "y": X, "transpose_x": True}, T.mT @ T),
        ("pad", {"x": X, "pad": [0, 0, 1, 2], "mode": "constant", "constant_val": 0.5},
         functional.pad(T, (1, 2), value=0.5)),
        ("clip", {"x": X, "alpha": -0.5, "beta": 0.5}, T.clamp(-0.5, 0.5)),
        *((name, {"x": X, "y": W}, getattr(torch, of)(T, T[0])) for name, of in BINARY.items()),
        ("logical_and", {"x": X > 0, "y": W > 0}, (T > 0) & (T[0] > 0)),
        ("cos", {"x": X}, T.cos()),
        ("sin", {"x": X}, T.sin()),
        ("one_hot", {"indices": np.array([2, 0]), "one_hot_vector_size": 3, "axis": -1, "on_value": 1, "off_value": 0},
         functional.one_hot(torch.tensor([2, 0]), 3)),
        ("one_hot", {"indices": np.array([2, 0]), "one_hot_vector_size": 3, "axis": 0, "on_value": 1, "off_value": 0},
         functional.one_hot(torch.tensor([2, 0]), 3).T),
        ("range_1d", {"start": np.int32(1), "end": np.int32(7), "step": np.int32(2)}, torch.arange(1, 7, 2)),
        ("relu", {"x": X}, T.relu()),
        ("reshape", {"x": X, "shape": np.array([0, -1])}, T.reshape(2, 12)),
        ("select", {"cond": X > 0, "a": X, "b": np.float32(0)}, T.relu()),
        ("shape", {"x": X}, torch.tensor([2, 3, 4])),
        ("sigmoid", {"x": X}, T.sigmoid()),
        ("slice_by_index", {"x": X, "begin": [0, 1, 1], "end": [2, 3, 3]}, T[0:2, 1:3, 1:3]),
        ("slice_by_index", {"x": X, "begin": FULL, "end": FULL, "stride": [1, 1, 2], "begin_mask": [True] * 3,
                            "end_mask": [True] * 3, "squeeze_mask": [False, True, False]}, T[:, 0, ::2]),
        ("softmax", {"x": X, "axis": -1}, T.softmax(-1)),
        ("split", {"x": X, "axis": 2, "num_splits": 2}, T.split(2, 2)),
        ("split", {"x": X, "axis": 2, "split_sizes": np.array([1, 3])}, T.split([1, 3], 2)),
        ("squeeze", {"x": X[:, :1], "axes": [1]}, T[:, 0]),
        ("tanh", {"x": X}, T.tanh()),
        ("tile", {"x": W, "reps": [2, 1]}, T[0].tile(2, 1)),
        ("transpose", {"x": X, "perm": [0, 2, 1]}, T.mT),
    ],
)  # fmt: skip
def test_operators_are_torchs(name: str, given: Any, expected: Any) -> None:
    compare(MIL_OPERATORS[name](**given), expected)


def compare(made: Any, expected: Any) -> None:
    made, expected = ((each,) if not isinstance(each, (tuple, list)) else each for each in (made, expected))
    assert len(made) == len(expected)
    for one, other in zip(made, expected, strict=True):
        assert np.shape(one) == tuple(other.shape)
        np.testing.assert_allclose(one, other.numpy(), rtol=1e-5, atol=1e-6)


def at(*numbers: int) -> Any:
    return np.array(numbers, np.int32)


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("argmax", [X, at(2)[0]], T.argmax(2, keepdim=True)),
        ("blockwise_shift_scale", [X[0], W[:, :1], W[:, 1:2], W[:, 2:3]],
         T[0, :, :1] * (T[0] - T[0, :, 1:2]) + T[0, :, 2:3]),
        ("broadcast_in_dims", [X[:, :1], at(3), at(1)], T[:, :1].expand(2, 3, 4)),
        *((f"broadcasting_{name}", [X, W], getattr(torch, of)(T, T[0])) for name, of in SAME.items()),
        ("broadcasting_batch_matmul", [X, X.swapaxes(1, 2)], T @ T.mT),
        ("broadcasting_bitwise_and", [X > 0, W > 0], (T > 0) & (T[0] > 0)),
        ("broadcasting_pow", [np.abs(X), np.float32(3)], T.abs() ** 3),
        ("broadcasting_where", [X > 0, X, np.float32(0)], T.relu()),
        ("cast", [X], T),
        ("concat", [at(1)[0], X, X], torch.cat([T, T], 1)),
        ("gather_along_axis", [W, at(1, 0, 3)[:, None], at(1)[0]], T[0].gather(1, torch.tensor([[1], [0], [3]]))),
        ("gather_nd", [W, at(2, 0)[:, None]], T[0][torch.tensor([2, 0])]),
        ("gelu", [X, "#coreai.approximate<none>"], functional.gelu(T)),
        ("gelu", [X, "#coreai.approximate<tanh>"], functional.gelu(T, approximate="tanh")),
        ("log", [np.abs(X)], T.abs().log()),
        ("lut_to_dense", [np.array([[2, 0, 3]], np.uint8), W.reshape(-1)[:4].reshape(1, 1, 4, 1), np.int16(0)],
         T[0].flatten()[torch.tensor([[2, 0, 3]])]),
        ("not", [X > 0], ~(T > 0)),
        ("pad", [X, at(0, 0, 1, 0, 0, 2), np.float32(0.5), "<constant>"], functional.pad(T, (0, 2, 1, 0), value=0.5)),
        ("reduce_mean", [X, at(2)], T.mean(2, keepdim=True)),
        ("relu", [X], T.relu()),
        ("reshape", [X, at(2, 12)], T.reshape(2, 12)),
        ("rsqrt", [np.abs(X)], T.abs().rsqrt()),
        ("scan", [X, at(1)[0], np.array(False), "0 : i32"], T.cumsum(1)),
        ("silu", [X], functional.silu(T)),
        ("slice", [X, at(0, 1, -3), at(2, 2**31 - 1, -1), at(1, 1, 2)], T[:, 1:, -3:-1:2]),
        ("softmax", [X, at(2)[0]], T.softmax(2)),
        ("split", [X, at(1, 3), at(2)[0]], T.split([1, 3], 2)),
        ("sqrt", [np.abs(X)], T.abs().sqrt()),
        ("tanh", [X], T.tanh()),
        ("transpose", [X, at(0, 2, 1)], T.mT),
    ],
)  # fmt: skip
def test_operators_of_core_ai_are_torchs(name: str, given: Any, expected: Any) -> None:
    compare(aimodel.CORE_AI_OPERATORS[name](*given), expected)


@pytest.fixture
def converters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let converters count as installed."""
    monkeypatch.setattr("compress.exporters.export.find_missing", lambda extra: "")


@pytest.mark.usefixtures("converters")
def test_a_family_that_reads_its_last_token_is_refused(tmp_path: Path) -> None:
    source = bundle(tmp_path / "bundle", tiny.model("xlnet", labels=2))
    with pytest.raises(ExportError, match="xlnet reads its answer off the last token"):
        commands.export(str(source.path), tmp_path / "out", to="coreml")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("test", "operators"),
    [(test_operators_are_torchs, MIL_OPERATORS), (test_operators_of_core_ai_are_torchs, aimodel.CORE_AI_OPERATORS)],
)
def test_every_operator_is_compared_with_torchs(test: Any, operators: Any) -> None:
    (cases,) = test.pytestmark  # pytest puts it there
    assert {name for name, *_ in cases.args[1]} == set(operators)


@pytest.mark.parametrize(("bits", "stored"), [(4, "1032"), (6, "81f03f")])
def test_numbers_without_gaps_are_read(bits: int, stored: str) -> None:
    numbers = {4: [0, 1, 2, 3], 6: [1, 2, 63, 15]}[bits]
    assert aimodel._unpack_bits(bytes.fromhex(stored), bits).ravel().tolist() == numbers


@pytest.mark.usefixtures("converters")
@pytest.mark.parametrize(("seq", "wrong"), [("1", 1), ("20,4000", 4000)])
def test_lengths_that_the_model_cannot_read(seq: str, wrong: int, written: Path, tmp_path: Path) -> None:
    before = names(written)
    result = command.run("export", str(written), "--for", "coreml", "--seq", seq, "--out", str(tmp_path / "out"))
    assert result.code == 2
    assert f"--seq {wrong}: {written} reads 2 to 64 tokens" in result.err
    assert (names(written), (tmp_path / "out").exists()) == (before, False)


def relative(made: ExportResult) -> dict[str, float]:
    return {each.precision: each.difference.relative for each in made.files if each.difference is not None}


@pytest.mark.slow
@pytest.mark.parametrize("to", TARGETS)
def test_files_answer_as_the_bundle_does(to: str, written: Path, tmp_path: Path) -> None:
    needs(to)
    target, options = TARGETS[to], ("--precision", ",".join(TARGETS[to].files), "--out", str(tmp_path / "out"))
    result = command.run("export", str(written), "--for", to, *options)
    assert result.code == 0, result.err
    assert names(tmp_path / "out") == {
        *BESIDE,
        *(f"{file}/{part}" for file in target.files.values() for part in target.inside),
    }
    record = json.loads((tmp_path / "out" / "export.json").read_text())
    apart = {each["precision"]: each["difference"] for each in record["files"] if "difference" in each}
    assert apart["fp32"]["largest"] < 1e-5 * apart["fp32"]["logit"]
    assert 0 < apart["fp16"]["largest"] < 0.02 * apart["fp16"]["logit"]
    assert apart["fp16"]["largest"] < apart["w8"]["largest"] < 0.1 * apart["w8"]["logit"]
    sizes = {
        precision: sum(path.stat().st_size for path in (tmp_path / "out" / file).rglob("*") if path.is_file())
        for precision, file in target.files.items()
    }
    assert sizes["w8"] < 0.9 * sizes["fp16"] < 0.7 * sizes["fp32"]
    assert apart["fp16"]["largest"] < apart["p6"]["largest"] < 0.3 * apart["p6"]["logit"]
    assert apart["p6"]["largest"] < apart["p4"]["largest"]
    assert sizes["p4"] < sizes["p6"] < sizes["fp16"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"shape: [1, {LENGTH}]" in card
    assert re.search(r'"token_type_ids": (try )?row\(\[0, 0', card)
    assert record["inputs"][0] == {"name": "input_ids", "type": "int32", "shape": [1, LENGTH]}
    assert record["labels"] == ["negative", "positive"] and '["negative", "positive"]' in card
    assert "the files were not run here" in card
    file = tmp_path / "out" / target.files["fp32"]
    program = target.read(file)
    if to == "coreml":
        labels = program.spec.description.metadata.userDefined["compress.labels"]
    else:
        labels = json.loads((file / "metadata.json").read_text())["creatorDefinedMetadata"]["compress.labels"]
    assert json.loads(labels) == ["negative", "positive"]
    row = {name: np.asarray([value], np.int32) for name, value in tiny.tokenizer()("a good film").items()}
    padded = {name: np.pad(value, ((0, 0), (0, LENGTH - value.shape[1]))) for name, value in row.items()}
    (found,) = program(padded)
    expected = Bundle.load(written).logits([tiny.tokenizer()("a good film")], precision="fp32")
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize(
    ("model", "task"),
    [
        (lambda: tiny.model("distilbert", head=AutoModelForTokenClassification, labels=3), TAGGING),
        (lambda: tiny.model("electra", head=AutoModelForQuestionAnswering, labels=2), QA),
        (lambda: tiny.model("mobilebert", labels=2, hidden=64), tiny.SENTIMENT),
    ],
)
def test_several_lengths_of_one_file(to: str, model: Callable[[], Any], task: Any, tmp_path: Path) -> None:
    needs(to)
    source, fixed = bundle(tmp_path / "bundle", model(), task), FixedOptions((LENGTH, 16))
    made = commands.export(str(source.path), tmp_path / "out", to=to, precisions=("fp32",), fixed=fixed)
    assert relative(made)["fp32"] < 1e-4
    assert made.verdicts[0].startswith({"coreml": "for iOS 18 or macOS 15", "coreai": "for iOS 27 or macOS 27"}[to])
    program = TARGETS[to].read(tmp_path / "out" / TARGETS[to].files["fp32"])
    if to == "coreml":
        (first, *_) = program.spec.description.input
        shapes = [list(each.shape) for each in first.type.multiArrayType.enumeratedShapes.shapes]
    else:
        shapes = [list(inputs["input_ids"][0]) for inputs in program.functions.values()]
    assert sorted(shapes) == [[1, 16], [1, LENGTH]]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deberta", "deberta-v2", "modernbert", "roberta"])
def test_core_ai_takes_more_families(family: str, tmp_path: Path) -> None:
    needs("coreai")
    far = {"max_relative_positions": LENGTH} if family == "deberta" else {}
    source = bundle(tmp_path / "bundle", tiny.model(family, labels=2, **far))
    made = commands.export(str(source.path), tmp_path / "out", to="coreai", precisions=("fp32", "fp16"))
    assert relative(made)["fp32"] < 1e-5
    assert relative(made)["fp16"] < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("to", TARGETS)
def test_the_interface_of_a_file_is_checked(
    to: str, written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(to)
    compare = apple._compare
    monkeypatch.setattr(apple, "_compare", lambda package, found, wanted: compare(package, found, (wanted[0], ["x"])))
    with pytest.raises(ExportError, match="wrote a file that reads"):
        commands.export(str(written), tmp_path / "out", to=to)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("to", "module"), [("coreml", mil), ("coreai", aimodel)])
def test_unknown_operators_of_a_file_are_named(
    to: str, module: Any, written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(to)
    monkeypatch.delitem(module.OPERATORS, "gelu")
    with pytest.raises(ExportError, match="gelu cannot be computed outside of Core"):
        commands.export(str(written), tmp_path / "out", to=to)
