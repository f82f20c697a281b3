"""error(x) = E + sum over causes of (x_i / c_i)^-alpha_i A_i: a saturating power law,
fitted with confidence bands.

Kaplan et al. 2020, arXiv:2001.08361, Eq. 1.5: loss falls as a power of parameters and
of data. Hoffmann et al. 2022, arXiv:2203.15556, Eq. 2: the same with a floor E that
neither lowers; Eq. 3: fitted in log space under Huber's loss.

**Deviations**: error is 1 - score here, since scores are what is measured. Huber's
threshold is 1.345 of the residuals' robust deviation, not 10^-3, which would count all
points of an evaluation on few rows as outliers. The minimum is found by
Levenberg-Marquardt from a grid of starts, all at once, not by L-BFGS.

Shapes: B fits side by side, N points, C causes, P = 1 + 2C parameters: log E, then log
A_i and alpha_i of each cause. c_i is the geometric mean of what was measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
from markupsafe import Markup

from compress.arrays import Doubles
from compress.records.search_report import Rung, SearchReport
from compress.reporting import format as units
from compress.reporting.charts import (
    LEFT,
    RIGHT,
    SIDE,
    TOP,
    Axis,
    Figure,
    Pixel,
    Plot,
    draw_dots,
    draw_figure,
    draw_path,
)
from compress.reporting.format import MISSING, capitalise
from compress.reporting.remarks import answer
from compress.reporting.tables import Line, ResultTable, column

BAND_LEVEL = 0.9
FIT_RESAMPLES = 400
FIT_STEPS = 80
"""Number of resamples for a band, and most steps of one fit."""
LEAST_VALUES = 4
"""Fewest different values of a cause for a curve: with one fewer, nothing is left to
check the fit."""
LEAST_SPAN = 3.0
FITTED_TOGETHER = 0.95
"""Correlation of the logarithms of two causes above which their effects are not
separated."""
RISK = 0.01
"""p-value (F-test) below which a cause counts as having an effect."""
STEEPEST = 4.0
EXTRAPOLATION = 2.0
"""Factor beyond the measured range up to which a curve still counts as supported by
it."""


CauseValues = Mapping[str, float]
"""Cause -> its value."""


@dataclass(frozen=True)
class Interval:
    """An estimate and its confidence band."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class Law:
    """A fitted law.

    measured       cause -> (least, most) of what was fitted
    centres_C      c_i
    parameters_BP  log E, then log A_i and alpha_i of each cause: first of the fit, then
                   of each resample
    """

    measured: Mapping[str, tuple[float, float]]
    centres_C: Doubles
    parameters_BP: Doubles

    def error(self, at: CauseValues) -> Interval:
        """Compute the curve's error where each cause has this value."""
        return _interval(self._errors(at))

    def change(
        self,
        before: CauseValues,
        after: CauseValues,
    ) -> Interval:
        """Compute how much the error falls between two places, taking both from the
        same resampled curve."""
        return _interval(self._errors(before) - self._errors(after))

    def exponent(self, cause: str) -> Interval:
        """Return alpha of a cause."""
        return _interval(
            self.parameters_BP[:, 2 + 2 * list(self.measured).index(cause)]
        )

    def floor(self) -> Interval:
        """Return E, the error that no more of any cause would lower."""
        return _interval(np.exp(self.parameters_BP[:, 0]))

    def measured_at(self, at: CauseValues) -> bool:
        """Return True if every cause is within the range of what was measured."""
        return all(
            low <= at[cause] <= high for cause, (low, high) in self.measured.items()
        )

    def _errors(self, at: CauseValues) -> Doubles:
        """Compute the error by the fit, then by each resample."""
        logs_C = np.log([at[cause] for cause in self.measured]) - np.log(self.centres_C)
        return np.exp(_curve(self.parameters_BP, logs_C[:, None])[:, 0])


def _interval(values_B: Doubles) -> Interval:
    """Return the first value, with the band that the others form."""
    tail = (1 - BAND_LEVEL) / 2
    value = float(values_B[0])
    low, high = map(float, np.quantile(values_B[1:], (tail, 1 - tail)))
    return Interval(value, min(low, value), max(high, value))


@dataclass(frozen=True)
class Fit:
    """A law, or None if the points do not show one; `warnings` say why, or what remains
    uncertain."""

    law: Law | None
    warnings: tuple[str, ...]


