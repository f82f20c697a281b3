"""Files for NPUs: static QDQ graphs without operators that a neural processor has not, with fp32's answers."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper
from transformers import AutoModelForQuestionAnswering, AutoModelForTokenClassification

from compress.benchmark import htp
from compress.commands import export as commands
from compress.errors import ExportError
from compress.exporters import npu
from compress.exporters.artifact import Bundle
from compress.exporters.onnx import to_onnx
from compress.exporters.predictor import run_rows
from compress.exporters.session import open_session, read_model
from compress.exporters.writers.context import ExportResult, FixedOptions
from compress.quantization.calibration import iterate_activations
from compress.quantization.npu import Planner, find_blocks
from compress.quantization.select import Way
from compress.records.latency import DeviceError
from tests import command, tiny
from tests.exporters.test_formats import BESIDE, bundle, names

TEXTS = ("a good film", "this story was never fun !", "a very very very sad and dull plot , but the actor was so warm")
FAMILIES = ("bert", "distilbert", "roberta", "electra", "albert", "mobilebert")
FORBIDDEN = {"MatMulInteger", "ConvInteger", "DynamicQuantizeLinear", "Erf", "Shape", "ConstantOfShape", "Where"}
LENGTHS = (24, 32)


@pytest.fixture(autouse=True)
def no_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the machine has decides nothing but in the test of the emulator."""
    monkeypatch.setattr(htp, "find_emulator", lambda: "")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundle(tmp_path_factory.mktemp("written") / "bundle").path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.reviews(tmp_path_factory.mktemp("data") / "reviews")


