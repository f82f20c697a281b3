"""What the page's tables and key figures say, cell by cell."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from compress.records.latency import Setting
from compress.records.run_report import Latency, Report, Row
from compress.reporting import format as units
from compress.reporting.candidates import Candidate, Place, Timing
from compress.reporting.compare import Choice, Pick, View, median_ms, timing
from compress.reporting.remarks import Comparison, compare_rows, fallen_classes, shipped


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
        return Column(group, heading, tuple(cell(row, compare_rows(report, row)) for row in report.rows))

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
    beside = compare_rows(report, student) if student else None
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


def choice_figures(choice: Choice, chosen: Pick) -> list[tuple[str, str, str]]:
    """(what, value, in smaller letters) of the pick, as far as measured."""
    one = chosen.candidate
    if one is None:
        return []
    teacher = next(iter(choice.teachers), None)
    beside = f"{teacher.name} {units.score(choice.score(teacher))}" if teacher else ""
    found = [(units.metric(choice.task.metric), units.score(choice.score(one)), beside)]
    took, view = timing(one, choice.view), choice.view
    if took and view:
        theirs = median_ms(teacher, view) if teacher else None
        faster = f"{units.times(theirs / took.p50_ms)} the teacher’s speed" if theirs else ""
        found.append(("latency, p50", units.measure(took.p50_ms, "ms"), faster or view.name))
    if one.size_mb is not None:
        of = teacher.size_mb if teacher else None
        beside = f"{units.percent(one.size_mb / of)} of the teacher’s" if of else ""
        found.append(("file", units.measure(one.size_mb, "MB"), beside))
    drop = choice.drop(one)
    if one.certified is not None:
        found.append(("certified", verdict_cell(one.certified, one.reason).text, one.reason))
    elif drop is not None:
        found.append(("beside its fp32", units.change(drop), f"of {units.metric(choice.task.metric)}"))
    return found


def sheet(choice: Choice, chosen: Pick) -> Sheet:
    """Every candidate after the teachers: score, proof, size, and times on each device; without empty columns."""
    rows = (*choice.teachers, *choice.candidates)

    def column(group: str, heading: str, cell: Callable[[Candidate], Cell]) -> Column:
        return Column(group, heading, tuple(cell(one) for one in rows))

    columns = [
        column("Quality", units.metric(choice.task.metric), lambda one: _choice_score(choice, one)),
        column("Quality", "macro F1", lambda one: Cell(units.score(choice.macro_f1(one)))),
        column("Quality", "vs its fp32", lambda one: Cell(units.change(choice.drop(one)))),
        column("Quality", "certified", lambda one: verdict_cell(one.certified, one.reason)),
        column("Model", "parameters", lambda one: Cell(units.magnitude(one.parameters))),
        column("Model", "file, MB", lambda one: Cell(units.three_digits(one.size_mb))),
    ]
    views = choice.commonest()
    same = len({view.setting for view in views}) == 1
    for view in views:
        group, at = (f"p50 at {_short(view.setting)}", "") if same else ("p50", f" at {_short(view.setting)}")
        columns.append(column(group, f"{view.place}, ms{at}", _time(view)))
    columns += [column("Memory", "peak, MB", _memory(choice.view))]
    return Sheet.of((_line(choice, one, chosen.candidate) for one in rows), columns)


def times(choice: Choice) -> list[tuple[Place, tuple[Small, ...]]]:
    """Of each device: p50, p95 and least at every setting, and what it takes to start."""
    found = []
    for place in choice.places:
        settings = choice.settings(place.name)
        rows = [one for one in (*choice.teachers, *choice.candidates) if place.name in one.times]
        if not rows or not settings:
            continue
        cells = tuple((one.name, tuple(_three(timing(one, View(place.name, at))) for at in settings)) for one in rows)
        names = tuple(map(str, settings))
        tables = [Small("p50 / p95 / least of one forward, ms", "Model", names, cells)]
        first = View(place.name, settings[0])
        started = [(one, at) for one in rows if (at := timing(one, first)) and at.init_ms is not None]
        if started:
            starts = tuple((one.name, _start(at)) for one, at in started)
            headings = ("opening, ms", "first forward, ms", "p99, ms", "peak memory, MB")
            tables.append(Small(f"To start, at {names[0]}", "Model", headings, starts))
        found.append((place, tuple(tables)))
    return found


def _line(choice: Choice, one: Candidate, picked: Candidate | None) -> Line:
    if one.role == "teacher":
        return Line(one.name, "teacher")
    return Line(one.name, "student" if one is picked else "plain", choice.number(one))


def _choice_score(choice: Choice, one: Candidate) -> Cell:
    score = choice.score(one)
    if score is None and one.scores:
        basis, other = next(iter(one.scores.items()))
        return Cell(units.MISSING, f"{units.score(other)} on other rows: {basis}")
    return Cell(units.score(score))


def _time(view: View) -> Callable[[Candidate], Cell]:
    def cell(one: Candidate) -> Cell:
        found = timing(one, view)
        if found is None:
            return Cell(units.MISSING)
        slow = f"p95{units.GAP}{units.three_digits(found.p95_ms)}"
        marks = (", noisy" if found.noisy else "") + (", busy" if found.busy else "")
        return Cell(units.three_digits(found.p50_ms), slow + marks)

    return cell


def _memory(view: View | None) -> Callable[[Candidate], Cell]:
    def cell(one: Candidate) -> Cell:
        found = timing(one, view)
        return Cell(units.three_digits(found.peak_rss_mb if found else None))

    return cell


def _three(found: Timing | None) -> str:
    if found is None:
        return units.MISSING
    figures = " / ".join(units.three_digits(value) for value in (found.p50_ms, found.p95_ms, found.min_ms))
    return f"~{figures}" if found.noisy else figures


def _start(found: Timing) -> tuple[str, ...]:
    return tuple(map(units.three_digits, (found.init_ms, found.first_ms, found.p99_ms, found.peak_rss_mb)))


def _short(setting: Setting) -> str:
    batch = f", batch {setting.batch}" if setting.batch > 1 else ""
    threads = f", {setting.threads} threads" if setting.threads > 1 else ""
    return f"{setting.seq} tokens{batch}{threads}"
