"""A worker: join the study of a search in another process, and evaluate shapes for it
until it ends.

Any number of workers can start at any time, before the search too; the study holds
their inputs. If a worker is killed, another process runs its trial again with the same
parameters.
"""

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import optuna
from accelerate import PartialState
from rich.console import Console

from compress import io as digest
from compress.config import user_code
from compress.console import plain_printer
from compress.data import TaskData, load_task
from compress.data.cache import home
from compress.data.collate import Collate
from compress.errors import SearchError
from compress.evaluation.evaluator import Evaluator
from compress.exporters.manifest import kind_of_bundle
from compress.jobs.checks import join_processes
from compress.latency.model import LatencyTable
from compress.models import teacher
from compress.models.folder import identify
from compress.models.loader import load_result, load_tokenizer
from compress.models.padding import pads_left
from compress.nas.config import SearchConfig
from compress.nas.context import (
    ScratchEvaluator,
    SearchContext,
    StudentEvaluator,
    SupernetEvaluator,
)
from compress.nas.costs import CostModel
from compress.nas.space import Shapes
from compress.nas.storage import NotStartedError
from compress.nas.study import close_study, join_study, run_trials
from compress.progress import Say
from compress.provenance import redact
from compress.records.json_text import from_json, to_json
from compress.training.context import TrainingContext
from compress.training.teacher_vectors import with_teacher

ATTRIBUTE = "for workers"
"""The attribute of the study that holds WorkerInputs."""
POLL_SECONDS = 5.0
"""Seconds between two looks for a search that has not started yet."""


@dataclass(frozen=True)
class WorkerInputs:
    """The inputs of a worker, kept in the study.

    search     the text of search.yaml
    latencies  the text of the latency table
    weights    folder of the supernet, or of the teacher that trains each trial; digest:
               of its content
    rows       digest of the data, of how their texts are read, and of the code that
               they and the training use
    steps      steps of each trial's training
    """

    search: str
    latencies: str
    weights: str
    digest: str
    bf16: bool
    rows: str = ""
    steps: int | None = None

    @staticmethod
    def from_study(study: "optuna.Study") -> "WorkerInputs":
        """Load the inputs. Raises NotStartedError before `write_inputs` was called."""
        inputs: Any = study.user_attrs.get(ATTRIBUTE)
        if not isinstance(inputs, dict):
            raise NotStartedError(
                f"study {study.study_name!r}: its search has not started its trials yet"
            )
        return WorkerInputs(**inputs)


def write_inputs(study: "optuna.Study", context: SearchContext) -> None:
    """Write the inputs of workers into the study, once the supernet is trained, or the
    teacher fine-tuned."""
    evaluator = context.student_evaluator
    stage = context.search.space.supernet
    folder = (
        context.task_teacher.folder if stage is None else context.run.result(stage.name)
    )
    inputs = WorkerInputs(
        context.search.to_yaml(),
        to_json(context.costs.latencies),
        str(folder.resolve()),
        identify(folder),
        context.training.bf16,
        _identify_rows(context.search, context.training.data),
        evaluator.stage.steps if isinstance(evaluator, ScratchEvaluator) else None,
    )
    if study.user_attrs.get(ATTRIBUTE) != vars(inputs):
        study.set_user_attr(ATTRIBUTE, vars(inputs))


def _identify_rows(search: SearchConfig, data: TaskData) -> str:
    task = data.task
    code = user_code.digests(search.space, search.columns.kind)
    return digest.hash_value(
        [
            *(data.train._fingerprint, data.validation._fingerprint),
            *(task.kind, task.metric, task.preparation.by_purpose),
            code,
        ]
    )


