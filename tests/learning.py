"""What tests of training share: rows of unequal lengths, a student, its teacher, a stage, and a run's directory."""

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from rich.console import Console
from torch import Tensor

from compress.config.stages import Stage
from compress.config.term import Term
from compress.data.collate import Collate
from compress.training import stage as stages
from compress.training.context import TrainingContext
from compress.training.run import Run
from compress.training.schedule import TimeLimit
from compress.training.scoring import Scoring
from compress.training.stage import Trained
from compress.training.step import Distillation
from tests import tiny

TERMS = (
    Term("hinton.soft_targets", 0.5, options={"temperature": 2.0}),
    Term("bert.labels", 0.5),
    Term("tinybert.hidden", project=True),
    Term("tinybert.attention", 0.1),
)
"""Means over examples, tokens and pairs of tokens, and a projection."""
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def rows(number: int = 22, *, vocabulary: int | None = None) -> Dataset:
    """Encoded rows of 3 to 20 tokens with three labels; the tokens are the first `vocabulary` words (all of them)."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(3, 21, (number,), generator=generator).tolist()
    words = len(tiny.SPECIAL) + (vocabulary or len(tiny.WORDS))
    ids = [torch.randint(len(tiny.SPECIAL), words, (length,), generator=generator).tolist() for length in lengths]
    return Dataset.from_dict(
        {
            "input_ids": ids,
            "attention_mask": [[1] * length for length in lengths],
            "labels": torch.randint(0, 3, (number,), generator=generator).tolist(),
            "length": lengths,
            "index": list(range(number)),
        }
    )


def collate() -> Collate:
    return Collate(tiny.tokenizer())


def stage(objective: Sequence[Term] = TERMS, **changes: Any) -> Stage:
    """A stage of 8 steps: two epochs of `rows` and two steps of a third."""
    settings = {
        "kind": "distill",
        "name": "lesson",
        "steps": 8,
        "batch": 8,
        "lr": 1e-2,
        "warmup": 0.3,
        "max_length": 32,
    }
    return Stage(**{**settings, "objective": tuple(objective), **changes})


def step(objective: Sequence[Term] = TERMS, *, teacher: Any = None, dropout: bool = False) -> Distillation:
    """The same weights each time: a student half as wide as its teacher, and half as deep."""
    student = tiny.model("bert", hidden=16, seed=1, **({} if dropout else NO_DROPOUT))
    torch.manual_seed(3)
    return Distillation(student, teacher or tiny.model("bert", layers=4, seed=2), objective)


def train(
    step: Any,
    stage: Stage,
    path: Path,
    *,
    score: Any = None,
    data: Dataset | None = None,
    corrupt: Any = None,
    **given: Any,
) -> Trained:
    """Train on `rows` in a run at this path; `score` scores one row, `given` is of the context."""
    scoring = Scoring(score, 1) if score else None
    return stages.train(step, stage, data or rows(), context(**given), run(path), corrupt=corrupt, scoring=scoring)


class Seconds(TimeLimit):
    """Give each stage the whole time."""

    def seconds(self, stage: str) -> float:
        return 60 * self.minutes


def context(*, seconds: float | None = None, console: Console | None = None, bf16: bool = False) -> TrainingContext:
    limit = None if seconds is None else Seconds(0.0, (), seconds / 60, 0.0)
    console = console or Console(quiet=True)
    return TrainingContext(None, None, tiny.tokenizer(), collate(), bf16, console, time_limit=limit)


def interrupt(step: Any, after: int) -> None:
    """Raise KeyboardInterrupt instead of the step's forward pass after so many of them."""
    passes = count()

    def stop(*_: Any) -> None:
        if next(passes) == after:
            raise KeyboardInterrupt

    step.register_forward_pre_hook(stop)


def run(path: Path) -> Run:
    return Run(path, seed=7, main=True)


def weights(trained: Distillation) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trained.state_dict().items()}
