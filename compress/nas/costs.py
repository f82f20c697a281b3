"""Measure some shapes of a space, the teacher and the anchors on the device; predict
the costs of all other shapes."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from compress.benchmark.device import Device
from compress.errors import SearchError
from compress.exporters.artifact import Bundle
from compress.exporters.manifest import BUNDLE_FILES, Precision
from compress.kinds import Kind
from compress.latency.features import Terms
from compress.latency.measure import choose_spread, sample
from compress.latency.model import (
    Estimate,
    LatencyModel,
    LatencyTable,
    ModelCost,
    keep_within,
    model_cost,
)
from compress.nas.config import SURE_DEVIATIONS, SearchConfig, describe_choice
from compress.nas.space import ShapeChoice, Shapes
from compress.progress import Say
from compress.records.latency import FEWEST_SHAPES
from compress.records.search_report import ObjectiveName

LATENCIES = "latency.json"
"""The file of a search that holds its measured latencies."""
SHAPES_DRAWN = 400
"""Shapes drawn, of which some are chosen to be measured."""
PRICED = 2000
PRICED_BY_PARTS = 300
"""Numbers of shapes checked against a budget: PRICED if only latency is limited,
PRICED_BY_PARTS if parameters must be counted too."""
BAND = 0.8
"""The share of the latency limit above which a shape counts as using the budget."""


@dataclass(frozen=True)
class CostModel:
    """Predicts the costs of a choice before anything is trained."""

    search: SearchConfig
    shapes: Shapes
    latencies: LatencyTable
    kind: Kind

    def limits(self) -> dict[ObjectiveName, float]:
        """Return the limit of each objective. Raises SearchError for a speed-up over an
        unmeasured teacher."""
        teacher = self.latencies.teacher(self.search.precision)
        return self.search.budget.limits(teacher.ms if teacher else None)

    def teacher(self) -> ModelCost:
        """Compute the teacher's own costs."""
        return model_cost(self.shapes.teacher, self.search.precision, kind=self.kind)

    def precision(self, choice: ShapeChoice) -> Precision:
        return cast("Precision", choice.get("precision", self.search.precision))

    def latency(self, choice: ShapeChoice) -> Estimate:
        return self.latencies.models[self.precision(choice)].predict(
            self.shapes.config(choice)
        )

    def cost(self, choice: ShapeChoice) -> ModelCost:
        shared: Mapping[Any, int] = (
            {}
            if self.search.space.mode == "supernet"
            else self.shapes.spec(choice).share
        )
        return model_cost(
            self.shapes.config(choice),
            self.precision(choice),
            kind=self.kind,
            shared=shared,
        )

    def facts(self, choice: ShapeChoice) -> dict[str, float]:
        """Return all costs but the latency, by the names of objectives."""
        return asdict(self.cost(choice))


def measure(
    search: SearchConfig,
    shapes: Shapes,
    device: Device,
    *,
    kind: Kind,
    segments: bool,
    say: Say,
) -> LatencyTable:
    """Measure shapes in each precision, the teacher in these and in fp32, and the
    anchors, all in one race.

    Raises SearchError, DeviceError, ExportError.
    """
    bare = [
        {name: value for name, value in choice.items() if name != "precision"}
        for choice in shapes.drawn(SHAPES_DRAWN, search.seed)
    ]
    configs = {describe_choice(choice): shapes.config(choice) for choice in bare}
    chosen = choose_spread(configs, search.shapes, search.setting, kind)
    if len(chosen) < FEWEST_SHAPES:
        raise SearchError(
            f"{search.space.name}: has only {len(chosen)} shapes, and predicting "
            f"latency takes at least {FEWEST_SHAPES}. Give its axes more values"
        )
    say(
        f"measuring {len(chosen)} shapes of {shapes.size():,}, and the teacher, on "
        f"{device.name} at {search.setting}"
    )
    wanted: dict[str, tuple[Any, Precision]] = {
        f"{name} {precision}": (configs[name], precision)
        for precision in search.precisions
        for name in chosen
    }
    for precision in (*search.precisions, "fp32"):
        wanted[f"teacher {precision}"] = (shapes.teacher, precision)
    samples = sample(
        {name: config for name, (config, _) in wanted.items()},
        device,
        search.setting,
        precision={name: precision for name, (_, precision) in wanted.items()},
        kind=kind,
        segments=segments,
        files=_find_anchors(search),
        rounds=search.rounds,
        runs=search.runs,
        say=say,
    )
    by_name = {each.name: each for each in samples}
    models = {
        precision: LatencyModel.fit(
            [replace(by_name.pop(f"{name} {precision}"), name=name) for name in chosen],
            search.setting,
            precision,
            kind=kind,
            device=device,
        )
        for precision in search.precisions
    }
    for model in models.values():
        say(model.about())
    return LatencyTable(models, by_name)


