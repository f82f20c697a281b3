"""Open and run the stages of a pre-training, which need no task."""

import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial

from compress.console import warn
from compress.data import load_task
from compress.data.collate import Collate
from compress.data.corpus import load_corpus
from compress.io import atomic_folder, keep_if_intact
from compress.jobs.checks import (
    check_lengths,
    join_processes,
    load_functions,
    measure_lengths,
)
from compress.jobs.job import Job
from compress.jobs.pace import limit_time, refuse_long_steps
from compress.jobs.phase import Phase
from compress.jobs.request import PretrainRequest
from compress.jobs.stages import StageModels
from compress.jobs.train import RunStages
from compress.models import checkpoints
from compress.models import precision as precisions
from compress.training import finetune
from compress.training.context import TrainingContext, use_bf16
from compress.training.processes import check_same, node_first

RESULT = "student"
"""The folder of the checkpoint in the run's folder."""


class KeepCheckpoint(Phase[Job]):
    """Copy the model of the last stage to the run's result."""

    def run(self, job: Job) -> Job:
        models = job.models
        run = models.run
        last = models.recipe.stages[-1]
        result = run.path / RESULT
        if run.main and not keep_if_intact(
            result, partial(warn, models.context.console)
        ):
            with atomic_folder(result, sealed=True) as folder:
                shutil.copytree(run.result(last.name), folder, dirs_exist_ok=True)
        return job


PRETRAIN_PHASES: tuple[Phase[Job], ...] = (RunStages(), KeepCheckpoint())


@contextmanager
def open_pretraining(request: PretrainRequest) -> Iterator[Job]:
    """Load teacher and texts, and open the run; yield the job before anything is
    trained.

    Raises a CompressError for anything wrong with the request.
    """
    options = request.options
    name = request.teacher
    state = join_processes()
    request.check_launch()
    given = load_functions(request.recipe, state.num_processes, options.allow_code)
    number_format = precisions.choose(options.precision)
    with node_first():
        folder = checkpoints.resolve(name, allow_pickle=options.allow_pickle)
        base_teacher = finetune.load_with_head(
            name, folder, "encoder", allow_pickle=options.allow_pickle
        )
        data = load_task(request.data, seed=options.seed) if request.data else None
        text = load_corpus(request.corpus) if request.corpus else None
    resolved = given
    digests = {"teacher": base_teacher.digest}
    if data is not None:
        lengths = measure_lengths(data, base_teacher, options.seed)
        resolved = given.with_length(lengths.fitting)
        digests["data"] = data.fingerprint
    if text is not None:
        digests["corpus"] = text.fingerprint
    check_lengths(resolved, base_teacher)
    run = request.open_run(resolved, given, state, number_format)
    with closing(run):
        check_same(digests)
        run.confirm(**digests)
        bf16 = use_bf16(number_format, resolved, base_teacher, request.console)
        tokenizer = base_teacher.tokenizer
        context = TrainingContext(
            data, text, tokenizer, Collate(tokenizer), bf16, request.console
        )
        context = limit_time(
            context,
            resolved.training,
            run,
            minutes=request.length.minutes,
            began=request.began,
        )
        refuse_long_steps(base_teacher, context, resolved.training, run)
        models = StageModels(resolved, base_teacher, None, context, run)
        for note in [*models.check(), *([run.note] if run.note else [])]:
            warn(request.console, note)
        yield Job(models)
