"""Models that write text as graphs: GPT-2's decoder, T5's encoder and decoder, with the keys and values of the tokens
before as inputs and outputs. Names are optimum's and transformers.js's.

B batch, L tokens read now, M tokens seen in all, S tokens of T5's source, D hidden, N layers.
"""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from compress.errors import ExportError
from compress.export.onnx import MASKED
from compress.shape import Shape

BATCH, PAST_LENGTH, LENGTH, SOURCE = 2, 3, 4, 5
"""What the graphs are traced at."""

Inputs = Mapping[str, Tensor]


class Held(DynamicLayer):
    """Keys and values (B, H, past, K) of one layer, or none yet. An empty tensor to grow from, as transformers' has,
    is none that ONNX can join."""

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if self.keys is not None and self.values is not None:
            key_states = torch.cat([self.keys, key_states], dim=-2)
            value_states = torch.cat([self.values, value_states], dim=-2)
        self.keys, self.values = key_states, value_states
        return key_states, value_states

    def get_seq_length(self) -> int:
        return 0 if self.keys is None else self.keys.shape[-2]


def _cache(past: Sequence[Tensor], layers: int) -> DynamicCache:
    """Of keys and values, alternating; of no tokens where there are none."""
    held: list[Any] = [Held(*past[2 * layer : 2 * layer + 2]) for layer in range(layers)]
    cache = DynamicCache()
    cache.layers = held
    return cache


