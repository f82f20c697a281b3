"""Read the signals of a forward pass that an objective compares.

The only file that knows how transformers exposes attention. Queries, keys and values come from the attention interface
(`tap`), while SDPA still does the work: no hooks and no module names. DeBERTa does not use the interface and is read by
hooks that last for one forward pass.

Shapes: B batch, L tokens, D hidden, H heads, K head size, V classes or vocabulary.
"""

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from compress.errors import ObjectiveError
from compress.models.dropout import draw_faster, drop

NAMES = ("logits", "pair", "embeddings", "layers", "encoder_layers", "scores", "queries", "keys", "values")
LAYERED = frozenset({"layers", "encoder_layers", "scores", "queries", "keys", "values"})
"""Signals with one tensor per layer; the others are a single tensor."""
ATTENTION = frozenset({"scores", "queries", "keys", "values"})


@dataclass(frozen=True)
class LayerAttention:
    """One layer's queries, keys and values (B, H, L, K); `scores` if known, or if they are not just q k^T / sqrt d.

    Queries and keys are as multiplied: after their norms and rotary positions, if any. Keys and values shared by a
    group of heads are repeated for each head. seen_BLL: which tokens (last axis) each token attends to, if a window
    excludes some; padding is excluded too.
    """

    query_BHLK: Tensor
    key_BHLK: Tensor
    value_BHLK: Tensor
    scores_BHLL: Tensor | None = None
    seen_BLL: Tensor | None = None


@dataclass(frozen=True)
class Signals:
    """The requested signals of a forward pass; reading any other is a bug. `mask_BL`: 1 for real tokens.

    logits  (B, V) of a task's head, (B, L, V) of a head per token, (B, L, 2) for starts and ends of spans; (R, V) if
            the head ran only at R chosen positions
    pair    (B, 2) of a head on pairs of segments: next sentence, sentence order

    Of an encoder-decoder, embeddings and layers are the decoder's, (B, M, D) over the M target tokens; mask_BL is that
    of the source.
    """

    mask_BL: Tensor
    logits: Tensor | None = None
    hidden: tuple[Tensor, ...] = ()
    attention: tuple[LayerAttention, ...] = ()
    pair: Tensor | None = None
    encoder_hidden: tuple[Tensor, ...] = ()

    @property
    def embeddings(self) -> Tensor:
        """Return the input of the first layer: (B, L, D)."""
        return self.hidden[0]

    @property
    def layers(self) -> tuple[Tensor, ...]:
        """Return the outputs of layers 1..N: (B, L, D) each."""
        return self.hidden[1:]

    @property
    def encoder_layers(self) -> tuple[Tensor, ...]:
        """Return the outputs of layers 1..N of an encoder-decoder's encoder: (B, L, D) each."""
        return self.encoder_hidden[1:]

    @property
    def queries(self) -> tuple[Tensor, ...]:
        return tuple(layer.query_BHLK for layer in self.attention)

    @property
    def keys(self) -> tuple[Tensor, ...]:
        return tuple(layer.key_BHLK for layer in self.attention)

    @property
    def values(self) -> tuple[Tensor, ...]:
        return tuple(layer.value_BHLK for layer in self.attention)

    @cached_property
    def scores(self) -> tuple[Tensor, ...]:
        """Return the scores Q K^T / sqrt d_k, before mask, softmax and dropout: (B, H, L, L) each, including those of
        padding and, in a decoder, of later tokens."""
        return tuple(
            (each.query_BHLK * (1 / math.sqrt(each.query_BHLK.shape[-1]))) @ each.key_BHLK.mT
            if each.scores_BHLL is None
            else each.scores_BHLL
            for each in self.attention
        )


def _tap(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tap: list[LayerAttention] | None = None,
    **kwargs: Any,
) -> Any:
    """Compute attention, and append its inputs to `tap`, a list that the caller passes to the model.

    On a CPU torch's SDPA is slow with dropout, and for few tokens; there the formula is computed explicitly, which
    yields the scores as well. A model that is neither tapped nor trained uses SDPA, as it would without
    `open_attention`, so that a resumed run has the same bits.
    """
    explicit = query.device.type == "cpu" and (tap is not None or kwargs.get("dropout"))
    plain = _attend(module, query, key, value, attention_mask, **kwargs) if explicit else None
    if tap is not None:
        window, seen_B1LL = kwargs.get("sliding_window"), attention_mask
        local = window is not None and seen_B1LL is not None and window < key.shape[2]
        keys, values = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
        seen_BLL = seen_B1LL[:, 0] if local else None  # type: ignore[index]
        tap.append(LayerAttention(query, keys, values, plain[1] if plain else None, seen_BLL))
    if plain:
        return plain[0], None
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


