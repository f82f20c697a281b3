"""Measure some shapes of a space on the device, with the teacher and the anchors; predict what any other costs."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compress.benchmark.devices import Device
from compress.data.task import Kind
from compress.errors import BundleError, SearchError
from compress.exporters.artifact import FILES, Bundle, Precision
from compress.latency.features import Terms
from compress.latency.measure import choose_spread, sample
from compress.latency.model import Estimate, LatencyModel, LatencyTable, ModelCost, model_cost
from compress.nas.config import SURE, SearchConfig, describe_choice
from compress.nas.space import Choice, Shapes
from compress.records.latency import FEWEST_SHAPES
from compress.records.search_report import ObjectiveName

DRAWN = 400
"""Shapes among which those to be measured are chosen."""
PRICED, PRICED_BY_PARTS = 2000, 300
"""Shapes that a budget is held against: by latency alone, and where parameters must be counted too."""
BAND = 0.8
"""The share of the latency limit from which on a shape uses the budget."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class CostModel:
    """The costs of a choice, before anything is trained."""

    search: SearchConfig
    shapes: Shapes
    latencies: LatencyTable
    kind: Kind

    def limits(self) -> dict[ObjectiveName, float]:
        """Return the most that each objective may be. Raises SearchError for a speed-up over an unmeasured teacher."""
        teacher = self.latencies.teacher(self.search.precision)
        return self.search.budget.limits(teacher.ms if teacher else None)

    def teacher(self) -> ModelCost:
        """Count the teacher's own costs."""
        return model_cost(self.shapes.teacher, self.search.precision, kind=self.kind)

    def precision(self, choice: Choice) -> Precision:
        found: Any = choice.get("precision", self.search.precision)
        precision: Precision = found
        return precision

    def latency(self, choice: Choice) -> Estimate:
        return self.latencies.models[self.precision(choice)].predict(self.shapes.config(choice))

    def cost(self, choice: Choice) -> ModelCost:
        shared: Mapping[Any, int] = {} if self.search.space.mode == "supernet" else self.shapes.spec(choice).share
        return model_cost(self.shapes.config(choice), self.precision(choice), kind=self.kind, shared=shared)

    def facts(self, choice: Choice) -> dict[str, float]:
        found = self.cost(choice)
        return {**found.plain(), "body_parameters": float(found.body_parameters)}


def measure(
    search: SearchConfig, shapes: Shapes, device: Device, *, kind: Kind, segments: bool, say: Say
) -> LatencyTable:
    """Measure shapes in each precision, the teacher in these and fp32, and the anchors, all in one race.

    Raises SearchError, DeviceError, ExportError.
    """
    bare = [
        {name: value for name, value in choice.items() if name != "precision"}
        for choice in shapes.drawn(DRAWN, search.seed)
    ]
    configs = {describe_choice(choice): shapes.config(choice) for choice in bare}
    chosen = choose_spread(configs, search.shapes, search.setting, kind)
    if len(chosen) < FEWEST_SHAPES:
        raise SearchError(
            f"{search.space.name}: has only {len(chosen)} shapes; a latency is predicted from at least "
            f"{FEWEST_SHAPES}. Give its axes more values"
        )
    say(f"measuring {len(chosen)} shapes of {shapes.size():,}, and the teacher, on {device.name} at {search.setting}")
    wanted = {(name, precision): configs[name] for precision in search.precisions for name in chosen}
    wanted |= {("teacher", precision): shapes.teacher for precision in (*search.precisions, "fp32")}
    samples = sample(
        {f"{name} {precision}": config for (name, precision), config in wanted.items()}, device, search.setting,
        precision={f"{name} {precision}": precision for name, precision in wanted},
        kind=kind, segments=segments, files=_anchors(search), rounds=search.rounds, runs=search.runs, say=say,
    )  # fmt: skip
    by_name = {each.name: each for each in samples}
    models = {
        precision: LatencyModel.fit(
            [replace(by_name.pop(f"{name} {precision}"), name=name) for name in chosen],
            search.setting, precision, kind=kind, device=device,
        )
        for precision in search.precisions
    }  # fmt: skip
    for model in models.values():
        say(model.about())
    return LatencyTable(models, by_name)


