"""Read the sizes of a transformer from its config."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from compress import families
from compress.arguments import check_arguments
from compress.errors import StudentError
from compress.values import LikeCheck

_SIZE_NAMES = {
    "layers": ("num_hidden_layers", "n_layers", "n_layer", "num_layers"),
    "decoder_layers": ("num_decoder_layers", "decoder_layers"),
    "hidden": ("hidden_size", "dim", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_heads", "n_head", "num_heads"),
    "ffn": ("intermediate_size", "hidden_dim", "n_inner", "d_ff", "d_inner"),
    "embedding": ("embedding_size",),
    "head_size": ("attention_head_size", "head_dim", "d_kv"),
}

ConfigLike = Annotated[
    Any, LikeCheck("a config of transformers", ("model_type", "num_labels"))
]


@check_arguments
@dataclass(frozen=True)
class Shape:
    """The sizes of a transformer.

    layers N, hidden D, heads H, head_size K, ffn, embedding E (equal to D unless
    factorised), vocabulary V, classes. decoder_layers: the decoder's layers in an
    encoder-decoder, whose encoder has `layers`; None for other models.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    head_size: int
    ffn: int
    embedding: int
    vocabulary: int
    classes: int
    decoder_layers: int | None = None

    @check_arguments
    def stack(self, signal: str) -> int:
        """Count the layers of a signal; in an encoder-decoder the decoder's for
        `layers`, else the encoder's."""
        return (
            self.decoder_layers
            if signal == "layers" and self.decoder_layers is not None
            else self.layers
        )

    @staticmethod
    @check_arguments
    def from_config(
        config: ConfigLike,
    ) -> "Shape":
        """Read a transformers config, in which every family has its own names for these
        sizes."""
        hidden = _find(config, "hidden")
        sizes = {
            "layers": 0,
            "heads": 1,
            "head_size": hidden,
            "ffn": 0,
            "embedding": hidden,
        }
        if families.find(config.model_type).layered:
            heads = _find(config, "heads")
            sizes = {
                "layers": _find(config, "layers"),
                "heads": heads,
                "ffn": _find(config, "ffn", 4 * hidden),
                "head_size": _find(
                    config,
                    "head_size",
                    getattr(config, "true_hidden_size", hidden) // heads,
                ),
                "embedding": _find(config, "embedding", hidden),
            }
        return Shape(
            family=config.model_type,
            hidden=hidden,
            vocabulary=config.vocab_size,
            classes=config.num_labels,
            decoder_layers=_find(config, "decoder_layers")
            if config.is_encoder_decoder
            else None,
            **sizes,
        )


_POSITIONS = (
    "position_embeddings",
    "position_embedding",
    "char_position_embeddings",
    "embed_positions",
    "positions_embed",
    "wpe",
)
"""The last parts of the names of tables of positions."""


def positions(model: Any) -> int | None:
    """Return the number of tokens that a model has positions for, or None if positions
    are relative or computed."""
    setting = families.find(model.config.model_type).length_setting
    if setting:
        return int(getattr(model.config, setting))
    limits = list[int]()
    for name, module in model.named_modules():
        weight: Any = getattr(module, "weight", None)
        if (
            name.rpartition(".")[2] in _POSITIONS
            and "vision" not in name
            and getattr(weight, "ndim", 0) == 2
        ):
            limits.append(len(weight) - _first_position(model, module))
    return min(limits, default=None)


def token_rows(model: Any) -> int | None:
    """Return the number of token ids that a model has vectors for, or None for a model
    that hashes characters."""
    try:
        weight = getattr(model.get_input_embeddings(), "weight", None)
    except NotImplementedError:  # CANINE
        return None
    return None if weight is None else len(weight)


def _first_position(model: Any, table: Any) -> int:
    """Return the row of the first token's position in a table."""
    offset = getattr(table, "offset", None)
    if offset is not None:  # BART and OPT
        return int(offset)
    # RoBERTa and similar models count from after the padding index
    padding = getattr(table, "padding_idx", None)
    if padding is not None:
        return int(padding) + 1
    return families.find(model.config.model_type).first_position(model.config)


def find_setting(config: Any, size: str) -> str | None:
    """Return the config's name of a size, such as DistilBERT's `dim`, or None if it
    lacks the size."""
    # GPT-2 leaves `n_inner` empty where it is four times its width
    for name in _SIZE_NAMES[size]:
        if getattr(config, name, None) is not None or (
            name == "n_inner" and hasattr(config, name)
        ):
            return name
    return None


def setting_name(config: Any, size: str) -> str:
    """Return the config's name of a size. Raises KeyError if it lacks the size."""
    name = find_setting(config, size)
    if name is None:
        raise KeyError(size)
    return name


def set_size(config: Any, size: str, value: int | None) -> None:
    """Set a size under the config's name. Raises StudentError if it cannot be set, as
    Funnel's layers."""
    name = setting_name(config, size)
    try:
        setattr(config, name, value)
    except NotImplementedError as error:
        message = f"student.{size}: {config.model_type}: {error}"
        raise StudentError(message) from None


def _find(config: Any, size: str, default: int | None = None) -> int:
    name = find_setting(config, size)
    value = None if name is None else getattr(config, name)
    found = default if value is None else value
    if found is None:
        raise StudentError(
            f"{config.model_type}: its config states no {size} for the whole model, as "
            "of one that also reads images; expected one that reads texts alone"
        )
    return int(found)


def sizes_of(config: Mapping[str, Any]) -> dict[str, int]:
    """Read the sizes that a config.json states, by our names for them."""
    names = {
        **_SIZE_NAMES,
        "vocabulary": ("vocab_size",),
        "positions": ("max_position_embeddings", "n_positions"),
    }
    sizes = (
        (size, next((config[name] for name in own if config.get(name)), None))
        for size, own in names.items()
    )
    return {size: value for size, value in sizes if isinstance(value, int)}
