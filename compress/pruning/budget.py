"""Find the sizes that a model is pruned to from its budget.

The latencies of a grid of shapes are predicted from a few measured ones. The model is
cut to shapes that fill the budget and compared with its unpruned self, the best are
measured as files, and the best one within the budget is chosen. The decision is kept in
the run as shape.json, from which a resumed run reads it.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Table

from compress.benchmark.devices import open_device
from compress.config.recipe import Recipe, Target
from compress.console import plain_printer, print_note, warn
from compress.errors import PruneError
from compress.exporters.artifact import Bundle
from compress.exporters.onnx import makes_segments
from compress.io import write_json
from compress.latency.measure import exported, race
from compress.latency.model import Estimate, ShapeTimer, keep_within
from compress.models.teacher import Teacher
from compress.progress import Say
from compress.pruning.shapes import CutModel, count_parameters, shape_grid
from compress.records.latency import Latency, Setting
from compress.slicing.plan import SlicePlan
from compress.slicing.sizes import Sizes, resize_config
from compress.training.context import TrainingContext
from compress.training.processes import from_first
from compress.training.run import Run

SHAPE_FILE = "shape.json"
BUDGET_MARGIN = 1.02
"""The factor by which an untrained shape must beat its limit: two measurements differ
by that much."""
CERTAINLY = 1.2
"""Ratio of a shape's latency to its limit above which it is refused at once; a smaller
excess may be noise."""
ATTEMPTS = 3
"""The most shapes to train, each smaller than the one before, whose file was too
slow."""
CHECKS = 3
"""The most measurements of a shipped file that is too slow, while other processes keep
the CPUs busy; the best one counts."""
WHOLE_SHAPE = "the whole model"
SHIPPED_SHAPE = "the shipped file"


@dataclass(frozen=True)
class ShapeCandidate:
    """A shape that fills the budget.

    loss: of the model cut to it, before any training; ms: of its file with random
    weights, None if not measured
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
    """The budget, the candidates, and the chosen one.

    where       device, setting and precision of all times; None for a budget that does
                not limit time
    limit_ms    the limit of one forward; whole_ms: the latency of the unpruned model's
                file of that precision
    margin      by which the shape had to be faster than the limit
    shipped_ms  the latency of the shipped file, once there is one; noisy: the machine
                was too busy to measure it
    """

    budget: Mapping[str, float]
    where: str | None
    chosen: ShapeCandidate
    candidates: tuple[ShapeCandidate, ...]
    limit_ms: float | None = None
    whole_ms: float | None = None
    margin: float = BUDGET_MARGIN
    shipped_ms: float | None = None
    noisy: bool = False

    @property
    def over(self) -> float:
        """The ratio of the shipped file's latency to the limit; 1 if it keeps the
        limit, or is not known."""
        if self.shipped_ms is None or self.limit_ms is None or self.noisy:
            return 1.0
        return max(1.0, self.shipped_ms / self.limit_ms)

    @staticmethod
    def read(file: Path) -> "Decision":
        """Read what `io.write_json` wrote."""
        return TypeAdapter(Decision).validate_json(file.read_bytes())

    def table(self) -> Table:
        """Render the candidates, the one closest to the unpruned model's answers
        first."""
        caption = "Loss as cut: against the whole model's answers, before any training."
        if self.where is not None:
            caption += f" {self.where}: at most {self.limit_ms:.3g} ms."
        table = Table(
            title="Shapes that fill the budget",
            box=None,
            pad_edge=False,
            caption=caption,
        )
        sizes = [name for name in self.chosen.sizes if name != "head_size"]
        for name in (*sizes, "params", "predicted", "measured", "loss as cut"):
            table.add_column(name, justify="right")
        for each in self.candidates:
            predicted = (
                ""
                if each.predicted_ms is None
                else f"{each.predicted_ms:.3g} ± {each.error_ms:.1g} ms"
            )
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
        """Describe whether the shipped file keeps the latency limit."""
        assert (
            self.shipped_ms is not None
            and self.limit_ms is not None
            and self.whole_ms is not None
        )
        over = self.shipped_ms / self.limit_ms - 1
        kept = (
            f"within {self.limit_ms:.3g} ms"
            if over <= 0
            else f"{over:.1%} OVER the limit of {self.limit_ms:.3g} ms"
        )
        return (
            f"budget: {self.shipped_ms:.3g} ms on {self.where}, "
            f"{self.whole_ms / self.shipped_ms:.2f} times as fast as the unpruned "
            f"model: {kept}"
        )


