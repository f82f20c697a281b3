"""Hosted devices, with a fake of the vendor's client; its signatures are compared with the client's where it is."""

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from transformers import AutoModelForTokenClassification

from compress.benchmark.devices import measure, open_device
from compress.commands.bench import bench
from compress.config.options import DeviceOptions
from compress.exporters.onnx import to_onnx
from compress.records.latency import DeviceError, Setting
from tests import tiny
from tests.benchmark import fake_aihub
from tests.benchmark.fake_aihub import Device, Hub

PHONE = Device("Phone 9 (Family)", "15", ["vendor:acme", "os:android", "chipset:acme-f900"])
SETTING = Setting(seq=16)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    to_onnx(tiny.bert(), path := tmp_path / "model.onnx")
    return path


def install(monkeypatch: pytest.MonkeyPatch, **script: Any) -> Hub:
    hub = Hub([Device("Tablet 3"), PHONE], **script)
    monkeypatch.setitem(sys.modules, "qai_hub", hub)  # type: ignore[arg-type]
    return hub


def race(hub: Hub, file: Path, *settings: Setting, said: list[str] | None = None, **options: Any) -> Any:
    say = (said if said is not None else []).append
    with open_device("aihub:Phone 9 (Family)", say=say) as device:
        chosen = {"rounds": 4, "runs": 10, "seconds": None, **options}
        return measure(device, {"student": file}, settings or (SETTING,), **chosen)


def test_the_fake_has_the_clients_signatures() -> None:
    client = pytest.importorskip("qai_hub")
    assert fake_aihub.differences(client) == []


def test_times_memory_and_layers_are_those_of_the_profiles(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = install(monkeypatch, times=([2100, 2000, 2000], [2000, 2040, 2000]))
    said: list[str] = []
    result = race(hub, file, said=said)
    (latency,) = result.latencies
    assert (latency.runs, latency.min_ms, latency.p50_ms, latency.init_ms) == (6, 2.0, 2.0, 250.0)
    assert latency.passes == (2.0, 2.0)
    assert (latency.first_ms, latency.peak_rss_mb, latency.noisy) == (2.1, 30.0, False)
    assert result.device == "aihub:Phone 9 (Family)"
    assert result.machine["cpu"] == "acme-f900"
    assert result.machine["system"] == "android 15"
    assert result.machine["layers of student"] == "2 on NPU, 1 on CPU"
    assert any("https://hub.example/jobs/" in line for line in said)
    (_, compiled), *timed = [call for call in hub.calls if call[0] in ("compile", "profile")]
    assert compiled["input_specs"]["input_ids"] == ((1, 16), "int64")
    assert [call["options"] for _, call in timed] == ["--max_profiler_iterations 20"] * 2, "two rounds of ten runs each"


def test_passes_that_disagree_are_noise(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = install(monkeypatch, times=([2000] * 9, [3000] * 9))
    (latency,) = race(hub, file).latencies
    assert latency.noisy
    assert latency.p50_ms == 2.0


def test_each_length_is_compiled_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = install(monkeypatch, times=[[1000]] * 4)
    race(hub, file, Setting(seq=8), Setting(seq=16))
    shapes = [call["input_specs"]["input_ids"][0] for kind, call in hub.calls if kind == "compile"]
    assert shapes == [(1, 8), (1, 16)]


@pytest.mark.parametrize("length", [None, 16])
def test_logits_are_the_files_own(
    length: int | None, tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    rows = [{"input_ids": [2, 9, 8, 3], "attention_mask": [1] * 4, "token_type_ids": [0] * 4},
            {"input_ids": [2, 7, 3], "attention_mask": [1] * 3, "token_type_ids": [0] * 3}]  # fmt: skip
    expected = _run(file, rows)
    if length is not None:
        model = onnx.load(file)
        for node in model.graph.input:
            for dim, size in zip(node.type.tensor_type.shape.dim, (1, length), strict=True):
                dim.dim_value = size
        onnx.save(model, file)
    with open_device("aihub:Phone 9 (Family)", say=lambda _: None) as device:
        found = device.logits(file, rows)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_logits_of_tokens_are_cut_to_each_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    to_onnx(tiny.model("bert", head=AutoModelForTokenClassification), file := tmp_path / "tagger.onnx")
    rows = [{"input_ids": ids, "attention_mask": [1] * len(ids), "token_type_ids": [0] * len(ids)}
            for ids in ([2, 9, 8, 3], [2, 7, 3])]  # fmt: skip
    with open_device("aihub:Phone 9 (Family)", say=lambda _: None) as device:
        found = device.logits(file, rows)
    for ours, theirs in zip(found, _run(file, rows), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def _run(file: Path, rows: Any) -> list[Any]:
    with open_device("local", say=lambda _: None) as device:
        return device.logits(file, rows)


@pytest.mark.parametrize(
    ("script", "options", "error"),
    [
        ({"token": False}, {}, r"configuration file\. /home/me/\.qai_hub/client\.ini\. A token is set with: qai-hub"),
        ({"fails": {"compile": "no kernel"}}, {}, r"model\.onnx failed: no kernel; see https://hub\.example/jobs/2"),
        ({"fails": {"profile": "out of memory"}, "times": [[1]]}, {}, r"student failed: out of memory"),
        (
            {},
            {"settings": [Setting(threads=4, seq=16)]},
            r"--threads: aihub:Phone 9 \(Family\) chooses its threads itself",
        ),
        ({"times": [[1000]] * 2}, {"seconds": 60.0}, r"--sustain: .* runs jobs of a number of runs"),
    ],
)
def test_what_fails_says_why(
    script: Any, options: dict[str, Any], error: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = install(monkeypatch, **script)
    settings = options.pop("settings", [SETTING])
    with pytest.raises(DeviceError, match=error):
        race(hub, file, *settings, **options)


def test_sustain_is_refused_before_any_job(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = install(monkeypatch)
    with pytest.raises(DeviceError, match="--sustain"):
        bench([str(file)], device=DeviceOptions(device="aihub:Phone 9 (Family)"), seq=(16,), sustain=60.0)
    assert hub.calls == []


def test_a_file_of_another_shape_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = onnx.load(file)
    for node in model.graph.input:
        for dim, size in zip(node.type.tensor_type.shape.dim, (1, 8), strict=True):
            dim.dim_value = size
    onnx.save(model, file)
    with pytest.raises(DeviceError, match=re.escape(f"{file}: is of --seq 8, not 16")):
        race(install(monkeypatch), file)


@pytest.mark.parametrize("name", ["aihub:phone", "aihub:Phone 10"])
def test_names_of_other_devices_are_refused_with_those_there_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    with pytest.raises(DeviceError, match=r"no such device; there are .*Phone 9"), open_device(name):
        pass


def test_without_the_client_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "qai_hub", None)
    with pytest.raises(DeviceError, match=r"aihub:Phone.*pip install .qai-hub>=0\.56"), open_device("aihub:Phone"):
        pass