def fit(
    causes: Mapping[str, Sequence[float]],
    errors: Sequence[float],
    *,
    seed: int = 0,
) -> Fit:
    """Fit the law by which each cause lowers the error. Bands come from resampled
    residuals, reproducible by `seed`.

    A cause that was not varied, or that shows no trend, is left out and named in the
    warnings. Values and errors must be positive: an error of 0 (a score of 1) fits no
    power law and is left out with a warning.
    """
    positive = [index for index, error in enumerate(errors) if error > 0]
    warnings = []
    if len(positive) < len(errors):
        warnings.append(
            f"{len(errors) - len(positive)} points without any error are left out."
        )
    logs_N = np.log([errors[index] for index in positive])
    values = {
        name: np.asarray(each, dtype=np.float64)[positive]
        for name, each in causes.items()
    }
    names, why = _choose_varied(values)
    warnings += why
    while names:
        points = _Points({name: values[name] for name in names}, logs_N)
        if len(logs_N) < points.parameters + 2:
            warnings.append(
                f"{len(logs_N)} points are too few to fit {points.parameters} "
                "parameters."
            )
            break
        chances = {name: points.chance(name) for name in names}
        # Drop the least significant first: without it, the others may show an effect.
        worst = max(chances, key=lambda name: chances[name])
        if chances[worst] >= RISK:
            warnings.append(
                f"The error does not fall with {worst} more than chance explains."
            )
            names.remove(worst)
            continue
        law = points.law(seed)
        floor = law.floor()
        if not floor_shown(law, float(np.exp(logs_N.min()))):
            warnings.append(
                f"Where the error levels off is uncertain: any floor from "
                f"{floor.low:.3f} to {floor.high:.3f} fits."
            )
        return Fit(law, tuple(warnings))
    return Fit(None, tuple(warnings))


def _choose_varied(values: Mapping[str, Doubles]) -> tuple[list[str], list[str]]:
    """Choose the causes that vary enough to show a curve, and say what the others
    lack."""
    varied = []
    why = []
    for name, values_N in values.items():
        different = len(np.unique(values_N))
        span = values_N.max(initial=0) / values_N.min(initial=np.inf)
        if different < LEAST_VALUES:
            why.append(
                f"{different} different values of {name}: a curve needs {LEAST_VALUES}."
            )
        elif span < LEAST_SPAN:
            why.append(
                f"The values of {name} span a factor of {span:.1f}: a curve needs "
                f"{LEAST_SPAN:g}."
            )
        else:
            varied.append(name)
    if (
        len(varied) == 2
        and abs(np.corrcoef([np.log(values[name]) for name in varied])[0, 1])
        > FITTED_TOGETHER
    ):
        why.append(
            f"{varied[0]} and {varied[1]} were varied together: their effects "
            "cannot be told apart."
        )
        return [], why
    return varied, why


def floor_shown(law: Law, error: float) -> bool:
    """Return True if the floor is known to a quarter of the error it is compared
    with."""
    return (floor := law.floor()).high - floor.low < 0.25 * error


