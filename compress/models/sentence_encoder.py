"""Define sentence encoders: any encoder of transformers whose tokens are pooled into
one vector, optionally projected and normalised. They are loaded and saved in the layout
of sentence-transformers.

Shapes: B batch, L tokens, D hidden, E width of the vectors.
"""

import copy
import inspect
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.utils.generic import ModelOutput

from compress.errors import StudentError, TeacherError
from compress.models.folder import MODULES, identify_kind
from compress.models.padding import first_token
from compress.models.pooling import (
    Pool,
    Pooling,
    module_paths,
    pooling_of,
    set_pooling,
    width_of,
)


def pool_tokens(tokens_BLD: Tensor, seen_BL: Tensor, pool: Pool | None) -> Tensor:
    """Pool the visible tokens into one vector (B, D)."""
    if pool == "cls":
        return first_token(tokens_BLD, seen_BL)
    seen_BL1 = seen_BL[:, :, None]
    if pool == "max":
        return (
            tokens_BLD.masked_fill(~seen_BL1, torch.finfo(torch.float32).min)
            .max(1)
            .values
        )
    weights_BL1 = seen_BL1.to(tokens_BLD.dtype)
    return (tokens_BLD * weights_BL1).sum(1) / weights_BL1.sum(1).clamp(min=1e-9)


def _find_seen(mask: Any) -> Tensor:
    """Return which tokens (B, L) are visible, from a mask of 0 and 1, or from what is
    added to attention scores, where the last token sees the most."""
    full: Tensor = mask["full_attention"] if isinstance(mask, dict) else mask
    return full.bool() if full.dim() == 2 else full[:, 0, -1, :] == 0


