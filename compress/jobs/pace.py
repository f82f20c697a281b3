"""Fit a run into its minutes: measure the speed of teacher and machine, and derive how
many rows to train on and to score, and how long shipping takes."""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Final

import torch
from accelerate import PartialState
from rich.console import Console

from compress.config.stages import Stage
from compress.console import print_note
from compress.data.held_out import DECIDING_ROWS, score_error
from compress.data.task import TaskData
from compress.errors import CompressError, RecipeError
from compress.evaluation import metrics
from compress.evaluation.evaluator import Evaluator
from compress.io import load_json, write_json
from compress.models.flops import count_parameters
from compress.models.memory import to_device
from compress.models.teacher import Teacher
from compress.records.forecast import time_call
from compress.training.context import TrainingContext
from compress.training.processes import from_first
from compress.training.run import Run
from compress.training.schedule import Pace, TimeLimit
from compress.training.stage import plan_steps

RECORD: Final = "pace.json"
"""The file of a run that records its pace."""
TIMED_ROWS: Final = 64
"""Rows on which the teacher is timed."""
TIMED_TEXTS: Final = 8
"""Rows of full length on which a model without a task is timed."""
LOOP: Final = 2_000_000
"""Iterations of the Python loop that is timed."""
LOOP_SECONDS: Final = 0.12
"""Seconds that the loop takes on an idle Xeon (docs/LOG.md)."""
SHIPPING_SECONDS: Final = 60.0
SHIPPING_SECONDS_PER_MILLION: Final = 0.25
"""Seconds to write, quantise and race the files, and more for each million parameters
of the teacher: estimates from a few runs on one machine (docs/LOG.md)."""
SCORING_SHARE: Final = 0.1
"""The share of the minutes in which all models are scored."""
FORWARDS: Final = 5
"""Cost of scoring a row in a run, in forward passes of the teacher: two of its own, and
those of smaller files."""
FEWEST_SCORED: Final = 200
"""The minimum number of rows to score, however short the time is."""
MANY_ROWS: Final = 100_000
"""Number of rows from which a run says at its start how long it may take."""
FORWARDS_TO_TRAIN: Final = 2.5
"""Cost of learning from a row, including the teacher's answer, in forward passes of the
teacher (docs/LOG.md)."""
TRAINING_SHARE: Final = 0.2
"""The minimum share of the minutes that must be left to train."""


def limit_time(
    context: TrainingContext,
    stages: Sequence[Stage],
    run: Run,
    *,
    minutes: float | None,
    began: float,
) -> TrainingContext:
    """Return the context with a limit on the time of its run, and with as many rows to
    score as that leaves time for; unchanged without `minutes`.

    began  when the command began, by `time.monotonic`

    The pace is measured once, and kept in the run. Raises RecipeError if preparing and
    shipping leave no time to train, and for a stage whose steps must be known at its
    start.
    """
    for stage in stages:
        if stage.open_ended or minutes is not None:
            _refuse_turns(stage)
    if minutes is None:
        if run.main:
            _announce_many_rows(context, stages)
        return context
    names = tuple(stage.name for stage in stages)
    before = from_first(lambda: run.before)
    began -= before
    prepared = from_first(lambda: time.monotonic() - began)
    left = 60 * minutes - prepared
    teacher = context.base_teacher
    if teacher is None:  # it is not measured, and nothing is shipped
        ends = time.monotonic() + left
        return replace(context, time_limit=TimeLimit(ends, names, minutes, began))
    pace = from_first(lambda: _read_pace(run, teacher, context, stages))
    data = context.data
    if teacher.answers_any_rows:
        data = _thin(data, pace, minutes, context.console)
    shipping = _shipping_seconds(pace, teacher, data)
    left -= shipping
    if left < TRAINING_SHARE * 60 * minutes and not before:
        least = (prepared + shipping) / (1 - TRAINING_SHARE) / 60
        raise RecipeError(
            [
                f"--minutes {minutes:g}: preparing took {prepared:.0f} s, and shipping "
                f"takes about {shipping:.0f} s: no time is left to train; expected at "
                f"least {least:.1f}"
            ]
        )
    if run.main:
        write_json(run.path / RECORD, asdict(pace))
    limit = TimeLimit(time.monotonic() + left, names, minutes, began, pace)
    return replace(context, task_data=data, time_limit=limit)


def _refuse_turns(stage: Stage) -> None:
    """Raise RecipeError for a stage whose steps must be known at its start."""
    if stage.step is not None and getattr(stage.step.function, "in_turn", False):
        raise RecipeError(
            [
                f"stage {stage.name}: {stage.step.by} trains one layer after the other "
                "and gives each a share of the steps: set `steps`, or a number of "
                "`epochs`, and leave --minutes out"
            ]
        )


