"""Render the result of a gate: for a terminal, as Markdown, and as JUnit's XML, which CI servers read."""

from functools import partial
from xml.etree import ElementTree

from compress.exporters.card import escaped
from compress.records.gate_result import GateCheck, GateResult
from compress.reporting import format as units
from compress.reporting.format import MISSING
from compress.reporting.tables import Line, ResultTable, column


def gate_table(result: GateResult) -> ResultTable:
    """Show each check on a line: both values, the change with its interval, the limit, the outcome."""
    of = partial(column, result.checks, "")
    columns = [
        of("old", lambda one: _value(one, one.old), 2),
        of("new", lambda one: _value(one, one.new), 1),
        of("change", lambda one: _change(one, one.change), 0),
        of("95 % interval", _interval, 3, alone="interval"),
        of("limit", _limit, 4),
        of("outcome", lambda one: one.outcome, 0),
    ]
    return ResultTable.build((Line(one.what) for one in result.checks), columns, f"gate: {result.outcome}")


def gate_markdown(result: GateResult) -> str:
    """Write a section with the table, a sentence on each check, and what it was measured on."""
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
        cells = " | ".join(escaped(one.cells[index].text) for one in table.columns)
        lines.append(f"| {row.name} | {cells} |")
    lines += ["", *(f"- {one.what}: {escaped(one.reason)}" for one in result.checks), ""]
    where = ", ".join(filter(None, (result.device, result.machine.get("cpu"), result.setting, result.date)))
    return "\n".join([*lines, f"Measured on {escaped(where)}.", ""])


def gate_junit(result: GateResult) -> str:
    """Write a test case for each check: failed is a failure, what cannot be told an error."""
    count = [one.outcome for one in result.checks].count
    suite = ElementTree.Element(
        "testsuite", name="compress gate", tests=str(len(result.checks)), failures=str(count("failed")),
        errors=str(count("cannot be told")), time=f"{result.seconds:.1f}", timestamp=result.date,
    )  # fmt: skip
    for one in result.checks:
        case = ElementTree.SubElement(suite, "testcase", classname="compress.gate", name=one.what)
        if one.outcome == "passed":
            ElementTree.SubElement(case, "system-out").text = one.reason
        else:
            ElementTree.SubElement(case, "failure" if one.outcome == "failed" else "error", message=one.reason)
    ElementTree.indent(suite)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"


def _value(check: GateCheck, value: float) -> str:
    return units.score(value) if check.what == "score" else units.measure(value, check.unit)


def _change(check: GateCheck, value: float | None) -> str:
    if value is None:
        return "?"
    unit = "" if check.what == "score" else f"{units.GAP}%"
    return f"{100 * value:+.{2 if check.what == 'score' else 1}f}{unit}".replace("-", "−")


def _interval(check: GateCheck) -> str:
    if check.what == "size":
        return MISSING
    return f"{_change(check, check.low)} to {_change(check, check.high)}".replace(f"{units.GAP}%", "")


def _limit(check: GateCheck) -> str:
    return MISSING if check.limit is None else _change(check, -check.limit if check.what == "score" else check.limit)
