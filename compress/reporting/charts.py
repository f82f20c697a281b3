"""Draw charts as inline SVG: bars, lines, predictions and progress, each for the width
it is shown at.

Many points form one path of dots, which keeps the file small for thousands of them; a
script locates each by the scale stored in the picture.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import fmean

from markupsafe import Markup

from compress.records.run_report import Point, Report, series
from compress.records.search_report import SearchReport, Timing
from compress.reporting import format as units
from compress.reporting.compare import MeasuredDevice

MAIN = 690
SIDE = 350
WHOLE_COLUMN = 1088
PHONE = 342
"""Widths in pixels: of the wider and the narrower of a page's two columns, of both
together, and of a phone's only column."""
LEFT = 52
RIGHT = 14
TOP = 34
FOOT = 44
"""Margins around a plot, in pixels."""
ADVANCE = 0.58
"""Average width of a sans-serif letter in ems: no label outgrows the box reserved for
it."""
COLOURS = 8
MOST_POINTS = 400
SMOOTHED_FROM = 60
MANY_POINTS = 1000
OFF_SCALE = 3
"""Scores that lie farther below the best than this multiple of the median score's
distance are off the scale."""
NOT_LOSSES = frozenset(
    {
        "step",
        "epoch",
        "grad_norm",
        "learning_rate",
        "total_flos",
        "num_input_tokens_seen",
    }
)
"""Entries that a trainer logs in addition to the loss and its parts."""

Pixel = tuple[float, float]
Polyline = list[tuple[float, float]]
Lines = Mapping[str, Polyline]


Legend = tuple[tuple[str, str, str], ...]
"""(line class, name, last value) of each line."""


@dataclass(frozen=True)
class Figure:
    """A picture at two widths, with its heading and caption, and a legend of (line
    class, name, last value)."""

    heading: str
    wide: Markup
    narrow: Markup
    caption: str = ""
    legend: Legend = ()


def draw_figure(
    heading: str,
    draw: Callable[[str, float], Markup],
    key: str,
    width: float,
    *,
    caption: str = "",
    legend: Legend = (),
) -> Figure:
    """Draw the same picture for a wide window and for a phone; the style sheet shows
    one of them."""
    return Figure(
        heading,
        draw(f"{key}-wide", width),
        draw(f"{key}-phone", PHONE),
        caption,
        legend,
    )


@dataclass(frozen=True)
class Box:
    """A rectangle from (left, top) to (right, bottom)."""

    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: "Box") -> float:
        """Compute the area that both boxes cover."""
        if (
            self.left >= other.right
            or other.left >= self.right
            or self.top >= other.bottom
            or other.top >= self.bottom
        ):
            # as most pairs do: a label is compared with everything in the picture
            return 0.0
        wide = min(self.right, other.right) - max(self.left, other.left)
        return wide * (min(self.bottom, other.bottom) - max(self.top, other.top))

    def lost(self, taken: Sequence["Box"], inside: "Box") -> float:
        """Compute the area that is outside of the picture or already taken."""
        area = (self.right - self.left) * (self.bottom - self.top)
        return area - self.overlap(inside) + sum(self.overlap(other) for other in taken)


def element(tag: str, *content: str, **attributes: str | float) -> Markup:
    """Write an SVG element with its text escaped; numbers get one decimal, and `_` in a
    name stands for `-`."""
    words = [
        Markup(' {}="{}"').format(
            name.strip("_").replace("_", "-"),
            value if isinstance(value, str) else f"{value:.1f}",
        )
        for name, value in attributes.items()
    ]
    form = "<{0}{1}>{2}</{0}>" if content else "<{0}{1}/>"
    return Markup(form).format(tag, Markup("").join(words), Markup("").join(content))


def draw_picture(
    key: str,
    size: Pixel,
    title: str,
    description: str,
    marks: Iterable[Markup],
) -> Markup:
    """Make one picture; `key` is unique on the page, title and description are read out
    by screen readers."""
    width = f"{size[0]:.0f}"
    height = f"{size[1]:.0f}"
    return element(
        "svg",
        element("title", title, id=f"{key}-title"),
        element("desc", description, id=f"{key}-desc"),
        *marks,
        class_="picture",
        viewBox=f"0 0 {width} {height}",
        width=width,
        height=height,
        role="img",
        aria_labelledby=f"{key}-title {key}-desc",
    )


