"""The race measures what it says, and never leaves a process behind."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from compress.bench import local, runner
from compress.bench.local import machine, race
from compress.bench.protocol import DeviceError, Setting
from compress.errors import ExportError
from compress.export.int8 import quantize_dynamic
from compress.export.onnx import to_onnx
from tests import tiny

QUICK = {"rounds": 3, "runs": 5}


def workers() -> list[str]:
    children = psutil.Process().children(recursive=True)
    living = [child.cmdline() for child in children if child.status() != psutil.STATUS_ZOMBIE]
    return [" ".join(words) for words in living if str(runner.__file__) in words]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """shallow.onnx has 1 layer, deep.onnx 4, wide enough that arithmetic decides; small.onnx is int8."""
    folder = tmp_path_factory.mktemp("race")
    for name, layers in (("shallow", 1), ("deep", 4)):
        to_onnx(tiny.bert(layers=layers, hidden=128), folder / f"{name}.onnx")
    quantize_dynamic(folder / "shallow.onnx", folder / "small.onnx")
    return folder


def test_race_orders_files_and_settings_sanely(folder: Path) -> None:
    settings = [Setting(1, 1, 64), Setting(1, 4, 64)]
    files = {name: folder / f"{name}.onnx" for name in ("deep", "shallow", "small")}
    found = race(files, settings, **QUICK)
    assert [(latency.name, latency.setting) for latency in found] == [(n, s) for s in settings for n in files]
    fastest = {(latency.name, latency.setting.batch): latency.min_ms for latency in found}
    assert fastest["deep", 1] > 1.5 * fastest["shallow", 1]
    assert fastest["deep", 4] > 1.5 * fastest["deep", 1]
    for latency in found:
        assert latency.runs == 15
        assert 0 < latency.min_ms <= latency.p50_ms <= latency.p95_ms <= latency.p99_ms
        assert latency.init_ms > 0 < latency.first_ms
    assert workers() == []


def test_peak_memory_is_the_workers_own(folder: Path) -> None:
    ballast = np.ones(60_000_000)  # 480 MB here must not be seen there
    (latency,) = race({"shallow": folder / "shallow.onnx"}, [Setting(1, 1, 8)], rounds=2, runs=1)
    assert ballast.nbytes / 1e6 > 400 > latency.peak_rss_mb > 20


def test_a_worker_that_dies_is_an_error_with_its_last_words(folder: Path) -> None:
    files = {"shallow": folder / "shallow.onnx", "deep": folder / "deep.onnx"}
    with pytest.raises(DeviceError, match=r"^shallow: .* code 1 at 1 threads, batch 2, 65 tokens: .*64 by 65\. Usual"):
        race(files, [Setting(1, 2, 65)], **QUICK)  # the model has 64 positions
    assert workers() == []


def test_a_killed_worker_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = local._Worker.ask

    def killing(worker: local._Worker, runs: int) -> object:
        worker.process.kill()
        return ask(worker, runs)

    monkeypatch.setattr(local._Worker, "ask", killing)
    with pytest.raises(DeviceError, match=r"ended with code -9 .*: it said nothing\. .* too little memory"):
        race({"deep": folder / "deep.onnx"}, [Setting(1, 1, 8)], **QUICK)
    assert workers() == []


def test_an_interrupt_leaves_no_worker(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(worker: local._Worker, runs: int) -> object:
        assert len(workers()) == 2
        raise KeyboardInterrupt

    monkeypatch.setattr(local._Worker, "ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        race({name: folder / f"{name}.onnx" for name in ("deep", "shallow")}, [Setting(1, 1, 8)], **QUICK)
    assert workers() == []


def test_a_worker_ends_when_its_parent_is_gone(folder: Path) -> None:
    job = {"path": str(folder / "shallow.onnx"), "vocabulary": 45, "entries": {}, "warm_up": 1}
    command = [sys.executable, str(runner.__file__), json.dumps({**job, "threads": 1, "batch": 1, "seq": 4})]
    done = subprocess.run(command, input="2\n", capture_output=True, text=True, timeout=60, check=True)
    start, answer = map(json.loads, done.stdout.splitlines())
    assert start.keys() == {"init_ms", "first_ms"}
    assert len(answer["ms"]) == 2


def test_runner_needs_onnxruntime_and_numpy_only() -> None:
    program = (
        f"import runpy, sys; runpy.run_path({str(runner.__file__)!r});"
        "print(sorted({'compress', 'onnx', 'torch', 'psutil'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_wrong_questions_are_refused(folder: Path) -> None:
    with pytest.raises(ExportError, match="no such file"):
        race({"x": folder / "absent.onnx"}, [Setting()])
    with pytest.raises(DeviceError, match="expected at least 2 rounds"):
        race({"x": folder / "deep.onnx"}, [Setting()], rounds=1)


def test_machine_says_what_it_is() -> None:
    found = machine()
    assert {"cpu", "cores", "load", "memory", "system"} <= found.keys()
    assert all(isinstance(value, str) and value for value in found.values())
