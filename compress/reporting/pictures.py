"""The scatter charts of the pages: score against latency or another cost, of a run, a choice and a search."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from markupsafe import Markup

from compress.records.run_report import Report, Row, finite
from compress.records.search_report import Objective, SearchReport, TrialRecord
from compress.reporting import charts
from compress.reporting import format as units
from compress.reporting import search_remarks as words
from compress.reporting.candidates import Candidate
from compress.reporting.charts import Axis, Box, Pixel, Spot, grid, padded, titles
from compress.reporting.compare import Choice, View, median_ms, timing

CROWD = 5
"""From so many points on, the names of a run's rows alone find room beside them."""
NARROW = 500
MOST_NAMED = {"wide": 14, "narrow": 5}
"""So many candidates are all named; of more, those that are not on the front are numbered."""
MOST_TRIALS_NAMED = {"wide": 12, "narrow": 5}
WITH_FACTS = 5
LOG_FROM = 4

Drawn = tuple[Sequence[Box], Sequence[Markup]]
"""The room that marks take, and the marks."""


def placeable(report: Report) -> tuple[Row, ...]:
    """Choose the rows that have a score and a latency: the points of `trade_off`."""
    return tuple(row for row in report.rows if report.latency(row) and report.score(row) is not None)


def trade_off(report: Report, key: str, width: float) -> Markup:
    """Draw score against median latency: a point per placeable row, a line per baseline, in words where off it."""
    plot, metric = Box(52, 34, width - 14, 352), units.metric(report.metric)
    shown = [
        (row, latency, score)
        for row in placeable(report)
        if (latency := report.latency(row)) and (score := report.score(row)) is not None
    ]
    x = charts.cost_axis([time["p50_ms"] for _, time, _ in shown], [time["p95_ms"] for _, time, _ in shown], plot)
    levels = [
        (row.name, score, report.latency(row))
        for row in report.of_role("baseline")
        if (score := report.score(row)) is not None
    ]
    y = charts.score_axis([score for *_, score in shown], [score for _, score, _ in levels], plot)
    spots = []
    for row, latency, score in shown:
        facts = f"{units.score(score)} · {units.measure(latency['p50_ms'], 'ms')}"
        slow = units.measure(latency["p95_ms"], "ms")
        spots.append(
            Spot(
                name=row.name,
                facts="" if len(shown) > CROWD else facts,
                hint=f"{row.name}: {metric} {facts}, 95th percentile {slow}",
                x=x.at(latency["p50_ms"]),
                y=y.at(score),
                reach=x.at(min(latency["p95_ms"], x.high)),
                style=row.role,
                square=row.role == "teacher",
            )
        )
    untimed = [(name, score) for name, score, time in levels if time is None]
    axes = "median latency, ms", metric
    return charts.scatter(plot, (x, y), axes, spots, key, levels=untimed, better="left is faster")


