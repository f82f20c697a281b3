"""The page of a search: what it shows is worked out here from a `SearchReport` alone, the template only lays it out."""

import base64
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from compress.records.search_report import Anchor, Objective, SearchReport, TrialRecord
from compress.reporting import charts, search_charts
from compress.reporting import format as units
from compress.reporting import search_remarks as words
from compress.reporting.cells import Cell, Column, Line, Sheet, Small
from compress.reporting.charts import MAIN, SIDE, Figure, drawn
from compress.reporting.growth import growth
from compress.reporting.html import render
from compress.reporting.remarks import capitalised
from compress.reporting.search_charts import Against

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


def trial_row(found: SearchReport, point: TrialRecord, front: set[int]) -> Told:
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
    trial_row = [("Trials", f"{len(found.points):,}"), ("Scored", f"{scored:,}")]
    trial_row += [(f"{capitalised(state)}", f"{count:,}") for state, count in counts.items() if state != "complete"]
    if trials := found.costs.get("trials"):
        trial_row.append(("Shapes a minute", units.three_digits(60 * scored / trials)))
    if total:
        trial_row.append(("Altogether", units.duration(total)))
    chosen = words.answer(found)
    if chosen and chosen.score is not None and found.teacher_score is not None:
        trial_row.append(("Score given up", units.three_digits(found.teacher_score - chosen.score)))
    return trial_row


FOLDER = Path(__file__).parent / "templates"
SCRIPT = (FOLDER / "search.js").read_text(encoding="utf-8")


@dataclass(frozen=True)
class View:
    """One picture of the scores, against a cost; `limits`: what its budget may be, the costs of its front."""

    cost: Objective
    name: str
    figure: Figure


def render_search(found: SearchReport) -> str:
    """One self-contained page: no request leaves it, its one script is inside and named by its hash, text escaped."""
    chosen = words.answer(found) or found.nearest()
    return render(
        FOLDER / "search.html.j2",
        title=found.title,
        context=_context(found),
        headline=words.headline(found),
        remarks=words.remarks(found),
        key_figures=words.key_figures(found),
        script=Markup(SCRIPT),  # ours, and named by its hash in the page's policy
        script_hash="sha256-" + base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode(),
        found=found,
        metric=units.metric(found.metric),
        views=_views(found),
        chosen=trial_row(found, chosen, set(found.front)) if chosen else None,
        command=words.command(found, chosen.number) if chosen else ("", ""),
        headings=HEADINGS,
        front=front(found),
        accuracy=_accuracy(found),
        timings=_timings(found),
        importances=_importances(found),
        growth=growth(found),
        progress=_progress(found),
        costs=_costs(found),
        facts=facts(found),
        rejected=_rejected(found),
        trials=[trial_row(found, point, set(found.front)) for point in found.points],
        provenance=_provenance(found),
    )


def _context(found: SearchReport) -> str:
    where = f"{found.device}, {found.setting}"
    return f"{len(found.points):,} trials; {found.teacher} on {found.data}; {where}; {found.date[:10]}"


def _views(found: SearchReport) -> list[View]:
    """The pictures against each cost that any scored trial has."""
    views = []
    for cost in COSTS:
        against = Against(found, cost)
        if against.placed:
            pictures = drawn(lambda key, width, a=against: search_charts.pareto(a, key, width), f"front-{cost}", MAIN)  # type: ignore[misc]
            name = words.OBJECTIVES[cost][0]
            views.append(View(cost, name, Figure(name, *pictures, _caption(against))))
    return views


def _caption(against: Against) -> str:
    found = against.found
    stairs = "; the stairs join what nothing within the budget beats for less" if against.front else ""
    said = [f"Up and left is better{stairs}."]
    if against.cost == "latency":
        said.append(f"Of {found.setting}, measured where it was, else predicted.")
    trained = any(point.stage not in (None, "subnet") for point in found.points)
    if trained:
        said.append("Filled points were trained after the search; the line under each begins where it stood before.")
    if below := against.below():
        said.append(f"Below this scale: {below:,} {'trial' if below == 1 else 'trials'}.")
    unplaced = sum(point.score is not None and against.at(point) is None for point in found.points)
    if unplaced:
        said.append(f"Scored, but not known by this cost: {unplaced:,}.")
    return " ".join(said)


