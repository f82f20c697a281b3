"""Draw scatter charts: scores against a cost, with names beside the points, and a front
as stairs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from markupsafe import Markup

from compress.records.run_report import Report, finite
from compress.records.search_report import ObjectiveName, SearchReport
from compress.reporting import format as units
from compress.reporting.charts import (
    LEFT,
    RIGHT,
    TOP,
    Axis,
    Box,
    Pixel,
    Plot,
    draw_box,
    draw_dot,
    draw_line,
    draw_path,
    draw_text,
    group,
    least_on_scale,
    shorten,
    text_width,
)
from compress.reporting.compare import ComparedModel, Comparison, View
from compress.reporting.remarks import (
    COST_NAMES,
    answer,
    cost_text,
    list_anchors,
    shape,
    short_shape,
)

NAME_LETTERS = 26
WITH_FACTS = 5
"""The most points that a chart may have to show figures next to their names."""
LOG_FROM = 4
"""Range of costs, as a factor, above which the axis is logarithmic; LOG_FEW applies if
there are few points."""
LOG_FEW = 20
NARROW = 500
BOTTOM = 392


@dataclass(frozen=True)
class ScatterPoint:
    """A point of a scatter chart, at a cost and a score.

    name    next to the point, if there is room; keep: even without room; short: shown
            in a crowded chart instead
    what    its name in the tooltip; cost_text: its cost in words
    style   the class of its colour; a teacher and an anchor are squares, others circles
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
        """Return True for a teacher or an anchor, which are shown for comparison."""
        return self.style in ("teacher", "anchor")

    @property
    def facts(self) -> str:
        """Format score and cost."""
        return f"{units.score(self.score)} · {self.cost_text}"

    @property
    def hint(self) -> str:
        """Name the point, with score and cost."""
        return f"{self.what}: {self.facts}"

    def group(self, marks: Markup, x: float) -> Markup:
        """Group the marks of the point for a script."""
        return group(marks, n=self.number, x=f"{x:.1f}") if self.number else marks


