"""Describe the modules of a sentence-transformers model that follow its encoder.
Imports no torch.

A module reads one feature of a text and writes one: `token_embeddings` (a vector per
token), `sentence_embedding` (the vector of the text), or a feature that the folder
names itself. The keys of the configs are those of sentence-transformers 6.2; a key that
is not listed here is refused by name, since the vectors may depend on it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Final, Self

from compress.errors import TeacherError, did_you_mean
from compress.models.json_keys import JsonKeys

TOKEN_FEATURE: Final = "token_embeddings"
VECTOR: Final = "sentence_embedding"
"""The features that modules read and write unless their config says otherwise."""

_RESERVED: Final = frozenset(
    {
        "all_layer_embeddings",
        "attention_mask",
        "cls_token_embeddings",
        "input_ids",
        "modality",
        "prompt_length",
        "token_type_ids",
        "token_weights_sum",
    }
)
"""Features that sentence-transformers computes itself or reserves; no module may write
them."""

ELEMENTWISE_ACTIVATIONS: Final = frozenset(
    {
        "CELU",
        "ELU",
        "GELU",
        "Hardshrink",
        "Hardsigmoid",
        "Hardswish",
        "Hardtanh",
        "Identity",
        "LeakyReLU",
        "LogSigmoid",
        "Mish",
        "ReLU",
        "ReLU6",
        "SELU",
        "SiLU",
        "Sigmoid",
        "Softplus",
        "Softshrink",
        "Softsign",
        "Tanh",
        "Tanhshrink",
    }
)
"""The activations of torch.nn that need no argument, have no weights, and change each
number by itself."""

_POOLING_FLAGS: Final[Mapping[str, str]] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}

MODES: Final = tuple(_POOLING_FLAGS.values())
"""The ways to pool tokens, in the order in which their older flags are joined."""


@dataclass(frozen=True)
class SentenceModule:
    """Describe a module after the encoder: the base of `Pooling`, `Dense`, `Normalize`,
    `LayerNorm` and `Dropout`.

    kind   its class in sentence-transformers
    """

    kind: ClassVar[str]

    @classmethod
    def from_config(cls, config: JsonKeys) -> Self:
        """Read the module's config.json. Raises TeacherError for an unknown key or
        value."""
        raise NotImplementedError

    def to_config(self) -> dict[str, Any]:
        """Return the config.json that every version of sentence-transformers reads;
        empty if it needs none."""
        raise NotImplementedError

    @property
    def reads(self) -> str:
        """Return the feature that the module reads."""
        return VECTOR

    @property
    def writes(self) -> str:
        """Return the feature that the module writes."""
        return self.reads

    def width(self, width: int) -> int:
        """Return the width of the feature that is written, given the width of the one
        that is read.

        Raises ValueError for another width than the module was made for.
        """
        return width

    def resized(self, width: int) -> Self:
        """Return a module of this kind that reads `width` and, if possible, writes the
        same width as now."""
        del width
        return self


@dataclass(frozen=True)
class Pooling(SentenceModule):
    """Pool the tokens of a text into one vector: the vectors of all `modes`, one after
    another.

    read_width       the width of a token's vector
    include_prompt   whether the tokens of a prompt are pooled too
    """

    kind = "Pooling"

    modes: tuple[str, ...]
    read_width: int
    include_prompt: bool = True

    @classmethod
    def from_config(cls, config: JsonKeys) -> Self:
        width_name = (
            "embedding_dimension"
            if "embedding_dimension" in config.left
            else "word_embedding_dimension"
        )
        width = config.take_width(width_name)
        flags = [
            mode
            for name, mode in _POOLING_FLAGS.items()
            if config.take(name, bool, False)
        ]
        named = config.take("pooling_mode", (str, list), flags or ["mean"])
        include_prompt = config.take("include_prompt", bool, True)
        config.finish()
        modes = (named,) if isinstance(named, str) else tuple(named)
        for mode in modes:
            if mode not in MODES:
                raise TeacherError(
                    f"{config.path}: pooling_mode "
                    f"{mode!r}.{did_you_mean(str(mode), MODES)}"
                )
        if not modes:
            raise TeacherError(
                f"{config.path}: pooling_mode is empty; expected one or more of "
                f"{', '.join(MODES)}"
            )
        return cls(modes, width, include_prompt)

    def to_config(self) -> dict[str, Any]:
        config: dict[str, Any] = {"word_embedding_dimension": self.read_width}
        if list(self.modes) == [mode for mode in MODES if mode in self.modes]:
            newer = ("weightedmean", "lasttoken")
            config |= {
                name: mode in self.modes
                for name, mode in _POOLING_FLAGS.items()
                if mode in self.modes or mode not in newer
            }
        else:  # the flags have an order of their own
            config["pooling_mode"] = list(self.modes)
        if not self.include_prompt:
            config["include_prompt"] = False
        return config

    @property
    def reads(self) -> str:
        return TOKEN_FEATURE

    @property
    def writes(self) -> str:
        return VECTOR

    def width(self, width: int) -> int:
        if width != self.read_width:
            raise ValueError(
                f"the embedding dimension is {self.read_width}, the tokens have {width}"
            )
        return width * len(self.modes)

    def resized(self, width: int) -> Self:
        return replace(self, read_width=width)


@dataclass(frozen=True)
class Dense(SentenceModule):
    """Apply a linear map and an activation of torch.nn; with `residual`, add the input,
    mapped if it is wider or narrower."""

    kind = "Dense"

    read_width: int
    written_width: int
    bias: bool = True
    activation: str = "Tanh"
    residual: bool = False
    source: str = VECTOR
    target: str = VECTOR

    @classmethod
    def from_config(cls, config: JsonKeys) -> Self:
        read_width = config.take_width("in_features")
        written_width = config.take_width("out_features")
        bias = config.take("bias", bool, True)
        activation = _read_activation(config)
        residual = config.take("use_residual", bool, False)
        source, target = _read_features(config)
        config.finish()
        return cls(
            read_width, written_width, bias, activation, residual, source, target
        )

    def to_config(self) -> dict[str, Any]:
        home = "linear" if self.activation == "Identity" else "activation"
        config = {
            "in_features": self.read_width,
            "out_features": self.written_width,
            "bias": self.bias,
            "activation_function": f"torch.nn.modules.{home}.{self.activation}",
        }
        if self.residual:
            config["use_residual"] = True
        return config | _write_features(self.source, self.target)

    @property
    def reads(self) -> str:
        return self.source

    @property
    def writes(self) -> str:
        return self.target

    def width(self, width: int) -> int:
        if width != self.read_width:
            raise ValueError(
                f"in_features is {self.read_width}, {self.source} has {width}"
            )
        return self.written_width

    def resized(self, width: int) -> Self:
        return replace(self, read_width=width)

    @property
    def is_plain(self) -> bool:
        """Check whether only this map reads its input, so that narrowing the input
        changes nothing else."""
        return not self.residual and self.source == self.target


@dataclass(frozen=True)
class Normalize(SentenceModule):
    """Divide a vector, or the vector of each token, by its length."""

    kind = "Normalize"

    source: str = VECTOR
    target: str = VECTOR

    @classmethod
    def from_config(cls, config: JsonKeys) -> Self:
        source, target = _read_features(config)
        config.finish()
        return cls(source, target)

    def to_config(self) -> dict[str, Any]:
        return _write_features(self.source, self.target)

    @property
    def reads(self) -> str:
        return self.source

    @property
    def writes(self) -> str:
        return self.target


@dataclass(frozen=True)
class LayerNorm(SentenceModule):
    """Normalise the numbers of a vector, as torch.nn.LayerNorm does."""

    kind = "LayerNorm"

    read_width: int

    @classmethod
    def from_config(cls, config: JsonKeys) -> Self:
        width = config.take_width("dimension")
        config.finish()
        return cls(width)

    def to_config(self) -> dict[str, Any]:
        return {"dimension": self.read_width}

    def width(self, width: int) -> int:
        if width != self.read_width:
            raise ValueError(f"dimension is {self.read_width}, {VECTOR} has {width}")
        return width

    def resized(self, width: int) -> Self:
        return replace(self, read_width=width)


@dataclass(frozen=True)
class Dropout(SentenceModule):
    """Drop numbers of a vector with this probability in training, and none in eval
    mode."""

    kind = "Dropout"

    probability: float = 0.2

    @classmethod
    def from_config(cls, config: JsonKeys) -> Self:
        probability = config.take("dropout", (int, float), 0.2)
        config.finish()
        if not 0 <= probability <= 1:
            raise TeacherError(
                f"{config.path}: 'dropout' is {probability}; expected a number from 0 "
                "to 1"
            )
        return cls(float(probability))

    def to_config(self) -> dict[str, Any]:
        return {"dropout": self.probability}


MODULE_CLASSES: Final[Mapping[str, type[SentenceModule]]] = {
    each.kind: each for each in (Pooling, Dense, Normalize, LayerNorm, Dropout)
}


def to_plain(module: SentenceModule) -> dict[str, Any]:
    """Return a module as JSON."""
    return {"kind": module.kind, **asdict(module)}


def from_plain(plain: Mapping[str, Any]) -> SentenceModule:
    """Return the module that `to_plain` wrote."""
    fields = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in plain.items()
    }
    kind = str(fields.pop("kind"))
    return MODULE_CLASSES[kind](**fields)


def _read_activation(config: JsonKeys) -> str:
    """Read the path of an activation; return the name of its class in torch.nn."""
    path = config.take("activation_function", str, "torch.nn.modules.activation.Tanh")
    home, _, name = path.rpartition(".")
    homes = (
        "torch.nn",
        "torch.nn.modules",
        f"torch.nn.modules.{'linear' if name == 'Identity' else 'activation'}",
    )
    if name in ELEMENTWISE_ACTIVATIONS and home in homes:
        return name
    raise TeacherError(
        f"{config.path}: activation_function {path!r} is not supported; expected a "
        "class of torch.nn without arguments or weights that changes each number by "
        f"itself, among {', '.join(sorted(ELEMENTWISE_ACTIVATIONS))}"
    )


def _read_features(config: JsonKeys) -> tuple[str, str]:
    """Read the names of the features that a module reads and writes."""
    source = config.take("module_input_name", str, VECTOR)
    target = config.take("module_output_name", str, None)
    for name in (source, target):
        if name in _RESERVED:
            raise TeacherError(
                f"{config.path}: a module reads or writes {name!r}, which "
                f"sentence-transformers computes itself; expected {TOKEN_FEATURE}, "
                f"{VECTOR}, or a name of your own"
            )
    return source, source if target is None else target


def _write_features(source: str, target: str) -> dict[str, Any]:
    """Write the names of the features, unless they are the defaults of every
    version."""
    if (source, target) == (VECTOR, VECTOR):
        return {}
    return {"module_input_name": source, "module_output_name": target}
