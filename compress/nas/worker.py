"""A worker: joins the study of a search that runs elsewhere, and judges shapes beside it until it is over.

Start as many as there are machines, any time; what they need is in the study. One that is killed loses nothing: its
trial is run again, with the same parameters, by whoever is left.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from accelerate import PartialState
from rich.console import Console
from transformers import AutoTokenizer

from compress import io as digest
from compress.commands.distill import on_cpu
from compress.data import load_task
from compress.data.cache import home
from compress.data.collate import Collate
from compress.errors import SearchError
from compress.evaluation.evaluator import Exam
from compress.latency.costs import Clocks, Costs
from compress.models import heads, teacher
from compress.nas.config import Search
from compress.nas.context import Desk
from compress.nas.evaluators import PlainJudge, SupernetJudge
from compress.nas.outcomes import recorded
from compress.nas.space import Shapes
from compress.nas.storage import STEADY, Pulse, Say
from compress.nas.study import Judge, Space, close_study, join_study, run_trials
from compress.provenance import redact
from compress.training.stage import Material


def work(
    storage: Path | str,
    study_name: str | None,
    make_judge: Callable[[Mapping[str, str]], tuple[Space, Judge]],
    *,
    seconds: float | None = None,
    say: Say = print,
    watch: Callable[[optuna.Study], None] | None = None,
    pulse: Pulse = STEADY,
) -> optuna.Study:
    """Judge shapes of that study (None: the only one there) until it has all it asks for, or `seconds` are over.

    make_judge   given the identity with which the study was begun: the space and the judge of it

    Raises what join_study and run_trials raise. The study as this worker left it.
    """
    study = join_study(storage, study_name, pulse=pulse, say=say)
    space, judge = make_judge(recorded(study)["of"])
    run_trials(study, space, judge, seconds=seconds, say=say, watch=watch, pulse=pulse)
    return study


LEFT = "for workers"
"""The study's attribute."""


@dataclass(frozen=True)
class Needed:
    """search: search.yaml; clocks: the predictors; weights: the folder of the supernet, or of the teacher that trains
    each trial, and `digest` of what is in it; steps: of each trial's training."""

    search: str
    clocks: str
    weights: str
    digest: str
    bf16: bool
    steps: int | None = None

    @staticmethod
    def of(study: "optuna.Study") -> "Needed":
        """Raises SearchError where nothing was left."""
        found: Any = study.user_attrs.get(LEFT)
        if not isinstance(found, dict):
            raise SearchError(f"study {study.study_name!r}: its search has not begun its trials; start workers then")
        return Needed(**found)


def leave(study: "optuna.Study", desk: Desk) -> None:
    """Once its supernet is trained, or its teacher fine-tuned."""
    plain = isinstance(desk.judge, PlainJudge)
    stage = desk.search.space.supernet
    folder = desk.tutor.folder if stage is None else desk.run.result(stage.name)
    steps = desk.judge.stage.steps if isinstance(desk.judge, PlainJudge) else None
    needed = Needed(
        desk.search.to_yaml(), desk.costs.clocks.to_json(), str(folder.resolve()), teacher.identify(folder),
        desk.material.bf16, steps if plain else None,
    )  # fmt: skip
    if study.user_attrs.get(LEFT) != vars(needed):
        study.set_user_attr(LEFT, vars(needed))


def join(
    storage: str,
    *,
    name: str | None = None,
    weights: Path | None = None,
    minutes: float | None = None,
    allow_code: str | Path | None = None,
    console: Console | None = None,
) -> None:
    """Judge shapes of the search in this storage until it has all it asks for, or `minutes` have passed.

    name      of its study, where the storage holds several
    weights   the folder of the supernet (or teacher) here, where it is not at the path that the search knows it by
    allow_code  the folder of functions that are not ours and that its space names

    Raises SearchError where the study or the weights cannot be reached, or are not those of the search.
    """
    console = console or Console(quiet=True)
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    PartialState(cpu=on_cpu())
    study = join_study(storage, name, say=say)
    try:
        needed = Needed.of(study)
    finally:
        close_study(study)
    folder = _reached(needed, weights, redact(storage))
    asked = Search.from_yaml(needed.search, redact(storage)).with_code(allow_code)

    def judge(_: Mapping[str, str]) -> tuple[Shapes, SupernetJudge | PlainJudge]:
        return _judge(asked, needed, folder, study.study_name, console)

    seconds = None if minutes is None else 60 * minutes
    close_study(work(storage, study.study_name, judge, seconds=seconds, say=say))


def _reached(needed: Needed, weights: Path | None, where: str) -> Path:
    folder = weights or Path(needed.weights)
    if not (folder / "config.json").is_file():
        raise SearchError(
            f"{where}: its search needs the weights in {folder}, which this machine does not have: mount or copy that "
            "folder here, and say where it is with --weights"
        )
    if teacher.identify(folder) != needed.digest:
        raise SearchError(f"{folder}: are not the weights of this search, or not whole; copy {needed.weights} again")
    return folder


def _judge(
    asked: Search, needed: Needed, folder: Path, study: str, console: Console
) -> tuple[Shapes, SupernetJudge | PlainJudge]:
    data = load_task(asked.data, **asked.columns.model_dump(), seed=asked.seed)
    task = data.task
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    material = Material(data, None, tokenizer, Collate(tokenizer), needed.bf16, console)
    exam = Exam.of(task, data.validation, tokenizer, asked.max_length)
    clocks = Clocks.from_json(needed.clocks)
    if asked.space.mode == "supernet":
        whole = heads.load(folder, "task", task.kind).to(PartialState().device)
        costs = Costs(asked, Shapes.of(asked.space, whole.config), clocks, task.kind)
        return costs.shapes, SupernetJudge.of(costs, whole, exam, material)
    tutor = teacher.load(asked.teacher, folder, task)
    tutor.model.to(PartialState().device)
    costs = Costs(asked, Shapes.of(asked.space, tutor.model.config), clocks, task.kind)
    stage = asked.space.short
    if needed.steps is not None:
        stage = stage.model_copy(update={"steps": needed.steps})
    scratch = home() / "search" / f"{study}-{digest.of_value(needed.search)[:12]}"
    return costs.shapes, PlainJudge(costs, tutor, tutor, material, exam, scratch, stage)
