"""Run transformers' Trainer over a step.

It adds batches of similar lengths in an order that depends on seed and epoch only,
means that are exact over processes and accumulation, every loss part in the log, and
checkpoints that are renamed into place when complete.

checkpoints/checkpoint-<step>/   weights, optimizer, scheduler, random states and costs,
                                 sealed; the newest two. An interrupted stage resumes
                                 from the newest intact one.
"""

import math
import pickle
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from compress import io
from compress.config.stages import Stage
from compress.data.collate import Batching, LengthGrouped, Order
from compress.errors import CompressError, DamagedError
from compress.io import (
    atomic_file,
    load_json,
    make_folder,
    move_into_place,
    name_disk_errors,
    seal,
    verify,
    write_json,
)
from compress.models.heads import output_layer
from compress.progress import Say
from compress.tensors import TensorDict, Tensors
from compress.training.optimizer import (
    choose_optimizer,
    group_parameters,
    scale_rate,
    set_group_rates,
)
from compress.training.processes import (
    copy_weights,
    from_first,
    gather,
    naming_lost_processes,
    wait_for_all,
)
from compress.training.schedule import AutoLength
from compress.training.step import Score, Step
from compress.training.stopping import StopRequest

Corrupt = Callable[[Tensors], TensorDict]
"""batch -> corrupted batch, such as masked tokens and their labels, drawn from torch's
generator each time."""
BEST = "best.safetensors"
STEP_WEIGHTS = "model.safetensors"


class _Hooks(TrainerCallback):
    """Update the order of rows and the step, clip groups of gradients, log before every
    checkpoint, and stop after a checkpoint if asked to.

    accelerate does not update the order of rows in an epoch that several processes
    resume. A resumed process lacks the sum of the losses since the last line of the
    log, so that sum is logged before a checkpoint is saved.
    """

    def __init__(
        self, order: Order, step: Step, clip: float, stop: StopRequest
    ) -> None:
        self.order = order
        self.step = step
        self.clip = clip
        self.stop = stop

    def on_epoch_begin(
        self, args: Any, state: TrainerState, control: Any, **kwargs: Any
    ) -> None:
        self.order.set_epoch(int(state.epoch or 0))

    def on_step_begin(
        self, args: Any, state: TrainerState, control: Any, **kwargs: Any
    ) -> None:
        self.step.begin(state.global_step, state.max_steps)
        if not self.step.ready:
            state.best_metric = None
            state.best_global_step = None

    def on_pre_optimizer_step(
        self, args: Any, state: TrainerState, control: Any, **kwargs: Any
    ) -> None:
        for parameters in self.step.clip_groups() if self.clip else ():
            nn.utils.clip_grad_norm_(parameters, self.clip)

    def on_step_end(
        self, args: Any, state: TrainerState, control: Any, **kwargs: Any
    ) -> None:
        control.should_save = self.stop.agree() or control.should_save
        control.should_log = control.should_log or control.should_save

    def on_save(
        self, args: Any, state: TrainerState, control: Any, **kwargs: Any
    ) -> None:
        self.stop.end()


COSTS = "costs.json"
KEPT_CHECKPOINTS = 2
"""Number of checkpoints that are kept: the newest, and the previous one in case the
newest is damaged."""


@dataclass(frozen=True)
class Spent:
    """Record the cost of a stage up to a checkpoint, over all processes that worked on
    it in turn.

    loss   the sum over all steps; peak_rss_mb: the most memory that one process held
    """

    seconds: float = 0.0
    peak_rss_mb: float = 0.0
    loss: float = 0.0

    @staticmethod
    def load(checkpoint: Path | None) -> "Spent":
        """Load the record of a checkpoint; all zeros if there is no checkpoint."""
        if checkpoint is None:
            return Spent()
        with loading(checkpoint):
            return Spent(**load_json(checkpoint / COSTS, _remedy(checkpoint)))

    def save(self, checkpoint: Path) -> None:
        """Write the record into a checkpoint that is not sealed yet."""
        write_json(checkpoint / COSTS, asdict(self))


