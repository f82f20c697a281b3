"""Count the parameters and floating-point operations of a model, with torch on its
graph rather than by a formula."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from transformers import PreTrainedConfig, PreTrainedModel

from compress import families
from compress.models import heads
from compress.models.signals import evaluating
from compress.slicing.shape import Shape, positions, set_size

COUNTED_TOKENS = 128
"""The length at which FLOPs are counted."""
FEW = 8
"""The vocabulary of a model whose forward pass does not run without weights."""


def flops_per_token(model: nn.Module, length: int = 128) -> float:
    """Count FLOPs (a multiply-add is two) per token of a forward pass over `length`
    tokens, or as many tokens as the model has positions.

    Matrix products count, attention included; embedding look-ups, norms and activations
    do not. Attention within a window (ModernBERT) counts all pairs: torch and ONNX
    files compute and mask them. Works on the meta device, without weights, except for
    XLM, XLNet and the first DeBERTa, whose code reads values.
    """
    device = next(model.parameters()).device
    length = min(length, positions(model) or length)
    with (
        torch.no_grad(),
        evaluating(model),
        _frozen(model),
        FlopCounterMode(display=False, custom_mapping=_ATTENTION) as counter,
    ):
        ids_BL = torch.ones(1, length, dtype=torch.long, device=device)
        config: Any = model.config
        if config.is_encoder_decoder:  # T5 classifies at the end of the text
            ids_BL[:, -1] = config.eos_token_id
        # on the meta device a mask has no values, but most families check whether it is
        # all ones
        masked = device.type != "meta" or families.find(config.model_type).disentangled
        model(
            input_ids=ids_BL,
            **({"attention_mask": torch.ones_like(ids_BL)} if masked else {}),
        )
    return counter.get_total_flops() / length


def count_parameters(model: nn.Module) -> int:
    """Count the parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def count_tables(model: nn.Module) -> int:
    """Count the parameters of embeddings, tied ones once."""
    tables = {
        id(m.weight): m.weight.numel()
        for m in model.modules()
        if isinstance(m, nn.Embedding)
    }
    return sum(tables.values())


def count_vectors(model: nn.Module) -> int:
    """Count the parameters outside matrices and tables."""
    return sum(each.numel() for each in model.parameters() if each.dim() < 2)


def _attention(
    query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any
) -> int:
    return sdpa_flop_count(query, key, value)


_ATTENTION = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention}
"""FLOPs of attention on a CPU, which is missing in torch's own table of operations."""


@contextmanager
def _frozen(model: Any) -> Iterator[None]:
    """Freeze the parameters, remove the padding token, and let experts multiply in
    batches while FLOPs are counted.

    The counter would hook the gradients of parameters that are inputs of a module, such
    as DeBERTa's positions; GPT-2 on the meta device would search for padding among
    tokens without values; grouped products are not counted.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    config = model.config
    padding = config.pad_token_id
    experts = config._experts_implementation
    config._experts_implementation = "batched_mm"
    if model.device.type == "meta":
        config.pad_token_id = None
    try:
        yield
    finally:
        config.pad_token_id = padding
        config._experts_implementation = experts
        for parameter in trained:
            parameter.requires_grad_(True)


FLOPS_ALIKE = 1.05
"""A student counts as larger above this multiple of its teacher's FLOPs: a factorised
embedding alone adds half a percent."""


def warn_if_larger(
    stage: str, student: PreTrainedConfig, teacher: PreTrainedConfig
) -> list[str]:
    """Warn about a student that has more parameters or clearly more FLOPs than its
    teacher, or equal numbers of both."""
    with torch.device("meta"):
        mine = measure_size(heads.create(copy.deepcopy(student), "encoder", None))
        theirs = measure_size(heads.create(copy.deepcopy(teacher), "encoder", None))
    larger = (
        mine.parameters > theirs.parameters
        or mine.flops_per_token > FLOPS_ALIKE * theirs.flops_per_token
    )
    if not larger and (
        mine.parameters < theirs.parameters
        or mine.flops_per_token < theirs.flops_per_token
    ):
        return []
    compared = "larger than" if larger else "as large as"
    one, other = (
        f"{each.family} {each.layers}x{each.hidden}, {each.parameters / 1e6:.1f} M "
        f"parameters, {each.flops_per_token / 1e6:.1f} MFLOP per token"
        for each in (mine, theirs)
    )
    return [
        f"stage {stage}: the student ({one}) is {compared} its teacher ({other}), so "
        f"nothing is compressed; --set student.layers={max(1, theirs.layers // 2)} "
        "makes a smaller one, and `compress students` lists more"
    ]


@dataclass(frozen=True)
class ModelSize:
    """Parameters, FLOPs (a multiply-add is two) per token over COUNTED_TOKENS tokens,
    and megabytes of 10^6 bytes.

    int8_mb: one byte per number of tables and matrices, four of vectors, as
    `quantize_dynamic` does.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    ffn: int
    embedding_parameters: int
    encoder_parameters: int
    flops_per_token: float
    fp32_mb: float
    int8_mb: float

    @property
    def parameters(self) -> int:
        return self.embedding_parameters + self.encoder_parameters


def measure_size(model: PreTrainedModel) -> ModelSize:
    """Measure a model without a head, which may be on the meta device."""

    def flops(layers: int) -> float:
        shallow = copy.deepcopy(model.config)
        needs_values = families.find(shallow.model_type).reads_values
        if layers:
            set_size(shallow, "layers", layers)
        if needs_values:
            shallow.vocab_size = FEW
        with torch.device("cpu" if needs_values else "meta"):
            encoder: Any = heads.create(shallow, "encoder", None)
            return flops_per_token(
                encoder.get_encoder() if model.config.is_encoder_decoder else encoder,
                COUNTED_TOKENS,
            )

    shape = Shape.from_config(model.config)
    total = count_parameters(model)
    tables = count_tables(model)
    return ModelSize(
        family=shape.family,
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        ffn=shape.ffn,
        embedding_parameters=tables,
        encoder_parameters=total - tables,
        # extrapolated from two layers, as all cost the same
        flops_per_token=flops(shape.layers)
        if shape.layers <= 2
        else flops(1) + (shape.layers - 1) * (flops(2) - flops(1)),
        fp32_mb=4 * total / 1e6,
        int8_mb=(total + 3 * count_vectors(model)) / 1e6,
    )