def _accuracy(found: SearchReport) -> Figure | None:
    """How far predictions are off, beside those from FLOPs alone."""
    prediction = found.prediction
    if prediction is None or not units.known(prediction.error):
        return None
    pairs = (("this predictor", prediction.error, "student"), ("FLOPs alone", prediction.flops_error, "other"))
    bars = [
        charts.Bar(name, 100 * error, style, units.share(error)) for name, error, style in pairs if units.known(error)
    ]
    pictures = drawn(lambda key, width: charts.bars(bars, key, width, ("Mean error", "%")), "prediction-error", SIDE)
    return Figure("Mean error on a shape it has not seen", *pictures)


def _timings(found: SearchReport) -> Figure | None:
    if found.prediction is None or not found.prediction.timings:
        return None
    shown = found.prediction.timings
    pictures = drawn(lambda key, width: search_charts.timings(found, key, width), "timings", MAIN)
    said = ["On the line both are equal."]
    if any(one.finalist for one in shown):
        said.append("Filled: shapes that were measured only after the search.")
    if any(one.flops_ms is not None for one in shown):
        said.append("Orange: what FLOPs alone would have said.")
    if noisy := sum(one.noisy for one in shown):
        said.append(f"Disturbed while measured: {noisy} of {len(shown)}.")
    return Figure("Predicted against measured", *pictures, " ".join(said))


def _importances(found: SearchReport) -> list[Figure]:
    figures = []
    for index, one in enumerate(found.importances):
        ordered = sorted(one.shares.items(), key=lambda item: -item[1])
        bars = [
            charts.Bar(name.removeprefix("config."), 100 * share, "student", units.share(share))
            for name, share in ordered
        ]
        name = units.metric(found.metric) if one.target == "score" else words.OBJECTIVES[one.target][0]
        if bars:
            drawing = _bars(bars, f"What decides {name}")
            caption = f"{one.evaluator} over {one.trials:,} complete trials."
            figures.append(Figure(capitalised(name), *drawn(drawing, f"importance-{index}", SIDE), caption))
    return figures


def _bars(bars: list[charts.Bar], title: str) -> Callable[[str, float], Markup]:
    return lambda key, width: charts.bars(bars, key, width, (title, "%"))


def _progress(found: SearchReport) -> Figure | None:
    if not any(point.first is not None for point in found.points):
        return None
    pictures = drawn(lambda key, width: search_charts.progress(found, key, width), "progress", MAIN)
    caption = "Line: the best within the budgets so far, before training. Dots at the foot: trials without a score."
    return Figure("Trials over time", *pictures, caption)


def _costs(found: SearchReport) -> Figure | None:
    known = [(name, seconds) for name, seconds in found.costs.items() if math.isfinite(seconds) and seconds >= 0]
    if not known:
        return None
    bars = [charts.Bar(name, seconds, "student", units.duration(seconds)) for name, seconds in known]
    return Figure("Where the time went", *drawn(_bars(bars, "Where the time went"), "costs", SIDE))


def _rejected(found: SearchReport) -> list[Small]:
    rows = tuple(words.rejected(found))
    return [Small("Not completed, and why", "State", ("trials", "reason (of one)"), rows)] if rows else []


def _provenance(found: SearchReport) -> list[tuple[str, str]]:
    scored = f"; scored on {found.split}, {found.split_rows:,} rows" if found.split and found.split_rows else ""
    objectives = ", ".join(found.metric if one == "score" else words.OBJECTIVES[one][0] for one in found.objectives)
    told = [
        ("Study", found.study),
        ("Teacher", found.teacher),
        ("Data", found.data + scored),
        ("Objectives", objectives),
        ("Budgets", words.budgets(found) or "none"),
        ("Sampler", found.sampler),
        ("Seed", "" if found.seed is None else str(found.seed)),
        ("Device", f"{found.device}, {found.setting}"),
        ("Latency by", found.prediction.about if found.prediction else ""),
        ("Date", found.date),
    ]
    return [(name, value) for name, value in told if value]
