"""The pictures of a choice: score against a cost with its front, and a device under sustained load."""

from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from compress.reporting import charts, training_charts
from compress.reporting import format as units
from compress.reporting.candidates import Candidate
from compress.reporting.charts import Axis, Box, Spot, grid, padded, titles
from compress.reporting.compare import Choice, View, median_ms, timing

HEIGHT = 440
NARROW = 500
MOST_NAMED = {"wide": 14, "narrow": 5}
"""So many points are all named; of more, those that are not on the front are numbered."""
WITH_FACTS = 5
LOG_FROM = 4


@dataclass(frozen=True)
class Against:
    """A picture's two axes: the score, and the median at `view` or (None) the size of the file."""

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

    def front(self) -> list[Candidate]:
        return self.choice.front(self.cost)

    def placed(self, one: Candidate) -> tuple[float, float] | None:
        """(cost, score) of a candidate that has both."""
        cost, score = self.cost(one), self.choice.score(one)
        return (cost, score) if cost is not None and cost > 0 and score is not None else None

    def shown(self) -> list[Candidate]:
        """The points: teachers first, so that candidates lie over them."""
        return [one for one in (*self.choice.teachers, *self.choice.candidates) if self.placed(one)]

    def crowded(self, *, narrow: bool) -> bool:
        """Whether there are too many points to name them all, or to draw how far each reaches."""
        return len(self.shown()) > MOST_NAMED["narrow" if narrow else "wide"]

    def lowest(self) -> float:
        """The least score that is on the scale."""
        return charts.lowest([at[1] for one in self.shown() if (at := self.placed(one))])

    def off(self) -> list[Candidate]:
        """The points that are below the scale."""
        return [one for one in self.shown() if (at := self.placed(one)) and at[1] < self.lowest()]

    def slowest(self, one: Candidate) -> float:
        """How far a point's line reaches: to the 95th percentile where the cost is a time."""
        found, placed = timing(one, self.view), self.placed(one)
        assert placed is not None
        return found.p95_ms if found else placed[0]

    def facts(self, one: Candidate) -> str:
        found, placed = timing(one, self.view), self.placed(one)
        assert placed is not None
        noisy = "~" if found and found.noisy else ""
        return f"{units.score(placed[1])} · {noisy}{units.measure(placed[0], self.unit)}"


def pareto(against: Against, key: str, width: float) -> Markup:
    """A point per candidate with its name or number, teachers and baselines beside them, and the front as stairs.

    At least one candidate has both a score and the cost.
    """
    choice, plot = against.choice, Box(52, 34, width - 14, HEIGHT - 48)
    placed = [at for one in against.shown() if (at := against.placed(one))]
    reaches = [against.slowest(one) for one in against.shown()]
    x = charts.cost_axis([cost for cost, _ in placed], reaches, plot, log_from=LOG_FROM)
    scores = [score for _, score in placed if score >= against.lowest()]
    y = charts.score_axis(scores, [score for _, score in choice.baselines if score >= min(scores)], plot)
    spots = _spots(against, x, y, narrow=width < NARROW)
    marks = [*grid(x, y, plot), *titles(plot, against.axis, units.metric(choice.task.metric))]
    stairs = charts.stairs([(x.at(at[0]), y.at(at[1])) for one in against.front() if (at := against.placed(one))], plot)
    taken = [*(box for spot in spots for box in spot.boxes), *(charts.room(*pair) for pair in pairwise(stairs))]
    for name, score in choice.baselines:
        room, drawn = charts.level(name, score, y, plot, taken)
        taken, marks = [*taken, *room], [*marks, *drawn]
    marks.append(charts.path(stairs, "edge"))
    marks.append(charts.draw_line((plot.right, plot.top), (plot.right, plot.bottom), "budget"))
    marks += charts.names(sorted(spots, key=lambda spot: "front" not in spot.style), taken, plot)
    marks += [spot.drawn() for spot in spots]
    title = f"{units.metric(choice.task.metric)} against {against.axis}"
    told = "; ".join(spot.hint for spot in spots)
    return charts.canvas(key, (width, HEIGHT), (title, f"{told}. Up is better, left costs less."), marks)


def sustained(lines: dict[str, training_charts.Line], key: str, width: float, words: tuple[str, str]) -> Markup:
    """A value over the minutes of each candidate; `words`: what it is, and its unit."""
    values = [value for line in lines.values() for _, value in line]
    minutes = [minute for line in lines.values() for minute, _ in line]
    plot = Box(52, 34, width - 14, 266)
    x = Axis(0, max(*minutes, 1.0), plot.left, plot.right)
    y = padded(min(values), max(values), plot)
    if words[1] == "ms":
        y = Axis(0, max(values) * 1.06, plot.bottom, plot.top)
    marks = [*grid(x, y, plot), *titles(plot, "minute", words[1]), *training_charts.knotted(lines, x, y)]
    ends = ", ".join(
        f"{name} from {units.three_digits(line[0][1])} to {units.three_digits(line[-1][1])}"
        for name, line in lines.items()
    )
    return charts.canvas(key, (width, 310), (words[0], ends), marks)


def _spots(against: Against, x: Axis, y: Axis, *, narrow: bool) -> list[Spot]:
    """The points: what is on the front stands out; what is not has its number for a name where there are many."""
    shown, front = against.shown(), against.front()
    crowded = against.crowded(narrow=narrow)
    found = []
    for one in shown:
        placed, facts = against.placed(one), against.facts(one)
        assert placed is not None
        at = x.at(placed[0]), min(y.at(placed[1]), y.start - 9)
        teacher, first = one.role == "teacher", one in front
        number = "" if teacher else str(against.choice.number(one))
        below = "↓" if placed[1] < against.lowest() else ""
        style = "teacher" if teacher else "student front" if first else "student behind"
        found.append(
            Spot(
                name=below + (one.name if first or teacher or not crowded else number),
                facts=facts if len(shown) <= WITH_FACTS else "",
                hint=f"{one.name}: {units.metric(against.choice.task.metric)} {facts}",
                x=at[0],
                y=at[1],
                reach=x.at(min(against.slowest(one), x.high)) if not crowded else at[0],
                style=f"{style} picked" if one is against.picked else style,
                square=teacher,
                data={} if teacher else {"n": number, "x": f"{at[0]:.1f}"},
            )
        )
    return found