@dataclass(frozen=True)
class Scatter:
    """Scores against a cost: points with their names, levels for models without a cost,
    and the front as stairs.

    axes      names of the cost and of the score; levels: (name, score)
    front     (cost, score) of the points that no cheaper one beats; crowd: of the dots
              without names
    most      the most points that are all named, on a wide page and on a phone
    stretch   whether levels below all points are on the scale
    limit     (cost, its name) of a budget; budget: whether a script draws one
    field     the cost by which a script finds the points; '' for none
    """

    points: tuple[ScatterPoint, ...]
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
    def scores(self) -> list[float]:
        """List the scores of all points."""
        return [score for _, score in self.crowd] + [
            point.score for point in self.points
        ]

    @cached_property
    def lowest(self) -> float:
        """The lowest score that is on the scale."""
        return least_on_scale(self.scores)

    def crowded(self, *, narrow: bool) -> bool:
        """Return whether there are too many points to name them all, or to draw how far
        each reaches."""
        return sum(bool(point.name) for point in self.points) > self.most[narrow]

    def draw(self, key: str, width: float) -> Markup:
        """Draw the picture at a width; there is at least one point."""
        plot = Plot(*self._axes(width), self.axes)
        axis = plot.x
        box = plot.box
        crowded = self.crowded(narrow=width < NARROW)
        pixels = [
            (axis.at(point.cost), min(plot.y.at(point.score), box.bottom - 9))
            for point in self.points
        ]
        # none in a crowd, and none to the left
        reaches = [
            axis.at(
                point.cost if crowded else min(max(point.cost, point.reach), axis.high)
            )
            for point in self.points
        ]
        if self.field:  # its scales tell the script where points are
            scales = {
                name: f"{a.low} {a.high} {a.start} {a.end} {int(a.log)}"
                for name, a in (("x", axis), ("y", plot.y))
            }
            plot.marks.insert(
                0, group(draw_box(box, "field"), cost=self.field, **scales)
            )
        plot.dots(self.crowd, "crowd")
        for point in self.points:
            if point.before is not None:
                start = plot.at(point.cost, point.before)
                plot.line(start, plot.at(point.cost, point.score), "gain")
        # stairs: from the cheapest level to the next, up to it, and level to the end
        steps: list[Pixel] = []
        for across, down in sorted(plot.at(*one) for one in self.front):
            if steps:
                steps.append((across, steps[-1][1]))
            steps.append((across, down))
        if steps:
            steps.append((box.right, steps[-1][1]))
        taken = [Box(x - 9, y - 9, x + 9, y + 9) for x, y in pixels]
        taken += [
            Box(x, y - 3, reach + 3, y + 3)
            for (x, y), reach in zip(pixels, reaches, strict=True)
        ]
        for (left, bottom), (right, top) in pairwise(steps):  # level or upright
            taken.append(Box(left, top - 2, right + 2, bottom + 2))
        for name, score in self.levels:
            _draw_level(name, score, plot, taken)
        plot.marks += [draw_path(steps, "edge")] if steps else []
        if self.budget:
            plot.upright(box.right, "budget")
        if self.limit and axis.low < self.limit[0] <= axis.high:
            edge = axis.at(self.limit[0])
            words = f"budget {self.limit[1]}"
            wide = text_width(words, 12)
            left = edge + 6 if edge + 6 + wide <= box.right else edge - 6 - wide
            taken.append(Box(left, box.bottom - 22, left + wide, box.bottom - 4))
            plot.upright(edge, "limit")
            plot.text(left, box.bottom - 8, words, "facts")
        plot.marks += self._draw_names(pixels, taken, box, crowded=crowded)
        for point, at, reach in zip(self.points, pixels, reaches, strict=True):
            mark = draw_dot(at, f"point {point.style}", point.hint, square=point.square)
            if reach > at[0]:
                mark = draw_line(at, (reach, at[1]), f"reach {point.style}") + mark
            plot.marks.append(point.group(mark, at[0]))
        description = "; ".join(point.hint for point in self.points)
        title = f"{self.axes[1]} against {self.axes[0]}"
        return plot.picture(
            key,
            title,
            f"{description}. Up is better, left costs less.",
        )

    def _axes(self, width: float) -> tuple[Axis, Axis]:
        """Make the axes: room for the costs (a reach counts up to twice the cost), the
        scores on the scale, and levels near them."""
        costs = [cost for cost, _ in self.crowd] + [point.cost for point in self.points]
        farthest = max(
            [*costs, *(min(point.reach, 2 * point.cost) for point in self.points)]
        )
        if self.limit:
            farthest = max(farthest, min(self.limit[0], 2 * max(costs)))
        x = Axis(0, farthest * 1.08, LEFT, width - RIGHT)
        if max(costs) > (LOG_FROM if len(costs) > WITH_FACTS else LOG_FEW) * min(costs):
            x = Axis(min(costs) / 1.6, farthest * 1.3, LEFT, width - RIGHT, log=True)
        low = self.lowest
        high = max(self.scores)
        span = max(high - low, 0.01)
        for _, level in sorted(self.levels, key=lambda one: -one[1]):
            if (self.stretch or level >= low) and max(high, level) - min(
                low, level
            ) <= 10 * span:
                low = min(low, level)
                high = max(high, level)
        return x, Axis.padded(low, high, BOTTOM, TOP)

    def _draw_names(
        self,
        pixels: Sequence[Pixel],
        taken: Sequence[Box],
        plot: Box,
        *,
        crowded: bool,
    ) -> list[Markup]:
        """Write each point's name and figures, with leaders, which lie under all names,
        where it is not next to it."""
        leaders = []
        labels = []
        full = list(taken)
        order = sorted(
            zip(self.points, pixels, strict=True),
            key=lambda one: "front" not in one[0].style,
        )
        for point, (x, y) in order:
            name = point.name if point.keep or not crowded else point.short
            if not name:
                continue
            name = shorten(
                f"{'↓' if point.score < self.lowest else ''}{name}", NAME_LETTERS
            )
            figures = point.facts if len(self.points) <= WITH_FACTS else ""
            size = (
                max(text_width(name, 13), text_width(figures, 12)),
                31.0 if figures else 16.0,
            )
            box = _place((x, y), size, full, plot)
            full.append(Box(box.left - 8, box.top - 3, box.right + 8, box.bottom + 3))
            anchor, start = ("start", box.left) if box.left > x else ("end", box.right)
            if box.left <= x <= box.right:
                anchor = "middle"
                start = (box.left + box.right) / 2
            words = draw_text(start, box.top + 12, name, "label", anchor)
            if figures:
                words += draw_text(start, box.top + 27, figures, "facts", anchor)
            labels.append(point.group(words, x))
            near = min(max(x, box.left), box.right), min(max(y, box.top), box.bottom)
            if abs(near[0] - x) + abs(near[1] - y) > 24:
                leaders.append(draw_line((x, y), near, "leader"))
        return [*leaders, *labels]


