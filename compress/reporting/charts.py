"""The pictures of the comparison: score against latency, and bars. Drawn for the width they are shown at."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from markupsafe import Markup

from compress.records.run_report import Report, Row
from compress.reporting import format as units

# Average advance of a sans-serif letter, in ems: wide enough that a label never outgrows the box reserved for it.
ADVANCE = 0.58


@dataclass(frozen=True)
class Box:
    """A rectangle from (left, top) to (right, bottom)."""

    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: "Box") -> float:
        """The area both cover."""
        wide = min(self.right, other.right) - max(self.left, other.left)
        high = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(0.0, wide) * max(0.0, high)

    @property
    def area(self) -> float:
        return (self.right - self.left) * (self.bottom - self.top)


def canvas(key: str, size: tuple[float, float], words: tuple[str, str], marks: Iterable[Markup]) -> Markup:
    """One picture; `key` is unique on the page, `words` are its title and its description for those who cannot see."""
    return Markup(
        '<svg class="picture" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" '
        'role="img" aria-labelledby="{key}-title {key}-desc">'
        '<title id="{key}-title">{title}</title><desc id="{key}-desc">{desc}</desc>{marks}</svg>'
    ).format(width=size[0], height=size[1], key=key, title=words[0], desc=words[1], marks=Markup("").join(marks))


def draw_text(x: float, y: float, content: str, style: str = "", anchor: str = "start") -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" class="{}" text-anchor="{}">{}</text>').format(
        x, y, style, anchor, content
    )


def draw_line(start: tuple[float, float], end: tuple[float, float], style: str) -> Markup:
    return Markup('<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" class="{}"/>').format(*start, *end, style)


def bar(box: Box, style: str) -> Markup:
    return Markup('<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" rx="2" class="{}"/>').format(
        box.left, box.top, box.right - box.left, box.bottom - box.top, style
    )


def path(points: Sequence[tuple[float, float]], style: str) -> Markup:
    """A line through the points; a single one is drawn as a dot by the round cap."""
    drawn = points if len(points) > 1 else [*points, *points]
    return Markup('<path d="M{}" class="{}"/>').format(" ".join(f"{x:.1f},{y:.1f}" for x, y in drawn), style)


def dot(x: float, y: float, *, style: str, hint: str, square: bool = False) -> Markup:
    """A point with a hint that shows on hovering; `square` ones stand on a corner."""
    if square:
        shape = Markup('<path d="M{:.1f},{:.1f} l7,7 -7,7 -7,-7 z" class="{}">').format(x, y - 7, style)
        return shape + Markup("<title>{}</title></path>").format(hint)
    circle = Markup('<circle cx="{:.1f}" cy="{:.1f}" r="6" class="{}"><title>{}</title></circle>')
    return circle.format(x, y, style, hint)


def tagged(data: Mapping[str, str], marks: Markup) -> Markup:
    """The marks as one group with these data-attributes; as they are where there are none."""
    if not data:
        return marks
    attributes = Markup(" ").join(Markup('data-{}="{}"').format(name, value) for name, value in data.items())
    return Markup("<g {}>{}</g>").format(attributes, marks)


def text_width(content: str, size: float) -> float:
    """Pixels that `content` may take at a font size; letters outside Latin are counted as wide."""
    return sum(ADVANCE if ord(letter) < 0x2E80 else 1.05 for letter in content) * size


def shortened(content: str, letters: int) -> str:
    return content if len(content) <= letters else content[: letters - 1].rstrip() + "…"


def place(point: tuple[float, float], size: tuple[float, float], taken: Sequence[Box], inside: Box) -> Box:
    """Where a label of `size` stands near `point`: inside, on nothing that is taken, as near as possible."""
    wide, high = size
    x, y = point
    options = []
    for gap in (11.0, 20.0, 34.0, 52.0, 74.0, 100.0, 130.0):
        for across, down in ((1, 0), (-1, 0), (0, -1), (0, 1), (1, -1), (-1, -1), (1, 1), (-1, 1)):
            left = x + gap if across > 0 else x - gap - wide if across < 0 else x - wide / 2
            reach = gap if across == 0 else gap * 0.8
            top = y + reach if down > 0 else y - reach - high if down < 0 else y - high / 2
            # A pixel farther counts as two square pixels hidden: what is taken has a margin that may be grazed.
            options.append((2 * gap, Box(left, top, left + wide, top + high)))
    return min(options, key=lambda option: option[0] + lost(option[1], taken, inside))[1]


def lost(box: Box, taken: Sequence[Box], inside: Box) -> float:
    """The area of the box that is outside the picture or under what is taken."""
    return box.area - box.overlap(inside) + sum(box.overlap(other) for other in taken)


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high` on pixels from `start` to `end`, linear or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        low, high, here = self.low, self.high, value
        if self.log:
            low, high, here = math.log(low), math.log(high), math.log(value)
        return self.start + (here - low) / (high - low) * (self.end - self.start)

    def ticks(self, wanted: int = 5) -> list[float]:
        """Round values within the axis: about `wanted` of them, at least two on a linear one."""
        if self.log:
            return _log_ticks(self.low, self.high, wanted)
        raw = (self.high - self.low) / max(1, wanted)
        power = 10.0 ** math.floor(math.log10(raw))
        step = power * next(nice for nice in (1, 2, 2.5, 5, 10) if nice * power >= raw * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(index * step, 12) for index in range(first, last + 1)]


def label(value: float, step: float) -> str:
    """A tick's text, with the decimals that neighbours `step` apart need."""
    if abs(value) >= 10_000:
        return large(value)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    if round(step, decimals) != round(step, decimals + 1):
        decimals += 1
    return f"{value:,.{decimals}f}".replace("-", "−")


