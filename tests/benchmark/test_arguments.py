"""What the words of `compress bench` mean, and which mean nothing."""

from pathlib import Path

import pytest

from compress.benchmark import arguments
from compress.benchmark.devices import open_chosen
from compress.config.options import DeviceOptions, DeviceSettingOptions, MeasureOptions
from compress.records.latency import DeviceError, Setting


def test_settings_are_every_combination() -> None:
    assert arguments.parse_settings("1, 2", "1", "16,64") == [
        Setting(1, 1, 16),
        Setting(1, 1, 64),
        Setting(2, 1, 16),
        Setting(2, 1, 64),
    ]


@pytest.mark.parametrize("text", ["", "two", "1,", "1.5", "-1", "²"])
def test_malformed_lists_of_numbers_are_refused(text: str) -> None:
    with pytest.raises(DeviceError, match=r"--seq .*expected whole numbers separated by commas"):
        arguments.parse_settings("1", "1", text)


def test_spans_of_time_are_seconds() -> None:
    assert [arguments.parse_duration(text) for text in ("90s", "5m", "0.5h")] == [90.0, 300.0, 1800.0]
    for text in ("5", "0m", "-1m", "5 minutes", ""):
        with pytest.raises(DeviceError, match=f"--sustain {text}: expected a duration such as 90s, 5m or 1h"):
            arguments.parse_duration(text)


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
    for text in ("a", "3-1", "1,,2", "f0", "-"):
        with pytest.raises(DeviceError, match=r"expected CPUs such as 0-3"):
            arguments.parse_cpus(text)


def test_lone_files_are_raced_under_their_own_path_and_only_once() -> None:
    assert arguments.list_files([Path("a/x.onnx"), Path("y.xml")]) == {
        "a/x.onnx": Path("a/x.onnx"),
        "y.xml": Path("y.xml"),
    }
    with pytest.raises(DeviceError, match=r"x\.onnx: given twice"):
        arguments.list_files([Path("x.onnx"), Path("x.onnx")])


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(DeviceError, match=r"model\.bin: expected the folder of a bundle, or a file ending in \.onnx"):
        arguments.list_files([tmp_path / "model.bin"])
