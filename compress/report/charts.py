"""The pictures of the comparison: score against latency, and bars. Drawn for the width they are shown at."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from compress.report import svg, units
from compress.report.axes import Axis, grid, padded, titles
from compress.report.report import Report, Row
from compress.report.svg import Box

NAME_LETTERS = 26
HEIGHT = 400
# From so many points on, the names alone find room beside them.
CROWD = 5


@dataclass(frozen=True)
class Spot:
    """A row with both a score and a median latency, at pixel (x, y); its 95th percentile at pixel `reach`."""

    row: Row
    facts: str
    hint: str
    x: float
    y: float
    reach: float

    @property
    def boxes(self) -> tuple[Box, Box]:
        """The room of the point and of its line."""
        return Box(self.x - 9, self.y - 9, self.x + 9, self.y + 9), Box(self.x, self.y - 3, self.reach + 3, self.y + 3)


def placeable(report: Report) -> tuple[Row, ...]:
    """The rows that have a score and a latency: the points of `trade_off`."""
    return tuple(row for row in report.rows if report.latency(row) and report.score(row) is not None)


def trade_off(report: Report, key: str, width: float) -> Markup:
    """Score against median latency: a point per placeable row, a line per baseline, in words where off the scale."""
    plot = Box(52, 34, width - 14, HEIGHT - 48)
    x, y = _latency_axis(report, plot), _score_axis(report, plot)
    spots = [_spot(report, row, x, y) for row in placeable(report)]
    marks = [*grid(x, y, plot), *titles(plot, "median latency, ms", units.metric(report.metric))]
    taken = [box for spot in spots for box in spot.boxes]
    for row in report.of_role("baseline"):
        score = report.score(row)
        if score is not None and report.latency(row) is None:
            room, drawn = _baseline(row.name, score, y, plot, taken)
            taken += room
            marks += drawn
    leaders, labels = _labels(spots, taken, plot)
    marks += [*leaders, *labels]
    for spot in spots:
        role = spot.row.role
        marks.append(svg.line((spot.x, spot.y), (spot.reach, spot.y), f"reach {role}"))
        marks.append(svg.dot(spot.x, spot.y, style=f"point {role}", hint=spot.hint, square=role == "teacher"))
    title = f"{units.metric(report.metric)} against latency"
    told = "; ".join(spot.hint for spot in spots)
    return svg.canvas(key, (width, HEIGHT), (title, f"{told}. Up is better, left is faster."), marks)


def bars(items: Sequence[tuple[Row, float]], key: str, width: float, words: tuple[str, str]) -> Markup:
    """One bar per row from zero; `words`: what is measured, and its unit."""
    title, unit = words
    longest = max(value for _, value in items) or 1.0
    marks = []
    for index, (row, value) in enumerate(items):
        top = index * 38.0
        number = units.measure(value, unit)
        room = int((width - svg.text_width(number, 13) - 16) / (13 * svg.ADVANCE))
        marks.append(svg.text(0, top + 13, svg.shortened(row.name, room), "name"))
        marks.append(svg.text(width, top + 13, number, "number", "end"))
        marks.append(svg.bar(Box(0, top + 20, width, top + 28), "track"))
        marks.append(svg.bar(Box(0, top + 20, max(1.5, width * value / longest), top + 28), f"bar {row.role}"))
    told = "; ".join(f"{row.name} {units.measure(value, unit)}" for row, value in items)
    return svg.canvas(key, (width, 38 * len(items) - 6), (title, told), marks)


def _spot(report: Report, row: Row, x: Axis, y: Axis) -> Spot:
    latency, score = report.latency(row), report.score(row)
    assert latency is not None and score is not None
    facts = f"{units.score(score)} · {units.measure(latency['p50_ms'], 'ms')}"
    slow = units.measure(latency["p95_ms"], "ms")
    hint = f"{row.name}: {units.metric(report.metric)} {facts}, 95th percentile {slow}"
    return Spot(row, facts, hint, x.at(latency["p50_ms"]), y.at(score), x.at(min(latency["p95_ms"], x.high)))


def _latency_axis(report: Report, plot: Box) -> Axis:
    """From zero to the slowest row's 95th percentile, or twice its median; logarithmic beyond a factor of 20."""
    found = [latency for row in placeable(report) if (latency := report.latency(row))]
    times = [one["p50_ms"] for one in found]
    farthest = max(min(one["p95_ms"], 2 * one["p50_ms"]) for one in found)
    if max(times) > 20 * min(times):
        return Axis(min(times) / 1.6, farthest * 1.3, plot.left, plot.right, log=True)
    return Axis(0, farthest * 1.08, plot.left, plot.right)


