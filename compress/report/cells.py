"""What the page's tables and key figures say, cell by cell."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from compress.report import units
from compress.report.headline import Comparison, compare, fallen_classes, shipped
from compress.report.report import Latency, Report, Row


@dataclass(frozen=True)
class Cell:
    """One measure of one row; `detail` in small print, as what it is beside the teacher's; tone: a class, `bad`."""

    text: str
    detail: str = ""
    tone: str = ""

    @property
    def missing(self) -> bool:
        return self.text == units.MISSING


@dataclass(frozen=True)
class Column:
    """One measure of every row, in their order; `group` is the heading over the headings.

    alone  the heading where there is no room for groups; '' where it is the same
    """

    group: str
    heading: str
    cells: tuple[Cell, ...]
    alone: str = ""


@dataclass(frozen=True)
class Line:
    """A row of a table: its name, the class of its colour, and where pictures call it by a number, that."""

    name: str
    role: str
    number: int | None = None


@dataclass(frozen=True)
class Sheet:
    """The rows of a table under its columns; those in which no row has anything are left out."""

    rows: tuple[Line, ...]
    columns: list[Column]

    @staticmethod
    def of(rows: Iterable[Line], columns: Iterable[Column]) -> "Sheet":
        return Sheet(tuple(rows), [one for one in columns if not all(cell.missing for cell in one.cells)])


@dataclass(frozen=True)
class Small:
    """A small table: its caption, what its rows are, headings, and (row's name, texts)."""

    caption: str
    corner: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]


def columns(report: Report) -> list[Column]:
    """The comparison, without the measures that no row has."""

    def column(group: str, heading: str, cell: Callable[[Row, Comparison | None], Cell]) -> Column:
        return Column(group, heading, tuple(cell(row, compare(report, row)) for row in report.rows))

    found = [
        column("Quality", units.metric(report.metric), lambda row, beside: _score(report, row, beside)),
        column("Quality", "macro F1", lambda row, _: Cell(units.score(report.macro_f1(row)))),
        column("Quality", "agreement", lambda row, _: Cell(agreement(report, row))),
        column("Model", "parameters", lambda row, beside: _part(units.magnitude(row.parameters), beside, "parameters")),
        column(
            "Model", "FLOPs / token", lambda row, beside: _part(units.magnitude(row.flops_per_token), beside, "flops")
        ),
        column("Model", "file, MB", lambda row, beside: _part(units.three_digits(row.file_mb), beside, "size")),
        column("Inference", "p50, ms", lambda row, beside: _median(report.latency(row), beside)),
        column("Inference", "p95, ms", lambda row, _: Cell(units.three_digits(slow(report.latency(row))))),
        column(
            "Inference", "peak, MB", lambda row, beside: _part(units.three_digits(row.peak_rss_mb), beside, "memory")
        ),
        column("Training", "time", lambda row, _: Cell(units.duration(row.train_seconds))),
        column("Training", "samples / s", lambda row, _: Cell(units.three_digits(row.samples_per_second))),
    ]
    return [one for one in found if not all(cell.missing for cell in one.cells)]


def by_class(report: Report) -> Sheet:
    """Recall, precision and F1 of every class, of teacher and students; those that a student lost come first."""
    rows = [row for row in report.rows if row.classes]
    scores = {row.name: {one.label: one for one in row.classes} for row in rows}
    hurt = {row.name: {one.label for one in fallen_classes(report, row)} for row in rows}
    first = set().union(*hurt.values())
    counts = {one.label: one.support for row in rows for one in row.classes}
    support = dict(sorted(counts.items(), key=lambda each: each[0] not in first))

    def column(measure: str, row: Row) -> Column:
        cells = []
        for label in support:
            one = scores[row.name].get(label)
            bad = measure == "recall" and label in hurt[row.name]
            cells.append(Cell(units.score(getattr(one, measure) if one else None), tone="bad" if bad else ""))
        heading = "teacher" if row.role == "teacher" else row.name.removeprefix("student ")
        name = units.metric(measure)
        return Column(name, heading, tuple(cells), alone=f"{name}, {heading}")

    there = Column("", "support", tuple(Cell(f"{count:,}") for count in support.values()))
    measured = [column(measure, row) for measure in ("recall", "precision", "f1") for row in rows]
    return Sheet.of((Line(label, "plain") for label in support), [there, *measured])


