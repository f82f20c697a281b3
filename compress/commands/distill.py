"""The straight line: teacher and recipe in, shipped and measured student out."""

import os
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from accelerate import PartialState
from rich.console import Console

from compress.commands import preflight
from compress.commands.ship import BUDGETED_LIMIT, INT8_LIMIT, ship
from compress.config import user_code
from compress.config.limits import check_max_drop
from compress.config.recipe import AnyStage, Recipe, Stage
from compress.console import warn
from compress.data.objects import data_path, teacher_path
from compress.data.task import Kind
from compress.errors import RecipeError
from compress.exporters.artifact import Bundle
from compress.models import precision as precisions
from compress.models import teacher as teachers
from compress.prompting.prompt import Prompt
from compress.prompting.teacher import beginning, instructed
from compress.provenance import command_line
from compress.pruning.budget import checked, settled
from compress.slicing.shape import positions
from compress.stages import StageModels, check_functions
from compress.training.augment import asks_language_model
from compress.training.context import opened, tutored
from compress.training.objective import check
from compress.training.run import Run
from compress.training.stage import shares

if TYPE_CHECKING:
    from compress.data.objects import DataLike, TeacherLike


def distill(
    *,
    teacher: "TeacherLike",
    recipe: str | Path | Recipe,
    data: "DataLike",
    out: str | Path,
    corpus: str | None = None,
    prompt: str | Prompt | None = None,
    overrides: Sequence[str] = (),
    text: Sequence[str] | None = None,
    label: str | None = None,
    kind: Kind | None = None,
    metric: str | None = None,
    seed: int = 0,
    precision: precisions.Precision = "auto",
    resume: bool = False,
    gate: Literal["refuse", "warn"] = "refuse",
    max_drop: float | None = None,
    allow_pickle: bool = False,
    allow_code: str | Path | None = None,
    console: Console | None = None,
) -> Bundle:
    """Distil `teacher` into a student as `recipe` says, ship it as a bundle in `out`/bundle, and measure it.

    teacher    alias (`minilm`, `bert-base`, ...), folder, hub id, or (model, tokenizer); fine-tuned first if it has no
               head for the task
    recipe     name, path of a .yaml, or a Recipe; `overrides` are `stages.0.lr=3e-5`-like settings
    data       embedded set, folder, hub id, DataFrame, Dataset, or {split: either of them}; `text`, `label`, `kind`,
               `metric` name what is not detected
    corpus     unlabelled text for stages that want it
    prompt     name or path of a .yaml file: `teacher` is then a language model (or an endpoint's .yaml file), which
               labels the data by answering it; the recipe's student names the checkpoint it begins as
    out        the run's directory; `resume` continues a run that was interrupted, to the same final weights
    gate       what a teacher that is no better than the majority answer leads to
    max_drop   of the score, in its own unit, that int8 may lose before products stay in float32; left out: INT8_LIMIT,
               or BUDGETED_LIMIT of a student made for a latency
    allow_code the folder of your own functions that the recipe names: such a recipe is a program, and runs only so

    Raises a CompressError that says what to do for anything wrong with these.
    """
    console, started = console or Console(quiet=True), time.time()
    if max_drop is not None:
        check_max_drop(max_drop)
    teacher, data = teacher_path(teacher), data_path(data)
    recipe = preflight.load_recipe(recipe, overrides)
    preflight.check_task(recipe)
    prompt = Prompt.load(prompt) if isinstance(prompt, str) else prompt
    preflight.check(
        recipe, teacher=teacher, out=out, data=data, corpus=corpus, prompted=prompt is not None, seed=seed,
        resume=resume, allow_pickle=allow_pickle, allow_code=allow_code,
    )  # fmt: skip
    state = PartialState(cpu=on_cpu())
    recipe = with_code(recipe, state.num_processes, allow_code)
    checkpoint = teacher if prompt is None else beginning(recipe)
    number_format = precisions.choose(precision)
    identity = {
        "teacher": teacher, "prompt": prompt and prompt.model_dump(mode="json"), "data": data, "corpus": corpus,
        "seed": seed, "precision": number_format,
        "columns": [list(text) if text else None, label, kind, metric], "code": user_code.digests(recipe),
        "command": command_line(),
    }  # fmt: skip
    run = Run.open(Path(out), recipe, identity, resume=resume, main=state.is_main_process)
    with closing(run):
        room = opened(
            checkpoint, data, recipe, run,
            corpus=corpus, text=text, label=label, kind=kind, metric=metric, unlabelled=prompt is not None,
            number_format=number_format, allow_pickle=allow_pickle, console=console,
        )  # fmt: skip
        given, material, strict = room.given, room.material, gate == "refuse"
        check_lengths(recipe, given, tuned=prompt is None)
        notes = StageModels(recipe, given, None, material, run).check()
        for note in notes:
            warn(console, note)
        if prompt is None:
            tutor, seen = tutored(room, recipe, run, strict=strict)
        else:
            with state.main_process_first():  # the others find its answers
                tutor, seen = instructed(
                    teacher, prompt, given, material.data, seed=seed, bf16=material.bf16, strict=strict,
                    allow_pickle=allow_pickle, console=console,
                )  # fmt: skip
            run.confirm(teacher=tutor.digest)
        sized = settled(recipe, tutor, material, run)
        models = StageModels(sized, given, tutor, material, run)
        student, remaining = models.resume(sized.stages)
        for stage in remaining:
            student = models.run_stage(stage, student, teacher_logits=seen.logits)
        assert student is not None, "a recipe has a stage"
        if run.main:
            timed = recipe.target.speedup is not None or recipe.target.max_latency_ms is not None
            usual = BUDGETED_LIMIT if timed else INT8_LIMIT
            bundle = ship(
                student, tutor, material, recipe=sized, run=run, notes=[*notes, *seen.notes],
                started=started - run.before, int8_limit=usual if max_drop is None else max_drop,
            )  # fmt: skip
            checked(bundle, recipe, tutor, material, run)
            run.finish()
        state.wait_for_everyone()
    return Bundle.load(run.path / "bundle")


