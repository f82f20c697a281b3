"""Latencies as a table and as JSON, and settings from the command line's lists."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import product
from typing import TYPE_CHECKING

from compress.bench.protocol import DeviceError, Latency, Setting

if TYPE_CHECKING:
    from rich.table import Table


def settings(threads: str, batch: str, seq: str) -> list[Setting]:
    """Every combination of three comma-separated lists. Raises DeviceError."""
    lists = [_numbers(name, text) for name, text in (("threads", threads), ("batch", batch), ("seq", seq))]
    return [Setting(*values) for values in product(*lists)]


def _numbers(name: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in parts):
        raise DeviceError(f"--{name} {text}: expected whole numbers separated by commas, as in 1,2,4")
    return [int(part) for part in parts]


def table(times: Sequence[Latency], machine: Mapping[str, str]) -> "Table":
    """One line per file and setting; the ratio is to the first file at the same setting."""
    from rich.table import Table

    shown = Table(title=", ".join(f"{name} {value}" for name, value in machine.items()), title_justify="left")
    for name in ("file", "threads", "batch", "seq", "min ms", "p50", "p95", "p99", "ratio", "init ms", "first", "MB"):
        shown.add_column(name, justify="left" if name == "file" else "right", overflow="fold")
    first: dict[Setting, float] = {}
    for time in times:
        base = first.setdefault(time.setting, time.p50_ms)
        setting = (str(value) for value in (time.setting.threads, time.setting.batch, time.setting.seq))
        figures = (time.min_ms, time.p50_ms, time.p95_ms, time.p99_ms, time.p50_ms / base)
        rest = (f"{time.init_ms:.0f}", f"{time.first_ms:.1f}", f"{time.peak_rss_mb:.0f}")
        shown.add_row(time.name + (" (noisy)" if time.noisy else ""), *setting, *(f"{x:.2f}" for x in figures), *rest)
    if any(time.noisy for time in times):
        shown.caption = "noisy: the machine changed speed while this was measured; measure again before quoting it"
    return shown


def as_json(times: Sequence[Latency], machine: Mapping[str, str]) -> str:
    return json.dumps({"machine": dict(machine), "latencies": [asdict(time) for time in times]}, indent=1)