def groups(columns: list[Column]) -> list[tuple[str, int]]:
    """The headings over the headings, each with the number of columns it spans."""
    names = [one.group for one in columns]
    return [(name, names.count(name)) for name in dict.fromkeys(names)]


def key_figures(report: Report) -> list[tuple[str, str, str]]:
    """(what, value, in smaller letters) of the shipped student beside the teacher, as far as measured."""
    student, teacher = shipped(report), next(iter(report.of_role("teacher")), None)
    beside = compare(report, student) if student else None
    if student is None or teacher is None or beside is None:
        return []
    own, theirs = report.latency(student), report.latency(teacher)
    against = f"teacher {units.score(report.score(teacher))}"
    found = [(units.metric(report.metric), units.score(report.score(student)), against)]
    if beside.speed is not None:
        noisy = ", noisy" if any(one and one["noisy"] for one in (own, theirs)) else ""
        against = f"{units.measure(median(own), 'ms')} against {units.measure(median(theirs), 'ms')}{noisy}"
        found.append(("speed", units.times(beside.speed), against))
    if beside.size is not None:
        against = f"{units.measure(student.file_mb, 'MB')} against {units.measure(teacher.file_mb, 'MB')}"
        found.append(("size", units.percent(beside.size), against))
    if student.agreement is not None:
        how = "correlation with the teacher" if report.kind == "regression" else "answers as the teacher does"
        found.append(("agreement", agreement(report, student), how))
    return found


def median(latency: Latency | None) -> float | None:
    return latency["p50_ms"] if latency else None


def slow(latency: Latency | None) -> float | None:
    """The 95th percentile."""
    return latency["p95_ms"] if latency else None


def agreement(report: Report, row: Row) -> str:
    """A share in per cent, or a correlation as a number."""
    return units.score(row.agreement) if report.kind == "regression" else units.share(row.agreement)


def small_tables(report: Report) -> list[Small]:
    """All metrics where there are several, and all latency settings where there are several."""
    found = []
    metrics = tuple(dict.fromkeys(name for row in report.rows for name in row.score))
    if len(metrics) > 1:
        scores = tuple((row.name, tuple(units.score(row.score.get(name)) for name in metrics)) for row in report.rows)
        found.append(Small("All scores", "Model", tuple(units.metric(name) for name in metrics), scores))
    if len(report.settings) > 1:
        timed = [row for row in report.rows if row.latency]
        times = tuple((one, tuple(_both(report.latency(row, one)) for row in timed)) for one in report.settings)
        caption = "Latency at every setting, p50 / p95 in ms"
        found.append(Small(caption, "Setting", tuple(row.name for row in timed), times))
    return found


def verdict_cell(certified: bool | None, reason: str) -> Cell:
    """Whether a file is certified, and why or why not."""
    if certified is None:
        return Cell(units.MISSING)
    return Cell("yes", reason) if certified else Cell("no", reason, "bad")


def _score(report: Report, row: Row, beside: Comparison | None) -> Cell:
    detail = f"{units.share(beside.score)} kept" if beside and beside.score is not None else ""
    return Cell(units.score(report.score(row)), detail)


def _part(text: str, beside: Comparison | None, measure: str) -> Cell:
    ratio: float | None = getattr(beside, measure) if beside else None
    return Cell(text, "" if ratio is None else units.percent(ratio))


def _median(latency: Latency | None, beside: Comparison | None) -> Cell:
    details = []
    if beside and beside.speed is not None:
        faster = beside.speed >= 1
        details.append(f"{units.times(beside.speed)} faster" if faster else f"{units.times(1 / beside.speed)} slower")
    if latency and latency["noisy"]:
        details.append("noisy")
    if latency and latency.get("busy"):
        details.append("busy machine")
    return Cell(units.three_digits(median(latency)), ", ".join(details))


def _both(latency: Latency | None) -> str:
    if latency is None:
        return units.MISSING
    marks = " noisy" if latency["noisy"] else ""
    marks += " busy" if latency.get("busy") else ""
    return f"{units.three_digits(median(latency))} / {units.three_digits(slow(latency))}{marks}"
