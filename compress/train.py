"""The training stage: transformers' Trainer minimises a step.

The loop, mixed precision, DDP and the optimiser are the library's, what differs is in `trainer`; here a stage's
numbers become its arguments, and what is left half-done by a kill is found and continued.
"""

import json
import math
import os
import shutil
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from rich.console import Console
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from compress.data.batches import Batching, LengthGrouped, TokenBudget
from compress.errors import RecipeError
from compress.journal import Journal, forget_after
from compress.processes import from_first
from compress.recipe import Stage
from compress.resume import newest_checkpoint, steps_of
from compress.run import Run
from compress.screen import warn
from compress.step import Distillation, Step
from compress.trainer import Corrupt, Score, StepTrainer
from compress.vocabulary import only_tokens_in_use

MANY_EPOCHS = 40
"""Passes over the same text beyond which nothing is learned: Muennighoff et al. 2023, arXiv:2305.16264, Sec. 6."""


@dataclass(frozen=True)
class Trained:
    """What a stage took, in all processes that worked on it one after another.

    Optimiser steps and examples seen, wall seconds, the most memory that one process held; the best score and its step
    (None where the stage scores nothing).
    """

    steps: int
    examples: int
    seconds: float
    score: float | None
    best_step: int | None
    peak_rss_mb: float = 0.0

    @staticmethod
    def read(folder: Path) -> "Trained":
        """Read what is written in a finished stage's folder."""
        return Trained(**json.loads((folder / "training.json").read_text(encoding="utf-8"))["trained"])

    def write(self, folder: Path) -> None:
        """Write it beside the stage's model."""
        content = json.dumps({"trained": asdict(self)}, indent=1) + "\n"
        (folder / "training.json").write_text(content, encoding="utf-8")


def train(
    step: Step,
    stage: Stage,
    rows: Dataset,
    collate: Batching,
    run: Run,
    *,
    corrupt: Corrupt | None = None,
    score: Score | None = None,
    bf16: bool = False,
    console: Console | None = None,
) -> Trained:
    """Minimise `step` over `rows` as `stage` says; the step's student ends with the best weights scored, or the last.

    Continues from the newest whole checkpoint in the run's directory of this stage, to the same final weights as
    without the interruption. `rows` are encoded (see data.batches.encode). Raises CompressError when the loss is not
    finite.
    """
    known = getattr(step, "only_rows", False) and corrupt is None  # others meet tokens that are not in the rows
    with only_tokens_in_use(step.student, rows) if known else nullcontext():
        return _train(step, stage, rows, collate, run, corrupt=corrupt, score=score, bf16=bf16, console=console)


def _train(
    step: Step,
    stage: Stage,
    rows: Dataset,
    collate: Batching,
    run: Run,
    *,
    corrupt: Corrupt | None,
    score: Score | None,
    bf16: bool,
    console: Console | None,
) -> Trained:
    folder = run.stage(stage.name)
    scored = score is not None and stage.evaluate > 0
    order = _order(stage, rows, run.seed)
    arguments = _arguments(step, stage, order, folder, seed=run.seed, scored=scored, bf16=bf16)
    if console and (note := repeated(stage, _steps_per_epoch(stage, order), rows)):
        warn(console, note)
    trainer = StepTrainer(step, stage, rows, order=order, collate=collate, folder=folder, args=arguments)
    trainer.score, trainer.corrupt = score, corrupt
    console = console or Console(quiet=True)
    checkpoint = from_first(lambda: newest_checkpoint(folder, partial(warn, console)))
    journal = None
    if run.main:
        shutil.rmtree(arguments.output_dir or "", ignore_errors=True)  # a checkpoint that a kill left half-written
        forget_after(run.path / "log.jsonl", stage.name, steps_of(checkpoint), partial(warn, console))
        journal = Journal(stage.name, run.path / "log.jsonl", run.path / "tensorboard", console, stage.batch)
        trainer.add_callback(journal)
        trainer.add_callback(_KeepsSeconds(run))
    try:
        trainer.train_from(checkpoint)
    finally:
        if journal is not None:
            journal.close()
            shutil.rmtree(str(arguments.output_dir), ignore_errors=True)
    spent, steps = trainer.spent, trainer.state.global_step
    trainer.restore_best()
    if hasattr(step, "finish"):
        step.finish()
    best = trainer.state.best_global_step
    examples = round(steps * len(rows) / _steps_per_epoch(stage, order)) if stage.tokens else steps * stage.batch
    best_score = trainer.state.best_metric if best else None
    return Trained(steps, examples, spent.seconds, best_score, best, spent.peak_rss_mb)