@dataclass(frozen=True)
class CandidatePlot:
    """Score against the median at `view` or (None) the size of the file."""

    choice: Choice
    view: View | None
    picked: Candidate | None

    @property
    def unit(self) -> str:
        return "ms" if self.view else "MB"

    @property
    def axis(self) -> str:
        return "median latency, ms" if self.view else "file size, MB"

    def cost(self, one: Candidate) -> float | None:
        return median_ms(one, self.view) if self.view else one.size_mb

    @cached_property
    def front(self) -> list[Candidate]:
        return self.choice.front(self.cost)

    def at(self, one: Candidate) -> Pixel | None:
        """(cost, score) of a candidate that has both."""
        cost, score = self.cost(one), self.choice.score(one)
        return (cost, score) if cost is not None and cost > 0 and score is not None else None

    @cached_property
    def placed(self) -> list[tuple[Candidate, Pixel]]:
        """The points: teachers first, so that candidates lie over them."""
        return [(one, at) for one in (*self.choice.teachers, *self.choice.candidates) if (at := self.at(one))]

    def crowded(self, *, narrow: bool) -> bool:
        """Say whether there are too many points to name them all, or to draw how far each reaches."""
        return len(self.placed) > MOST_NAMED["narrow" if narrow else "wide"]

    @cached_property
    def lowest(self) -> float:
        """The least score that is on the scale."""
        return charts.lowest([score for _, (_, score) in self.placed])

    def slowest(self, one: Candidate, cost: float) -> float:
        """How far a point's line reaches: to the 95th percentile where the cost is a time."""
        found = timing(one, self.view)
        return found.p95_ms if found else cost

    def draw(self, key: str, width: float) -> Markup:
        """Draw a point per candidate with its name or number, teachers and baselines beside them, the front as stairs.

        At least one candidate has both a score and the cost.
        """
        choice, plot = self.choice, Box(52, 34, width - 14, 392)
        reaches = [self.slowest(one, cost) for one, (cost, _) in self.placed]
        x = charts.cost_axis([cost for _, (cost, _) in self.placed], reaches, plot, log_from=LOG_FROM)
        scores = [score for _, (_, score) in self.placed if score >= self.lowest]
        y = charts.score_axis(scores, [score for _, score in choice.baselines if score >= min(scores)], plot)
        front = [(x.at(at[0]), y.at(at[1])) for one in self.front if (at := self.at(one))]
        return charts.scatter(
            plot, (x, y), (self.axis, units.metric(choice.task.metric)),
            self._spots(x, y, narrow=width < NARROW), key,
            levels=choice.baselines, steps=charts.stairs(front, plot),
            over=((), [charts.draw_line((plot.right, plot.top), (plot.right, plot.bottom), "budget")]),
        )  # fmt: skip

    def _spots(self, x: Axis, y: Axis, *, narrow: bool) -> list[Spot]:
        """What is on the front stands out; what is not has its number for a name where there are many."""
        crowded, metric = self.crowded(narrow=narrow), units.metric(self.choice.task.metric)
        spots = []
        for one, (cost, score) in self.placed:
            found = timing(one, self.view)
            facts = f"{units.score(score)} · {'~' if found and found.noisy else ''}{units.measure(cost, self.unit)}"
            at = x.at(cost), min(y.at(score), y.start - 9)
            teacher, first = one.role == "teacher", one in self.front
            number = "" if teacher else str(self.choice.number(one))
            below = "↓" if score < self.lowest else ""
            style = "teacher" if teacher else "student front" if first else "student behind"
            spots.append(
                Spot(
                    name=below + (one.name if first or teacher or not crowded else number),
                    facts=facts if len(self.placed) <= WITH_FACTS else "",
                    hint=f"{one.name}: {metric} {facts}",
                    x=at[0],
                    y=at[1],
                    reach=x.at(min(self.slowest(one, cost), x.high)) if not crowded else at[0],
                    style=f"{style} picked" if one is self.picked else style,
                    square=teacher,
                    data={} if teacher else {"n": number, "x": f"{at[0]:.1f}"},
                )
            )
        return spots


