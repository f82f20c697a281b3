"""What a student may cost, and whether a shape keeps to it before anything is trained.

A latency is predicted, so a shape keeps the limit only where its prediction and SURE standard deviations of it do: of
shapes at that edge one in forty proves too slow when it is measured. The lower limits make a band: where one student is
wanted, not a front, shapes that leave much of the budget unused need not be scored. That a band is drawn at all matters
more than who samples in it: where scores were a made-up smooth function of BERT shapes (Optuna 5.0.0, means of 5
seeds), the best of 20 drawn at random from 0.8 to 1.0 of the limit was 1.3 points from the optimum, of 20 that TPE
chose under a constraint 3.8.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from compress.errors import SearchError
from compress.records.search_report import ObjectiveName

if TYPE_CHECKING:
    from compress.latency.model import Estimate

SURE = 2.0
"""Standard deviations of its prediction by which a shape must be within the latency asked for."""

BAND = 0.8
"""The share of the latency limit from which on a shape uses the budget."""


@dataclass(frozen=True)
class Budget:
    """Limits of one student; None: there is none.

    speedup      so many times faster than its teacher at least, both measured in one race
    max_file_mb  10^6 bytes of the file that ships
    min_score    the least it must score, in the task's metric
    """

    max_latency_ms: float | None = None
    min_latency_ms: float | None = None
    speedup: float | None = None
    max_params: float | None = None
    min_params: float | None = None
    max_file_mb: float | None = None
    min_score: float | None = None

    def __post_init__(self) -> None:
        """Raises SearchError for limits that nothing can keep, or that contradict each other."""
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None and not value > 0 and each.name != "min_score":
                raise SearchError(f"{_option(each.name)} {value:g}: expected a number above 0")
        if self.speedup is not None and self.speedup <= 1:
            raise SearchError(
                f"--speedup {self.speedup:g}: the teacher itself has 1; expected more, as in 2 for half of its latency"
            )
        if self.min_score is not None and self.min_score > 1:
            raise SearchError(f"--min-score {self.min_score:g}: no metric is above 1; expected a share, as in 0.9")
        for low, high in (("min_latency_ms", "max_latency_ms"), ("min_params", "max_params")):
            least, most = getattr(self, low), getattr(self, high)
            if least is not None and most is not None and least >= most:
                raise SearchError(
                    f"contradictory bounds: {_option(low)} {least:g} is not below {_option(high)} {most:g}; nothing "
                    "can be between them"
                )

    def with_teacher(self, ms: float | None) -> "Budget":
        """Return the budget with `speedup` as a latency, of a teacher that takes `ms`.

        Raises SearchError where that contradicts the rest, or no teacher was measured.
        """
        if self.speedup is None:
            return self
        if ms is None:
            raise SearchError(
                f"--speedup {self.speedup:g}: the teacher has no latency to compare with, as it cannot be exported; "
                "give --max-latency-ms"
            )
        most = ms / self.speedup
        return replace(self, speedup=None, max_latency_ms=min(most, self.max_latency_ms or most))

    def banded(self, share: float = BAND) -> "Budget":
        """Return the budget with `share` of the latency limit as the least, where there is a limit and no least yet."""
        if self.max_latency_ms is None or self.min_latency_ms is not None:
            return self
        return replace(self, min_latency_ms=share * self.max_latency_ms)

    def limits(self) -> dict[ObjectiveName, float]:
        """Return the most that each objective may be; of the score, the least. After `with_teacher`."""
        assert self.speedup is None, "a speed-up is a latency once the teacher is measured"
        named: dict[ObjectiveName, float | None] = {
            "latency": self.max_latency_ms,
            "parameters": self.max_params,
            "file_mb": self.max_file_mb,
            "score": self.min_score,
        }
        return {name: value for name, value in named.items() if value is not None}

    def fits(self, estimate: "Estimate | None", facts: Mapping[str, float]) -> str | None:
        """Say why a shape is outside; None where it is not. Its score is not asked for."""
        why = [
            f"{name} {value:.4g}{more}, limit {limit:g}"
            for name, value, more, limit in self._costs(estimate, facts)
            if value > limit
        ]
        if self.min_latency_ms is not None and _taken(estimate).ms < self.min_latency_ms:
            why.append(f"latency {_taken(estimate).ms:.4g} ms, below the {self.min_latency_ms:.4g} ms it may use")
        if self.min_params is not None and facts["parameters"] < self.min_params:
            why.append(f"parameters {facts['parameters']:,.0f}, fewer than {self.min_params:,.0f}")
        return "; ".join(why) or None

    def excess(self, estimate: "Estimate | None", facts: Mapping[str, float]) -> float:
        """Return the factor by which a shape is over the limit that it is most over; at most 1 where it keeps all."""
        return max((value / limit for _, value, _, limit in self._costs(estimate, facts)), default=0.0)

    def _costs(
        self, estimate: "Estimate | None", facts: Mapping[str, float]
    ) -> list[tuple[ObjectiveName, float, str, float]]:
        """List for each limit: the objective, what the shape is taken to cost, how that is made up, the limit."""
        found: list[tuple[ObjectiveName, float, str, float]] = []
        for name, limit in self.limits().items():
            if name == "latency":
                ms, error = _taken(estimate).ms, SURE * _taken(estimate).error_ms
                found.append((name, ms + error, f" ms ({ms:.4g} + {error:.2g})", limit))
            elif name != "score":
                found.append((name, facts[name], "", limit))
        return found


@dataclass(frozen=True)
class Priced:
    """A shape and what it is predicted to cost."""

    name: str
    estimate: "Estimate | None"
    facts: Mapping[str, float]


def check_possible(budget: Budget, shapes: Mapping[str, Priced], *, fixed_ms: float | None = None) -> None:
    """Raises SearchError, with the closest shape and what to ask for, where no shape is within the budget.

    fixed_ms: what any shape takes, `costs["fixed"]` of a LatencyModel.
    """
    if not shapes:
        raise SearchError("no shapes to choose from: the space is empty")
    outside = {name: budget.fits(each.estimate, each.facts) for name, each in shapes.items()}
    if not all(outside.values()):
        return
    name = min(shapes, key=lambda each: (budget.excess(shapes[each].estimate, shapes[each].facts), each))
    closest = shapes[name]
    if budget.excess(closest.estimate, closest.facts) <= 1:
        raise SearchError(
            f"impossible budget: of {len(shapes):,} shapes none is within all limits; {name} keeps every upper one, "
            f"but: {outside[name]}. Lower the least that is asked for, or let the space have more in between"
        )
    raise SearchError(
        f"impossible budget: of {len(shapes):,} shapes the closest is {name}: {_advice(budget, closest, fixed_ms)}"
    )


def _advice(budget: Budget, closest: Priced, fixed_ms: float | None) -> str:
    limits, said, ask = budget.limits(), [], []
    latency, known = limits.get("latency"), closest.estimate
    if latency is not None and known is not None and known.ms + SURE * known.error_ms > latency:
        least = known.ms + SURE * known.error_ms
        fixed = f", of which {fixed_ms:.3g} ms are fixed for any shape" if fixed_ms else ""
        said.append(f"takes {known.ms:.3g} +- {known.error_ms:.2g} ms{fixed}, where {latency:.3g} ms are allowed")
        ask.append(f"--max-latency-ms of at least {_up(least)}, fewer tokens")
    options: Mapping[ObjectiveName, str] = {"parameters": "max_params", "file_mb": "max_file_mb"}
    for name, option in options.items():
        if name in limits and closest.facts[name] > limits[name]:
            said.append(f"has {closest.facts[name]:,.4g} {name}, where {limits[name]:,.4g} are allowed")
            ask.append(f"{_option(option)} of at least {_up(closest.facts[name])}")
    return f"{'; '.join(said)}. Ask for {', '.join(ask)}, or let the space have fewer layers or narrower ones"


def _taken(estimate: "Estimate | None") -> "Estimate":
    if estimate is None:
        raise SearchError("a latency is limited, but that of a shape is not known; measure some shapes first")
    return estimate


def _up(value: float) -> str:
    """Three digits, never less than the value."""
    step = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(value / step) * step:.10g}"


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
