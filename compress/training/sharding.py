"""Split a teacher that is fine-tuned over the processes of a launch (FSDP2): weights,
gradients and the optimiser's state.

`accelerate launch --use_fsdp --fsdp_version 2` asks for it, in environment variables.
accelerate itself splits models on accelerators only, ignores the request on a CPU, and
would split whatever is trained. Here torch splits the layers of a loaded model, and
transformers' Trainer treats it like a model that was split on loading. Files hold full
tensors.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from compress.config.recipe import Recipe
from compress.errors import RecipeError, RunError
from compress.machine import count_processes
from compress.training.processes import from_first
from compress.training.trainer import BEST, STEP_WEIGHTS, StepTrainer, loading

REQUEST = "ACCELERATE_USE_FSDP"
"""The environment variable by which a launch asks for split weights."""


def refuse_sharding() -> None:
    """Raise RunError if the launch asks for split weights."""
    if os.environ.get(REQUEST, "").lower() == "true":
        raise RunError(
            "--use_fsdp splits a teacher that `distill` fine-tunes, and nothing else: "
            "launch this command without it"
        )


@dataclass(frozen=True)
class Sharding:
    """How a model is split.

    reshard   free the weights of a layer after its forward pass, and gather them again
              for the backward pass
    """

    reshard: bool = True

    @staticmethod
    def take_request() -> "Sharding | None":
        """Take the request of a launch for split weights out of the environment, so
        that no library follows it too; None without a request.

        Raises RunError for settings that are not supported.
        """
        if os.environ.pop(REQUEST, "").lower() != "true":
            return None
        reshard = "FSDP_RESHARD_AFTER_FORWARD"
        followed = {
            "FSDP_VERSION": ("2",),
            "FSDP_OFFLOAD_PARAMS": ("false",),
            "FSDP_ACTIVATION_CHECKPOINTING": ("false",),
            "FSDP_AUTO_WRAP_POLICY": ("TRANSFORMER_BASED_WRAP",),
            "FSDP_TRANSFORMER_CLS_TO_WRAP": (),
            "FSDP_IGNORED_MODULES": (),
            "FSDP_STATE_DICT_TYPE": ("FULL_STATE_DICT",),
            reshard: ("true", "false"),
        }
        asked = {"FSDP_VERSION": "1", **os.environ}
        problems = []
        for name, values in followed.items():
            found = asked.get(name)
            if found and found not in values:
                wanted = " or ".join(values) or "that it is not set"
                problems.append(f"{name} is {found!r}, expected {wanted}")
        if count_processes() == 1:
            problems.append("there is one process, expected several")
        if problems:
            raise RunError(f"{REQUEST} is set: {'; '.join(problems)}")
        return Sharding(asked.get(reshard) != "false")

    def check(self, recipe: Recipe) -> None:
        """Raise RecipeError if a teacher's stage needs full weights."""
        problems = [
            f"{recipe.name}: {stage.name}.optimizer: {stage.optimizer} reads the norms "
            "of whole tensors, which --use_fsdp splits: expected adamw"
            for stage in (recipe.teacher, recipe.teacher_lm)
            if stage.optimizer != "adamw"
        ]
        if problems:
            raise RecipeError(problems)

    def split(self, model: nn.Module) -> None:
        """Split a model in place, layer by layer, over all processes."""
        state = PartialState()
        mesh = init_device_mesh(state.device.type, (state.num_processes,))
        layers = [
            each
            for each in model.modules()
            if isinstance(each, GradientCheckpointingLayer)
        ]
        for part in (*layers, model):
            fully_shard(part, mesh=mesh, reshard_after_forward=self.reshard)


class ShardedTrainer(StepTrainer):
    """Train a step whose student is split; its files hold full tensors."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train without wrapping the model again. Set sooner, the attribute would make
        the library refuse checkpoints, which it cannot write."""
        self.is_distributed_loading_by_transformers = True
        return super().train(*args, **kwargs)

    def save_model(
        self, output_dir: str | None = None, _internal_call: bool = False
    ) -> None:
        weights = gather_weights(self.step)
        if self.args.should_save:
            folder = Path(output_dir or str(self.args.output_dir))
            folder.mkdir(parents=True, exist_ok=True)
            save_file(weights, folder / STEP_WEIGHTS)

    def keep_best(self) -> None:
        weights = gather_weights(self.student)
        if self.args.should_save:
            with self.writing_best() as file:
                save_file(weights, file)

    def restore_best(self) -> None:
        best = self.folder / BEST
        if from_first(lambda: bool(self.state.best_global_step and best.is_file())):
            read_weights(self.student, best)

    def read_checkpoint(self, folder: Path) -> None:
        read_weights(self.step, folder / STEP_WEIGHTS)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.optimizer and self.lr_scheduler, "training has begun"
        optimizer = gather_optimizer(self.optimizer)
        if self.args.should_save:
            torch.save(optimizer, Path(output_dir, OPTIMIZER_NAME))
            schedule = self.lr_scheduler.state_dict()
            torch.save(schedule, Path(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        assert self.optimizer and self.lr_scheduler, "training has begun"
        folder = Path(checkpoint)
        with loading(folder):
            saved = torch.load(
                folder / OPTIMIZER_NAME, "cpu", weights_only=True, mmap=True
            )
            split_optimizer(self.optimizer, saved)
            schedule = torch.load(folder / SCHEDULER_NAME, weights_only=True)
            self.lr_scheduler.load_state_dict(schedule)


def is_split(model: nn.Module) -> bool:
    """Return True if a model is split over the processes."""
    return isinstance(model, FSDPModule)


def gather_weights(model: nn.Module) -> dict[str, Tensor]:
    """Gather the full tensors of a split model, tied ones once, as `_gather` does."""
    return {name: _gather(tensor) for name, tensor in _tensors(model)}


def read_weights(model: nn.Module, file: Path) -> None:
    """Give a split model the tensors of a safetensors file, which the main process
    reads. All processes call this."""
    state = PartialState()
    with ExitStack() as opened, torch.no_grad():
        stored = None
        if state.is_main_process:
            stored = opened.enter_context(safe_open(file, "pt"))
        for name, tensor in _tensors(model):
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=state.device)
            if stored is not None:
                whole.copy_(stored.get_tensor(name))
            distributed.broadcast(whole, src=0)
            tensor.copy_(_share(whole, tensor))


def gather_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimiser state of a split model with full tensors, as `_gather`
    does."""
    saved = optimizer.state_dict()
    state = {
        number: {name: _gather(value) for name, value in values.items()}
        for number, values in saved["state"].items()
    }
    return {**saved, "state": state}


def split_optimizer(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load an optimiser state with full tensors, which every process has read, into the
    optimiser of a split model."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    state = {
        number: {
            name: _share(value, parameters[number]) for name, value in values.items()
        }
        for number, values in saved["state"].items()
    }
    optimizer.load_state_dict({**saved, "state": state})


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model's state dict by name, tied ones once."""
    own = {name for name, _ in model.named_parameters()}
    all_names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, tensor in model.state_dict().items():
        if name in own or name not in all_names:
            yield name, tensor


def _gather(tensor: Tensor) -> Tensor:
    """Return the full tensor on the CPU of the main process, and an empty tensor in the
    others. All processes call this."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.cpu() if PartialState().is_main_process else torch.empty(0)


def _share(whole: Tensor, like: Tensor) -> Tensor:
    """Return this process's share of a tensor, split like another tensor of its
    shape."""
    if not isinstance(like, DTensor) or whole.shape != like.shape:
        return whole
    return distribute_tensor(
        whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None
    )