def runs_alone(device: str) -> bool:
    """Return True for a device that needs no action by the user."""
    return device.partition(":")[0] in ("local", "ssh")


def device_messages(device: str, console: Console) -> Say:
    """Return a printer of a device's messages; silent for local and ssh devices, which
    need no action by the user."""
    if runs_alone(device):
        return lambda _: None
    return plain_printer(console)


def budget_setting(recipe: Recipe) -> Setting:
    """Return the setting at which the target's latency is measured."""
    target = recipe.target
    return Setting(target.threads, target.batch, target.seq or recipe.stages[-1].length)


@contextmanager
def open_timer(recipe: Recipe, context: TrainingContext) -> Iterator[ShapeTimer]:
    """Open the device of the recipe's target, to measure shapes at its setting."""
    target = recipe.target
    console = context.console
    say = device_messages(target.device, console)
    with open_device(target.device, say=say) as device:
        yield ShapeTimer(
            device,
            budget_setting(recipe),
            target.precision,
            context.kind,
            makes_segments(context.tokenizer),
            plain_printer(console),
        )


def refuse_unreachable(
    recipe: Recipe, teacher: Teacher, context: TrainingContext, run: Run
) -> None:
    """Raise PruneError if even the smallest shape of a model exceeds the recipe's
    budget, or if the whole model keeps it. Weights do not matter, so this is checked
    before any training."""
    target = recipe.target
    if not recipe.pruning or not target.budgets or _file(run, 1).is_file():
        return
    model = teacher.model
    plan = SlicePlan.from_model(model)
    grid = shape_grid(model.config, plan)
    parameters = {
        name: count_parameters(model, plan, sizes) for name, sizes in grid.items()
    }
    smallest = _check_parameters(target, teacher.name, parameters)
    if not target.limits_time or not runs_alone(target.device):
        return
    configs = {
        WHOLE_SHAPE: model.config,
        smallest: resize_config(model.config, grid[smallest]),
    }
    with open_timer(recipe, context) as timer:
        times = timer.measure(configs)
    whole_ms = times[WHOLE_SHAPE]
    _refuse_fast(target, teacher.name, whole_ms, timer.about, CERTAINLY)
    limit = target.max_latency_ms
    if target.speedup is not None:
        limit = whole_ms / target.speedup
    if limit is not None and times[smallest] > CERTAINLY * limit:
        raise PruneError(
            f"{', '.join(target.budgets)}: the smallest shape of {teacher.name}, "
            f"{smallest}, takes {times[smallest]:.3g} ms on {timer.about}, the whole "
            f"model {whole_ms:.3g} ms, and {limit:.3g} ms are asked for: ask "
            f"for at most {whole_ms / times[smallest]:.2g} times its speed, "
            "or for fewer tokens (seq)"
        )


def _check_parameters(target: Target, name: str, parameters: Mapping[str, int]) -> str:
    """Return the shape of a model with the fewest parameters. Raises PruneError if it
    has more than are allowed, or if the whole model has few enough and its latency is
    not limited."""
    smallest = min(parameters, key=parameters.__getitem__)
    most = target.max_params
    if most is None:
        return smallest
    if parameters[smallest] > most:
        raise PruneError(
            f"max_params {most:,}: the smallest shape of {name}, {smallest}, has "
            f"{parameters[smallest]:,}. Its vocabulary is never pruned: `compress "
            "trim` shortens its table"
        )
    whole = max(parameters.values())
    if whole <= most and not target.limits_time:
        raise PruneError(
            f"max_params {most:,}: {name} itself has {whole:,}: there is nothing to "
            "prune"
        )
    return smallest