class _KeepsSeconds(TrainerCallback):
    """What the run has taken is kept when a checkpoint is."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.run.keep_seconds()


def _order(stage: Stage, rows: Dataset, seed: int) -> LengthGrouped | TokenBudget:
    """Which rows come when: so many to a batch, or as many as a budget of tokens holds."""
    if stage.tokens is None:
        return LengthGrouped(rows["length"], stage.batch, seed=seed, whole=True)
    _, accumulation = shares(stage, _processes())
    return TokenBudget(rows["length"], stage.tokens // (accumulation * _processes()), seed=seed)


def _steps_per_epoch(stage: Stage, order: LengthGrouped | TokenBudget) -> int:
    """Optimiser steps."""
    if stage.tokens is None:
        return len(order) // stage.batch
    _, accumulation = shares(stage, _processes())
    return max(1, len(order) // (accumulation * _processes()))


def planned_steps(stage: Stage, per_epoch: int) -> int:
    """Count the optimiser steps of a stage over data of which an epoch takes `per_epoch`."""
    total = stage.steps or max(1, math.ceil(stage.epochs * per_epoch))
    return total if stage.max_epochs is None else min(total, max(1, math.ceil(stage.max_epochs * per_epoch)))


def repeated(stage: Stage, per_epoch: int, rows: Dataset) -> str:
    """Say how often the text is gone through where it is too little for the stage's steps; '' where it is not."""
    asked, total = stage.steps, planned_steps(stage, per_epoch)
    if stage.data != "text" or asked is None or asked <= MANY_EPOCHS * per_epoch:
        return ""
    text = f"{stage.name}: {asked:,} steps are {asked / per_epoch:,.0f} passes over {sum(rows['length']):,} tokens"
    if total < asked:
        return f"{text}: cut to {total:,} steps; give more text, or set steps (--set) to have as many all the same"
    return f"{text}, of which those beyond {MANY_EPOCHS} teach nothing; give more text, or fewer steps"


def _processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _arguments(
    step: Step,
    stage: Stage,
    order: LengthGrouped | TokenBudget,
    folder: Path,
    *,
    seed: int,
    scored: bool,
    bf16: bool,
) -> TrainingArguments:
    micro, accumulation = shares(stage, _processes())
    per_epoch = _steps_per_epoch(stage, order)
    total = planned_steps(stage, per_epoch)
    every = max(1, min(total, per_epoch) // stage.evaluate) if scored else total
    return TrainingArguments(
        output_dir=str(folder / ".partial"),
        max_steps=total,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        learning_rate=stage.lr,
        lr_scheduler_type=stage.schedule,
        warmup_steps=math.ceil(total * stage.warmup),
        weight_decay=stage.weight_decay,
        adam_beta1=stage.betas[0],
        adam_beta2=stage.betas[1],
        adam_epsilon=stage.eps,
        max_grad_norm=stage.clip,
        optim="adamw_torch_fused",
        bf16=bf16,
        use_cpu=not torch.cuda.is_available(),
        seed=seed,
        data_seed=seed,
        eval_strategy="steps" if scored else "no",
        eval_steps=every,
        metric_for_best_model="score" if scored else None,
        greater_is_better=True if scored else None,
        save_strategy="steps",
        save_steps=stage.checkpoint or max(1, math.ceil(total / 10)),
        logging_steps=max(1, min(50, total // 100)),
        logging_nan_inf_filter=False,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        label_names=["labels"],
        ddp_find_unused_parameters=not isinstance(step, Distillation) or "logits" not in step.objective.student_wants,
        dataloader_pin_memory=torch.cuda.is_available(),
    )


def shares(stage: Stage, processes: int) -> tuple[int, int]:
    """(examples per forward pass and process, accumulated passes) that make up the stage's batch exactly.

    Of a stage with a budget of tokens: (rows of full length per pass and process, passes that spend it). Raises
    RecipeError when nothing does.
    """
    if stage.tokens is not None:
        whole = stage.tokens // (stage.max_length * processes)
        if not whole:
            raise RecipeError(
                [f"stage {stage.name}: tokens {stage.tokens} hold no row of {stage.max_length} for each process"]
            )
        micro = min(stage.micro_batch or whole, whole)
        return micro, whole // micro
    share, rest = divmod(stage.batch, processes)
    if rest:
        raise RecipeError(
            [f"stage {stage.name}: batch {stage.batch} cannot be split evenly over {processes} processes"]
        )
    micro = min(stage.micro_batch or share, share)
    if share % micro:
        raise RecipeError([f"stage {stage.name}: micro_batch {micro} does not divide the {share} examples per process"])
    return micro, share // micro
