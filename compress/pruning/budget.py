"""From a budget to sizes: which shape a model is pruned to, where only what it may cost is said.

Shapes of a grid are predicted from a few measured ones, or counted; of those that fill the budget each is cut at once
and asked (`shortlist`), the best are measured as files, and the one that keeps the budget is taken. What was decided,
and from what, is kept in the run as shape.json: a resumed run decides nothing anew.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from compress.benchmark.devices import open_device
from compress.config.recipe import Recipe, Target
from compress.config.term import Term
from compress.console import print_note
from compress.data.collate import Batching
from compress.data.task import Kind
from compress.errors import PruneError
from compress.exporters.artifact import Bundle
from compress.exporters.onnx import makes_segments
from compress.io import written
from compress.latency.measure import choose_spread, exported, race
from compress.latency.predictor import Estimate
from compress.latency.shapes import Clock
from compress.models.signals import Signals, read
from compress.models.teacher import Teacher
from compress.pruning import importance
from compress.pruning.stage import calibration
from compress.records.latency import Setting
from compress.slicing.cut import sliced
from compress.slicing.plan import SlicePlan, parameters_of
from compress.slicing.select import Importance, choose, counts
from compress.slicing.shape import Shape
from compress.slicing.sizes import Sizes, resized
from compress.training.context import TrainingContext
from compress.training.objective import Objective, find_loss
from compress.training.run import Run

STEPS = 8
"""Shares of widths, heads and neurons in the grid: eighths of the model's own."""


def smaller(config: Any, plan: SlicePlan) -> dict[str, Sizes]:
    """Every depth, and eighths of every width, of heads as large as the model's, by what they are called.

    Where attention is as wide as its stream, stream and heads go together.
    """
    whole = plan.sizes
    together = "hidden" if whole.bottleneck is None else "bottleneck"
    axes: dict[str, Sequence[int]] = {"layers": _depths(plan), "ffn": _shares(whole.ffn), "heads": _shares(whole.heads)}
    if config.model_type == "t5":
        axes["hidden"] = _shares(whole.hidden)
    found = {}
    for chosen in product(*axes.values()):
        wanted: dict[str, int] = dict(zip(axes, chosen, strict=True))
        if config.model_type != "t5":
            wanted[together] = wanted["heads"] * whole.head_size
        try:
            sizes = Sizes.asked(config, **wanted)
        except PruneError:  # a grid asks for more than there is
            continue
        found[str(sizes)] = sizes
    return found


def largest(shapes: Mapping[str, Sizes]) -> Iterator[str]:
    """Those that no other one is at least as large as in every size: of shapes within a budget, they fill it."""
    for name, sizes in shapes.items():
        if not any(other != sizes and sizes.within(other) for other in shapes.values()):
            yield name


