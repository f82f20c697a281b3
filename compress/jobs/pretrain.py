"""Open and run the stages of a pre-training, which need no task."""

import shutil
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial

from transformers import PreTrainedModel

from compress.config.stages import Stage
from compress.console import warn
from compress.data import load_task
from compress.data.collate import Collate
from compress.data.corpus import load_corpus
from compress.io import atomic_folder, keep_if_intact, write_text
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
from compress.models.flops import count_parameters
from compress.records.forecast import PhaseEstimate
from compress.records.json_text import to_json
from compress.records.language_scores import (
    PERPLEXITY,
    LanguageScore,
    LanguageScores,
)
from compress.training import finetune
from compress.training.context import TrainingContext, use_bf16
from compress.training.processes import check_same, node_first
from compress.training.run import RESULT
from compress.training.scoring import encode_held_out, score_documents, writes_text


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


class ScoreText(Phase[Job]):
    """Score the language model of the last stage on held-out documents, beside its
    teacher and beside itself before it was trained."""

    def run(self, job: Job) -> Job:
        models = job.models
        last = models.recipe.stages[-1]
        path = models.run.path / PERPLEXITY
        if not isinstance(last, Stage) or not writes_text(last, models.context):
            return job
        if not models.run.main or path.exists():
            return job
        rows = encode_held_out(last, models.context, models.run.seed)
        scores = list[LanguageScore]()
        tokens: tuple[int, ...] = ()
        for name, model in self.list_models(job, last):
            with models.context.console.status(f"perplexity of {name}"):
                nats, tokens = score_documents(model, rows, last, models.context)
            size = count_parameters(model)
            scores.append(LanguageScore(name, size, nats))
        write_text(path, to_json(LanguageScores(tokens, tuple(scores))))
        return job

    def list_models(
        self, job: Job, last: Stage
    ) -> Iterator[tuple[str, PreTrainedModel]]:
        """Yield the models to compare with their names, the student at the end."""
        models = job.models
        teacher = models.teacher(last)
        if teacher is not None:
            yield f"teacher {teacher.name}", teacher.model
        untrained = models.build_untrained()
        if untrained is not None:
            yield "student before training", untrained
        assert job.student is not None, "the stages have run"
        yield "student", job.student

    def estimate(self, job: Job) -> tuple[Job, list[PhaseEstimate]]:
        models = job.models
        last = models.recipe.stages[-1]
        if not isinstance(last, Stage) or not writes_text(last, models.context):
            return job, []
        rows = encode_held_out(last, models.context, models.run.seed)
        few = rows.select(range(min(len(rows), 8)))
        began = time.perf_counter()
        for _, model in self.list_models(job, last):
            score_documents(model, few, last, models.context)
        seconds = (time.perf_counter() - began) * len(rows) / len(few)
        return job, [PhaseEstimate("perplexity", seconds=(seconds, seconds))]


PRETRAIN_PHASES: tuple[Phase[Job], ...] = (RunStages(), KeepCheckpoint(), ScoreText())


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
