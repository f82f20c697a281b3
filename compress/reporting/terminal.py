"""Print results: tables laid out for a terminal, and what commands say as text or as JSON."""

import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from compress.records.bench_result import Result
from compress.records.latency import NOISE_FACTOR, Sustained
from compress.reporting import format as units
from compress.reporting.compare import Comparison, Limits, Pick
from compress.reporting.format import MISSING
from compress.reporting.remarks import choice_headline, choice_remarks
from compress.reporting.tables import LAST, Cell, Line, ResultTable, column, latency_tables, race_table

if TYPE_CHECKING:
    from compress.exporters.formats import ExportedFile, ExportResult
    from compress.quantization.select import Quantized

NAME_WIDTH = 28
HEADING_WIDTH = 10
CAPTION_WIDTH = 56
MOST_SHOWN = 12
"""Products that a terminal names; report.json has them all."""


def to_terminal(table: ResultTable, width: int | None = None) -> Table:
    """Lay a table out for a terminal: where it is narrow, columns of high rank go, and the caption says which."""
    measured = [one for one in table.columns if one.rank < LAST]
    shown = [
        (one, "\n".join(textwrap.wrap(one.alone or one.heading, HEADING_WIDTH, break_long_words=False)), one.cells)
        for one in measured
    ]
    names = [line.name if line.number is None else f"{line.number}  {line.name}" for line in table.rows]
    styles = {"student": "bold", "baseline": "dim"}

    def wide(heading: str, cells: Sequence[Cell]) -> int:
        return max(len(part) for text in (heading, *(cell.text for cell in cells)) for part in text.split("\n")) + 2

    room = min(NAME_WIDTH, max(map(len, names), default=0)) + 1
    while width and len(shown) > 1 and room + sum(wide(heading, cells) for _, heading, cells in shown) > width:
        shown.remove(max(shown, key=lambda each: each[0].rank))
    gone = [one.heading for one in measured if not any(one is each for each, _, _ in shown)]
    caption = [*table.caption, f"not shown here: {', '.join(gone)}"] if gone else table.caption
    laid = Table(
        title=Text(table.title, style="bold"), caption=Text("; ".join(caption), style="dim"), title_justify="left",
        caption_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0),
        min_width=min(width or CAPTION_WIDTH, CAPTION_WIDTH),
    )  # fmt: skip
    used = sum(wide(heading, cells) for _, heading, cells in shown)
    laid.add_column("", max_width=max(NAME_WIDTH, (width or 0) - used - 1), overflow="fold")
    for _, heading, _ in shown:
        laid.add_column(Text(heading), justify="right", no_wrap=True)
    for index, (line, name) in enumerate(zip(table.rows, names, strict=True)):
        cells = (Text(cells[index].text) for _, _, cells in shown)
        laid.add_row(Text(name), *cells, style=styles.get(line.role, ""))
    return laid


def bench_tables(result: Result) -> Iterator[Table]:
    """Yield what was measured on one device: what it is, the race at each setting, sustained curves."""
    facts = Table.grid(padding=(0, 2))
    for name, value in {"measured on": result.device, **result.machine}.items():
        facts.add_row(name, value)
    yield facts
    yield from map(to_terminal, latency_tables((time.name, time) for time in result.latencies))
    if result.sustained:
        yield to_terminal(_curves(result))


def _curves(result: Result) -> ResultTable:
    """Lay out p50 of each minute, and the temperature at its end; files in the order in which they ran."""
    curves = result.sustained

    def degrees(celsius: float | None) -> str:
        return "" if celsius is None else f" {celsius:.0f} C"

    of = partial(column, curves, "")
    columns = [of("start", lambda one: degrees(one.started).strip() or MISSING, 0)]
    for at in range(max(len(curve.minutes) for curve in curves)):

        def minute(one: Sustained, at: int = at) -> str:
            return f"{one.minutes[at]:.2f} ms{degrees(one.temperatures[at])}" if at < len(one.minutes) else MISSING

        columns.append(of(f"min {at + 1}", minute, 0))
    columns.append(of("last / first", lambda one: f"{one.minutes[-1] / one.minutes[0]:.2f}", 0))
    raced = {(time.name, time.setting): time.p50_ms for time in result.latencies}
    notes = [
        f"{one.name}: {one.minutes[0] / beside:.2f} times its p50 in the race from the first minute on: "
        "something else used the machine, or it was hot already"
        for one in curves
        if (beside := raced.get((one.name, one.setting))) and one.minutes[0] > NOISE_FACTOR * beside
    ]
    title = f"without pause, one file after another: {curves[0].setting}"
    return ResultTable.build((Line(one.name) for one in curves), columns, title, notes)


