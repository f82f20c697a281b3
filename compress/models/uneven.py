"""Encoders whose layers differ: each has its own number of heads and of feed-forward neurons, none where one has 0.

What pruning leaves where it may take from each layer as it likes. Attention is heads x head_size wide, which may be
narrower than the stream; a block without heads, or without neurons, is its residual, its bias and its norm. Everything
else, the names of the weights included, is the family's own in transformers.

transformers alone does not know these model types: `import compress` is not enough either. Import
`compress.models.families` first, then the Auto classes load such a checkpoint. Its ONNX files need nothing of ours.

Shapes: B batch, L tokens, D stream, K head size.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    DistilBertConfig,
    ElectraConfig,
    PreTrainedConfig,
    PreTrainedModel,
    RobertaConfig,
    XLMRobertaConfig,
)

from compress.errors import PruneError
from compress.models.signals import Attention
from compress.slicing.cut import cut
from compress.slicing.plan import HIDDEN, Group, SlicePlan, parameters_of
from compress.slicing.select import Kept
from compress.slicing.shape import spelling
from compress.slicing.sizes import resized

_HEADED = MappingProxyType({"attention_head_size": "head_size"})  # by which compress.slicing.shape reads it


class UnevenBertConfig(BertConfig):
    """heads, ffn: of each layer; num_attention_heads and intermediate_size are the most that any has."""

    model_type = "uneven-bert"
    attribute_map = {**BertConfig.attribute_map, **_HEADED}  # noqa: RUF012  transformers' own form
    heads: list[int] | None = None
    ffn: list[int] | None = None
    head_size: int = 64


class UnevenRobertaConfig(RobertaConfig):
    """As UnevenBertConfig."""

    model_type = "uneven-roberta"
    attribute_map = {**RobertaConfig.attribute_map, **_HEADED}  # noqa: RUF012
    heads: list[int] | None = None
    ffn: list[int] | None = None
    head_size: int = 64


class UnevenXLMRobertaConfig(XLMRobertaConfig):
    """As UnevenBertConfig."""

    model_type = "uneven-xlm-roberta"
    attribute_map = {**XLMRobertaConfig.attribute_map, **_HEADED}  # noqa: RUF012
    heads: list[int] | None = None
    ffn: list[int] | None = None
    head_size: int = 64


class UnevenDistilBertConfig(DistilBertConfig):
    """As UnevenBertConfig; n_heads and hidden_dim are the most that any layer has."""

    model_type = "uneven-distilbert"
    attribute_map = {**DistilBertConfig.attribute_map, **_HEADED}  # noqa: RUF012
    heads: list[int] | None = None
    ffn: list[int] | None = None
    head_size: int = 64


class UnevenElectraConfig(ElectraConfig):
    """As UnevenBertConfig."""

    model_type = "uneven-electra"
    attribute_map = {**ElectraConfig.attribute_map, **_HEADED}  # noqa: RUF012
    heads: list[int] | None = None
    ffn: list[int] | None = None
    head_size: int = 64


class Bias(nn.Module):
    """A linear layer that has lost all its inputs: its bias, wherever it is asked."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, like_BLD: Tensor) -> Tensor:
        """(B, L, D) while training, so that each token has its own dropout; else (D,), which the residual spreads."""
        return self.bias.expand_as(like_BLD) if self.training else self.bias


