"""Commands to adb and the parsing of its output, with a fake `adb`; one test runs the real client without a phone."""

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from compress.benchmark import android
from compress.benchmark.devices import open_device
from compress.exporters.onnx import to_onnx
from compress.records.latency import DeviceError, Setting
from tests import tiny
from tests.benchmark import fake_adb
from tests.benchmark.fake_adb import PERF_TEST

QUIET = {"say": lambda _: None}
BENCHMARK_MODEL = """INFO: STARTING!
INFO: Initialized session in 12.75ms.
INFO: count=10 curr=30(all same) p5=30 median=30 p95=30
INFO: count=74 first=14850 curr=13315 min=13105 max=15765 avg=13520.2 std=470 p5=13200 median=13500 p95=14000
INFO: Inference timings in us: Init: 12750, First inference: 14744, Warmup (avg): 13764.3, Inference (avg): 13520.2
INFO: Peak memory footprint (MB): init=1.5 overall=12.8672
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, **script: Any) -> Path:
    """Put `adb` on PATH; return the file of its calls, one JSON list a line."""
    log = folder / "calls.jsonl"
    log.touch()
    known = {"devices": {"SERIAL1": "device"}, "prints": PERF_TEST, "times": fake_adb.TIMES, "log": str(log), **script}
    (folder / "script.json").write_text(json.dumps(known))
    (folder / "bin").mkdir()
    program = folder / "bin" / "adb"
    # -S: without site-packages, which are slow to find
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -S {fake_adb.__file__} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN_ADB", str(folder / "script.json"))
    return log


def calls(log: Path) -> list[list[str]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "a model.onnx"
    to_onnx(tiny.bert(layers=1), path)
    return path


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "libonnxruntime.so").write_bytes(b"library")
    path = tmp_path / "build" / "onnxruntime_perf_test"
    path.write_bytes(b"program")
    return path


def test_a_native_program_is_pushed_run_read_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path, program: Path
) -> None:
    log = install(tmp_path, monkeypatch)
    with open_device("adb", native=program, affinity=(4, 5, 6, 7), **QUIET) as device:
        (found,) = device.race({"m": model}, [Setting(2, 1, 8)], rounds=2, runs=3)
        facts = device.facts()
    assert device.name == "adb:SERIAL1"
    assert found.runs == 6
    assert (found.min_ms, found.p50_ms, found.init_ms, found.first_ms) == pytest.approx((4.0, 5.0, 41.2, 12.0))
    assert found.peak_rss_mb == pytest.approx(61.865984)
    assert (found.affinity, found.celsius, found.noisy) == ("4-7", 47.25, False)
    assert facts == {
        "device": "Acme Phone 9",
        "cpu": "Foundry F900",
        "abi": "arm64-v8a",
        "governor": "schedutil",
        "temperature": "47 C",
        "system": "Android 15 (API 35)",
        "fingerprint": "acme/phone9:15/AB1:user/release-keys",
        "adb": "Android Debug Bridge version 0 (stand-in)",
        "runtime": "onnxruntime_perf_test",
    }
    result = calls(log)
    folder = next(each[3].split()[1] for each in result if each[-1].startswith("mkdir"))
    assert folder.startswith("/data/local/tmp/compress-")
    entries = "optimization.disable_specified_optimizers|SkipLayerNormFusion;BiasSkipLayerNormFusion"
    call = ["taskset", "f0", f"{folder}/onnxruntime_perf_test", "-e", "cpu", "-m", "times", "-r", "8", "-x", "2"]
    call += ["-y", "1", "-C", entries, "0-1x8/model.onnx", "times.csv"]
    script = 'cd "$1" && rm -f times.csv && shift && LD_LIBRARY_PATH=. exec "$@"'
    on = ["-s", "SERIAL1"]
    assert result[:2] == [["start-server"], ["devices"]]
    assert [each[2:] for each in result if each[:2] == on and "compress-" in " ".join(each)] == [
        ["shell", f"mkdir {folder}"],
        ["push", str(program), f"{folder}/onnxruntime_perf_test"],
        ["push", str(program.parent / "libonnxruntime.so"), f"{folder}/libonnxruntime.so"],
        ["shell", f"chmod 755 {folder}/onnxruntime_perf_test"],
        ["push", str(model), f"{folder}/0.onnx"],
        ["shell", f"mkdir -p {folder}/0-1x8/test_data_set_0"],
        ["shell", f"ln -s ../0.onnx {folder}/0-1x8/model.onnx"],
        *(
            ["push", each[3], f"{folder}/0-1x8/test_data_set_0/input_{at}.pb"]
            for at, each in enumerate(each for each in result if each[-1].endswith(".pb"))
        ),
        *(["shell", shlex.join(["sh", "-c", script, "sh", folder, *call])], ["shell", f"cat {folder}/times.csv"]),
        *(["shell", shlex.join(["sh", "-c", script, "sh", folder, *call])], ["shell", f"cat {folder}/times.csv"]),
        ["shell", f"rm -rf {folder}"],
    ]


def test_inputs_equal_those_of_other_devices(model: Path) -> None:
    made = android.serialize_inputs(model, Setting(1, 2, 8))
    tensors = [onnx.TensorProto.FromString(content) for content in made.values()]
    found = {tensor.name: numpy_helper.to_array(tensor) for tensor in tensors}
    assert list(made) == ["input_0.pb", "input_1.pb", "input_2.pb"]
    expected = np.random.default_rng(0).integers(0, 45, (2, 8))
    np.testing.assert_array_equal(found["input_ids"], expected)
    assert found["attention_mask"].all()


def test_an_unplugged_phone_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path, program: Path
) -> None:
    install(tmp_path, monkeypatch, gone_after=16)
    messages: list[str] = []
    with (
        pytest.raises(DeviceError, match=r"^adb:SERIAL1: adb ended with code 1: error: device 'SERIAL1' not found"),
        open_device("adb", native=program, say=messages.append) as device,
    ):
        device.race({"m": model}, [Setting(1, 1, 8)], rounds=2, runs=3)
    assert "could not be removed from the phone" in messages[-1]


def test_the_named_one_of_two_phones_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Path
) -> None:
    log = install(tmp_path, monkeypatch, devices={"A": "device", "host:5555": "device"})
    with open_device("adb:host:5555", native=program, **QUIET) as device:
        assert device.name == "adb:host:5555"
    assert {each[1] for each in calls(log) if each[0] == "-s"} == {"host:5555"}


def test_the_page_is_reached_through_the_cable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = install(tmp_path, monkeypatch)
    link = "http://127.0.0.1:8123/#token-of-the-page"

    @contextmanager
    def page(visit: Callable[[str], None], **known: Any) -> Iterator[Any]:
        visit(link)
        yield known

    messages: list[str] = []
    with android.connect_phone("", 9) as phone, android.phone_browser(phone, page, messages.append) as known:
        pass
    assert known["name"] == "adb:SERIAL1"  # type: ignore[index]
    assert known["more"]["device"] == "Acme Phone 9"  # type: ignore[index]
    assert link in messages[0]
    result = [each[2:] for each in calls(log) if each[0] == "-s"]
    port = "tcp:8123"
    assert result[-3:] == [
        ["reverse", port, port],
        ["shell", f"am start -a android.intent.action.VIEW -d '{link}'"],
        ["reverse", "--remove", port],
    ]


def test_an_adb_server_that_we_started_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Path
) -> None:
    log = install(tmp_path, monkeypatch)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        monkeypatch.setenv("ANDROID_ADB_SERVER_PORT", str(server.getsockname()[1]))
        with open_device("adb", native=program, **QUIET):  # bound, and nobody listens
            pass
        assert calls(log)[-1] == ["kill-server"]
        log.write_text("")
        server.listen()
        with open_device("adb", native=program, **QUIET):
            pass
    assert ["kill-server"] not in calls(log)


def test_sustained_runs_are_a_call_for_each_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path, program: Path
) -> None:
    log = install(tmp_path, monkeypatch)
    with open_device("adb", native=program, **QUIET) as device:
        (found,) = device.sustain({"m": model}, Setting(1, 1, 8), seconds=90)
        with pytest.raises(DeviceError, match="computes no logits"):
            device.logits(model, [])
    assert found.minutes == pytest.approx((5.0, 5.0))
    assert (found.started, found.temperatures) == (47.25, (47.25, 47.25))
    spans = [each[3].split(" -t ")[1].split()[0] for each in calls(log) if " -t " in each[-1]]
    assert spans == ["60", "30"]


def test_benchmark_model_is_called_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = install(tmp_path, monkeypatch, prints=BENCHMARK_MODEL)
    program, model = tmp_path / "benchmark_model_plus_flex", tmp_path / "m.tflite"
    program.write_bytes(b"program")
    model.write_bytes(b"model")
    with open_device("adb", native=program, **QUIET) as device:
        (found,) = device.race({"m": model}, [Setting(4, 1, 128)], rounds=2, runs=50)
        with pytest.raises(DeviceError, match="has a fixed shape"):
            device.race({"m": model}, [Setting(4, 1, 128), Setting(4, 1, 64)], rounds=2, runs=50)
        with pytest.raises(DeviceError, match=r"x: benchmark_model runs \.tflite files"):
            device.race({"x": tmp_path / "x.onnx"}, [Setting()], rounds=2, runs=50)
        assert "p99" in device.facts()
    figures = (found.min_ms, found.p50_ms, found.p95_ms, found.p99_ms, found.init_ms, found.first_ms)
    assert figures == pytest.approx((13.105, 13.5, 14.0, 15.4, 12.75, 14.744), rel=0.01)
    assert (found.runs, found.peak_rss_mb) == (148, 12.8672)
    call = "--graph=0.tflite --num_threads=4 --warmup_runs=5 --warmup_min_secs=0 --num_runs=50 --min_secs=0 --max_secs="
    assert sum(call in each[-1] for each in calls(log)) == 2


def test_parsing_of_program_output() -> None:
    """The columns of onnxruntime_perf_test's file became six in 2025."""
    six = "".join(f"m,0.001,{seconds},7,9,{at}\n" for at, seconds in enumerate(fake_adb.SECONDS))
    calls = [android.parse_run("onnxruntime_perf_test", PERF_TEST, times) for times in (six, fake_adb.TIMES)]
    assert calls[0].ms == calls[1].ms
    same = "INFO: count=9 curr=30(all same) p5=30 median=30 p95=30\nInit: 1, First inference: 2"
    assert android.parse_run("benchmark_model", same).ms == [0.03] * 9


def test_temperatures_are_the_processors_or_the_batterys() -> None:
    assert android.hottest_sensor(fake_adb.THERMAL, "") == 47.25
    assert android.hottest_sensor("Thermal Status: 0", "  temperature: 312\n") == 31.2
    assert android.hottest_sensor("", "") is None


@pytest.mark.skipif(shutil.which("adb") is None, reason="needs adb: apt-get install adb")
def test_the_real_client_without_a_phone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a port of its own, so that a developer's own adb server and phones are left alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("ANDROID_ADB_SERVER_PORT", str(port))
    monkeypatch.setenv("ADB_USB", "0")  # of adb 34 and newer: no phone that happens to be plugged in
    monkeypatch.setenv("HOME", str(tmp_path))
    listed = subprocess.run(["adb", "devices"], capture_output=True, text=True, check=True).stdout
    subprocess.run(["adb", "kill-server"], check=True)
    if len(listed.strip().splitlines()) > 1:
        pytest.skip("a phone is connected")
    with pytest.raises(DeviceError, match="no phone"), open_device("adb", **QUIET):
        pass
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "the server it started is stopped"