def _flat(cache: Any) -> list[Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def _causal(length: Any, total: Any) -> Tensor:
    """(L, M): 1 where the later of the two is no later than the reader, the last L of M tokens."""
    place_M = torch.arange(total)
    return (place_M[None, :] <= place_M[total - length :, None]).long()


class CausalDecoder(nn.Module):
    """GPT-2: tokens and what came before -> logits, and the same with these tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.layers = model, Shape.of(model.config).layers

    @property
    def past(self) -> list[str]:
        return [f"{layer}.{part}" for layer in range(self.layers) for part in ("key", "value")]

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, *past: Tensor) -> Any:
        seen_LM = _causal(input_ids.shape[1], past[0].shape[2] + input_ids.shape[1])
        mask = (1.0 - (attention_mask[:, None, None, :] * seen_LM).float()) * MASKED
        cache = _cache(past, self.layers)
        out = self.model(
            input_ids=input_ids, attention_mask=mask, position_ids=position_ids, past_key_values=cache, use_cache=True
        )
        return (out.logits, *_flat(out.past_key_values))

    def example(self) -> dict[str, Tensor]:
        shape = Shape.of(self.model.config)
        past = torch.randn(BATCH, shape.heads, PAST_LENGTH, shape.head_size)
        return {
            "input_ids": torch.ones(BATCH, LENGTH, dtype=torch.long),
            "attention_mask": torch.ones(BATCH, PAST_LENGTH + LENGTH, dtype=torch.long),
            "position_ids": torch.arange(PAST_LENGTH, PAST_LENGTH + LENGTH).expand(BATCH, LENGTH).contiguous(),
            **{f"past_key_values.{name}": past.clone() for name in self.past},
        }


class SourceEncoder(nn.Module):
    """T5: the source's tokens -> their states."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.encoder = model.get_encoder()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask = (1.0 - attention_mask[:, None, None, :].float()) * MASKED
        states: Tensor = self.encoder(input_ids=input_ids, attention_mask=mask).last_hidden_state
        return states

    def example(self) -> dict[str, Tensor]:
        ids = torch.ones(BATCH, SOURCE, dtype=torch.long)
        return {"input_ids": ids, "attention_mask": ids.clone()}


class FirstDecoder(nn.Module):
    """T5: the source's states and the first tokens -> logits, keys and values of the tokens and of the source."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.layers = model, Shape.of(model.config).stack("layers")

    @property
    def past(self) -> list[str]:
        return _both(self.layers)

    def forward(self, encoder_attention_mask: Tensor, input_ids: Tensor, encoder_hidden_states: Tensor) -> Any:
        return _decoded(self.model, self.layers, encoder_attention_mask, input_ids, encoder_hidden_states)

    def example(self) -> dict[str, Tensor]:
        states = torch.randn(BATCH, SOURCE, self.model.config.d_model)
        return {**_masked_source(), "encoder_hidden_states": states}


class NextDecoder(nn.Module):
    """T5: further tokens -> logits, keys and values of the tokens with these; those of the source come back as they
    were."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.layers = model, Shape.of(model.config).stack("layers")

    @property
    def past(self) -> list[str]:
        return _both(self.layers)

    def forward(self, encoder_attention_mask: Tensor, input_ids: Tensor, *past: Tensor) -> Any:
        mine = [tensor for n in range(0, len(past), 4) for tensor in past[n : n + 2]]
        source = [tensor for n in range(0, len(past), 4) for tensor in past[n + 2 : n + 4]]
        unread = torch.zeros(1, 1, self.model.config.d_model)  # there has to be a source; its keys are held already
        return _decoded(self.model, self.layers, encoder_attention_mask, input_ids, unread, mine=mine, source=source)

    def example(self) -> dict[str, Tensor]:
        shape = Shape.of(self.model.config)
        lengths = {"decoder": PAST_LENGTH, "encoder": SOURCE}
        past = {
            f"past_key_values.{name}": torch.randn(BATCH, shape.heads, lengths[name.split(".")[1]], shape.head_size)
            for name in self.past
        }
        return {**_masked_source(), **past}


def _both(layers: int) -> list[str]:
    """The names of T5's keys and values: of each layer the decoder's own, then those of the source."""
    kinds = [f"{kind}.{part}" for kind in ("decoder", "encoder") for part in ("key", "value")]
    return [f"{layer}.{kind}" for layer in range(layers) for kind in kinds]


def _masked_source() -> dict[str, Tensor]:
    return {
        "encoder_attention_mask": torch.ones(BATCH, SOURCE, dtype=torch.long),
        "input_ids": torch.ones(BATCH, LENGTH, dtype=torch.long),
    }


def _decoded(
    model: Any,
    layers: int,
    source_mask: Tensor,
    ids: Tensor,
    states: Tensor,
    *,
    mine: Sequence[Tensor] = (),
    source: Sequence[Tensor] = (),
) -> Any:
    """T5's logits, and keys and values in the order of `_both`; `mine`, `source`: those there are already."""
    total = ids.shape[1] + (mine[0].shape[2] if mine else 0)
    seen_LM = _causal(ids.shape[1], total)
    cache = EncoderDecoderCache(_cache(mine, layers), _cache(source, layers))
    cache.is_updated = dict.fromkeys(range(layers), bool(source))
    out = model(
        encoder_outputs=BaseModelOutput(last_hidden_state=states),
        attention_mask=(1.0 - source_mask[:, None, None, :].float()) * MASKED,
        decoder_input_ids=ids,
        decoder_attention_mask=((1.0 - seen_LM.float()) * MASKED)[None, None].expand(ids.shape[0], -1, -1, -1),
        past_key_values=cache,
        use_cache=True,
    )
    own, others = _flat(cache.self_attention_cache), _flat(cache.cross_attention_cache)
    pairs = [tensor for n in range(0, len(own), 2) for tensor in (*own[n : n + 2], *others[n : n + 2])]
    return (out.logits, *pairs)


def trace(module: nn.Module, path: Path, *, opset: int) -> None:
    """Writes the graph of one of the modules above. Raises ExportError when it cannot be traced."""
    example: dict[str, Tensor] = module.example()  # type: ignore[operator]
    past: list[str] = getattr(module, "past", [])
    outputs = ["logits", *(f"present.{name}" for name in past)] if past else ["last_hidden_state"]
    axes = {name: _axes(name) for name in (*example, *outputs)}
    try:
        # What tracer and exporter warn of is checked on the file itself; the warnings name only their own code.
        with warnings.catch_warnings(action="ignore"), torch.no_grad():
            torch.onnx.export(
                module.eval(),
                tuple(example.values()),
                path,
                dynamo=False,
                opset_version=opset,
                input_names=list(example),
                output_names=outputs,
                dynamic_axes=axes,
            )
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
        raise ExportError(
            f"{type(module).__name__}: cannot be exported to ONNX ({type(error).__name__}: {error}); expected a GPT-2 "
            "or T5 model as transformers loads it"
        ) from error


def _axes(name: str) -> dict[int, str]:
    batch = {0: "batch_size"}
    if name.startswith(("past_key_values.", "present.")):
        if ".encoder." in name:
            return batch | {2: "encoder_sequence_length"}
        return batch | {2: "past_sequence_length" if name.startswith("past") else "total_sequence_length"}
    if name.startswith("encoder_"):
        return batch | {1: "encoder_sequence_length"}
    if name == "attention_mask":
        return batch | {1: "total_sequence_length"}
    return batch | {1: "sequence_length"}
