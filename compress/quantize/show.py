"""What `compress quantize` shows: the file before and after, what stayed in float32, the verdict."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from compress.bench.protocol import Latency
from compress.quantize.pipeline import BEFORE, Quantized
from compress.quantize.products import layer

if TYPE_CHECKING:
    from rich.table import Table

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
