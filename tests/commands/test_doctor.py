"""`compress doctor`: what is missing is named with what brings it, and nothing that is broken breaks it."""

import http.server
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

import compress
from compress import provenance
from compress.benchmark import probe
from compress.commands import doctor
from compress.provenance import DISTRIBUTION
from compress.records.diagnosis import DIAGNOSIS_SCHEMA, Check, Diagnosis
from tests import command

PROBED = {
    **{name: {"package": name, "seconds": 0.1} for name in doctor.LOADED},
    "gpu": {"gpu": ""},
    "fp32": {"product": "fp32", "gflops": {"1": 40.0, "2": 75.5}},
}


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "probe_packages", lambda: PROBED)


def checks(found: Diagnosis) -> dict[str, Check]:
    return {each.name: each for each in found.checks}


def test_every_extra_has_a_purpose() -> None:
    extras = set(metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or ())
    assert set(doctor.EXTRAS) == extras - {"dev"}


@pytest.mark.usefixtures("probed")
def test_a_complete_machine() -> None:
    result = command.run("doctor", "--json")
    assert result.code == 0
    found = json.loads(result.out)
    assert (found["schema"], found["ok"]) == (DIAGNOSIS_SCHEMA, True)
    names = [each["name"] for each in found["checks"]]
    assert len(names) == len(set(names))
    assert {"python", "memory", "disk", "cache", "torch", "demo", "hub", "adb", "fp32 products"} <= set(names)
    (product,) = [each for each in found["checks"] if each["name"] == "fp32 products"]
    assert product["values"] == {"gflops_1_threads": 40.0, "gflops_2_threads": 75.5}


@pytest.mark.usefixtures("probed")
def test_a_missing_or_old_base_package_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "onnx":
            raise metadata.PackageNotFoundError(name)
        return "1.0" if name == "torch" else metadata.version(name)

    monkeypatch.setattr(provenance, "version", version)
    result = command.run("doctor")
    assert result.code == 1
    assert re.search(r"pip install 'onnx>=[\d.]+'", result.out)
    assert "lacks: onnx, torch." in result.out
    states = {name: each.state for name, each in checks(compress.doctor()).items()}
    assert (states["onnx"], states["torch"], states["numpy"]) == ("missing", "broken", "ok")


@pytest.mark.usefixtures("probed")
def test_a_missing_extra_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "segno":
            raise metadata.PackageNotFoundError(name)
        return metadata.version(name)

    monkeypatch.setattr(provenance, "version", version)
    found = compress.doctor()
    assert found.ok
    lan = checks(found)["lan"]
    assert (lan.state, lan.remedy) == ("missing", "pip install 'segno>=1.6'")


@pytest.mark.usefixtures("probed")
def test_an_unwritable_cache_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("COMPRESS_HOME", str(tmp_path / "file" / "home"))
    assert [each.name for each in compress.doctor().faults] == ["cache"]


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules a new interpreter finds."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_packages_that_crash_on_import_are_named(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (modules / "deadly.py").write_text("import os; os._exit(7)", encoding="utf-8")
    (modules / "faulty.py").write_text("raise RuntimeError('no such symbol')", encoding="utf-8")
    monkeypatch.setattr(doctor, "LOADED", ("json", "faulty", "absent_module", "deadly", "csv"))
    found = doctor.probe_packages()
    assert found.keys() == {"json", "faulty", "absent_module", "deadly"}
    assert "error" not in found["json"]
    assert found["faulty"]["error"] == "RuntimeError: no such symbol"
    assert "ModuleNotFoundError" in found["absent_module"]["error"]
    assert found["deadly"]["error"] == "exits with code 7"


def test_a_package_that_hangs_on_import(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (modules / "endless.py").write_text("import time; time.sleep(60)", encoding="utf-8")
    monkeypatch.setattr(doctor, "LOADED", ("endless",))
    monkeypatch.setattr(doctor, "DOCTOR_SECONDS", 0.5)
    assert "does not load within" in doctor.probe_packages()["endless"]["error"]


def test_matrix_products_are_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    monkeypatch.setattr(probe, "SIZE", 128)
    monkeypatch.setattr(probe, "SECONDS_PER_PROBE", 0.01)
    before = torch.get_num_threads()
    probe.main(["torch"], 2)
    torch.set_num_threads(before)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line.get("product") for line in lines] == [None, None, "fp32", "bf16"]
    assert all(speed > 0 for line in lines[2:] for speed in line["gflops"].values())
    assert lines[2]["gflops"].keys() == {"1", "2"}


def program(folder: Path, name: str, script: str) -> None:
    file = folder / name
    file.write_text(f"#!{sys.executable}\n{script}\n", encoding="utf-8")
    file.chmod(0o755)


def test_programs_may_be_missing_broken_or_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "adb", "print('Android Debug Bridge version 1.0.41')")
    program(tmp_path, "npm", "raise SystemExit(3)")
    program(tmp_path, "node", "import time; time.sleep(60)")
    program(tmp_path, "apt-get", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor, "TOOL_SECONDS", 1.0)
    found = {name: doctor.check_tool(name, tool) for name, tool in doctor.TOOLS.items()}
    assert found["adb"].found.startswith("Android Debug Bridge version 1.0.41")
    assert {name: each.state for name, each in found.items()} == {
        "adb": "ok", "npm": "broken", "node": "broken", "browser": "missing", "ssh": "missing",
    }  # fmt: skip
    assert found["browser"].remedy == "sudo apt-get install chromium"


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.delenv("HF_HUB_OFFLINE")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_hub_that_answers(answering: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", answering)
    assert doctor.check_hub() == Check("tools", "hub", "ok", f"{answering} answers", doctor._HUB)


@pytest.mark.usefixtures("probed")
def test_a_hub_that_is_silent_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(doctor, "TOOLS", {})
    monkeypatch.setattr(doctor, "TOOL_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        begin = time.monotonic()
        found = compress.doctor()
        assert time.monotonic() - begin < 4
    assert checks(found)["hub"].state == "missing"
    assert found.ok


def test_a_hub_that_is_not_to_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert doctor.check_hub().remedy == "unset HF_HUB_OFFLINE"


def test_the_hub_cache_is_where_the_hub_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HF_HUB_CACHE and XDG_CACHE_HOME move it as HF_HOME does."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "blob").write_bytes(bytes(1000))
    (found,) = (each for each in doctor.check_caches() if each.name == "hub cache")
    assert found.values == {"bytes": 1000}
    assert str(tmp_path) in found.found