LONG = 32
"""The number of tokens beyond which torch's SDPA is faster, without dropout."""
LANES = 16
"""Float32 numbers in a vector register: torch's softmax over fewer is not vectorised, and 8 times as slow."""


def _attend(
    module: nn.Module,
    query_BHLK: Tensor,
    key_BHLK: Tensor,
    value_BHLK: Tensor,
    mask_BLL: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor] | None:
    """Return softmax(Q K^T / sqrt d + mask) V as (B, L, H, K), and the scores; None if SDPA is needed, or faster.

    `mask_BLL`, (B, 1, L, L), is true for visible tokens. The softmax is computed in float32.
    """
    tokens, scale = key_BHLK.shape[2], query_BHLK.shape[-1] ** -0.5
    causal = mask_BLL is None and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    biased = position_bias is not None or (mask_BLL is not None and mask_BLL.dtype != torch.bool)
    other = biased or causal or key_BHLK.shape[1] != query_BHLK.shape[1] or scaling not in (None, scale)
    if other or (tokens > LONG and not dropout):
        return None
    scores_BHLL = (query_BHLK * scale) @ key_BHLK.mT
    masked_BHLL = scores_BHLL.to(torch.promote_types(scores_BHLL.dtype, torch.float32))
    if mask_BLL is not None:
        lowest = torch.finfo(torch.float32).min
        masked_BHLL = masked_BHLL + torch.zeros(mask_BLL.shape).masked_fill_(~mask_BLL, lowest)
    filled = max(0, LANES - tokens)
    weights_BHLL = pad(masked_BHLL, (0, filled), value=-math.inf).softmax(-1)[..., :tokens]
    weights_BHLL = drop(weights_BHLL.to(value_BHLK.dtype), dropout)
    return (weights_BHLL @ value_BHLK).transpose(1, 2).contiguous(), scores_BHLL


AttentionInterface.register("tap", _tap)
AttentionMaskInterface.register("tap", sdpa_mask)


def read(
    model: nn.Module, batch: Mapping[str, Tensor], wants: frozenset[str], *, at_BL: Tensor | None = None
) -> Signals:
    """Run `model` on `batch` and return the signals in `wants`, computing no others.

    Gradients flow unless the caller stops them. Labels, and inputs that the model does not take (a DistilBERT has no
    token types), are dropped. With `at_BL` (true at R positions) a language model's head runs only there: over 30,522
    tokens it costs more than the layers below it. Raises ObjectiveError if the model's attention cannot be read.
    """
    # only the head determines the decoder's input: a T5 that classifies feeds it the text
    own_decoder = getattr(model.config, "is_encoder_decoder", False) and "decoder_input_ids" not in batch
    head = model if wants & {"logits", "pair"} or own_decoder else getattr(model, "base_model", model)
    accepted = inspect.signature(head.forward).parameters
    inputs: dict[str, Any] = {name: value for name, value in batch.items() if name in accepted and name != "labels"}
    if wants & {"layers", "encoder_layers", "embeddings"}:
        inputs["output_hidden_states"] = True
    with _head_at(model, at_BL if "logits" in wants else None):
        if not wants & ATTENTION:
            out, layers = head(**inputs), []
        elif _is_disentangled(model):
            with _hooked(model) as layers:
                out = head(**inputs)
        else:
            layers = []
            out = head(**inputs, tap=layers)
    if wants & ATTENTION and not layers:
        raise ObjectiveError(
            f"{type(model).__name__} shows no attention to read: call signals.open_attention(model) first; XLNet, XLM "
            "and the first GPT do not use transformers' attention interface, leave attention losses out for them"
        )
    mask_BL = batch.get("attention_mask")
    if mask_BL is None:
        mask_BL = torch.ones_like(batch["input_ids"])
    logits = logits_of(out) if "logits" in wants else None
    hidden = _first(out, "hidden_states", "decoder_hidden_states") or ()
    pair, encoder = _first(out, "seq_relationship_logits", "sop_logits"), _first(out, "encoder_hidden_states") or ()
    return Signals(mask_BL, logits, hidden, tuple(layers), pair, encoder)


def logits_of(out: Any) -> Tensor:
    """Return a model's logits, under any name of transformers; starts and ends of spans as (B, L, 2), the vectors of a
    sentence encoder as (B, E)."""
    starts = getattr(out, "start_logits", None)
    if starts is not None:
        return torch.stack([starts, out.end_logits], -1)
    found = _first(out, "logits", "prediction_logits", "sentence_embedding")
    if found is None:
        raise ObjectiveError(f"{type(out).__name__} has no logits; give the stage the `head` that its losses read")
    return found


def _first(out: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(out, name, None)) is not None), None)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode, and restore the mode of every module afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


_LM_HEADS = ("cls", "lm_head", "predictions", "generator_predictions", "vocab_transform", "lm_predictions")
"""Names of the first module above the encoder in transformers' masked and causal language models."""