def on_cpu() -> bool:
    """Whether training stays on the CPU: there is nothing else, or ACCELERATE_USE_CPU says so."""
    import torch

    return not torch.cuda.is_available() or bool(os.environ.get("ACCELERATE_USE_CPU"))


def with_code(recipe: Recipe, processes: int, allow_code: str | Path | None) -> Recipe:
    """Return the recipe with the user's own functions, imported after all else was checked. Raises RecipeError."""
    check_recipe(recipe, processes)
    loaded = user_code.load(recipe, allow_code)
    check_recipe(loaded, processes)
    return loaded


def check_recipe(recipe: Recipe, processes: int) -> None:
    """Raise RecipeError for what only shows with papers and machine at hand: unknown losses and options, batches that
    do not split. The user's own functions are passed over until they have been imported."""
    problems = check_functions(recipe, absent=True)
    for where, stage in _stages(recipe):
        if not isinstance(stage, Stage):
            continue
        problems += check(stage.objective, f"{recipe.name}: {where}", absent=True)
        try:
            shares(stage, processes)
        except RecipeError as error:
            problems += [f"{recipe.name}: {problem}" for problem in error.problems]
    if problems:
        raise RecipeError(problems)


def check_lengths(recipe: Recipe, teacher: teachers.Teacher, *, tuned: bool = True) -> None:
    """A text longer than the model has positions for would end the run in the middle of a stage. `tuned`: whether a
    teacher without a head is fine-tuned."""
    known = positions(teacher.model)
    problems = [
        f"{recipe.name}: {where}.max_length is {stage.max_length}; teacher {teacher.name} has {known} positions: "
        f"--set {where.replace('[', '.').rstrip(']')}.max_length={known}"
        for where, stage in _stages(recipe)
        if known is not None
        and stage.max_length > known
        and not (stage is recipe.teacher and (teacher.trained or not tuned))
    ]
    if problems:
        raise RecipeError(problems)


def _stages(recipe: Recipe) -> list[tuple[str, AnyStage]]:
    """The stages that may run, by what `--set` calls them."""
    named: list[tuple[str, AnyStage]] = [(f"stages[{i}]", stage) for i, stage in enumerate(recipe.stages)]
    speaks = any(
        (each.augment and asks_language_model(each.augment))
        or (each.kind == "distill" and each.teacher == "general" and each.head == "masked_lm")
        for each in recipe.training
    )
    return [("teacher", recipe.teacher), *([("teacher_lm", recipe.teacher_lm)] if speaks else []), *named]
