"""Draw charts as inline SVG: scatter with a front, bars and lines, each for the width it is shown at.

Many points are one path of dots, so that thousands stay a small file; a script finds each by the scale on the picture.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from statistics import fmean

from markupsafe import Markup

from compress.records.run_report import Point, Report, finite, series
from compress.records.search_report import ObjectiveName, SearchReport
from compress.reporting import format as units
from compress.reporting.compare import ComparedModel, Comparison, MeasuredDevice, View
from compress.reporting.remarks import COSTS, answer, cost_text, known_beside, shape, short_shape

MAIN, SIDE, WHOLE, PHONE = 690, 350, 1088, 342
"""Widths of the page's columns in pixels: the wider and the narrower of two, both together, and a phone's only one."""
ADVANCE = 0.58
"""Average width of a sans-serif letter in ems: no label outgrows the box reserved for it."""
COLOURS = 8
MOST_POINTS = 400
SMOOTHED_FROM = 60
MANY = 1000
NAME_LETTERS = 26
FAR = 3
"""A score this many times as far from the best as the median score is off the scale, which is for those in question."""
WITH_FACTS = 5
"""The most points that a chart may have to show figures beside their names."""
LOG_FROM = 4
"""Many costs that span more than this factor are on a logarithmic axis; few, from LOG_FEW on."""
LOG_FEW = 20
NARROW = 500
ASIDE = frozenset({"step", "epoch", "grad_norm", "learning_rate", "total_flos", "num_input_tokens_seen"})
"""The entries that a trainer logs beside the loss and its parts."""

Pixel = tuple[float, float]
Line = list[Pixel]
Lines = Mapping[str, Line]


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


@dataclass(frozen=True)
class Box:
    """A rectangle from (left, top) to (right, bottom)."""

    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: "Box") -> float:
        """Compute the area both cover."""
        wide = min(self.right, other.right) - max(self.left, other.left)
        high = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(0.0, wide) * max(0.0, high)

    def lost(self, taken: Sequence["Box"], inside: "Box") -> float:
        """Compute the area that is outside the picture or under what is taken."""
        area = (self.right - self.left) * (self.bottom - self.top)
        return area - self.overlap(inside) + sum(self.overlap(other) for other in taken)


def canvas(key: str, size: Pixel, words: tuple[str, str], marks: Iterable[Markup]) -> Markup:
    """Make one picture; `key` is unique on the page, `words` are its title and its description for the blind."""
    return Markup(
        '<svg class="picture" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" '
        'role="img" aria-labelledby="{key}-title {key}-desc">'
        '<title id="{key}-title">{title}</title><desc id="{key}-desc">{desc}</desc>{marks}</svg>'
    ).format(width=size[0], height=size[1], key=key, title=words[0], desc=words[1], marks=Markup("").join(marks))


def draw_text(x: float, y: float, content: str, style: str = "", anchor: str = "start") -> Markup:
    """Write `content` with its baseline at y."""
    return Markup('<text x="{:.1f}" y="{:.1f}" class="{}" text-anchor="{}">{}</text>').format(
        x, y, style, anchor, content
    )


def draw_line(start: Pixel, end: Pixel, style: str) -> Markup:
    """Draw a straight line."""
    return Markup('<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" class="{}"/>').format(*start, *end, style)


def draw_box(box: Box, style: str) -> Markup:
    """Fill a box with rounded corners."""
    return Markup('<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" rx="2" class="{}"/>').format(
        box.left, box.top, box.right - box.left, box.bottom - box.top, style
    )


def draw_path(points: Sequence[Pixel], style: str) -> Markup:
    """Draw a line through the points; a single one is drawn as a dot by the round cap."""
    drawn = points if len(points) > 1 else [*points, *points]
    return Markup('<path d="M{}" class="{}"/>').format(" ".join(f"{x:.1f},{y:.1f}" for x, y in drawn), style)


def draw_dot(x: float, y: float, *, style: str, hint: str, square: bool = False) -> Markup:
    """Draw a point with a hint that shows on hovering; `square` ones stand on a corner."""
    if square:
        shape = Markup('<path d="M{:.1f},{:.1f} l7,7 -7,7 -7,-7 z" class="{}">').format(x, y - 7, style)
        return shape + Markup("<title>{}</title></path>").format(hint)
    circle = Markup('<circle cx="{:.1f}" cy="{:.1f}" r="6" class="{}"><title>{}</title></circle>')
    return circle.format(x, y, style, hint)


def draw_dots(places: Iterable[Pixel], style: str) -> Markup:
    """Draw dots as one path; those at the same place are one. Many are placed to the pixel."""
    known = list(places)
    digits = 0 if len(known) > MANY else 1
    different = dict.fromkeys((round(x, digits), round(y, digits)) for x, y in known)
    drawn = "".join(f"M{x:g},{y:g}h0" for x, y in different)
    return Markup('<path d="{}" class="{}"/>').format(drawn, style) if drawn else Markup("")


def tag(data: Mapping[str, str], marks: Markup) -> Markup:
    """Group the marks under these data-attributes, if any."""
    if not data:
        return marks
    attributes = Markup(" ").join(Markup('data-{}="{}"').format(name, value) for name, value in data.items())
    return Markup("<g {}>{}</g>").format(attributes, marks)


def text_width(content: str, size: float) -> float:
    """Bound the pixels that `content` takes at a font size; letters outside Latin are counted as wide."""
    return sum(ADVANCE if ord(letter) < 0x2E80 else 1.05 for letter in content) * size


def shorten(content: str, letters: int) -> str:
    """Cut a text to so many letters, the last an ellipsis."""
    return content if len(content) <= letters else content[: letters - 1].rstrip() + "…"


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high` on pixels from `start` to `end`, linear or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    @staticmethod
    def padded(low: float, high: float, plot: Box) -> "Axis":
        """Make the vertical axis of `plot`, with air above and below the values."""
        margin = max(0.14 * (high - low), 0.004)
        return Axis(low - margin, high + margin, plot.bottom, plot.top)

    def at(self, value: float) -> float:
        """Place a value."""
        low, high, here = self.low, self.high, value
        if self.log:
            low, high, here = math.log(low), math.log(high), math.log(value)
        return self.start + (here - low) / (high - low) * (self.end - self.start)

    def ticks(self, wanted: int = 5) -> list[float]:
        """Choose round values within the axis: about `wanted` of them, at least two on a linear one."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for digits in ((1,), (1, 3), (1, 2, 5)):
                ticks = [digit * 10.0**power for power in decades for digit in digits]
                found = [tick for tick in ticks if self.low * 0.999 <= tick <= self.high * 1.001]
                if len(found) >= min(3, wanted):
                    break
            return found[:: math.ceil(len(found) / (wanted + 2))] if found else [self.low, self.high]
        raw = (self.high - self.low) / max(1, wanted)
        power = 10.0 ** math.floor(math.log10(raw))
        step = power * next(nice for nice in (1, 2, 2.5, 5, 10) if nice * power >= raw * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(index * step, 12) for index in range(first, last + 1)]


