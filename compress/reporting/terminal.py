"""Print results in a terminal: tables, and the answers of commands as text or JSON."""

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from compress.exporters.card import escape
from compress.records.bench_result import BenchResult
from compress.records.forecast import Forecast
from compress.records.gate_result import GateCheck, GateResult
from compress.records.latency import NOISE_FACTOR, Sustained
from compress.reporting import format as units
from compress.reporting.compare import Comparison, Limits, Pick
from compress.reporting.format import MISSING
from compress.reporting.remarks import choice_headline, choice_remarks
from compress.reporting.tables import (
    PAGES_ONLY,
    Column,
    Line,
    ResultTable,
    column,
    latency_tables,
    race_table,
)

if TYPE_CHECKING:
    from compress.exporters.writers.context import ExportedFile, ExportResult
    from compress.quantization.select import Quantized


NAME_WIDTH = 40
"""Characters of the longest name that is not folded onto a second line."""
HEADING_WIDTH = 10
CAPTION_WIDTH = 56
NAMES_SHOWN = 12
"""The most matrix products, or labels, that are listed in a terminal; the JSON has
all."""


ANY_WIDTH = 1000
"""A width, in characters, that no table reaches."""


def to_terminal(table: ResultTable, width: int = ANY_WIDTH, *, more: str = "") -> Table:
    """Lay out a table for a terminal of this width, with as many columns as fit, by
    rank.

    more  the option that shows the other columns, for the caption
    """
    columns = [one for one in table.columns if one.rank < PAGES_ONLY]
    shown = list(columns)
    names = [
        line.name if line.number is None else f"{line.number}  {line.name}"
        for line in table.rows
    ]
    styles = {"student": "bold", "baseline": "dim"}

    def heading(one: Column) -> str:
        words = one.alone or one.heading
        return textwrap.fill(words, HEADING_WIDTH, break_long_words=False)

    def wide(one: Column) -> int:
        texts = "\n".join([heading(one), *(cell.text for cell in one.cells)])
        return max(map(len, texts.split("\n"))) + 2

    room = min(NAME_WIDTH, max(map(len, names), default=0)) + 1
    while len(shown) > 1 and room + sum(map(wide, shown)) > width:
        shown.remove(max(shown, key=lambda one: one.rank))
    caption = list(table.caption)
    if more and len(shown) < len(columns):
        caption.append(f"more columns: {more}")
    laid = Table(
        title=Text(table.title, style="bold"),
        caption=Text("; ".join(caption), style="dim"),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        min_width=min(width, CAPTION_WIDTH),
    )
    used = sum(map(wide, shown))
    laid.add_column("", max_width=max(NAME_WIDTH, width - used - 1), overflow="fold")
    for one in shown:
        laid.add_column(Text(heading(one)), justify="right", no_wrap=True)
    for index, (line, name) in enumerate(zip(table.rows, names, strict=True)):
        cells = (Text(one.cells[index].text) for one in shown)
        laid.add_row(Text(name), *cells, style=styles.get(line.role, ""))
    return laid


def print_table(
    console: Console,
    table: ResultTable,
    *,
    wide: bool = False,
    more: str = "--wide",
) -> None:
    """Print a table with the columns that fit, or with all of them; see
    `to_terminal`."""
    if wide:
        print_wide(console, to_terminal(table))
    else:
        console.print(to_terminal(table, console.width, more=more))


def print_wide(console: Console, table: Table) -> None:
    """Print a table at its full width, whatever the width of the terminal."""
    width = console.width
    console.width = ANY_WIDTH
    console.print(table)
    console.width = width


def print_bench(console: Console, result: BenchResult, *, wide: bool = False) -> None:
    """Print a result of `compress bench`: the device, a table for each setting, and the
    sustained runs."""
    facts = Table.grid(padding=(0, 2))
    for name, value in {"measured on": result.device, **result.machine}.items():
        facts.add_row(name, value)
    console.print(facts)
    names = units.short_names(
        [
            *(one.name for one in result.latencies),
            *(one.name for one in result.sustained),
        ]
    )
    for table in latency_tables(
        ((names[time.name], time) for time in result.latencies), result.formats
    ):
        print_table(console, table, wide=wide)
    if result.sustained:
        print_table(console, _tabulate_sustained(result, names), wide=wide)
    groups: dict[str, list[str]] = {}
    for name, reason in result.left_out.items():
        groups.setdefault(reason, []).append(name)
    if groups:
        reasons = "; ".join(
            f"{', '.join(names)} ({reason})" for reason, names in groups.items()
        )
        console.print(f"left out: {reasons}", markup=False, highlight=False)
    if result.install:
        console.print(
            f"to measure more, in a separate environment: {result.install}",
            markup=False,
            highlight=False,
        )


