"""Sentence encoders: any encoder of transformers whose tokens are pooled into one vector, perhaps projected, perhaps of
length 1. They are read and written as sentence-transformers lays them out.

Shapes: B batch, L tokens, D hidden, E width of the vectors.
"""

import copy
import inspect
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.utils.generic import ModelOutput

from compress.errors import StudentError, TeacherError
from compress.models.pooling import MODULES, Pool, Pooling, module_paths, pooling_of, set_pooling, width_of


def pool_tokens(tokens_BLD: Tensor, seen_BL: Tensor, pool: Pool | None) -> Tensor:
    """Pool the tokens that are seen into one vector (B, D)."""
    if pool == "cls":
        return tokens_BLD[:, 0]
    seen_BL1 = seen_BL[:, :, None]
    if pool == "max":
        return tokens_BLD.masked_fill(~seen_BL1, torch.finfo(torch.float32).min).max(1).values
    weights_BL1 = seen_BL1.to(tokens_BLD.dtype)
    return (tokens_BLD * weights_BL1).sum(1) / weights_BL1.sum(1).clamp(min=1e-9)


def _find_seen(mask: Any) -> Tensor:
    """Tell which tokens (B, L) there are: of a mask of 0 and 1, or of what is added to attention scores, where the last
    token sees as many as any."""
    full: Tensor = mask["full_attention"] if isinstance(mask, dict) else mask
    return full.bool() if full.dim() == 2 else full[:, 0, -1, :] == 0


@dataclass
class SentenceEmbeddingOutput(ModelOutput):
    """Hold what a sentence encoder returns.

    last_hidden_state (B, L, D), sentence_embedding (B, E), and the hidden states where they were asked for
    """

    last_hidden_state: Tensor | None = None
    sentence_embedding: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class SentenceEncoder(PreTrainedModel):
    """An encoder with pooling, projection and normalisation on it: `AutoModelForSentenceEmbedding` gives a family's."""

    encoder_class: type[PreTrainedModel]

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        plain = inspect.signature(self.encoder_class.__init__).parameters
        options = {"add_pooling_layer": False} if "add_pooling_layer" in plain else {}
        encoder = self.encoder_class(config, **options)
        setattr(self, self.base_model_prefix, encoder)
        pooling = pooling_of(config)
        self._keys_to_ignore_on_load_missing = ["projection."]  # it is in a file of its own
        self.projection = nn.Linear(config.hidden_size, width_of(config), pooling.biased) if pooling.projected else None
        self.takes_segments = "token_type_ids" in inspect.signature(encoder.forward).parameters
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> SentenceEmbeddingOutput:
        """`attention_mask`: (B, L) of 0 and 1, or what is added to the scores (B, 1, 1 or L, L)."""
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        if self.takes_segments:
            given["token_type_ids"] = token_type_ids
        found = self.base_model(**{name: each for name, each in given.items() if each is not None}, **kwargs)
        tokens_BLD = found.last_hidden_state
        seen_BL = torch.ones_like(tokens_BLD[..., 0]).bool() if attention_mask is None else _find_seen(attention_mask)
        pooling = pooling_of(self.config)
        vectors_BE = pool_tokens(tokens_BLD, seen_BL, pooling.pool)
        if self.projection is not None:
            vectors_BE = self.projection(vectors_BE)
            vectors_BE = vectors_BE.tanh() if pooling.activation == "tanh" else vectors_BE
        if pooling.normalise:
            vectors_BE = functional.normalize(vectors_BE.float(), dim=1)
        return SentenceEmbeddingOutput(tokens_BLD, vectors_BE, getattr(found, "hidden_states", None))

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save it as sentence-transformers lays it out: the encoder in the folder, its modules below."""
        folder, encoder = Path(save_directory), cast("PreTrainedModel", self.base_model)
        encoder.save_pretrained(folder, *args, **kwargs)
        pooling = pooling_of(self.config)
        pooling.write(folder, self.config.hidden_size)
        if self.projection is not None:
            weights = self.projection.state_dict(prefix="linear.")
            save_file(weights, folder / "2_Dense" / "model.safetensors", metadata={"format": "pt"})


def _find_class(config_class: type[PreTrainedConfig]) -> type[SentenceEncoder] | None:
    """Return the sentence encoder of a family, made when first asked for; None where it has no encoder."""
    if config_class not in _MADE:
        found = AutoModel._model_mapping.get(config_class, None)
        encoder = found[0] if isinstance(found, tuple) else found
        if encoder is None:
            return None
        families = [each for each in encoder.__mro__ if issubclass(each, PreTrainedModel)]
        name = f"{encoder.__name__.removesuffix('Model')}ForSentenceEmbedding"
        content = {"encoder_class": encoder, "__module__": __name__}
        _MADE[config_class] = type(name, (SentenceEncoder, families[-2]), content)  # the last is PreTrainedModel
    return _MADE[config_class]


_MADE: dict[Any, type[SentenceEncoder]] = {}


def with_pooling(encoder: PreTrainedModel, pooling: Pooling) -> SentenceEncoder:
    """Return a sentence encoder of this encoder, which is shared, without a linear map."""
    config = copy.deepcopy(encoder.config)
    set_pooling(config, replace(pooling, width=None, projected=False))
    with torch.device("meta"):
        model = AutoModelForSentenceEmbedding.from_config(config)
    setattr(model, model.base_model_prefix, encoder)
    return model.train(encoder.training)


def project(model: SentenceEncoder) -> None:
    """Put a linear map that changes nothing behind the pooling: vectors then stay as wide as they are, whatever is cut
    of the encoder."""
    if model.projection is None:
        set_projection(model, torch.eye(width_of(model.config)), normalise=pooling_of(model.config).normalise)


def set_projection(model: SentenceEncoder, map_ED: Tensor, *, normalise: bool) -> None:
    """Put this linear map behind the pooling, in the place of any that is there."""
    pooling = replace(pooling_of(model.config), width=len(map_ED), projected=True, biased=False, activation="identity")
    set_pooling(model.config, replace(pooling, normalise=normalise))
    model.projection = nn.Linear(map_ED.shape[1], len(map_ED), bias=False).to(model.device)
    with torch.no_grad():
        model.projection.weight.copy_(map_ED)


class _Classes:
    """Map config classes to sentence encoders, as the mappings of transformers' Auto classes do."""

    def get(self, config_class: type[PreTrainedConfig], default: Any = None) -> Any:
        return _find_class(config_class) or default