def peak_rss_mb() -> float:
    """Return the most memory that this process has held, in megabytes (10^6 bytes); 0
    on Windows."""
    try:
        import resource
    except ModuleNotFoundError:
        return 0.0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def read_steps(checkpoint: Path | None) -> int:
    """Read the number of optimiser steps from a checkpoint's name; 0 if there is no
    checkpoint."""
    return int(checkpoint.name.rpartition("-")[2]) if checkpoint else 0


def list_checkpoints(stage: Path) -> list[Path]:
    """List the checkpoints in a stage's folder, newest first."""
    found = (stage / "checkpoints").glob("checkpoint-*")
    return sorted(
        (path for path in found if path.name.rpartition("-")[2].isdigit()),
        key=read_steps,
        reverse=True,
    )


def find_checkpoint(stage: Path, warn: Say) -> Path | None:
    """Find the newest intact checkpoint in a stage's folder; damaged ones are removed,
    with a warning."""
    damaged = list[DamagedError]()
    intact: Path | None = None
    for checkpoint in list_checkpoints(stage):
        try:
            verify(checkpoint)
        except DamagedError as error:
            damaged.append(error)
        else:
            intact = checkpoint
            break
    for damage in damaged:
        where = (
            f"resumes from the checkpoint of step {read_steps(intact)}"
            if intact
            else "starts from its beginning"
        )
        lost = read_steps(damage.path) - read_steps(intact)
        warn(f"{damage} The stage {where}: {lost} steps are trained again.")
        shutil.rmtree(damage.path)
    return intact


@contextmanager
def loading(checkpoint: Path) -> Iterator[None]:
    """Re-raise as DamagedError what libraries raise for a checkpoint that another
    program wrote or changed."""
    try:
        yield
    except (torch.OutOfMemoryError, DamagedError):
        raise
    except (
        pickle.UnpicklingError,
        SafetensorError,
        RuntimeError,
        ValueError,
        TypeError,
        KeyError,
        EOFError,
    ) as error:
        why = " ".join(str(error).split())[:200]
        raise DamagedError(
            checkpoint, [f"it cannot be loaded ({why})"], _remedy(checkpoint)
        ) from error


def _remedy(checkpoint: Path) -> str:
    return (
        f"Remove {checkpoint}: the stage then resumes from the checkpoint before it, "
        "or starts from its beginning"
    )


