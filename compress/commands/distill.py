"""Distil a teacher into a student: check, load, run the recipe's stages, ship and
measure."""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from accelerate import PartialState
from rich.console import Console

from compress.arguments import (
    DataLike,
    NameLike,
    PathName,
    Share,
    TeacherLike,
    check_arguments,
    name_of,
    optional_name,
)
from compress.commands import preflight
from compress.config import user_code
from compress.config.choices import AUTO, CandidateRecipes
from compress.config.options import DataOptions, LengthOptions, RunOptions
from compress.config.recipe import Recipe
from compress.config.stages import Prune
from compress.console import print_note, warn
from compress.data import load_task
from compress.data.objects import data_path, teacher_path
from compress.errors import TeacherError
from compress.evaluation.evaluator import count_examples
from compress.exporters.artifact import Bundle
from compress.jobs.checks import (
    check_kind,
    check_lengths,
    describe_cuts,
    find_reranker,
    join_processes,
    load_functions,
    measure_lengths,
    reads_scores,
)
from compress.jobs.inputs import limit_time, load_inputs
from compress.jobs.ship import BUDGETED_LIMIT, INT8_LIMIT, ship
from compress.jobs.stages import StageModels
from compress.models import checkpoints
from compress.models import precision as precisions
from compress.models import teacher as teachers
from compress.models.loader import load_config
from compress.models.teacher import Teacher
from compress.prompting.labels import prompt_teacher, starting_checkpoint
from compress.prompting.prompt import Prompt
from compress.prompting.vectors import gives_vectors, open_source
from compress.provenance import command_line
from compress.pruning.budget import check_budget, resolve_budget
from compress.records.run_report import example_unit
from compress.training.augment import TEXTS, add_stages, reads_corpus
from compress.training.finetune import (
    TeacherCheck,
    check_logits,
    is_ready,
    load_task_teacher,
)
from compress.training.run import Run
from compress.training.teacher_vectors import VectorSource
from compress.training.unlabelled import check_texts, takes_texts

if TYPE_CHECKING:
    from compress.data.task import Kind


@check_arguments
def distill(
    *,
    teacher: TeacherLike,
    data: DataLike,
    out: PathName,
    recipe: NameLike | Recipe | CandidateRecipes = AUTO,
    corpus: NameLike | None = None,
    prompt: NameLike | Prompt | None = None,
    columns: DataOptions = DataOptions(),
    max_drop: Share | None = None,
    length: LengthOptions = LengthOptions(),
    options: RunOptions = RunOptions(),
    console: Console | None = None,
) -> Bundle:
    """Distil `teacher` into a student by `recipe`, ship it as a bundle in `out`/bundle,
    and measure it.

    teacher    alias (`minilm`, `bert-base`, ...), folder, hub id, or (model,
               tokenizer); fine-tuned first if it has no head for the task. Or
               precomputed vectors of the texts (see `prompting.vectors`), or a
               cross-encoder for vectors that learn from scores: the student is then cut
               out of the checkpoint that the recipe's student names, or else of minilm.
               If the data have a teacher's scores (see `data.ranking`), it only names
               the checkpoint that the student is cut out of
    data       embedded set, folder, hub id, DataFrame, Dataset, or {split: any of
               these}; `columns` name what cannot be detected
    recipe     name, path of a .yaml, or a Recipe; `auto`, or a .yaml of choices,
               chooses one for teacher and task
    corpus     unlabelled text: for stages on text, and as more rows of tasks of single
               texts or their words
    prompt     name or path of a .yaml file: `teacher` is then a language model (or an
               endpoint's .yaml file) that labels the data by answering the prompt; the
               recipe's student names the checkpoint to start from
    out        the run's directory; `options.resume` continues an interrupted run, to
               the same final weights
    max_drop   how much of the score, in its own unit, int8 may lose before products
               stay in float32; default: INT8_LIMIT, or BUDGETED_LIMIT for a student
               that was made for a latency
    length     how long the stages train: see `LengthOptions`
    options    seed, precision, resume and others: see `RunOptions`. A recipe that names
               your own functions runs only with `allow_code`

    Raises a CompressError that says what to do for anything wrong with these.
    """
    console, started = console or Console(quiet=True), time.time()
    prompt = (
        prompt
        if prompt is None or isinstance(prompt, Prompt)
        else Prompt.load(name_of(prompt))
    )
    prepared = prepare(
        teacher=teacher,
        data=data,
        out=out,
        recipe=recipe,
        corpus=optional_name(corpus),
        prompt=prompt,
        columns=columns,
        length=length,
        options=options,
        console=console,
    )
    with prepared as (models, notes):
        recipe, context, run = models.recipe, models.context, models.run
        steps = describe_run(models, prompted=prompt is not None)
        print_note(
            console, f"this run will {steps}; --plan forecasts how long that takes"
        )
        task_teacher, teacher_check = check_teacher(
            models, teacher_path(teacher), prompt, options
        )
        if max_drop is None:
            max_drop = BUDGETED_LIMIT if recipe.target.limits_time else INT8_LIMIT
        for sized in resolve_budget(recipe, task_teacher, context, run):
            sized_models = replace(models, recipe=sized, task_teacher=task_teacher)
            student = sized_models.run_stages(
                sized.stages, teacher_logits=teacher_check.logits
            )
            if run.main:
                bundle = ship(
                    student,
                    task_teacher,
                    context,
                    recipe=sized,
                    run=run,
                    notes=[*notes, *teacher_check.notes],
                    started=started - run.before,
                    int8_limit=max_drop,
                )
                check_budget(bundle, recipe, task_teacher, context, run)
        if run.main:
            run.finish()
        PartialState().wait_for_everyone()
    return Bundle.load(run.path / "bundle")


