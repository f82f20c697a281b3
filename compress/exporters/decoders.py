"""Trace generative models: decoders such as GPT-2 and Llama, T5's encoder and decoder,
with the keys and values of earlier tokens as inputs and outputs. Names follow optimum
and transformers.js.

B batch, L new tokens, M all tokens, S tokens of T5's source, D hidden, N layers.
"""

import copy
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from compress.arrays import Array
from compress.errors import ExportError
from compress.exporters.onnx import MASKED_SCORE, export_graph, tracing
from compress.models.key_value_cache import cache_of, with_cache
from compress.slicing.shape import Shape
from compress.tensors import TensorDict

TRACED_BATCH = 2
PAST_LENGTH = 3
LENGTH = 4
SOURCE = 5
"""The sizes at which the graphs are traced."""


class CachedLayer(DynamicLayer):
    """Keys and values (B, H, past, K) of one layer, or None. transformers begins with
    an empty tensor instead, which ONNX cannot concatenate."""

    def __init__(
        self, keys: Tensor | None = None, values: Tensor | None = None
    ) -> None:
        super().__init__()
        self.keys = keys
        self.values = values
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        if self.keys is not None and self.values is not None:
            key_states = torch.cat([self.keys, key_states], dim=-2)
            value_states = torch.cat([self.values, value_states], dim=-2)
        self.keys = key_states
        self.values = value_states
        return key_states, value_states

    def get_seq_length(self) -> int:
        return 0 if self.keys is None else self.keys.shape[-2]


def _cache(past: Sequence[Tensor], layers: int) -> DynamicCache:
    """Make a cache from alternating keys and values; an empty one if there are none."""
    cache = DynamicCache()
    cache.layers = [
        CachedLayer(*past[2 * layer : 2 * layer + 2]) for layer in range(layers)
    ]
    return cache