def _tabulate_sustained(result: BenchResult, names: Mapping[str, str]) -> ResultTable:
    """Tabulate the p50 of each minute and the temperature at its end, for each file in
    the order in which they ran."""
    curves = result.sustained

    def degrees(celsius: float | None) -> str:
        return "" if celsius is None else f" {celsius:.0f} C"

    of = partial(column, curves, "")
    columns = [of("start", lambda one: degrees(one.started).strip() or MISSING, 0)]
    for at in range(max(len(curve.minutes) for curve in curves)):

        def minute(one: Sustained, at: int = at) -> str:
            return (
                f"{one.minutes[at]:.2f} ms{degrees(one.temperatures[at])}"
                if at < len(one.minutes)
                else MISSING
            )

        columns.append(of(f"min {at + 1}", minute, at + 1))
    columns.append(
        of("last / first", lambda one: f"{one.minutes[-1] / one.minutes[0]:.2f}", 0)
    )
    raced = {(time.name, time.setting): time.p50_ms for time in result.latencies}
    notes = [
        f"{one.name}: {one.minutes[0] / race:.2f} times its p50 in the race from the "
        "first minute on: the machine was busy, or already hot"
        for one in curves
        if (race := raced.get((one.name, one.setting)))
        and one.minutes[0] > NOISE_FACTOR * race
    ]
    title = f"without pause, one file after another: {curves[0].setting}"
    return ResultTable.build(
        (Line(names[one.name]) for one in curves), columns, title, notes
    )


def format_quantized(done: "Quantized") -> str:
    """Describe what quantisation costs, what stays in float32, and the verdict."""
    from compress.exporters.rewrite.graph import layer

    proof = done.proof
    in_float = units.join_names([layer(name) for name in proof.kept], NAMES_SHOWN)
    lines = [
        f"{proof.method}, {proof.data}, {proof.place}; {proof.device}, {proof.runtime}",
        f"{proof.metric} {proof.before:.4f} in fp32, {proof.after:.4f} in int8; "
        f"agreement {proof.agreement:.4f}",
        "; ".join(f"{name} {size:.1f} MB" for name, size in done.sizes.items()),
        f"in float32: {in_float or 'no product'}",
        done.mixed.price() or "",
        f"{'certified' if proof.certified else 'NOT certified'}: {proof.reason}",
        proof.warning,
    ]
    if not proof.certified:
        # methods that may lose less
        others = (
            "qat" if proof.method.startswith("SmoothQuant") else "smoothquant or qat"
        )
        advice = (
            "" if "learned in training" in proof.method else f" Try --method {others}."
        )
        lines.append(
            f"The best file found is in the bundle, marked uncertified.{advice}"
        )
    return "\n".join(filter(None, lines))


def quantized_values(done: "Quantized") -> dict[str, Any]:
    """Return certificate, costs and latencies as JSON values."""
    return {
        "bundle": str(done.bundle.path),
        "certificate": asdict(done.proof),
        "float_cost": asdict(done.mixed.cost) if done.mixed.cost else None,
        "sensitivity": [asdict(one) for one in done.mixed.sensitivity],
        "latencies": [asdict(one) for one in done.times],
    }


def print_export(
    console: Console,
    exported: "ExportResult",
    *,
    wide: bool = False,
) -> None:
    """Print the result of an export: tables of the race and of the files, then verdicts
    and warnings."""
    say = partial(console.print, markup=False, highlight=False)
    if exported.tried:
        print_table(console, race_table(exported.tried), wide=wide)
        for one in exported.tried:
            if one.reason:
                say(f"{one.variant}: {one.reason}")
    of = partial(column, exported.files)

    def megabytes(made: "ExportedFile") -> str:
        size = sum(exported.sizes[name] for name in (made.file, *made.with_files))
        return f"{size / 1e6:.2f}"

    def apart(made: "ExportedFile") -> str:
        return (
            units.difference(made.difference.largest, made.difference.logit)
            if made.difference
            else MISSING
        )

    columns = [
        of("", "precision", lambda made: made.precision or MISSING, 1),
        of("", "MB", megabytes, 2),
        of("", "differs by", apart, 3),
        of("", "what", lambda made: made.note or MISSING, 4),
    ]
    print_table(
        console,
        ResultTable.build((Line(made.file) for made in exported.files), columns),
        wide=wide,
    )
    for verdict in exported.verdicts:
        say(verdict)
    for warning in exported.warnings:
        say(f"warning: {warning}")
    if exported.interface is not None:
        for what, ports in vars(exported.interface).items():
            shown = [str(port) for port in ports[:NAMES_SHOWN]]
            more = [f"{len(ports) - len(shown)} more"] * (len(ports) > len(shown))
            say(f"{what}: {'; '.join([*shown, *more])}")
    if exported.labels:
        say(f"labels: {units.join_names(exported.labels, NAMES_SHOWN)}")
    if exported.snippets:
        say(f"README.md has code: {'; '.join(exported.snippets)}")
    say(f"{exported.path}: export.json says what is in it")


def choice_values(
    comparison: Comparison,
    limits: Limits,
    chosen: Pick,
) -> dict[str, Any]:
    """Return the contents of the table and the page as JSON values."""
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
                    {
                        "device": device,
                        **vars(setting),
                        **vars(found),
                        "setting": str(setting),
                    }
                    for device, there in one.times.items()
                    for setting, found in there.items()
                ],
            }
            for one in comparison.candidates
        ],
    }


