"""The pictures of a search: score against a cost with its front, predicted against measured, trials over time.

Many points are one path of dots, so that thousands stay a small file; a script finds each by the scale on the picture.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from markupsafe import Markup

from compress.records.run_report import finite
from compress.records.search_report import Objective, SearchReport, TrialRecord
from compress.reporting import charts
from compress.reporting import format as units
from compress.reporting import search_remarks as words
from compress.reporting.charts import Axis, Box, Spot, grid, padded, titles

HEIGHT = 460
NARROW = 500
MOST_NAMED = {"wide": 12, "narrow": 5}
LOG_FROM = 4
MANY = 1000

Pixels = list[tuple[float, float]]


@dataclass(frozen=True)
class Against:
    """Score against one cost."""

    found: SearchReport
    cost: Objective

    @property
    def axis(self) -> str:
        name, unit = words.OBJECTIVES[self.cost]
        return f"{name}, {unit}" if unit else name

    def at(self, point: TrialRecord) -> tuple[float, float] | None:
        """(cost, score) of a point that has both."""
        cost, score = self.found.value(point, self.cost), point.score
        return (cost, score) if cost is not None and cost > 0 and score is not None else None

    @cached_property
    def placed(self) -> list[tuple[TrialRecord, tuple[float, float]]]:
        return [(point, at) for point in self.found.points if (at := self.at(point))]

    @cached_property
    def front(self) -> tuple[int, ...]:
        return self.found.compute_front(("score", self.cost))

    def marks(self) -> list[tuple[str, str, float, float | None]]:
        """(name, style, score, cost) of the teacher and the anchors that have a score."""
        known = []
        for index, one in enumerate(words.known(self.found)):
            costs = {"latency": one.ms, "parameters": one.parameters, "file_mb": one.file_mb}
            if (score := finite(one.score)) is not None:
                name, style = (one.name, "anchor") if index else ("teacher", "teacher")
                known.append((name, style, score, finite(costs.get(self.cost))))
        return known

    def lowest(self) -> float:
        """The least score that is on the scale."""
        return charts.lowest([score for _, (_, score) in self.placed])

    def below(self) -> int:
        """How many points are below the scale."""
        lowest = self.lowest()
        return sum(score < lowest for _, (_, score) in self.placed)


def pareto(against: Against, key: str, width: float) -> Markup:
    """A dot per scored trial; the front as stairs and points; the teacher, the anchors and the budget beside them.

    At least one trial has both a score and the cost.
    """
    plot = Box(52, 34, width - 14, HEIGHT - 48)
    placed, front, beside = against.placed, set(against.front), against.marks()
    costs = [cost for _, (cost, _) in placed] + [cost for *_, cost in beside if cost]
    limit = against.found.budgets.get(against.cost)
    x = charts.cost_axis(costs, [*costs[:-1], max(costs[-1], min(limit or 0, 2 * costs[-1]))], plot, log_from=LOG_FROM)
    lowest = against.lowest()
    levels = [score for _, _, score, _ in beside if score >= lowest]
    y = charts.score_axis([score for _, (_, score) in placed if score >= lowest], levels, plot)
    place = {point.number: (x.at(cost), min(y.at(score), plot.bottom)) for point, (cost, score) in placed}
    marks = [_field(x, y, plot, against.cost), *grid(x, y, plot)]
    marks += titles(plot, against.axis, units.metric(against.found.metric))
    crowd = [point.number for point, _ in placed if point.number not in front and point.stage == "subnet"]
    marks.append(dots([place[number] for number in crowd], "crowd"))
    marks += _gains(against, x, y, plot)
    steps = charts.stairs([place[number] for number in front], plot) if front else []
    spots = _spots(against, x, y, front)
    taken = [*(box for spot in spots for box in spot.boxes), *(charts.room(*pair) for pair in pairwise(steps))]
    for name, _, score, cost in beside:
        if cost is None:
            room, drawn = charts.level(name, score, y, plot, taken)
            taken, marks = [*taken, *room], [*marks, *drawn]
    if steps:
        marks.append(charts.path(steps, "edge"))
    if limit and x.low < limit <= x.high:
        box, drawn = _limit(x.at(limit), words.cost(against.cost, limit), plot)
        taken, marks = [*taken, box], [*marks, *drawn]
    marks += charts.names(spots, taken, plot)
    marks += [spot.drawn() for spot in spots]
    told = "; ".join(spot.hint for spot in spots)
    title = f"{units.metric(against.found.metric)} against {against.axis}"
    return charts.canvas(key, (width, HEIGHT), (title, f"{told}. Up is better, left costs less."), marks)


def timings(found: SearchReport, key: str, width: float) -> Markup:
    """Predicted against measured latency of every shape that was measured, and what FLOPs alone would have said."""
    assert found.prediction is not None
    shown = found.prediction.timings
    values = [one.measured_ms for one in shown] + [one.predicted_ms for one in shown]
    values += [one.flops_ms for one in shown if one.flops_ms is not None]
    plot = Box(52, 34, width - 14, 372)
    margin = 0.06 * (max(values) - min(values)) or 0.1 * max(values)
    low, high = max(0.0, min(values) - margin), max(values) + margin
    x, y = Axis(low, high, plot.left, plot.right), Axis(low, high, plot.bottom, plot.top)
    marks = [*grid(x, y, plot), *titles(plot, "measured, ms", "predicted, ms")]
    marks.append(charts.draw_line((x.at(low), y.at(low)), (x.at(high), y.at(high)), "reference"))
    for one in shown:
        if one.error_ms:
            ends = [min(max(one.predicted_ms + sign * one.error_ms, low), high) for sign in (-1, 1)]
            marks.append(
                charts.draw_line((x.at(one.measured_ms), y.at(ends[0])), (x.at(one.measured_ms), y.at(ends[1])), "gain")
            )
    flops = [(x.at(one.measured_ms), y.at(one.flops_ms)) for one in shown if one.flops_ms is not None]
    marks += [charts.dot(*at, style="point flops", hint="from FLOPs alone") for at in flops]
    for one in shown:
        hint = f"{one.name}: predicted {units.measure(one.predicted_ms, 'ms')}, measured "
        hint += f"{units.measure(one.measured_ms, 'ms')}{', noisy' if one.noisy else ''}"
        style = "point student" if one.finalist else "point fitted"
        marks.append(charts.dot(x.at(one.measured_ms), y.at(one.predicted_ms), style=style, hint=hint))
    told = f"{len(shown)} shapes; the line is where both are equal"
    return charts.canvas(key, (width, 420), ("Predicted against measured latency", told), marks)


def progress(found: SearchReport, key: str, width: float) -> Markup:
    """Every trial's score when it was asked for, the best within the budgets so far, and what was rejected below.

    At least one trial has a score.
    """
    timed = all(point.started is not None for point in found.points)
    placed = [(_when(point, timed=timed), point) for point in found.points]
    scored = [(when, first, point) for when, point in placed if (first := point.first) is not None]
    plot = Box(52, 34, width - 14, 290)
    x = Axis(0, max(*(when for when, _ in placed), 1e-3), plot.left, plot.right)
    lowest = charts.lowest([score for _, score, _ in scored])
    y = padded(lowest, max(score for _, score, _ in scored), plot)
    marks = [*grid(x, y, plot), *titles(plot, "minute" if timed else "trial", units.metric(found.metric))]
    marks.append(dots([(x.at(when), min(y.at(score), plot.bottom)) for when, score, _ in scored], "crowd"))
    marks.append(dots([(x.at(when), plot.bottom - 5) for when, one in placed if one.first is None], "crowd out"))
    best: Pixels = []
    for when, score, point in sorted(scored, key=lambda one: one[:2]):
        at = x.at(when), y.at(score)
        if found.feasible(point) and (not best or at[1] < best[-1][1]):
            best += [(at[0], best[-1][1]), at] if best else [at]
    if best:
        marks.append(charts.path([*best, (plot.right, best[-1][1])], "curve s0"))
    told = f"{len(scored)} of {len(placed)} trials were scored"
    return charts.canvas(key, (width, 334), ("Trials over time", told), marks)


def dots(places: Iterable[tuple[float, float]], style: str) -> Markup:
    """Dots as one path; those at the same place are one. Many are placed to the pixel."""
    known = list(places)
    digits = 0 if len(known) > MANY else 1
    different = dict.fromkeys((round(x, digits), round(y, digits)) for x, y in known)
    drawn = "".join(f"M{x:g},{y:g}h0" for x, y in different)
    return Markup('<path d="{}" class="{}"/>').format(drawn, style) if drawn else Markup("")


def _when(point: TrialRecord, *, timed: bool) -> float:
    return (point.started or 0.0) / 60 if timed else float(point.number)


def _field(x: Axis, y: Axis, plot: Box, cost: Objective) -> Markup:
    """What is sensitive to a pointer, with the scale by which a script places the trials."""
    scales = {
        name: f"{axis.low} {axis.high} {axis.start} {axis.end} {int(axis.log)}" for name, axis in (("x", x), ("y", y))
    }
    return charts.tagged({"cost": cost, **scales}, charts.bar(plot, "field"))


def _gains(against: Against, x: Axis, y: Axis, plot: Box) -> list[Markup]:
    """From what a trained shape scored before to what it scores now."""
    marks = []
    for point, (cost, score) in against.placed:
        before = point.first
        if point.stage != "subnet" and before is not None and before != score:
            ends = [min(y.at(value), plot.bottom) for value in (before, score)]
            marks.append(charts.draw_line((x.at(cost), ends[0]), (x.at(cost), ends[1]), "gain"))
    return marks


def _spots(against: Against, x: Axis, y: Axis, front: set[int]) -> list[Spot]:
    """What stands out: the answer (named first), the front, trained shapes, the teacher and the anchors."""
    chosen = words.answer(against.found)
    shown = [
        (point, at)
        for point, at in against.placed
        if point.number in front or point.stage != "subnet" or (chosen and point.number == chosen.number)
    ]
    beside = [(name, style, score, cost) for name, style, score, cost in against.marks() if cost]
    room = MOST_NAMED["narrow" if x.end < NARROW else "wide"]
    found = []
    for point, (cost, score) in sorted(shown, key=lambda one: one[0] is not chosen):
        picked = chosen is not None and point.number == chosen.number
        style = "front" if point.number in front else "behind"
        style += " subnet" if point.stage == "subnet" else " student"
        named = picked or (point.number in front and len(front) + len(beside) <= room)
        hint = (
            f"trial {point.number}, {words.shape(point.choice)}: {units.score(score)}, {words.cost(against.cost, cost)}"
        )
        name = words.short(point.choice) if named else ""
        found.append(_spot(x.at(cost), min(y.at(score), y.start - 9), name, hint, style + " picked" * picked))
    for name, style, score, cost in beside:
        assert cost is not None
        hint = f"{name}: {units.score(score)}, {words.cost(against.cost, cost)}"
        found.append(_spot(x.at(cost), min(y.at(score), y.start - 9), name, hint, style, square=True))
    return found


def _spot(x: float, y: float, name: str, hint: str, style: str, *, square: bool = False) -> Spot:
    return Spot(name=name, facts="", hint=hint, x=x, y=y, reach=x, style=style, square=square)


def _limit(at: float, said: str, plot: Box) -> tuple[Box, list[Markup]]:
    """The budget: a line from top to bottom, and its name at the foot."""
    wide = charts.text_width(f"budget {said}", 12)
    left = at + 6 if at + 6 + wide <= plot.right else at - 6 - wide
    line = charts.draw_line((at, plot.top), (at, plot.bottom), "limit")
    name = charts.draw_text(left, plot.bottom - 8, f"budget {said}", "facts")
    return Box(left, plot.bottom - 22, left + wide, plot.bottom - 4), [line, name]