def describe_run(models: "StageModels", *, prompted: bool) -> str:
    """List the parts of a run that are still to do, in their order, the stages with
    their names."""
    teacher, data, stage = (
        models.base_teacher,
        models.context.data,
        models.recipe.teacher,
    )
    verbs = {
        stage.name: "prune" if isinstance(stage, Prune) else stage.kind
        for stage in models.recipe.stages
    }
    parts = {name: f"{verb} ({name})" for name, verb in verbs.items()}
    if prompted:
        parts = {"": f"ask {teacher.name}", **parts}
    elif teacher.recorded is None and not is_ready(
        teacher, stage, models.context, models.run
    ):
        parts = {stage.name: f"fine-tune {teacher.name}", **parts}
    done = [
        at for at, name in enumerate(parts) if name and models.run.result(name).is_dir()
    ]
    left = [*list(parts.values())[max(done, default=-1) + 1 :], "export to ONNX"]
    examples = count_examples(
        data.task, data.validation if data.test is None else data.test
    )
    return (
        f"{', '.join(left)}, and measure on {examples:,} "
        f"{example_unit(data.task.kind, data.task.metric)}"
    )


def check_teacher(
    models: "StageModels", name: str, prompt: Prompt | None, options: RunOptions
) -> tuple[Teacher, TeacherCheck]:
    """Fine-tune or prompt the teacher if it needs that, and check that it is good
    enough. Raises TeacherError."""
    base_teacher, context, run = models.base_teacher, models.context, models.run
    strict = options.gate == "refuse"
    if base_teacher.recorded is not None:
        logits = base_teacher.recorded.for_split(context.data.validation)
        return base_teacher, check_logits(
            base_teacher.name, logits, context.data, strict=strict, remedy=UNFIT
        )
    if prompt is None:
        return load_task_teacher(
            base_teacher, models.recipe, context, run, strict=strict
        )
    # the other processes find its answers in the cache
    with PartialState().main_process_first():
        teacher, teacher_check = prompt_teacher(
            name,
            prompt,
            base_teacher,
            context.data,
            seed=options.seed,
            bf16=context.bf16,
            strict=strict,
            allow_pickle=options.allow_pickle,
            console=context.console,
        )
    run.confirm(teacher=teacher.digest)
    return teacher, teacher_check


UNFIT = (
    "Check that its vectors or scores belong to these texts, and differ. --gate warn "
    "continues with a warning"
)
"""The remedy for a teacher whose recorded answers teach nothing."""
MINILM = "minilm"
"""The checkpoint of students of precomputed vectors, if the recipe names none."""


