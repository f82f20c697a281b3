"""Measure some shapes of a space on the device, with the teacher and the anchors; predict what any other costs."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compress.benchmark.devices import Device
from compress.data.task import Kind
from compress.errors import BundleError, SearchError
from compress.exporters.artifact import FILES, Bundle, Precision
from compress.latency.costs import LatencyTable, ModelCost, model_cost
from compress.latency.features import Terms
from compress.latency.measure import Sample, choose_spread, exported, race
from compress.latency.model import FEWEST, Estimate, LatencyModel
from compress.nas.budget import Budget, Priced, check_possible
from compress.nas.config import SearchConfig
from compress.nas.space import Choice, Shapes
from compress.records.search_report import ObjectiveName

DRAWN = 400
"""Shapes among which those to be measured are chosen."""
PRICED, PRICED_BY_PARTS = 2000, 300
"""Shapes that a budget is held against: by latency alone, and where parameters must be counted too."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class CostModel:
    """What a choice costs, before anything is trained."""

    search: SearchConfig
    shapes: Shapes
    latencies: LatencyTable
    kind: Kind

    def limits(self) -> dict[ObjectiveName, float]:
        """Return the most that each objective may be. Raises SearchError for a speed-up over an unmeasured teacher."""
        return self.budget().limits()

    def budget(self) -> Budget:
        """Return the search's budget, with a speed-up as the latency it comes to."""
        teacher = self.latencies.teacher(self.search.precision)
        return self.search.budget.with_teacher(teacher.ms if teacher else None)

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


def describe_choice(choice: Choice) -> str:
    """`layers 4, hidden 256, heads 8, ffn 768`"""
    return ", ".join(f"{name.removeprefix('config.')} {value}" for name, value in choice.items())


def measure(
    search: SearchConfig, shapes: Shapes, device: Device, *, kind: Kind, segments: bool, say: Say
) -> LatencyTable:
    """`search.shapes` shapes in each precision, the teacher in fp32 and these, and the anchors, all in one race.

    Raises SearchError, DeviceError, ExportError.
    """
    bare = {describe_choice(choice): choice for each in shapes.drawn(DRAWN, search.seed) if (choice := _bare(each))}
    configs = {name: shapes.config(choice) for name, choice in bare.items()}
    chosen = choose_spread(configs, search.shapes, search.setting, kind)
    if len(chosen) < FEWEST:
        raise SearchError(
            f"{search.space.name}: has only {len(chosen)} shapes; a latency is predicted from at least {FEWEST}. Give "
            "its axes more values"
        )
    say(f"measuring {len(chosen)} shapes of {shapes.size():,}, and the teacher, on {device.name} at {search.setting}")
    wanted = {"teacher": shapes.teacher} | {name: configs[name] for name in chosen}
    samples = _raced(search, wanted, device, kind=kind, segments=segments, say=say)
    models = {
        precision: LatencyModel.fit(
            [replace(samples[precision][name], choice=bare[name]) for name in chosen],
            search.setting, precision, kind=kind, device=device,
        )
        for precision in search.precisions
    }  # fmt: skip
    beside = {
        f"{name} {precision}": one
        for precision, found in samples.items()
        for name, one in found.items()
        if name not in chosen
    }
    for model in models.values():
        say(model.about())
    return LatencyTable(models, beside)


def _raced(
    search: SearchConfig, wanted: Mapping[str, Any], device: Device, *, kind: Kind, segments: bool, say: Say
) -> dict[Precision, dict[str, Sample]]:
    """List all shapes in the search's precisions, the teacher in fp32 as well, and the anchors."""
    files: dict[tuple[Precision, str], Path] = {}
    with ExitStack() as scratch:
        precisions: dict[Precision, None] = dict.fromkeys((*search.precisions, "fp32"))
        for precision in precisions:
            some = wanted if precision in search.precisions else {"teacher": wanted["teacher"]}
            made = exported(some, search.setting, precision=precision, kind=kind, segments=segments)
            files |= {(precision, name): path for name, path in scratch.enter_context(made).items()}
        files |= {(search.precision, name): path for name, path in _anchors(search).items()}
        by_name = {f"{name} {precision}": path for (precision, name), path in files.items()}
        taken = race(by_name, device, search.setting, rounds=search.rounds, runs=search.runs, say=say)
        found: dict[Precision, dict[str, Sample]] = {}
        for precision, name in files:
            one = taken[f"{name} {precision}"]
            terms = Terms.from_config(wanted[name], search.setting, kind) if name in wanted else Terms({}, 0.0)
            size = files[precision, name].stat().st_size / 1e6
            found.setdefault(precision, {})[name] = Sample(name, terms, one.p50_ms, one.noisy, one.noise, size)
    return found


def choose_within_budget(costs: CostModel, count: int) -> list[Choice]:
    """Return at most `count` shapes that keep the budget, the one with the fewest FLOPs first.

    Three in four of them use much of its latency, where there are such: there the best students are; the others are
    what the rest of the front is of. Raises SearchError, naming the closest, where none keeps it.
    """
    budget = costs.budget()
    by_parts = bool(budget.limits().keys() - {"latency", "score"})
    drawn = costs.shapes.drawn(PRICED_BY_PARTS if by_parts else PRICED, costs.search.seed)
    priced = {
        describe_choice(choice): Priced(
            describe_choice(choice), costs.latency(choice), costs.facts(choice) if by_parts else {}
        )
        for choice in drawn
    }
    fixed = min(model.costs.get("fixed", 0.0) for model in costs.latencies.models.values())
    check_possible(budget, priced, fixed_ms=fixed or None)
    kept = [choice for choice in drawn if _keeps(budget, priced[describe_choice(choice)])]
    banded = [_keeps(budget.banded(), priced[describe_choice(choice)]) for choice in kept]
    used, rest = (
        [choice for choice, inside in zip(kept, banded, strict=True) if inside is want] for want in (True, False)
    )
    least = min(
        kept, key=lambda choice: Terms.from_config(costs.shapes.config(choice), costs.search.setting, costs.kind).flops
    )
    some = used[: max(3 * count // 4, count - len(rest))]
    found = [least, *some, *rest]
    return list({describe_choice(choice): choice for choice in found}.values())[:count]


def _keeps(budget: Budget, one: Priced) -> bool:
    return budget.fits(one.estimate, one.facts) is None


def _bare(choice: Choice) -> Choice:
    return {name: value for name, value in choice.items() if name != "precision"}


def _anchors(search: SearchConfig) -> dict[str, Path]:
    """Return the files of the anchors by name."""
    found = {}
    for anchor in search.anchors:
        bundle = Bundle.load(Path(anchor))
        bundle.check_has(search.precision)
        if anchor in found:
            raise BundleError(f"--anchor {anchor}: is given twice")
        found[anchor] = bundle.path / FILES[search.precision]
    return found
