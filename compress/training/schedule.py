"""Choose the length and learning rate of stages whose recipe says `auto`.

The rate is warmed up, held, and lowered linearly to zero (warmup-stable-decay: Hu et
al. 2024, arXiv:2404.06395; Haegele et al. 2024, arXiv:2405.18392). It is held until
neither the score on the validation split nor the distance to the teacher has improved
for a while, within limits that depend on the number of rows. The decision depends only
on the evaluations, which checkpoints contain: a resumed stage decides like an
uninterrupted one.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from compress.config.reference import Call
from compress.config.stages import Stage
from compress.errors import CompressError
from compress.io import make_folder, parse_json, write_json
from compress.training.processes import from_first

EFFORTS = {"quick": 0.4, "normal": 1.0, "best": 2.5}
"""Effort -> factor of the least and the most steps."""
LEAST_AUTO_STEPS = 400
MOST_AUTO_STEPS = 1500
"""The least steps of a stage, and the most unless three epochs are more; chosen from a
few runs (docs/LOG.md), not by a grid search."""
VARIED = 1500, 3000
"""The least steps (unless three epochs are fewer) and the most for variants of few
rows, where more steps help even if the validation score no longer rises."""
EPOCHS = 3
EPOCHS_OF_ROWS = 40
"""The most epochs over many rows (EPOCHS) and over few (EPOCHS_OF_ROWS); more gain
nothing."""
WARMUP = 0.05
"""Share of the least steps in which the rate rises."""
DECAY = 0.25
"""Share of all steps in which the rate falls."""
SCORE_PATIENCE = 0.2
LEAST_EVALUATIONS = 2
"""The hold ends when this share of the steps so far, and at least this number of
evaluations, have passed without an improvement."""
SCORE_GAIN = 0.1
DISTANCE_GAIN = 0.02
"""The smallest improvements: a rise of the smoothed score, in units of 1 / sqrt(rows
scored) (a fifth of the largest standard error of a proportion), and a relative fall of
the smoothed distance."""
SMOOTHED = 3
"""Number of evaluations that are averaged."""
REFERENCE_WIDTH = 768
RATE = 5e-5
"""BERT-base is fine-tuned at 5e-5 (Devlin et al. 2019, A.3); other widths scale the
rate by 1 / width, as for Adam in Yang et al. 2022, arXiv:2203.03466, Table 3."""


def learning_rate(hidden: int) -> float:
    """Return the peak learning rate for a pre-trained model of this width."""
    return RATE * REFERENCE_WIDTH / hidden


@dataclass(frozen=True)
class Length:
    """Limit an open-ended stage: its least and most optimiser steps, and the steps
    between evaluations.

    gain: the smallest rise of the smoothed score that counts as an improvement;
    infinite if only the distance decides.
    """

    least: int
    most: int
    every: int
    gain: float = math.inf

    @staticmethod
    def plan(
        stage: Stage,
        per_epoch: int,
        *,
        rows: int = 0,
        graded: bool = True,
        per_query: float = 1,
    ) -> "Length":
        """Plan a stage whose epoch takes `per_epoch` steps, and whose evaluations score
        `rows` rows. All texts of a corpus are seen at least once.

        graded: the score is a metric of the task. per_query: rows per query. They teach
        hardly more than one row, so the least steps grow with it, up to an epoch.
        Evaluations take about a tenth of the time of training, if the forward pass of a
        row takes a third of its training step.
        """
        factor = EFFORTS[stage.effort]
        varied = (
            isinstance(stage.augment, Call)
            and not stage.corpus
            and stage.effort != "quick"
        )
        epochs = EPOCHS * per_epoch
        least_steps, most_steps = (
            (min(VARIED[0], epochs), VARIED[1])
            if varied
            else (LEAST_AUTO_STEPS, max(epochs, MOST_AUTO_STEPS))
        )
        least_steps = max(
            least_steps, min(math.ceil(least_steps * per_query), per_epoch)
        )
        most = min(most_steps * factor, EPOCHS_OF_ROWS * per_epoch)
        shortest = min(least_steps * factor, most)
        least = max(shortest, per_epoch * factor) if stage.corpus else shortest
        every = min(max(rows / 3 / (0.1 * stage.batch), shortest / 12), most)
        gain = SCORE_GAIN / math.sqrt(rows) if graded and rows else math.inf
        return Length(
            max(1, math.ceil(least)),
            max(1, math.ceil(most)),
            max(1, math.ceil(every)),
            gain,
        )

    @property
    def warmup(self) -> int:
        return math.ceil(WARMUP * self.least)

    @property
    def last_start(self) -> int:
        """The step at which the rate begins to fall at the latest."""
        return max(1, self.most - math.ceil(self.most * DECAY))

    def decay_start(self, history: Sequence[Mapping[str, float]]) -> int | None:
        """Return the step after which the rate falls, given the evaluations so far, or
        None if it does not fall yet.

        `history` holds `step`, `eval_score` (higher is better) and, with a teacher,
        `eval_distance` (lower is better), in the order of their steps.
        """
        first = round(self.least * (1 - DECAY))
        best_score = -math.inf
        best_distance = math.inf
        improved = 0
        looks = 0
        for at, evaluation in enumerate(history):
            step = int(evaluation["step"])
            if step >= self.last_start:
                break
            window = history[max(0, at + 1 - SMOOTHED) : at + 1]
            score = sum(point["eval_score"] for point in window) / len(window)
            distance = sum(
                point.get("eval_distance", math.inf) for point in window
            ) / len(window)
            looks += 1
            if score > best_score + self.gain or distance < best_distance * (
                1 - DISTANCE_GAIN
            ):
                improved = step
                looks = 0
                best_score = max(score, best_score)
                best_distance = min(distance, best_distance)
            if (
                step >= first
                and looks >= LEAST_EVALUATIONS
                and step - improved >= SCORE_PATIENCE * step
            ):
                return step
        return None

    def end(self, start: int | None) -> int:
        """Return the last step of a stage whose rate falls from `start` on; the most
        steps if `start` is None."""
        return (
            self.most
            if start is None
            else min(self.most, start + math.ceil(start * DECAY / (1 - DECAY)))
        )

    def factor(self, step: int, start: int | None) -> float:
        """Return the share of the peak rate at this step, counted from 0."""
        start = self.last_start if start is None else start
        risen = min(1.0, (step + 1) / max(1, self.warmup))
        if step < start:
            return risen
        return min(
            risen, max(0.0, (self.end(start) - step) / (self.end(start) - start))
        )


PASSES_TIMED = 4
"""Forward passes of the first step from which the time of the whole step is
estimated."""
ANSWERING_SHARE = 0.15
"""The largest share of a run's minutes for a teacher to answer rows before they are
read."""


@dataclass(frozen=True)
class Pace:
    """Measure how fast a machine is at the time of a run.

    seconds_per_row  of the teacher, in a forward pass over rows of the task
    slowness         the time of plain Python, relative to a quiet machine; at least 1
    """

    seconds_per_row: float
    slowness: float = 1.0


@dataclass(frozen=True)
class TimeLimit:
    """Limit the time of a run: the time left until `ends` is split evenly over the
    remaining stages.

    ends     when training must end, by `time.monotonic`
    minutes  the limit that the user gave, for the whole run
    began    when the command began, or would have, had it not been interrupted
    pace     None if the run has no task
    """

    ends: float
    stages: tuple[str, ...]
    minutes: float
    began: float
    pace: Pace | None = None

    @property
    def spent(self) -> float:
        """Return the share of the training time that has passed."""
        return (time.monotonic() - self.began) / (self.ends - self.began)

    def answers_in_time(self, rows: int) -> bool:
        """Check whether a teacher answers `rows` rows in a small share of the time."""
        if self.pace is None:
            return False
        return rows * self.pace.seconds_per_row < ANSWERING_SHARE * 60 * self.minutes

    def seconds(self, stage: str) -> float:
        """Return the seconds that this stage may take from now on. A stage that is not
        among the remaining ones, such as training a language model that they need,
        counts as one more."""
        left = max(0.0, self.ends - time.monotonic())
        if stage in self.stages:
            return left / (len(self.stages) - self.stages.index(stage))
        return left / (len(self.stages) + 1)


class AutoLength(TrainerCallback):
    """Lower the rate and end the stage according to its evaluations, or when only the
    fall still fits into `seconds`.

    If the time limit decides, the step is saved in `record`, so that a resumed stage
    ends at the same step.
    """

    def __init__(self, length: Length, seconds: float | None, record: Path) -> None:
        self.length = length
        self.seconds = seconds
        self.record = record
        self.start: int | None = None
        self.began = time.perf_counter()
        self.first = 0
        self.passes = 0

    def is_open(self, step: int) -> bool:
        """Return True if the stage may still end before its most steps."""
        return (
            self.start is None
            and self.length.least < self.length.most
            and step < self.length.last_start
        )

    def schedule(self, optimizer: Any) -> LambdaLR:
        """Make the scheduler for this rate."""
        return LambdaLR(optimizer, self._factor)

    def _factor(self, step: int) -> float:
        return self.length.factor(step, self.start)

    def resume(self, state: TrainerState) -> int:
        """Repeat the decision for a checkpoint's evaluations and its time limit; return
        the last step."""
        self.start = None if self.seconds is None else from_first(self._read_record)
        if self.start is None:
            self.start = self.length.decay_start(
                [entry for entry in state.log_history if "eval_score" in entry]
            )
        return self.length.end(self.start)

    def _read_record(self) -> int | None:
        """Read the step that an earlier process saved; None if there is no readable
        record."""
        try:
            return max(1, int(parse_json(self.record)["start"]))
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **_: Any,
    ) -> None:
        self.began = time.perf_counter()
        self.first = state.global_step
        state.max_steps = self.resume(state)

    def on_substep_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **_: Any,
    ) -> None:
        """Refuse a step of many passes that takes longer than the time limit."""
        self.passes += 1
        if self.seconds is None or self.passes != PASSES_TIMED or state.global_step:
            return
        limit = self.seconds
        per_pass = (time.perf_counter() - self.began) / PASSES_TIMED
        whole = per_pass * args.gradient_accumulation_steps
        if not from_first(lambda: whole > limit):
            return
        raise CompressError(
            f"stage {self.record.parent.name}: one step, of "
            f"{args.gradient_accumulation_steps} passes, takes about "
            f"{whole / 60:.1f} minutes, and --minutes leaves {limit / 60:.1f}; give "
            "more, or set a smaller batch"
        )

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **_: Any,
    ) -> None:
        if (
            self.seconds is None
            or self.start is not None
            or state.global_step >= self.length.last_start
        ):
            return
        spent = time.perf_counter() - self.began
        fall = self.length.end(state.global_step) - state.global_step
        left = self.seconds - spent
        if from_first(lambda: left > fall * spent / (state.global_step - self.first)):
            return
        self.start = state.global_step
        state.max_steps = self.length.end(self.start)
        if state.is_world_process_zero:
            make_folder(self.record.parent)
            write_json(self.record, {"start": self.start})

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **_: Any,
    ) -> None:
        if self.start is None:
            state.max_steps = self.resume(state)

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **_: Any,
    ) -> None:
        """Discard the best weights of the hold: weights from the fall are better, even
        if a noisy score hides it."""
        if state.global_step == (
            self.length.last_start if self.start is None else self.start
        ):
            state.best_metric = None
            state.best_global_step = None