def label(value: float, step: float) -> str:
    """Write a tick with the decimals that neighbours `step` apart need; 0 for no step: as short as it goes."""
    if abs(value) >= 10_000:
        power = min(int(math.log10(abs(value)) / 3 + 1e-9), 6)
        return f"{value / 1000**power:g}{'kMGTPE'[power - 1]}".replace("-", "−")
    if not step:
        return f"{value:,g}".replace("-", "−")
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if round(step, decimals) != round(step, decimals + 1):
        decimals += 1
    return f"{value:,.{decimals}f}".replace("-", "−")


def draw_grid(x: Axis, y: Axis, plot: Box, names: tuple[str, str]) -> list[Markup]:
    """Draw hairlines at the vertical ticks, small marks at the horizontal ones, and the names of both axes.

    The vertical one's name lies flat above the axis, where it can be read.
    """
    marks = []
    for tick, written in _written(y, 5):
        marks.append(draw_line((plot.left, y.at(tick)), (plot.right, y.at(tick)), "grid"))
        marks.append(draw_text(plot.left - 8, y.at(tick) + 4, written, "tick", "end"))
    for tick, written in _written(x, 6 if plot.right > 450 else 4):
        marks.append(draw_line((x.at(tick), plot.bottom), (x.at(tick), plot.bottom + 4), "axis"))
        marks.append(draw_text(x.at(tick), plot.bottom + 18, written, "tick", "middle"))
    marks.append(draw_line((plot.left, plot.bottom), (plot.right, plot.bottom), "axis"))
    marks.append(draw_text(plot.right, plot.bottom + 38, names[0], "axis-title", "end"))
    return [*marks, draw_text(0, 14, names[1], "axis-title")] if names[1] else marks


def _written(axis: Axis, wanted: int) -> list[tuple[float, str]]:
    ticks = axis.ticks(wanted)
    step = 0.0 if axis.log else min((after - before for before, after in pairwise(ticks)), default=1.0)
    return [(tick, label(tick, step)) for tick in ticks]


