"""What a machine says of itself, and what is told to a runner of a file."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from compress.benchmark import jobs
from compress.benchmark.local import open_local
from compress.benchmark.remote import agent, runner
from compress.exporters.onnx import to_onnx
from compress.records.latency import DeviceError, Setting
from tests import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.onnx"
    to_onnx(tiny.bert(layers=1), path)
    (path.parent / "config.json").write_text('{"vocab_size": 45}')
    return path


def sensor(folder: Path, name: str, milli: str, *, hwmon: bool = False) -> None:
    folder.mkdir(parents=True)
    (folder / ("name" if hwmon else "type")).write_text(f"{name}\n")
    (folder / ("temp1_input" if hwmon else "temp")).write_text(f"{milli}\n")


def test_temperature_prefers_processor_sensors(tmp_path: Path) -> None:
    assert agent.temperature(tmp_path) is None
    sensor(tmp_path / "thermal" / "thermal_zone0", "acpitz", "91000")
    assert agent.temperature(tmp_path) == 91.0
    sensor(tmp_path / "thermal" / "thermal_zone1", "cpu-thermal", "48312")
    sensor(tmp_path / "hwmon" / "hwmon0", "k10temp", "52500", hwmon=True)
    sensor(tmp_path / "hwmon" / "hwmon1", "coretemp", "-128000", hwmon=True)
    sensor(tmp_path / "thermal" / "thermal_zone2", "cpu-broken", "what")
    assert agent.temperature(tmp_path) == 52.5


def test_clocks_are_grouped_by_speed(tmp_path: Path) -> None:
    assert agent.clocks(tmp_path) == ""
    for cpu in range(12):
        folder = tmp_path / f"cpu{cpu}" / "cpufreq"
        folder.mkdir(parents=True)
        (folder / "cpuinfo_max_freq").write_text("1800000" if cpu < 10 else "2400000")
    assert agent.clocks(tmp_path) == "cpu 0-9 1.80 GHz, cpu 10-11 2.40 GHz"
    # a CPU that is switched off (its file cannot be read), and favoured ones among others
    off = tmp_path / "cpu12" / "cpufreq" / "cpuinfo_max_freq"
    off.mkdir(parents=True)
    for cpu in (4, 5):
        (tmp_path / f"cpu{cpu}" / "cpufreq" / "cpuinfo_max_freq").write_text("2000000")
    groups = "cpu 0-3 1.80 GHz, cpu 4-5 2.00 GHz, cpu 6-9 1.80 GHz, cpu 10-11 2.40 GHz"
    assert agent.clocks(tmp_path) == groups


def test_openvino_files_race_onnx_files(model: Path, tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    (tmp_path / "config.json").write_text('{"vocab_size": 45}')
    openvino.save_model(openvino.convert_model(model), tmp_path / "model.xml", compress_to_fp16=False)
    (tmp_path / "model.session.json").write_text('{"INFERENCE_PRECISION_HINT": "f32"}')
    assert jobs.timing_job(tmp_path / "model.xml")["entries"] == {"INFERENCE_PRECISION_HINT": "f32"}
    row = {"input_ids": [2, 9, 3], "attention_mask": [1, 1, 1], "token_type_ids": [0, 0, 0]}
    with open_local() as device:
        files = {"onnx": model, "xml": tmp_path / "model.xml"}
        found = device.race(files, [Setting(1, 1, 8)], rounds=2, runs=2)
        (one,), (other,) = (device.logits(file, [row]) for file in files.values())
        facts = device.facts()
    assert [each.name for each in found] == ["onnx", "xml"]
    assert abs(one - other).max() < 1e-5
    assert "openvino 20" in facts["runtime"]
    assert "onnxruntime 1." in facts["runtime"]


def test_an_unknown_openvino_property_is_an_error(model: Path, tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    (tmp_path / "config.json").write_text('{"vocab_size": 45}')
    openvino.save_model(openvino.convert_model(model), tmp_path / "model.xml")
    (tmp_path / "model.session.json").write_text('{"NO_SUCH_HINT": "f32"}')
    with open_local() as device, pytest.raises(DeviceError, match="NO_SUCH_HINT"):
        device.race({"x": tmp_path / "model.xml"}, [Setting(1, 1, 8)], rounds=2, runs=1)


@pytest.mark.parametrize("stopped", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_command_leaves_nothing(model: Path, tmp_path: Path, stopped: signal.Signals) -> None:
    words = ["bench", str(model), "--seq", "16", "--sustain", "1h", "--rounds", "2", "--runs", "1", "--out", "x.json"]
    program = f"import sys; sys.argv = ['compress', *{words!r}]; from compress.cli import main; main()"
    with subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert "pass 2 of 2" in process.stdout.readline() + process.stdout.readline()
        mine: list[psutil.Process] = []
        while not any(str(runner.__file__) in word for each in mine for word in each.cmdline()):
            mine = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.3)  # in the middle of the hour
        os.kill(process.pid, stopped)
        assert process.wait(30) == {signal.SIGINT: 130, signal.SIGTERM: 143}.get(stopped, -signal.SIGKILL)
    assert psutil.wait_procs(mine, timeout=20)[1] == []
    assert list(tmp_path.iterdir()) == []


def test_output_of_a_login_shell_is_skipped(tmp_path: Path) -> None:
    from compress.benchmark.local import connect

    noisy = f'echo Welcome; echo "{{}}"; exec {sys.executable} -P {agent.__file__}'
    with connect(
        ["sh", "-c", noisy], make_error=lambda code, words: DeviceError(f"{code} {words}"), timeout=30
    ) as link:
        assert link.ask(do="temperature").keys() == {"celsius"}
        assert json.dumps(link.hello["facts"])


def test_an_error_of_the_agent_is_told() -> None:
    command = [sys.executable, agent.__file__]
    done = subprocess.run(command, input=b'{"do": "nosuch"}\n', capture_output=True, check=False, timeout=60)
    assert done.returncode == 1
    assert b"nosuch" in done.stderr