class _Points:
    """The points of one fit."""

    def __init__(self, values: Mapping[str, Doubles], logs_N: Doubles) -> None:
        self.values = values
        self.logs_N = logs_N
        self.centres_C = np.exp([np.log(each).mean() for each in values.values()])
        self.logs_CN = (
            np.log(np.stack(list(values.values()))) - np.log(self.centres_C)[:, None]
        )
        self.parameters = 1 + 2 * len(values)
        rough_P, _ = _best(self.logs_CN, logs_N, np.inf)
        residuals_N = logs_N - _curve(rough_P[None], self.logs_CN)[0]
        self.threshold = 1.345 * max(
            1.4826 * float(np.median(np.abs(residuals_N))), 1e-6
        )
        self.fitted_P, self.cost = _best(self.logs_CN, logs_N, self.threshold)

    def chance(self, cause: str) -> float:
        """Compute the probability that noise alone lowers the cost as much as this
        cause does (F-test)."""
        from scipy.stats import f

        rest_CN = self.logs_CN[
            [index for index, name in enumerate(self.values) if name != cause]
        ]
        _, cost = _best(rest_CN, self.logs_N, self.threshold)
        left = len(self.logs_N) - self.parameters
        if cost <= len(self.logs_N) * 1e-12:
            return 1.0
        gain = max(cost - self.cost, 0.0) / 2
        return float(f.sf(gain / max(self.cost / left, 1e-15), 2, left))

    def law(self, seed: int) -> Law:
        """Fit resampled residuals, widened for the degrees of freedom used and by
        Student's t."""
        from scipy.stats import norm, t

        curve_N = _curve(self.fitted_P[None], self.logs_CN)[0]
        residuals_N = self.logs_N - curve_N
        left = len(residuals_N) - self.parameters
        quantile = (1 + BAND_LEVEL) / 2
        residuals_N = (residuals_N - residuals_N.mean()) * np.sqrt(
            len(residuals_N) / left
        )
        widened_N = residuals_N * t.ppf(quantile, left) / norm.ppf(quantile)
        drawn_BN = np.random.default_rng(seed).choice(
            widened_N, (FIT_RESAMPLES, len(widened_N))
        )
        # Start from the fit, and from one with another floor: the valley between them
        # is long.
        other_P = self.fitted_P.copy()
        other_P[0] = self.logs_N.min() - (
            0.3 if self.fitted_P[0] < self.logs_N.min() - 2 else 4.0
        )
        starts_BP = np.repeat(np.stack([self.fitted_P, other_P]), FIT_RESAMPLES, axis=0)
        targets_BN = np.tile(curve_N + drawn_BN, (2, 1))
        found_BP, costs_B = _minimise(
            starts_BP,
            self.logs_CN,
            targets_BN,
            self.threshold,
        )
        second_B = costs_B[FIT_RESAMPLES:] < costs_B[:FIT_RESAMPLES]
        draws_BP = np.where(
            second_B[:, None],
            found_BP[FIT_RESAMPLES:],
            found_BP[:FIT_RESAMPLES],
        )
        measured = {
            name: (float(each.min()), float(each.max()))
            for name, each in self.values.items()
        }
        return Law(measured, self.centres_C, np.vstack([self.fitted_P, draws_BP]))


def _curve(parameters_BP: Doubles, logs_CN: Doubles) -> Doubles:
    """Compute the log error (B, N)."""
    return np.logaddexp.reduce(_parts(parameters_BP, logs_CN), axis=0)


def _parts(parameters_BP: Doubles, logs_CN: Doubles) -> Doubles:
    """Compute the logarithm of the floor and of each cause's part (1 + C, B, N)."""
    floor_BN = np.repeat(parameters_BP[:, :1], logs_CN.shape[1], axis=1)
    causes = range(len(logs_CN))
    return np.stack(
        [
            floor_BN,
            *(
                parameters_BP[:, 1 + 2 * c, None]
                - parameters_BP[:, 2 + 2 * c, None] * logs_CN[c]
                for c in causes
            ),
        ]
    )


def _best(
    logs_CN: Doubles,
    targets_N: Doubles,
    threshold: float,
) -> tuple[Doubles, float]:
    """Find the parameters of the least cost from a grid of starts, and that cost."""
    least = targets_N.min()
    span = targets_N.max() - targets_N.min()
    starts = []
    for floor in (-4.0, -0.7, -0.1):
        for slopes in product((0.15, 0.5, 1.2), repeat=len(logs_CN)):
            parts = [one for slope in slopes for one in (least + span / 2 - 1.0, slope)]
            starts.append([least + floor if parts else targets_N.mean(), *parts])
    starts_BP = np.asarray(starts)
    found_BP, costs_B = _minimise(
        starts_BP,
        logs_CN,
        np.repeat(targets_N[None], len(starts), 0),
        threshold,
    )
    return found_BP[costs_B.argmin()], float(costs_B.min())


