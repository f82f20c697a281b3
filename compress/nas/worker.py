"""A worker: join the study of a search that runs elsewhere, and evaluate shapes for it until it ends.

Start as many as you like, at any time; what they need is in the study. One that is killed loses nothing: its trial is
run again, with the same parameters, by another process.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from accelerate import PartialState
from rich.console import Console
from transformers import AutoTokenizer

from compress import io as digest
from compress.data import load_task
from compress.data.cache import home
from compress.data.collate import Collate
from compress.errors import SearchError
from compress.evaluation.evaluator import Evaluator
from compress.latency.model import LatencyTable
from compress.models import heads, teacher
from compress.models.teacher import Teacher
from compress.nas.config import SearchConfig
from compress.nas.context import RunStages, ScratchEvaluator, SearchContext, StudentEvaluator, SupernetEvaluator
from compress.nas.costs import CostModel
from compress.nas.space import Shapes
from compress.nas.study import close_study, join_study, run_trials
from compress.provenance import redact
from compress.training.context import TrainingContext

StageRunner = Callable[[Teacher, Teacher, TrainingContext], RunStages]
"""Make what runs stages with this base teacher and task teacher: `commands.search.stage_runner`."""
ATTRIBUTE = "for workers"
"""The attribute of the study that holds WorkerInputs."""


@dataclass(frozen=True)
class WorkerInputs:
    """The inputs of a worker, kept in the study.

    search    search.yaml
    latencies    the latency models
    weights   folder of the supernet, or of the teacher that trains each trial; digest: of its content
    steps     of each trial's training
    """

    search: str
    latencies: str
    weights: str
    digest: str
    bf16: bool
    steps: int | None = None

    @staticmethod
    def from_study(study: "optuna.Study") -> "WorkerInputs":
        """Load them. Raises SearchError where `write_inputs` has not been called."""
        found: Any = study.user_attrs.get(ATTRIBUTE)
        if not isinstance(found, dict):
            raise SearchError(f"study {study.study_name!r}: its search has not begun its trials; start workers then")
        return WorkerInputs(**found)


def write_inputs(study: "optuna.Study", context: SearchContext) -> None:
    """Write what workers need into the study, once the supernet is trained, or the teacher fine-tuned."""
    plain = isinstance(context.student_evaluator, ScratchEvaluator)
    stage = context.search.space.supernet
    folder = context.task_teacher.folder if stage is None else context.run.result(stage.name)
    steps = context.student_evaluator.stage.steps if isinstance(context.student_evaluator, ScratchEvaluator) else None
    inputs = WorkerInputs(
        context.search.to_yaml(), context.costs.latencies.to_json(), str(folder.resolve()), teacher.identify(folder),
        context.training.bf16, steps if plain else None,
    )  # fmt: skip
    if study.user_attrs.get(ATTRIBUTE) != vars(inputs):
        study.set_user_attr(ATTRIBUTE, vars(inputs))


def join(
    storage: str,
    stage_runner: StageRunner,
    *,
    name: str | None = None,
    weights: Path | None = None,
    minutes: float | None = None,
    allow_code: str | Path | None = None,
    console: Console | None = None,
) -> None:
    """Evaluate shapes of the search in this storage until it has all it asks for, or `minutes` have passed.

    name      of its study, where the storage holds several
    weights   the folder of the supernet (or teacher) here, where it is not at the path that the search knows it by
    allow_code  the folder of functions that are not ours and that its space names

    Raises SearchError where the study or the weights cannot be reached, or are not those of the search.
    """
    console = console or Console(quiet=True)
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    study = join_study(storage, name, say=say)
    try:
        if study.user_attrs.get("over"):
            return say("the search has ended")
        inputs = WorkerInputs.from_study(study)
        folder = _find_weights(inputs, weights, redact(storage))
        search = SearchConfig.from_yaml(inputs.search, redact(storage)).with_code(allow_code)
        evaluator = _make_evaluator(
            search, inputs, folder, study.study_name, console=console, stage_runner=stage_runner
        )
        run_trials(study, evaluator, seconds=None if minutes is None else 60 * minutes, worker=True, say=say)
    finally:
        close_study(study)


def _find_weights(inputs: WorkerInputs, weights: Path | None, where: str) -> Path:
    folder = weights or Path(inputs.weights)
    if not (folder / "config.json").is_file():
        raise SearchError(
            f"{where}: its search needs the weights in {folder}, which this machine does not have: mount or copy that "
            "folder here, and say where it is with --weights"
        )
    if teacher.identify(folder) != inputs.digest:
        raise SearchError(f"{folder}: are not the weights of this search, or not whole; copy {inputs.weights} again")
    return folder


def _make_evaluator(
    search: SearchConfig, inputs: WorkerInputs, folder: Path, study: str, *, console: Console, stage_runner: StageRunner
) -> StudentEvaluator:
    data = load_task(search.data, **asdict(search.columns), seed=search.seed)
    task = data.task
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    training = TrainingContext(data, None, tokenizer, Collate(tokenizer), inputs.bf16, console)
    evaluator = Evaluator.from_split(task, data.validation, tokenizer, search.max_length)
    latencies = LatencyTable.from_json(inputs.latencies)
    if search.space.mode == "supernet":
        whole = heads.load(folder, "task", task.kind).to(PartialState().device)
        costs = CostModel(search, Shapes.of(search.space, whole.config), latencies, task.kind)
        return SupernetEvaluator.from_model(costs, whole, evaluator, training)
    task_teacher = teacher.load(search.teacher, folder, task)
    task_teacher.model.to(PartialState().device)
    costs = CostModel(search, Shapes.of(search.space, task_teacher.model.config), latencies, task.kind)
    stage = search.space.short
    if inputs.steps is not None:
        stage = stage.model_copy(update={"steps": inputs.steps})
    scratch = home() / "search" / f"{study}-{digest.hash_value(inputs.search)[:12]}"
    return ScratchEvaluator(
        costs, stage_runner(task_teacher, task_teacher, training), training, evaluator, scratch, stage
    )
