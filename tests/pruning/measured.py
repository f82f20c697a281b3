"""What tests of importance share: rows, a model, its plan, and importance by brute force, one example at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from compress.config.reference import Call
from compress.pruning import importance
from compress.pruning.hooks import Tap, taps
from compress.pruning.importance import Batches
from compress.slicing.plan import Group, SlicePlan
from compress.slicing.select import Importance
from tests import learning

COLLATE = learning.collate()


def rows(count: int = 14) -> Dataset:
    return learning.rows(count)


def batches(count: int = 14, *, size: int = 5, **changes: Any) -> Batches:
    return Batches(rows(count), COLLATE, size, **changes)


def rated(name: str | Call, model: Any, data: Dataset | None = None, *, batch: int = 5, **options: Any) -> Importance:
    data = rows() if data is None else data
    call = name if isinstance(name, Call) else Call(name, options)
    return importance.compute_importance(call, model, SlicePlan.from_model(model), data, COLLATE, batch=batch)


def singles(data: Dataset | None = None) -> Iterator[dict[str, Tensor]]:
    """Each example as a batch of its own, so that nothing is padded."""
    return (COLLATE([row]) for row in data or rows())


@contextmanager
def gated(model: Any, plan: SlicePlan, gates: dict[Group, Tensor]) -> Iterator[None]:
    """While open, what shows of each group's units is multiplied by its gate (U,), in the forward pass itself."""
    called: set[str] = set()

    def scaled(tap: Tap, value: Tensor) -> Tensor:
        if tap.name in called and plan.own_layers:
            return value
        called.add(tap.name)
        parts = list(value.chunk(len(tap.groups), -1))
        for n, group in enumerate(tap.groups):
            if group in gates:
                parts[n] = parts[n] * gates[group].repeat_interleave(parts[n].shape[-1] // len(gates[group]))
            heads = plan.heads.get(group) if group is not None and group.axis == "value" else None
            if heads in gates:
                parts[n] = parts[n] * gates[heads].repeat_interleave(plan.sizes.head_size)
        return torch.cat(parts, -1)

    hooks = [model.base_model.register_forward_pre_hook(lambda *_: called.clear())]
    for tap in taps(model, plan):
        module = model.get_submodule(tap.name)
        if tap.inward:
            hooks.append(module.register_forward_pre_hook(lambda _, args, tap=tap: (scaled(tap, args[0]), *args[1:])))
        else:
            hooks.append(module.register_forward_hook(lambda _, args, out, tap=tap: scaled(tap, out)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
