"""The pictures of the comparison: score against latency, and bars. Drawn for the width they are shown at."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from compress.report import scatter, svg, units
from compress.report.axes import Axis, grid, titles
from compress.report.report import Report, Row
from compress.report.scatter import Spot
from compress.report.svg import Box

HEIGHT = 400
# From so many points on, the names alone find room beside them.
CROWD = 5


@dataclass(frozen=True)
class Bar:
    """One bar: what it is of, how much, the class of its colour, and the number beside it where it is another one."""

    name: str
    value: float
    style: str
    text: str = ""


def placeable(report: Report) -> tuple[Row, ...]:
    """The rows that have a score and a latency: the points of `trade_off`."""
    return tuple(row for row in report.rows if report.latency(row) and report.score(row) is not None)


def trade_off(report: Report, key: str, width: float) -> Markup:
    """Score against median latency: a point per placeable row, a line per baseline, in words where off the scale."""
    plot = Box(52, 34, width - 14, HEIGHT - 48)
    found = [latency for row in placeable(report) if (latency := report.latency(row))]
    x = scatter.cost_axis([one["p50_ms"] for one in found], [one["p95_ms"] for one in found], plot)
    scores = [score for row in placeable(report) if (score := report.score(row)) is not None]
    levels = [score for row in report.of_role("baseline") if (score := report.score(row)) is not None]
    y = scatter.score_axis(scores, levels, plot)
    crowded = len(found) > CROWD
    spots = [_spot(report, row, x, y, crowded=crowded) for row in placeable(report)]
    marks = [*grid(x, y, plot), *titles(plot, "median latency, ms", units.metric(report.metric))]
    taken = [box for spot in spots for box in spot.boxes]
    for row in report.of_role("baseline"):
        score = report.score(row)
        if score is not None and report.latency(row) is None:
            room, drawn = scatter.level(row.name, score, y, plot, taken)
            taken += room
            marks += drawn
    marks += scatter.names(spots, taken, plot)
    marks += [spot.drawn() for spot in spots]
    title = f"{units.metric(report.metric)} against latency"
    told = "; ".join(spot.hint for spot in spots)
    return svg.canvas(key, (width, HEIGHT), (title, f"{told}. Up is better, left is faster."), marks)


def bars(items: Sequence[Bar], key: str, width: float, words: tuple[str, str]) -> Markup:
    """One bar per item from zero; `words`: what is measured, and its unit."""
    title, unit = words
    longest = max(item.value for item in items) or 1.0
    marks = []
    for index, item in enumerate(items):
        top = index * 38.0
        number = item.text or units.measure(item.value, unit)
        room = int((width - svg.text_width(number, 13) - 16) / (13 * svg.ADVANCE))
        marks.append(svg.text(0, top + 13, svg.shortened(item.name, room), "name"))
        marks.append(svg.text(width, top + 13, number, "number", "end"))
        marks.append(svg.bar(Box(0, top + 20, width, top + 28), "track"))
        marks.append(svg.bar(Box(0, top + 20, max(1.5, width * item.value / longest), top + 28), f"bar {item.style}"))
    told = "; ".join(f"{item.name} {item.text or units.measure(item.value, unit)}" for item in items)
    return svg.canvas(key, (width, 38 * len(items) - 6), (title, told), marks)


def _spot(report: Report, row: Row, x: Axis, y: Axis, *, crowded: bool) -> Spot:
    latency, score = report.latency(row), report.score(row)
    assert latency is not None and score is not None
    facts = f"{units.score(score)} · {units.measure(latency['p50_ms'], 'ms')}"
    slow = units.measure(latency["p95_ms"], "ms")
    return Spot(
        name=row.name,
        facts="" if crowded else facts,
        hint=f"{row.name}: {units.metric(report.metric)} {facts}, 95th percentile {slow}",
        x=x.at(latency["p50_ms"]),
        y=y.at(score),
        reach=x.at(min(latency["p95_ms"], x.high)),
        style=row.role,
        square=row.role == "teacher",
    )