def draw_text(
    x: float,
    y: float,
    content: str,
    style: str = "",
    anchor: str = "start",
) -> Markup:
    """Write `content` with its baseline at y."""
    return element("text", content, x=x, y=y, class_=style, text_anchor=anchor)


def draw_line(start: Pixel, end: Pixel, style: str) -> Markup:
    """Draw a straight line."""
    return element("line", x1=start[0], y1=start[1], x2=end[0], y2=end[1], class_=style)


def draw_box(box: Box, style: str) -> Markup:
    """Fill a box with rounded corners."""
    return element(
        "rect",
        x=box.left,
        y=box.top,
        width=box.right - box.left,
        height=box.bottom - box.top,
        rx="2",
        class_=style,
    )


def draw_path(points: Sequence[Pixel], style: str) -> Markup:
    """Draw a line through the points; a single point appears as a dot, by the round
    cap."""
    drawn = points if len(points) > 1 else [*points, *points]
    return element(
        "path", d="M" + " ".join(f"{x:.1f},{y:.1f}" for x, y in drawn), class_=style
    )


def draw_dot(at: Pixel, style: str, hint: str, *, square: bool = False) -> Markup:
    """Draw a point with a tooltip; `square` draws a square on its corner."""
    x, y = at
    title = element("title", hint)
    if square:
        return element(
            "path",
            title,
            d=f"M{x:.1f},{y - 7:.1f} l7,7 -7,7 -7,-7 z",
            class_=style,
        )
    return element("circle", title, cx=x, cy=y, r="6", class_=style)


def draw_dots(places: Sequence[Pixel], style: str) -> Markup:
    """Draw dots as one path, without duplicates; many dots are rounded to whole
    pixels."""
    if not places:
        return Markup("")
    digits = 0 if len(places) > MANY_POINTS else 1
    different = dict.fromkeys((round(x, digits), round(y, digits)) for x, y in places)
    return element(
        "path", d="".join(f"M{x:g},{y:g}h0" for x, y in different), class_=style
    )


def group(marks: Markup, **data: str) -> Markup:
    """Group the marks under these data attributes."""
    return element("g", marks, **{f"data-{name}": data[name] for name in data})


def text_width(content: str, size: float) -> float:
    """Bound the pixels that `content` takes at a font size; letters outside Latin are
    counted as wide."""
    return sum(ADVANCE if ord(letter) < 0x2E80 else 1.05 for letter in content) * size