def forecast_lines(forecast: Forecast) -> Iterator[str]:
    """Yield the lines of a forecast: one for each phase, the totals, and the budgets
    that cannot be met."""
    yield forecast.title
    width = max(len(phase.name) for phase in forecast.phases)
    for phase in forecast.phases:
        steps = f"{_span(*phase.steps, '{:,.0f}')} steps" if phase.steps[1] else ""
        speed = (
            f"{phase.samples_per_second:,.1f} samples/s"
            if phase.samples_per_second
            else ""
        )
        disk = f"{phase.disk_mb:,.0f} MB" if phase.disk_mb >= 1 else ""
        took = "cached" if phase.cached else _span(*phase.seconds, "{:.1f} min", 60)
        yield (
            f"  {phase.name:<{width}}  "
            f"{', '.join(filter(None, (took, steps, speed, disk, phase.note)))}"
        )
    memory = (
        f"{forecast.peak_rss_mb / 1000:.1f} GB of memory at the peak"
        if forecast.peak_rss_mb
        else "memory not known"
    )
    together = _span(*forecast.minutes, "{:.1f} min")
    likely = f", probably {forecast.likely_minutes:.1f}" if " to " in together else ""
    yield f"together {together}{likely}, {memory}, {forecast.disk_mb:,.0f} MB of disk"
    if not forecast.keeps_limit:
        yield (
            f"out of reach: --minutes {forecast.limit:g}; all but the training takes "
            f"{forecast.minutes[0]:.1f}"
        )
    yield from (f"out of reach: {budget}" for budget in forecast.out_of_reach)


def _span(least: float, most: float, form: str, unit: float = 1) -> str:
    first = form.format(least / unit)
    last = form.format(most / unit)
    return last if first == last else f"{first.split(' ')[0]} to {last}"


def gate_table(result: GateResult) -> ResultTable:
    """Lay out the checks: both values, the change with its interval, the limit, the
    outcome."""
    of = partial(column, result.checks, "")
    columns = [
        of("old", lambda one: _value(one, one.old), 2),
        of("new", lambda one: _value(one, one.new), 1),
        of("change", lambda one: _change(one, one.change), 0),
        of("95 % interval", _interval, 3, alone="interval"),
        of("limit", _limit, 4),
        of("outcome", lambda one: one.outcome, 0),
    ]
    return ResultTable.build(
        (Line(one.what) for one in result.checks), columns, f"gate: {result.outcome}"
    )


def gate_markdown(result: GateResult) -> str:
    """Write a Markdown section with the table, a sentence on each check, and the
    device."""
    table = gate_table(result)
    lines = [
        f"## Gate: {result.outcome}",
        "",
        f"`{result.new}` against `{result.old}`",
        "",
        f"| | {' | '.join(one.heading for one in table.columns)} |",
        "|---" * (len(table.columns) + 1) + "|",
    ]
    for index, row in enumerate(table.rows):
        cells = " | ".join(escape(one.cells[index].text) for one in table.columns)
        lines.append(f"| {row.name} | {cells} |")
    lines += ["", *(f"- {one.what}: {escape(one.reason)}" for one in result.checks), ""]
    facts = (result.device, result.machine.get("cpu"), result.setting, result.date)
    where = ", ".join(filter(None, facts))
    return "\n".join([*lines, f"Measured on {escape(where)}.", ""])


def gate_junit(result: GateResult) -> str:
    """Write JUnit XML with a test case for each check: `failed` becomes a failure,
    `cannot be told` an error."""
    count = [one.outcome for one in result.checks].count
    suite = ElementTree.Element(
        "testsuite",
        name="compress gate",
        tests=str(len(result.checks)),
        failures=str(count("failed")),
        errors=str(count("cannot be told")),
        time=f"{result.seconds:.1f}",
        timestamp=result.date,
    )
    for one in result.checks:
        case = ElementTree.SubElement(
            suite,
            "testcase",
            classname="compress.gate",
            name=one.what,
        )
        if one.outcome == "passed":
            ElementTree.SubElement(case, "system-out").text = one.reason
        else:
            ElementTree.SubElement(
                case,
                "failure" if one.outcome == "failed" else "error",
                message=one.reason,
            )
    ElementTree.indent(suite)
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        + ElementTree.tostring(suite, encoding="unicode")
        + "\n"
    )


def _value(check: GateCheck, value: float) -> str:
    return (
        units.score(value)
        if check.what == "score"
        else units.measure(value, check.unit)
    )


def _change(check: GateCheck, value: float | None) -> str:
    if value is None:
        return "?"
    unit = "" if check.what == "score" else f"{units.GAP}%"
    return f"{100 * value:+.{2 if check.what == 'score' else 1}f}{unit}".replace(
        "-", "−"
    )


def _interval(check: GateCheck) -> str:
    if check.what == "size":
        return MISSING
    return f"{_change(check, check.low)} to {_change(check, check.high)}".replace(
        f"{units.GAP}%", ""
    )


def _limit(check: GateCheck) -> str:
    return (
        MISSING
        if check.limit is None
        else _change(check, -check.limit if check.what == "score" else check.limit)
    )
