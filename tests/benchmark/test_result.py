"""A result says what was measured where, survives its file, and fits a terminal."""

import io
from pathlib import Path

from rich.console import Console

from compress.benchmark.race import PassTimes, summarise
from compress.records.bench_result import BenchResult
from compress.records.latency import Latency, Setting, Sustained
from compress.reporting.terminal import print_bench


def latency(name: str, setting: Setting, *passes: float) -> Latency:
    first, second = (PassTimes(30, 9, [ms] * 3, celsius=51.5) for ms in passes)
    return summarise(name, setting, first, second, affinity="0-3")


RESULT = BenchResult(
    device="ssh:pi",
    machine={"cpu": "a processor", "load": "0.10"},
    date="2026-01-01T00:00:00+00:00",
    command="compress bench a b",
    latencies=(
        latency("a:int8", Setting(), 2.0, 2.0),
        latency("b:int8", Setting(), 1.0, 1.5),
        latency("a:int8", Setting(seq=16), 0.5, 0.5),
    ),
    sustained=(
        Sustained("a:int8", Setting(), (2.0, 3.0), (50.0, 61.2), 40.0),
        Sustained("b:int8", Setting(), (1.5, 1.5), (None, None)),
    ),
)


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    RESULT.write(tmp_path / "x.json")
    assert BenchResult.from_json(tmp_path / "x.json") == RESULT
    assert (tmp_path / "x.json").read_text().startswith('{\n "format": 1,\n "device": "ssh:pi"')
    assert [each.name for each in tmp_path.iterdir()] == ["x.json"]


def test_tables_fit_80_columns() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    print_bench(console, RESULT)
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert "cpu a processor" in lines
    assert "a:int8 2.00 2.00 2.00 2.00 1.00 30.0 9.00" in lines
    assert "b:int8 (noisy) 1.00 1.00 1.00 1.00 0.50 30.0 9.00" in lines
    assert "kept on CPUs 0-3" in lines
    assert "p50 1.00 ms in the first pass, 1.50 ms in the second (x1.50)" in " ".join(lines)
    assert "1 thread, batch 1, 16 tokens" in lines
    assert "a:int8 40 C 2.00 ms 50 C 3.00 ms 61 C 1.50" in lines
    assert "b:int8 — 1.50 ms 1.50 ms 1.00" in lines
    assert "b:int8: 1.50 times its p50 in the race from the first minute on" in " ".join(lines)
    assert "a:int8: 1.00 times" not in " ".join(lines)