def least_on_scale(scores: Sequence[float]) -> float:
    """Return the least of the scores that is not far below the others."""
    ordered = sorted(scores, reverse=True)
    floor = ordered[0] - FAR * max(ordered[0] - ordered[len(ordered) // 2], 0.01)
    return min(score for score in ordered if score >= floor)


@dataclass(frozen=True)
class ScatterPoint:
    """A point of a scatter chart, at a cost and a score.

    name    beside the point, where there is room; keep: wherever there is none; short: instead of it elsewhere
    what    what hovering calls it; cost_text: its cost in words
    style   the class of its colour; a teacher and an anchor stand on a corner, others are circles
    reach   the cost that a thin line reaches to
    before  the score that a thin line comes from
    number  by which a script finds it; '' for none
    """

    name: str
    cost: float
    score: float
    style: str
    what: str
    cost_text: str
    short: str = ""
    keep: bool = False
    reach: float = 0.0
    before: float | None = None
    number: str = ""

    @property
    def square(self) -> bool:
        """Say whether it stands beside what is compared."""
        return self.style in ("teacher", "anchor")

    @property
    def facts(self) -> str:
        """Say score and cost."""
        return f"{units.score(self.score)} · {self.cost_text}"

    def tagged(self, marks: Markup, x: float) -> Markup:
        """Group what is drawn of the point for a script."""
        return tag({"n": self.number, "x": f"{x:.1f}"} if self.number else {}, marks)


@dataclass(frozen=True)
class Scatter:
    """Scores against a cost: points with their names, levels of what has no cost, and the front as stairs.

    axes      names of the cost and of the score; levels: (name, score)
    front     (cost, score) of what nothing beats for less; crowd: of points that are dots without names
    most      so many points are all named, on a wide page and on a phone
    stretch   whether levels below all points are on the scale
    limit     (cost, its name) of a budget; budget: whether a script draws one
    field     the cost by which a script finds the points; '' for none
    """

    marks: tuple[ScatterPoint, ...]
    axes: tuple[str, str]
    levels: Sequence[tuple[str, float]] = ()
    front: Sequence[Pixel] = ()
    crowd: Sequence[Pixel] = ()
    most: tuple[int, int] = (14, 5)
    stretch: bool = False
    limit: tuple[float, str] | None = None
    budget: bool = False
    field: str = ""

    @cached_property
    def lowest(self) -> float:
        """The least score that is on the scale."""
        return least_on_scale([score for _, score in self.crowd] + [mark.score for mark in self.marks])

    def crowded(self, *, narrow: bool) -> bool:
        """Say whether there are too many points to name them all, or to draw how far each reaches."""
        return sum(bool(mark.name) for mark in self.marks) > self.most[narrow]

    def draw(self, key: str, width: float) -> Markup:
        """Draw the picture at a width; there is at least one point."""
        plot = Box(52, 34, width - 14, 392)
        x, y = self._axes(plot)
        crowded = self.crowded(narrow=width < NARROW)
        at = [(x.at(mark.cost), min(y.at(mark.score), y.start - 9)) for mark in self.marks]
        reaches = [
            x.at(min(mark.reach, x.high)) if mark.reach > mark.cost and not crowded else here[0]
            for mark, here in zip(self.marks, at, strict=True)
        ]
        steps: list[Pixel] = []  # stairs: from the cheapest level to the next, up to it, and level to the end
        for across, down in sorted((x.at(cost), min(y.at(score), plot.bottom)) for cost, score in self.front):
            steps += [(across, steps[-1][1]), (across, down)] if steps else [(across, down)]
        steps += [(plot.right, steps[-1][1])] if steps else []
        marks = []
        if self.field:  # its scales tell the script where points are
            scales = {name: f"{a.low} {a.high} {a.start} {a.end} {int(a.log)}" for name, a in (("x", x), ("y", y))}
            marks.append(tag({"cost": self.field, **scales}, draw_box(plot, "field")))
        marks += draw_grid(x, y, plot, self.axes)
        marks.append(draw_dots([(x.at(cost), min(y.at(score), plot.bottom)) for cost, score in self.crowd], "crowd"))
        for mark, here in zip(self.marks, at, strict=True):
            if mark.before is not None:
                start, end = (min(y.at(score), plot.bottom) for score in (mark.before, mark.score))
                marks.append(draw_line((here[0], start), (here[0], end), "gain"))
        taken = [Box(across - 9, down - 9, across + 9, down + 9) for across, down in at]
        taken += [Box(here[0], here[1] - 3, reach + 3, here[1] + 3) for here, reach in zip(at, reaches, strict=True)]
        for one, other in pairwise(steps):  # level or upright
            (left, right), (top, bottom) = (sorted(pair) for pair in zip(one, other, strict=True))
            taken.append(Box(left, top - 2, right + 2, bottom + 2))
        for name, score in self.levels:
            boxes, drawn = _level(name, score, y, plot, taken)
            taken, marks = [*taken, *boxes], [*marks, *drawn]
        marks += [draw_path(steps, "edge")] if steps else []
        if self.budget:
            marks.append(draw_line((plot.right, plot.top), (plot.right, plot.bottom), "budget"))
        if self.limit and x.low < self.limit[0] <= x.high:
            edge, words = x.at(self.limit[0]), f"budget {self.limit[1]}"
            wide = text_width(words, 12)
            left = edge + 6 if edge + 6 + wide <= plot.right else edge - 6 - wide
            taken.append(Box(left, plot.bottom - 22, left + wide, plot.bottom - 4))
            marks.append(draw_line((edge, plot.top), (edge, plot.bottom), "limit"))
            marks.append(draw_text(left, plot.bottom - 8, words, "facts"))
        marks += self._names(at, taken, plot, crowded=crowded)
        for mark, here, reach in zip(self.marks, at, reaches, strict=True):
            line = draw_line(here, (reach, here[1]), f"reach {mark.style}") if reach > here[0] else Markup("")
            dot = draw_dot(*here, style=f"point {mark.style}", hint=f"{mark.what}: {mark.facts}", square=mark.square)
            marks.append(mark.tagged(line + dot, here[0]))
        told = f"{'; '.join(f'{mark.what}: {mark.facts}' for mark in self.marks)}. Up is better, left costs less."
        return canvas(key, (width, plot.bottom + 48), (f"{self.axes[1]} against {self.axes[0]}", told), marks)

    def _axes(self, plot: Box) -> tuple[Axis, Axis]:
        """Make room for the costs (no reach beyond twice its cost), the scores on the scale, and levels near them."""
        costs = [cost for cost, _ in self.crowd] + [mark.cost for mark in self.marks]
        farthest = max([*costs, *(min(mark.reach, 2 * mark.cost) for mark in self.marks)])
        if self.limit:
            farthest = max(farthest, min(self.limit[0], 2 * max(costs)))
        x = Axis(0, farthest * 1.08, plot.left, plot.right)
        if max(costs) > (LOG_FROM if len(costs) > WITH_FACTS else LOG_FEW) * min(costs):
            x = Axis(min(costs) / 1.6, farthest * 1.3, plot.left, plot.right, log=True)
        scores = [score for _, score in self.crowd] + [mark.score for mark in self.marks]
        low, high = self.lowest, max(scores)
        span = max(high - low, 0.01)
        for _, level in sorted(self.levels, key=lambda one: -one[1]):
            if (self.stretch or level >= low) and max(high, level) - min(low, level) <= 10 * span:
                low, high = min(low, level), max(high, level)
        return x, Axis.padded(low, high, plot)

    def _names(self, at: Sequence[Pixel], taken: Sequence[Box], plot: Box, *, crowded: bool) -> list[Markup]:
        """Write each point's name and figures, with leaders, which lie under all names, where it is not next to it."""
        leaders, labels, full = [], [], list(taken)
        facts = len(self.marks) <= WITH_FACTS
        for mark, (x, y) in sorted(zip(self.marks, at, strict=True), key=lambda one: "front" not in one[0].style):
            name = mark.name if mark.keep or not crowded else mark.short
            if not name:
                continue
            name = shorten(f"{'↓' if mark.score < self.lowest else ''}{name}", NAME_LETTERS)
            figures = mark.facts if facts else ""
            size = max(text_width(name, 13), text_width(figures, 12)), 31.0 if figures else 16.0
            box = _place((x, y), size, full, plot)
            full.append(Box(box.left - 8, box.top - 3, box.right + 8, box.bottom + 3))
            anchor, start = ("start", box.left) if box.left > x else ("end", box.right)
            if box.left <= x <= box.right:
                anchor, start = "middle", (box.left + box.right) / 2
            words = [draw_text(start, box.top + 12, name, "label", anchor)]
            words += [draw_text(start, box.top + 27, figures, "facts", anchor)] if figures else []
            labels.append(mark.tagged(Markup("").join(words), x))
            near = min(max(x, box.left), box.right), min(max(y, box.top), box.bottom)
            if abs(near[0] - x) + abs(near[1] - y) > 24:
                leaders.append(draw_line((x, y), near, "leader"))
        return [*leaders, *labels]


def _place(point: Pixel, size: Pixel, taken: Sequence[Box], inside: Box) -> Box:
    """Place a label of `size` near a point: inside, on nothing that is taken, as near as possible."""
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
    return min(options, key=lambda option: option[0] + option[1].lost(taken, inside))[1]


def _level(name: str, score: float, y: Axis, plot: Box, taken: Sequence[Box]) -> tuple[list[Box], list[Markup]]:
    """Draw a level: a line with its name, or an arrow where it is off the scale; and the room it takes."""
    words = f"{shorten(name, NAME_LETTERS)} {units.score(score)}"
    inside, at = y.low <= score <= y.high, y.at(score)
    if not inside:
        words = f"{'↓' if score < y.low else '↑'} {words}, off this scale"
    wide = text_width(words, 12)
    feet = [at - 4, at + 18] if inside else [plot.bottom - 4 - 17 * row for row in range(4)]
    lefts = [plot.left + 6, plot.right - wide - 6]
    options = [Box(left, foot - 15, left + wide, foot) for left in lefts for foot in feet]
    box = min(options, key=lambda option: option.lost(taken, plot))
    anchor, start = ("start", box.left) if box.left == lefts[0] else ("end", box.right)
    marks = [draw_text(start, box.bottom - 4, words, "facts", anchor)]
    if not inside:
        return [box], marks
    line = draw_line((plot.left, at), (plot.right, at), "reference")
    return [box, Box(plot.left, at - 2, plot.right, at + 2)], [line, *marks]


def run_scatter(report: Report) -> Scatter | None:
    """Prepare score against median latency: a point per row that has both, a level per baseline without a time."""
    marks, levels = [], []
    for row in report.rows:
        time, score = report.latency(row), report.score(row)
        if score is None:
            continue
        if time is None:
            levels += [(row.name, score)] if row.role == "baseline" else []
            continue
        marks.append(
            ScatterPoint(
                row.name, time.p50_ms, score, row.role, row.name, units.measure(time.p50_ms, "ms"),
                keep=True, reach=time.p95_ms,
            )
        )  # fmt: skip
    axes = "median latency, ms", units.metric(report.metric)
    return Scatter(tuple(marks), axes, levels, most=(99, 99), stretch=True) if marks else None


def choice_scatter(comparison: Comparison, view: View | None, picked: ComparedModel | None) -> Scatter | None:
    """Prepare score against the median at `view` or (None) the size of the file; None where no candidate has both."""

    def cost(one: ComparedModel) -> float | None:
        return one.median_ms(view) if view else one.size_mb

    front, marks = comparison.front(cost), []
    for one in (*comparison.teachers, *comparison.candidates):  # candidates lie over teachers
        value, score, time = cost(one), comparison.score(one), one.latency(view)
        if value is None or value <= 0 or score is None:
            continue
        teacher, first = one.role == "teacher", one in front
        style = "teacher" if teacher else "student front" if first else "student behind"
        number = "" if teacher else str(comparison.number(one))
        noisy = "~" if time and time.noisy else ""
        marks.append(
            ScatterPoint(
                one.name, value, score, f"{style} picked" if one is picked else style, one.name,
                noisy + units.measure(value, "ms" if view else "MB"), short=number, keep=first or teacher,
                reach=time.p95_ms if time else 0.0, number=number,
            )
        )  # fmt: skip
    if all(mark.square for mark in marks):
        return None
    return Scatter(
        tuple(marks), ("median latency, ms" if view else "file size, MB", units.metric(comparison.task.metric)),
        comparison.baselines,
        [(cost(one) or 0.0, comparison.score(one) or 0.0) for one in front], budget=True,
    )  # fmt: skip


def trial_scatter(report: SearchReport, cost: ObjectiveName) -> Scatter | None:
    """Prepare the trials' scores against one cost: trained ones, the front, the teacher and anchors with their names.

    All other scored trials are the crowd. None where no trial has both.
    """
    best, first = answer(report), report.compute_front(("score", cost))
    marks, crowd, levels = [], [], list[tuple[str, float]]()
    for one in report.points:
        value = report.value(one, cost)
        if value is None or value <= 0 or one.score is None:
            continue
        picked, ahead, subnet = best is one, one.number in first, one.stage == "subnet"
        if subnet and not ahead:
            crowd.append((value, one.score))
        if subnet and not ahead and not picked:
            continue
        style = f"{'front' if ahead else 'behind'} {'subnet' if subnet else 'student'}{' picked' if picked else ''}"
        marks.append(
            ScatterPoint(
                short_shape(one.choice) if ahead or picked else "", value, one.score, style,
                f"trial {one.number}, {shape(one.choice)}", cost_text(cost, value),
                keep=picked, before=None if subnet or one.first == one.score else one.first,
            )
        )  # fmt: skip
    if not marks and not crowd:
        return None
    marks.sort(key=lambda mark: not mark.keep)
    for index, known in enumerate(known_beside(report)):
        value = finite({"latency": known.ms, "parameters": known.parameters, "file_mb": known.file_mb}.get(cost))
        name, style = (known.name, "anchor") if index else ("teacher", "teacher")
        if (score := finite(known.score)) is not None and value:
            marks.append(ScatterPoint(name, value, score, style, name, cost_text(cost, value), keep=True))
        elif score is not None:
            levels.append((name, score))
    limit = report.budgets.get(cost)
    name, unit = COSTS[cost]
    placed = [(report.value(each, cost) or 0.0, each.score or 0.0) for each in map(report.point, first)]
    return Scatter(
        tuple(marks), (f"{name}, {unit}" if unit else name, units.metric(report.metric)), levels, placed, crowd,
        most=(12, 5), limit=(limit, cost_text(cost, limit)) if limit else None, field=cost,
    )  # fmt: skip


@dataclass(frozen=True)
class Bar:
    """One bar: what it is of, how much, the class of its colour, and the number beside it where it is another one."""

    name: str
    value: float
    style: str
    text: str = ""


def draw_bars(items: Sequence[Bar], title: str, unit: str, key: str, width: float) -> Markup:
    """Draw one bar per item, from zero."""
    longest = max(item.value for item in items) or 1.0
    numbers = [item.text or units.measure(item.value, unit) for item in items]
    marks = []
    for index, (item, number) in enumerate(zip(items, numbers, strict=True)):
        top = index * 38.0
        room = int((width - text_width(number, 13) - 16) / (13 * ADVANCE))
        marks.append(draw_text(0, top + 13, shorten(item.name, room), "name"))
        marks.append(draw_text(width, top + 13, number, "number", "end"))
        marks.append(draw_box(Box(0, top + 20, width, top + 28), "track"))
        marks.append(draw_box(Box(0, top + 20, max(1.5, width * item.value / longest), top + 28), f"bar {item.style}"))
    told = "; ".join(f"{item.name} {number}" for item, number in zip(items, numbers, strict=True))
    return canvas(key, (width, 38 * len(items) - 6), (title, told), marks)


def bar_figure(
    items: Iterable[Bar], heading: str, unit: str, key: str, *, caption: str = "", width: float = SIDE
) -> Figure | None:
    """Draw the bars whose value is known; None without any."""
    known = [item for item in items if units.known(item.value)]
    return (
        draw_figure(heading, partial(draw_bars, known, heading, unit), key, width, caption=caption) if known else None
    )


def draw_lines(
    lines: Lines,
    title: str,
    names: tuple[str, str],
    key: str,
    width: float,
    *,
    tight: bool = False,
    smooth: bool = False,
    level: float | None = None,
) -> Markup:
    """Draw values over steps; on a log scale where they span more than a factor of 20.

    names  of the steps and of the values; tight: the scale shows only the range of the values; smooth: many values are
    drawn as their running mean over a faint line, and few without dots; level: a dashed line
    """
    values = [value for line in lines.values() for _, value in line] + ([] if level is None else [level])
    steps = [step for line in lines.values() for step, _ in line]
    top = 34 if names[1] else 14
    plot = Box(52, top, width - 14, top + 232)
    x = Axis(min(0.0, *steps), max(*steps, 1.0), plot.left, plot.right)
    low, high = min(values), max(values)
    y = Axis.padded(low, high, plot)
    if not tight and _spans_decades(values):
        y = Axis(low / 1.15, high * 1.15, plot.bottom, plot.top, log=True)
    elif not tight and low >= 0:
        y = Axis(0, (high or 1.0) * 1.06, plot.bottom, plot.top)
    faint, strong = [], []
    for index, line in enumerate(lines.values()):
        style, thin = _line_style(index, list(lines)), thin_out(line)
        even = smooth_out(thin) if smooth else thin
        at, raw = ([(x.at(step), y.at(value)) for step, value in points] for points in (even, thin))
        faint += [draw_path(raw, f"raw {style}")] if even is not thin else []
        strong.append(draw_path(at, f"curve {style}"))
        strong += [draw_path([one], f"knot {style}") for one in at if len(at) <= 40 and not smooth]
    marks = draw_grid(x, y, plot, names)
    if level is not None:
        marks.append(draw_line((plot.left, y.at(level)), (plot.right, y.at(level)), "reference"))
    digits = units.three_digits
    ends = ", ".join(f"{name} from {digits(line[0][1])} to {digits(line[-1][1])}" for name, line in lines.items())
    return canvas(key, (width, plot.bottom + 44), (title, ends), [*marks, *faint, *strong])


def loss_lines(points: Sequence[Point]) -> Lines:
    """Choose the parts of the loss among the names of a curve, the total first, unless it is its one part again."""
    shown = {name for point in points for name in point if not name.startswith(("eval_", "train_"))} - ASIDE
    found = {name: line for name, line in series(points) if name == "eval_loss" or name in shown}
    parts = [line for name, line in found.items() if name not in ("loss", "eval_loss")]
    if len(parts) == 1 and "loss" in found:
        pairs = list(zip(found["loss"], parts[0], strict=False))
        same = all(a == b and math.isclose(x, y, rel_tol=1e-4) for (a, x), (b, y) in pairs)  # but for rounding
        if same and len(found["loss"]) == len(parts[0]):
            del found["loss"]
    return dict(sorted(found.items(), key=lambda item: item[0] != "loss"))


def stage_figures(report: Report, name: str, key: str) -> tuple[Figure, ...]:
    """Draw the losses of a stage, and its scores on the validation split beside the teacher's."""
    points = report.curves.get(name, ())
    losses, known = loss_lines(points), dict(series(points))
    names = {f"eval_{report.metric}": units.metric(report.metric), "eval_agreement": "agreement"}
    scores = {shown: known[each] for each, shown in names.items() if each in known}
    figures = []
    if losses:
        longest, said = max(len(line) for line in losses.values()), []
        if longest >= SMOOTHED_FROM:
            said.append("Strong lines are running means, faint ones the values as logged.")
        if longest > MOST_POINTS:
            said.append(f"Of {longest:,} logged values, neighbours are averaged.")
        if _spans_decades([value for line in losses.values() for _, value in line]):
            said.append("The vertical scale is logarithmic.")
        draw = partial(draw_lines, losses, f"Loss in stage {name}", ("step", ""), smooth=True)
        width = MAIN if scores else WHOLE
        figures.append(draw_figure("Loss", draw, f"loss-{key}", width, caption=" ".join(said), legend=legend(losses)))
    if scores:
        teacher = report.teacher_row
        level = report.score(teacher) if teacher and report.split == "validation" else None  # as the curves are
        title = f"{units.metric(report.metric)} during training"
        draw = partial(draw_lines, scores, title, ("step", ""), tight=True, level=level)
        caption = "" if level is None else "Dashed: the teacher."
        width = SIDE if losses else WHOLE
        figures.append(
            draw_figure("Score on validation", draw, f"score-{key}", width, caption=caption, legend=legend(scores))
        )
    return tuple(figures)


def load_figures(device: MeasuredDevice, key: str) -> tuple[Figure, ...]:
    """Draw medians by the minute of a device without pause, and temperatures where it shows any."""
    runs = {name: run for name, run in device.sustained if run.minutes}
    times: Lines = {name: [(at + 1.0, ms) for at, ms in enumerate(run.minutes)] for name, run in runs.items()}
    degrees: Lines = {
        name: [(at + 1.0, value) for at, value in enumerate(run.temperatures) if value is not None]
        for name, run in runs.items()
    }
    warm = {name: line for name, line in degrees.items() if line}
    kinds = [("Median latency", "ms", times, MAIN if warm else WHOLE), ("Temperature", "°C", warm, SIDE)]
    return tuple(
        draw_figure(
            f"{name} by the minute", partial(draw_lines, lines, name, ("minute", unit), tight=unit != "ms"),
            f"{unit.strip('°')}-{key}", width, legend=legend(lines, f" {unit}"),
        )
        for name, unit, lines, width in kinds if lines
    )  # fmt: skip


def legend(lines: Lines, unit: str = "") -> tuple[tuple[str, str, str], ...]:
    """Return (class of the line, name, value at its end as drawn) of each line."""
    ends = [units.three_digits(smooth_out(thin_out(line))[-1][1]) for line in lines.values()]
    return tuple((_line_style(at, list(lines)), name, f"{ends[at]}{unit}") for at, name in enumerate(lines))


def _line_style(index: int, names: Sequence[str]) -> str:
    """Return the class of a line's colour: ink for the total, else one of eight; dashed from the ninth on."""
    if names[index] == "loss":
        return "total"
    place = index - ("loss" in names)
    return f"s{place % COLOURS}" + (" dashed" if place >= COLOURS else "")


def thin_out(line: Line) -> Line:
    """Average equal runs of neighbours, so that at most MOST_POINTS points are left."""
    run = -(-len(line) // MOST_POINTS)
    parts = [line[start : start + run] for start in range(0, len(line), run)] if run > 1 else []
    return [(fmean([step for step, _ in part]), fmean([value for _, value in part])) for part in parts] or line


def smooth_out(line: Line) -> Line:
    """Take the running mean over a twentieth of the line, centred; a line of few points is returned as it is."""
    if len(line) < SMOOTHED_FROM:
        return line
    half = max(1, len(line) // 40)
    values = [value for _, value in line]
    return [(step, fmean(values[max(0, at - half) : at + half + 1])) for at, (step, _) in enumerate(line)]


def _spans_decades(values: Sequence[float]) -> bool:
    return 0 < 20 * min(values) < max(values)


def draw_predictions(report: SearchReport, key: str, width: float) -> Markup:
    """Draw predicted against measured latency of every shape that was measured, and what FLOPs alone would say."""
    assert report.prediction is not None
    shown = report.prediction.timings
    values = [
        value for one in shown for value in (one.measured_ms, one.predicted_ms, one.flops_ms) if value is not None
    ]
    plot = Box(52, 34, width - 14, 372)
    margin = 0.06 * (max(values) - min(values)) or 0.1 * max(values)
    low, high = max(0.0, min(values) - margin), max(values) + margin
    x, y = Axis(low, high, plot.left, plot.right), Axis(low, high, plot.bottom, plot.top)
    marks = draw_grid(x, y, plot, ("measured, ms", "predicted, ms"))
    marks.append(draw_line((x.at(low), y.at(low)), (x.at(high), y.at(high)), "reference"))
    for one in shown:
        if one.error_ms:
            ends = [y.at(min(max(one.predicted_ms + sign * one.error_ms, low), high)) for sign in (-1, 1)]
            marks.append(draw_line((x.at(one.measured_ms), ends[0]), (x.at(one.measured_ms), ends[1]), "gain"))
    flops = [(x.at(one.measured_ms), y.at(one.flops_ms)) for one in shown if one.flops_ms is not None]
    marks += [draw_dot(*at, style="point flops", hint="from FLOPs alone") for at in flops]
    for one in shown:
        hint = f"{one.name}: predicted {units.measure(one.predicted_ms, 'ms')}, measured "
        hint += f"{units.measure(one.measured_ms, 'ms')}{', noisy' if one.noisy else ''}"
        style = "point student" if one.finalist else "point fitted"
        marks.append(draw_dot(x.at(one.measured_ms), y.at(one.predicted_ms), style=style, hint=hint))
    told = f"{len(shown)} shapes; the line is where both are equal"
    return canvas(key, (width, 420), ("Predicted against measured latency", told), marks)


def draw_progress(report: SearchReport, key: str, width: float) -> Markup:
    """Draw every trial's first score when it was asked for, the best within the budgets so far, and what has none.

    At least one trial has a score.
    """
    timed = all(one.started is not None for one in report.points)
    placed = [((one.started or 0.0) / 60 if timed else float(one.number), one) for one in report.points]
    scored = [(when, first, one) for when, one in placed if (first := one.first) is not None]
    plot = Box(52, 34, width - 14, 290)
    x = Axis(0, max(*(when for when, _ in placed), 1e-3), plot.left, plot.right)
    y = Axis.padded(least_on_scale([score for _, score, _ in scored]), max(score for _, score, _ in scored), plot)
    marks = draw_grid(x, y, plot, ("minute" if timed else "trial", units.metric(report.metric)))
    marks.append(draw_dots([(x.at(when), min(y.at(score), plot.bottom)) for when, score, _ in scored], "crowd"))
    marks.append(draw_dots([(x.at(when), plot.bottom - 5) for when, one in placed if one.first is None], "crowd out"))
    best: list[Pixel] = []
    for when, score, one in sorted(scored, key=lambda each: each[:2]):
        at = x.at(when), y.at(score)
        if report.feasible(one) and (not best or at[1] < best[-1][1]):
            best += [(at[0], best[-1][1]), at] if best else [at]
    marks += [draw_path([*best, (plot.right, best[-1][1])], "curve s0")] if best else []
    told = f"{len(scored)} of {len(placed)} trials were scored"
    return canvas(key, (width, 334), ("Trials over time", told), marks)
