"""Find the sizes that a model is pruned to, where only its budget is given.

The latencies of a grid of shapes are predicted from a few measured ones. Of those that fill the budget each is cut at
once and compared with the whole model, the best are measured as files, and the one that keeps the budget is taken. The
decision is kept in the run as shape.json: a resumed run reads it from there.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Table
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
from compress.io import write_json
from compress.latency.measure import choose_spread, exported, race
from compress.latency.model import Estimate, ShapeTimer
from compress.models.signals import read
from compress.models.teacher import Teacher
from compress.pruning import importance
from compress.records.latency import Setting
from compress.slicing.cut import slice_model
from compress.slicing.plan import SlicePlan, parameters_of
from compress.slicing.rules import FIRST_IS_OWN
from compress.slicing.select import Importance, choose, counts
from compress.slicing.shape import Shape
from compress.slicing.sizes import OWN_WIDTH, Sizes, resize_config
from compress.training.context import TrainingContext
from compress.training.objective import Objective, find_loss
from compress.training.run import Run, from_first

STEPS = 8
"""Shares of widths, heads and neurons in the grid: eighths of the model's own."""


def shape_grid(config: Any, plan: SlicePlan) -> dict[str, Sizes]:
    """List a grid of shapes by name: every depth, and eighths of every width, with heads of the model's size.

    Where attention is as wide as its stream, stream and heads go together.
    """
    whole = plan.sizes
    together = "hidden" if whole.bottleneck is None else "bottleneck"
    axes: dict[str, Sequence[int]] = {"layers": _depths(plan), "ffn": _shares(whole.ffn), "heads": _shares(whole.heads)}
    if config.model_type in OWN_WIDTH:
        axes["hidden"] = _shares(whole.hidden)
    found = {}
    for chosen in product(*axes.values()):
        wanted: dict[str, int] = dict(zip(axes, chosen, strict=True))
        if config.model_type not in OWN_WIDTH:
            wanted[together] = wanted["heads"] * whole.head_size
        try:
            sizes = Sizes.from_request(config, **wanted)
        except PruneError:  # a grid asks for more than there is
            continue
        found[str(sizes)] = sizes
    return found


def largest_shapes(shapes: Mapping[str, Sizes]) -> Iterator[str]:
    """Yield the shapes that no other one contains: of shapes within a budget, these fill it."""
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


def last_terms(recipe: Recipe, kind: Kind | None) -> list[Term]:
    """Return the terms of the recipe's last objective that read logits, which say what students answer in the end."""
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
    """Compute the mean loss of each shape on `rows`, with `model` as the teacher.

    layers: the rule by which layers stay; None: the most important.
    """
    plan, shape = SlicePlan.from_model(model), Shape.from_config(model.config)
    objective = Objective(terms, shape, shape, kind=kind)
    order = np.argsort(np.asarray(rows["length"][:]), kind="stable")  # rows of like lengths together
    parts = [collate([rows[int(i)] for i in order[at : at + BATCH]]) for at in range(0, len(order), BATCH)]
    batches = [{name: tensor.to(model.device) for name, tensor in part.items()} for part in parts]
    shown = [read(model, batch, frozenset({"logits"})) for batch in batches]
    found = {}
    for name, sizes in shapes.items():
        small, total = slice_model(model, choose(plan, rated, sizes, layers=layers)).eval(), 0.0
        for batch, teacher in zip(batches, shown, strict=True):
            loss = objective(read(small, batch, objective.student_wants), teacher, batch)["total"]
            total += len(batch["input_ids"]) * float(loss)
        found[name] = total / len(rows)
    return found


def count_parameters(model: PreTrainedModel, plan: SlicePlan, sizes: Sizes) -> int:
    """Count the parameters that the slice of this model would have, without cutting it."""
    left: dict[Any, int] = {**counts(plan, sizes), **dict.fromkeys(plan.heads, sizes.attention)}
    left |= dict.fromkeys(plan.heads.values(), sizes.heads)
    each = {id(tensor): (name, tensor) for name, tensor in parameters_of(model).items()}  # tied ones once
    total = 0.0
    for name, tensor in each.values():
        dims = list(tensor.shape)
        for part in plan.cuts[name].slices:
            width = dims[part.dim] // sum(plan.groups[group] for group in part.groups)
            dims[part.dim] = width * sum(left.get(group, plan.groups[group]) for group in part.groups)
        layer, first = plan.cuts[name].layer, int(plan.family in FIRST_IS_OWN)  # which stays, and differs from the rest
        alone = layer is None or layer < first
        share = 1 if alone else (sizes.layers - first) / (plan.sizes.layers - first)
        total += math.prod(dims) * share
    return round(total)


