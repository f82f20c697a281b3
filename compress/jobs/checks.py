"""Check recipes and lengths for commands that train, once torch and the user's own
functions are imported."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState

from compress import kinds
from compress.config import reference, user_code
from compress.config.recipe import Recipe, ancestor
from compress.config.reference import Call
from compress.config.stages import AnyStage, Stage, StudentSpec
from compress.data.lengths import RowLengths
from compress.errors import RecipeError, TeacherError
from compress.jobs.sizes import long_stages
from compress.machine import check_meeting
from compress.models.sentence_settings import settings_of
from compress.models.teacher import Teacher
from compress.slicing.shape import positions
from compress.training.augment import reads_corpus, trains_language_model
from compress.training.objective import check_terms, find_loss
from compress.training.processes import node_first, wait_for_all
from compress.training.sharding import refuse_sharding
from compress.training.stage import shares

if TYPE_CHECKING:
    from compress.data.task import TaskData
from compress.kinds import Kind


def join_processes() -> PartialState:
    """Join the processes of this launch, on the CPU if there is no GPU or
    ACCELERATE_USE_CPU is set.

    Returns once all of them have joined: the store that they meet in ends with the
    first process, which may be about to refuse its arguments. Raises RunError for a
    launch that does not say where they meet, or that asks for split weights, unless a
    command has taken that request.
    """
    check_meeting()
    refuse_sharding()
    state = PartialState(
        cpu=not torch.cuda.is_available() or bool(os.environ.get("ACCELERATE_USE_CPU"))
    )
    wait_for_all()
    return state


def load_functions(
    recipe: Recipe, processes: int, allow_code: str | Path | None
) -> Recipe:
    """Import the user's own functions of a recipe, after everything else was checked.
    Raises RecipeError."""
    check_recipe(recipe, processes)
    loaded = user_code.load(recipe, allow_code)
    check_recipe(loaded, processes)
    return loaded


_FUNCTIONS = {
    "rows": ("max_length", "rng"),
    "corrupt": (),
    "step": ("words", "shown"),
    "augment": ("rng",),
}
_PRUNE_FUNCTIONS: dict[str, tuple[str, ...]] = {"importance": ()}
"""The arguments that stages pass to each kind of function that a recipe names."""


def check_recipe(recipe: Recipe, processes: int) -> None:
    """Raise RecipeError for errors that can only be found with the papers imported, or
    from the number of processes.

    These are unknown functions and options, a stage whose teacher is a missing stage,
    and batches that cannot be split. The user's own functions are skipped until they
    are imported.
    """
    problems = list[str]()
    calls = list[tuple[str, Any, tuple[str, ...]]]()
    specs: list[tuple[str, StudentSpec | None]] = [("student", recipe.student)]
    for where, stage in recipe.named_stages:
        names = _FUNCTIONS if isinstance(stage, Stage) else _PRUNE_FUNCTIONS
        named = {name: getattr(stage, name) for name in names}
        calls += [
            (f"{where}.{name}", call, names[name])
            for name, call in named.items()
            if isinstance(call, Call)
        ]
        if not isinstance(stage, Stage):
            continue
        specs.append((f"{where}.student", stage.student))
        if stage.teacher == "previous" and stage.kind == "distill":
            try:
                ancestor(recipe.stages, stage)
            except RecipeError as error:
                problems += [
                    f"{recipe.name}: {where}: {problem}" for problem in error.problems
                ]
    calls += [
        (f"{where}.init", spec.init, ("words",))
        for where, spec in specs
        if spec and isinstance(spec.init, Call)
    ]
    for where, call, passed in calls:
        if not call.unresolved:
            problems += reference.check(call, f"{recipe.name}: {where}", given=passed)
    for where, stage in list_stages(recipe):
        if isinstance(stage, Stage):
            problems += check_terms(
                stage.objective, f"{recipe.name}: {where}", absent=True
            )
            try:
                shares(stage, processes)
            except RecipeError as error:
                problems += [f"{recipe.name}: {problem}" for problem in error.problems]
    if problems:
        raise RecipeError(problems)


def check_kind(recipe: Recipe, kind: "Kind") -> None:
    """Raise RecipeError for stages on the task whose losses are for other kinds of
    task, or that need labels where the data are texts without any."""
    problems = []
    for where, stage in list_stages(recipe):
        if (
            not isinstance(stage, Stage)
            or stage is recipe.teacher
            or (stage.data, stage.head) != ("task", "task")
        ):
            continue
        terms = [term for term in stage.objective if term.serves(kind)]
        labels = [
            term.name for term in terms if find_loss(term).reading.against == "labels"
        ]
        if stage.objective and not terms:
            problems.append(
                f"{where} has no loss for {kind}: "
                f"{', '.join(term.name for term in stage.objective)}"
            )
        elif labels and kinds.find(kind).vectors:
            problems.append(
                f"{where} needs labels, and texts for embedding have none: "
                f"{', '.join(labels)}"
            )
    if problems:
        remedy = (
            "use another recipe (`compress recipes`), or --recipe auto, which chooses "
            "one for the kind of task"
        )
        raise RecipeError(
            [f"{recipe.name}: {problem}; {remedy}" for problem in problems]
        )


def measure_lengths(data: "TaskData", teacher: Teacher, seed: int) -> RowLengths:
    """Measure the lengths of the training rows, which decide what `max_length: auto`
    is."""
    with node_first():
        return RowLengths.measure(
            data.train,
            data.task,
            teacher.tokenizer,
            positions(teacher.model),
            teacher_length=settings_of(teacher.model.config).max_length,
            seed=seed,
        )


CUT_WITHOUT_WARNING = 0.05
"""Share of rows that may lose text without a warning."""


def describe_cuts(recipe: Recipe, lengths: RowLengths) -> list[str]:
    """Return a warning if the student cuts many rows, or reads less than the encoder
    that teaches it, or more than this encoder or the teacher's tokenizer does."""
    stages = [
        (where, stage) for where, stage in list_stages(recipe) if stage.data == "task"
    ]
    where, stage = max(stages, key=lambda each: each[1].length)
    if lengths.teacher_length == lengths.longest < stage.length:
        return [
            f"{where} reads {stage.length} tokens of a text, the teacher "
            f"{lengths.longest}, as max_seq_length of its folder or model_max_length "
            "of its tokenizer says: for longer texts the student learns vectors that "
            "the teacher does not return"
        ]
    where, stage = min(stages, key=lambda each: each[1].length)
    share = lengths.share_cut(stage.length)
    setting = f"--set {where.replace('[', '.').rstrip(']')}.max_length"
    if share > CUT_WITHOUT_WARNING:
        remedy = f"{setting}={lengths.fitting} reads more of them"
        if lengths.fitting <= stage.length:
            remedy = (
                "split long texts into several rows, or use a larger max_length if the "
                "teacher reads more"
            )
        return [
            f"{share:.0%} of the training rows are longer than {stage.length} tokens, "
            f"and are cut there; {remedy}"
        ]
    if (
        lengths.limit is not None
        and stage.length > lengths.limit
        and lengths.share_cut(lengths.limit) > 0
    ):
        return [
            f"some training rows are longer than the {lengths.limit} tokens that the "
            "teacher's tokenizer limits a text to (its model_max_length), and are read "
            f"to {stage.length}; {setting}={lengths.limit} reads them as the teacher's "
            "other users do"
        ]
    if (read := lengths.teacher_length) and stage.length < read:
        return [
            f"the student reads the first {stage.length} tokens of a text, the teacher "
            f"{read}; if an index has longer texts, use {setting}={read}: it hardly "
            "slows down training on short ones"
        ]
    return []