def has_lm_head(model: nn.Module) -> bool:
    """Return True if `read` can run the language model's head at chosen positions."""
    return _lm_head(model) is not None


def _lm_head(model: nn.Module) -> Any:
    """Return the first module above the encoder in a language model; ModernBERT's classifiers have a `head` as well."""
    names = (*_LM_HEADS, "head") if hasattr(model, "decoder") else _LM_HEADS
    return next((getattr(model, name) for name in names if hasattr(model, name)), None)


@contextmanager
def _head_at(model: nn.Module, at_BL: Tensor | None) -> Iterator[None]:
    """Pass the head hidden states (R, D) of the chosen positions instead of (B, L, D)."""
    if at_BL is None:
        yield
        return
    chosen_BL = at_BL.bool()
    hook = _lm_head(model).register_forward_pre_hook(lambda _, args: (args[0][chosen_BL], *args[1:]))
    try:
        yield
    finally:
        hook.remove()


def open_attention(model: nn.Module) -> None:
    """Let `read` see this model's queries, keys and values.

    Raises ObjectiveError for reentrant gradient checkpointing, which silently loses the gradients of these signals.
    """
    for module in model.modules():
        keywords = getattr(getattr(module, "_gradient_checkpointing_func", None), "keywords", {})
        if getattr(module, "gradient_checkpointing", False) and keywords.get("use_reentrant", False):
            raise ObjectiveError(
                "reentrant gradient checkpointing loses the gradient of attention signals; use "
                "model.gradient_checkpointing_enable({'use_reentrant': False})"
            )
    if not _is_disentangled(model) and model.config._attn_implementation != "tap":  # type: ignore[union-attr]
        model.set_attn_implementation("tap")  # type: ignore[operator]


def train_faster(model: nn.Module) -> None:
    """Replace torch's SDPA and dropout by the faster `_tap` and `compress.models.dropout`."""
    draw_faster(model)
    if getattr(model.config, "_attn_implementation", None) == "sdpa":
        model.set_attn_implementation("tap")  # type: ignore[operator]


# DeBERTa has disentangled attention: scores add position terms to q k^T, and the scale is sqrt((1 + terms) d).


def _is_disentangled(model: nn.Module) -> bool:
    return str(getattr(model.config, "model_type", "")).startswith("deberta")


@contextmanager
def _hooked(model: nn.Module) -> Iterator[list[LayerAttention]]:
    """Record the inputs of each DisentangledSelfAttention, and read them after the forward pass.

    Reading them during the pass would make it differ from its repetition under gradient checkpointing.
    """
    layers: list[LayerAttention] = []
    calls: list[tuple[Any, ...]] = []
    hooks = [
        module.register_forward_hook(lambda *call: calls.append(call[:3]), with_kwargs=True)
        for module in model.modules()
        if type(module).__name__ == "DisentangledSelfAttention"
    ]
    try:
        yield layers
        layers += [_disentangled_attention(*call) for call in calls]
    finally:
        for hook in hooks:
            hook.remove()


def _disentangled_attention(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerAttention:
    """Recompute queries, keys and values by the layer's own projections, and scores with its position terms.

    Position terms are computed without dropout.
    """
    call = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    hidden_BLD, relative, table = call["hidden_states"], call.get("relative_pos"), call.get("rel_embeddings")
    if hasattr(module, "query_proj"):  # v2, v3
        query_BLD = hidden_BLD if call.get("query_states") is None else call["query_states"]
        projected = module.query_proj(query_BLD), module.key_proj(hidden_BLD), module.value_proj(hidden_BLD)
        flat = [module.transpose_for_scores(x, module.num_attention_heads) for x in projected]
        terms = 1 + sum(kind in module.pos_att_type for kind in ("c2p", "p2c"))
        split = [x.view(hidden_BLD.shape[0], module.num_attention_heads, x.shape[-2], x.shape[-1]) for x in flat]
        query, key = flat[0], flat[1]
        bias = module.disentangled_attention_bias if module.relative_attention else None
    else:  # v1
        q, k, v = module.transpose_for_scores(module.in_proj(hidden_BLD)).chunk(3, dim=-1)
        q = q + module.transpose_for_scores(module.q_bias[None, None, :])
        v = v + module.transpose_for_scores(module.v_bias[None, None, :])
        terms = 1 + len(module.pos_att_type)
        split = [q, k, v]
        query, key = q / math.sqrt(q.shape[-1] * terms), k
        bias = module.disentangled_att_bias if module.relative_attention and table is not None else None
    scores_BHLL = split[0] @ split[1].mT / math.sqrt(split[0].shape[-1] * terms)
    if bias is not None:
        scores_BHLL = scores_BHLL + bias(query, key, relative, table, terms).view_as(scores_BHLL)
    return LayerAttention(split[0], split[1], split[2], scores_BHLL)
