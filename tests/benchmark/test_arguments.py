"""What the words of `compress bench` mean, and which mean nothing."""

from pathlib import Path

import pytest

from compress.benchmark import arguments
from compress.benchmark.devices import open_chosen
from compress.config.options import DeviceOptions, DeviceSettingOptions, MeasureOptions
from compress.records.latency import DeviceError, Setting
from tests import tiny


def test_settings_are_every_combination() -> None:
    assert arguments.parse_settings("1, 2", "1", "16,64") == [
        Setting(1, 1, 16),
        Setting(1, 1, 64),
        Setting(2, 1, 16),
        Setting(2, 1, 64),
    ]


def test_spans_of_time_are_seconds() -> None:
    assert [arguments.parse_duration(text) for text in ("90s", "5m", "0.5h")] == [90.0, 300.0, 1800.0]


@pytest.mark.parametrize("group", [DeviceOptions, DeviceSettingOptions, MeasureOptions])
def test_a_device_is_opened_by_the_options_of_it_that_a_group_holds(group: type[DeviceOptions]) -> None:
    with open_chosen(group(affinity="0"), say=lambda _: None) as device:
        assert device.name == "local"
        assert device.affinity == (0,)  # type: ignore[attr-defined]


def test_cpus_are_read_and_written_as_taskset_does() -> None:
    assert arguments.parse_cpus("0-3,6") == (0, 1, 2, 3, 6)
    assert arguments.parse_cpus("") == ()
    assert arguments.format_cpus((0, 1, 2, 3, 6)) == "0-3,6"
    assert arguments.format_cpus((4,)) == "4"
    assert arguments.format_cpus(()) == ""


def test_lone_files_are_raced_under_their_own_path() -> None:
    files = [Path("a/x.onnx"), Path("y.xml")]
    assert arguments.list_files(files) == {str(file): file for file in files}


def test_a_bundle_without_the_precision_is_not_left_out(tmp_path: Path) -> None:
    one, other = (tiny.bundle(tmp_path / name) for name in ("one", "other"))
    (tmp_path / "fp16.onnx").write_bytes(one.files()["fp32"].read_bytes())
    one.put("fp16", tmp_path / "fp16.onnx")
    with pytest.raises(DeviceError, match=r"--precision fp16: none in .*other: has fp32"):
        arguments.list_files([one.path, other.path], "fp16")
    assert list(arguments.list_files([one.path], "fp16")) == [f"{one.path}:fp16"]