def _flat(cache: Any) -> list[Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def _causal(length: Any, total: Any, window: int | None = None) -> Tensor:
    """Compute the causal mask (L, M) of the last L of M tokens; with `window`, each
    token sees only the last `window` tokens, itself included."""
    place_M = torch.arange(total)
    distance_LM = place_M[total - length :, None] - place_M[None, :]
    return (
        (distance_LM >= 0)
        if window is None
        else (distance_LM >= 0) & (distance_LM < window)
    ).long()


class CausalDecoder(nn.Module):
    """GPT-2, Llama and similar decoders: tokens, past keys and values -> logits,
    present keys and values.

    Keys are stored after rotary positions. Raises ExportError for rotary positions
    whose frequencies change with the length of a text.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.layers = Shape.from_config(model.config).layers
        kind = (getattr(model.config, "rope_parameters", None) or {}).get(
            "rope_type", "default"
        )
        if kind in ("dynamic", "longrope"):
            raise ExportError(
                f"{type(model).__name__}: its rotary positions are of type {kind}, "
                "which depends on the length of the text; expected default, linear, "
                "llama3 or yarn"
            )

    @property
    def past(self) -> list[str]:
        return [
            f"{layer}.{part}"
            for layer in range(self.layers)
            for part in ("key", "value")
        ]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        *past: Tensor,
    ) -> Any:
        length = input_ids.shape[1]
        config = self.model.config

        def mask(window: int | None) -> Tensor:
            seen_LM = _causal(length, past[0].shape[2] + length, window)
            return (
                1.0 - (attention_mask[:, None, None, :] * seen_LM).float()
            ) * MASKED_SCORE

        kinds = getattr(config, "layer_types", None)
        window = getattr(config, "sliding_window", None)
        masks: Any = mask(None if kinds else window)  # Mistral's layers are all alike
        if "sliding_attention" in (kinds or ()):
            masks = {"full_attention": masks, "sliding_attention": mask(window)}
        cache = _cache(past, self.layers)
        out = self.model(
            input_ids=input_ids,
            attention_mask=masks,
            position_ids=position_ids,
            **with_cache(self.model, cache),
        )
        return (out.logits, *_flat(cache_of(out)))

    def example(self) -> TensorDict:
        shape = Shape.from_config(self.model.config)
        heads = getattr(self.model.config, "num_key_value_heads", shape.heads)
        past = torch.randn(TRACED_BATCH, heads, PAST_LENGTH, shape.head_size)
        return {
            "input_ids": torch.ones(TRACED_BATCH, LENGTH, dtype=torch.long),
            "attention_mask": torch.ones(
                TRACED_BATCH, PAST_LENGTH + LENGTH, dtype=torch.long
            ),
            "position_ids": torch.arange(PAST_LENGTH, PAST_LENGTH + LENGTH)
            .expand(TRACED_BATCH, LENGTH)
            .contiguous(),
            **{f"past_key_values.{name}": past.clone() for name in self.past},
        }


class SourceEncoder(nn.Module):
    """T5: the source's tokens -> the encoder's states."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.encoder = model.get_encoder()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask = (1.0 - attention_mask[:, None, None, :].float()) * MASKED_SCORE
        states: Tensor = self.encoder(
            input_ids=input_ids, attention_mask=mask
        ).last_hidden_state
        return states

    def example(self) -> TensorDict:
        ids = torch.ones(TRACED_BATCH, SOURCE, dtype=torch.long)
        return {"input_ids": ids, "attention_mask": ids.clone()}


class T5Decoder(nn.Module):
    """T5: tokens, and in the `first` step the encoder's states, later all past keys and
    values -> logits, keys and values of the tokens and of the source."""

    def __init__(self, model: Any, *, first: bool) -> None:
        super().__init__()
        self.model = model
        self.first = first
        self.layers = Shape.from_config(model.config).stack("layers")

    @property
    def past(self) -> list[str]:
        """List the names of the keys and values: for each layer the decoder's own, then
        the source's."""
        kinds = [
            f"{kind}.{part}"
            for kind in ("decoder", "encoder")
            for part in ("key", "value")
        ]
        return [f"{layer}.{kind}" for layer in range(self.layers) for kind in kinds]

    def forward(
        self, encoder_attention_mask: Tensor, input_ids: Tensor, *given: Tensor
    ) -> Any:
        past = () if self.first else given
        own, source = (
            [each for n in range(at, len(past), 4) for each in past[n : n + 2]]
            for at in (0, 2)
        )
        # transformers needs encoder outputs even if the source's keys are cached
        states = (
            given[0] if self.first else torch.zeros(1, 1, self.model.config.d_model)
        )
        total = input_ids.shape[1] + (own[0].shape[2] if own else 0)
        seen_LM = _causal(input_ids.shape[1], total)
        cache = EncoderDecoderCache(
            _cache(own, self.layers), _cache(source, self.layers)
        )
        cache.is_updated = dict.fromkeys(range(self.layers), bool(source))
        out = self.model(
            encoder_outputs=BaseModelOutput(last_hidden_state=states),
            attention_mask=(1.0 - encoder_attention_mask[:, None, None, :].float())
            * MASKED_SCORE,
            decoder_input_ids=input_ids,
            decoder_attention_mask=((1.0 - seen_LM.float()) * MASKED_SCORE)[
                None, None
            ].expand(input_ids.shape[0], -1, -1, -1),
            **with_cache(self.model, cache),
        )
        own = _flat(cache.self_attention_cache)
        source = _flat(cache.cross_attention_cache)
        pairs = [
            each
            for n in range(0, len(own), 2)
            for each in (*own[n : n + 2], *source[n : n + 2])
        ]
        return (out.logits, *pairs)

    def example(self) -> TensorDict:
        shape = Shape.from_config(self.model.config)
        lengths = {"decoder": PAST_LENGTH, "encoder": SOURCE}
        states = {
            "encoder_hidden_states": torch.randn(
                TRACED_BATCH, SOURCE, self.model.config.d_model
            )
        }
        past = {
            f"past_key_values.{name}": torch.randn(
                TRACED_BATCH, shape.heads, lengths[name.split(".")[1]], shape.head_size
            )
            for name in self.past
        }
        return {
            "encoder_attention_mask": torch.ones(
                TRACED_BATCH, SOURCE, dtype=torch.long
            ),
            "input_ids": torch.ones(TRACED_BATCH, LENGTH, dtype=torch.long),
            **(states if self.first else past),
        }


def trace(module: nn.Module, path: Path, *, opset: int) -> None:
    """Write the graph of one of the modules above. Raises ExportError if it cannot be
    traced."""
    example: TensorDict = module.example()  # type: ignore[operator]  # mypy takes it for a Tensor
    past: list[str] = getattr(module, "past", [])
    outputs = (
        ["logits", *(f"present.{name}" for name in past)]
        if past
        else ["last_hidden_state"]
    )
    axes = {name: _axes(name) for name in (*example, *outputs)}
    with tracing(type(module).__name__, "a generative model as transformers loads it"):
        export_graph(module, example, path, opset=opset, outputs=outputs, axes=axes)


def _axes(name: str) -> dict[int, str]:
    batch = {0: "batch_size"}
    if name.startswith(("past_key_values.", "present.")):
        if ".encoder." in name:
            return batch | {2: "encoder_sequence_length"}
        return batch | {
            2: "past_sequence_length"
            if name.startswith("past")
            else "total_sequence_length"
        }
    if name.startswith("encoder_"):
        return batch | {1: "encoder_sequence_length"}
    if name == "attention_mask":
        return batch | {1: "total_sequence_length"}
    return batch | {1: "sequence_length"}


SWITCH = "use_cache_branch"


def merge_decoders(
    first: onnx.ModelProto, following: onnx.ModelProto
) -> onnx.ModelProto:
    """Merge two models into one with the inputs of both and the outputs of `first`; the
    switch is a bool (1,).

    For an output of `first` that `following` does not have, it passes its input
    through.
    """
    weights: dict[str, onnx.TensorProto] = {}
    then, otherwise = (
        _branch(model.graph, prefix, weights)
        for model, prefix in ((following, "following"), (first, "first"))
    )
    inputs = {
        each.name: each for model in (first, following) for each in model.graph.input
    }
    switch = helper.make_tensor_value_info(SWITCH, TensorProto.BOOL, [1])
    names = [each.name for each in first.graph.output]
    node = helper.make_node(
        "If", [SWITCH], names, "choose", then_branch=then, else_branch=otherwise
    )
    graph = helper.make_graph(
        [node],
        "merged",
        [*inputs.values(), switch],
        list(first.graph.output),
        list(weights.values()),
    )
    versions = {
        each.domain: each for model in (first, following) for each in model.opset_import
    }
    made = helper.make_model(
        graph, opset_imports=list(versions.values()), ir_version=first.ir_version
    )
    helper.set_model_props(
        made, {each.key: each.value for each in first.metadata_props}
    )
    made.producer_name = first.producer_name
    made.producer_version = first.producer_version
    return made


def _branch(
    graph: onnx.GraphProto, prefix: str, weights: dict[str, onnx.TensorProto]
) -> onnx.GraphProto:
    """Make a branch of the graph; add its weights to `weights`, named after a hash of
    their content, so that both branches share them."""
    names = {each.name: each.name for each in graph.input} | {"": ""}
    outer = set(names)
    for each in graph.initializer:
        digest = hashlib.sha256(numpy_helper.to_array(each).tobytes()).hexdigest()[:24]
        weight = copy.deepcopy(each)
        weight.name = (
            f"weight/{each.data_type}/{'x'.join(map(str, each.dims))}/{digest}"
        )
        names[each.name] = weights.setdefault(weight.name, weight).name
    nodes = copy.deepcopy(list(graph.node))
    for node in nodes:
        node.name = (
            f"{prefix}{node.name}"
            if node.name.startswith("/")
            else f"{prefix}/{node.name}"
        )
        node.input[:] = [names.get(name, f"{prefix}/{name}") for name in node.input]
        node.output[:] = [f"{prefix}/{name}" if name else "" for name in node.output]
    outputs = copy.deepcopy(list(graph.output))
    for output in outputs:
        source = names.get(output.name, f"{prefix}/{output.name}")
        # a branch cannot return what it did not compute
        if source in outer or source in weights:
            same = f"{prefix}/{output.name}/same"
            nodes.append(helper.make_node("Identity", [source], [same]))
            source = same
        output.name = source
    return helper.make_graph(nodes, prefix, [], outputs)


def tie_matrices(model: onnx.ModelProto, *, smallest: int = 2**16) -> onnx.ModelProto:
    """Replace matrices that are the transpose of another one, such as a head tied to
    its embedding, by a Transpose.

    onnxruntime computes it when it opens the file. Changes `model`, except for matrices
    of fewer values than `smallest`.
    """

    def digest(array: Array) -> str:
        content = np.ascontiguousarray(array).tobytes()
        return f"{array.shape}{hashlib.sha256(content).hexdigest()}"

    tables = [
        each
        for each in model.graph.initializer
        if len(each.dims) == 2 and np.prod(each.dims) >= smallest
    ]
    arrays = {each.name: numpy_helper.to_array(each) for each in tables}
    names = {digest(array): name for name, array in arrays.items()}
    tied: dict[str, str] = {}
    # the table comes before the head that is tied to it
    for name, array in reversed(arrays.items()):
        other = names.get(digest(array.T))
        if other is not None and other != name and other not in tied:
            tied[name] = other
    kept = [each for each in model.graph.initializer if each.name not in tied]
    nodes = [
        helper.make_node("Transpose", [other], [name], f"tied/{name}", perm=[1, 0])
        for name, other in tied.items()
    ]
    nodes += model.graph.node
    del model.graph.initializer[:], model.graph.node[:]
    model.graph.initializer.extend(kept)
    model.graph.node.extend(nodes)
    return model
