"""What pictures of points share: the points, their names, lines across, and the score's scale."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from compress.report import svg, units
from compress.report.axes import Axis, padded
from compress.report.svg import Box

NAME_LETTERS = 26
FAR = 3
"""A score this many times as far from the best as the median score is off the scale, which is for those in question."""


@dataclass(frozen=True)
class Spot:
    """A point at pixel (x, y), and a thin line from it to pixel `reach`.

    name   beside the point, nothing where ''; facts: under the name
    hint   what hovering says
    style  the class of its colour; square: stands on a corner, is no circle
    data   data-attributes that a script finds it by
    """

    name: str
    facts: str
    hint: str
    x: float
    y: float
    reach: float
    style: str
    square: bool = False
    data: Mapping[str, str] = field(default_factory=dict)

    @property
    def boxes(self) -> tuple[Box, Box]:
        """The room of the point and of its line."""
        return Box(self.x - 9, self.y - 9, self.x + 9, self.y + 9), Box(self.x, self.y - 3, self.reach + 3, self.y + 3)

    def drawn(self) -> Markup:
        line = svg.line((self.x, self.y), (self.reach, self.y), f"reach {self.style}") if self.reach > self.x else ""
        point = svg.dot(self.x, self.y, style=f"point {self.style}", hint=self.hint, square=self.square)
        return svg.tagged(self.data, line + point)


def lowest(scores: Sequence[float]) -> float:
    """The least of the scores that is on the scale."""
    ordered = sorted(scores, reverse=True)
    floor = ordered[0] - FAR * max(ordered[0] - ordered[len(ordered) // 2], 0.01)
    return min(score for score in ordered if score >= floor)


def score_axis(scores: Sequence[float], levels: Sequence[float], plot: Box) -> Axis:
    """Room for the scores, and for each level that does not press them into less than a tenth of the height."""
    low, high = min(scores), max(scores)
    span = max(high - low, 0.01)
    for level in sorted(levels, reverse=True):
        if max(high, level) - min(low, level) <= 10 * span:
            low, high = min(low, level), max(high, level)
    return padded(low, high, plot)


def cost_axis(costs: Sequence[float], reaches: Sequence[float], plot: Box, *, log_from: float = 20) -> Axis:
    """From zero to the farthest reach (never beyond twice its cost); logarithmic beyond a factor of `log_from`."""
    farthest = max(min(reach, 2 * cost) for cost, reach in zip(costs, reaches, strict=True))
    if max(costs) > log_from * min(costs):
        return Axis(min(costs) / 1.6, farthest * 1.3, plot.left, plot.right, log=True)
    return Axis(0, farthest * 1.08, plot.left, plot.right)


def names(spots: Sequence[Spot], taken: Sequence[Box], plot: Box) -> list[Markup]:
    """Each point's name, and its facts; with leaders, which lie under all names, where a name is not next to it."""
    leaders, labels, full = [], [], list(taken)
    for spot in spots:
        if not spot.name:
            continue
        name = svg.shortened(spot.name, NAME_LETTERS)
        size = (max(svg.text_width(name, 13), svg.text_width(spot.facts, 12)), 31.0 if spot.facts else 16.0)
        box = svg.place((spot.x, spot.y), size, full, plot)
        full.append(Box(box.left - 8, box.top - 3, box.right + 8, box.bottom + 3))
        anchor, at = ("start", box.left) if box.left > spot.x else ("end", box.right)
        if box.left <= spot.x <= box.right:
            anchor, at = "middle", (box.left + box.right) / 2
        words = [svg.text(at, box.top + 12, name, "label", anchor)]
        if spot.facts:
            words.append(svg.text(at, box.top + 27, spot.facts, "facts", anchor))
        labels.append(svg.tagged(spot.data, Markup("").join(words)))
        near = min(max(spot.x, box.left), box.right), min(max(spot.y, box.top), box.bottom)
        if abs(near[0] - spot.x) + abs(near[1] - spot.y) > 24:
            leaders.append(svg.line((spot.x, spot.y), near, "leader"))
    return [*leaders, *labels]


def level(name: str, score: float, y: Axis, plot: Box, taken: Sequence[Box]) -> tuple[list[Box], list[Markup]]:
    """The room a level takes and what is drawn: a line with its name, or an arrow where it is off the scale."""
    words = f"{svg.shortened(name, NAME_LETTERS)} {units.score(score)}"
    inside = y.low <= score <= y.high
    if not inside:
        words = f"{'↓' if score < y.low else '↑'} {words}, off this scale"
    wide = svg.text_width(words, 12)
    at_pixel = y.at(score)
    feet = [at_pixel - 4, at_pixel + 18] if inside else [plot.bottom - 4 - 17 * row for row in range(4)]
    lefts = [plot.left + 6, plot.right - wide - 6]
    options = [Box(left, foot - 15, left + wide, foot) for left in lefts for foot in feet]
    box = min(options, key=lambda option: svg.lost(option, taken, plot))
    anchor, at = ("start", box.left) if box.left == lefts[0] else ("end", box.right)
    marks = [svg.text(at, box.bottom - 4, words, "facts", anchor)]
    if not inside:
        return [box], marks
    line = svg.line((plot.left, at_pixel), (plot.right, at_pixel), "reference")
    return [box, Box(plot.left, at_pixel - 2, plot.right, at_pixel + 2)], [line, *marks]


def stairs(points: Sequence[tuple[float, float]], plot: Box) -> list[tuple[float, float]]:
    """The best score that each cost buys: from the cheapest level to the next, up to it, and level to the end."""
    ordered = sorted(points)
    found = ordered[:1]
    for x, y in ordered[1:]:
        found += [(x, found[-1][1]), (x, y)]
    return [*found, (plot.right, ordered[-1][1])]


def room(start: tuple[float, float], end: tuple[float, float]) -> Box:
    """What names keep off: a line that is level or upright."""
    return Box(min(start[0], end[0]), min(start[1], end[1]) - 2, max(start[0], end[0]) + 2, max(start[1], end[1]) + 2)
