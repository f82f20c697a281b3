"""This machine as a device."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import onnxruntime

from compress.bench import runner, station
from compress.bench.link import connect
from compress.bench.protocol import DeviceError, Latency, Setting
from compress.bench.stationed import Stationed

START = 60.0
"""Seconds a station on this machine has to start: it takes a tenth of one."""


def race(
    files: Mapping[str, Path],
    settings: Sequence[Setting],
    *,
    rounds: int = 8,
    runs: int = 15,
    say: Callable[[str], None] = lambda _: None,
) -> list[Latency]:
    """Race ONNX files on this machine: their latency, settings in the order given, files within.

    Raises DeviceError when a measuring process dies, with its last words; ExportError for a file that is no text
    encoder. Leaves no process behind.
    """
    with local(say=say) as device:
        return device.race(files, settings, rounds=rounds, runs=runs)


def machine() -> dict[str, str]:
    """What figures are measured on: processor, cores, instruction sets, governor, load now, memory, system."""
    return station.facts()


@contextmanager
def local(*, affinity: tuple[int, ...] = (), say: Callable[[str], None] = lambda _: None) -> Iterator[Stationed]:
    # -P: the station's neighbours in its folder must not pass for installed modules
    command = [sys.executable, "-P", str(station.__file__)]
    loaded = {"onnxruntime": onnxruntime.__version__}
    with connect(command, loss=_lost, timeout=START) as link:
        yield Stationed(
            "local", link, lambda path: str(path.resolve()), str(runner.__file__), affinity, say, _missing, loaded
        )


def _lost(code: int | None, words: str) -> DeviceError:
    return DeviceError(f"local: the process that keeps the measuring ones ended with code {code}: {words or 'silent'}")


def _missing(runtime: str, why: str) -> DeviceError:
    return DeviceError(f"local: {runtime} does not load here ({why}). Install it: pip install {runtime}")
