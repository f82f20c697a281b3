"""The tables of a search's page: its front, its trials, and what it did in numbers."""

from dataclasses import dataclass

from compress.records.search_report import Anchor, SearchReport, TrialRecord
from compress.reporting import format as units
from compress.reporting import search_remarks as words
from compress.reporting.cells import Cell, Column, Line, Sheet, Small
from compress.reporting.remarks import capitalised

HEADINGS = ("shape", "became", "score", "predicted, ms", "measured, ms", "file, MB", "parameters")
"""What is told of every trial, beside its number."""
COLUMNS = (
    ("Quality", "of the teacher’s"),
    ("Quality", "before training"),
    ("Latency", "predicted, ms"),
    ("Latency", "measured, ms"),
    ("Latency", "speed"),
    ("Model", "file, MB"),
    ("Model", "parameters"),
)
"""Of the front, after the score; a speed from a predicted time has a `~`."""
STANDING = {"subnet": "scored", "short": "trained briefly", "final": "trained", "shipped": "shipped"}


@dataclass(frozen=True)
class TrialRow:
    """A trial as the page tells it: its values for the script (score and costs), its cells under HEADINGS,
    and whether it is on the front or else within the budgets."""

    number: int
    values: str
    cells: tuple[str, ...]
    style: str


def trial_row(found: SearchReport, point: TrialRecord, front: set[int]) -> TrialRow:
    """A trial in full; `front`: the numbers of those on it."""
    values = (point.score, *(found.value(point, cost) for cost in ("latency", "file_mb", "parameters")))
    became = STANDING.get(point.stage or "", "") if point.state == "complete" else point.state
    cells = (
        words.shape(point.choice),
        ": ".join(filter(None, (became, point.reason))),
        words.scores(point),
        words.predicted(point),
        units.three_digits(found.measured_ms(point)),
        units.three_digits(point.file_mb),
        units.magnitude(point.parameters),
    )
    shown = " ".join("-" if value is None else f"{value:.6g}" for value in values)
    style = "front" if point.number in front else "within" if found.feasible(point) else ""
    return TrialRow(point.number, shown, cells, style)


def front(found: SearchReport) -> Sheet:
    """The teacher, the anchors, and the front from the best score down; without empty columns."""
    points = sorted(map(found.point, found.front or found.compute_front()), key=lambda one: -(one.score or 0.0))
    chosen = words.answer(found)
    beside = words.known(found)
    rows = [Line(one.name, "baseline" if index else "teacher") for index, one in enumerate(beside)]
    for point in points:
        picked = chosen is not None and point.number == chosen.number
        rows.append(Line(words.shape(point.choice), "student" if picked else "plain", point.number))

    lines = [*(_known(found, one) for one in beside), *(_found(found, point) for point in points)]
    headings = (("Quality", units.metric(found.metric)), *COLUMNS)
    columns = [
        Column(group, heading, tuple(Cell(line[index]) for line in lines))
        for index, (group, heading) in enumerate(headings)
    ]
    return Sheet.of(rows, columns)


def _known(found: SearchReport, one: Anchor) -> tuple[str, ...]:
    """The line of the teacher, or of an anchor."""
    return (
        units.score(one.score),
        _kept(one.score, found.teacher_score),
        units.MISSING,
        units.MISSING,
        units.three_digits(one.ms),
        _speed(found.teacher_ms, one.ms),
        units.three_digits(one.file_mb),
        units.magnitude(one.parameters),
    )


def _found(found: SearchReport, point: TrialRecord) -> tuple[str, ...]:
    """The line of a trial."""
    measured = found.measured_ms(point)
    speed = _speed(found.teacher_ms, found.ms(point))
    return (
        units.score(point.score),
        _kept(point.score, found.teacher_score),
        units.score(point.first if point.stage != "subnet" else None),
        words.predicted(point),
        units.three_digits(measured),
        speed if measured is not None or speed == units.MISSING else f"~{speed}",
        units.three_digits(point.file_mb),
        units.magnitude(point.parameters),
    )


def _kept(score: float | None, theirs: float | None) -> str:
    return units.share(score / theirs if theirs and theirs > 0 and score is not None else None)


def _speed(theirs: float | None, ms: float | None) -> str:
    return units.times(theirs / ms) if theirs and ms else units.MISSING


def facts(found: SearchReport) -> list[tuple[str, str]]:
    """What the search did, in numbers."""
    counts, total = found.counts(), sum(found.costs.values())
    scored = sum(point.first is not None for point in found.points)
    numbers = [("Trials", f"{len(found.points):,}"), ("Scored", f"{scored:,}")]
    numbers += [(f"{capitalised(state)}", f"{count:,}") for state, count in counts.items() if state != "complete"]
    if trials := found.costs.get("trials"):
        numbers.append(("Shapes a minute", units.three_digits(60 * scored / trials)))
    if total:
        numbers.append(("Altogether", units.duration(total)))
    chosen = words.answer(found)
    if chosen and chosen.score is not None and found.teacher_score is not None:
        numbers.append(("Score given up", units.three_digits(found.teacher_score - chosen.score)))
    return numbers


def rejected(found: SearchReport) -> list[Small]:
    """Count the trials that were not completed by state and reason."""
    rows = tuple(words.rejected(found))
    return [Small("Not completed, and why", "State", ("trials", "reason (of one)"), rows)] if rows else []