def _refuse_fast(
    target: Target, name: str, ms: float, where: str, margin: float = 1.0
) -> None:
    """Raise PruneError if a whole model, which takes so many ms, keeps the budget even
    if it took `margin` times as long."""
    limit = target.max_latency_ms
    if limit is not None and margin * ms <= limit and target.max_params is None:
        raise PruneError(
            f"max_latency_ms {limit:g}: {name} itself takes {ms:.3g} ms on {where}: "
            "there is nothing to prune"
        )


def resolve_budget(
    recipe: Recipe,
    task_teacher: Teacher,
    context: TrainingContext,
    run: Run,
) -> Iterator[Recipe]:
    """Yield the recipe with sizes in place of its budget, if it has one.

    If `check_budget` then finds the shipped file too slow, yield the recipe again with
    smaller sizes, in stages of their own. Raises PruneError if no shape keeps the
    budget.
    """
    if not recipe.pruning or not recipe.target.budgets:
        yield recipe
        return
    margin = BUDGET_MARGIN
    # a further attempt needs the weights that training casts
    if recipe.target.limits_time:
        task_teacher = replace(task_teacher, model=copy.deepcopy(task_teacher.model))
    for attempt in range(1, ATTEMPTS + 1):
        decision = _decide(
            recipe, task_teacher, context, run, attempt=attempt, margin=margin
        )
        if decision is None:
            return
        # else an earlier process of this run has measured it
        if decision.over == 1 or attempt == ATTEMPTS:
            if attempt > 1 and context.time_limit is not None:
                warn(
                    context.console,
                    f"--minutes {context.time_limit.minutes:g}: most of "
                    "them went to the previous, larger shape, whose file was too slow: "
                    "this one trains for the rest. Give more if it is not good enough",
                )
            yield _with_sizes(recipe, decision, attempt, context.console)
            decision = from_first(partial(Decision.read, _file(run, attempt)))
        if decision.over == 1:
            return
        margin *= decision.over


def _decide(
    recipe: Recipe,
    task_teacher: Teacher,
    context: TrainingContext,
    run: Run,
    *,
    attempt: int,
    margin: float,
) -> Decision | None:
    """Load or make the decision of an attempt; None if a further attempt finds no
    smaller shape."""
    file = _file(run, attempt)
    if not from_first(file.is_file):
        decision = None
        try:
            decision = decide(recipe, task_teacher, context, run, margin)
        except PruneError as error:
            if attempt == 1:
                raise
            print_note(context.console, str(error))
        if decision is not None:  # on the first process
            write_json(file, asdict(decision))
            context.console.print(decision.table())
    return from_first(lambda: Decision.read(file) if file.is_file() else None)


def _with_sizes(
    recipe: Recipe,
    decision: Decision,
    attempt: int,
    console: Console,
) -> Recipe:
    sizes = {
        name: count
        for name, count in decision.chosen.sizes.items()
        if name != "head_size"
    }
    console.print(f"pruning to {decision.chosen.name}", highlight=False)
    stages = recipe.stages
    if attempt > 1:
        suffix = recipe.free_suffix(f"-{attempt}")
        stages = tuple(
            each.model_copy(update={"name": each.name + suffix}) for each in stages
        )
    return recipe.model_copy(
        update={"target": Target.model_validate(sizes), "stages": stages}
    )


def _file(run: Run, attempt: int) -> Path:
    return run.path / (SHAPE_FILE if attempt == 1 else f"shape-{attempt}.json")


