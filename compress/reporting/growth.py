"""How small can it go, and what would more data buy: laws fitted to a search's scores, in words and in pictures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from markupsafe import Markup

from compress.records.search_report import Rung, SearchReport
from compress.reporting import charts, search_remarks
from compress.reporting import format as units
from compress.reporting.cells import Small
from compress.reporting.charts import SIDE, Axis, Box, Figure, draw_figure, grid, padded, titles
from compress.reporting.remarks import capitalised
from compress.reporting.scaling import FAR, Fit, Interval, Law, fit, floor_shown

MOST_POINTS = 400
"""More trials than these tell a curve nothing new: evenly chosen ones are fitted."""
AXES = {
    "size": "parameters without embeddings",
    "data": "examples seen in training",
    "compute": "training compute, FLOPs",
}
STEPS = 48
NEAR = 1.3
"""Points within this factor of a curve's other cause are its own; the rest are drawn faintly."""


Points = list[tuple[Mapping[str, float], float]]
"""(cause -> its value, score)."""


@dataclass(frozen=True)
class Growth:
    """What the page says of it: sentences, pictures, and what could not be told."""

    about: str
    expected: Small | None
    answers: tuple[str, ...]
    figures: tuple[Figure, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Curve:
    """A law seen along one cause, all others held: points are (causes, score)."""

    law: Law
    cause: str
    held: Mapping[str, float]
    points: Points

    def own(self, at: Mapping[str, float]) -> bool:
        """Whether a point is where the curve is, but for its cause."""
        return all(1 / NEAR <= at[name] / value <= NEAR for name, value in self.held.items() if name != self.cause)


def growth(found: SearchReport) -> Growth:
    """The laws of size and data, and of compute, as far as the scores show them."""
    rungs = _rungs(found)
    points: Points = [({"size": float(one.body_parameters), "data": float(one.examples)}, one.score) for one in rungs]
    about = f"Scores while training ({rungs[0].what})." if rungs else ""
    whole = _fit(points, ("size", "data"))
    if whole.law is None or "size" not in whole.law.measured:
        trials = _trials(found)
        alone = _fit(trials, ("size",))
        if alone.law is not None:
            whole, points = Fit(alone.law, (*whole.warnings, *alone.warnings), alone.points), trials
            about = "Scores of the trials before any training on top."
    compute = _fit(frontier := _frontier(rungs), ("compute",))
    reference = _reference(found, points, whole)
    law = whole.law
    curves = [Curve(law, cause, reference, points) for cause in law.measured] if law else []
    if compute.law:
        spent = max(at["compute"] for at, _ in frontier)
        curves.append(Curve(compute.law, "compute", {"compute": spent}, frontier))
    warnings = (*whole.warnings, *(f"Compute: {one}" for one in compute.warnings if rungs))
    answers = (*_answers(law, reference), *_repeated(found, rungs))
    about += f" Here: {_place(reference)}." if law else ""
    figures = tuple(_figure(found, curve) for curve in curves)
    return Growth(about, _expected(found, law, reference), answers, figures, warnings)


def _rungs(found: SearchReport) -> list[Rung]:
    """The scores of the one training that has most of them: those of different ones are not on one curve."""
    known = [
        rung for rung in found.ladder if rung.body_parameters > 0 and rung.examples > 0 and np.isfinite(rung.score)
    ]
    names = [rung.what for rung in known]
    most = max(dict.fromkeys(names), key=names.count, default="")
    return [rung for rung in known if rung.what == most]


def _trials(found: SearchReport) -> Points:
    """Size and first score of the completed trials."""
    known: Points = [
        ({"size": float(point.body_parameters)}, point.first)
        for point in found.points
        if point.state == "complete" and point.body_parameters and point.first is not None
    ]
    return known[:: -(-len(known) // MOST_POINTS)] if known else []


def _frontier(rungs: Sequence[Rung]) -> Points:
    """The rungs that score more than any that spent no more: the best that compute bought."""
    best: Points = []
    for rung in sorted((one for one in rungs if one.flops > 0), key=lambda one: (one.flops, -one.score)):
        if not best or rung.score > best[-1][1]:
            best.append(({"compute": rung.flops}, rung.score))
    return best


def _fit(points: Points, causes: tuple[str, ...]) -> Fit:
    return fit({cause: [at[cause] for at, _ in points] for cause in causes}, [1 - score for _, score in points])


def _reference(found: SearchReport, points: Points, whole: Fit) -> dict[str, float]:
    """From where to look: the answer's size (or the measured one nearest to it), and all the data there were."""
    if whole.law is None:
        return {}
    chosen, measured = search_remarks.answer(found), whole.law.measured
    reference = {cause: high for cause, (_, high) in measured.items()}
    if "size" in measured:
        low, high = measured["size"]
        wanted = float(chosen.body_parameters) if chosen and chosen.body_parameters else (low * high) ** 0.5
        sizes = sorted({at["size"] for at, _ in points})
        nearest = min(sizes, key=lambda size: abs(np.log(size / wanted)))
        reference["size"] = wanted if low <= wanted <= high and len(sizes) > 20 else nearest
    return reference


def _expected(found: SearchReport, law: Law | None, reference: Mapping[str, float]) -> Small | None:
    """The score to expect here, of half and twice the size, and of half and twice the data."""
    if law is None:
        return None
    places = [("here", reference)]
    for cause, name in (("size", "the size"), ("data", "the data")):
        if cause in law.measured:
            for factor, times in ((0.5, "half"), (2.0, "twice")):
                places.append((f"{times} {name}", {**reference, cause: reference[cause] * factor}))
    rows = []
    for name, at in places:
        change = units.MISSING if at is reference else _points(law.change(reference, at))
        rows.append((name, (_said(law.error(at)), change, "" if law.within(at, 1.0) else "beyond what was measured")))
    metric = units.metric(found.metric)
    return Small(f"{metric[0].upper()}{metric[1:]} to expect", "Student", (metric, "change, points", ""), tuple(rows))


def _place(at: Mapping[str, float]) -> str:
    """Where `here` is, in words."""
    told = {"size": "parameters without embeddings", "data": "examples seen"}
    return ", ".join(f"{units.magnitude(value)} {told[cause]}" for cause, value in at.items())


def _answers(law: Law | None, reference: Mapping[str, float]) -> list[str]:
    """Where it levels off."""
    if law is None or not floor_shown(law, law.error(reference).value):
        return []
    return [f"With ever more {' and '.join(law.measured)} it levels off at {_said(law.floor())}."]


def _repeated(found: SearchReport, rungs: Sequence[Rung]) -> list[str]:
    """Whether examples were new ones."""
    seen = max((rung.examples for rung in rungs), default=0)
    if not found.train_rows or seen <= found.train_rows:
        return []
    return [
        f"There are {found.train_rows:,} rows to train on, each seen {seen / found.train_rows:.1f} times: more data "
        "here means more passes over them, new rows may be worth more."
    ]


def _said(error: Interval) -> str:
    """A score with its band: `0.872 [0.868, 0.876]`."""
    return f"{units.score(1 - error.value)} [{units.score(1 - error.high)}, {units.score(1 - error.low)}]"


def _points(change: Interval) -> str:
    """A gain in points of a hundred: `+0.4 [0.1, 0.7]`."""
    decimals = 1 if abs(change.value) >= 0.001 else 2
    value, low, high = (
        f"{100 * one:.{decimals}f}".replace("-", "−") for one in (change.value, change.low, change.high)
    )
    return f"{'' if value.startswith('−') else '+'}{value} [{low}, {high}]"


def _beyond(law: Law, at: Mapping[str, float]) -> str:
    return " (not measured so far out)" if not law.within(at, 1.0) else ""


def _figure(found: SearchReport, curve: Curve) -> Figure:
    heading = f"{units.metric(found.metric)} against {curve.cause}"
    slope = curve.law.exponent(curve.cause)
    caption = f"Exponent {slope.value:.2f} [{slope.low:.2f}, {slope.high:.2f}]."
    draw = partial(_picture, found, curve)
    return draw_figure(capitalised(heading), draw, f"growth-{curve.cause}", SIDE, caption=caption)


def _picture(found: SearchReport, curve: Curve, key: str, width: float) -> Markup:
    """The curve in its band, with the points; up to four times as far as they reach, dashed from twice on."""
    plot = Box(52, 34, width - 14, 300)
    low, high = curve.law.measured[curve.cause]
    x = Axis(low / (2 * FAR), high * 2 * FAR, plot.left, plot.right, log=True)
    places = np.geomspace(x.low, x.high, STEPS)
    bands = [curve.law.error({**curve.held, curve.cause: float(place)}) for place in places]
    own = [score for at, score in curve.points if curve.own(at)]
    solid = [index for index, place in enumerate(places) if low / FAR <= place <= high * FAR]
    shown = [1 - bands[index].value for index in solid]
    y = padded(min([*shown, *own]), max([*shown, *own]), plot)
    marks = [*grid(x, y, plot), *titles(plot, AXES[curve.cause], units.metric(found.metric))]

    def up(error: float) -> float:
        return min(max(y.at(1 - error), plot.top - 8), plot.bottom)

    upper = [(x.at(place), up(band.low)) for place, band in zip(places, bands, strict=True)]
    lower = [(x.at(place), up(band.high)) for place, band in zip(places, bands, strict=True)]
    line = [(x.at(place), up(band.value)) for place, band in zip(places, bands, strict=True)]
    first, last = solid[0], solid[-1] + 1
    marks.append(charts.path([*upper[first:last], *reversed(lower[first:last])], "band"))
    for part in (slice(0, first + 1), slice(last - 1, None)):
        marks.append(charts.path([*upper[part], *reversed(lower[part])], "band far"))
        if shown_part := [at for at in line[part] if at[1] < plot.bottom]:
            marks.append(charts.path(shown_part, "curve s0 far"))
    for style, mine in (("crowd", False), ("crowd own", True)):
        at = [(x.at(at[curve.cause]), y.at(score)) for at, score in curve.points if curve.own(at) is mine]
        marks.append(charts.dots([one for one in at if plot.top - 8 <= one[1] <= plot.bottom], style))
    marks.append(charts.path([at for at in line[first:last] if at[1] < plot.bottom], "curve s0"))
    told = f"from {_said(bands[solid[0]])} to {_said(bands[solid[-1]])}"
    return charts.canvas(key, (width, 348), (f"{units.metric(found.metric)} against {curve.cause}", told), marks)