def large(value: float) -> str:
    """A number of more than four digits in thousands, millions and so on: `20k`, `1.5M`."""
    power = min(int(math.log10(abs(value)) / 3 + 1e-9), 6)
    return f"{value / 1000**power:g}{'kMGTPE'[power - 1]}".replace("-", "−")


def padded(low: float, high: float, plot: Box) -> Axis:
    """The vertical axis of `plot` for values from low to high, with air above and below."""
    margin = max(0.14 * (high - low), 0.004)
    return Axis(low - margin, high + margin, plot.bottom, plot.top)


def grid(x: Axis, y: Axis, plot: Box) -> list[Markup]:
    """Hairlines at the vertical ticks, small marks at the horizontal ones, and their numbers."""
    rows, columns = y.ticks(5), x.ticks(6 if plot.right > 450 else 4)
    marks = []
    for tick, written in _written(rows, y.log):
        marks.append(draw_line((plot.left, y.at(tick)), (plot.right, y.at(tick)), "grid"))
        marks.append(draw_text(plot.left - 8, y.at(tick) + 4, written, "tick", "end"))
    for tick, written in _written(columns, x.log):
        marks.append(draw_line((x.at(tick), plot.bottom), (x.at(tick), plot.bottom + 4), "axis"))
        marks.append(draw_text(x.at(tick), plot.bottom + 18, written, "tick", "middle"))
    marks.append(draw_line((plot.left, plot.bottom), (plot.right, plot.bottom), "axis"))
    return marks


def titles(plot: Box, below: str, above: str) -> list[Markup]:
    """The axes' names; the vertical one lies flat above the axis, where it can be read."""
    marks = [draw_text(plot.right, plot.bottom + 38, below, "axis-title", "end")]
    return [*marks, draw_text(0, 14, above, "axis-title")] if above else marks


def _written(ticks: Sequence[float], log: bool) -> list[tuple[float, str]]:
    step = min((after - before for before, after in pairwise(ticks)), default=1.0)
    return [(tick, (large(tick) if tick >= 10_000 else f"{tick:,g}") if log else label(tick, step)) for tick in ticks]


def _log_ticks(low: float, high: float, wanted: int) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1,), (1, 3), (1, 2, 5)):
        ticks = [digit * 10.0**power for power in decades for digit in digits]
        found = [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]
        if len(found) >= min(3, wanted):
            break
    return found[:: math.ceil(len(found) / (wanted + 2))] if found else [low, high]


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
        line = draw_line((self.x, self.y), (self.reach, self.y), f"reach {self.style}") if self.reach > self.x else ""
        point = dot(self.x, self.y, style=f"point {self.style}", hint=self.hint, square=self.square)
        return tagged(self.data, line + point)


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
        name = shortened(spot.name, NAME_LETTERS)
        size = (max(text_width(name, 13), text_width(spot.facts, 12)), 31.0 if spot.facts else 16.0)
        box = place((spot.x, spot.y), size, full, plot)
        full.append(Box(box.left - 8, box.top - 3, box.right + 8, box.bottom + 3))
        anchor, at = ("start", box.left) if box.left > spot.x else ("end", box.right)
        if box.left <= spot.x <= box.right:
            anchor, at = "middle", (box.left + box.right) / 2
        words = [draw_text(at, box.top + 12, name, "label", anchor)]
        if spot.facts:
            words.append(draw_text(at, box.top + 27, spot.facts, "facts", anchor))
        labels.append(tagged(spot.data, Markup("").join(words)))
        near = min(max(spot.x, box.left), box.right), min(max(spot.y, box.top), box.bottom)
        if abs(near[0] - spot.x) + abs(near[1] - spot.y) > 24:
            leaders.append(draw_line((spot.x, spot.y), near, "leader"))
    return [*leaders, *labels]


