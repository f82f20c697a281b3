"""Charts as inline SVG: scatter with a front, bars, dots and lines, drawn for the width they are shown at.

Many points are one path of dots, so that thousands stay a small file; a script finds each by the scale on the picture.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from markupsafe import Markup

from compress.records.run_report import Point, series
from compress.reporting import format as units

# Average advance of a sans-serif letter, in ems: wide enough that a label never outgrows the box reserved for it.
ADVANCE = 0.58
COLOURS = 8
MOST_POINTS = 400
SMOOTHED_FROM = 60
MANY = 1000
# What a trainer logs beside the loss and its parts.
ASIDE = frozenset({"step", "epoch", "grad_norm", "learning_rate", "total_flos", "num_input_tokens_seen"})
OTHERS = ("eval_", "train_")

Pixel = tuple[float, float]
Line = list[Pixel]
Lines = Mapping[str, Line]


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


def canvas(key: str, size: Pixel, words: tuple[str, str], marks: Iterable[Markup]) -> Markup:
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


def draw_line(start: Pixel, end: Pixel, style: str) -> Markup:
    return Markup('<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" class="{}"/>').format(*start, *end, style)


def bar(box: Box, style: str) -> Markup:
    return Markup('<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" rx="2" class="{}"/>').format(
        box.left, box.top, box.right - box.left, box.bottom - box.top, style
    )


def path(points: Sequence[Pixel], style: str) -> Markup:
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


def place(point: Pixel, size: Pixel, taken: Sequence[Box], inside: Box) -> Box:
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


def stairs(points: Sequence[Pixel], plot: Box) -> list[Pixel]:
    """The best score that each cost buys: from the cheapest level to the next, up to it, and level to the end."""
    ordered = sorted(points)
    found = ordered[:1]
    for x, y in ordered[1:]:
        found += [(x, found[-1][1]), (x, y)]
    return [*found, (plot.right, ordered[-1][1])]


def line_box(start: Pixel, end: Pixel) -> Box:
    """Return the room of a line that is level or upright, which names keep off."""
    return Box(min(start[0], end[0]), min(start[1], end[1]) - 2, max(start[0], end[0]) + 2, max(start[1], end[1]) + 2)


def scatter(
    plot: Box,
    axes: tuple[Axis, Axis],
    names_of: tuple[str, str],
    spots: Sequence[Spot],
    key: str,
    *,
    levels: Iterable[tuple[str, float]] = (),
    steps: Sequence[Pixel] = (),
    behind: Iterable[Markup] = (),
    under: Iterable[Markup] = (),
    over: tuple[Sequence[Box], Sequence[Markup]] = ((), ()),
    better: str = "left costs less",
) -> Markup:
    """Draw scores against a cost: points with their names, levels of what has no cost, and the front as stairs.

    names_of  of the cost and of the score; levels: (name, score); steps: the corners of the stairs
    behind    lies under the grid, under over it, over (with the room it takes) over the stairs
    """
    x, y = axes
    marks = [*behind, *grid(x, y, plot), *titles(plot, *names_of), *under]
    taken = [*(box for spot in spots for box in spot.boxes), *(line_box(*pair) for pair in pairwise(steps))]
    for name, score in levels:
        boxes, drawn = level(name, score, y, plot, taken)
        taken, marks = [*taken, *boxes], [*marks, *drawn]
    if steps:
        marks.append(path(steps, "edge"))
    marks += over[1]
    marks += names(sorted(spots, key=lambda spot: "front" not in spot.style), [*taken, *over[0]], plot)
    marks += [spot.drawn() for spot in spots]
    told = f"{'; '.join(spot.hint for spot in spots)}. Up is better, {better}."
    size = plot.right + 14, plot.bottom + 48
    return canvas(key, size, (f"{names_of[1]} against {names_of[0]}", told), marks)


@dataclass(frozen=True)
class Bar:
    """One bar: what it is of, how much, the class of its colour, and the number beside it where it is another one."""

    name: str
    value: float
    style: str
    text: str = ""


def bars(items: Sequence[Bar], title: str, unit: str, key: str, width: float) -> Markup:
    """Draw one bar per item, from zero."""
    longest = max(item.value for item in items) or 1.0
    numbers = [item.text or units.measure(item.value, unit) for item in items]
    marks = []
    for index, (item, number) in enumerate(zip(items, numbers, strict=True)):
        top = index * 38.0
        room = int((width - text_width(number, 13) - 16) / (13 * ADVANCE))
        marks.append(draw_text(0, top + 13, shortened(item.name, room), "name"))
        marks.append(draw_text(width, top + 13, number, "number", "end"))
        marks.append(bar(Box(0, top + 20, width, top + 28), "track"))
        marks.append(bar(Box(0, top + 20, max(1.5, width * item.value / longest), top + 28), f"bar {item.style}"))
    told = "; ".join(f"{item.name} {number}" for item, number in zip(items, numbers, strict=True))
    return canvas(key, (width, 38 * len(items) - 6), (title, told), marks)


def dots(places: Iterable[Pixel], style: str) -> Markup:
    """Draw dots as one path; those at the same place are one. Many are placed to the pixel."""
    known = list(places)
    digits = 0 if len(known) > MANY else 1
    different = dict.fromkeys((round(x, digits), round(y, digits)) for x, y in known)
    drawn = "".join(f"M{x:g},{y:g}h0" for x, y in different)
    return Markup('<path d="{}" class="{}"/>').format(drawn, style) if drawn else Markup("")


def line_chart(
    lines: Lines,
    title: str,
    names_of: tuple[str, str],
    key: str,
    width: float,
    *,
    tight: bool = False,
    smooth: bool = False,
    level: float | None = None,
) -> Markup:
    """Draw values over steps; on a log scale where they span more than a factor of 20.

    names_of  of the steps and of the values; tight: the scale shows only the range of the values; smooth: many values
    are drawn as their running mean over a faint line, and few without dots; level: a dashed line
    """
    values = [value for line in lines.values() for _, value in line] + ([] if level is None else [level])
    steps = [step for line in lines.values() for step, _ in line]
    top = 34 if names_of[1] else 14
    plot = Box(52, top, width - 14, top + 232)
    x = Axis(min(0.0, *steps), max(*steps, 1.0), plot.left, plot.right)
    y = padded(min(values), max(values), plot) if tight else _value_axis(values, plot)
    faint, strong = [], []
    for index, line in enumerate(lines.values()):
        style, thin = line_style(index, list(lines)), thinned(line)
        even = smoothed(thin) if smooth else thin
        at, raw = ([(x.at(step), y.at(value)) for step, value in points] for points in (even, thin))
        faint += [path(raw, f"raw {style}")] if even is not thin else []
        strong.append(path(at, f"curve {style}"))
        strong += [path([one], f"knot {style}") for one in at if len(at) <= 40 and not smooth]
    marks = [*grid(x, y, plot), *titles(plot, *names_of)]
    if level is not None:
        marks.append(draw_line((plot.left, y.at(level)), (plot.right, y.at(level)), "reference"))
    digits = units.three_digits
    ends = ", ".join(f"{name} from {digits(line[0][1])} to {digits(line[-1][1])}" for name, line in lines.items())
    return canvas(key, (width, plot.bottom + 44), (title, ends), [*marks, *faint, *strong])


def loss_lines(points: Sequence[Point]) -> Lines:
    """Choose the parts of the loss among the names of a curve, the total first, unless it is its one part again."""
    shown = {name for point in points for name in point if name not in ASIDE and not name.startswith(OTHERS)}
    found = {name: line for name, line in series(points) if name == "eval_loss" or name in shown}
    parts = [line for name, line in found.items() if name not in ("loss", "eval_loss")]
    if len(parts) == 1 and "loss" in found and _same(found["loss"], parts[0]):
        del found["loss"]
    return dict(sorted(found.items(), key=lambda item: item[0] != "loss"))


def score_lines(points: Sequence[Point], metric: str) -> Lines:
    """Choose the evaluation of the report's metric, and the agreement with the teacher."""
    found = dict(series(points))
    names = {f"eval_{metric}": units.metric(metric), "eval_agreement": "agreement"}
    return {shown: found[name] for name, shown in names.items() if name in found}