def check_budget(
    bundle: Bundle,
    recipe: Recipe,
    task_teacher: Teacher,
    context: TrainingContext,
    run: Run,
) -> None:
    """Measure the shipped file in turns with the unpruned model's, and print whether it
    keeps the recipe's budget.

    A file that seems too slow on a busy machine is measured up to CHECKS times.
    """
    target = recipe.target
    if not target.limits_time:
        return
    file = next(
        file
        for attempt in range(ATTEMPTS, 0, -1)
        if (file := _file(run, attempt)).is_file()
    )
    decision = Decision.read(file)
    measured = list[tuple[Decision, dict[str, Latency]]]()
    with open_race(bundle, recipe, task_teacher, context) as race_once:
        for _ in range(CHECKS):
            latencies = race_once()
            measured.append((_judge(decision, latencies, target.speedup), latencies))
            if measured[-1][0].over == 1 or not any(
                each.busy for each in latencies.values()
            ):
                break
    decision, latencies = min(measured, key=lambda each: each[0].over)
    write_json(file, asdict(decision))
    bundle.attach(SHAPE_FILE, file.read_text(encoding="utf-8"))
    context.console.print(decision.verdict(), highlight=False)
    for each in latencies.values():
        if each.noisy:
            print_note(context.console, f"{each.name}: {each.noise}")


@contextmanager
def open_race(
    bundle: Bundle,
    recipe: Recipe,
    task_teacher: Teacher,
    context: TrainingContext,
) -> Iterator[Callable[[], dict[str, Latency]]]:
    """Yield a function that times the shipped file, in turns with the unpruned model's
    of the same precision, on the device of the recipe's target."""
    target = recipe.target
    setting = budget_setting(recipe)
    export = exported(
        {WHOLE_SHAPE: task_teacher.model.config},
        setting,
        precision=target.precision,
        kind=context.kind,
        segments=makes_segments(context.tokenizer),
    )
    say = device_messages(target.device, context.console)
    with open_device(target.device, say=say) as device, export as files:
        raced = {**files, SHIPPED_SHAPE: bundle.files()[target.precision]}
        yield lambda: race(raced, device, setting)


def _judge(
    decision: Decision,
    latencies: Mapping[str, Latency],
    speedup: float | None,
) -> Decision:
    """Return the decision with the measured latencies; a speed-up is over the unpruned
    model as it was measured now."""
    shipped_ms = latencies[SHIPPED_SHAPE].p50_ms
    whole_ms = latencies[WHOLE_SHAPE].p50_ms
    limit_ms = decision.limit_ms if speedup is None else whole_ms / speedup
    noisy = any(each.noisy for each in latencies.values())
    return replace(
        decision,
        shipped_ms=shipped_ms,
        whole_ms=whole_ms,
        limit_ms=limit_ms,
        noisy=noisy,
    )


SHORTLISTED = 24
"""Shapes that the model is cut to, to compare their answers with its own."""
FINALISTS = 4
"""Shapes whose files are measured before any training."""


def decide(
    recipe: Recipe,
    task_teacher: Teacher,
    context: TrainingContext,
    run: Run,
    margin: float = BUDGET_MARGIN,
) -> Decision | None:
    """Find the shape within the recipe's budget whose answers are closest to
    `task_teacher`'s, on the first process.

    margin: how many times faster than the limit it must be. Raises PruneError for a
    budget that no shape keeps, or that the model itself keeps.
    """
    stage = recipe.pruning[0]
    target = recipe.target
    cut = CutModel.open(
        task_teacher.model,
        stage,
        recipe,
        teacher=task_teacher,
        context=context,
        seed=run.seed,
    )
    if not run.main:
        return None
    grid = shape_grid(cut.model.config, cut.plan)
    parameters = {name: cut.count_parameters(sizes) for name, sizes in grid.items()}
    _check_parameters(target, task_teacher.name, parameters)
    most = target.max_params or math.inf
    shapes = {name: grid[name] for name in grid if parameters[name] <= most}
    search = _ShapeSearch(recipe, cut, task_teacher.name, shapes, parameters)
    if target.limits_time:
        with open_timer(recipe, context) as timer:
            return search.decide_by_time(timer, margin)
    ranked = search.rank(search.shapes, {})
    return Decision(target.budgets, None, ranked[0], tuple(ranked))


