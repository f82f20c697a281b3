"""Axes of the pictures: from values to pixels, round ticks, grid and titles."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from compress.report import svg
from compress.report.svg import Box


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
        marks.append(svg.line((plot.left, y.at(tick)), (plot.right, y.at(tick)), "grid"))
        marks.append(svg.text(plot.left - 8, y.at(tick) + 4, written, "tick", "end"))
    for tick, written in _written(columns, x.log):
        marks.append(svg.line((x.at(tick), plot.bottom), (x.at(tick), plot.bottom + 4), "axis"))
        marks.append(svg.text(x.at(tick), plot.bottom + 18, written, "tick", "middle"))
    marks.append(svg.line((plot.left, plot.bottom), (plot.right, plot.bottom), "axis"))
    return marks


def titles(plot: Box, below: str, above: str) -> list[Markup]:
    """The axes' names; the vertical one lies flat above the axis, where it can be read."""
    marks = [svg.text(plot.right, plot.bottom + 38, below, "axis-title", "end")]
    return [*marks, svg.text(0, 14, above, "axis-title")] if above else marks


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
