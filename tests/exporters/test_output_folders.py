"""Output folders are checked before any work is done: an export never replaces the model itself."""

from pathlib import Path

import pytest

from compress.commands import quantize as pipeline
from compress.commands.quantize import quantize
from compress.config.options import DeviceOptions
from compress.errors import BundleError, ExportError
from compress.exporters.artifact import Bundle
from compress.exporters.formats import export
from tests import command
from tests.exporters.test_formats import bundle


@pytest.fixture
def made(tmp_path: Path) -> Bundle:
    return bundle(tmp_path / "run" / "bundle")


@pytest.mark.parametrize("out", ["run/bundle", "run"])
def test_a_bundle_is_not_replaced_by_its_own_export(made: Bundle, tmp_path: Path, out: str) -> None:
    (tmp_path / "run" / "export.json").write_text("{}")
    for to in ("onnx", "web"):
        with pytest.raises(ExportError, match="contains the model itself"):
            export(made, tmp_path / out, to=to)
    assert Bundle.load(made.path) == made


def test_another_bundle_is_replaced_by_a_bundle_only(made: Bundle, tmp_path: Path) -> None:
    other = made.copy_to(tmp_path / "other")
    with pytest.raises(ExportError, match="is a bundle, which --for web does not write"):
        export(made, other.path, to="web")
    assert Bundle.load(other.path) == other
    export(made, other.path)
    assert (other.path / "export.json").is_file()


def test_quantize_refuses_an_occupied_folder_before_it_reads_data(made: Bundle, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(BundleError, match="exists and is not a bundle"):
        quantize(made, str(tmp_path / "no-data"), out=tmp_path / "mine")


@pytest.mark.parametrize("words", [("--lan",), ("--threads", "2")])
def test_options_of_a_race_are_refused_where_there_is_none(made: Bundle, words: tuple[str, ...]) -> None:
    result = command.run("export", str(made.path), *words)
    assert (result.code, result.out) == (2, "")
    assert f"{words[0]}: only applies to a race" in result.err


def test_the_interpreter_of_a_far_machine_reaches_the_device(made: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}

    def opened(device: DeviceOptions, **_: object) -> None:
        seen.update(vars(device))
        raise BundleError("seen")

    monkeypatch.setattr(Bundle, "load_data", lambda *_, **__: None)
    monkeypatch.setattr(pipeline, "open_chosen", opened)
    words = ("--device", "ssh:pi", "--python", "/venv/bin/python", "--timeout", "5")
    assert command.run("quantize", str(made.path), "--data", "absent", *words).code == 2
    assert (seen["device"], seen["python"], seen["timeout"]) == ("ssh:pi", "/venv/bin/python", 5.0)


def test_a_disk_that_openvino_finds_full_is_one_message(
    made: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    openvino = pytest.importorskip("openvino", reason="the extra openvino is not installed")

    def full(*_: object, **__: object) -> None:
        raise RuntimeError("basic_ios::clear: iostream error")

    monkeypatch.setattr(openvino, "save_model", full)
    result = command.run("export", str(made.path), "--for", "openvino", "--out", str(tmp_path / "ov"))
    assert (result.code, result.out) == (2, "")
    assert "openvino_model_fp16.xml: OpenVINO cannot write it (basic_ios::clear: iostream error)" in result.err
    assert "MB are free" in result.err
    assert not (tmp_path / "ov").exists()