@dataclass(frozen=True)
class _ShapeSearch:
    """A search among the `shapes` with few enough parameters."""

    recipe: Recipe
    cut: CutModel
    name: str
    shapes: Mapping[str, Sizes]
    parameters: Mapping[str, int]

    def decide_by_time(self, timer: ShapeTimer, margin: float) -> Decision:
        target = self.recipe.target
        whole = {WHOLE_SHAPE: self.cut.model.config}
        whole_ms = timer.measure(whole)[WHOLE_SHAPE]
        limit = (
            target.max_latency_ms
            if target.speedup is None
            else whole_ms / target.speedup
        )
        assert limit is not None, "one of the two is given"
        _refuse_fast(target, self.name, whole_ms, timer.about)
        aim = limit / margin

        def scale_from(whole_then: float) -> float:
            """Return the factor that scales times taken together with `whole_then` to
            the conditions of the limit: a speed-up is a ratio, and the load of the
            machine may have changed."""
            return 1.0 if target.speedup is None else whole_ms / whole_then

        predicted = timer.predict({**self.configs, **whole})
        factor = scale_from(predicted.pop(WHOLE_SHAPE).ms)
        estimates = {
            name: Estimate(factor * each.ms, factor * each.error_ms)
            for name, each in predicted.items()
        }

        def race(aim: float) -> list[ShapeCandidate]:
            """Rank the shapes that are predicted to fill `aim`, and measure the first
            of them."""
            fits, least = keep_within(
                {name: {"latency": each.ms} for name, each in estimates.items()},
                {"latency": aim},
            )
            if not fits:
                raise PruneError(
                    f"{', '.join(target.budgets)}: no shape of {self.name} runs in "
                    f"{aim * margin:.3g} ms on {timer.about}. The nearest, {least}, "
                    f"takes about {estimates[least].ms:.3g} ms: ask for at least "
                    "that, or for fewer tokens (seq)"
                )
            ranked = self.rank({name: self.shapes[name] for name in fits}, estimates)
            finalists = {
                each.name: self.configs[each.name] for each in ranked[:FINALISTS]
            }
            measured = timer.measure({**finalists, **whole})
            factor = scale_from(measured.pop(WHOLE_SHAPE))
            return [
                replace(each, ms=factor * measured[each.name])
                for each in ranked[:FINALISTS]
            ] + ranked[FINALISTS:]

        candidates = race(aim)
        fastest = min(each.ms for each in candidates if each.ms is not None)
        over = fastest / aim
        if fastest > aim and any(each.ms <= aim / over for each in estimates.values()):
            self.cut.context.console.print(
                f"Measured latency is {over - 1:.0%} above the prediction; trying "
                "smaller shapes"
            )
            both = sorted(
                [*candidates, *race(aim / over)], key=lambda each: each.ms is not None
            )
            candidates = sorted(
                {each.name: each for each in both}.values(), key=lambda each: each.loss
            )
        chosen = next(
            (each for each in candidates if each.ms is not None and each.ms <= aim),
            None,
        )
        if chosen is None:
            chosen = min(
                candidates, key=lambda each: math.inf if each.ms is None else each.ms
            )
            print_note(
                self.cut.context.console,
                f"no measured shape runs in {limit:.3g} ms; choosing the fastest, "
                f"{chosen.name}, which takes {chosen.ms:.3g} ms",
            )
        return Decision(
            target.budgets,
            timer.about,
            chosen,
            tuple(candidates),
            limit,
            whole_ms,
            margin,
        )

    @cached_property
    def configs(self) -> dict[str, Any]:
        return {name: self.cut.config(sizes) for name, sizes in self.shapes.items()}

    def rank(
        self,
        fits: Mapping[str, Sizes],
        estimates: Mapping[str, Estimate],
    ) -> list[ShapeCandidate]:
        """Cut the model to the largest of the shapes, spread far apart, and sort them
        by their loss against it."""
        setting = budget_setting(self.recipe)
        found = self.cut.compare(fits, setting, SHORTLISTED)
        ranked = []
        for name, loss in found.items():
            estimate = estimates.get(name)
            times = (estimate.ms, estimate.error_ms) if estimate else ()
            ranked.append(
                ShapeCandidate(
                    name, fits[name].plain(), self.parameters[name], loss, *times
                )
            )
        return ranked
