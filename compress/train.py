"""The training stage: transformers' Trainer minimises a step.

The loop, mixed precision, DDP and the optimiser are the library's. What is ours: batches of like lengths in an order
that depends on seed and epoch only, means that stay exact over processes and accumulation, every loss part in the
log, scores of the student while it learns, and checkpoints that are renamed into place.
"""

import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from rich.console import Console
from safetensors.torch import load_model, save_model
from torch import Tensor
from transformers import (
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from compress.data.batches import Batching, LengthGrouped
from compress.errors import CompressError, RecipeError
from compress.files import naming, written
from compress.journal import Journal, forget_after
from compress.recipe import Stage
from compress.run import Run
from compress.schedule import Started, per_group, trained_groups
from compress.step import Distillation, Step
from compress.vocabulary import only_tokens_in_use

Score = Callable[[PreTrainedModel], Mapping[str, float]]
"""student -> {"score": higher is better, ...} on the validation split."""
Corrupt = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
"""batch -> batch to learn from, drawn anew each time from torch's generator: masked tokens and their labels."""


@dataclass(frozen=True)
class Trained:
    """What a stage took: optimiser steps and examples seen, wall seconds of this process, the best score and its step
    (None where the stage scores nothing)."""

    steps: int
    examples: int
    seconds: float
    score: float | None
    best_step: int | None


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
    plain = isinstance(step, Distillation) and corrupt is None  # others meet tokens that are not in the rows
    with only_tokens_in_use(step.student, rows) if plain else nullcontext():
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
    arguments = _arguments(step, stage, rows, folder, seed=run.seed, scored=scored, bf16=bf16)
    trainer = _Trainer(step, stage, rows, collate=collate, folder=folder, args=arguments)
    trainer.score, trainer.corrupt = score, corrupt
    checkpoint = newest_checkpoint(folder)
    journal = None
    if run.main:
        shutil.rmtree(arguments.output_dir or "", ignore_errors=True)  # a checkpoint that a kill left half-written
        forget_after(run.path / "log.jsonl", stage.name, _steps_of(checkpoint))
        journal = Journal(
            stage.name, run.path / "log.jsonl", run.path / "tensorboard", console or Console(quiet=True), stage.batch
        )
        trainer.add_callback(journal)
    started = time.perf_counter()
    try:
        trainer.train_from(checkpoint)
    finally:
        if journal is not None:
            journal.close()
            shutil.rmtree(str(arguments.output_dir), ignore_errors=True)
    seconds, steps = time.perf_counter() - started, trainer.state.global_step
    trainer.restore_best()
    if hasattr(step, "finish"):
        step.finish()
    best = trainer.state.best_global_step
    done = steps - _steps_of(checkpoint)
    return Trained(done, done * stage.batch, seconds, trainer.state.best_metric if best else None, best)


def newest_checkpoint(folder: Path) -> Path | None:
    """Every folder under `checkpoints/` is whole: it was renamed there when complete."""
    return max((folder / "checkpoints").glob("checkpoint-*"), key=_steps_of, default=None)


def _steps_of(checkpoint: Path | None) -> int:
    return int(checkpoint.name.rpartition("-")[2]) if checkpoint else 0


def _arguments(
    step: Step, stage: Stage, rows: Dataset, folder: Path, *, seed: int, scored: bool, bf16: bool
) -> TrainingArguments:
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    micro, accumulation = shares(stage, processes)
    per_epoch = math.ceil(len(rows) / stage.batch)
    total = stage.steps or max(1, math.ceil(stage.epochs * per_epoch))
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

    Raises RecipeError when nothing does.
    """
    share, rest = divmod(stage.batch, processes)
    if rest:
        raise RecipeError(
            [f"stage {stage.name}: batch {stage.batch} cannot be split evenly over {processes} processes"]
        )
    micro = min(stage.micro_batch or share, share)
    if share % micro:
        raise RecipeError([f"stage {stage.name}: micro_batch {micro} does not divide the {share} examples per process"])
    return micro, share // micro


class _Epochs(TrainerCallback):
    """accelerate does not reach the order of rows in an epoch that several processes resume."""

    def __init__(self, order: LengthGrouped) -> None:
        self.order = order

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.order.set_epoch(int(state.epoch or 0))


class _Trainer(Trainer):
    def __init__(
        self,
        step: Step,
        stage: Stage,
        rows: Dataset,
        *,
        collate: Batching,
        folder: Path,
        args: TrainingArguments,
    ) -> None:
        self.stage, self.folder = stage, folder
        self.step: Any = step
        self.score: Score | None = None
        self.corrupt: Corrupt | None = None
        self.parts: dict[str, Tensor] = {}
        self.passes = 0
        self.order = LengthGrouped(rows["length"], stage.batch, seed=args.seed, whole=True)
        super().__init__(
            model=step,  # type: ignore[arg-type]
            args=args,
            data_collator=collate,
            train_dataset=rows,
            eval_dataset=rows,
        )
        self.model_accepts_loss_kwargs = False  # a step's loss is a mean, to be divided by accumulation
        self.remove_callback(PrinterCallback)
        self.remove_callback(ProgressCallback)
        self.add_callback(_Epochs(self.order))
        if hasattr(step, "begin"):
            self.add_callback(Started(step.begin))

    @property
    def student(self) -> PreTrainedModel:
        return self.model.student  # type: ignore[return-value,union-attr]

    def train_from(self, checkpoint: Path | None) -> None:
        """The library takes one step more where a checkpoint already has the last."""
        if checkpoint is None or _steps_of(checkpoint) < self.args.max_steps:
            self.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        else:
            self._load_from_checkpoint(str(checkpoint))
            self.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> LengthGrouped:
        return self.order

    def create_optimizer(self, model: Any = None) -> Any:
        """A step that names groups of parameters gets them as the optimiser's groups."""
        if self.optimizer is None and hasattr(self.step, "groups"):
            chosen, options = self.get_optimizer_cls_and_kwargs(self.args)
            decayed = set(self.get_decay_parameter_names(self.step))
            self.optimizer = chosen(trained_groups(self.step, decayed, self.args.weight_decay), **options)
            return self.optimizer
        return super().create_optimizer(model)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        if hasattr(self.step, "factors"):
            per_group(scheduler, self.step.factors, num_training_steps)  # type: ignore[arg-type]
        return scheduler

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Tensor]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], Any]:
        """Corrupt the batch, and tell every part of it how many items a part has on average: see Objective.forward.

        Here, not when it is collated: the batches that a resumed run skips must draw no random numbers.
        """
        samples, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.corrupt is not None:
            samples = [self.corrupt(sample) for sample in samples]
        if samples and hasattr(self.step, "items") and (len(samples) > 1 or self.args.world_size > 1):
            counts = [self.step.items(each) for each in samples]
            mean = torch.stack([torch.stack(list(count.values())) for count in counts]).mean(0).to(device)
            mean = self.accelerator.reduce(mean, "mean")
            for sample in samples:
                sample["items"] = dict(zip(counts[0], mean, strict=True))
        return samples, items

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        parts = model(**inputs)
        loss = parts.pop("loss")
        for name, part in parts.items():
            self.parts[name] = self.parts.get(name, 0) + part
        self.passes += 1
        return (loss, parts) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self.passes:
            if not math.isfinite(logs["loss"]):
                raise CompressError(
                    f"stage {self.stage.name}: the loss is {logs['loss']} at step {self.state.global_step}; lower lr "
                    f"(now {self.stage.lr}), or try --precision fp32"
                )
            parts = self.accelerator.reduce(torch.stack(list(self.parts.values())) / self.passes, "mean")
            logs |= dict(zip(self.parts, parts.tolist(), strict=True))
            self.parts, self.passes = {}, 0
        super().log(logs, start_time)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        if self.score is None:
            return {}
        metrics = {f"eval_{name}": float(value) for name, value in self.score(self.student).items()}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        better = super()._determine_best_metric(metrics, trial)
        if better and self.args.should_save:
            self.folder.mkdir(parents=True, exist_ok=True)
            with written(self.folder / "best.safetensors") as partial:
                save_model(self.student, str(partial))
        return better

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """The library writes into .partial; the whole checkpoint is renamed into place, then the older ones go."""
        with naming(Path(str(self.args.output_dir))):
            super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        if not self.args.should_save:
            return
        partial = Path(str(self.args.output_dir), f"checkpoint-{self.state.global_step}")
        # the library would look for the best weights in the folder it wrote them to, which is about to be renamed
        self.state.best_model_checkpoint = None
        self.state.save_to_json(str(partial / TRAINER_STATE_NAME))
        best = self.folder / "best.safetensors"
        if best.is_file():
            os.link(best, partial / "best.safetensors")
        target = self.folder / "checkpoints" / partial.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        for older in target.parent.glob("checkpoint-*"):
            if older != target:
                shutil.rmtree(older)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Student and projections, in safetensors, tied weights once; none of the library's pickled arguments."""
        folder = Path(output_dir or str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)  # another process may have begun with its random state
        save_model(self.model, str(folder / "model.safetensors"))  # type: ignore[arg-type]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint)
        load_model(self.model, folder / "model.safetensors")  # type: ignore[arg-type]
        best = folder / "best.safetensors"
        if best.is_file() and self.args.should_save:
            (self.folder / "best.safetensors").unlink(missing_ok=True)
            os.link(best, self.folder / "best.safetensors")

    def restore_best(self) -> None:
        self.accelerator.wait_for_everyone()
        best = self.folder / "best.safetensors"
        if self.state.best_global_step and best.is_file():
            load_model(self.student, best)