@dataclass(frozen=True)
class TrialPlot:
    """Score against one cost of a search's trials."""

    report: SearchReport
    cost: Objective

    @property
    def axis(self) -> str:
        name, unit = words.OBJECTIVES[self.cost]
        return f"{name}, {unit}" if unit else name

    def at(self, trial: TrialRecord) -> Pixel | None:
        """(cost, score) of a trial that has both."""
        cost, score = self.report.value(trial, self.cost), trial.score
        return (cost, score) if cost is not None and cost > 0 and score is not None else None

    @cached_property
    def placed(self) -> list[tuple[TrialRecord, Pixel]]:
        return [(trial, at) for trial in self.report.points if (at := self.at(trial))]

    @cached_property
    def front(self) -> tuple[int, ...]:
        return self.report.compute_front(("score", self.cost))

    @cached_property
    def beside(self) -> list[tuple[str, str, float, float | None]]:
        """(name, style, score, cost) of the teacher and the anchors that have a score."""
        known = []
        for index, one in enumerate(words.known(self.report)):
            costs = {"latency": one.ms, "parameters": one.parameters, "file_mb": one.file_mb}
            if (score := finite(one.score)) is not None:
                name, style = (one.name, "anchor") if index else ("teacher", "teacher")
                known.append((name, style, score, finite(costs.get(self.cost))))
        return known

    @cached_property
    def lowest(self) -> float:
        """The least score that is on the scale."""
        return charts.lowest([score for _, (_, score) in self.placed])

    def draw(self, key: str, width: float) -> Markup:
        """Draw a dot per scored trial; the front as stairs and points; teacher, anchors and budget beside them.

        At least one trial has both a score and the cost.
        """
        plot = Box(52, 34, width - 14, 412)
        costs = [cost for _, (cost, _) in self.placed] + [cost for *_, cost in self.beside if cost]
        limit = self.report.budgets.get(self.cost)
        reaches = [*costs[:-1], max(costs[-1], min(limit or 0, 2 * costs[-1]))]
        x = charts.cost_axis(costs, reaches, plot, log_from=LOG_FROM)
        levels = [score for _, _, score, _ in self.beside if score >= self.lowest]
        y = charts.score_axis([score for _, (_, score) in self.placed if score >= self.lowest], levels, plot)
        place = {one.number: (x.at(cost), min(y.at(score), plot.bottom)) for one, (cost, score) in self.placed}
        front = set(self.front)
        crowd = [one.number for one, _ in self.placed if one.number not in front and one.stage == "subnet"]
        over: Drawn = ((), ())
        if limit and x.low < limit <= x.high:
            over = _limit(x.at(limit), words.cost(self.cost, limit), plot)
        return charts.scatter(
            plot, (x, y), (self.axis, units.metric(self.report.metric)), self._spots(x, y), key,
            levels=[(name, score) for name, _, score, cost in self.beside if cost is None],
            steps=charts.stairs([place[number] for number in front], plot) if front else [],
            behind=[_field(x, y, plot, self.cost)],
            under=[charts.dots([place[number] for number in crowd], "crowd"), *self._gains(x, y, plot)],
            over=over,
        )  # fmt: skip

    def _gains(self, x: Axis, y: Axis, plot: Box) -> list[Markup]:
        """Draw a line from what a trained shape scored before to what it scores now."""
        marks = []
        for one, (cost, score) in self.placed:
            before = one.first
            if one.stage != "subnet" and before is not None and before != score:
                ends = [min(y.at(value), plot.bottom) for value in (before, score)]
                marks.append(charts.draw_line((x.at(cost), ends[0]), (x.at(cost), ends[1]), "gain"))
        return marks

    def _spots(self, x: Axis, y: Axis) -> list[Spot]:
        """What stands out: the answer (named first), the front, trained shapes, the teacher and the anchors."""
        answer = words.answer(self.report)
        picked = answer.number if answer else None
        shown = [
            (one, at)
            for one, at in self.placed
            if one.number in self.front or one.stage != "subnet" or one.number == picked
        ]
        beside = [(name, style, score, cost) for name, style, score, cost in self.beside if cost]
        room = MOST_TRIALS_NAMED["narrow" if x.end < NARROW else "wide"]
        spots = []

        def add(cost: float, score: float, name: str, what: str, style: str, *, square: bool = False) -> None:
            hint = f"{what}: {units.score(score)}, {words.cost(self.cost, cost)}"
            at = x.at(cost), min(y.at(score), y.start - 9)
            spots.append(Spot(name, "", hint, *at, at[0], style, square))

        for one, (cost, score) in sorted(shown, key=lambda each: each[0].number != picked):
            first = one.number in self.front
            style = ("front" if first else "behind") + (" subnet" if one.stage == "subnet" else " student")
            named = one.number == picked or (first and len(self.front) + len(beside) <= room)
            what = f"trial {one.number}, {words.shape(one.choice)}"
            add(cost, score, words.short(one.choice) if named else "", what, style + " picked" * (one.number == picked))
        for name, style, score, known in beside:
            add(known or 0.0, score, name, name, style, square=True)
        return spots


