"""The comparison as a terminal table that fits: what is least telling goes first, and the caption says what went."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from compress.records.run_report import Report, Row
from compress.reporting import compare
from compress.reporting import format as units
from compress.reporting.candidates import Candidate
from compress.reporting.cells import agreement
from compress.reporting.compare import Choice, Limits, Pick, View, median_ms, timing
from compress.reporting.remarks import compare_rows

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


def render_table(report: Report, width: int) -> Table:
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
    comparison = compare_rows(report, row)
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


CERTIFIED = {True: "yes", False: "no", None: units.MISSING}


def choice_table(choice: Choice, chosen: Pick, width: int) -> Table:
    """Candidates by score, not wider than `width` columns; the pick in bold."""
    rows = (*choice.teachers, *choice.candidates)
    styles = {id(one): "dim" for one in choice.teachers} | {id(chosen.candidate): "bold"}
    caption = [compare.where(choice)]
    if choice.view:
        caption.append(f"latency of one forward: {choice.view.name}")
        caption.append("on front: no other is as good at less time")
    if any((found := timing(one, choice.view)) and found.noisy for one in rows):
        caption.append("~ noisy")
    return fitted(
        _choice_columns(choice, rows),
        [(one.name, styles.get(id(one), "")) for one in rows],
        width=width,
        title="Which model to ship",
        caption=caption,
    )


def plain(choice: Choice, limits: Limits, chosen: Pick) -> dict[str, Any]:
    """What the table and the page say, in values that JSON can hold."""
    front = choice.front(lambda one: median_ms(one, choice.view))
    return {
        "metric": choice.task.metric,
        "rows": None if choice.basis is None else vars(choice.basis),
        "view": None if choice.view is None else {"device": choice.view.place, **vars(choice.view.setting)},
        "limits": vars(limits),
        "pick": chosen.candidate.name if chosen.candidate else None,
        "headline": compare.choice_headline(choice, limits, chosen),
        "remarks": compare.choice_remarks(choice, chosen),
        "candidates": [
            {
                "name": one.name,
                "path": next(str(bundle.path) for bundle in choice.bundles if bundle.name == one.bundle),
                "precision": one.precision,
                "sha256": one.sha256,
                "by_name": one.by_name,
                "score": choice.score(one),
                "drop": choice.drop(one),
                "macro_f1": choice.macro_f1(one),
                "classes": [asdict(each) for each in choice.classes(one)],
                "fallen": [asdict(each) for each in one.fallen],
                "certified": one.certified,
                "reason": one.reason,
                "size_mb": one.size_mb,
                "parameters": one.parameters,
                "front": one in front,
                "latency": [
                    {"device": place, **vars(setting), **vars(found)}
                    for place, there in one.times.items()
                    for setting, found in there.items()
                ],
            }
            for one in choice.candidates
        ],
    }


def _choice_columns(choice: Choice, rows: tuple[Candidate, ...]) -> list[Column]:
    def column(rank: int, heading: str, cell: Callable[[Candidate], str]) -> Column:
        return Column(heading, tuple(cell(one) for one in rows), rank)

    front = choice.front(lambda one: median_ms(one, choice.view))
    times = [column(1 + 3 * (view != choice.view), _heading(view), _taken(view)) for view in choice.commonest()]
    return [
        column(0, choice.task.metric, lambda one: units.score(choice.score(one))),
        column(5, "vs fp32", lambda one: units.change(choice.drop(one))),
        column(3, "certified", lambda one: CERTIFIED[one.certified]),
        column(2, "MB", lambda one: units.three_digits(one.size_mb)),
        column(6, "params", lambda one: units.magnitude(one.parameters)),
        *times,
        column(1, "on\nfront", lambda one: "●" if one in front else units.MISSING),
    ]


def _heading(view: View) -> str:
    at = view.setting
    words = view.place if len(view.place) <= 14 else view.place.split(",")[0][:14]
    batch = f" x{at.batch}" if at.batch > 1 else ""
    threads = f" {at.threads}t" if at.threads > 1 else ""
    return f"p50 ms\n{words}\n{at.seq} tok{batch}{threads}"


def _taken(view: View) -> Callable[[Candidate], str]:
    def cell(one: Candidate) -> str:
        found = timing(one, view)
        return units.MISSING if found is None else f"{'~' if found.noisy else ''}{units.three_digits(found.p50_ms)}"

    return cell