NAME = "shape.json"
MARGIN = 1.02
"""A shape is to be this many times faster than asked before it is trained: two measurements differ by that much."""
ATTEMPTS = 3
"""Shapes that are trained at most, each smaller than the one before it, whose file was too slow."""
WHOLE, SHIPPED = "the whole model", "the shipped file"


@dataclass(frozen=True)
class ShapeCandidate:
    """A shape that fills the budget.

    loss: of the model cut to it at once, before any training; ms: of its file with random weights, None if not measured
    """

    name: str
    sizes: Mapping[str, int]
    parameters: int
    loss: float
    predicted_ms: float | None = None
    error_ms: float | None = None
    ms: float | None = None


@dataclass(frozen=True)
class Decision:
    """The budget, the candidates, and the one that is taken.

    where       device, setting and precision of all times; None for a budget that does not limit time
    limit_ms    the most that one forward may take; whole_ms: what the unpruned model's file of that precision takes
    margin      by which the shape was to be faster than that
    shipped_ms  what the file that ships takes, once there is one; noisy: the machine was too busy to tell
    """

    budget: Mapping[str, float]
    where: str | None
    chosen: ShapeCandidate
    candidates: tuple[ShapeCandidate, ...]
    limit_ms: float | None = None
    whole_ms: float | None = None
    margin: float = MARGIN
    shipped_ms: float | None = None
    noisy: bool = False

    @property
    def over(self) -> float:
        """Return how many times longer than asked the file that ships takes; 1 where it keeps that, or is not known."""
        if self.shipped_ms is None or self.limit_ms is None or self.noisy:
            return 1.0
        return max(1.0, self.shipped_ms / self.limit_ms)

    @staticmethod
    def read(file: Path) -> "Decision":
        """Read what `io.write_json` wrote."""
        return TypeAdapter(Decision).validate_json(file.read_bytes())

    def table(self) -> Table:
        """Render the candidates, the nearest to the whole model's answers first."""
        caption = "Loss as cut: against the whole model's answers, before any training."
        if self.where is not None:
            caption += f" {self.where}: at most {self.limit_ms:.3g} ms."
        table = Table(title="Shapes that fill the budget", box=None, pad_edge=False, caption=caption)
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

    def verdict(self) -> str:
        """Say whether the file that ships keeps the latency that was asked for."""
        assert self.shipped_ms is not None and self.limit_ms is not None and self.whole_ms is not None
        faster = f"{self.shipped_ms:.3g} ms on {self.where}, {self.whole_ms / self.shipped_ms:.2f} times as fast as "
        over = self.shipped_ms / self.limit_ms - 1
        kept = (
            f"within {self.limit_ms:.3g} ms" if over <= 0 else f"{over:.1%} OVER the {self.limit_ms:.3g} ms asked for"
        )
        return f"budget: {faster}the unpruned model: {kept}"


def device_messages(device: str, console: Console) -> Callable[[str], None]:
    """Print what a device says where the user has something to do there: not on this machine, nor over ssh."""
    if device.partition(":")[0] in ("local", "ssh"):
        return lambda _: None
    return partial(console.print, highlight=False, markup=False, soft_wrap=True)


def budget_setting(recipe: Recipe) -> Setting:
    """Return the setting at which the target's latencies are measured."""
    target = recipe.target
    return Setting(target.threads, target.batch, target.seq or recipe.stages[-1].max_length)


def resolve_budget(recipe: Recipe, task_teacher: Teacher, context: TrainingContext, run: Run) -> Iterator[Recipe]:
    """Yield the recipe with sizes in place of its budget, where it has one.

    Where `check_budget` has then found that what ships is slower than asked, yield it again with smaller ones, in
    stages of their own. Raises PruneError if no shape keeps the budget.
    """
    if not recipe.pruning or not recipe.target.budgets:
        yield recipe
        return
    margin = MARGIN
    if recipe.target.limits_time:  # a further attempt needs the weights that training casts
        task_teacher = replace(task_teacher, model=copy.deepcopy(task_teacher.model))
    for attempt in range(1, ATTEMPTS + 1):
        decision = _decide(recipe, task_teacher, context, run, attempt=attempt, margin=margin)
        if decision is None:
            return
        if decision.over == 1 or attempt == ATTEMPTS:  # else an earlier process of this run has measured it
            yield _with_sizes(recipe, decision, attempt, context.console)
            decision = from_first(partial(Decision.read, _file(run, attempt)))
        if decision.over == 1:
            return
        margin *= decision.over


def _decide(
    recipe: Recipe, task_teacher: Teacher, context: TrainingContext, run: Run, *, attempt: int, margin: float
) -> Decision | None:
    """Read or make the decision of an attempt; None where a further one finds nothing smaller."""
    file = _file(run, attempt)
    if not from_first(file.is_file):
        found = None
        try:
            found = decide(recipe, task_teacher, context, run, margin)
        except PruneError as error:
            if attempt == 1:
                raise
            print_note(context.console, str(error))
        if found is not None:  # on the first process
            write_json(file, asdict(found))
            context.console.print(found.table())
    return from_first(lambda: Decision.read(file) if file.is_file() else None)