def check_lengths(recipe: Recipe, teacher: Teacher, *, tuned: bool = True) -> None:
    """Raise RecipeError for stages whose texts are longer than the teacher has
    positions.

    tuned: a teacher without a head is fine-tuned.
    """
    limit = positions(teacher.model)
    stages = list_stages(recipe)
    read = [
        (where, stage)
        for where, stage in stages
        if not (stage is recipe.teacher and (teacher.trained or not tuned))
    ]
    problems = long_stages(recipe, teacher.name, limit, read)
    problems += [
        f"{recipe.name}: {where}.step needs {needed} positions for its prompt and its "
        f"new tokens; teacher {teacher.name} has {limit}: lower the step's `prompt` or "
        "`new_tokens`"
        for where, stage in stages
        if limit is not None and (needed := sampled_tokens(stage)) > limit
    ]
    if problems:
        raise RecipeError(problems)


def sampled_tokens(stage: AnyStage) -> int:
    """Return the maximum tokens of a text that a stage's step lets a model write,
    including its prompt; 0 for a step that samples no text."""
    if not isinstance(stage, Stage) or stage.step is None:
        return 0
    known = reference.options(stage.step.function)
    if not {"prompt", "new_tokens"} <= known.keys():
        return 0
    given = {name: each.default for name, each in known.items()}
    given.update(stage.step.options)
    return int(min(given["prompt"], stage.length) + given["new_tokens"])


def list_stages(recipe: Recipe) -> list[tuple[str, AnyStage]]:
    """List the stages that may run, with the names that `--set` uses for them."""
    before: list[tuple[str, AnyStage]] = [("teacher", recipe.teacher)]
    before += (
        [("teacher_lm", recipe.teacher_lm)] if trains_language_model(recipe) else []
    )
    return [*before, *recipe.named_stages]


def check_scores(recipe: Recipe, data: "TaskData") -> None:
    """Raise TeacherError if the recipe learns vectors from a cross-encoder's scores,
    and there are none."""
    if not reads_scores(recipe) or not data.task.vectors:
        return
    if not any(map(len, data.train["scores"][:])):
        raise TeacherError(
            f"{recipe.name} learns from a cross-encoder's scores, and {data.name} has "
            "none: name a cross-encoder as the teacher, or give each passage its "
            "score, in a column teacher_score"
        )


def describe_unread(
    recipe: Recipe, corpus: str | None, effort: str | None
) -> Iterator[str]:
    """Describe each of these options that no stage reads."""
    if corpus is not None and not reads_corpus(recipe):
        yield (
            f"no stage of {recipe.name} reads --corpus; vectors learn from the texts "
            "of --data"
        )
    open_ended = recipe.pruning or any(stage.open_ended for stage in recipe.training)
    if effort and not open_ended:
        yield (
            f"no stage of {recipe.name} reads --effort (for epochs: auto); only a "
            "teacher that is fine-tuned does"
        )


def reads_scores(recipe: Recipe) -> bool:
    """Return True if the recipe learns from a cross-encoder's scores of the passages
    that a query is judged with."""
    terms = [term for stage in recipe.training for term in stage.objective]
    return any(find_loss(term).reading.against == "scores" for term in terms)