def _place(point: Pixel, size: Pixel, taken: Sequence[Box], inside: Box) -> Box:
    """Place a label of `size` as near to a point as possible, inside the picture and on
    free space."""
    wide, high = size
    x, y = point
    options = []
    for gap in (11.0, 20.0, 34.0, 52.0, 74.0, 100.0, 130.0):
        for across, down in (
            (1, 0),
            (-1, 0),
            (0, -1),
            (0, 1),
            (1, -1),
            (-1, -1),
            (1, 1),
            (-1, 1),
        ):
            left = x - wide / 2 + across * (gap + wide / 2)
            reach = gap if across == 0 else gap * 0.8
            top = y - high / 2 + down * (reach + high / 2)
            # One pixel of distance counts like two hidden square pixels: taken boxes
            # have a margin that a label may touch.
            options.append((2 * gap, Box(left, top, left + wide, top + high)))
    return min(options, key=lambda option: option[0] + option[1].lost(taken, inside))[1]


def _draw_level(name: str, score: float, plot: Plot, taken: list[Box]) -> None:
    """Draw a level: a line with its name, or an arrow if it is off the scale; its room
    is added to `taken`."""
    words = f"{shorten(name, NAME_LETTERS)} {units.score(score)}"
    y = plot.y
    box = plot.box
    inside = y.low <= score <= y.high
    at = y.at(score)
    if not inside:
        words = f"{'↓' if score < y.low else '↑'} {words}, off this scale"
    wide = text_width(words, 12)
    feet = (
        [at - 4, at + 18] if inside else [box.bottom - 4 - 17 * row for row in range(4)]
    )
    lefts = [box.left + 6, box.right - wide - 6]
    options = [
        Box(left, foot - 15, left + wide, foot) for left in lefts for foot in feet
    ]
    room = min(options, key=lambda option: option.lost(taken, box))
    taken.append(room)
    if inside:
        taken.append(Box(box.left, at - 2, box.right, at + 2))
        plot.level(at, "reference")
    anchor, start = (
        ("start", room.left) if room.left == lefts[0] else ("end", room.right)
    )
    plot.text(start, room.bottom - 4, words, "facts", anchor)


def run_scatter(report: Report) -> Scatter | None:
    """Prepare score against median latency: a point per row that has both, a level per
    baseline without a time."""
    points = []
    levels = []
    for row in report.rows:
        time = report.latency(row)
        score = report.score(row)
        if score is None:
            continue
        if time is None:
            if row.role == "baseline":
                levels.append((row.name, score))
            continue
        points.append(
            ScatterPoint(
                row.name,
                time.p50_ms,
                score,
                row.role,
                row.name,
                units.measure(time.p50_ms, "ms"),
                keep=True,
                reach=time.p95_ms,
            )
        )
    axes = "median latency, ms", units.metric(report.metric)
    return (
        Scatter(tuple(points), axes, levels, most=(99, 99), stretch=True)
        if points
        else None
    )