def _announce_many_rows(context: TrainingContext, stages: Sequence[Stage]) -> None:
    """Say roughly how long many rows take, and which options are faster."""
    teacher = context.base_teacher
    if teacher is None or (rows := len(context.data.train)) < MANY_ROWS:
        return
    pace = measure_pace(teacher, context, stages)
    read = 0
    for stage in stages:
        per_epoch = max(1, rows // stage.batch)
        read += plan_steps(stage, per_epoch) * stage.batch
    hours = read * FORWARDS_TO_TRAIN * pace.seconds_per_row / 3600
    print_note(
        context.console,
        f"{rows:,} rows take up to {hours:,.1f} hours: {read / rows:.1f} passes over "
        "them. --effort quick takes at most 40 % of that, --minutes 60 reads as many "
        "rows as fit into an hour",
    )


def _read_pace(
    run: Run, teacher: Teacher, context: TrainingContext, stages: Sequence[Stage]
) -> Pace:
    """Read the pace of a run that is resumed, or measure it."""
    record = run.path / RECORD
    if record.is_file():
        return Pace(**load_json(record, f"Remove {record}: it will be measured again"))
    return measure_pace(teacher, context, stages)


def measure_pace(
    teacher: Teacher, context: TrainingContext, stages: Sequence[Stage]
) -> Pace:
    """Time a forward of some validation rows by the teacher, as long as the stages read
    them, and a loop of Python."""
    length = max(stage.length for stage in stages)
    task = context.data.task
    few = task.thin(context.data.validation, TIMED_ROWS)
    rows = Evaluator.from_split(task, few, context.tokenizer, length).rows
    to_device(teacher.model, PartialState().device)

    def score() -> None:
        metrics.logits(teacher.model, rows, context.collate, bf16=context.bf16)

    score()  # the first forward takes longer
    seconds = time_call(score)
    looping = min(time_call(_loop) for _ in range(3))
    return Pace(seconds / len(rows), max(1.0, looping / LOOP_SECONDS))


def refuse_long_steps(
    teacher: Teacher, context: TrainingContext, stages: Sequence[Stage], run: Run
) -> None:
    """Raise CompressError if the time limit is too short for a step of a stage, judged
    by forwards of the model over rows of full length."""
    limit = context.time_limit
    if limit is None:
        return
    find = partial(_find_long_step, teacher, stages, limit)
    if problem := from_first(lambda: "" if run.before else find()):
        raise CompressError(problem)


def _find_long_step(teacher: Teacher, stages: Sequence[Stage], limit: TimeLimit) -> str:
    for stage in stages:
        rows = stage.batch
        if stage.tokens:
            rows = math.ceil(stage.tokens / stage.length)
        forward = _time_rows(teacher, stage.length)
        seconds = rows * FORWARDS_TO_TRAIN * forward
        left = limit.seconds(stage.name)
        lacking = seconds - left
        if lacking > 0:
            least = limit.minutes + lacking * len(stages) / 60
            return (
                f"stage {stage.name}: one step, of {rows:,} rows, takes about "
                f"{seconds / 60:.1f} minutes, and --minutes {limit.minutes:g} leaves "
                f"{left / 60:.1f}; give at least {math.ceil(least)}, or set a smaller "
                "batch"
            )
    return ""


def _time_rows(teacher: Teacher, length: int) -> float:
    """Return the seconds that a model takes for a row of this length, and for the
    probabilities of all words at each place."""
    model: Any = teacher.model
    to_device(model, PartialState().device)
    ids = torch.zeros(TIMED_TEXTS, length, dtype=torch.int64, device=model.device)
    read = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if model.config.is_encoder_decoder:
        read["decoder_input_ids"] = ids
    words = model.get_input_embeddings().weight

    @torch.no_grad()
    def run() -> None:
        hidden = model(**read)[0]
        if hidden.shape[-1] == words.shape[-1]:
            hidden = (hidden @ words.T).log_softmax(-1)
        hidden.sum().item()  # waits for it

    run()  # the first forward takes longer
    return time_call(run) / TIMED_TEXTS


def _loop() -> None:
    sum(turn * turn for turn in range(LOOP))


def _thin(data: TaskData, pace: Pace, minutes: float, console: Console) -> TaskData:
    """Keep the rows that the minutes leave time for: as many to train on as the teacher
    could answer, and as many to score as take a tenth of the time."""
    seconds = 60 * minutes
    read = math.ceil(seconds / pace.seconds_per_row)
    scored = round(SCORING_SHARE * seconds / (FORWARDS * pace.seconds_per_row))
    scored = min(DECIDING_ROWS, max(FEWEST_SCORED, scored))
    limits = {"train": read, "validation": scored, "test": scored}
    thinned = {}
    for name, count in limits.items():
        split = getattr(data, name)
        if split is None or len(split) <= count:
            continue
        thinned[name] = data.task.thin(split, count)
        known = f", which know an accuracy of 90 % to {score_error(count):.1f} points"
        print_note(
            console,
            f"--minutes {minutes:g} leaves time for {len(thinned[name]):,} of the "
            f"{len(split):,} rows of {name}{'' if name == 'train' else known}",
        )
    return replace(data, **thinned)


def _shipping_seconds(pace: Pace, teacher: Teacher, data: TaskData) -> float:
    """Estimate the seconds from the end of training to the end of the run."""
    _, measured = data.measured
    millions = count_parameters(teacher.model) / 1e6
    files = SHIPPING_SECONDS + SHIPPING_SECONDS_PER_MILLION * millions
    rows = len(data.validation) + 2 * len(measured)
    return pace.slowness * files + rows * pace.seconds_per_row