def _minimise(
    starts_BP: Doubles,
    logs_CN: Doubles,
    targets_BN: Doubles,
    threshold: float,
) -> tuple[Doubles, Doubles]:
    """Minimise every fit at once by Levenberg-Marquardt, each with its own damping:
    parameters and Huber's cost."""
    # no floor above the least error, slopes from 0 to STEEPEST
    least_B = targets_BN.min(axis=1)
    causes = len(logs_CN)
    lows = [least_B - 8, *[least_B - 12, np.zeros_like(least_B)] * causes]
    highs = [
        least_B if causes else targets_BN.max(axis=1),
        *[least_B + 12, np.full_like(least_B, STEEPEST)] * causes,
    ]
    lows_BP = np.stack(lows, axis=1)
    highs_BP = np.stack(highs, axis=1)
    found_BP = np.clip(starts_BP, lows_BP, highs_BP)
    damping_B = np.full(len(found_BP), 1e-2)
    costs_B = _costs(found_BP, logs_CN, targets_BN, threshold)
    for _ in range(FIT_STEPS):
        step_BP = _step(found_BP, logs_CN, targets_BN, threshold, damping_B)
        tried_BP = np.clip(found_BP + np.clip(step_BP, -2, 2), lows_BP, highs_BP)
        tried_B = _costs(tried_BP, logs_CN, targets_BN, threshold)
        better_B = tried_B < costs_B
        settled = np.all(np.abs(tried_BP - found_BP)[better_B] < 1e-7) and np.all(
            damping_B[~better_B] > 1e6
        )
        found_BP = np.where(better_B[:, None], tried_BP, found_BP)
        costs_B = np.where(better_B, tried_B, costs_B)
        damping_B = np.clip(np.where(better_B, damping_B / 4, damping_B * 5), 1e-9, 1e9)
        if settled:
            break
    return found_BP, costs_B


def _step(
    found_BP: Doubles,
    logs_CN: Doubles,
    targets_BN: Doubles,
    threshold: float,
    damping_B: Doubles,
) -> Doubles:
    """Compute the damped Gauss-Newton step of every fit, points beyond the threshold
    weighted down."""
    parts = _parts(found_BP, logs_CN)
    curve_BN = np.logaddexp.reduce(parts, axis=0)
    shares = np.exp(parts - curve_BN)
    slopes = (
        one
        for c in range(len(logs_CN))
        for one in (shares[1 + c], -shares[1 + c] * logs_CN[c])
    )
    jacobian_BNP = np.stack([shares[0], *slopes], axis=-1)
    residuals_BN = targets_BN - curve_BN
    weights_BN = np.minimum(1.0, threshold / np.maximum(np.abs(residuals_BN), 1e-12))
    weighted_BPN = (jacobian_BNP * weights_BN[..., None]).transpose(0, 2, 1)
    normal_BPP = weighted_BPN @ jacobian_BNP
    scale_BP = np.maximum(np.einsum("bpp->bp", normal_BPP), 1e-9)
    damped_BPP = normal_BPP + (damping_B[:, None] * scale_BP)[:, :, None] * np.eye(
        found_BP.shape[1]
    )
    return np.linalg.solve(damped_BPP, weighted_BPN @ residuals_BN[..., None])[..., 0]


def _costs(
    parameters_BP: Doubles,
    logs_CN: Doubles,
    targets_BN: Doubles,
    threshold: float,
) -> Doubles:
    """Compute Huber's loss of every fit, (B): squares within the threshold, straight
    lines beyond it."""
    far_BN = np.abs(targets_BN - _curve(parameters_BP, logs_CN))
    if np.isinf(threshold):
        return np.square(far_BN).sum(axis=1)
    near_BN = np.minimum(far_BN, threshold)
    return (near_BN * (2 * far_BN - near_BN)).sum(axis=1)


MOST_TRIALS = 400
"""Most trials that a curve is fitted to; of more, evenly spaced ones are taken."""
CAUSES = {
    "size": "parameters without embeddings",
    "data": "examples seen in training",
    "compute": "training compute, FLOPs",
}
PLACES_DRAWN = 48
NEAR_FIT = 1.3
"""Points within this factor of a curve's other cause are its own; the rest are drawn
faintly."""

Points = list[tuple[CauseValues, float]]
"""Pairs of the causes' values and the score there."""


@dataclass(frozen=True)
class Growth:
    """A search page's part on size, data and compute: sentences, a table, pictures, and
    what is not known."""

    about: str
    expected: ResultTable | None
    answers: tuple[str, ...]
    figures: tuple[Figure, ...]
    warnings: tuple[str, ...]