def _depths(plan: SlicePlan) -> Sequence[int]:
    whole = plan.sizes.layers
    if not plan.own_layers and len(plan.blocks("ffn")) > 1:
        return [whole]
    step = max(1, whole // 12)
    return [*range(step, whole, step), whole]


def _shares(whole: int) -> list[int]:
    return sorted({max(1, round(whole * step / STEPS)) for step in range(1, STEPS + 1)})


BATCH = 32


def last_words(recipe: Recipe, kind: Kind | None) -> list[Term]:
    """The part of the recipe's last objective that reads logits: what its students are to answer in the end."""
    for stage in reversed(recipe.training):
        terms = [term for term in stage.objective if term.serves(kind) and find_loss(term).reading.signal == "logits"]
        if terms:
            return terms
    raise PruneError(f"{recipe.name}: no objective reads logits, by which a budget could choose a shape; give sizes")


@torch.inference_mode()
def losses(
    model: PreTrainedModel,
    shapes: Mapping[str, Sizes],
    rated: Importance,
    rows: Dataset,
    collate: Batching,
    *,
    layers: str | None,
    terms: Sequence[Term],
    kind: Kind | None,
) -> dict[str, float]:
    """The mean loss of each shape on `rows`, with `model` as the teacher.

    layers: the rule by which they stay; None: the most important.
    """
    plan, shape = SlicePlan.of(model), Shape.of(model.config)
    objective = Objective(terms, shape, shape, kind=kind)
    batches = _batches(rows, collate, model.device)
    shown = [read(model, batch, frozenset({"logits"})) for batch in batches]
    found = {}
    for name, sizes in shapes.items():
        small = sliced(model, choose(plan, rated, sizes, layers=layers)).eval()
        found[name] = _mean(small, objective, batches, shown)
    return found


def parameters(model: PreTrainedModel, plan: SlicePlan, sizes: Sizes) -> int:
    """How many parameters the slice of this model would have, without cutting it."""
    left: dict[Any, int] = {**counts(plan, sizes), **dict.fromkeys(plan.heads, sizes.attention)}
    left |= dict.fromkeys(plan.heads.values(), sizes.heads)
    each = {id(tensor): (name, tensor) for name, tensor in parameters_of(model).items()}  # tied ones once
    total = 0.0
    for name, tensor in each.values():
        dims = list(tensor.shape)
        for part in plan.cuts[name].slices:
            dims[part.dim] = sum(left.get(group, plan.groups[group]) for group in part.groups)
        share = sizes.layers / plan.sizes.layers if plan.cuts[name].layer is not None else 1
        total += math.prod(dims) * share
    return round(total)


def _batches(rows: Dataset, collate: Batching, device: Any) -> list[dict[str, Tensor]]:
    """Rows of like lengths together."""
    order = np.argsort(np.asarray(rows["length"][:]), kind="stable")
    parts = (order[at : at + BATCH] for at in range(0, len(order), BATCH))
    return [{k: v.to(device) for k, v in collate([rows[int(i)] for i in part]).items()} for part in parts]


def _mean(
    model: PreTrainedModel, objective: Objective, batches: Sequence[dict[str, Tensor]], shown: Sequence[Signals]
) -> float:
    total, seen = 0.0, 0
    for batch, teacher in zip(batches, shown, strict=True):
        size = len(batch["input_ids"])
        parts = objective(read(model, batch, objective.student_wants), teacher, batch)
        total, seen = total + size * float(parts["total"]), seen + size
    return total / seen


NAME = "shape.json"
WHOLE, SHIPPED = "the whole model", "the shipped file"


@dataclass(frozen=True)
class Candidate:
    """A shape that fills the budget. loss: of the model cut to it at once, before any training; ms: of its file, with
    random weights; None: not measured."""

    name: str
    sizes: Mapping[str, int]
    parameters: int
    loss: float
    predicted_ms: float | None = None
    error_ms: float | None = None
    ms: float | None = None


@dataclass(frozen=True)
class Decision:
    """What was asked, what was found, what is taken.

    where      device, setting and precision of all times; None: nothing was said of time
    limit_ms   what one forward may take; whole_ms: what the unpruned model's takes, as a file of that precision
    shipped_ms of the file that ships, once there is one
    """

    budget: Mapping[str, float]
    where: str | None
    chosen: Candidate
    candidates: tuple[Candidate, ...]
    limit_ms: float | None = None
    whole_ms: float | None = None
    shipped_ms: float | None = None

    @staticmethod
    def read(file: Path) -> "Decision":
        tree = json.loads(file.read_text(encoding="utf-8"))
        candidates = tuple(Candidate(**each) for each in tree["candidates"])
        return Decision(**{**tree, "chosen": Candidate(**tree["chosen"]), "candidates": candidates})

    def write(self, file: Path) -> None:
        with written(file) as partial:
            partial.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    def table(self) -> Table:
        """The candidates, the nearest to the whole model's answers first."""
        table = Table(title="Shapes that fill the budget", box=None, pad_edge=False, caption=self._caption())
        sizes = [name for name in self.chosen.sizes if name != "head_size"]
        for name in (*sizes, "params", "predicted", "measured", "loss as cut"):
            table.add_column(name, justify="right")
        for each in self.candidates:
            predicted = "" if each.predicted_ms is None else f"{each.predicted_ms:.3g} ± {each.error_ms:.1g} ms"
            table.add_row(
                *(str(each.sizes[name]) for name in sizes),
                f"{each.parameters / 1e6:.2f} M",
                predicted,
                "" if each.ms is None else f"{each.ms:.3g} ms",
                f"{each.loss:.4f}",
                style="bold" if each.name == self.chosen.name else "",
            )
        return table

    def _caption(self) -> str:
        said = "Loss as cut: against the whole model's answers, before any training."
        return said if self.where is None else f"{said} {self.where}: at most {self.limit_ms:.3g} ms."

    def verdict(self) -> str:
        """Whether the file that ships keeps what was asked of time, in words."""
        assert self.shipped_ms is not None and self.limit_ms is not None and self.whole_ms is not None
        faster = f"{self.shipped_ms:.3g} ms on {self.where}, {self.whole_ms / self.shipped_ms:.2f} times as fast as "
        over = self.shipped_ms / self.limit_ms - 1
        kept = (
            f"within {self.limit_ms:.3g} ms" if over <= 0 else f"{over:.1%} OVER the {self.limit_ms:.3g} ms asked for"
        )
        return f"budget: {faster}the unpruned model: {kept}"


def to_the_user(device: str, console: Console) -> Callable[[str], None]:
    """What a device says, which matters where the user has something to do: not of this machine, nor over ssh."""
    if device.partition(":")[0] in ("local", "ssh"):
        return lambda _: None
    return partial(console.print, highlight=False, markup=False, soft_wrap=True)


def setting_of(recipe: Recipe) -> Setting:
    """At which the target's times are measured."""
    target = recipe.target
    return Setting(target.threads, target.batch, target.seq or recipe.stages[-1].max_length)


def resolve_budget(recipe: Recipe, task_teacher: Teacher, context: TrainingContext, run: Run) -> Recipe:
    """Return the recipe with sizes in place of its budget, where it has one. Raises PruneError if no shape keeps it."""
    if not recipe.pruning or not recipe.target.budgets:
        return recipe
    file = run.path / NAME
    decided = file.is_file()
    PartialState().wait_for_everyone()
    if not decided:
        found = decide(recipe, task_teacher, context, run)
        if run.main:
            assert found is not None, "the first process decides"
            found.write(file)
            context.console.print(found.table())
    PartialState().wait_for_everyone()
    chosen = Decision.read(file).chosen
    sizes = {name: count for name, count in chosen.sizes.items() if name != "head_size"}
    context.console.print(f"pruning to {chosen.name}", highlight=False)
    return recipe.model_copy(update={"target": Target.model_validate(sizes)})


def check_budget(bundle: Bundle, recipe: Recipe, task_teacher: Teacher, context: TrainingContext, run: Run) -> None:
    """Measure the file that ships, in turns with the unpruned model's, and say whether it keeps the recipe's budget."""
    target, file = recipe.target, run.path / NAME
    if target.max_latency_ms is None and target.speedup is None:
        return
    decision = Decision.read(file)
    segments = makes_segments(context.tokenizer)
    with (
        open_device(target.device, say=to_the_user(target.device, context.console)) as device,
        exported(
            {WHOLE: task_teacher.model.config}, setting_of(recipe),
            precision=target.precision, kind=context.kind, segments=segments,
        ) as files,
    ):  # fmt: skip
        found = race({**files, SHIPPED: bundle.files()[target.precision]}, device, setting_of(recipe))
    shipped_ms, whole_ms = found[SHIPPED].p50_ms, found[WHOLE].p50_ms
    limit_ms = decision.limit_ms if target.speedup is None else whole_ms / target.speedup  # as the machine is now
    decision = replace(decision, shipped_ms=shipped_ms, whole_ms=whole_ms, limit_ms=limit_ms)
    decision.write(file)
    bundle.attach(NAME, file.read_text(encoding="utf-8"))
    context.console.print(decision.verdict(), highlight=False)
    for each in found.values():
        if each.noisy:
            print_note(context.console, f"{each.name}: {each.noise}")


SHORTLISTED = 24
"""Shapes that are cut and asked."""
FINALISTS = 4
"""Shapes whose files are measured before the training."""


def decide(recipe: Recipe, task_teacher: Teacher, context: TrainingContext, run: Run) -> Decision | None:
    """The shape that keeps the recipe's budget and answers most as `task_teacher` does; on the first process only.

    Raises PruneError for a budget that nothing keeps, or that the model itself keeps.
    """
    stage, target = recipe.pruning[0], recipe.target
    model = task_teacher.model.to(PartialState().device)
    rows = calibration(stage, context, run.seed)
    rated = importance.of(
        stage.importance, model, SlicePlan.of(model), rows, context.collate,
        batch=stage.batch, teacher=task_teacher, bf16=context.bf16, console=context.console,
    )  # fmt: skip
    if not run.main:
        return None
    with ExitStack() as opened:
        clock = None
        if target.max_latency_ms is not None or target.speedup is not None:
            say = partial(context.console.print, highlight=False, markup=False, soft_wrap=True)
            device = opened.enter_context(open_device(target.device, say=to_the_user(target.device, context.console)))
            segments = makes_segments(context.tokenizer)
            clock = Clock(device, setting_of(recipe), target.precision, context.kind, segments, say)
        return _Choice(recipe, task_teacher, context, rated, rows, clock).decide()


@dataclass(frozen=True)
class _Choice:
    """`clock` is None where the budget says nothing of time."""

    recipe: Recipe
    task_teacher: Teacher
    context: TrainingContext
    rated: Importance
    rows: Dataset
    clock: Clock | None

    def decide(self) -> Decision:
        if self.clock is None:
            if self.plan.sizes in self.shapes.values():
                raise PruneError(f"max_params: {self.task_teacher.name} itself has no more: there is nothing to prune")
            ranked = self._ranked(self._largest(self.shapes))
            return self._decision(ranked, ranked[0])
        limit, whole_ms = self._limit(self.clock)
        found = self._raced(self.clock, limit)
        if not _keeping(found, limit):
            over = min(each.ms / limit for each in found if each.ms is not None)
            if any(each.ms <= limit / over for each in self.estimates.values()):
                self.context.console.print(f"the files take {over - 1:.0%} more than predicted: now smaller shapes")
                found = _both(found, self._raced(self.clock, limit / over))
        measured = [each for each in found if each.ms is not None]
        keeping = _keeping(found, limit)
        chosen = keeping[0] if keeping else min(measured, key=lambda each: each.ms or 0.0)
        if not keeping:
            print_note(
                self.context.console,
                f"no measured shape takes {limit:.3g} ms; the fastest, {chosen.name}, is taken, which takes "
                f"{chosen.ms:.3g} ms",
            )
        return replace(self._decision(found, chosen), limit_ms=limit, whole_ms=whole_ms)

    @cached_property
    def plan(self) -> SlicePlan:
        return SlicePlan.of(self.task_teacher.model)

    @cached_property
    def counted(self) -> dict[str, int]:
        """Parameters of every shape of the grid."""
        found = smaller(self.task_teacher.model.config, self.plan)
        return {name: parameters(self.task_teacher.model, self.plan, sizes) for name, sizes in found.items()}

    @cached_property
    def shapes(self) -> dict[str, Sizes]:
        """Those of the grid that have few enough parameters."""
        found, limit = smaller(self.task_teacher.model.config, self.plan), self.recipe.target.max_params
        within = {name: sizes for name, sizes in found.items() if limit is None or self.counted[name] <= limit}
        if not within:
            least = min(self.counted, key=lambda name: self.counted[name])
            raise PruneError(
                f"max_params {limit:,}: the least that can be left of {self.task_teacher.name} has "
                f"{self.counted[least]:,} ({least}). Its tokens are never pruned: `compress trim` shortens their table"
            )
        return within

    @cached_property
    def configs(self) -> dict[str, Any]:
        return {name: resized(self.task_teacher.model.config, sizes) for name, sizes in self.shapes.items()}

    @cached_property
    def estimates(self) -> Mapping[str, Estimate]:
        return {} if self.clock is None else self.clock.predicted(self.configs)

    def _limit(self, clock: Clock) -> tuple[float, float]:
        """What one forward may take, and what the unpruned model's takes, in ms."""
        target = self.recipe.target
        whole_ms = clock.measured({WHOLE: self.task_teacher.model.config})[WHOLE]
        limit = target.max_latency_ms if target.speedup is None else whole_ms / target.speedup
        assert limit is not None, "one of the two is given"
        if whole_ms <= limit and target.max_params is None:
            raise PruneError(
                f"max_latency_ms {limit:g}: {self.task_teacher.name} itself takes {whole_ms:.3g} ms on {clock.about}: "
                "there is nothing to prune"
            )
        return limit, whole_ms

    def _raced(self, clock: Clock, limit: float) -> list[Candidate]:
        """The shapes that are predicted to fill `limit`, ranked, the first of them measured."""
        fits = {name: self.shapes[name] for name, each in self.estimates.items() if each.ms <= limit}
        if not fits:
            least = min(self.estimates, key=lambda name: self.estimates[name].ms)
            raise PruneError(
                f"{', '.join(self.recipe.target.budgets)}: no shape of {self.task_teacher.name} takes {limit:.3g} ms "
                f"on {clock.about}. The nearest, {least}, takes about {self.estimates[least].ms:.3g} ms: ask for no "
                "less than that, or for fewer tokens (seq)"
            )
        ranked = self._ranked(self._largest(fits))
        measured = clock.measured({each.name: self.configs[each.name] for each in ranked[:FINALISTS]})
        return [replace(each, ms=measured.get(each.name)) for each in ranked]

    def _largest(self, fits: Mapping[str, Sizes]) -> list[str]:
        """Those that fill the budget; of many, such as lie far apart."""
        names = list(largest(fits))
        if len(names) <= SHORTLISTED:
            return names
        return choose_spread({name: self.configs[name] for name in names}, SHORTLISTED, setting_of(self.recipe))

    def _ranked(self, names: Iterable[str]) -> list[Candidate]:
        """Each cut and asked, the nearest to the whole model's answers first."""
        chosen = {name: self.shapes[name] for name in names}
        self.context.console.print(f"cutting {len(chosen)} shapes that fill the budget, to see what each answers")
        found = losses(
            self.task_teacher.model, chosen, self.rated, self.rows, self.context.collate,
            layers=self.recipe.pruning[-1].rule, terms=last_words(self.recipe, self.context.kind),
            kind=self.context.kind,
        )  # fmt: skip
        ranked = []
        for name in sorted(chosen, key=lambda each: found[each]):
            estimate = self.estimates.get(name)
            times = (None, None) if estimate is None else (estimate.ms, estimate.error_ms)
            ranked.append(Candidate(name, chosen[name].plain(), self.counted[name], found[name], *times))
        return ranked

    def _decision(self, found: list[Candidate], chosen: Candidate) -> Decision:
        target = self.recipe.target
        where = None if self.clock is None else self.clock.about
        return Decision(target.budgets, where, chosen, tuple(found))


def _both(one: Iterable[Candidate], other: Iterable[Candidate]) -> list[Candidate]:
    """Each shape once, measured where it was, ranked."""
    measured_last = sorted((*one, *other), key=lambda each: each.ms is not None)
    return sorted({each.name: each for each in measured_last}.values(), key=lambda each: each.loss)


def _keeping(found: Iterable[Candidate], limit: float) -> list[Candidate]:
    return [each for each in found if each.ms is not None and each.ms <= limit]