@pytest.fixture(scope="module")
def made(written: Path, data: str, tmp_path_factory: pytest.TempPathFactory) -> ExportResult:
    """Both precisions at both lengths."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(htp, "find_emulator", lambda: "")
        return commands.export(
            str(written), tmp_path_factory.mktemp("made") / "npu", to="npu", precisions=("w8a16", "w8a8"), data=data,
            fixed=FixedOptions(LENGTHS, max_drop=1.0),
        )  # fmt: skip


def test_every_number_is_quantised_and_every_size_is_known(made: ExportResult) -> None:
    files = {f"model_{precision}_{length}.onnx" for precision in ("w8a16", "w8a8") for length in LENGTHS}
    assert names(made.path) == files | BESIDE
    for file in sorted(files):
        model = read_model(made.path / file)
        length = int(file.rpartition("_")[2].removesuffix(".onnx"))
        for value in model.graph.input:
            assert value.type.tensor_type.elem_type == TensorProto.INT32
            assert [size.dim_value for size in value.type.tensor_type.shape.dim] == [1, length]
        assert all(size.dim_value for value in model.graph.output for size in value.type.tensor_type.shape.dim)
        assert next(each.version for each in model.opset_import if not each.domain) == 17
        operators = {node.op_type for node in model.graph.node}
        assert not operators & FORBIDDEN
        made_by = {name: node.op_type for node in model.graph.node for name in node.output}
        for node in model.graph.node:
            if node.op_type in ("MatMul", "Gemm", "Add", "LayerNormalization", "Softmax", "Gelu", "Tanh"):
                assert {made_by[name] for name in node.input} == {"DequantizeLinear"}, node.name
        for kind, bits in (("QuantizeLinear", 16 if "w8a16" in file else 8), ("MatMul", 8)):
            assert widths(model, kind) <= {8, bits}, "tables are uint8 in every file"
            assert bits in widths(model, kind)


def widths(model: onnx.ModelProto, kind: str) -> set[int]:
    """The bits that activations are quantised to; of products, those of their weights."""
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    if kind == "QuantizeLinear":
        zeros = [tensors[node.input[2]] for node in model.graph.node if node.op_type == kind]
    else:
        wide = {node.output[0]: node.input[0] for node in model.graph.node if node.input[0] in tensors}
        zeros = [
            tensors[wide[name]]
            for node in model.graph.node
            for name in node.input
            if node.op_type == kind and name in wide
        ]
    return {8 * numpy_helper.to_array(zero).dtype.itemsize for zero in zeros}


def test_no_mask_takes_the_range_of_the_scores(made: ExportResult) -> None:
    model = read_model(made.path / "model_w8a16_32.onnx")
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    steps = {
        node.input[0]: (float(tensors[node.input[1]]), tensors[node.input[2]].dtype)
        for node in model.graph.node
        if node.op_type == "QuantizeLinear"
    }
    ranges = [step * np.iinfo(kind).max for step, kind in steps.values()]
    assert len(ranges) > 50
    assert max(ranges) < 200


@pytest.mark.parametrize(("precision", "limit"), [("w8a16", 0.05), ("w8a8", 0.3)])
def test_logits_are_near_fp32_at_any_length(made: ExportResult, written: Path, precision: str, limit: float) -> None:
    rows = [tiny.tokenizer()(text) for text in TEXTS]
    exact = Bundle.load(written).logits(rows, precision="fp32")
    found = [answers(made.path / f"model_{precision}_{length}.onnx", rows) for length in LENGTHS]
    for one in found:
        assert abs(one - exact).max() < limit * abs(exact).max()
    assert abs(found[0] - found[1]).max() < 0.2 * limit * abs(exact).max()


def answers(file: Path, rows: Sequence[Any]) -> Any:
    return np.stack([outputs[0] for outputs in run_rows(open_session(file), rows, threads=1)])


def test_the_record_holds_a_certificate_of_each_place(made: ExportResult) -> None:
    record = json.loads((made.path / "export.json").read_text())
    files = {each["file"]: each for each in record["files"]}
    for file, entry in files.items():
        exact, cpu = entry["certificates"]
        assert exact["method"].startswith("fp32, ")
        assert exact["before"] == exact["after"]
        assert exact["agreement"] == 1.0
        assert exact["max_logit_difference"] < 1e-4
        assert cpu["artefact"] == file
        assert cpu["method"].startswith(entry["precision"])
        assert 0 < cpu["max_logit_difference"] < 1.0
        assert (cpu["rows"], cpu["split"], cpu["certified"]) == (40, "validation", True)
    assert any("not run on the HTP emulator" in warning and "onnxruntime-qnn" in warning for warning in made.warnings)
    assert any("no latency is reported" in verdict for verdict in made.verdicts)
    own = json.loads(
        {e.key: e.value for e in read_model(made.path / "model_w8a8_32.onnx").metadata_props}["compress.certificate"]
    )
    assert own == files["model_w8a8_32.onnx"]["certificates"][1], "the CPU's, whatever else was asked"


def quantised(folder: Path, model: Any, tokens: int = 16) -> tuple[Path, Path]:
    """The float file of a fixed length and the same in w8a16, calibrated on random rows."""
    to_onnx(model, folder / "traced.onnx", form=npu.FORM)
    npu.prepare(folder / "traced.onnx", folder / "open.onnx")
    exact = read_model(folder / "open.onnx")
    ranges: dict[str, tuple[float, float]] = {}
    for values in iterate_activations(folder / "open.onnx", npu.activations(folder / "open.onnx"), rows()):
        for name, value in values.items():
            low, high = ranges.get(name, (0.0, 0.0))
            ranges[name] = (min(low, float(value.min())), max(high, float(value.max())))
    held = npu.bound_mask(exact, ranges, *npu.find_mask(exact))
    onnx.save_model(exact, folder / "bounded.onnx")
    npu.fix(folder / "bounded.onnx", folder / "fixed.onnx", tokens)
    npu.quantize(folder / "fixed.onnx", folder / "w8a16.onnx", held, precision="w8a16")
    return folder / "fixed.onnx", folder / "w8a16.onnx"


def rows() -> list[dict[str, list[int]]]:
    draw = np.random.default_rng(0)
    found = [draw.integers(5, 40, length).tolist() for length in (*range(3, 17), *range(3, 17))]
    return [
        {"input_ids": ids, "attention_mask": [1] * len(ids), "token_type_ids": [n % 2 for n in range(len(ids))]}
        for ids in found
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tmp_path: Path) -> None:
    model = tiny.model(family)
    exact, small = quantised(tmp_path, model)
    to_onnx(model, tmp_path / "plain.onnx")
    expected, fixed, found = (answers(each, rows()) for each in (tmp_path / "plain.onnx", exact, small))
    assert abs(fixed - expected).max() < 1e-4 * max(1.0, abs(expected).max()), "the bounded mask hides as much"
    assert abs(found - expected).max() < 0.15 * max(1.0, abs(expected).max())
    assert not {node.op_type for node in read_model(small).graph.node} & FORBIDDEN


@pytest.mark.parametrize("head", [AutoModelForTokenClassification, AutoModelForQuestionAnswering])
def test_answers_for_tokens_are_those_of_the_text_alone(head: Any, tmp_path: Path) -> None:
    model = tiny.model("bert", head=head, labels=2 if head is AutoModelForQuestionAnswering else 3)
    exact, small = quantised(tmp_path, model)
    to_onnx(model, tmp_path / "plain.onnx")
    for row in rows():
        (expected,), (fixed,), (found,) = (
            run_rows(open_session(each), [row], threads=1) for each in (tmp_path / "plain.onnx", exact, small)
        )
        assert [each.shape for each in found] == [each.shape for each in expected]
        assert all(abs(one - two).max() < 1e-3 for one, two in zip(fixed, expected, strict=True))
        assert all(abs(one - two).max() < 0.15 * abs(two).max() for one, two in zip(found, expected, strict=True))


def test_blocks_hold_every_operator_once(tmp_path: Path) -> None:
    exact, _ = quantised(tmp_path, tiny.model("bert", layers=2))
    blocks = find_blocks(exact)
    nodes = [name for block in blocks for name in block.nodes]
    assert sorted(nodes) == sorted(node.name for node in read_model(exact).graph.node)
    assert len(blocks) == len({block.name for block in blocks}) == 8, "a cut at each of 2 softmaxes and 5 norms"


def test_the_blocks_that_w8a8_keeps_have_16_bits(
    written: Path, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keep(planner: Planner, way: Way, _: float) -> SimpleNamespace:
        blocks = [block.name for block in find_blocks(planner.fix(way, planner.length)[0])]
        return SimpleNamespace(keep=tuple(blocks[:1]), products=len(blocks))

    monkeypatch.setattr(Planner, "mix", keep)
    made = commands.export(
        str(written), tmp_path / "npu", to="npu", precisions=("w8a8",), data=data,
        fixed=FixedOptions((24,), max_drop=1.0),
    )  # fmt: skip
    assert widths(read_model(made.path / "model_w8a8_24.onnx"), "QuantizeLinear") == {8, 16}
    assert len(made.files[0].proofs[1].kept) == 1


REFUSED = {
    "--seq 4": "--seq 4: expected 8 to 64, the model's positions",
    "--seq 24,65": "--seq 65: expected 8 to 64, the model's positions",
    "--seq many": "--seq many",
    "--opset 18": "--opset: files for NPUs are of opset 17",
    "--precision int8": "--for npu writes w8a16, w8a8",
    "--threads 2": "--threads: only applies to a race",
}


@pytest.mark.parametrize("words", REFUSED)
def test_unsupported_options_are_refused(written: Path, data: str, tmp_path: Path, words: str) -> None:
    out = str(tmp_path / "out")
    result = command.run("export", str(written), "--for", "npu", "--data", data, "--out", out, *words.split())
    assert command.refused(result, tmp_path, REFUSED[words])
    assert list(tmp_path.iterdir()) == []


def test_data_are_needed_and_enough_of_them(written: Path, tmp_path: Path) -> None:
    words = ["export", str(written), "--for", "npu", "--out", str(tmp_path / "out")]
    assert command.refused(command.run(*words), tmp_path, "expected a bundle, and --data")
    few = tiny.reviews(tmp_path / "few", train=15)
    result = command.run(*words, "--data", few)
    assert result.code == 2
    assert "the train split has 15 rows to calibrate on; expected at least 16" in " ".join(result.err.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ["modernbert", "deberta-v2"])
def test_families_with_other_masks_are_refused(family: str, data: str, tmp_path: Path) -> None:
    path = bundle(tmp_path / "bundle", tiny.model(family, labels=2)).path
    with pytest.raises(ExportError, match=f"{family} hides padding in another way"):
        commands.export(str(path), tmp_path / "out", to="npu", data=data)
    assert not (tmp_path / "out").exists()
    Bundle.load(path)


def test_a_family_that_reads_its_last_token_is_refused(data: str, tmp_path: Path) -> None:
    path = bundle(tmp_path / "bundle", tiny.model("llama", labels=2)).path
    with pytest.raises(ExportError, match="llama reads its answer off the last token"):
        commands.export(str(path), tmp_path / "out", to="npu", data=data)
    assert not (tmp_path / "out").exists()


def test_a_failing_emulator_is_a_warning(
    written: Path, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(htp, "find_emulator", lambda: str(tmp_path / "no" / "python"))
    made = commands.export(str(written), tmp_path / "npu", to="npu", data=data, fixed=FixedOptions((24,)))
    assert names(tmp_path / "npu") == {"model_w8a16_24.onnx", *BESIDE}
    assert len(made.files[0].proofs) == 2
    assert any("cannot be started" in warning and htp.PYTHON in warning for warning in made.warnings)


def test_the_stderr_of_a_dead_emulator_is_reported(made: ExportResult, tmp_path: Path) -> None:
    dying = tmp_path / "python"
    dying.write_text("#!/bin/sh\necho first >&2\necho 'no HTP here' >&2\nexit 7\n")
    dying.chmod(0o755)
    with pytest.raises(DeviceError, match="no HTP here"):
        htp.emulate(str(dying), made.path / "model_w8a16_24.onnx", rows()[:1])


def test_the_emulator_takes_every_node_and_answers_as_the_cpu_does(
    made: ExportResult, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    python = htp.find_emulator()
    if not python:
        pytest.skip("the extra npu is not installed, and COMPRESS_NPU_PYTHON names no Python that has it")
    encoded = [tiny.tokenizer()(text) for text in TEXTS]
    for precision, limit in (("w8a16", 0.02), ("w8a8", 0.15)):
        file = made.path / f"model_{precision}_24.onnx"
        found = htp.emulate(python, file, encoded)
        assert found.left == ()
        assert found.context_bytes > 10_000
        assert "onnxruntime-qnn" in found.runtime
        here = answers(file, encoded)
        assert abs(np.stack([each[0] for each in found.answers]) - here).max() < limit * abs(here).max()
