"""Read the signals of a forward pass that an objective compares.

The only file that knows how transformers exposes attention. Queries, keys and values
come from the attention interface (`tap`), while SDPA still does the work: no hooks and
no module names. Scores include whatever the interface is told about them: their scale,
a bias for positions, a cap. A setting that is not known here is refused. DeBERTa does
not use the interface and is read by hooks that last for one forward pass.

Shapes: B batch, L tokens, D hidden, H heads, K head size, V classes or vocabulary.
"""

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from compress import families
from compress.data.constants import IGNORE_INDEX
from compress.errors import ObjectiveError
from compress.models.dropout import draw_faster, drop
from compress.tensors import TensorDict, Tensors

SIGNAL_NAMES = (
    "logits",
    "pair",
    "embeddings",
    "layers",
    "encoder_layers",
    "scores",
    "queries",
    "keys",
    "values",
)
LayerTensors = tuple[Tensor, ...]
"""A tensor of each layer."""
ATTENTION = frozenset({"scores", "queries", "keys", "values"})


@dataclass(frozen=True)
class LayerAttention:
    """One layer's queries, keys and values (B, H, L, K), and how its scores are
    computed from them.

    Queries and keys are taken just before their product: after norms and rotary
    positions, if any. Keys and values shared by a group of heads are repeated for each
    head.

    scores_BHLL   the scores, where they have been computed already
    seen_BLL      which tokens (last axis) each token attends to, padding excluded;
                  None: all real ones
    scale         the factor of q k^T; None: 1 / sqrt d_k
    cap           the bound of a soft cap, cap tanh(score / cap), if any
    bias_BHLL     added to the scores for the positions of two tokens, if anything
    number        the number of the layer, from 0, if its attention knows it
    """

    query_BHLK: Tensor
    key_BHLK: Tensor
    value_BHLK: Tensor
    scores_BHLL: Tensor | None = None
    seen_BLL: Tensor | None = None
    scale: float | None = None
    cap: float | None = None
    bias_BHLL: Tensor | None = None
    number: int | None = None

    def scores(self) -> Tensor:
        """Return the scores that the layer takes the softmax of, before the mask: (B,
        H, L, L)."""
        if self.scores_BHLL is not None:
            return self.scores_BHLL
        scale = self.query_BHLK.shape[-1] ** -0.5 if self.scale is None else self.scale
        scores_BHLL = (self.query_BHLK * scale) @ self.key_BHLK.mT
        if self.cap is not None:
            scores_BHLL = self.cap * (scores_BHLL / self.cap).tanh()
        if self.bias_BHLL is not None:
            scores_BHLL = scores_BHLL + self.bias_BHLL
        return scores_BHLL

    def average(self, dropout: float) -> Tensor:
        """Average the values by the softmax of the scores, which is computed in
        float32: (B, L, H, K)."""
        scores_BHLL = self.scores()
        tokens = scores_BHLL.shape[-1]
        masked_BHLL = scores_BHLL.to(
            torch.promote_types(scores_BHLL.dtype, torch.float32)
        )
        if self.seen_BLL is not None:
            lowest = torch.finfo(torch.float32).min
            hidden_BLL = torch.zeros(
                self.seen_BLL.shape, device=scores_BHLL.device
            ).masked_fill_(~self.seen_BLL, lowest)
            masked_BHLL = masked_BHLL + hidden_BLL[:, None]
        filled = max(0, LANES - tokens)
        padded_BHLL = pad(masked_BHLL, (0, filled), value=-math.inf)
        weights_BHLL = padded_BHLL.softmax(-1)[..., :tokens]
        weights_BHLL = drop(weights_BHLL.to(self.value_BHLK.dtype), dropout)
        return (weights_BHLL @ self.value_BHLK).transpose(1, 2).contiguous()


