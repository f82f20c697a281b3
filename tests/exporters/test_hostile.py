"""Hostile files: an ONNX file or a bundle can neither read outside its folder nor choose harmful settings; what cannot
be opened is reported in one sentence, and leaves no partial files."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import set_external_data

from compress.benchmark.jobs import logits_job, parts
from compress.errors import BundleError, ExportError
from compress.exporters.artifact import Bundle
from compress.exporters.fp16 import to_float16
from compress.exporters.int8 import quantize_dynamic, quantize_static
from compress.exporters.manifest import Stamp
from compress.exporters.session import SESSION_KEY, open_session, read_model, session_entries, weights_elsewhere
from compress.exporters.weight_only import quantize_weights
from compress.quantization.calibration import compute_ranges
from tests import command, tiny

ROWS, WIDTH = 9, 4
VALUES = np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)
OPENERS: dict[str, Callable[[Path], object]] = {
    "read": read_model,
    "open": open_session,
    "quantise": lambda path: quantize_dynamic(path, path.parent / "made" / "small.onnx"),
    "calibrate": lambda path: compute_ranges(path, [ROW]),
    "static": lambda path: quantize_static(path, path.parent / "made" / "small.onnx", {}),
    "half": lambda path: to_float16(path, path.parent / "made" / "small.onnx", []),
    "weights": lambda path: quantize_weights(path, path.parent / "made" / "small.onnx", bits=8),
    "bench": logits_job,
    "send": parts,
}
ROW = {"input_ids": [1], "attention_mask": [1]}


def reader(folder: Path, *, domain: str = "", opset: int = 17, operator: str = "Gather") -> Path:
    """`model.onnx` in a new folder: looks ids up in a table that it holds."""
    folder.mkdir(parents=True)
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, [1, None])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, None)
    node = helper.make_node(operator, ["table", "input_ids"], ["logits"], domain=domain)
    graph = helper.make_graph([node], "graph", [ids], [logits], [numpy_helper.from_array(VALUES, "table")])
    versions = [helper.make_opsetid(name, opset if name == domain else 17) for name in {"", domain}]
    onnx.save_model(helper.make_model(graph, opset_imports=versions, ir_version=8), folder / "model.onnx")
    return folder / "model.onnx"


def pointing(path: Path, location: str, **result: int) -> Path:
    """The same file with its table kept in `location`."""
    file = onnx.load_model(path)
    (table,) = file.graph.initializer
    set_external_data(table, location, **result)
    table.ClearField("raw_data")
    path.write_bytes(file.SerializeToString())
    return path


def refused(path: Path, message: str) -> None:
    before = sorted(path.parent.rglob("*"))
    for opener in OPENERS.values():
        with pytest.raises(ExportError, match=message) as error:
            opener(path)
        assert str(error.value).startswith(str(path))
        assert "\n" not in str(error.value)
    assert [found for found in sorted(path.parent.rglob("*")) if found.name != "made"] == before


def test_weights_in_the_files_own_folder_are_read(tmp_path: Path) -> None:
    path = pointing(reader(tmp_path / "model"), "weights.bin", offset=8, length=VALUES.nbytes)
    (path.parent / "weights.bin").write_bytes(b"\0" * 8 + VALUES.tobytes())
    assert weights_elsewhere(path) == ["weights.bin"]
    (found,) = open_session(path).run(None, {"input_ids": np.array([[8]])})
    np.testing.assert_array_equal(found[0], VALUES[8:])
    np.testing.assert_array_equal(numpy_helper.to_array(read_model(path).graph.initializer[0]), VALUES)


@pytest.mark.parametrize("where", ["absolute", "above", "windows", "hidden above", "drive", "linked", "linked folder"])
def test_weights_outside_the_folder_are_never_read(where: str, tmp_path: Path) -> None:
    path = reader(tmp_path / "model")
    secret = tmp_path / "secret.bin"
    secret.write_bytes(VALUES.tobytes())
    location = {
        "absolute": str(secret), "above": "../secret.bin", "windows": "..\\secret.bin", "drive": "C:secret.bin",
        "hidden above": "inner/../../secret.bin", "linked": "weights.bin", "linked folder": "inner/secret.bin",
    }[where]  # fmt: skip
    if where == "linked":
        (path.parent / location).symlink_to(secret)
    elif where == "linked folder":
        (path.parent / "inner").symlink_to(tmp_path)
    refused(pointing(path, location), "outside its own folder")


@pytest.mark.parametrize(
    ("location", "result", "message"),
    [
        ("absent.bin", {}, "which is missing"),
        ("*/_ORT_MEM_ADDR_/*", {"offset": 4096, "length": 144}, "which is missing"),
        ("", {}, "outside its own folder"),
        ("weights.bin", {"offset": 0, "length": 144}, "has 100; the file is damaged"),
        ("weights.bin", {"offset": 4096}, "has 100; the file is damaged"),
        ("weights.bin", {"offset": -4}, "has 100; the file is damaged"),
    ],
)
def test_missing_weights_are_named(location: str, result: dict[str, int], message: str, tmp_path: Path) -> None:
    path = reader(tmp_path / "model")
    (path.parent / "weights.bin").write_bytes(VALUES.tobytes()[:100])
    refused(pointing(path, location, **result), message)


def test_weights_of_branches_are_looked_at_too(tmp_path: Path) -> None:
    path = pointing(reader(tmp_path / "model"), "../secret.bin")
    inner = onnx.load_model(path, load_external_data=False).graph
    outer = helper.make_graph(
        [helper.make_node("If", ["choose"], ["logits"], then_branch=inner, else_branch=inner)],
        "outer",
        [helper.make_tensor_value_info("choose", TensorProto.BOOL, [1])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, None)],
    )
    path.write_bytes(helper.make_model(outer).SerializeToString())
    refused(path, "outside its own folder")


@pytest.mark.parametrize("kept", [0, 1, 20, -40, -1])
def test_a_truncated_file_is_refused(kept: int, tmp_path: Path) -> None:
    path = reader(tmp_path / "model")
    path.write_bytes(path.read_bytes()[:kept])
    for opener in ("open", "quantise"):
        with pytest.raises(ExportError, match=r"model\.onnx: "):
            OPENERS[opener](path)
    assert sorted(found.name for found in path.parent.rglob("*") if found.is_file()) == ["model.onnx"]


@pytest.mark.parametrize("content", [b"", b"\x08\x08", bytes(range(256))])
def test_files_that_are_not_onnx_are_refused(content: bytes, tmp_path: Path) -> None:
    path = reader(tmp_path / "model")
    path.write_bytes(content)
    refused(path, "not an ONNX model")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"opset": 9999}, "is of opset 9999, and onnx"),
        ({"opset": 0}, "cannot open it"),
        ({"domain": "com.example.evil"}, r"com\.example\.evil"),
        ({"operator": "Exfiltrate"}, "Exfiltrate"),
    ],
)
def test_unknown_operators_are_named(changes: dict[str, int], message: str, tmp_path: Path) -> None:
    path = reader(tmp_path / "model", **changes)  # type: ignore[arg-type]
    with pytest.raises(ExportError, match=message):
        open_session(path)
    with pytest.raises(ExportError):
        quantize_dynamic(path, path.parent / "made" / "small.onnx")
    assert not list(path.parent.glob("made/*"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ('{"session.model_external_initializers_file_folder_path": "/etc"}', "no file may choose"),
        ('{"ep.context_file_path": "x"}', "no file may choose"),
        ('{"optimization.disable_specified_optimizers": 3}', "damaged, or not ours"),
        ("[1]", "damaged, or not ours"),
        ("{", "damaged, or not ours"),
    ],
)
def test_a_file_chooses_no_setting_but_how_to_compute(settings: str, message: str, tmp_path: Path) -> None:
    path = reader(tmp_path / "model")
    file = onnx.load_model(path)
    helper.set_model_props(file, {SESSION_KEY: settings})
    onnx.save_model(file, path)
    with pytest.raises(ExportError, match=message):
        open_session(path)
    with pytest.raises(ExportError, match=message):
        session_entries(read_model(path), path)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.bundle(tmp_path_factory.mktemp("hostile") / "bundle").path


def forged(bundle: Path, target: Path, name: str, content: bytes | None) -> Path:
    """A copy with one file changed or taken away, and a manifest that agrees: what a hostile maker would ship."""
    shutil.copytree(bundle, target)
    manifest = json.loads((target / "manifest.json").read_text())
    if content is None:
        (target / name).unlink()
        del manifest["files"][name]
    else:
        (target / name).write_bytes(content)
        stamp = Stamp.of(target / name)
        manifest["files"][name] = {"bytes": stamp.bytes, "sha256": stamp.sha256}
    (target / "manifest.json").write_text(json.dumps(manifest))
    return target


@pytest.mark.parametrize("content", [None, b"", b"{}", b'{"version": "1.0", "model": {"type": "Nothing"}}', b"\xff"])
def test_a_bundle_without_a_tokenizer_is_refused(content: bytes | None, bundle: Path, tmp_path: Path) -> None:
    changed = forged(bundle, tmp_path / "changed", "tokenizer.json", content)
    with pytest.raises(BundleError, match=r"tokenizer\.json: "):
        Bundle.load(changed).predict(["good"])


@pytest.fixture
def evil(bundle: Path, tmp_path: Path) -> Path:
    """A bundle whose files keep a weight outside it."""
    content = pointing(reader(tmp_path / "evil"), "../../secret.bin").read_bytes()
    half = forged(bundle, tmp_path / "half", "onnx/model_quantized.onnx", content)
    return forged(half, tmp_path / "whole", "onnx/model.onnx", content)


@pytest.mark.parametrize(
    "words",
    [
        ("predict", "{bundle}", "good"),
        ("bench", "{bundle}", "--seq", "8", "--rounds", "2"),
        ("quantize", "{bundle}", "--data", "{data}"),
        ("export", "{bundle}", "--precision", "fp16"),
        ("export", "{bundle}", "--out", "{out}", "--for", "web"),
        ("export", "{bundle}", "--out", "{out}", "--for", "openvino"),
    ],
)
def test_every_command_refuses_such_a_bundle(words: tuple[str, ...], evil: Path, tmp_path: Path) -> None:
    if "openvino" in words:
        pytest.importorskip("openvino", reason="comes with the extra `openvino`")
    data = tiny.reviews(tmp_path / "data")
    result = command.run(*(word.format(bundle=evil, out=tmp_path / "out", data=data) for word in words))
    assert "outside its own folder" in result.err
    assert command.refused(result, tmp_path, "nothing was read from there")
    assert not (tmp_path / "out").exists()
    Bundle.load(evil)  # as it was