def _find_anchors(search: SearchConfig) -> dict[str, Path]:
    """Return the anchors' files by name."""
    files = {}
    for anchor in search.anchors:
        bundle = Bundle.load(anchor)
        bundle.check_has(search.precision)
        files[f"{anchor} {search.precision}"] = (
            bundle.path / BUNDLE_FILES[search.precision]
        )
    return files


def choose_within_budget(costs: CostModel, count: int) -> list[ShapeChoice]:
    """Choose at most `count` shapes within the budget, the one with the fewest FLOPs
    first.

    A predicted latency keeps its limit only together with SURE standard deviations: of
    shapes at that edge one in forty proves too slow when it is measured. If possible,
    three in four of the chosen shapes use most of the latency budget, as the best
    students do; the rest covers the remaining front. Drawing from this band matters
    more than the sampler: where scores were a made-up smooth function of BERT shapes
    (Optuna 5.0.0, means of 5 seeds), the best of 20 drawn at random from 0.8 to 1.0 of
    the limit was 1.3 points from the optimum, of 20 that TPE chose under a constraint
    3.8.

    Raises SearchError, naming the closest, if no shape is within the budget.
    """
    limits = {name: limit for name, limit in costs.limits().items() if name != "score"}
    by_parts = bool(limits.keys() - {"latency"})
    drawn = costs.shapes.drawn(
        PRICED_BY_PARTS if by_parts else PRICED, costs.search.seed
    )
    choices = {describe_choice(choice): choice for choice in drawn}
    latencies = {name: costs.latency(choice) for name, choice in choices.items()}
    prices = {
        name: {
            **(costs.facts(choice) if by_parts else {}),
            "latency": latencies[name].ms + SURE_DEVIATIONS * latencies[name].error_ms,
        }
        for name, choice in choices.items()
    }
    kept, closest = keep_within(prices, limits)
    if not kept:
        fixed_ms = min(
            model.costs.get("fixed", 0.0) for model in costs.latencies.models.values()
        )
        raise SearchError(
            f"impossible budget: of {len(prices):,} shapes the closest is {closest}: "
            f"{_explain_excess(limits, prices[closest], latencies[closest], fixed_ms)}"
        )
    band = BAND * limits.get("latency", 0.0)
    used, rest = (
        [name for name in kept if (latencies[name].ms >= band) is inside]
        for inside in (True, False)
    )

    def flops(name: str) -> float:
        return Terms.from_config(
            costs.shapes.config(choices[name]), costs.search.setting, costs.kind
        ).flops

    chosen = dict.fromkeys(
        [min(kept, key=flops), *used[: max(3 * count // 4, count - len(rest))], *rest]
    )
    return [choices[name] for name in chosen][:count]


def _explain_excess(
    limits: Mapping[Any, float],
    prices: Mapping[str, float],
    latency: Estimate,
    fixed_ms: float,
) -> str:
    """Describe the limits that a shape exceeds, and those that it would keep."""
    exceeded = list[str]()
    advice = list[str]()
    for name, limit in limits.items():
        if prices[name] <= limit:
            continue
        least = _round_up(prices[name])
        if name == "latency":
            fixed = (
                f", of which {fixed_ms:.3g} ms are fixed for any shape"
                if fixed_ms
                else ""
            )
            margin = f"+- {SURE_DEVIATIONS * latency.error_ms:.2g} ms (95 %)"
            exceeded.append(
                f"takes {latency.ms:.3g} {margin}{fixed}; allowed are {limit:.3g} ms"
            )
            advice.append(f"--max-latency-ms of at least {least}, fewer tokens")
        else:
            option = "--max-params" if name == "parameters" else "--max-file-mb"
            exceeded.append(f"has {prices[name]:,.4g} {name}; allowed are {limit:,.4g}")
            advice.append(f"{option} of at least {least}")
    return (
        f"{'; '.join(exceeded)}. Ask for {', '.join(advice)}, or add "
        "shallower or narrower shapes to the space"
    )


def _round_up(value: float) -> str:
    """Format with three significant digits, rounded up."""
    step = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(value / step) * step:.10g}"