@dataclass(frozen=True)
class Signals:
    """The requested signals of a forward pass; no others may be read. `mask_BL`: 1 for
    real tokens.

    logits  (B, V) of a task's head, (B, L, V) of a head per token, (B, L, 2) for starts
            and ends of spans; (R, V) if the head ran only at R chosen positions
    pair    (B, 2) of a head on pairs of segments: next sentence, sentence order

    Of an encoder-decoder, embeddings and layers are the decoder's, (B, M, D) over the M
    target tokens; mask_BL is that of the source, and attention is the encoder's:
    `two_stacks`. Where the target is the source, as for a class, it has one."""

    mask_BL: Tensor
    logits: Tensor | None = None
    hidden: LayerTensors = ()
    attention: tuple[LayerAttention, ...] = ()
    pair: Tensor | None = None
    encoder_hidden: LayerTensors = ()
    two_stacks: bool = False

    @property
    def embeddings(self) -> Tensor:
        """Return the input of the first layer: (B, L, D)."""
        return self.hidden[0]

    @property
    def layers(self) -> LayerTensors:
        """Return the outputs of layers 1..N: (B, L, D) each."""
        return self.hidden[1:]

    @property
    def encoder_layers(self) -> LayerTensors:
        """Return the outputs of layers 1..N of an encoder-decoder's encoder: (B, L, D)
        each."""
        return self.encoder_hidden[1:]

    @property
    def queries(self) -> LayerTensors:
        return tuple(layer.query_BHLK for layer in self.attention)

    @property
    def keys(self) -> LayerTensors:
        return tuple(layer.key_BHLK for layer in self.attention)

    @property
    def values(self) -> LayerTensors:
        return tuple(layer.value_BHLK for layer in self.attention)

    @cached_property
    def scores(self) -> LayerTensors:
        """Return the scores that each layer takes the softmax of, before mask and
        dropout: (B, H, L, L) each.

        They are Q K^T / sqrt d_k, unless the family has another scale, a cap, or terms
        for positions: see `LayerAttention`. They include the scores of padding and of
        masked tokens.
        """
        return tuple(layer.scores() for layer in self.attention)