def choice_scatter(
    comparison: Comparison,
    view: View | None,
    picked: ComparedModel | None,
) -> Scatter | None:
    """Prepare score against the median at `view`, or the file size if it is None;
    return None if no candidate has both."""

    def cost(one: ComparedModel) -> float | None:
        return one.median_ms(view) if view else one.size_mb

    front = comparison.front(cost)
    unit, axis = ("ms", "median latency, ms") if view else ("MB", "file size, MB")
    points = []
    # candidates are drawn over teachers
    for one in (*comparison.teachers, *comparison.candidates):
        value = cost(one)
        score = comparison.score(one)
        time = one.latency(view)
        if value is None or value <= 0 or score is None:
            continue
        teacher = one.role == "teacher"
        first = one in front
        style = "student front" if first else "student behind"
        if teacher:
            style = "teacher"
        number = "" if teacher else str(comparison.number(one))
        noisy = "~" if time and time.noisy else ""
        points.append(
            ScatterPoint(
                one.name,
                value,
                score,
                f"{style} picked" if one is picked else style,
                one.name,
                noisy + units.measure(value, unit),
                short=number,
                keep=first or teacher,
                reach=time.p95_ms if time else 0.0,
                number=number,
            )
        )
    if all(point.square for point in points):
        return None
    return Scatter(
        tuple(points),
        (axis, units.metric(comparison.task.metric)),
        comparison.baselines,
        [(cost(one) or 0.0, comparison.score(one) or 0.0) for one in front],
        budget=True,
    )


def trial_scatter(report: SearchReport, cost: ObjectiveName) -> Scatter | None:
    """Prepare the trials' scores against one cost: trained ones, the front, the teacher
    and the anchors with their names.

    All other scored trials are the crowd. Returns None if no trial has both.
    """
    best = answer(report)
    first = report.compute_front(("score", cost))
    points = []
    crowd = []
    levels = list[tuple[str, float]]()
    for one in report.points:
        value = report.value(one, cost)
        if value is None or value <= 0 or one.score is None:
            continue
        picked = best is one
        ahead = one.number in first
        subnet = one.stage == "subnet"
        if subnet and not ahead:
            crowd.append((value, one.score))
            if not picked:
                continue
        style = (
            f"{'front' if ahead else 'behind'} "
            f"{'subnet' if subnet else 'student'}{' picked' if picked else ''}"
        )
        points.append(
            ScatterPoint(
                short_shape(one.choice) if ahead or picked else "",
                value,
                one.score,
                style,
                f"trial {one.number}, {shape(one.choice)}",
                cost_text(cost, value),
                keep=picked,
                before=None if subnet or one.first == one.score else one.first,
            )
        )
    if not points and not crowd:
        return None
    points.sort(key=lambda point: not point.keep)
    for index, known in enumerate(list_anchors(report)):
        value = finite(
            {
                "latency": known.ms,
                "parameters": known.parameters,
                "file_mb": known.file_mb,
            }.get(cost)
        )
        name, style = (known.name, "anchor") if index else ("teacher", "teacher")
        if (score := finite(known.score)) is not None and value:
            points.append(
                ScatterPoint(
                    name,
                    value,
                    score,
                    style,
                    name,
                    cost_text(cost, value),
                    keep=True,
                )
            )
        elif score is not None:
            levels.append((name, score))
    limit = report.budgets.get(cost)
    name, unit = COST_NAMES[cost]
    placed = [
        (report.value(each, cost) or 0.0, each.score or 0.0)
        for each in map(report.point, first)
    ]
    return Scatter(
        tuple(points),
        (f"{name}, {unit}" if unit else name, units.metric(report.metric)),
        levels,
        placed,
        crowd,
        most=(12, 5),
        limit=(limit, cost_text(cost, limit)) if limit else None,
        field=cost,
    )