def _with_sizes(recipe: Recipe, decision: Decision, attempt: int, console: Console) -> Recipe:
    sizes = {name: count for name, count in decision.chosen.sizes.items() if name != "head_size"}
    console.print(f"pruning to {decision.chosen.name}", highlight=False)
    stages = recipe.stages
    if attempt > 1:
        suffix = recipe.free_suffix(f"-{attempt}")
        stages = tuple(each.model_copy(update={"name": each.name + suffix}) for each in stages)
    return recipe.model_copy(update={"target": Target.model_validate(sizes), "stages": stages})


def _file(run: Run, attempt: int) -> Path:
    return run.path / (NAME if attempt == 1 else f"shape-{attempt}.json")


def check_budget(bundle: Bundle, recipe: Recipe, task_teacher: Teacher, context: TrainingContext, run: Run) -> None:
    """Measure the file that ships, in turns with the unpruned model's, and say whether it keeps the recipe's budget."""
    target = recipe.target
    if not target.limits_time:
        return
    file = next(file for attempt in range(ATTEMPTS, 0, -1) if (file := _file(run, attempt)).is_file())
    decision = Decision.read(file)
    segments = makes_segments(context.tokenizer)
    with (
        open_device(target.device, say=device_messages(target.device, context.console)) as device,
        exported(
            {WHOLE: task_teacher.model.config}, budget_setting(recipe),
            precision=target.precision, kind=context.kind, segments=segments,
        ) as files,
    ):  # fmt: skip
        found = race({**files, SHIPPED: bundle.files()[target.precision]}, device, budget_setting(recipe))
    shipped_ms, whole_ms = found[SHIPPED].p50_ms, found[WHOLE].p50_ms
    limit_ms = decision.limit_ms if target.speedup is None else whole_ms / target.speedup  # as the machine is now
    noisy = any(each.noisy for each in found.values())
    decision = replace(decision, shipped_ms=shipped_ms, whole_ms=whole_ms, limit_ms=limit_ms, noisy=noisy)
    write_json(file, asdict(decision))
    bundle.attach(NAME, file.read_text(encoding="utf-8"))
    context.console.print(decision.verdict(), highlight=False)
    for each in found.values():
        if each.noisy:
            print_note(context.console, f"{each.name}: {each.noise}")


SHORTLISTED = 24
"""Shapes that are cut, and compared with the whole model."""
FINALISTS = 4
"""Shapes whose files are measured before the training."""


def decide(
    recipe: Recipe, task_teacher: Teacher, context: TrainingContext, run: Run, margin: float = MARGIN
) -> Decision | None:
    """Find the shape that keeps the recipe's budget and answers most as `task_teacher` does, on the first process only.

    margin: how many times faster than the limit it is to be. Raises PruneError for a budget that nothing keeps, or that
    the model itself keeps.
    """
    stage, target = recipe.pruning[0], recipe.target
    model = task_teacher.model.to(PartialState().device)
    rows = context.sample(stage.data, stage.max_length, stage.rows, run.seed)
    rated = importance.compute_importance(
        stage.importance, model, SlicePlan.from_model(model), rows, context.collate,
        batch=stage.batch, teacher=task_teacher, bf16=context.bf16, console=context.console,
    )  # fmt: skip
    if not run.main:
        return None
    with ExitStack() as opened:
        timer = None
        if target.limits_time:
            say = partial(context.console.print, highlight=False, markup=False, soft_wrap=True)
            device = opened.enter_context(
                open_device(target.device, say=device_messages(target.device, context.console))
            )
            segments = makes_segments(context.tokenizer)
            timer = ShapeTimer(device, budget_setting(recipe), target.precision, context.kind, segments, say)
        return _ShapeSearch(recipe, task_teacher, context, rated, rows, timer, margin).decide()