def shorten(content: str, letters: int) -> str:
    """Shorten a text to at most `letters` characters, the last an ellipsis."""
    return content if len(content) <= letters else content[: letters - 1].rstrip() + "…"


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high` on pixels from `start` to `end`, linear or
    logarithmic."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    @staticmethod
    def padded(low: float, high: float, bottom: float, top: float) -> "Axis":
        """Make a vertical axis with air above and below the values."""
        margin = max(0.14 * (high - low), 0.004)
        return Axis(low - margin, high + margin, bottom, top)

    def at(self, value: float) -> float:
        """Place a value."""
        low = self.low
        high = self.high
        here = value
        if self.log:
            low = math.log(low)
            high = math.log(high)
            here = math.log(value)
        return self.start + (here - low) / (high - low) * (self.end - self.start)

    def ticks(self, wanted: int = 5) -> list[float]:
        """Choose round values within the axis: about `wanted` of them, at least two on
        a linear one."""
        if self.log:
            decades = range(
                math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1
            )
            for digits in ((1,), (1, 3), (1, 2, 5)):
                ticks = [digit * 10.0**power for power in decades for digit in digits]
                found = [
                    tick
                    for tick in ticks
                    if self.low * 0.999 <= tick <= self.high * 1.001
                ]
                if len(found) >= min(3, wanted):
                    break
            return (
                found[:: math.ceil(len(found) / (wanted + 2))]
                if found
                else [self.low, self.high]
            )
        raw = (self.high - self.low) / max(1, wanted)
        power = 10.0 ** math.floor(math.log10(raw))
        step = power * next(
            nice for nice in (1, 2, 2.5, 5, 10) if nice * power >= raw * 0.999
        )
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [round(index * step, 12) for index in range(first, last + 1)]

    def labels(self, wanted: int) -> list[tuple[float, str]]:
        """Choose the ticks, each with its label next to the axis."""
        ticks = self.ticks(wanted)
        step = (
            0.0
            if self.log
            else min((after - before for before, after in pairwise(ticks)), default=1.0)
        )
        return [(tick, label(tick, step)) for tick in ticks]


def label(value: float, step: float) -> str:
    """Write a tick with as many decimals as ticks `step` apart need; as short as
    possible if `step` is 0."""
    if abs(value) >= 10_000:
        power = min(int(math.log10(abs(value)) / 3 + 1e-9), 6)
        return f"{value / 1000**power:g}{'kMGTPE'[power - 1]}".replace("-", "−")
    if not step:
        return f"{value:,g}".replace("-", "−")
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if round(step, decimals) != round(step, decimals + 1):
        decimals += 1
    return f"{value:,.{decimals}f}".replace("-", "−")


class Plot:
    """A chart under construction: two axes, and marks placed by their values. Values
    below the scale are drawn at its foot.

    names  of the axes; the vertical axis has its name above it, written horizontally;
           '' for none
    """

    def __init__(self, x: Axis, y: Axis, names: tuple[str, str]) -> None:
        self.x = x
        self.y = y
        self.box = Box(x.start, y.end, x.end, y.start)
        self.marks: list[Markup] = []
        bottom = self.box.bottom
        for tick, written in y.labels(5):
            at = y.at(tick)
            self.level(at, "grid")
            self.text(x.start - 8, at + 4, written, "tick", "end")
        for tick, written in x.labels(6 if x.end > 450 else 4):
            at = x.at(tick)
            self.line((at, bottom), (at, bottom + 4), "axis")
            self.text(at, bottom + 18, written, "tick", "middle")
        self.level(bottom, "axis")
        self.text(x.end, bottom + 38, names[0], "axis-title", "end")
        if names[1]:
            self.text(0, 14, names[1], "axis-title")

    def at(self, value: float, score: float) -> Pixel:
        """Place a point."""
        return self.x.at(value), min(self.y.at(score), self.box.bottom)

    def line(self, start: Pixel, end: Pixel, style: str) -> None:
        """Draw a straight line between two pixels."""
        self.marks.append(draw_line(start, end, style))

    def level(self, y: float, style: str) -> None:
        """Draw a line across the plot at a pixel."""
        self.line((self.box.left, y), (self.box.right, y), style)

    def upright(self, x: float, style: str) -> None:
        """Draw a line up the plot at a pixel."""
        self.line((x, self.box.top), (x, self.box.bottom), style)

    def text(
        self,
        x: float,
        y: float,
        content: str,
        style: str,
        anchor: str = "start",
    ) -> None:
        """Write a text with its baseline at y."""
        self.marks.append(draw_text(x, y, content, style, anchor))

    def path(self, points: Iterable[Pixel], style: str) -> None:
        """Draw a line through points given by their values."""
        self.marks.append(draw_path([self.at(*point) for point in points], style))

    def dots(self, points: Iterable[Pixel], style: str) -> None:
        """Draw dots given by their values."""
        self.marks.append(draw_dots([self.at(*point) for point in points], style))

    def picture(self, key: str, title: str, description: str) -> Markup:
        """Finish the chart."""
        size = self.box.right + RIGHT, self.box.bottom + FOOT
        return draw_picture(key, size, title, description, self.marks)


def least_on_scale(scores: Sequence[float]) -> float:
    """Return the least of the scores that is not far below the others."""
    ordered = sorted(scores, reverse=True)
    floor = ordered[0] - OFF_SCALE * max(ordered[0] - ordered[len(ordered) // 2], 0.01)
    return min(score for score in ordered if score >= floor)


@dataclass(frozen=True)
class Bar:
    """One bar: its name, its value, the class of its colour, and the number shown next
    to it if it differs from the value."""

    name: str
    value: float
    style: str
    text: str = ""


def draw_bars(
    items: Sequence[Bar],
    title: str,
    unit: str,
    key: str,
    width: float,
) -> Markup:
    """Draw one bar per item, from zero."""
    longest = max(item.value for item in items) or 1.0
    marks = []
    described = []
    for index, item in enumerate(items):
        top = index * 38.0
        number = item.text or units.measure(item.value, unit)
        room = int((width - text_width(number, 13) - 16) / (13 * ADVANCE))
        reach = max(1.5, width * item.value / longest)
        marks += [
            draw_text(0, top + 13, shorten(item.name, room), "name"),
            draw_text(width, top + 13, number, "number", "end"),
            draw_box(Box(0, top + 20, width, top + 28), "track"),
            draw_box(Box(0, top + 20, reach, top + 28), f"bar {item.style}"),
        ]
        described.append(f"{item.name} {number}")
    size = width, 38 * len(items) - 6
    return draw_picture(key, size, title, "; ".join(described), marks)


def bar_figure(
    items: Iterable[Bar],
    heading: str,
    unit: str,
    key: str,
    *,
    caption: str = "",
    width: float = SIDE,
) -> Figure | None:
    """Draw the bars whose value is known; return None if there are none."""
    if not (bars := [item for item in items if units.is_known(item.value)]):
        return None
    return draw_figure(
        heading,
        partial(draw_bars, bars, heading, unit),
        key,
        width,
        caption=caption,
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

    names  of the steps and of the values; tight: the scale shows only the range of the
           values; smooth: many values are
    drawn as their running mean over a faint line, and few without dots; level: a dashed
    line"""
    values = [value for line in lines.values() for _, value in line] + (
        [] if level is None else [level]
    )
    steps = [step for line in lines.values() for step, _ in line]
    top = TOP if names[1] else 14
    bottom = top + 232
    low = min(values)
    high = max(values)
    y = Axis.padded(low, high, bottom, top)
    if not tight and _spans_decades(values):
        y = Axis(low / 1.15, high * 1.15, bottom, top, log=True)
    elif not tight and low >= 0:
        y = Axis(0, (high or 1.0) * 1.06, bottom, top)
    plot = Plot(Axis(min(0.0, *steps), max(*steps, 1.0), LEFT, width - RIGHT), y, names)
    if level is not None:
        plot.level(y.at(level), "reference")
    thinned = [
        (line_style(index, list(lines)), thin_out(line))
        for index, line in enumerate(lines.values())
    ]
    for style, line in thinned:
        if smooth and len(line) >= SMOOTHED_FROM:
            plot.path(line, f"raw {style}")
    for style, line in thinned:
        plot.path(smooth_out(line) if smooth else line, f"curve {style}")
        if not smooth and len(line) <= 40:
            for point in line:
                plot.path([point], f"knot {style}")
    digits = units.three_digits
    ends = ", ".join(
        f"{name} from {digits(line[0][1])} to {digits(line[-1][1])}"
        for name, line in lines.items()
    )
    return plot.picture(key, title, ends)


def loss_lines(points: Sequence[Point]) -> Lines:
    """Choose the parts of the loss among the names of a curve, the total first unless
    it equals its only part."""
    found = {
        name: line
        for name, line in series(points)
        if name == "eval_loss"
        or not (name.startswith(("eval_", "train_")) or name in NOT_LOSSES)
    }
    parts = [line for name, line in found.items() if name not in ("loss", "eval_loss")]
    if len(parts) == 1 and len(total := found.get("loss", [])) == len(parts[0]):
        pairs = zip(total, parts[0], strict=True)
        # equal up to rounding
        if all(a == b and math.isclose(x, y, rel_tol=1e-4) for (a, x), (b, y) in pairs):
            del found["loss"]
    return dict(sorted(found.items(), key=lambda item: item[0] != "loss"))


def loss_figures(
    points: Sequence[Point], name: str, key: str, width: int
) -> list[Figure]:
    """Draw the losses of a stage, if any were logged."""
    losses = loss_lines(points)
    if not losses:
        return []
    longest = max(len(line) for line in losses.values())
    notes = []
    if longest >= SMOOTHED_FROM:
        notes.append("Strong lines are running means, faint ones the values as logged.")
    if longest > MOST_POINTS:
        notes.append(f"Neighbours among the {longest:,} logged values are averaged.")
    if _spans_decades([value for line in losses.values() for _, value in line]):
        notes.append("The vertical scale is logarithmic.")
    draw = partial(
        draw_lines, losses, f"Loss in stage {name}", ("step", ""), smooth=True
    )
    caption = " ".join(notes)
    picture = draw_figure(
        "Loss", draw, f"loss-{key}", width, caption=caption, legend=legend(losses)
    )
    return [picture]


def stage_figures(report: Report, name: str, key: str) -> list[Figure]:
    """Draw the losses of a stage, and its scores on the validation split next to the
    teacher's."""
    points = report.curves.get(name, ())
    known = dict(series(points))
    names = {
        f"eval_{report.metric}": units.metric(report.metric),
        "eval_agreement": "agreement",
    }
    scores = {shown: known[each] for each, shown in names.items() if each in known}
    figures = loss_figures(points, name, key, MAIN if scores else WHOLE_COLUMN)
    if scores:
        teacher = report.teacher_row
        # the split that the curves are scored on
        level = (
            report.score(teacher) if teacher and report.split == "validation" else None
        )
        title = f"{units.metric(report.metric)} during training"
        draw = partial(draw_lines, scores, title, ("step", ""), tight=True, level=level)
        caption = "" if level is None else "Dashed: the teacher."
        width = SIDE if figures else WHOLE_COLUMN
        figures.append(
            draw_figure(
                "Score on validation",
                draw,
                f"score-{key}",
                width,
                caption=caption,
                legend=legend(scores),
            )
        )
    return figures


def load_figures(device: MeasuredDevice, key: str) -> list[Figure]:
    """Draw the median latency of each minute of a sustained run, and the temperature if
    the device reports it."""
    runs = {name: run for name, run in device.sustained if run.minutes}
    times: Lines = {
        name: [(at, ms) for at, ms in enumerate(run.minutes, 1)]
        for name, run in runs.items()
    }
    degrees: Lines = {
        name: line
        for name, run in runs.items()
        if (
            line := [
                (float(at), value)
                for at, value in enumerate(run.temperatures, 1)
                if value is not None
            ]
        )
    }
    kinds = [
        ("Median latency", "ms", times, MAIN if degrees else WHOLE_COLUMN),
        ("Temperature", "°C", degrees, SIDE),
    ]
    return [
        draw_figure(
            f"{name} by the minute",
            partial(draw_lines, lines, name, ("minute", unit), tight=unit != "ms"),
            f"{unit.strip('°')}-{key}",
            width,
            legend=legend(lines, f" {unit}"),
        )
        for name, unit, lines, width in kinds
        if lines
    ]


def legend(lines: Lines, unit: str = "") -> Legend:
    """Return (class of the line, name, value at its end as drawn) of each line."""
    entries = []
    for at, (name, line) in enumerate(lines.items()):
        _, end = smooth_out(thin_out(line))[-1]
        style = line_style(at, list(lines))
        entries.append((style, name, units.three_digits(end) + unit))
    return tuple(entries)


def line_style(index: int, names: Sequence[str]) -> str:
    """Return the class of a line's colour: ink for the total, else one of eight; dashed
    from the ninth on."""
    if names[index] == "loss":
        return "total"
    place = index - ("loss" in names)
    return f"s{place % COLOURS}" + (" dashed" if place >= COLOURS else "")


def thin_out(line: Polyline) -> Polyline:
    """Average equal runs of neighbours, so that at most MOST_POINTS points are left."""
    if len(line) <= MOST_POINTS:
        return line
    run = -(-len(line) // MOST_POINTS)
    parts = [line[start : start + run] for start in range(0, len(line), run)]
    return [
        (fmean([step for step, _ in part]), fmean([value for _, value in part]))
        for part in parts
    ]


def smooth_out(line: Polyline) -> Polyline:
    """Take the running mean over a twentieth of the line, centred; a line of few points
    is returned as it is."""
    if len(line) < SMOOTHED_FROM:
        return line
    half = max(1, len(line) // 40)
    values = [value for _, value in line]
    return [
        (step, fmean(values[max(0, at - half) : at + half + 1]))
        for at, (step, _) in enumerate(line)
    ]


def _spans_decades(values: Sequence[float]) -> bool:
    return 0 < 20 * min(values) < max(values)


def draw_predictions(timings: Sequence[Timing], key: str, width: float) -> Markup:
    """Draw predicted against measured latency of every shape that was measured, and
    what FLOPs alone would say."""
    values = [
        value
        for one in timings
        for value in (one.measured_ms, one.predicted_ms, one.flops_ms)
        if value is not None
    ]
    margin = 0.06 * (max(values) - min(values)) or 0.1 * max(values)
    low = max(0.0, min(values) - margin)
    high = max(values) + margin
    x = Axis(low, high, LEFT, width - RIGHT)
    y = Axis(low, high, 372, TOP)
    plot = Plot(x, y, ("measured, ms", "predicted, ms"))
    plot.line(plot.at(low, low), plot.at(high, high), "reference")
    for one in timings:
        if one.error_ms:
            start, end = (
                plot.at(one.measured_ms, min(max(one.predicted_ms + by, low), high))
                for by in (-one.error_ms, one.error_ms)
            )
            plot.line(start, end, "gain")
    for one in timings:
        if one.flops_ms is not None:
            at = plot.at(one.measured_ms, one.flops_ms)
            plot.marks.append(draw_dot(at, "point flops", "from FLOPs alone"))
    for one in timings:
        noisy = ", noisy" if one.noisy else ""
        hint = (
            f"{one.name}: predicted {units.measure(one.predicted_ms, 'ms')}, measured "
            f"{units.measure(one.measured_ms, 'ms')}{noisy}"
        )
        style = "point student" if one.finalist else "point fitted"
        at = plot.at(one.measured_ms, one.predicted_ms)
        plot.marks.append(draw_dot(at, style, hint))
    description = f"{len(timings)} shapes; the line is where both are equal"
    return plot.picture(key, "Predicted against measured latency", description)


def draw_progress(report: SearchReport, key: str, width: float) -> Markup:
    """Draw each trial's first score at the time it began, the best within the budgets
    so far, and the trials without a score.

    At least one trial has a score.
    """
    timed = all(one.started is not None for one in report.points)
    placed = [
        ((one.started or 0.0) / 60 if timed else float(one.number), one)
        for one in report.points
    ]
    scored = [
        (when, first, one) for when, one in placed if (first := one.first) is not None
    ]
    scores = [score for _, score, _ in scored]
    x = Axis(0, max(*(when for when, _ in placed), 1e-3), LEFT, width - RIGHT)
    y = Axis.padded(least_on_scale(scores), max(scores), 290, TOP)
    plot = Plot(x, y, ("minute" if timed else "trial", units.metric(report.metric)))
    plot.dots([(when, score) for when, score, _ in scored], "crowd")
    foot = [
        (x.at(when), plot.box.bottom - 5) for when, one in placed if one.first is None
    ]
    plot.marks.append(draw_dots(foot, "crowd out"))
    best: list[Pixel] = []
    for when, score, one in sorted(scored, key=lambda each: each[:2]):
        if report.feasible(one) and (not best or score > best[-1][1]):
            best += [(when, best[-1][1]), (when, score)] if best else [(when, score)]
    if best:
        plot.path([*best, (x.high, best[-1][1])], "curve s0")
    return plot.picture(
        key,
        "Trials over time",
        f"{len(scored)} of {len(placed)} trials were scored",
    )
