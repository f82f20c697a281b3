"""Open and run the stages of a pre-training, which need no task."""

import shutil
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel

from compress.benchmark.local import machine
from compress.config.stages import Stage
from compress.console import plain_printer, warn
from compress.data import load_task
from compress.data.collate import Collate
from compress.data.corpus import load_corpus
from compress.io import atomic_file, atomic_folder, keep_if_intact, write_text
from compress.jobs.checks import (
    check_lengths,
    join_processes,
    load_functions,
    measure_lengths,
)
from compress.jobs.job import Job
from compress.jobs.pace import limit_time, refuse_long_steps
from compress.jobs.phase import Estimated, Phase
from compress.jobs.request import PretrainRequest
from compress.jobs.stages import StageModels
from compress.jobs.train import RunStages
from compress.models import checkpoints
from compress.models import precision as precisions
from compress.models.flops import count_parameters
from compress.provenance import command_line, timestamp, versions
from compress.records.forecast import PhaseEstimate
from compress.records.json_text import load_record, to_json
from compress.records.language_scores import (
    PERPLEXITY,
    LanguageScore,
    LanguageScores,
)
from compress.records.pretraining import Pretraining, TrainedStage
from compress.reporting.html import render_pretraining
from compress.training import finetune, scoring
from compress.training.context import TrainingContext, use_bf16
from compress.training.logging import curves
from compress.training.processes import check_same, node_first
from compress.training.run import RESULT
from compress.training.scoring import encode_held_out, score_documents, writes_text
from compress.training.stage import Trained, load_trained

CHECKPOINT_LIBRARIES = (
    "compress",
    "torch",
    "transformers",
    "datasets",
    "tokenizers",
    "numpy",
)
"""The packages that a checkpoint depends on."""


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
    """Score the language model of the last stage on held-out documents, next to its
    teacher and to itself before training."""

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

    def estimate(self, job: Job) -> Estimated[Job]:
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


class Present(Phase[Job]):
    """Write the page of a pre-training, and print what it has made and what to do
    next. The first process does it."""

    def run(self, job: Job) -> Job:
        models = job.models
        run = models.run
        console = models.context.console
        if not run.main:
            return job
        made = describe_pretraining(job)
        place = run.path / "report.html"
        with atomic_file(place) as page:
            page.write_text(render_pretraining(made), encoding="utf-8")
        for stage in made.stages:
            console.print(f"{stage.name}: {stage.about}", highlight=False)
        say = plain_printer(console)
        for line in [] if made.scores is None else made.scores.to_lines():
            say(line)
        say(f"checkpoint: {made.checkpoint}    page: {place}")
        say(f"next: {made.following}")
        return job


def describe_pretraining(job: Job) -> Pretraining:
    """Collect what the page of a finished pre-training shows."""
    models = job.models
    run = models.run
    student = job.student
    assert student is not None, "the stages have run"
    context = models.context
    spent = {
        stage.name: found
        for stage in models.recipe.training
        if (found := load_trained(run, stage.name, context.console)) is not None
    }
    points = curves(run.path / "log.jsonl")
    given = (context.task_data, context.corpus)
    texts = [each.name for each in given if each is not None]
    out = run.path / "bundle"
    following = (
        f"compress export {run.path} --out {out}"
        if student.can_generate()
        else f"compress distill --teacher {run.path / RESULT} --data DATA"
    )
    return Pretraining(
        recipe=models.recipe.name,
        teacher=models.base_teacher.name,
        text=", ".join(texts),
        checkpoint=str(run.path / RESULT),
        parameters=count_parameters(student),
        stages=tuple(
            TrainedStage(name, describe_stage(found), points.get(name, ()))
            for name, found in spent.items()
        ),
        scores=load_scores(run.path),
        following=following,
        command=command_line(),
        date=timestamp(),
        seed=run.seed,
        seconds=sum(found.seconds for found in spent.values()),
        machine=machine(),
        versions=versions(CHECKPOINT_LIBRARIES),
    )


def load_scores(folder: Path) -> LanguageScores | None:
    """Load the perplexities of a run, or return None if it has left no language
    model."""
    path = folder / PERPLEXITY
    if not path.exists():
        return None
    return load_record(LanguageScores, path, "delete it, and run again with --resume")


def describe_stage(spent: Trained) -> str:
    """Say how long a stage took, what its best score is, and on which rows."""
    took = f"{spent.steps:,} steps in {spent.seconds:,.0f} s"
    if spent.score is None:
        return took
    match spent.measure:
        case scoring.LOG_LIKELIHOOD:
            return f"{took}, log-likelihood of a held-out token {spent.score:.3f} nats"
        case scoring.NEGATIVE_LOSS:
            return f"{took}, loss on held-out rows {-spent.score:.3f}"
    measure = spent.measure or "score"
    return f"{took}, {measure} {spent.score:.3f} on the validation split"


PRETRAIN_PHASES: tuple[Phase[Job], ...] = (
    RunStages(),
    KeepCheckpoint(),
    ScoreText(),
    Present(),
)


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
    recipe = load_functions(request.recipe, state.num_processes, options.allow_code)
    number_format = precisions.choose(options.precision)
    with node_first():
        folder = checkpoints.resolve(name, allow_pickle=options.allow_pickle)
        base_teacher = finetune.load_with_head(
            name, folder, "encoder", allow_pickle=options.allow_pickle
        )
        data = load_task(request.data, seed=options.seed) if request.data else None
        text = load_corpus(request.corpus) if request.corpus else None
    digests = {"teacher": base_teacher.digest}
    if data is not None:
        lengths = measure_lengths(data, base_teacher, options.seed)
        recipe = recipe.with_length(lengths.fitting)
        digests["data"] = data.fingerprint
    if text is not None:
        digests["corpus"] = text.fingerprint
    check_lengths(recipe, base_teacher)
    run = request.open_run(recipe, state, number_format)
    with closing(run):
        check_same(digests)
        run.confirm(**digests)
        bf16 = use_bf16(number_format, recipe, base_teacher, request.console)
        tokenizer = base_teacher.tokenizer
        context = TrainingContext(
            data, text, tokenizer, Collate(tokenizer), bf16, request.console
        )
        context = limit_time(
            context,
            recipe.training,
            run,
            minutes=request.length.minutes,
            began=request.began,
        )
        refuse_long_steps(base_teacher, context, recipe.training, run)
        models = StageModels(recipe, base_teacher, None, context, run)
        for note in [*models.check(), *([run.note] if run.note else [])]:
            warn(request.console, note)
        yield Job(models)