class StepTrainer(Trainer):
    """Run transformers' loop over a step; every difference from the library is an
    override here."""

    def __init__(
        self,
        step: Step,
        stage: Stage,
        rows: Dataset,
        *,
        order: Order,
        collate: Batching,
        folder: Path,
        args: TrainingArguments,
    ) -> None:
        self.stage = stage
        self.folder = folder
        self.step = step
        self.score: Score | None = None
        self.corrupt: Corrupt | None = None
        self.on_save: Callable[[], None] = lambda: None
        self.parts: TensorDict = {}
        self.passes = 0
        self.order = order
        self.length: AutoLength | None = None
        self.before = Spent()
        self.began = time.perf_counter()
        self._total_loss_scalar = 0.0
        super().__init__(
            model=step,
            args=args,
            data_collator=collate,
            train_dataset=rows,
            eval_dataset=rows,
            optimizer_cls_and_kwargs=choose_optimizer(stage),
        )
        # a step's loss is a mean, to be divided by accumulation
        self.model_accepts_loss_kwargs = False
        self.remove_callback(PrinterCallback)
        self.remove_callback(ProgressCallback)
        self.stop = StopRequest()
        self.add_callback(_Hooks(order, step, stage.clip, self.stop))

    def open_end(self, length: AutoLength) -> None:
        """Let the evaluations decide the length of this stage."""
        self.length = length
        self.add_callback(length)

    @property
    def student(self) -> PreTrainedModel:
        return self.step.student

    def train_from(self, checkpoint: Path | None) -> None:
        """Train from the start or a checkpoint. A SIGTERM ends training with another
        checkpoint."""
        with naming_lost_processes(), self.stop.listening():
            self._train_from(checkpoint)

    def _train_from(self, checkpoint: Path | None) -> None:
        """Train; the library would add a step to a checkpoint of the last step."""
        self.before = Spent.load(checkpoint)
        wait_for_all()
        self.began = time.perf_counter()
        if checkpoint is None:
            self.train()
            return
        with loading(checkpoint):
            state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
        last = self.args.max_steps if self.length is None else self.length.resume(state)
        if state.global_step < last:
            self.train(resume_from_checkpoint=str(checkpoint))
        else:
            self._load_from_checkpoint(str(checkpoint))
            self.state = state

    @property
    def spent(self) -> Spent:
        """The cost of the stage so far."""
        return Spent(
            self.before.seconds + time.perf_counter() - self.began,
            max(self.before.peak_rss_mb, peak_rss_mb()),
            self.before.loss + self._total_loss_scalar,
        )

    def get_train_dataloader(self) -> Any:
        """Load batches in the given order, which yields rows or, with a budget of
        tokens or of queries, whole batches."""
        sampling: dict[str, Any] = {"batch_sampler": self.order}
        if isinstance(self.order, LengthGrouped):
            sampling = {"sampler": self.order, "batch_size": self.args.train_batch_size}
        pin = self.args.dataloader_pin_memory
        loader = DataLoader(
            self.train_dataset,  # type: ignore[arg-type]
            collate_fn=self.data_collator,
            pin_memory=pin,
            **sampling,
        )
        return self.accelerator.prepare(loader)

    def create_optimizer(self, model: Any = None) -> Any:
        """Build the optimiser from the step's parameter groups.

        The head of a regression gets a separate group if the unit of its labels is not
        1.
        """
        chosen, options = (
            self.optimizer_cls_and_kwargs
            or self.get_optimizer_cls_and_kwargs(self.args)
        )
        decayed = set(self.get_decay_parameter_names(self.step))
        groups = group_parameters(self.step, decayed, self.args.weight_decay)
        unit = self.step.unit
        output = output_layer(self.step.student)
        if self.stage.optimizer == "adamw" and unit != 1 and output is not None:
            groups = scale_rate(
                groups,
                output,
                lr=self.args.learning_rate,
                eps=self.stage.eps,
                by=unit,
            )
        self.optimizer = chosen(groups, **options)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.length is None:
            scheduler = super().create_scheduler(num_training_steps, optimizer)
        else:
            scheduler = self.lr_scheduler = self.length.schedule(
                optimizer or self.optimizer
            )
        set_group_rates(scheduler, self.step, num_training_steps)  # type: ignore[arg-type]
        return scheduler

    def get_batch_samples(
        self,
        epoch_iterator: Iterator[TensorDict],
        num_batches: int,
        device: torch.device,
    ) -> tuple[list[dict[str, Any]], Any]:
        """Corrupt the batch, and give each part of it the mean number of items of a
        part: see Objective.forward."""
        samples, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.corrupt is not None:
            samples = [
                self._corrupt(sample, part) for part, sample in enumerate(samples)
            ]
        split = len(samples) > 1 or self.args.world_size > 1
        counts = [self.step.items(each) for each in samples] if split else []
        if any(counts):
            mean = (
                torch.stack([torch.stack(list(count.values())) for count in counts])
                .mean(0)
                .to(device)
            )
            mean = self.accelerator.reduce(mean, "mean")
            for sample in samples:
                sample["items"] = dict(zip(counts[0], mean, strict=True))
        return samples, items

    def _corrupt(self, sample: dict[str, Any], part: int) -> dict[str, Any]:
        """Corrupt with a seed of step, part and process alone: the library restores its
        generator only later."""
        assert self.corrupt is not None
        place = [
            self.args.seed,
            self.stage.name,
            self.state.global_step,
            part,
            self.args.process_index,
        ]
        devices = [sample["input_ids"].device] if sample["input_ids"].is_cuda else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(int(io.hash_value(place)[:15], 16))
            return self.corrupt(sample)

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
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
                    f"stage {self.stage.name}: the loss is {logs['loss']} at step "
                    f"{self.state.global_step}; lower lr (now {self.stage.lr}), or try "
                    "--precision fp32"
                )
            parts = self.accelerator.reduce(
                torch.stack(list(self.parts.values())) / self.passes, "mean"
            )
            logs |= dict(zip(self.parts, parts.tolist(), strict=True))
            self.parts = {}
            self.passes = 0
        if "train_runtime" in logs:  # the library counts this process alone
            spent = self.spent
            steps = self.state.global_step
            speed = (
                logs["train_samples_per_second"]
                / logs["train_steps_per_second"]
                * steps
                / spent.seconds
            )
            logs |= {
                "train_runtime": round(spent.seconds, 4),
                "train_samples_per_second": round(speed, 3),
                "train_steps_per_second": round(steps / spent.seconds, 3),
                "train_loss": spent.loss / steps,
            }
        super().log(logs, start_time)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Score the student, and save its weights if they are the best so far."""
        if self.score is None:
            return {}
        scores = self.score(self.student)
        # other machines round differently, and all must decide alike
        metrics = from_first(
            lambda: {f"eval_{name}": float(value) for name, value in scores.items()}
        )
        best = self.state.best_metric
        if metrics["eval_score"] > (-math.inf if best is None else best):
            self.keep_best()
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def keep_best(self) -> None:
        """Save the student's weights as the best so far."""
        if self.args.should_save:
            with self.writing_best() as file:
                save_model(self.student, str(file))

    @contextmanager
    def writing_best(self) -> Iterator[Path]:
        """Yield the path to write the best weights to."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(self.folder / BEST) as partial:
            yield partial

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Let the library write into .partial, then seal, flush and rename the complete
        checkpoint into place.

        Each checkpoint has its own copy of the best weights: damage to a shared copy
        would affect all of them. The library has no public hook around its writing,
        whose errors on a full disk name no file.
        """
        with name_disk_errors(Path(str(self.args.output_dir))):
            super()._save_checkpoint(model, trial)
        if self.args.should_save:
            self._keep_checkpoint()
        wait_for_all()

    def _keep_checkpoint(self) -> None:
        """Complete the checkpoint that the library has written, and move it into
        place."""
        partial = Path(
            str(self.args.output_dir), f"checkpoint-{self.state.global_step}"
        )
        # the library would look for the best weights in the folder it wrote them to,
        # which is about to be renamed
        self.state.best_model_checkpoint = None
        with name_disk_errors(partial):
            self.state.save_to_json(str(partial / TRAINER_STATE_NAME))
            self.spent.save(partial)
            best = self.folder / BEST
            if best.is_file():
                shutil.copyfile(best, partial / BEST)
            seal(partial)
            make_folder(self.folder / "checkpoints")
            move_into_place(partial, self.folder / "checkpoints" / partial.name)
            for old in list_checkpoints(self.folder)[KEPT_CHECKPOINTS:]:
                shutil.rmtree(old)
        self.on_save()

    def _save_rng_state(self, output_dir: str) -> None:
        """Let the first process write the random states of all processes: others may
        not see the folder, and the library has no public hook."""
        if self.args.world_size == 1:
            super()._save_rng_state(output_dir)
            return
        with TemporaryDirectory() as folder:
            super()._save_rng_state(folder)
            own = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
        states = gather(own)
        for state in states if self.args.should_save else ():
            for name, content in state.items():
                Path(output_dir, name).write_bytes(content)

    def save_model(
        self, output_dir: str | None = None, _internal_call: bool = False
    ) -> None:
        """Save student and projections in safetensors, tied weights once, without the
        library's pickled arguments."""
        if self.args.should_save:
            folder = Path(output_dir or str(self.args.output_dir))
            folder.mkdir(parents=True, exist_ok=True)
            save_model(self.model, str(folder / STEP_WEIGHTS))  # type: ignore[arg-type]

    # The library has no public hook for reading a checkpoint: these three report a
    # damaged one as such.

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: Any = None
    ) -> None:
        folder = Path(resume_from_checkpoint)
        with loading(folder):
            self.read_checkpoint(folder)
        best = folder / BEST
        if best.is_file() and self.args.should_save:
            with atomic_file(self.folder / BEST) as partial:
                shutil.copyfile(best, partial)

    def read_checkpoint(self, folder: Path) -> None:
        """Give student and projections the weights of a checkpoint."""
        load_model(self.model, folder / STEP_WEIGHTS)  # type: ignore[arg-type]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            with loading(Path(checkpoint)):
                super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            with loading(Path(checkpoint)):
                super()._load_rng_state(checkpoint)

    def restore_best(self) -> None:
        best = self.folder / BEST
        if self.state.best_global_step:
            if self.args.should_save and best.is_file():
                load_model(self.student, best)
            copy_weights(self.student)
