"""What the page of a search tells cell by cell: every trial, the front beside the teacher, the search in numbers."""

from dataclasses import dataclass

from compress.report import units
from compress.report.cells import Cell, Column, Line, Sheet
from compress.report.headline import capitalised
from compress.search import page_words as words
from compress.search.found import Anchor, Found, Objective, Point

COSTS: tuple[Objective, ...] = ("latency", "file_mb", "parameters")
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
class Told:
    """A trial as the page tells it: its values for the script (score and costs), its cells under HEADINGS,
    and whether it is on the front or else within the budgets."""

    number: int
    values: str
    cells: tuple[str, ...]
    style: str


def told(found: Found, point: Point, front: set[int]) -> Told:
    """A trial in full; `front`: the numbers of those on it."""
    values = (point.score, *(found.value(point, cost) for cost in COSTS))
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
    return Told(point.number, shown, cells, style)


def front(found: Found) -> Sheet:
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


def _known(found: Found, one: Anchor) -> tuple[str, ...]:
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


def _found(found: Found, point: Point) -> tuple[str, ...]:
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


def facts(found: Found) -> list[tuple[str, str]]:
    """What the search did, in numbers."""
    counts, total = found.counts(), sum(found.costs.values())
    scored = sum(point.first is not None for point in found.points)
    told = [("Trials", f"{len(found.points):,}"), ("Scored", f"{scored:,}")]
    told += [(f"{capitalised(state)}", f"{count:,}") for state, count in counts.items() if state != "complete"]
    if trials := found.costs.get("trials"):
        told.append(("Shapes a minute", units.three_digits(60 * scored / trials)))
    if total:
        told.append(("Altogether", units.duration(total)))
    chosen = words.answer(found)
    if chosen and chosen.score is not None and found.teacher_score is not None:
        told.append(("Score given up", units.three_digits(found.teacher_score - chosen.score)))
    return told
