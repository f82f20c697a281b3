"""Latencies and sustained curves as tables."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from compress.exporters.rewrite.products import layer
from compress.quantization.select import BEFORE, Quantized
from compress.records.bench_result import Result
from compress.records.latency import NOISE_FACTOR, Latency

if TYPE_CHECKING:
    from rich.table import Table


def tables(result: Result) -> "Iterator[Table]":
    """What was measured on one device: what it is, the race at each setting, the curves where there are any."""
    yield _facts(result)
    for setting in dict.fromkeys(time.setting for time in result.latencies):
        yield _race([time for time in result.latencies if time.setting == setting])
    if result.sustained:
        yield _curves(result)


def _facts(result: Result) -> "Table":
    from rich.table import Table

    shown = Table.grid(padding=(0, 2))
    for name, value in {"measured on": result.device, **result.machine}.items():
        shown.add_row(name, value)
    return shown


def _race(times: Sequence[Latency]) -> "Table":
    """One line per file; the ratio is to the first one."""
    shown = _table(str(times[0].setting), "file", "min ms", "p50", "p95", "p99", "ratio", "init ms", "first", "MB")
    for time in times:
        figures = (time.min_ms, time.p50_ms, time.p95_ms, time.p99_ms, time.p50_ms / times[0].p50_ms)
        memory = "" if time.peak_rss_mb is None else f"{time.peak_rss_mb:.0f}"
        rest = (f"{time.init_ms:.0f}", f"{time.first_ms:.1f}", memory)
        marks = (" (noisy)" if time.noisy else "") + (" (busy)" if time.busy else "")
        shown.add_row(time.name + marks, *(f"{x:.2f}" for x in figures), *rest)
    shown.caption = "\n".join(_notes(times)) or None
    return shown


def _table(title: str, *columns: str) -> "Table":
    """The first column is text, the others are numbers."""
    from rich import box
    from rich.table import Table

    shown = Table(title=title, title_justify="left", caption_justify="left", box=box.SIMPLE, padding=(0, 0, 0, 1))
    for at, name in enumerate(columns):
        shown.add_column(name, justify="right" if at else "left", overflow="fold", no_wrap=bool(at))
    return shown


def _notes(times: Sequence[Latency]) -> Iterator[str]:
    if pinned := {time.affinity for time in times if time.affinity}:
        yield f"kept on CPUs {', '.join(sorted(pinned))}"
    if noisy := [time for time in times if time.noisy]:
        yield "noisy: the two passes disagree; measure again before quoting it"
        yield from (f"  {time.name}, {time.setting}: {time.noise}" for time in noisy)
    if busy := dict.fromkeys(time.busy for time in times if time.busy):
        yield f"busy: {', '.join(busy)}: alone on the machine these files are faster"


def _curves(result: Result) -> "Table":
    """p50 of each minute, and the temperature at its end; files in the order in which they ran."""
    curves = result.sustained
    minutes = range(1, max(len(curve.minutes) for curve in curves) + 1)
    title = f"without pause, one file after another: {curves[0].setting}"
    warmth = ["start"] if any(curve.started is not None for curve in curves) else []
    shown = _table(title, "file", *warmth, *(f"min {each}" for each in minutes), "last / first")
    for curve in curves:
        cells = [
            f"{p50:.2f} ms {_degrees(celsius)}".strip()
            for p50, celsius in zip(curve.minutes, curve.temperatures, strict=True)
        ]
        shown.add_row(
            curve.name,
            *(_degrees(curve.started) for _ in warmth),
            *cells,
            f"{curve.minutes[-1] / curve.minutes[0]:.2f}",
        )
    shown.caption = "\n".join(_disturbed(result)) or None
    return shown


def _disturbed(result: Result) -> Iterator[str]:
    """Curves that were slow before any heat could make them so: they were not interleaved, and have no second pass."""
    raced = {(time.name, time.setting): time.p50_ms for time in result.latencies}
    for curve in result.sustained:
        beside = raced.get((curve.name, curve.setting))
        if beside and curve.minutes[0] > NOISE_FACTOR * beside:
            yield (
                f"{curve.name}: {curve.minutes[0] / beside:.2f} times its p50 in the race from the first minute on: "
                "something else used the machine, or it was hot already"
            )


def _degrees(celsius: float | None) -> str:
    return "" if celsius is None else f"{celsius:.0f} C"


MOST_SHOWN = 12
"""Products; report.json has them all."""


def table(done: Quantized) -> "Table":
    """One line per file; agreement is with fp32."""
    from rich.table import Table

    proof, p50 = done.proof, {time.name: time for time in done.times}
    title = f"{proof.method}, on {proof.rows:,} {proof.split} rows of {proof.data}, {proof.device}, {proof.runtime}"
    shown = Table(title=title, title_justify="left")
    for name in ("file", proof.metric, "agreement", "MB", "p50 ms", "ratio"):
        shown.add_column(name, justify="left" if name == "file" else "right", overflow="fold")
    score = {"fp32": (f"{proof.before:.4f}", ""), "int8": (f"{proof.after:.4f}", f"{proof.agreement:.4f}")}
    for name, megabytes in done.sizes.items():
        cells = score.get(name, ("", ""))
        shown.add_row(name, *cells, f"{megabytes:.1f}", *_timed(p50[name], p50["fp32"]))
    setting = done.times[0].setting
    shown.caption = (
        f"p50 of one row of {setting.seq} tokens on one thread; ratio to fp32"
        + (f"; {BEFORE}: the bundle's int8 file until now" if BEFORE in done.sizes else "")
        + ("; noisy: measure again with `compress bench`" if any(time.noisy for time in done.times) else "")
    )
    return shown


def words(done: Quantized) -> str:
    """What stayed in float32, and the verdict."""
    proof = done.proof
    kept = [layer(name) for name in proof.kept]
    more = f" and {len(kept) - MOST_SHOWN} more" if len(kept) > MOST_SHOWN else ""
    lines = [f"in float32: {'; '.join(kept[:MOST_SHOWN])}{more}" if kept else "in float32: no product"]
    if price := done.mixed.price():
        lines.append(price)
    lines.append(f"{'certified' if proof.certified else 'NOT certified'}: {proof.reason}")
    if not proof.certified:
        lines.append(f"The nearest file found is in the bundle, marked uncertified.{_further(proof.method)}")
    return "\n".join(lines)


def as_json(done: Quantized) -> str:
    found = {
        "bundle": str(done.bundle.path),
        "certificate": asdict(done.proof),
        "float_cost": asdict(done.mixed.cost) if done.mixed.cost else None,
        "sensitivity": [asdict(each) for each in done.mixed.sensitivity],
        "latencies": [asdict(each) for each in done.times],
    }
    return json.dumps(found, ensure_ascii=False, indent=1)


def _further(method: str) -> str:
    """What may come nearer than `method`, as a certificate names it."""
    if "learned in training" in method:
        return ""
    return " Try --method qat." if method.startswith("SmoothQuant") else " Try --method smoothquant or qat."


def _timed(time: Latency, fp32: Latency) -> tuple[str, str]:
    return f"{time.p50_ms:.2f}" + (" (noisy)" if time.noisy else ""), f"{time.p50_ms / fp32.p50_ms:.2f}"