_SCORED_BY = frozenset(
    {"dropout", "is_causal", "position_bias", "scaling", "sliding_window", "softcap"}
)
"""Settings of attention that a `LayerAttention` accounts for; a window is in the
mask."""
_WITHOUT_EFFECT = frozenset(
    {
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "deterministic",
        "max_length_k",
        "max_length_q",
        "output_attentions",
        "output_hidden_states",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Settings that some models pass on to their attention, without effect on its
scores."""
MASK_CEILING = -9_000.0
"""Values below this are masks, not position biases: masks add the lowest number of
their format, or -10,000 as in BERT."""


def _tap(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tap: list[LayerAttention] | None = None,
    **settings: Any,
) -> Any:
    """Compute attention, and append its inputs to `tap`, a list that the caller passes
    to the model.

    On a CPU torch's SDPA is slow with dropout, and for few tokens; there the formula is
    computed explicitly, which yields the scores as well. Capped scores, which SDPA
    cannot compute, always use the formula; whatever the formula does not cover is left
    to SDPA. A model that is neither tapped nor trained uses SDPA, as it would without
    `open_attention`, so that a resumed run has the same bits. Raises ObjectiveError for
    a setting that changes the scores in a way that is not known here.
    """
    dropout = settings.get("dropout") or 0.0
    capped = settings.get("softcap") is not None
    tapped = tap is not None
    slow = dropout or (tapped and key.shape[2] <= SDPA_FASTER)
    if tapped or capped:
        _check_settings(module, settings)
    elif _list_unknown(settings) or _is_per_head(attention_mask):
        slow = False
    explicit = capped or (query.device.type == "cpu" and slow)
    if tapped or explicit:
        layer = _record(module, query, key, value, attention_mask, settings=settings)
        if explicit:
            layer = replace(layer, scores_BHLL=layer.scores())
        if tap is not None:
            tap.append(layer)
        if explicit:
            return layer.average(dropout), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)


def _list_unknown(settings: Mapping[str, Any]) -> list[str]:
    """List the settings that a `LayerAttention` does not account for."""
    given = {name for name, value in settings.items() if value is not None}
    return sorted(given - _SCORED_BY - _WITHOUT_EFFECT)


def _is_per_head(mask_BHLL: Tensor | None) -> bool:
    return mask_BHLL is not None and mask_BHLL.shape[1] > 1


def _check_settings(module: nn.Module, settings: Mapping[str, Any]) -> None:
    """Raise ObjectiveError for settings that make attention another function of queries
    and keys."""
    if unknown := _list_unknown(settings):
        raise _unreadable(
            f"{type(module).__name__} computes its attention with "
            f"{', '.join(unknown)}, so it is not the softmax of the scores of queries "
            "and keys"
        )


def _record(
    module: nn.Module,
    query_BHLK: Tensor,
    key_BHLK: Tensor,
    value_BHLK: Tensor,
    mask_BLL: Tensor | None,
    *,
    settings: Mapping[str, Any],
) -> LayerAttention:
    """Record the inputs and settings of a layer's attention."""
    bias_BHLL = settings.get("position_bias")
    seen_BLL = None
    if (
        mask_BLL is None
        and _looks_back(module, settings.get("is_causal"))
        and query_BHLK.shape[2] > 1
    ):
        seen_BLL = query_BHLK.new_ones(
            query_BHLK.shape[2], key_BHLK.shape[2], dtype=torch.bool
        ).tril()
        seen_BLL = seen_BLL.expand(len(query_BHLK), -1, -1)
    elif mask_BLL is not None:
        seen_BHLL = mask_BLL
        if mask_BLL.dtype != torch.bool:  # a number that is added to each score
            seen_BHLL = mask_BLL > MASK_CEILING
            added_BHLL = mask_BLL.masked_fill(~seen_BHLL, 0)
            bias_BHLL = added_BHLL if bias_BHLL is None else bias_BHLL + added_BHLL
        if seen_BHLL.shape[1] > 1 and not torch.equal(
            seen_BHLL.all(1), seen_BHLL.any(1)
        ):
            raise _unreadable(
                f"the heads of {type(module).__name__} see different tokens"
            )
        seen_BLL = seen_BHLL[:, 0].expand(-1, query_BHLK.shape[2], -1)
    group = query_BHLK.shape[1] // key_BHLK.shape[1]
    if group > 1:
        key_BHLK = key_BHLK.repeat_interleave(group, dim=1)
        value_BHLK = value_BHLK.repeat_interleave(group, dim=1)
    return LayerAttention(
        query_BHLK,
        key_BHLK,
        value_BHLK,
        seen_BLL=seen_BLL,
        scale=settings.get("scaling"),
        cap=settings.get("softcap"),
        bias_BHLL=bias_BHLL,
        number=getattr(module, "layer_idx", None),
    )


def _looks_back(module: nn.Module, is_causal: bool | None) -> bool:
    """Return True if no token attends to a later one although the mask is left out."""
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


SDPA_FASTER = 32
"""The number of tokens beyond which torch's SDPA is faster, without dropout."""
LANES = 16
"""Float32 numbers in a vector register: torch's softmax over fewer is not vectorised,
and 8 times as slow."""


def _whole_mask(*sizes: Any, **settings: Any) -> Tensor | None:
    """Make the mask even if SDPA could do without it, for families that do not tell
    SDPA when they are causal."""
    return sdpa_mask(
        *sizes,
        **settings
        | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
    )


AttentionInterface.register("tap", _tap)
AttentionMaskInterface.register("tap", sdpa_mask)
AttentionInterface.register("tap_masked", _tap)
AttentionMaskInterface.register("tap_masked", _whole_mask)


def read(
    model: nn.Module,
    batch: Tensors,
    wants: frozenset[str],
    *,
    at_BL: Tensor | None = None,
) -> Signals:
    """Run `model` on `batch` and return the signals in `wants`, computing no others.

    Gradients flow unless the caller stops them. Labels, and inputs that the model does
    not take (a DistilBERT has no token types), are dropped. With `at_BL` (true at R
    positions) a language model's head runs only there: over 30,522 tokens it costs more
    than the layers below it. Raises ObjectiveError if the model's attention cannot be
    read.
    """
    # only the head determines the decoder's input: a T5 that classifies feeds it the
    # text
    two_stacks = getattr(model.config, "is_encoder_decoder", False)
    own_decoder = two_stacks and "decoder_input_ids" not in batch
    head = (
        model
        if wants & {"logits", "pair"} or own_decoder
        else getattr(model, "base_model", model)
    )
    accepted = inspect.signature(head.forward).parameters
    inputs: dict[str, Any] = {
        name: value
        for name, value in batch.items()
        if name in accepted and name != "labels"
    }
    reads_states = bool(wants & {"layers", "encoder_layers", "embeddings"})
    # they show how many layers the encoder has
    if reads_states or (two_stacks and wants & ATTENTION):
        inputs["output_hidden_states"] = True
    if wants & ATTENTION and model.training:
        _check_checkpointing(model)
    with _head_at(model, at_BL if "logits" in wants else None):
        if not wants & ATTENTION:
            out = head(**inputs)
            layers = []
        elif _is_disentangled(model):
            with _hooked(model) as layers:
                out = head(**inputs)
        else:
            layers = []
            out = head(**inputs, tap=layers)
    mask_BL = mark_tokens(batch)
    encoder = _first(out, "encoder_hidden_states") or ()
    if wants & ATTENTION:
        layers = _check_attention(
            model, layers[: len(encoder) - 1] if encoder else layers, mask_BL
        )
    logits = logits_of(out) if "logits" in wants else None
    hidden = (
        _first(out, "hidden_states", "decoder_hidden_states") if reads_states else None
    )
    pair = _first(out, "seq_relationship_logits", "sop_logits")
    return Signals(
        mask_BL,
        logits,
        hidden or (),
        tuple(layers),
        pair,
        encoder if reads_states else (),
        two_stacks=two_stacks and not own_decoder,
    )


def mark_tokens(batch: Tensors) -> Tensor:
    """Return the mask of a batch's real tokens, (B, L); without one all are real."""
    mask_BL = batch.get("attention_mask")
    return torch.ones_like(batch["input_ids"]) if mask_BL is None else mask_BL


def _check_attention(
    model: nn.Module,
    layers: list[LayerAttention],
    mask_BL: Tensor,
) -> list[LayerAttention]:
    """Return the attention of each layer, without masks that only hide padding.

    Raises ObjectiveError unless each layer has recorded exactly one attention over the
    tokens of the batch.
    """
    name = type(model).__name__
    if not layers:
        raise _unreadable(
            f"{name} has recorded no attention: call signals.open_attention(model) "
            "first; XLNet, XLM, the first GPT and some other families do not use "
            "transformers' attention interface"
        )
    tokens = mask_BL.shape[1]
    sizes = {
        size
        for layer in layers
        for size in (layer.query_BHLK.shape[2], layer.key_BHLK.shape[2])
    }
    in_order = all(
        layer.number in (None, number) for number, layer in enumerate(layers)
    )
    kinds = getattr(model.config, "layer_types", None) or ()
    mixed = len(layers) < len(kinds) and not set(kinds) <= {
        "full_attention",
        "sliding_attention",
        "chunked_attention",
    }
    if sizes != {tokens} or not in_order or mixed:
        raise _unreadable(
            f"{name} has layers with no or several attentions, or with attention to "
            f"other positions than the {tokens} tokens of the text"
        )
    real_B1L = mask_BL[:, None, :].bool()
    all_seen = {
        id(layer.seen_BLL): layer.seen_BLL
        for layer in layers
        if layer.seen_BLL is not None
    }
    padding = [
        key
        for key, seen_BLL in all_seen.items()
        if torch.equal(seen_BLL, real_B1L.expand_as(seen_BLL))
    ]
    return [
        replace(layer, seen_BLL=None) if id(layer.seen_BLL) in padding else layer
        for layer in layers
    ]


def _unreadable(why: str) -> ObjectiveError:
    return ObjectiveError(
        f"{why}: leave attention losses out for this family, and compare layers and "
        "logits"
    )


def logits_of(out: Any) -> Tensor:
    """Return a model's logits, under any name of transformers; starts and ends of spans
    as (B, L, 2), the vectors of a sentence encoder as (B, E)."""
    starts = getattr(out, "start_logits", None)
    if starts is not None:
        return torch.stack([starts, out.end_logits], -1)
    found = _first(out, "logits", "prediction_logits", "sentence_embedding")
    if found is None:
        raise ObjectiveError(
            f"{type(out).__name__} has no logits; set the `head` of the stage to one "
            "that its losses read"
        )
    return found


def _first(out: Any, *names: str) -> Any:
    return next(
        (value for name in names if (value := getattr(out, name, None)) is not None),
        None,
    )


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


_LM_HEADS = (
    "cls",
    "lm_head",
    "predictions",
    "generator_predictions",
    "vocab_transform",
    "lm_predictions",
)
"""Names of the first module above the encoder in transformers' masked and causal
language models."""


def has_lm_head(model: nn.Module) -> bool:
    """Return True if `read` can run the language model's head at chosen positions."""
    return _lm_head(model) is not None


def feed_decoder(model: Any, batch: TensorDict) -> TensorDict:
    """Add the decoder's input of a model that writes `labels` (B, M), if the batch has
    none: the labels, one place later, as transformers' models do."""
    if "labels" not in batch or "decoder_input_ids" in batch or not has_lm_head(model):
        return batch
    if not model.config.is_encoder_decoder:
        return batch
    shifted = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    return {**batch, "decoder_input_ids": shifted}


def check_next_tokens(model: Any, batch: Tensors) -> None:
    """Raise ObjectiveError if the labels of a causal language model are the tokens at
    the same places."""
    labels_BL = batch.get("labels")
    if labels_BL is None or not (has_lm_head(model) and model.can_generate()):
        return
    if not model.config.is_encoder_decoder and has_unseen_tokens(model):
        copied = (labels_BL == batch["input_ids"]).sum()
        if 0 < copied == (labels_BL != IGNORE_INDEX).sum():
            raise ObjectiveError(
                "labels are the tokens at the same places (as transformers' collators "
                "write them), so the student would learn to repeat its input: expected "
                "the next tokens; pass batches through compress.papers.gpt2.next_tokens"
            )


def _lm_head(model: nn.Module) -> Any:
    """Return the first module above the encoder in a language model; ModernBERT's
    classifiers have a `head` as well."""
    names = (*_LM_HEADS, "head") if hasattr(model, "decoder") else _LM_HEADS
    return next((getattr(model, name) for name in names if hasattr(model, name)), None)


@contextmanager
def _head_at(model: nn.Module, at_BL: Tensor | None) -> Iterator[None]:
    """Pass the head hidden states (R, D) of the chosen positions instead of (B, L,
    D)."""
    if at_BL is None:
        yield
        return
    chosen_BL = at_BL.bool()
    hook = _lm_head(model).register_forward_pre_hook(
        lambda _, args: (args[0][chosen_BL], *args[1:])
    )
    try:
        yield
    finally:
        hook.remove()


def open_attention(model: nn.Module) -> None:
    """Let `read` see this model's queries, keys and values."""
    chosen = "tap" if getattr(model, "_supports_sdpa", True) else "tap_masked"
    if not _is_disentangled(model) and model.config._attn_implementation != chosen:  # type: ignore[union-attr]
        model.set_attn_implementation(chosen)  # type: ignore[operator]


def _check_checkpointing(model: nn.Module) -> None:
    """Raise ObjectiveError for reentrant gradient checkpointing, which silently loses
    the gradients of attention."""
    for module in model.modules():
        # no getattr: it searches each module, in every step
        own = vars(module)
        if not own.get("gradient_checkpointing"):
            continue
        function = own.get("_gradient_checkpointing_func")
        if getattr(function, "keywords", {}).get("use_reentrant"):
            raise ObjectiveError(
                "reentrant gradient checkpointing loses the gradient of attention "
                "signals; use model.gradient_checkpointing_enable({'use_reentrant': "
                "False})"
            )


def has_unseen_tokens(model: nn.Module) -> bool:
    """Return True if in some layers tokens do not attend to all tokens, but to a window
    or only to earlier ones."""
    config: Any = model.config
    encoder: Any = model.get_encoder() if config.is_encoder_decoder else model  # type: ignore[operator]
    windows = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    return windows or any(
        getattr(module, "is_causal", False) for module in encoder.modules()
    )


def train_faster(model: nn.Module) -> None:
    """Replace torch's SDPA and dropout by the faster `_tap` and
    `compress.models.dropout`."""
    draw_faster(model)
    if getattr(model.config, "_attn_implementation", None) == "sdpa":
        model.set_attn_implementation("tap")  # type: ignore[operator]


# DeBERTa has disentangled attention: scores add position terms to q k^T, and the scale
# is sqrt((1 + terms) d).


def _is_disentangled(model: nn.Module) -> bool:
    return families.find(getattr(model.config, "model_type", "")).disentangled


@contextmanager
def _hooked(model: nn.Module) -> Iterator[list[LayerAttention]]:
    """Record the inputs of each DisentangledSelfAttention, and read them after the
    forward pass.

    Reading them during the pass would make it differ from its repetition under gradient
    checkpointing.
    """
    layers: list[LayerAttention] = []
    calls: list[tuple[Any, ...]] = []
    hooks = [
        module.register_forward_hook(
            lambda *call: calls.append(call[:3]), with_kwargs=True
        )
        for module in model.modules()
        if type(module).__name__ == "DisentangledSelfAttention"
    ]
    try:
        yield layers
        layers += [_disentangled_attention(*call) for call in calls]
    finally:
        for hook in hooks:
            hook.remove()


def _disentangled_attention(
    module: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> LayerAttention:
    """Recompute queries, keys and values with the layer's own projections, and scores
    with its position terms.

    Position terms are computed without dropout.
    """
    call = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    hidden_BLD = call["hidden_states"]
    relative = call.get("relative_pos")
    table = call.get("rel_embeddings")
    if hasattr(module, "query_proj"):  # v2, v3
        query_BLD = (
            hidden_BLD if call.get("query_states") is None else call["query_states"]
        )
        projected = (
            module.query_proj(query_BLD),
            module.key_proj(hidden_BLD),
            module.value_proj(hidden_BLD),
        )
        flat = [
            module.transpose_for_scores(x, module.num_attention_heads)
            for x in projected
        ]
        terms = 1 + sum(kind in module.pos_att_type for kind in ("c2p", "p2c"))
        split = [
            x.view(
                hidden_BLD.shape[0],
                module.num_attention_heads,
                x.shape[-2],
                x.shape[-1],
            )
            for x in flat
        ]
        query = flat[0]
        key = flat[1]
        bias = module.disentangled_attention_bias if module.relative_attention else None
    else:  # v1
        q, k, v = module.transpose_for_scores(module.in_proj(hidden_BLD)).chunk(
            3, dim=-1
        )
        q = q + module.transpose_for_scores(module.q_bias[None, None, :])
        v = v + module.transpose_for_scores(module.v_bias[None, None, :])
        terms = 1 + len(module.pos_att_type)
        split = [q, k, v]
        query = q / math.sqrt(q.shape[-1] * terms)
        key = k
        bias = (
            module.disentangled_att_bias
            if module.relative_attention and table is not None
            else None
        )
    scores_BHLL = split[0] @ split[1].mT / math.sqrt(split[0].shape[-1] * terms)
    if bias is not None:
        scores_BHLL = scores_BHLL + bias(query, key, relative, table, terms).view_as(
            scores_BHLL
        )
    return LayerAttention(split[0], split[1], split[2], scores_BHLL)
