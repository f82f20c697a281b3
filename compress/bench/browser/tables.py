"""What the page shows: a table of results per setting, as plain texts."""

from collections.abc import Sequence
from typing import Any

from compress.bench.protocol import Latency, Setting

HEAD = ("file", "p50 ms", "p95 ms", "to first")


def tables(latencies: Sequence[Latency]) -> list[dict[str, Any]]:
    """One table per setting, in the order measured, each with the ratio of every p50 to the first file's."""
    return [_table(setting, latencies) for setting in dict.fromkeys(latency.setting for latency in latencies)]


def _table(setting: Setting, latencies: Sequence[Latency]) -> dict[str, Any]:
    here = [latency for latency in latencies if latency.setting == setting]
    rows = [
        (
            latency.name + (" (noisy)" if latency.noisy else ""),
            f"{latency.p50_ms:.2f}",
            f"{latency.p95_ms:.2f}",
            f"{latency.p50_ms / here[0].p50_ms:.2f}",
        )
        for latency in here
    ]
    return {"title": str(setting), "head": HEAD, "rows": rows}