def _field(x: Axis, y: Axis, plot: Box, cost: Objective) -> Markup:
    """Draw what is sensitive to a pointer, with the scale by which a script places the trials."""
    scales = {name: f"{one.low} {one.high} {one.start} {one.end} {int(one.log)}" for name, one in (("x", x), ("y", y))}
    return charts.tagged({"cost": cost, **scales}, charts.bar(plot, "field"))


def _limit(at: float, limit: str, plot: Box) -> Drawn:
    """Draw the budget: a line from top to bottom, and its name at the foot."""
    wide = charts.text_width(f"budget {limit}", 12)
    left = at + 6 if at + 6 + wide <= plot.right else at - 6 - wide
    line = charts.draw_line((at, plot.top), (at, plot.bottom), "limit")
    name = charts.draw_text(left, plot.bottom - 8, f"budget {limit}", "facts")
    return [Box(left, plot.bottom - 22, left + wide, plot.bottom - 4)], [line, name]


def predictions(report: SearchReport, key: str, width: float) -> Markup:
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
    marks = [*grid(x, y, plot), *titles(plot, "measured, ms", "predicted, ms")]
    marks.append(charts.draw_line((x.at(low), y.at(low)), (x.at(high), y.at(high)), "reference"))
    for one in shown:
        if one.error_ms:
            ends = [y.at(min(max(one.predicted_ms + sign * one.error_ms, low), high)) for sign in (-1, 1)]
            marks.append(charts.draw_line((x.at(one.measured_ms), ends[0]), (x.at(one.measured_ms), ends[1]), "gain"))
    flops = [(x.at(one.measured_ms), y.at(one.flops_ms)) for one in shown if one.flops_ms is not None]
    marks += [charts.dot(*at, style="point flops", hint="from FLOPs alone") for at in flops]
    for one in shown:
        hint = f"{one.name}: predicted {units.measure(one.predicted_ms, 'ms')}, measured "
        hint += f"{units.measure(one.measured_ms, 'ms')}{', noisy' if one.noisy else ''}"
        style = "point student" if one.finalist else "point fitted"
        marks.append(charts.dot(x.at(one.measured_ms), y.at(one.predicted_ms), style=style, hint=hint))
    told = f"{len(shown)} shapes; the line is where both are equal"
    return charts.canvas(key, (width, 420), ("Predicted against measured latency", told), marks)


def trials_over_time(report: SearchReport, key: str, width: float) -> Markup:
    """Draw every trial's first score when it was asked for, the best within the budgets so far, and what has none.

    At least one trial has a score.
    """
    timed = all(one.started is not None for one in report.points)
    placed = [((one.started or 0.0) / 60 if timed else float(one.number), one) for one in report.points]
    scored = [(when, first, one) for when, one in placed if (first := one.first) is not None]
    plot = Box(52, 34, width - 14, 290)
    x = Axis(0, max(*(when for when, _ in placed), 1e-3), plot.left, plot.right)
    y = padded(charts.lowest([score for _, score, _ in scored]), max(score for _, score, _ in scored), plot)
    marks = [*grid(x, y, plot), *titles(plot, "minute" if timed else "trial", units.metric(report.metric))]
    marks.append(charts.dots([(x.at(when), min(y.at(score), plot.bottom)) for when, score, _ in scored], "crowd"))
    marks.append(charts.dots([(x.at(when), plot.bottom - 5) for when, one in placed if one.first is None], "crowd out"))
    best: list[Pixel] = []
    for when, score, one in sorted(scored, key=lambda each: each[:2]):
        at = x.at(when), y.at(score)
        if report.feasible(one) and (not best or at[1] < best[-1][1]):
            best += [(at[0], best[-1][1]), at] if best else [at]
    if best:
        marks.append(charts.path([*best, (plot.right, best[-1][1])], "curve s0"))
    told = f"{len(scored)} of {len(placed)} trials were scored"
    return charts.canvas(key, (width, 334), ("Trials over time", told), marks)
