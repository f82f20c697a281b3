"""The measuring phase: some shapes of a space, the teacher, and what is to be compared, in one race on the device."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn
from transformers import CONFIG_MAPPING

from compress.benchmark.devices import Device
from compress.data.task import Kind
from compress.errors import BundleError, DamagedError, SearchError
from compress.exporters.artifact import FILES, Bundle, Precision
from compress.io import written
from compress.latency.features import Terms
from compress.latency.measure import Sample, choose_spread, exported, race
from compress.latency.predictor import FEWEST, Estimate, Predictor
from compress.models import heads
from compress.models.sharing import share, share_again
from compress.nas.budget import Budget, Priced, check_possible
from compress.nas.config import Search
from compress.nas.space import Choice, Shapes
from compress.records.latency import Setting
from compress.records.search_report import Objective
from compress.slicing.shape import Shape

MATRICES: Final[Mapping[Precision, float]] = MappingProxyType(
    {"fp32": 4.0, "fp16": 2.0, "w8": 1.0 + 4 / 128, "int8": 1.0, "q4": 0.5 + 4.5 / 32}
)
"""Bytes of a number in a matrix or table, what its block's scale takes included; all others take four, fp16 two."""

NODES_MB = 0.025
"""Of the graph itself, for each layer: 0.01 to 0.035 in the files of 40 shapes (BERT, 2 to 6 layers of 128 to 512)."""


@dataclass(frozen=True)
class Facts:
    """Of a shape with its head. body_parameters: without the tables of words, positions and segments; each tied or
    shared weight counts once. file_mb: 10^6 bytes, estimated to a few percent."""

    parameters: int
    body_parameters: int
    flops_per_token: float
    file_mb: float

    def plain(self) -> dict[str, float]:
        """By the names of objectives and limits."""
        return {name: float(getattr(self, name)) for name in ("parameters", "flops_per_token", "file_mb")}


def facts(
    config: Any,
    precision: Precision = "int8",
    *,
    kind: Kind | None = "classification",
    seq: int = 128,
    shared: Mapping[str, int] | None = None,
) -> Facts:
    """Of a transformers config, without any weights, in milliseconds; kept for the next time it is asked.

    shared: how many different attention blocks, or FFNs, its layers use (`students.share`). flops_per_token: in `seq`
    tokens, of the whole model (exact for terms.EXACT families). Raises StudentError for what cannot be shared so.
    """
    key = json.dumps(config.to_dict(), sort_keys=True, default=str)
    total, tables, vectors = _counted(config.model_type, key, kind, tuple(sorted((shared or {}).items())))
    return Facts(
        parameters=total,
        body_parameters=total - tables,
        flops_per_token=Terms.of(config, Setting(seq=seq), kind).flops / seq,
        file_mb=_bytes(total, vectors, precision) / 1e6 + NODES_MB * Shape.of(config).layers,
    )


@lru_cache(maxsize=4096)
def _counted(family: str, text: str, kind: Kind | None, shared: tuple[tuple[str, int], ...]) -> tuple[int, int, int]:
    """Parameters: all, those of tables, those of vectors."""
    config = CONFIG_MAPPING[family].from_dict(json.loads(text))
    with torch.device("meta"):
        model = heads.create(config, "task" if kind else "encoder", kind)
        share_again(model)
        if shared:
            share(model, **dict(shared))
    tables = {id(each.weight): each.weight.numel() for each in model.modules() if isinstance(each, nn.Embedding)}
    sizes = [(each.numel(), each.dim()) for each in model.parameters()]
    return sum(size for size, _ in sizes), sum(tables.values()), sum(size for size, axes in sizes if axes < 2)


def _bytes(total: int, vectors: int, precision: Precision) -> float:
    return (total - vectors) * MATRICES[precision] + vectors * (2 if precision == "fp16" else 4)


DRAWN = 400
"""Shapes among which those to be measured are chosen."""
PRICED, PRICED_BY_PARTS = 2000, 300
"""Shapes that a budget is held against: by latency alone, and where parameters must be counted too."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Clocks:
    """What the device said. predictors: by precision; beside: the teacher's own files and the anchors, by name."""

    predictors: Mapping[Precision, Predictor]
    beside: Mapping[str, Sample]

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for precision, predictor in self.predictors.items():
            predictor.save(folder / f"{precision}.json")
        with written(folder / "beside.json") as partial:
            partial.write_text(json.dumps({name: asdict(each) for name, each in self.beside.items()}, indent=1) + "\n")

    @staticmethod
    def load(folder: Path, precisions: Sequence[Precision]) -> "Clocks | None":
        """Load what `save` kept; None where it did not come to its end. Raises DamagedError."""
        if not (folder / "beside.json").is_file():
            return None
        try:
            beside = TypeAdapter(dict[str, Sample]).validate_json((folder / "beside.json").read_bytes())
        except ValidationError:
            remedy = f"Remove {folder} and repeat the command with --resume: the shapes are measured again"
            raise DamagedError(folder / "beside.json", ["it cannot be read"], remedy) from None
        return Clocks({each: Predictor.from_json(folder / f"{each}.json") for each in precisions}, beside)

    def to_json(self) -> str:
        """For a worker's study: the predictors alone."""
        return json.dumps({precision: each.to_json() for precision, each in self.predictors.items()})

    @staticmethod
    def from_json(text: str) -> "Clocks":
        return Clocks({name: Predictor.from_json(each) for name, each in json.loads(text).items()}, {})

    def teacher(self, precision: Precision) -> Sample | None:
        return self.beside.get(f"teacher {precision}")