def legend(lines: Lines, unit: str = "") -> tuple[tuple[str, str, str], ...]:
    """Return (class of the line, name, value at its end as drawn) of each line."""
    ends = [units.three_digits(smoothed(thinned(line))[-1][1]) for line in lines.values()]
    return tuple((line_style(at, list(lines)), name, f"{ends[at]}{unit}") for at, name in enumerate(lines))


def reading(lines: Lines) -> str:
    """Say how the picture of these losses is to be read."""
    longest = max(len(line) for line in lines.values())
    said = []
    if longest >= SMOOTHED_FROM:
        said.append("Strong lines are running means, faint ones the values as logged.")
    if longest > MOST_POINTS:
        said.append(f"Of {longest:,} logged values, neighbours are averaged.")
    if _spans_decades([value for line in lines.values() for _, value in line]):
        said.append("The vertical scale is logarithmic.")
    return " ".join(said)


def line_style(index: int, names: Sequence[str]) -> str:
    """Return the class of a line's colour: ink for the total, else one of eight; dashed from the ninth on."""
    if names[index] == "loss":
        return "total"
    place = index - ("loss" in names)
    return f"s{place % COLOURS}" + (" dashed" if place >= COLOURS else "")


def thinned(line: Line) -> Line:
    """Average equal runs of neighbours, so that at most MOST_POINTS points are left."""
    run = -(-len(line) // MOST_POINTS)
    parts = [line[start : start + run] for start in range(0, len(line), run)] if run > 1 else []
    return [(_mean([step for step, _ in part]), _mean([value for _, value in part])) for part in parts] or line


def smoothed(line: Line) -> Line:
    """Take the running mean over a twentieth of the line, centred; a line of few points is returned as it is."""
    if len(line) < SMOOTHED_FROM:
        return line
    half = max(1, len(line) // 40)
    values = [value for _, value in line]
    return [(step, _mean(values[max(0, at - half) : at + half + 1])) for at, (step, _) in enumerate(line)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _same(one: Line, other: Line) -> bool:
    """Equal but for the rounding of a mean."""
    return len(one) == len(other) and all(
        a == b and math.isclose(x, y, rel_tol=1e-4) for (a, x), (b, y) in zip(one, other, strict=True)
    )


def _value_axis(values: Sequence[float], plot: Box) -> Axis:
    low, high = min(values), max(values)
    if _spans_decades(values):
        return Axis(low / 1.15, high * 1.15, plot.bottom, plot.top, log=True)
    if low >= 0:
        return Axis(0, (high or 1.0) * 1.06, plot.bottom, plot.top)
    return padded(low, high, plot)


def _spans_decades(values: Sequence[float]) -> bool:
    return 0 < 20 * min(values) < max(values)


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


def draw_figure(
    heading: str,
    draw: Callable[[str, float], Markup],
    key: str,
    width: float,
    *,
    caption: str = "",
    legend: tuple[tuple[str, str, str], ...] = (),
) -> Figure:
    """Draw the same picture for a wide window and for a phone; the style sheet shows one of them."""
    return Figure(heading, draw(f"{key}-wide", width), draw(f"{key}-phone", PHONE), caption, legend)