def growth(found: SearchReport) -> Growth:
    """Fit the laws of size and data, and of compute, as far as a search's scores
    support them."""
    known = [
        rung
        for rung in found.ladder
        if rung.body_parameters > 0 and rung.examples > 0 and np.isfinite(rung.score)
    ]
    names = [rung.what for rung in known]
    # scores of different trainings are not on one curve
    most = max(dict.fromkeys(names), key=names.count, default="")
    rungs = [rung for rung in known if rung.what == most]
    about = f"Scores while training ({most})." if rungs else ""
    points: Points = [
        ({"size": float(one.body_parameters), "data": float(one.examples)}, one.score)
        for one in rungs
    ]
    whole = _fit(points, "size", "data")
    if whole.law is None or "size" not in whole.law.measured:
        trials: Points = [
            ({"size": float(one.body_parameters)}, one.first)
            for one in found.points
            if one.state == "complete" and one.body_parameters and one.first is not None
        ]
        trials = trials[:: -(-len(trials) // MOST_TRIALS) or 1]
        alone = _fit(trials, "size")
        if alone.law is not None:
            whole = Fit(alone.law, (*whole.warnings, *alone.warnings))
            points = trials
            about = "Scores of the trials before any training on top."
    compute = _fit(frontier := _frontier(rungs), "compute")
    warnings = (
        *whole.warnings,
        *(f"Compute: {one}" for one in compute.warnings if rungs),
    )
    figures = []
    answers = []
    expected = None
    if law := whole.law:
        here = _reference(found, points, law)
        figures = [_figure(found, law, cause, here, points) for cause in law.measured]
        placed = ", ".join(
            f"{units.magnitude(value)} {CAUSES[cause]}" for cause, value in here.items()
        )
        about += f" Here: {placed}."
        expected = _tabulate_expected(units.metric(found.metric), law, here)
        if floor_shown(law, law.error(here).value):
            answers.append(
                f"With ever more {' and '.join(law.measured)} it levels off at "
                f"{_score(law.floor())}."
            )
    if compute.law:
        spent = max(at["compute"] for at, _ in frontier)
        figures.append(
            _figure(found, compute.law, "compute", {"compute": spent}, frontier)
        )
    seen = max((rung.examples for rung in rungs), default=0)
    if found.train_rows and seen > found.train_rows:
        answers.append(
            f"There are {found.train_rows:,} rows to train on, each seen "
            f"{seen / found.train_rows:.1f} times: more data here means more passes "
            "over them; new rows may be worth more."
        )
    return Growth(about, expected, tuple(answers), tuple(figures), warnings)


def _fit(points: Points, *causes: str) -> Fit:
    return fit(
        {cause: [at[cause] for at, _ in points] for cause in causes},
        [1 - score for _, score in points],
    )


def _frontier(rungs: Sequence[Rung]) -> Points:
    """List the rungs that no rung of equal or less compute outscores."""
    best: Points = []
    for rung in sorted(
        (one for one in rungs if one.flops > 0), key=lambda one: (one.flops, -one.score)
    ):
        if not best or rung.score > best[-1][1]:
            best.append(({"compute": rung.flops}, rung.score))
    return best


def _reference(found: SearchReport, points: Points, law: Law) -> dict[str, float]:
    """Choose the point to compare with: the answer's size (or the nearest measured one)
    and all the data."""
    reference = {cause: high for cause, (_, high) in law.measured.items()}
    if "size" in law.measured:
        (low, high) = law.measured["size"]
        chosen = answer(found)
        wanted = (
            float(chosen.body_parameters)
            if chosen and chosen.body_parameters
            else (low * high) ** 0.5
        )
        sizes = sorted({at["size"] for at, _ in points})
        nearest = min(sizes, key=lambda size: abs(np.log(size / wanted)))
        reference["size"] = (
            wanted if low <= wanted <= high and len(sizes) > 20 else nearest
        )
    return reference


def _tabulate_expected(metric: str, law: Law, here: CauseValues) -> ResultTable:
    """Tabulate the expected score here, at half and twice the size, and at half and
    twice the data."""
    places = [("here", here)] + [
        (f"{times} the {cause}", {**here, cause: here[cause] * factor})
        for cause in ("size", "data")
        if cause in law.measured
        for factor, times in ((0.5, "half"), (2.0, "twice"))
    ]

    def change(at: CauseValues) -> str:
        found = law.change(here, at)
        decimals = 1 if abs(found.value) >= 0.001 else 2
        value, low, high = (
            f"{100 * one:.{decimals}f}".replace("-", "−")
            for one in (found.value, found.low, found.high)
        )
        return (
            f"{'' if value.startswith('−') else '+'}{value} [{low}, {high}]"
            if at is not here
            else MISSING
        )

    ats = [at for _, at in places]
    columns = (
        column(ats, "", metric, lambda at: _score(law.error(at))),
        column(ats, "", "change, points", change),
        column(
            ats,
            "",
            "",
            lambda at: "" if law.measured_at(at) else "beyond the measured range",
        ),
    )
    return ResultTable(
        tuple(Line(name) for name, _ in places),
        columns,
        f"{capitalise(metric)} to expect",
    )


def _score(error: Interval) -> str:
    """Format a score with its band: `0.872 [0.868, 0.876]`."""
    return (
        f"{units.score(1 - error.value)} [{units.score(1 - error.high)}, "
        f"{units.score(1 - error.low)}]"
    )


def _figure(
    found: SearchReport,
    law: Law,
    cause: str,
    held: CauseValues,
    points: Points,
) -> Figure:
    """Draw a law along one cause, with all others fixed."""
    heading = f"{units.metric(found.metric)} against {cause}"
    slope = law.exponent(cause)
    caption = f"Exponent {slope.value:.2f} [{slope.low:.2f}, {slope.high:.2f}]."
    draw = partial(_draw, (heading, law, cause, held, points))
    return draw_figure(
        capitalise(heading),
        draw,
        f"growth-{cause}",
        SIDE,
        caption=caption,
    )


def _draw(
    curve: tuple[str, Law, str, CauseValues, Points],
    key: str,
    width: float,
) -> Markup:
    """Draw the curve in its band, with the points; up to a factor of 4 beyond them,
    dashed beyond a factor of 2."""
    heading, law, cause, held, points = curve
    crowd: list[Pixel] = []
    own: list[Pixel] = []
    for at, score in points:
        near = all(
            1 / NEAR_FIT <= at[name] / value <= NEAR_FIT
            for name, value in held.items()
            if name != cause
        )
        (own if near else crowd).append((at[cause], score))
    low, high = law.measured[cause]
    x = Axis(
        low / (2 * EXTRAPOLATION),
        high * 2 * EXTRAPOLATION,
        LEFT,
        width - RIGHT,
        log=True,
    )
    places = np.geomspace(x.low, x.high, PLACES_DRAWN)
    bands = [law.error({**held, cause: float(place)}) for place in places]
    solid = [
        index
        for index, place in enumerate(places)
        if low / EXTRAPOLATION <= place <= high * EXTRAPOLATION
    ]
    first = solid[0]
    last = solid[-1] + 1
    shown = [1 - band.value for band in bands[first:last]]
    shown += [score for _, score in own]
    y = Axis.padded(min(shown), max(shown), 300, TOP)
    plot = Plot(x, y, (CAUSES[cause], heading.partition(" against ")[0]))

    def edge(which: str) -> list[Pixel]:
        pixels = [
            plot.at(float(place), 1 - getattr(band, which))
            for place, band in zip(places, bands, strict=True)
        ]
        return [(across, max(down, TOP - 8)) for across, down in pixels]

    upper = edge("low")
    lower = edge("high")
    line = edge("value")
    plot.marks.append(
        draw_path([*upper[first:last], *reversed(lower[first:last])], "band")
    )
    for part in (slice(0, first + 1), slice(last - 1, None)):
        plot.marks.append(draw_path([*upper[part], *reversed(lower[part])], "band far"))
        if far := [one for one in line[part] if one[1] < y.start]:
            plot.marks.append(draw_path(far, "curve s0 far"))
    for style, scores in (("crowd", crowd), ("crowd own", own)):
        pixels = [(x.at(value), y.at(score)) for value, score in scores]
        plot.marks.append(
            draw_dots([one for one in pixels if TOP - 8 <= one[1] <= y.start], style)
        )
    plot.marks.append(
        draw_path([one for one in line[first:last] if one[1] < y.start], "curve s0")
    )
    return plot.picture(
        key,
        heading,
        f"from {_score(bands[first])} to {_score(bands[last - 1])}",
    )