@dataclass(frozen=True)
class Costs:
    """What a choice costs, before anything is trained."""

    search: Search
    shapes: Shapes
    clocks: Clocks
    kind: Kind

    def limits(self) -> dict[Objective, float]:
        """Objective -> the most it may be. Raises SearchError for a speed-up over a teacher that was not measured."""
        return self.budget().limits()

    def budget(self) -> Budget:
        """The search's, with a speed-up as the latency it comes to."""
        teacher = self.clocks.teacher(self.search.precision)
        return self.search.budget.with_teacher(teacher.ms if teacher else None)

    def teacher(self) -> Facts:
        """What the teacher itself weighs."""
        return facts(self.shapes.teacher, self.search.precision, kind=self.kind)

    def precision(self, choice: Choice) -> Precision:
        found: Any = choice.get("precision", self.search.precision)
        precision: Precision = found
        return precision

    def latency(self, choice: Choice) -> Estimate:
        return self.clocks.predictors[self.precision(choice)].predict(self.shapes.config(choice))

    def whole(self, choice: Choice) -> Facts:
        shared: Mapping[Any, int] = {} if self.search.space.mode == "supernet" else self.shapes.spec(choice).share
        return facts(self.shapes.config(choice), self.precision(choice), kind=self.kind, shared=shared)

    def facts(self, choice: Choice) -> dict[str, float]:
        found = self.whole(choice)
        return {**found.plain(), "body_parameters": float(found.body_parameters)}


def named(choice: Choice) -> str:
    """`layers 4, hidden 256, heads 8, ffn 768`"""
    return ", ".join(f"{name.removeprefix('config.')} {value}" for name, value in choice.items())


def measure(search: Search, shapes: Shapes, device: Device, *, kind: Kind, segments: bool, say: Say) -> Clocks:
    """`search.shapes` shapes in each precision, the teacher in fp32 and these, and the anchors, all in one race.

    Raises SearchError, DeviceError, ExportError.
    """
    bare = {named(choice): choice for each in shapes.drawn(DRAWN, search.seed) if (choice := _bare(each))}
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
    predictors = {
        precision: Predictor.fit(
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
    for predictor in predictors.values():
        say(predictor.about())
    return Clocks(predictors, beside)


def _raced(
    search: Search, wanted: Mapping[str, Any], device: Device, *, kind: Kind, segments: bool, say: Say
) -> dict[Precision, dict[str, Sample]]:
    """All in the search's precisions, the teacher in fp32 as well, and the anchors."""
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
            terms = Terms.of(wanted[name], search.setting, kind) if name in wanted else Terms({}, 0.0)
            size = files[precision, name].stat().st_size / 1e6
            found.setdefault(precision, {})[name] = Sample(name, terms, one.p50_ms, one.noisy, one.noise, size)
    return found


def within(costs: Costs, count: int) -> list[Choice]:
    """At most `count` shapes that keep the budget, the one with the fewest FLOPs first.

    Three in four of them use much of its latency, where there are such: there the best students are; the others are
    what the rest of the front is of. Raises SearchError, naming the closest, where none keeps it.
    """
    budget = costs.budget()
    by_parts = bool(budget.limits().keys() - {"latency", "score"})
    drawn = costs.shapes.drawn(PRICED_BY_PARTS if by_parts else PRICED, costs.search.seed)
    priced = {
        named(choice): Priced(named(choice), costs.latency(choice), costs.facts(choice) if by_parts else {})
        for choice in drawn
    }
    fixed = min(predictor.costs.get("fixed", 0.0) for predictor in costs.clocks.predictors.values())
    check_possible(budget, priced, fixed_ms=fixed or None)
    kept = [choice for choice in drawn if _keeps(budget, priced[named(choice)])]
    banded = [_keeps(budget.banded(), priced[named(choice)]) for choice in kept]
    used, rest = (
        [choice for choice, inside in zip(kept, banded, strict=True) if inside is want] for want in (True, False)
    )
    least = min(kept, key=lambda choice: Terms.of(costs.shapes.config(choice), costs.search.setting, costs.kind).flops)
    some = used[: max(3 * count // 4, count - len(rest))]
    found = [least, *some, *rest]
    return list({named(choice): choice for choice in found}.values())[:count]


def _keeps(budget: Budget, one: Priced) -> bool:
    return budget.fits(one.estimate, one.facts) is None


def _bare(choice: Choice) -> Choice:
    return {name: value for name, value in choice.items() if name != "precision"}


def _anchors(search: Search) -> dict[str, Path]:
    """The files of the anchors, by what they are called."""
    found = {}
    for anchor in search.anchors:
        bundle = Bundle.load(Path(anchor))
        bundle.check_has(search.precision)
        if anchor in found:
            raise BundleError(f"--anchor {anchor}: is given twice")
        found[anchor] = bundle.path / FILES[search.precision]
    return found