def level(name: str, score: float, y: Axis, plot: Box, taken: Sequence[Box]) -> tuple[list[Box], list[Markup]]:
    """The room a level takes and what is drawn: a line with its name, or an arrow where it is off the scale."""
    words = f"{shortened(name, NAME_LETTERS)} {units.score(score)}"
    inside = y.low <= score <= y.high
    if not inside:
        words = f"{'↓' if score < y.low else '↑'} {words}, off this scale"
    wide = text_width(words, 12)
    at_pixel = y.at(score)
    feet = [at_pixel - 4, at_pixel + 18] if inside else [plot.bottom - 4 - 17 * row for row in range(4)]
    lefts = [plot.left + 6, plot.right - wide - 6]
    options = [Box(left, foot - 15, left + wide, foot) for left in lefts for foot in feet]
    box = min(options, key=lambda option: lost(option, taken, plot))
    anchor, at = ("start", box.left) if box.left == lefts[0] else ("end", box.right)
    marks = [draw_text(at, box.bottom - 4, words, "facts", anchor)]
    if not inside:
        return [box], marks
    line = draw_line((plot.left, at_pixel), (plot.right, at_pixel), "reference")
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
    x = cost_axis([one["p50_ms"] for one in found], [one["p95_ms"] for one in found], plot)
    scores = [score for row in placeable(report) if (score := report.score(row)) is not None]
    levels = [score for row in report.of_role("baseline") if (score := report.score(row)) is not None]
    y = score_axis(scores, levels, plot)
    crowded = len(found) > CROWD
    spots = [_spot(report, row, x, y, crowded=crowded) for row in placeable(report)]
    marks = [*grid(x, y, plot), *titles(plot, "median latency, ms", units.metric(report.metric))]
    taken = [box for spot in spots for box in spot.boxes]
    for row in report.of_role("baseline"):
        score = report.score(row)
        if score is not None and report.latency(row) is None:
            room, drawn = level(row.name, score, y, plot, taken)
            taken += room
            marks += drawn
    marks += names(spots, taken, plot)
    marks += [spot.drawn() for spot in spots]
    title = f"{units.metric(report.metric)} against latency"
    told = "; ".join(spot.hint for spot in spots)
    return canvas(key, (width, HEIGHT), (title, f"{told}. Up is better, left is faster."), marks)


def bars(items: Sequence[Bar], key: str, width: float, words: tuple[str, str]) -> Markup:
    """One bar per item from zero; `words`: what is measured, and its unit."""
    title, unit = words
    longest = max(item.value for item in items) or 1.0
    marks = []
    for index, item in enumerate(items):
        top = index * 38.0
        number = item.text or units.measure(item.value, unit)
        room = int((width - text_width(number, 13) - 16) / (13 * ADVANCE))
        marks.append(draw_text(0, top + 13, shortened(item.name, room), "name"))
        marks.append(draw_text(width, top + 13, number, "number", "end"))
        marks.append(bar(Box(0, top + 20, width, top + 28), "track"))
        marks.append(bar(Box(0, top + 20, max(1.5, width * item.value / longest), top + 28), f"bar {item.style}"))
    told = "; ".join(f"{item.name} {item.text or units.measure(item.value, unit)}" for item in items)
    return canvas(key, (width, 38 * len(items) - 6), (title, told), marks)


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


# Widths in pixels of the page's columns: the wider and the narrower of two, both together, and a phone's only one.
MAIN, SIDE, WHOLE, PHONE = 690, 350, 1088, 342


@dataclass(frozen=True)
class Figure:
    """A picture at two widths, with its heading and caption, and a legend of (line class, name, last value)."""

    heading: str
    wide: Markup
    narrow: Markup
    caption: str = ""
    legend: tuple[tuple[str, str, str], ...] = ()


def drawn(draw: Callable[[str, float], Markup], key: str, width: float) -> tuple[Markup, Markup]:
    """The same picture for a wide window and for a phone; the style sheet shows one of them."""
    return draw(f"{key}-wide", width), draw(f"{key}-phone", PHONE)