def _score_axis(report: Report, plot: Box) -> Axis:
    """Room for the points, and for each baseline that does not press them into less than a tenth of the height."""
    scores = [score for row in placeable(report) if (score := report.score(row)) is not None]
    low, high = min(scores), max(scores)
    span = max(high - low, 0.01)
    levels = [score for row in report.of_role("baseline") if (score := report.score(row)) is not None]
    for level in sorted(levels, reverse=True):
        if max(high, level) - min(low, level) <= 10 * span:
            low, high = min(low, level), max(high, level)
    return padded(low, high, plot)


def _labels(spots: Sequence[Spot], taken: Sequence[Box], plot: Box) -> tuple[list[Markup], list[Markup]]:
    """Each point's name, and its facts unless there are many; with leaders where a name is not next to its point."""
    leaders, labels, full = [], [], list(taken)
    crowded = len(spots) > CROWD
    for spot in spots:
        name = svg.shortened(spot.row.name, NAME_LETTERS)
        size = (svg.text_width(name, 13), 16.0) if crowded else (_wide(name, spot.facts), 31.0)
        box = svg.place((spot.x, spot.y), size, full, plot)
        full.append(Box(box.left - 8, box.top - 3, box.right + 8, box.bottom + 3))
        anchor, at = ("start", box.left) if box.left > spot.x else ("end", box.right)
        if box.left <= spot.x <= box.right:
            anchor, at = "middle", (box.left + box.right) / 2
        labels.append(svg.text(at, box.top + 12, name, "label", anchor))
        if not crowded:
            labels.append(svg.text(at, box.top + 27, spot.facts, "facts", anchor))
        near = min(max(spot.x, box.left), box.right), min(max(spot.y, box.top), box.bottom)
        if abs(near[0] - spot.x) + abs(near[1] - spot.y) > 24:
            leaders.append(svg.line((spot.x, spot.y), near, "leader"))
    return leaders, labels


def _wide(name: str, facts: str) -> float:
    return max(svg.text_width(name, 13), svg.text_width(facts, 12))


def _baseline(name: str, score: float, y: Axis, plot: Box, taken: Sequence[Box]) -> tuple[list[Box], list[Markup]]:
    """The room a baseline takes and what is drawn: a line with its name, or an arrow where it is off the scale."""
    words = f"{svg.shortened(name, NAME_LETTERS)} {units.score(score)}"
    inside = y.low <= score <= y.high
    if not inside:
        words = f"{'↓' if score < y.low else '↑'} {words}, off this scale"
    wide = svg.text_width(words, 12)
    level = y.at(score)
    feet = [level - 4, level + 18] if inside else [plot.bottom - 4 - 17 * row for row in range(4)]
    lefts = [plot.left + 6, plot.right - wide - 6]
    options = [Box(left, foot - 15, left + wide, foot) for left in lefts for foot in feet]
    box = min(options, key=lambda option: svg.lost(option, taken, plot))
    anchor, at = ("start", box.left) if box.left == lefts[0] else ("end", box.right)
    marks = [svg.text(at, box.bottom - 4, words, "facts", anchor)]
    if not inside:
        return [box], marks
    line = svg.line((plot.left, level), (plot.right, level), "reference")
    return [box, Box(plot.left, level - 2, plot.right, level + 2)], [line, *marks]