def join(
    storage: str,
    *,
    name: str | None = None,
    weights: Path | None = None,
    minutes: float | None = None,
    allow_code: str | Path | None = None,
    console: Console | None = None,
) -> None:
    """Evaluate shapes for the search in this storage until it ends, or `minutes` have
    passed. If it has not started yet, wait for it.

    name        of its study, if the storage holds several
    weights     the folder of the supernet (or teacher) on this machine, if its path
                differs from the search's
    allow_code  the folder of the user's own functions that the space names

    Raises SearchError if the study or the weights cannot be reached, or are not those
    of the search."""
    join_processes()
    console = console or Console(quiet=True)
    say = plain_printer(console)
    ends = None if minutes is None else time.monotonic() + 60 * minutes
    study = _join_when_started(storage, name, ends, say=say)
    try:
        if study.user_attrs.get("over"):
            return say("the search has ended")
        inputs = WorkerInputs.from_study(study)
        folder = weights or Path(inputs.weights)
        if not (folder / "config.json").is_file():
            raise SearchError(
                f"{redact(storage)}: its search needs the weights in {folder}, which "
                "are not on this machine: mount or copy that folder here, and pass its "
                "path with --weights"
            )
        if identify(folder) != inputs.digest:
            raise SearchError(
                f"{folder}: are not the weights of this search, or damaged; copy "
                f"{inputs.weights} again"
            )
        search = SearchConfig.from_yaml(inputs.search, redact(storage)).with_code(
            allow_code
        )
        evaluator = _make_evaluator(
            search, inputs, folder, study.study_name, console=console
        )
        run_trials(
            study,
            evaluator,
            seconds=None if ends is None else ends - time.monotonic(),
            worker=True,
            say=say,
        )
    finally:
        close_study(study)


def _join_when_started(
    storage: str, name: str | None, ends: float | None, *, say: Say
) -> optuna.Study:
    """Return the study once its search has started its trials, or is over. ends: by
    `time.monotonic`; after it, NotStartedError is raised."""
    told = False
    while True:
        try:
            study = join_study(storage, name, say=say)
            try:
                if not study.user_attrs.get("over"):
                    WorkerInputs.from_study(study)
            except BaseException:
                close_study(study)
                raise
        except NotStartedError as error:
            if ends is not None and time.monotonic() > ends:
                raise
            if not told:
                say(f"waiting for the search to start: {error}")
            told = True
            time.sleep(POLL_SECONDS)
        else:
            return study


def _make_evaluator(
    search: SearchConfig,
    inputs: WorkerInputs,
    folder: Path,
    study: str,
    *,
    console: Console,
) -> StudentEvaluator:
    kind = search.columns.kind or kind_of_bundle(folder)
    columns = replace(search.columns, kind=kind)
    data = load_task(search.data, **asdict(columns), seed=search.seed)
    task = data.task
    tokenizer = load_tokenizer(folder)
    latencies = from_json(
        LatencyTable, inputs.latencies, SearchError, "table of latencies", "start again"
    )
    task_teacher = None
    if search.space.mode == "supernet":
        model = load_result(folder, "task", task.kind)
    else:
        task_teacher = teacher.load(search.teacher, folder, task)
        model = task_teacher.model
    data = with_teacher(data, model.config)
    if _identify_rows(search, data) != inputs.rows:
        raise SearchError(
            f"{search.data}: the data, or your own code, are not those of the search: "
            "copy the same files here. Texts without judgements can only be scored by "
            "the search itself, which has their teacher"
        )
    evaluator = Evaluator.from_split(
        data.task, data.validation, tokenizer, search.max_length
    )
    model.to(PartialState().device)
    shapes = Shapes.from_space(search.space, model.config)
    costs = CostModel(search, shapes, latencies, task.kind)
    collate = Collate(tokenizer, left=pads_left(model))
    training = TrainingContext(data, None, tokenizer, collate, inputs.bf16, console)
    if task_teacher is None:
        return SupernetEvaluator.from_model(costs, model, evaluator, training)
    stage = search.space.short
    if inputs.steps is not None:
        stage = stage.model_copy(update={"steps": inputs.steps})
    scratch = home() / "search" / f"{study}-{digest.hash_value(inputs.search)[:12]}"
    return ScratchEvaluator(costs, task_teacher, training, evaluator, scratch, stage)
