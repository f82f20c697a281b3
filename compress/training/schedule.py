"""Decide how long a stage trains, and at which learning rate, where its recipe says `auto`.

The rate is warmed up, held, and lowered in a straight line to zero (warmup-stable-decay: Hu et al. 2024,
arXiv:2404.06395; Haegele et al. 2024, arXiv:2405.18392). How long it is held is decided by the validation split: until
neither the score nor the distance to the teacher has improved for a while, within limits that depend on the rows. The
decision is a function of the evaluations alone, which a checkpoint holds: a resumed stage decides as an uninterrupted
one does.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from compress.io import make_folder, write_json
from compress.training.run import from_first

Effort = Literal["quick", "normal", "best"]
EFFORTS = {"quick": 0.4, "normal": 1.0, "best": 2.5}
"""Factors of the steps at least and at most."""
LEAST, MOST = 400, 1500
"""Steps at least, and at most where three epochs are fewer; chosen by a few runs (docs/LOG.md), not by a grid."""
EPOCHS, MANY_EPOCHS = 3, 40
"""Passes that more rows are given at most, and passes over few rows beyond which nothing was gained."""
WARMUP = 0.05
"""Share of the least number of steps in which the rate rises."""
DECAY = 0.25
"""Share of all steps in which the rate falls."""
PATIENCE, LOOKS = 0.2, 2
"""Share of the steps so far, and evaluations at least, without an improvement that end the hold."""
SCORE_GAIN, DISTANCE_GAIN = 0.1, 0.02
"""A rise of the smoothed score, in units of one over the root of the rows that are scored (a fifth of the largest
standard error of a share), and a fall of the smoothed distance, as a share of it, that count as improvements."""
SMOOTHED = 3
"""Evaluations that are averaged."""
WIDTH, RATE = 768, 5e-5
"""BERT-base is fine-tuned at 5e-5 (Devlin et al. 2019, A.3); the rate of other widths goes with 1 / width, as Adam's
does in Yang et al. 2022, arXiv:2203.03466, Table 3."""


def learning_rate(hidden: int) -> float:
    """Return the peak learning rate of a pre-trained model of this width."""
    return RATE * WIDTH / hidden


@dataclass(frozen=True)
class Length:
    """Limit an open-ended stage, in optimiser steps: at least, at most, and from one evaluation to the next.

    gain: what the smoothed score must rise by to count as better; infinite where only the distance tells.
    """

    least: int
    most: int
    every: int
    gain: float = math.inf

    @staticmethod
    def plan(
        per_epoch: int,
        batch: int,
        effort: Effort = "normal",
        *,
        rows: int = 0,
        graded: bool = True,
        whole: bool = False,
    ) -> "Length":
        """Plan a stage of which an epoch takes `per_epoch` steps, and an evaluation scores `rows`.

        graded: the score is a metric of the task. whole: the least is an epoch, where that is more. Evaluating costs
        about a tenth of the training: a row's forward pass is taken for a third of its training step.
        """
        factor = EFFORTS[effort]
        most = min(max(EPOCHS * per_epoch, MOST) * factor, MANY_EPOCHS * per_epoch)
        usual = min(LEAST * factor, most)
        least = max(usual, per_epoch * factor) if whole else usual
        every = min(max(rows / 3 / (0.1 * batch), usual / 12), most)
        gain = SCORE_GAIN / math.sqrt(rows) if graded and rows else math.inf
        return Length(max(1, math.ceil(least)), max(1, math.ceil(most)), max(1, math.ceil(every)), gain)

    @property
    def warmup(self) -> int:
        return math.ceil(WARMUP * self.least)

    @property
    def last_start(self) -> int:
        """Return the step at which the rate begins to fall whatever the evaluations say."""
        return max(1, self.most - math.ceil(self.most * DECAY))

    def decay_start(self, history: Sequence[Mapping[str, float]]) -> int | None:
        """Return the step after which the rate falls, told from the evaluations so far; None: not yet.

        `history` holds `step`, `eval_score` (higher is better) and, where there is a teacher, `eval_distance` (lower is
        better), in the order of their steps.
        """
        first = round(self.least * (1 - DECAY))
        best_score, best_distance, improved, looks = -math.inf, math.inf, 0, 0
        for at, each in enumerate(history):
            step = int(each["step"])
            if step >= self.last_start:
                break
            window = history[max(0, at + 1 - SMOOTHED) : at + 1]
            score = sum(one["eval_score"] for one in window) / len(window)
            distance = sum(one.get("eval_distance", math.inf) for one in window) / len(window)
            looks += 1
            if score > best_score + self.gain or distance < best_distance * (1 - DISTANCE_GAIN):
                improved, looks = step, 0
                best_score, best_distance = max(score, best_score), min(distance, best_distance)
            if step >= first and looks >= LOOKS and step - improved >= PATIENCE * step:
                return step
        return None

    def end(self, start: int | None) -> int:
        """Return the last step of a stage whose rate falls from `start` on; None: as far as is known."""
        return self.most if start is None else min(self.most, start + math.ceil(start * DECAY / (1 - DECAY)))

    def factor(self, step: int, start: int | None) -> float:
        """Return the share of the peak rate at this step, counted from 0."""
        start = self.last_start if start is None else start
        risen = min(1.0, (step + 1) / max(1, self.warmup))
        if step < start:
            return risen
        return min(risen, max(0.0, (self.end(start) - step) / (self.end(start) - start)))


@dataclass(frozen=True)
class TimeLimit:
    """End the training of a run by a time (`time.monotonic`), split evenly over the `stages` that are still to come."""

    ends: float
    stages: tuple[str, ...]
    minutes: float
    """The limit as it was given, of everything."""

    def seconds(self, stage: str) -> float:
        """Return what this stage may take from now on."""
        left = max(0.0, self.ends - time.monotonic())
        return left / (len(self.stages) - self.stages.index(stage)) if stage in self.stages else left


class AutoLength(TrainerCallback):
    """Let the rate fall, and end the stage, when its evaluations say so, or when only the fall still fits in `seconds`.

    A fall that the time has begun is kept in `record`: a resumed stage ends where it would have ended.
    """

    def __init__(self, length: Length, seconds: float | None, record: Path) -> None:
        self.length, self.seconds, self.record = length, seconds, record
        self.start: int | None = None
        self.began, self.first = time.perf_counter(), 0

    def schedule(self, optimizer: Any) -> LambdaLR:
        """Make the scheduler of this rate."""
        return LambdaLR(optimizer, self._factor)

    def _factor(self, step: int) -> float:
        return self.length.factor(step, self.start)

    def resume(self, state: TrainerState) -> int:
        """Decide again what the evaluations of a checkpoint, and its time limit, decided; return the last step."""
        self.start = None if self.seconds is None else from_first(self._read_recorded)
        if self.start is None:
            self.start = self.length.decay_start([each for each in state.log_history if "eval_score" in each])
        return self.length.end(self.start)

    def _read_recorded(self) -> int | None:
        """Read what an earlier process recorded; None where there is nothing, or nothing that can be read."""
        try:
            return max(1, int(json.loads(self.record.read_text(encoding="utf-8"))["start"]))
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.began, self.first = time.perf_counter(), state.global_step
        state.max_steps = self.resume(state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.seconds is None or self.start is not None or state.global_step >= self.length.last_start:
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

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.start is None:
            state.max_steps = self.resume(state)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Forget the best weights of the hold: those of the fall are better than their noisy scores tell."""
        if state.global_step == (self.length.last_start if self.start is None else self.start):
            state.best_metric, state.best_global_step = None, None
