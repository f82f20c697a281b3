"""The comparison as a terminal table that fits: what is least telling goes first, and the caption says what went."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from compress.report import units
from compress.report.cells import agreement
from compress.report.headline import compare
from compress.report.report import Report, Row

NAME_WIDTH = 28
CAPTION_WIDTH = 56


@dataclass(frozen=True)
class Column:
    """One measure: its heading, its cells in the order of the rows, and its rank (0 stays longest)."""

    heading: str
    cells: tuple[str, ...]
    rank: int

    @property
    def width(self) -> int:
        return max(len(part) for text in (self.heading, *self.cells) for part in text.split("\n"))

    @property
    def empty(self) -> bool:
        return all(cell == units.MISSING for cell in self.cells)


def table(report: Report, width: int) -> Table:
    """The rows of `report`, not wider than `width` columns."""
    styles = {"baseline": "dim", "teacher": "", "student": "bold"}
    rows = [(row.name, styles[row.role]) for row in report.rows]
    return fitted(_columns(report), rows, width=width, title=report.title, caption=_caption(report))


def fitted(
    columns: Sequence[Column], rows: Sequence[tuple[str, str]], *, width: int, title: str, caption: Sequence[str]
) -> Table:
    """The columns that have something to say and find room; `rows`: (name, style). The caption says which did not."""
    measured = [column for column in columns if not column.empty]
    shown = list(measured)
    names = min(NAME_WIDTH, max([len(name) for name, _ in rows], default=0))
    while len(shown) > 1 and names + 1 + sum(column.width + 2 for column in shown) > width:
        shown.remove(max(shown, key=lambda column: column.rank))
    left_out = [column.heading.replace("\n", " ") for column in measured if column not in shown]
    words = [*caption, f"not shown here: {', '.join(left_out)}"] if left_out else caption
    result = Table(
        title=Text(title, style="bold"),
        caption=Text("; ".join(words), style="dim"),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        min_width=min(width, CAPTION_WIDTH),
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    result.add_column("", max_width=NAME_WIDTH, overflow="fold")
    for column in shown:
        result.add_column(Text(column.heading), justify="right", no_wrap=True)
    for index, (name, style) in enumerate(rows):
        result.add_row(Text(name), *(Text(column.cells[index]) for column in shown), style=style)
    return result


def _columns(report: Report) -> list[Column]:
    def column(rank: int, heading: str, cell: Callable[[Row], str]) -> Column:
        return Column(heading, tuple(cell(row) for row in report.rows), rank)

    return [
        column(0, report.metric, lambda row: units.score(report.score(row))),
        column(5, "kept", lambda row: _kept(report, row)),
        column(4, "macro\nF1", lambda row: units.score(report.macro_f1(row))),
        column(1, "agree", lambda row: agreement(report, row)),
        column(4, "params", lambda row: units.magnitude(row.parameters)),
        column(8, "FLOPs /\ntoken", lambda row: units.magnitude(row.flops_per_token)),
        column(3, "MB", lambda row: units.three_digits(row.file_mb)),
        column(2, "p50 / p95\nms", lambda row: _times(report, row)),
        column(7, "peak\nMB", lambda row: units.three_digits(row.peak_rss_mb)),
        column(6, "train", lambda row: units.duration(row.train_seconds)),
        column(9, "samples\n/ s", lambda row: units.three_digits(row.samples_per_second)),
    ]


def _kept(report: Report, row: Row) -> str:
    comparison = compare(report, row)
    return units.share(comparison.score if comparison else None)


def _times(report: Report, row: Row) -> str:
    found = report.latency(row)
    if found is None:
        return units.MISSING
    times = f"{units.three_digits(found['p50_ms'])} / {units.three_digits(found['p95_ms'])}"
    return f"~{times}" if found["noisy"] else times


def _caption(report: Report) -> list[str]:
    parts = [f"{units.metric(report.metric)} on {report.split}, {report.split_rows:,} rows"]
    if report.settings:
        parts.append(f"latency of one forward: {report.settings[0]}")
    if any((found := report.latency(row)) and found["noisy"] for row in report.rows):
        parts.append(f"~ noisy: {report.noise or 'the machine was disturbed while timing'}")
    elif report.noise:
        parts.append(f"timing: {report.noise}")
    return parts
