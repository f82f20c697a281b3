"""Compile the layers of a student and its teacher on a GPU, if a stage is long enough
to repay it.

Layer norms, activations, residuals and casts take more than half of a layer's time on a
GPU, because each reads and writes all hidden states; compiled, they are fused. One
compilation serves all layers, batch sizes and lengths.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from compress.models.signals import ATTENTION
from compress.training.step import Distillation, Step

LEAST_COMPILED = 1000
"""The fewest steps of a stage whose layers are compiled, which takes up to a minute."""


@cache
def can_compile() -> bool:
    """Return True on a GPU on which torch's compiler works: it needs Triton, a C
    compiler and Python's headers."""
    if not torch.cuda.is_available():
        return False
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device="cuda"))
    except Exception:  # each of its parts has its own errors
        return False
    return True


@contextmanager
def compile_layers(step: Step, steps: int) -> Iterator[None]:
    """Compile every layer of the step's models in this context, when it first runs, if
    the stage repays that.

    That needs a GPU with a working compiler, and a distillation of many steps that does
    not read attention: reading it records each layer's inputs in a list, for which
    every layer would be compiled again.
    """
    models = list[object]()
    if isinstance(step, Distillation) and steps >= LEAST_COMPILED and can_compile():
        reads_attention = (
            step.objective.student_wants | step.objective.teacher_wants
        ) & ATTENTION
        models = [] if reads_attention else [step.student, step.teacher]
    modules = [
        each
        for model in models
        if isinstance(model, nn.Module)
        for each in model.modules()
    ]
    layers = [each for each in modules if isinstance(each, GradientCheckpointingLayer)]
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