def quantized_text(done: "Quantized") -> str:
    """Say what quantisation cost, what stayed in float32, and the verdict."""
    from compress.exporters.rewrite.graph import layer

    proof, kept = done.proof, units.listed([layer(name) for name in done.proof.kept], MOST_SHOWN)
    lines = [
        f"{proof.method}, on {proof.rows:,} {proof.split} rows of {proof.data}, {proof.device}, {proof.runtime}",
        f"{proof.metric} {proof.before:.4f} of fp32, {proof.after:.4f} of int8; agreement {proof.agreement:.4f}",
        "; ".join(f"{name} {size:.1f} MB" for name, size in done.sizes.items()),
        f"in float32: {kept or 'no product'}",
        done.mixed.price() or "",
        f"{'certified' if proof.certified else 'NOT certified'}: {proof.reason}",
    ]
    if not proof.certified:
        # methods that may come nearer
        others = "qat" if proof.method.startswith("SmoothQuant") else "smoothquant or qat"
        advice = "" if "learned in training" in proof.method else f" Try --method {others}."
        lines.append(f"The nearest file found is in the bundle, marked uncertified.{advice}")
    return "\n".join(filter(None, lines))


def quantized_json(done: "Quantized") -> str:
    """Write certificate, costs and latencies as JSON."""
    found = {
        "bundle": str(done.bundle.path),
        "certificate": asdict(done.proof),
        "float_cost": asdict(done.mixed.cost) if done.mixed.cost else None,
        "sensitivity": [asdict(each) for each in done.mixed.sensitivity],
        "latencies": [asdict(each) for each in done.times],
    }
    return json.dumps(found, ensure_ascii=False, indent=1)


def export_lines(exported: "ExportResult", width: int | None = None) -> Iterator[Table | str]:
    """Yield what an export says in a terminal: what was raced and the files as tables, then verdicts and warnings."""
    if exported.tried:
        yield to_terminal(race_table(exported.tried), width)
        yield from (f"{one.variant}: {one.reason}" for one in exported.tried if one.reason)
    of = partial(column, exported.files)

    def megabytes(made: "ExportedFile") -> str:
        return f"{sum(exported.sizes[name] for name in (made.file, *made.with_files)) / 1e6:.2f}"

    def apart(made: "ExportedFile") -> str:
        return f"{made.difference.largest:.1e} of {made.difference.logit:.2g}" if made.difference else MISSING

    columns = [
        of("", "precision", lambda made: made.precision or MISSING, 1),
        of("", "MB", megabytes, 2),
        of("", "differs by", apart, 3),
        of("", "what", lambda made: made.note or MISSING, 4),
    ]
    yield to_terminal(ResultTable.build((Line(made.file) for made in exported.files), columns), width)
    yield from exported.verdicts
    yield from (f"warning: {warning}" for warning in exported.warnings)
    yield f"{exported.path}: export.json says what is in it"


def choice_values(comparison: Comparison, limits: Limits, chosen: Pick) -> dict[str, Any]:
    """Return what the table and the page say, in values that JSON can hold."""
    front = comparison.front(lambda one: one.median_ms(comparison.view))
    paths = {bundle.name: str(bundle.path) for bundle in comparison.bundles}
    view = comparison.view
    return {
        "metric": comparison.task.metric,
        "rows": None if comparison.basis is None else vars(comparison.basis),
        "view": None if view is None else {"device": view.device, **vars(view.setting)},
        "limits": vars(limits),
        "pick": chosen.candidate.name if chosen.candidate else None,
        "headline": choice_headline(comparison, limits, chosen),
        "remarks": choice_remarks(comparison, chosen),
        "candidates": [
            {
                "name": one.name,
                "path": paths[one.bundle],
                "precision": one.precision,
                "sha256": one.sha256,
                "score": comparison.score(one),
                "drop": comparison.drop(one),
                "macro_f1": comparison.macro_f1(one),
                "classes": [asdict(each) for each in comparison.classes(one)],
                "fallen": [asdict(each) for each in one.fallen],
                "certified": one.certified,
                "reason": one.reason,
                "size_mb": one.size_mb,
                "parameters": one.parameters,
                "front": one in front,
                "latency": [
                    {"device": device, **vars(setting), **vars(found), "setting": str(setting)}
                    for device, there in one.times.items()
                    for setting, found in there.items()
                ],
            }
            for one in comparison.candidates
        ],
    }