class AutoModelForSentenceEmbedding:
    """Open or create a sentence encoder of any family, as transformers' Auto classes do their models."""

    _model_mapping = _Classes()

    @staticmethod
    def from_config(config: PreTrainedConfig) -> SentenceEncoder:
        """Create a sentence encoder with random weights. Raises StudentError for a family that is no encoder."""
        made = None if config.is_encoder_decoder else _find_class(type(config))
        if made is None:
            raise StudentError(f"{config.model_type} models give no vector for a text: expected an encoder")
        return made(config)

    @staticmethod
    def from_pretrained(
        folder: str | Path, *, config: Any = None, output_loading_info: bool = False, **options: Any
    ) -> Any:
        """Open a folder of sentence-transformers, or a plain encoder's. `options` are those of transformers.

        Raises TeacherError for modules that cannot be read, or are not of the encoder.
        """
        folder = Path(folder)
        config = copy.deepcopy(config) if config is not None else AutoConfig.from_pretrained(folder)
        set_pooling(config, Pooling.read(folder) if (folder / MODULES).is_file() else pooling_of(config))
        made = None if config.is_encoder_decoder else _find_class(type(config))
        if made is None:
            raise TeacherError(f"{folder}: {config.model_type} models give no vector for a text: expected an encoder")
        if pooling_of(config).pool is None:
            raise TeacherError(f"{folder / MODULES}: has no pooling: expected a module of it")
        opened: Any = made.from_pretrained(folder, config=config, output_loading_info=True, **options)
        model, found = opened
        if model.projection is not None and (folder / MODULES).is_file():
            _load_projection(model, folder / module_paths(folder)["Dense"] / "model.safetensors")
            found["missing_keys"] = type(found["missing_keys"])(
                key for key in found["missing_keys"] if not key.startswith("projection.")
            )
        return (model, found) if output_loading_info else model


def _load_projection(model: SentenceEncoder, path: Path) -> None:
    if not path.is_file():
        raise TeacherError(f"{path}: no such file; expected the weights of the linear map in safetensors")
    weights = {name.removeprefix("linear."): each for name, each in load_file(path).items()}
    expected = model.projection.state_dict() if model.projection is not None else {}
    if {name: each.shape for name, each in weights.items()} != {name: each.shape for name, each in expected.items()}:
        raise TeacherError(f"{path}: its tensors are not of the shapes that its config.json says: fetch both again")
    assert model.projection is not None
    model.projection.load_state_dict(weights)