@contextmanager
def prepare(
    *,
    teacher: TeacherLike,
    data: DataLike,
    out: PathName,
    recipe: NameLike | Recipe | CandidateRecipes,
    corpus: str | None,
    prompt: Prompt | None,
    columns: DataOptions,
    length: LengthOptions,
    options: RunOptions,
    console: Console,
    vectors: VectorSource | None = None,
) -> Iterator[tuple["StageModels", list[str]]]:
    """Check the arguments of `distill`, open the run, and load its models; yield them
    untrained, and warnings.

    vectors: stands in for those that `teacher` names. Raises a CompressError for
    anything wrong with the arguments.
    """
    teacher, data = teacher_path(teacher), data_path(data)
    recipe, prompted = (
        preflight.load_choices(recipe, options.overrides, length),
        prompt is not None,
    )
    vectors_alone = gives_vectors(teacher, prompted=prompted)
    recorded = prompted or vectors_alone
    preflight.check(
        recipe,
        teacher=teacher,
        out=out,
        data=data,
        corpus=corpus,
        prompted=recorded,
        options=options,
    )
    state = join_processes()
    if isinstance(recipe, CandidateRecipes):
        recipe = choose_recipe(
            recipe,
            MINILM if vectors_alone else teacher,
            data,
            columns,
            prompted=prompted,
            recorded=vectors_alone,
            options=options,
            console=console,
        )
    recipe = load_functions(recipe, state.num_processes, options.allow_code)
    columns = replace(
        columns, kind=columns.kind or cast("Kind | None", recipe.only_kind)
    )
    reranker = (
        None
        if recorded
        else find_reranker(teacher, recipe, allow_pickle=options.allow_pickle)
    )
    default = MINILM if vectors_alone or reranker else None
    checkpoint = (
        starting_checkpoint(recipe, default=default)
        if recorded or reranker
        else teacher
    )
    if default and recipe.student.init == checkpoint:
        recipe = recipe.model_copy(
            update={"student": recipe.student.model_copy(update={"init": "teacher"})}
        )
    number_format = precisions.choose(options.precision)
    identity = {
        "teacher": teacher,
        "prompt": prompt and prompt.model_dump(mode="json"),
        "data": data,
        "corpus": corpus,
        "seed": options.seed,
        "precision": number_format,
        "columns": list(astuple(columns)),
        "code": user_code.digests(recipe),
        "command": command_line(),
        "processes": state.num_processes,
    }
    run = Run.open(
        Path(out),
        recipe,
        identity,
        resume=options.resume,
        main=state.is_main_process,
        track=options.track,
    )
    with closing(run):
        base_teacher, context = load_inputs(
            checkpoint,
            data,
            recipe,
            run,
            corpus=corpus,
            columns=columns,
            unlabelled=prompted,
            number_format=number_format,
            vectors=(vectors or open_source(teacher)) if vectors_alone else None,
            reranker=reranker,
            allow_pickle=options.allow_pickle,
            console=console,
        )
        check_kind(recipe, context.data.task.kind)
        if (
            reads_scores(recipe)
            and context.kind == "embedding"
            and not any(map(len, context.data.train["scores"][:]))
        ):
            raise TeacherError(
                f"{recipe.name} learns from a cross-encoder's scores, and "
                f"{context.data.name} has none: name a cross-encoder as the teacher, "
                "or give each passage its score, in a column teacher_score"
            )
        if reranker:
            print_note(
                console,
                f"{teacher} has scored the passages; the student is cut out of "
                f"{checkpoint}",
            )
        if (
            "teacher" in context.data.train.column_names
            and not prompted
            and not recipe.pruning
        ):
            starting_checkpoint(recipe, default=teacher)
            base_teacher, recorded = (
                teachers.with_scores(base_teacher, context.data),
                True,
            )
            context = replace(context, base_teacher=base_teacher)
            print_note(
                console,
                "the teacher's scores are in the data; the student is cut out of "
                f"{teacher}",
            )
        if not recorded:
            train, reads = context.data.train, takes_texts(context.data, context.corpus)
            # a variant of a passage is none of the query's candidates
            texts = (
                0
                if context.kind == "ranking"
                else sum(name in TEXTS for name in train.column_names)
            )
            recipe = add_stages(recipe, len(train), corpus=reads, texts=texts)
            if any(stage.corpus for stage in recipe.training):
                check_texts(context.data, context.corpus)
        if corpus is not None and not reads_corpus(recipe):
            remedy = (
                "; add these texts to --data" if context.kind == "embedding" else ""
            )
            warn(console, f"no stage of {recipe.name} reads --corpus{remedy}")
        if length.minutes is not None:
            untrained = () if base_teacher.trained or recorded else (recipe.teacher,)
            context = replace(
                context,
                time_limit=limit_time(
                    length.minutes, (*untrained, *recipe.training), run
                ),
            )
        lengths = measure_lengths(context.data, base_teacher, run.seed)
        recipe = recipe.with_length(lengths.fitting)
        check_lengths(recipe, base_teacher, tuned=not recorded)
        models = StageModels(recipe, base_teacher, None, context, run)
        notes = [*models.check(), *describe_cuts(recipe, lengths)]
        for note in notes:
            warn(console, note)
        yield models, notes


def choose_recipe(
    candidates: CandidateRecipes,
    teacher: str,
    data: str,
    columns: DataOptions,
    *,
    prompted: bool,
    recorded: bool,
    options: RunOptions,
    console: Console,
) -> Recipe:
    """Choose the recipe that fits the family of the teacher, or of the start if vectors
    are `recorded`; print why."""
    with PartialState().main_process_first():
        task_data = load_task(
            data, **asdict(columns), seed=options.seed, unlabelled=prompted
        )
        folder = (
            None
            if prompted
            else checkpoints.resolve(teacher, allow_pickle=options.allow_pickle)
        )
    family = load_config(folder).model_type if folder else ""
    reranker = folder is not None and teachers.is_reranker(
        folder, allow_pickle=options.allow_pickle
    )
    scored = recorded or "teacher" in task_data.train.column_names
    recipe, reason = candidates.decide(
        kind=task_data.task.kind,
        family=family,
        prompted=prompted,
        scored=scored,
        reranker=reranker,
    )
    print_note(console, f"recipe {recipe.name}: {reason}")
    return recipe
