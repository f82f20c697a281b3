"""Run stages that need no task: general students, language models, encoders trained on
text alone."""

import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from accelerate import PartialState
from rich.console import Console

from compress.arguments import (
    DataLike,
    NameLike,
    PathName,
    TeacherLike,
    check_arguments,
    optional_name,
)
from compress.commands import preflight
from compress.config import user_code
from compress.config.options import LengthOptions, RunOptions
from compress.config.recipe import Recipe
from compress.console import warn
from compress.data import load_task
from compress.data.collate import Collate
from compress.data.corpus import load_corpus
from compress.data.objects import data_path, teacher_path
from compress.io import atomic_folder, keep_if_intact
from compress.jobs.checks import (
    check_lengths,
    join_processes,
    load_functions,
    measure_lengths,
)
from compress.jobs.inputs import limit_time
from compress.jobs.stages import StageModels
from compress.models import checkpoints
from compress.models import precision as precisions
from compress.provenance import command_line
from compress.training import finetune, scoring
from compress.training.context import TrainingContext, use_bf16
from compress.training.run import Run
from compress.training.stage import Trained, load_trained


@check_arguments
def pretrain(
    *,
    teacher: TeacherLike,
    recipe: NameLike | Recipe,
    out: PathName,
    corpus: NameLike | None = None,
    data: DataLike | None = None,
    length: LengthOptions = LengthOptions(),
    options: RunOptions = RunOptions(),
    console: Console | None = None,
) -> Path:
    """Run a recipe's stages up to the first with a task's head; return the checkpoint's
    folder, `out`/student.

    teacher   alias, folder or hub id: the teacher; for stages that learn from text
              alone, the model whose vocabulary and sizes are used
    corpus    text for stages on text
    data      labelled data for stages that answer with text, as T5 does
    length    how long its stages train; options: as for `distill`, without `gate`

    The checkpoint is a plain transformers folder with its tokenizer, and can be the
    teacher of other runs. Raises a CompressError for anything wrong with the arguments.
    """
    console = console or Console(quiet=True)
    prepared = prepare(
        teacher=teacher,
        recipe=recipe,
        out=out,
        corpus=optional_name(corpus),
        data=data,
        length=length,
        options=options,
        console=console,
    )
    with prepared as models:
        run, stages = models.run, models.recipe.stages
        models.run_stages(stages)
        result = run.path / "student"
        if run.main and not keep_if_intact(result, partial(warn, console)):
            with atomic_folder(result, sealed=True) as folder:
                shutil.copytree(run.result(stages[-1].name), folder, dirs_exist_ok=True)
        if run.main:
            run.finish()
        for stage in stages if run.main else ():
            spent = load_trained(run, stage.name, console)
            if spent is None:
                continue
            score = describe_score(spent)
            console.print(
                f"{stage.name}: {spent.steps:,} steps in {spent.seconds:,.0f} s{score}",
                highlight=False,
            )
        console.print(f"checkpoint: {result}", highlight=False)
        PartialState().wait_for_everyone()
    return result


def describe_score(spent: Trained) -> str:
    """Say what a stage's best score is, and of which rows; '' if it was not scored."""
    if spent.score is None:
        return ""
    match spent.measure:
        case scoring.LOG_LIKELIHOOD:
            return f", log-likelihood of a held-out token {spent.score:.3f} nats"
        case scoring.NEGATIVE_LOSS:
            return f", loss on held-out rows {-spent.score:.3f}"
    return f", {spent.measure or 'score'} {spent.score:.3f} on the validation split"


@contextmanager
def prepare(
    *,
    teacher: TeacherLike,
    recipe: NameLike | Recipe,
    out: PathName,
    corpus: str | None,
    data: DataLike | None,
    length: LengthOptions,
    options: RunOptions,
    console: Console,
) -> Iterator[StageModels]:
    """Check the arguments of `pretrain`, open the run, and load its models; yield them
    before anything is trained.

    Raises a CompressError for anything wrong with the arguments.
    """
    teacher, data = teacher_path(teacher), None if data is None else data_path(data)
    recipe = preflight.load_recipe(recipe, options.overrides, length)
    preflight.check(
        recipe, teacher=teacher, out=out, data=data, corpus=corpus, options=options
    )
    state = join_processes()
    recipe = load_functions(
        preflight.without_task(recipe, corpus, data),
        state.num_processes,
        options.allow_code,
    )
    number_format = precisions.choose(options.precision)
    identity = {
        "teacher": teacher,
        "data": data,
        "corpus": corpus,
        "seed": options.seed,
        "precision": number_format,
        "columns": [None, None, None, None],
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
        with state.main_process_first():
            folder = checkpoints.resolve(teacher, allow_pickle=options.allow_pickle)
            base_teacher = finetune.load_with_head(
                teacher, folder, "encoder", allow_pickle=options.allow_pickle
            )
            task_data = load_task(data, seed=options.seed) if data else None
            text = load_corpus(corpus) if corpus else None
        run.confirm(
            teacher=base_teacher.digest,
            **({"data": task_data.fingerprint} if task_data else {}),
            **({"corpus": text.fingerprint} if text else {}),
        )
        if task_data is not None:
            recipe = recipe.with_length(
                measure_lengths(task_data, base_teacher, run.seed).fitting
            )
        check_lengths(recipe, base_teacher)
        bf16 = use_bf16(number_format, recipe, base_teacher, console)
        tokenizer = base_teacher.tokenizer
        context = TrainingContext(
            task_data, text, tokenizer, Collate(tokenizer), bf16, console
        )
        if length.minutes is not None:
            context = replace(
                context, time_limit=limit_time(length.minutes, recipe.training, run)
            )
        models = StageModels(recipe, base_teacher, None, context, run)
        for note in models.check():
            warn(console, note)
        yield models