def _anchors(search: SearchConfig) -> dict[str, Path]:
    """Return the files of the anchors by name."""
    found = {}
    for anchor in search.anchors:
        bundle = Bundle.load(Path(anchor))
        bundle.check_has(search.precision)
        name = f"{anchor} {search.precision}"
        if name in found:
            raise BundleError(f"--anchor {anchor}: is given twice")
        found[name] = bundle.path / FILES[search.precision]
    return found


@dataclass(frozen=True)
class _Priced:
    """A choice, its predicted latency, and its other costs where these are limited."""

    choice: Choice
    latency: Estimate
    facts: Mapping[str, float]

    def excess(self, limits: Mapping[ObjectiveName, float]) -> float:
        """Return the factor by which it is over the limit that it exceeds most; at most 1 where it keeps all.

        A latency is predicted, so it keeps its limit only where prediction and SURE standard deviations of it do: of
        shapes at that edge one in forty proves too slow when it is measured.
        """
        taken = {**self.facts, "latency": self.latency.ms + SURE * self.latency.error_ms}
        return max((taken[name] / limit for name, limit in limits.items() if name != "score"), default=0.0)


def choose_within_budget(costs: CostModel, count: int) -> list[Choice]:
    """Return at most `count` shapes that keep the budget, the one with the fewest FLOPs first.

    Three in four of them use much of its latency, where there are such: there the best students are; the others are
    what the rest of the front is of. That a band is drawn at all matters more than who samples in it: where scores
    were a made-up smooth function of BERT shapes (Optuna 5.0.0, means of 5 seeds), the best of 20 drawn at random from
    0.8 to 1.0 of the limit was 1.3 points from the optimum, of 20 that TPE chose under a constraint 3.8.

    Raises SearchError, naming the closest, where none keeps it.
    """
    limits = costs.limits()
    by_parts = bool(limits.keys() - {"latency", "score"})
    drawn = costs.shapes.drawn(PRICED_BY_PARTS if by_parts else PRICED, costs.search.seed)
    priced = [_Priced(choice, costs.latency(choice), costs.facts(choice) if by_parts else {}) for choice in drawn]
    kept = [each for each in priced if each.excess(limits) <= 1]
    if not kept:
        closest = min(priced, key=lambda each: (each.excess(limits), describe_choice(each.choice)))
        fixed_ms = min(model.costs.get("fixed", 0.0) for model in costs.latencies.models.values())
        raise SearchError(
            f"impossible budget: of {len(priced):,} shapes the closest is {describe_choice(closest.choice)}: "
            f"{_advise(limits, closest, fixed_ms)}"
        )
    band = BAND * limits.get("latency", 0.0)
    used, rest = ([each.choice for each in kept if (each.latency.ms >= band) is inside] for inside in (True, False))

    def flops(choice: Choice) -> float:
        return Terms.from_config(costs.shapes.config(choice), costs.search.setting, costs.kind).flops

    least = min((each.choice for each in kept), key=flops)
    found = [least, *used[: max(3 * count // 4, count - len(rest))], *rest]
    return list({describe_choice(choice): choice for choice in found}.values())[:count]


def _advise(limits: Mapping[ObjectiveName, float], closest: _Priced, fixed_ms: float) -> str:
    """Say which limits the shape exceeds, and which it would keep."""
    said, ask = list[str](), list[str]()
    ms, error = closest.latency.ms, closest.latency.error_ms
    if "latency" in limits and ms + SURE * error > limits["latency"]:
        fixed = f", of which {fixed_ms:.3g} ms are fixed for any shape" if fixed_ms else ""
        said.append(f"takes {ms:.3g} +- {error:.2g} ms{fixed}, where {limits['latency']:.3g} ms are allowed")
        ask.append(f"--max-latency-ms of at least {_round_up(ms + SURE * error)}, fewer tokens")
    options: Mapping[ObjectiveName, str] = {"parameters": "--max-params", "file_mb": "--max-file-mb"}
    for name, option in options.items():
        if name in limits and closest.facts[name] > limits[name]:
            said.append(f"has {closest.facts[name]:,.4g} {name}, where {limits[name]:,.4g} are allowed")
            ask.append(f"{option} of at least {_round_up(closest.facts[name])}")
    return f"{'; '.join(said)}. Ask for {', '.join(ask)}, or let the space have fewer layers or narrower ones"


def _round_up(value: float) -> str:
    """Write three digits, never less than the value."""
    step = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(value / step) * step:.10g}"
