"""The race measures what it says, and never leaves a process behind."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from transformers import AutoModelForQuestionAnswering

from compress.benchmark.jobs import timing_job
from compress.benchmark.local import Link, open_local, race
from compress.benchmark.remote import agent, runner
from compress.exporters.int8 import quantize_dynamic
from compress.exporters.onnx import to_onnx
from compress.exporters.session import open_session
from compress.records.latency import DeviceError, Setting
from tests import tiny

QUICK = {"rounds": 3, "runs": 5}


def living() -> list[str]:
    """Processes of ours that measure, or keep those that do."""
    children = psutil.Process().children(recursive=True)
    words = [" ".join(child.cmdline()) for child in children if child.status() != psutil.STATUS_ZOMBIE]
    return [each for each in words if str(runner.__file__) in each or str(agent.__file__) in each]


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
        assert latency.runs in ({5, 10} if latency.noisy else {15}), "of the faster pass alone where they disagree"
        assert 0 < latency.min_ms <= latency.p50_ms <= latency.p95_ms <= latency.p99_ms
        assert latency.init_ms > 0 < latency.first_ms
    assert living() == []


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")
def test_constant_load_of_others_is_measured(folder: Path) -> None:
    cpu = min(os.sched_getaffinity(0))
    burn = f"import os\nos.sched_setaffinity(0, [{cpu}])\nprint(1, flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", burn], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        try:
            with open_local(affinity=(cpu,)) as device:
                (latency,) = device.race({"deep": folder / "deep.onnx"}, [Setting(1, 4, 64)], rounds=4, runs=10)
        finally:
            other.kill()
    assert latency.other_load is not None and 0.2 < latency.other_load < 1.1
    assert "of 1 CPUs" in latency.busy


def test_peak_memory_is_the_workers_own(folder: Path) -> None:
    ballast = np.ones(60_000_000)  # 480 MB here must not be seen there
    (latency,) = race({"shallow": folder / "shallow.onnx"}, [Setting(1, 1, 8)], rounds=2, runs=1)
    assert ballast.nbytes / 1e6 > 400 > latency.peak_rss_mb > 20


def test_a_dead_runner_is_an_error_and_the_device_goes_on(folder: Path) -> None:
    files = {"shallow": folder / "shallow.onnx", "deep": folder / "deep.onnx"}
    with open_local() as device:
        with pytest.raises(
            DeviceError, match=r"^shallow: .* code 1 at 1 thread, batch 2, 65 tokens: .*64 by 65\. Usual"
        ):
            device.race(files, [Setting(1, 2, 65)], **QUICK)  # the model has 64 positions
        assert device.race({"deep": files["deep"]}, [Setting(1, 2, 64)], **QUICK)[0].p50_ms > 0
    assert living() == []


def at_the_first_runs(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], None]) -> None:
    """Runs are asked for, and then this happens."""
    ask = Link.ask

    def asking(link: Link, body: Path | None = None, **request: Any) -> dict[str, Any]:
        if request["do"] == "ask":
            happens()
        return ask(link, body, **request)

    monkeypatch.setattr(Link, "ask", asking)


def ours(module: Any) -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if any(str(module.__file__) in word for word in child.cmdline())]


def kill(module: Any) -> None:
    for child in ours(module):
        child.kill()


def test_a_killed_runner_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_the_first_runs(monkeypatch, lambda: kill(runner))
    with pytest.raises(DeviceError, match=r"ended with code -9 .*: no output\. .* too little memory"):
        race({"deep": folder / "deep.onnx"}, [Setting(1, 1, 8)], **QUICK)
    assert living() == []


def test_a_killed_agent_is_an_error_and_takes_its_runners_along(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_the_first_runs(monkeypatch, lambda: kill(agent))
    with pytest.raises(DeviceError, match=r"^local: .* ended with code -9"):
        race({"deep": folder / "deep.onnx"}, [Setting(1, 1, 8)], **QUICK)
    assert living() == []


def test_an_interrupt_in_the_middle_of_a_run_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(link: Link) -> str:
        assert len(living()) == 3, "two runners and the agent"
        assert link.process.stdin
        link.process.stdin.flush()
        raise KeyboardInterrupt

    at_the_first_runs(monkeypatch, lambda: monkeypatch.setattr(Link, "read_line", interrupted))
    with open_local() as device, pytest.raises(KeyboardInterrupt):
        device.race({name: folder / f"{name}.onnx" for name in ("deep", "shallow")}, [Setting(1, 1, 8)], **QUICK)
    assert living() == []


def test_when_its_input_ends_an_agent_ends_in_the_middle_of_a_run(folder: Path) -> None:
    job = {**timing_job(folder / "shallow.onnx"), "path": str(folder / "shallow.onnx"), "affinity": []}
    start = {"do": "start", "name": "x", "runner": str(runner.__file__), "job": {**job, "batch": 1, "seq": 4}}
    command = [sys.executable, str(agent.__file__)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout
        process.stdin.write(json.dumps(start) + "\n")
        process.stdin.flush()
        assert process.stdout.readline().startswith(agent.READY)
        assert "init_ms" in process.stdout.readline()
        process.stdin.write(json.dumps({"do": "ask", "name": "x", "line": {"seconds": 600}}) + "\n")
        process.stdin.close()
        assert process.wait(30) == 0
    assert living() == []


def test_affinity_holds_and_cpus_that_are_not_there_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = {"shallow": folder / "shallow.onnx"}
    mine = min(os.sched_getaffinity(0))
    seen: list[list[int] | None] = []
    at_the_first_runs(monkeypatch, lambda: seen.extend(each.cpu_affinity() for each in ours(runner)))
    with open_local(affinity=(mine,)) as device:
        (latency,) = device.race(file, [Setting(1, 1, 8)], rounds=2, runs=1)
    assert seen == [[mine], [mine]], "in each pass"
    assert latency.affinity == str(mine)
    with open_local(affinity=(4095,)) as device, pytest.raises(DeviceError, match=r"CPUs \[4095\] do not exist"):
        device.race(file, [Setting(1, 1, 8)], rounds=2, runs=1)


def test_logits_are_those_of_prediction(folder: Path) -> None:
    rows = [
        {"input_ids": [2, *(5 + i % 40 for i in range(at)), 3], "attention_mask": [1] * (2 + at)}
        for at in range(1, 70, 7)
    ]
    rows = [{**row, "token_type_ids": [0] * len(row["input_ids"])} for row in rows if len(row["input_ids"]) <= 64]
    session = open_session(folder / "small.onnx", threads=1)
    names = [node.name for node in session.get_inputs()]
    expected = [session.run(None, {name: np.asarray([row[name]]) for name in names})[0][0] for row in rows]
    with open_local() as device:
        found = device.logits(folder / "small.onnx", rows)
        assert device.logits(folder / "small.onnx", []) == []
    np.testing.assert_array_equal(np.stack(found), np.stack(expected))
    assert found[0].dtype == np.float32


def test_logits_of_many_outputs_are_joined_and_rows_without_an_input_refused(tmp_path: Path) -> None:
    to_onnx(tiny.model("bert", head=AutoModelForQuestionAnswering, labels=2), tmp_path / "spans.onnx")
    row = {"input_ids": [2, 9, 3], "attention_mask": [1, 1, 1], "token_type_ids": [0, 0, 0]}
    with open_local() as device:
        (found,) = device.logits(tmp_path / "spans.onnx", [row])
        assert found.shape == (3, 2)
        with pytest.raises(DeviceError, match=r"a row has input_ids; expected attention_mask"):
            device.logits(tmp_path / "spans.onnx", [{"input_ids": [2, 3]}])


def test_a_sustained_run_has_a_median_for_each_minute(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.benchmark.race.MINUTE", 0.1)
    files = {name: folder / f"{name}.onnx" for name in ("deep", "shallow")}
    messages: list[str] = []
    with open_local(say=messages.append) as device:
        deep, shallow = device.sustain(files, Setting(1, 1, 64), seconds=0.25)
    assert (deep.name, shallow.name, len(deep.minutes), len(deep.temperatures)) == ("deep", "shallow", 3, 3)
    assert min(deep.minutes) > min(shallow.minutes)
    assert len(messages) == 6
    assert messages[0].startswith("local: deep, 1 thread, batch 1, 64 tokens: minute 1: p50 ")


@pytest.mark.parametrize(("module", "absent"), [(runner, "compress onnx torch psutil"), (agent, "numpy")])
def test_remote_scripts_import_only_what_they_promise(module: Any, absent: str) -> None:
    source = Path(str(module.__file__)).read_text()
    ast.parse(source, feature_version=(3, 8))
    program = (
        f"import runpy, sys; runpy.run_path({module.__file__!r}); print(*set({absent.split()!r}) & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