class NoHeads(nn.Module):
    """Attention of no heads: what it reads goes on to the `Bias` behind it, which looks at its shape alone."""

    def __init__(self, head_size: int) -> None:
        super().__init__()
        self.head_size = head_size

    def forward(
        self,
        hidden_BLD: Tensor,
        attention_mask: Tensor | None = None,
        *,
        tap: list[Attention] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        if tap is not None:  # so that the n-th attention stays the n-th layer's
            tap.append(Attention(*[hidden_BLD.new_zeros(len(hidden_BLD), 0, hidden_BLD.shape[1], self.head_size)] * 3))
        return hidden_BLD, None


class NoDistilBertHeads(NoHeads):
    """The same with the bias inside, where DistilBERT has its output product."""

    def __init__(self, head_size: int, hidden: int) -> None:
        super().__init__(head_size)
        self.out_lin = Bias(hidden)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        hidden_BLD, nothing = super().forward(*args, **kwargs)
        return self.out_lin(hidden_BLD), nothing


class NoDistilBertNeurons(nn.Module):
    """A feed-forward block of no neurons, where DistilBERT has the whole block in one module."""

    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__()
        self.lin2, self.dropout = Bias(hidden), nn.Dropout(dropout)

    def forward(self, hidden_BLD: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.lin2(hidden_BLD))
        return out


@contextmanager
def _even(config: Any) -> Iterator[None]:
    """While open, the sizes are such that the stock constructors take them; what they build is replaced."""
    names = spelling(config, "heads"), spelling(config, "ffn")
    before = [getattr(config, name) for name in names]
    for name in names:
        setattr(config, name, 1)
    try:
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(config, name, value)


def _check(config: Any) -> None:
    layers = getattr(config, spelling(config, "layers"))
    for name in ("heads", "ffn"):
        sizes = getattr(config, name)
        if sizes is None or len(sizes) != layers or min(sizes, default=0) < 0:
            raise ValueError(
                f"{config.model_type}: {name} is {sizes}; expected a number, 0 or more, for each of the {layers} layers"
            )


def _resize(model: Any) -> None:
    config = model.config
    base = model.base_model
    stack = base.transformer.layer if hasattr(base, "transformer") else base.encoder.layer
    fit = _fit_distilbert if hasattr(base, "transformer") else _fit
    for layer, heads, ffn in zip(stack, config.heads, config.ffn, strict=True):
        fit(layer, config, heads, ffn)


def _fit(layer: Any, config: Any, heads: int, ffn: int) -> None:
    """Give a BERT's layer its sizes."""
    D, inner, attention = config.hidden_size, heads * config.head_size, layer.attention.self
    if heads:
        _sized(attention, ("query", "key", "value"), D, inner, config.head_size)
        attention.num_attention_heads, attention.all_head_size = heads, inner
        layer.attention.output.dense = nn.Linear(inner, D)
    else:
        layer.attention.self, layer.attention.output.dense = NoHeads(config.head_size), Bias(D)
    if ffn:
        layer.intermediate.dense, layer.output.dense = nn.Linear(D, ffn), nn.Linear(ffn, D)
    else:
        layer.intermediate, layer.output.dense = nn.Identity(), Bias(D)


def _fit_distilbert(layer: Any, config: Any, heads: int, ffn: int) -> None:
    D, inner = config.dim, heads * config.head_size
    if heads:
        _sized(layer.attention, ("q_lin", "k_lin", "v_lin"), D, inner, config.head_size)
        layer.attention.n_heads, layer.attention.out_lin = heads, nn.Linear(inner, D)
    else:
        layer.attention = NoDistilBertHeads(config.head_size, D)
    if ffn:
        layer.ffn.lin1, layer.ffn.lin2 = nn.Linear(D, ffn), nn.Linear(ffn, D)
    else:
        layer.ffn = NoDistilBertNeurons(D, config.dropout)


def _sized(attention: Any, names: tuple[str, ...], hidden: int, inner: int, head_size: int) -> None:
    for name in names:
        setattr(attention, name, nn.Linear(hidden, inner))
    attention.attention_head_size, attention.scaling = head_size, head_size**-0.5


def _uneven(stock: type[PreTrainedModel], config_class: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    """The subclass of one of transformers' classes whose layers have the sizes of its config."""

    def begin(self: Any, config: Any, *args: Any, **options: Any) -> None:
        _check(config)
        with _even(config):
            stock.__init__(self, config, *args, **options)
        _resize(self)
        self.post_init()

    name = f"Uneven{stock.__name__}"
    return type(
        name, (stock,), {"__init__": begin, "__module__": __name__, "__doc__": None, "config_class": config_class}
    )


CONFIGS: Final[Mapping[str, type[PreTrainedConfig]]] = MappingProxyType(
    {
        each.model_type.removeprefix("uneven-"): each
        for each in (
            UnevenBertConfig,
            UnevenRobertaConfig,
            UnevenXLMRobertaConfig,
            UnevenDistilBertConfig,
            UnevenElectraConfig,
        )
    }
)
"""The config of each family that has such a form, by the family's model type."""
_AUTO: Final = (
    AutoModel,
    AutoModelForPreTraining,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoModelForQuestionAnswering,
)


def _stock(auto: Any, config: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    """What an Auto class takes for the family's own config, of which `config` is the subclass."""
    found: type[PreTrainedModel] = auto._model_mapping[config.__mro__[1]]
    return found


def _classes() -> dict[type[PreTrainedModel], type[PreTrainedModel]]:
    made: dict[type[PreTrainedModel], type[PreTrainedModel]] = {}
    for config in CONFIGS.values():
        for auto in _AUTO:
            stock = _stock(auto, config)
            made.setdefault(stock, _uneven(stock, config))
    return made


CLASSES: Final[Mapping[type[PreTrainedModel], type[PreTrainedModel]]] = MappingProxyType(_classes())
"""transformers' class -> ours, for every head that the Auto classes above have."""
globals().update({each.__name__: each for each in CLASSES.values()})  # where pickle looks for them


def register() -> None:
    """Make transformers' Auto classes know these. Twice is once."""
    for config in CONFIGS.values():
        AutoConfig.register(config.model_type, config, exist_ok=True)
        for auto in _AUTO:
            auto.register(config, CLASSES[_stock(auto, config)], exist_ok=True)


def kept_layerwise(
    plan: SlicePlan, *, heads: Sequence[Tensor], ffn: Sequence[Tensor], hidden: Tensor | None = None
) -> Kept:
    """Keep these heads and neurons of each layer, by their places in the source; hidden dimensions of all, or these."""
    K = plan.sizes.head_size
    indices: dict[Group, Tensor] = {}
    for layer, (heads_H, ffn_F) in enumerate(zip(heads, ffn, strict=True)):
        rows_R = (heads_H[:, None] * K + torch.arange(K)).flatten()
        indices[Group("heads", str(layer))], indices[Group("ffn", str(layer))] = heads_H, ffn_F
        indices[Group("query", str(layer))] = indices[Group("value", str(layer))] = rows_R
    if hidden is not None:
        indices[HIDDEN] = hidden
    most = {"heads": max(map(len, heads)), "ffn": max(map(len, ffn))}
    wide = plan.sizes.hidden if hidden is None else len(hidden)
    sizes = replace(plan.sizes, hidden=wide, heads=max(1, most["heads"]), ffn=max(1, most["ffn"]))
    return Kept(sizes, tuple(range(plan.sizes.layers)), indices)


def to_uneven(model: PreTrainedModel, kept: Kept) -> PreTrainedModel:
    """A model of `models.uneven` with the kept units, its own weights, in the mode `model` is in.

    It answers as `model` does under `slicing.masked(model, kept)`. Raises PruneError for a family that has no such
    form, and where the values of a layer keep other heads than its queries.
    """
    stock = type(model)
    if stock not in CLASSES:
        raise PruneError(
            f"{stock.__name__}: layers cannot differ in size; they can in transformers' {', '.join(CONFIGS)} with the "
            "usual heads"
        )
    plan = SlicePlan.of(model)
    config = _config(model.config, plan, kept)
    with init_empty_weights(include_buffers=False):
        small: Any = CLASSES[stock](config)
    weights = cut(plan, parameters_of(model), kept)
    for name in parameters_of(small):
        module, _, part = name.rpartition(".")
        own = weights[name].detach().clone(memory_format=torch.contiguous_format)
        setattr(small.get_submodule(module), part, nn.Parameter(own))
    small.tie_weights()
    made: PreTrainedModel = small.train(model.training)
    return made


def _config(source: Any, plan: SlicePlan, kept: Kept) -> Any:
    even = resized(source, kept.sizes)
    known = {key: value for key, value in even.to_dict().items() if key not in ("model_type", "architectures")}
    heads = [_width(plan, kept, "value", layer) // kept.sizes.head_size for layer in kept.layers]
    if heads != [_width(plan, kept, "query", layer) // kept.sizes.head_size for layer in kept.layers]:
        raise PruneError(f"the values of a layer keep other numbers of heads ({heads}) than its queries")
    ffn = [_width(plan, kept, "ffn", layer) for layer in kept.layers]
    chosen: Any = CONFIGS[plan.family]
    return chosen(**known, heads=heads, ffn=ffn, head_size=kept.sizes.head_size)


def _width(plan: SlicePlan, kept: Kept, axis: str, layer: int) -> int:
    group = Group(axis, str(layer))
    return len(kept.indices[group]) if group in kept.indices else plan.groups[group]