@dataclass(frozen=True)
class _ShapeSearch:
    """The search among a grid of shapes; `timer` is None where the budget does not limit time."""

    recipe: Recipe
    task_teacher: Teacher
    context: TrainingContext
    rated: Importance
    rows: Dataset
    timer: ShapeTimer | None
    margin: float

    def decide(self) -> Decision:
        target, name, timer = self.recipe.target, self.task_teacher.name, self.timer
        if timer is None:
            if self.plan.sizes in self.shapes.values():
                raise PruneError(f"max_params: {name} itself has no more: there is nothing to prune")
            ranked = self._rank(self.shapes)
            return Decision(target.budgets, None, ranked[0], tuple(ranked))
        whole_ms = timer.measure({WHOLE: self.task_teacher.model.config})[WHOLE]
        limit = target.max_latency_ms if target.speedup is None else whole_ms / target.speedup
        assert limit is not None, "one of the two is given"
        if whole_ms <= limit and target.max_params is None:
            raise PruneError(
                f"max_latency_ms {limit:g}: {name} itself takes {whole_ms:.3g} ms on {timer.about}: there is nothing "
                "to prune"
            )
        aim = limit / self.margin
        found = self._race(timer, aim)
        if not (keeping := [each for each in found if each.ms is not None and each.ms <= aim]):
            over = min(each.ms / aim for each in found if each.ms is not None)
            if any(each.ms <= aim / over for each in self.estimates.values()):
                self.context.console.print(
                    f"Measured latency is {over - 1:.0%} above the prediction; trying smaller shapes"
                )
                both = sorted([*found, *self._race(timer, aim / over)], key=lambda each: each.ms is not None)
                found = sorted({each.name: each for each in both}.values(), key=lambda each: each.loss)
                keeping = [each for each in found if each.ms is not None and each.ms <= aim]
        chosen = keeping[0] if keeping else min(found, key=lambda each: math.inf if each.ms is None else each.ms)
        if not keeping:
            print_note(
                self.context.console,
                f"no measured shape takes {limit:.3g} ms; the fastest, {chosen.name}, is taken, which takes "
                f"{chosen.ms:.3g} ms",
            )
        return Decision(target.budgets, timer.about, chosen, tuple(found), limit, whole_ms, self.margin)

    @cached_property
    def plan(self) -> SlicePlan:
        return SlicePlan.from_model(self.task_teacher.model)

    @cached_property
    def parameters(self) -> dict[str, int]:
        """The number of parameters of every shape of the grid."""
        grid = shape_grid(self.task_teacher.model.config, self.plan)
        return {name: count_parameters(self.task_teacher.model, self.plan, sizes) for name, sizes in grid.items()}

    @cached_property
    def shapes(self) -> dict[str, Sizes]:
        """The shapes of the grid that have few enough parameters."""
        grid, limit = shape_grid(self.task_teacher.model.config, self.plan), self.recipe.target.max_params
        within = {name: sizes for name, sizes in grid.items() if limit is None or self.parameters[name] <= limit}
        if not within:
            least = min(self.parameters, key=lambda name: self.parameters[name])
            raise PruneError(
                f"max_params {limit:,}: the least that can be left of {self.task_teacher.name} has "
                f"{self.parameters[least]:,} ({least}). Its tokens are never pruned: `compress trim` shortens their "
                "table"
            )
        return within

    @cached_property
    def configs(self) -> dict[str, Any]:
        return {name: resize_config(self.task_teacher.model.config, sizes) for name, sizes in self.shapes.items()}

    @cached_property
    def estimates(self) -> Mapping[str, Estimate]:
        return {} if self.timer is None else self.timer.predict(self.configs)

    def _race(self, timer: ShapeTimer, limit: float) -> list[ShapeCandidate]:
        """Rank the shapes that are predicted to fill `limit`, and measure the first of them."""
        fits = {name: self.shapes[name] for name, each in self.estimates.items() if each.ms <= limit}
        if not fits:
            least = min(self.estimates, key=lambda name: self.estimates[name].ms)
            asked = f"{', '.join(self.recipe.target.budgets)}: no shape of {self.task_teacher.name}"
            raise PruneError(
                f"{asked} takes {limit * self.margin:.3g} ms on {timer.about}. The nearest, {least}, takes about "
                f"{self.estimates[least].ms:.3g} ms: ask for no less than that, or for fewer tokens (seq)"
            )
        ranked = self._rank(fits)
        measured = timer.measure({each.name: self.configs[each.name] for each in ranked[:FINALISTS]})
        return [replace(each, ms=measured.get(each.name)) for each in ranked]

    def _rank(self, fits: Mapping[str, Sizes]) -> list[ShapeCandidate]:
        """Cut the model to the largest of the shapes, spread far apart, and sort them by their loss against it."""
        names = list(largest_shapes(fits))
        if len(names) > SHORTLISTED:
            names = choose_spread(
                {name: self.configs[name] for name in names}, SHORTLISTED, budget_setting(self.recipe)
            )
        self.context.console.print(f"cutting {len(names)} shapes that fill the budget, to compare their answers")
        found = losses(
            self.task_teacher.model, {name: fits[name] for name in names}, self.rated, self.rows, self.context.collate,
            layers=self.recipe.pruning[-1].rule, terms=last_terms(self.recipe, self.context.kind),
            kind=self.context.kind,
        )  # fmt: skip
        ranked = []
        for name in sorted(names, key=lambda each: found[each]):
            estimate = self.estimates.get(name)
            times = (None, None) if estimate is None else (estimate.ms, estimate.error_ms)
            ranked.append(ShapeCandidate(name, fits[name].plain(), self.parameters[name], found[name], *times))
        return ranked
