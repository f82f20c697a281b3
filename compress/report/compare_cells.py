"""What the page of a choice says, cell by cell: key figures, the table of candidates, the times on every device."""

from collections.abc import Callable

from compress.bench.protocol import Setting
from compress.report import units
from compress.report.candidates import Candidate, Place, Timing
from compress.report.cells import Cell, Column, Line, Sheet, Small, verdict_cell
from compress.report.compare import Choice, Pick, View, median, timing


def key_figures(choice: Choice, chosen: Pick) -> list[tuple[str, str, str]]:
    """(what, value, in smaller letters) of the pick, as far as measured."""
    one = chosen.candidate
    if one is None:
        return []
    teacher = next(iter(choice.teachers), None)
    beside = f"{teacher.name} {units.score(choice.score(teacher))}" if teacher else ""
    found = [(units.metric(choice.task.metric), units.score(choice.score(one)), beside)]
    took, view = timing(one, choice.view), choice.view
    if took and view:
        theirs = median(teacher, view) if teacher else None
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
        column("Quality", units.metric(choice.task.metric), lambda one: _score(choice, one)),
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


def _score(choice: Choice, one: Candidate) -> Cell:
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