@dataclass
class SentenceEmbeddingOutput(ModelOutput):
    """The output of a sentence encoder: last_hidden_state (B, L, D), sentence_embedding
    (B, E), and hidden states if requested."""

    last_hidden_state: Tensor | None = None
    sentence_embedding: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class SentenceEncoder(PreTrainedModel):
    """An encoder with pooling, projection and normalisation; see
    `AutoModelForSentenceEmbedding`."""

    encoder_class: type[PreTrainedModel]

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        plain = inspect.signature(self.encoder_class.__init__).parameters
        options = {"add_pooling_layer": False} if "add_pooling_layer" in plain else {}
        encoder = self.encoder_class(config, **options)
        setattr(self, self.base_model_prefix, encoder)
        pooling = pooling_of(config)
        self.projection = (
            nn.Linear(config.hidden_size, width_of(config), pooling.biased)
            if pooling.projected
            else None
        )
        self.takes_segments = (
            "token_type_ids" in inspect.signature(encoder.forward).parameters
        )
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> SentenceEmbeddingOutput:
        """`attention_mask`: (B, L) of 0 and 1, or what is added to the scores (B, 1, 1
        or L, L)."""
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "inputs_embeds": inputs_embeds,
        }
        if self.takes_segments:
            inputs["token_type_ids"] = token_type_ids
        out = self.base_model(
            **{name: value for name, value in inputs.items() if value is not None},
            **kwargs,
        )
        tokens_BLD = out.last_hidden_state
        seen_BL = (
            torch.ones_like(tokens_BLD[..., 0]).bool()
            if attention_mask is None
            else _find_seen(attention_mask)
        )
        pooling = pooling_of(self.config)
        vectors_BE = pool_tokens(tokens_BLD, seen_BL, pooling.pool)
        if self.projection is not None:
            vectors_BE = self.projection(vectors_BE)
            vectors_BE = (
                vectors_BE.tanh() if pooling.activation == "tanh" else vectors_BE
            )
        if pooling.normalise:
            vectors_BE = functional.normalize(vectors_BE.float(), dim=1)
        return SentenceEmbeddingOutput(
            tokens_BLD, vectors_BE, getattr(out, "hidden_states", None)
        )

    def load_modules(self, folder: Path) -> None:
        """Load the weights of the modules after the encoder. Raises TeacherError for
        those that do not fit."""
        if self.projection is not None and identify_kind(folder) == "sentence_encoder":
            _load_projection(
                self.projection,
                folder / module_paths(folder)["Dense"] / "model.safetensors",
            )

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save in the layout of sentence-transformers: the encoder in the folder, its
        modules in subfolders."""
        folder = Path(save_directory)
        cast("PreTrainedModel", self.base_model).save_pretrained(
            folder, *args, **kwargs
        )
        pooling_of(self.config).write(folder, self.config.hidden_size)
        if self.projection is not None:
            weights = self.projection.state_dict(prefix="linear.")
            save_file(
                weights,
                folder / "2_Dense" / "model.safetensors",
                metadata={"format": "pt"},
            )


@cache
def _encoder_class(
    config_class: type[PreTrainedConfig],
) -> type[SentenceEncoder] | None:
    """Create the sentence encoder class of a family; None if the family has no
    encoder."""
    found = AutoModel._model_mapping.get(config_class, None)
    encoder = found[0] if isinstance(found, tuple) else found
    if encoder is None:
        return None
    families = [each for each in encoder.__mro__ if issubclass(each, PreTrainedModel)]
    name = f"{encoder.__name__.removesuffix('Model')}ForSentenceEmbedding"
    content = {"encoder_class": encoder, "__module__": __name__}
    # the last is PreTrainedModel
    return type(name, (SentenceEncoder, families[-2]), content)


def with_pooling(encoder: PreTrainedModel, pooling: Pooling) -> SentenceEncoder:
    """Wrap an encoder, which is not copied, in a sentence encoder without a linear
    map."""
    config = copy.deepcopy(encoder.config)
    set_pooling(config, replace(pooling, width=None, projected=False))
    with torch.device("meta"):
        model = AutoModelForSentenceEmbedding.from_config(config)
    setattr(model, model.base_model_prefix, encoder)
    return model.train(encoder.training)


def project(model: SentenceEncoder) -> None:
    """Append a linear map that changes nothing, so that vectors keep their width
    however the encoder is cut."""
    if model.projection is None:
        set_projection(
            model,
            torch.eye(width_of(model.config)),
            normalise=pooling_of(model.config).normalise,
        )


def set_projection(model: SentenceEncoder, map_ED: Tensor, *, normalise: bool) -> None:
    """Set the linear map that follows the pooling."""
    pooling = replace(
        pooling_of(model.config),
        width=len(map_ED),
        projected=True,
        biased=False,
        activation="identity",
    )
    set_pooling(model.config, replace(pooling, normalise=normalise))
    model.projection = nn.Linear(map_ED.shape[1], len(map_ED), bias=False).to(
        model.device
    )
    with torch.no_grad():
        model.projection.weight.copy_(map_ED)


class _Classes:
    """Map config classes to sentence encoders, as the mappings of transformers' Auto
    classes do."""

    def get(self, config_class: Any, default: Any = None) -> Any:
        return _encoder_class(config_class) or default


_CLASSES = _Classes()


class AutoModelForSentenceEmbedding:
    """Create a sentence encoder of any family, as the Auto classes of transformers do;
    `models.loader` loads one."""

    _model_mapping = _CLASSES

    @staticmethod
    def from_config(config: PreTrainedConfig) -> SentenceEncoder:
        """Create a sentence encoder with random weights. Raises StudentError unless the
        family is an encoder."""
        encoder_class = (
            None if config.is_encoder_decoder else _CLASSES.get(type(config))
        )
        if encoder_class is None:
            raise StudentError(
                f"{config.model_type} models cannot embed texts: expected an encoder"
            )
        return encoder_class(config)

    @staticmethod
    def configure(folder: Path, config: PreTrainedConfig) -> PreTrainedConfig:
        """Return the config of a sentence encoder whose modules are in `folder`, or of
        a plain encoder.

        Raises TeacherError for modules that cannot be read, and unless the family is an
        encoder.
        """
        config = copy.deepcopy(config)
        is_saved = identify_kind(folder) == "sentence_encoder"
        set_pooling(config, Pooling.read(folder) if is_saved else pooling_of(config))
        if config.is_encoder_decoder or _CLASSES.get(type(config)) is None:
            raise TeacherError(
                f"{folder}: {config.model_type} models cannot embed texts: expected an "
                "encoder"
            )
        if pooling_of(config).pool is None:
            raise TeacherError(
                f"{folder / MODULES}: has no pooling: expected a Pooling module"
            )
        return config


def _load_projection(projection: nn.Linear, path: Path) -> None:
    if not path.is_file():
        raise TeacherError(
            f"{path}: no such file; expected the weights of the linear map in "
            "safetensors"
        )
    weights = {
        name.removeprefix("linear."): each for name, each in load_file(path).items()
    }
    expected = {name: each.shape for name, each in projection.state_dict().items()}
    if {name: each.shape for name, each in weights.items()} != expected:
        raise TeacherError(
            f"{path}: its tensors do not have the shapes in its config.json: download "
            "both again"
        )
    projection.load_state_dict(weights)
