"""Define sentence encoders: any encoder of transformers, followed by modules that turn
a text's tokens into one vector.

They are loaded and saved as folders of sentence-transformers
(`models.sentence_folder`), and compute the same vectors.

Shapes: B batch, L tokens, D width of a token, E width of the vectors, W any width.
"""

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.utils.generic import ModelOutput

from compress.errors import StudentError, TeacherError
from compress.models.folder import (
    MODULES,
    SAFETENSORS,
    explain_load_errors,
    find_weights,
)
from compress.models.sentence_folder import SentenceFolder, write
from compress.models.sentence_modules import (
    TOKEN_FEATURE,
    VECTOR,
    Dense,
    Dropout,
    LayerNorm,
    Normalize,
    Pooling,
    SentenceModule,
)
from compress.models.sentence_settings import (
    SentenceSettings,
    find_projection,
    set_settings,
    settings_of,
    with_projection,
)
from compress.models.tensors import SavedTensors
from compress.slicing.shape import positions

Features = dict[str, Tensor]
"""The features of a batch of texts by the names in `sentence_modules`; also `visible`
(B, L), whether a token is part of the text, and optionally `prompt_length` (B,) or
(1,), the number of tokens of the prompt at the beginning."""


def pool_tokens(
    tokens_BLD: Tensor,
    visible_BL: Tensor,
    modes: tuple[str, ...],
    prompt_length: Tensor | None = None,
) -> Tensor:
    """Pool the visible tokens into vectors, one for each mode of
    `sentence_modules.MODES`, joined: (B, modes x D).

    visible_BL      whether a token is part of the text; padding may stand on either
                    side
    prompt_length   the number of tokens at the beginning that are left out, of each
                    text (B,) or of all texts (1,)
    """
    place_L = torch.arange(tokens_BLD.shape[1], device=tokens_BLD.device)
    begin_B1 = visible_BL.int().argmax(1, keepdim=True)
    pooled_BL = visible_BL
    if prompt_length is not None:
        pooled_BL = visible_BL & (place_L >= begin_B1 + prompt_length[:, None])
    share_BL = pooled_BL.float()
    wide_BLD = tokens_BLD.float()
    vectors: list[Tensor] = []
    for mode in modes:
        if mode == "max":
            vectors.append(
                wide_BLD.masked_fill(~pooled_BL[:, :, None], float("-inf")).amax(1)
            )
            continue
        if mode == "cls":
            weight_BL = (place_L == pooled_BL.int().argmax(1, keepdim=True)).float()
        elif mode == "lasttoken":
            last_B1 = (share_BL * (place_L + 1)).argmax(1, keepdim=True)
            weight_BL = share_BL * (place_L == last_B1)
        elif mode == "weightedmean":
            weight_BL = share_BL * (place_L - begin_B1 + 1)
        else:
            weight_BL = share_BL
        sum_BD = (wide_BLD * weight_BL[:, :, None]).sum(1)
        if mode in ("cls", "lasttoken"):
            vectors.append(sum_BD)
            continue
        total_B1 = weight_BL.sum(1, keepdim=True).clamp(min=1e-9)
        vectors.append(
            sum_BD / (total_B1.sqrt() if mode == "mean_sqrt_len_tokens" else total_B1)
        )
    return torch.cat(vectors, 1) if len(vectors) > 1 else vectors[0]


def _find_visible(mask: Any) -> Tensor:
    """Return which tokens (B, L) are visible, from a mask of 0 and 1 or from an
    additive mask of attention scores, whose last row shows the most tokens."""
    full: Tensor = mask["full_attention"] if isinstance(mask, dict) else mask
    return full.bool() if full.dim() == 2 else full[:, 0, -1, :] == 0


class PoolingLayer(nn.Module):
    """Compute a `Pooling`."""

    def __init__(self, settings: Pooling) -> None:
        super().__init__()
        self.modes = settings.modes
        self.include_prompt = settings.include_prompt

    def forward(self, features: Features) -> Features:
        prompt_length = None if self.include_prompt else features.get("prompt_length")
        return {
            **features,
            VECTOR: pool_tokens(
                features[TOKEN_FEATURE], features["visible"], self.modes, prompt_length
            ),
        }


class DenseLayer(nn.Module):
    """Compute a `Dense`."""

    def __init__(self, settings: Dense) -> None:
        super().__init__()
        self.source = settings.source
        self.target = settings.target
        self.linear = nn.Linear(
            settings.read_width, settings.written_width, settings.bias
        )
        self.activation: nn.Module = getattr(nn, settings.activation)()
        self.has_residual = settings.residual
        self.residual = None
        if settings.residual and settings.read_width != settings.written_width:
            self.residual = nn.Linear(
                settings.read_width, settings.written_width, bias=False
            )

    def forward(self, features: Features) -> Features:
        given = features[self.source]
        found: Tensor = self.activation(self.linear(given))
        if self.has_residual:
            found = found + (given if self.residual is None else self.residual(given))
        return {**features, self.target: found}


class NormalizeLayer(nn.Module):
    """Compute a `Normalize`."""

    def __init__(self, settings: Normalize) -> None:
        super().__init__()
        self.source = settings.source
        self.target = settings.target

    def forward(self, features: Features) -> Features:
        return {
            **features,
            self.target: functional.normalize(features[self.source].float(), dim=-1),
        }


class NormLayer(nn.Module):
    """Compute a `LayerNorm`."""

    def __init__(self, settings: LayerNorm) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(settings.read_width)

    def forward(self, features: Features) -> Features:
        return {**features, VECTOR: self.norm(features[VECTOR])}


class DropoutLayer(nn.Module):
    """Compute a `Dropout`."""

    def __init__(self, settings: Dropout) -> None:
        super().__init__()
        self.dropout = nn.Dropout(settings.probability)

    def forward(self, features: Features) -> Features:
        return {**features, VECTOR: self.dropout(features[VECTOR])}


MODULE_LAYERS: Final[Mapping[type[SentenceModule], Callable[[Any], nn.Module]]] = {
    Pooling: PoolingLayer,
    Dense: DenseLayer,
    Normalize: NormalizeLayer,
    LayerNorm: NormLayer,
    Dropout: DropoutLayer,
}
"""The layers that compute the modules."""


def make_layer(settings: SentenceModule) -> nn.Module:
    """Make the layer, with random weights, that computes a module."""
    return MODULE_LAYERS[type(settings)](settings)


def name_layers(modules: tuple[SentenceModule, ...]) -> list[str]:
    """Name the layers of modules by their kind and their number from the end, which
    stays the same when a map is inserted; the map of `find_projection` gets the name
    that `families.family` knows."""
    names = [
        f"{len(modules) - number}_{module.kind.lower()}"
        for number, module in enumerate(modules)
    ]
    projection = find_projection(modules)
    if projection is not None:
        pooled = [
            module for module in modules[:projection] if isinstance(module, Pooling)
        ]
        times = len(pooled[-1].modes) if pooled else 1
        names[projection] = f"{len(modules) - projection}_projection" + (
            f"_of_{times}" if times > 1 else ""
        )
    return names


@dataclass
class SentenceEmbeddingOutput(ModelOutput):
    """The output of a sentence encoder: last_hidden_state (B, L, D), sentence_embedding
    (B, E), and hidden states if requested."""

    last_hidden_state: Tensor | None = None
    sentence_embedding: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class SentenceEncoder(PreTrainedModel):
    """An encoder with the modules of its config's `SentenceSettings`; see
    `AutoModelForSentenceEmbedding`."""

    encoder_class: type[PreTrainedModel]

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        plain = inspect.signature(self.encoder_class.__init__).parameters
        options = {"add_pooling_layer": False} if "add_pooling_layer" in plain else {}
        encoder = self.encoder_class(config, **options)
        setattr(self, self.base_model_prefix, encoder)
        # which have their own files
        self._keys_to_ignore_on_load_missing = ["sentence_modules."]
        self.sentence_modules = nn.ModuleDict()
        self.install([make_layer(module) for module in self.settings.modules])
        self.takes_segments = (
            "token_type_ids" in inspect.signature(encoder.forward).parameters
        )
        self.post_init()

    @property
    def settings(self) -> SentenceSettings:
        """Return the settings in the config."""
        return settings_of(self.config)

    @property
    def projection(self) -> nn.Linear | None:
        """Return the linear map through which the encoder's width reaches the vector:
        see `find_projection`."""
        number = find_projection(self.settings.modules)
        return (
            None
            if number is None
            else cast(nn.Linear, list(self.sentence_modules.values())[number].linear)
        )

    def install(self, layers: list[nn.Module]) -> None:
        """Set `layers` to the layers of the settings' modules."""
        names = name_layers(self.settings.modules)
        self.sentence_modules = nn.ModuleDict(dict(zip(names, layers, strict=True)))

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        prompt_length: Tensor | None = None,
        **kwargs: Any,
    ) -> SentenceEmbeddingOutput:
        """Encode texts.

        attention_mask   (B, L) of 0 and 1, or added to the scores (B, 1, 1 or L, L)
        prompt_length    (B,) or (1,): the tokens of the prompt, which a pooling may
                         leave out
        """
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
        everything = attention_mask is None
        visible_BL = (
            torch.ones_like(tokens_BLD[..., 0]).bool()
            if everything
            else _find_visible(attention_mask)
        )
        features = {TOKEN_FEATURE: tokens_BLD, "visible": visible_BL}
        if prompt_length is not None:
            features["prompt_length"] = prompt_length
        for layer in self.sentence_modules.values():
            features = layer(features)
        vectors_BE = features[VECTOR][:, : self.settings.truncate_dim]
        return SentenceEmbeddingOutput(
            tokens_BLD, vectors_BE, getattr(out, "hidden_states", None)
        )

    def load_modules(self, folder: Path, *, allow_pickle: bool = False) -> None:
        """Load the weights of the modules after the encoder, if the folder lists any.

        Raises TeacherError for weights that are missing or do not fit, and for pickled
        ones unless they are allowed.
        """
        source = SentenceFolder.read(folder)
        if not source.is_listed:
            return
        for number, layer in enumerate(self.sentence_modules.values()):
            if layer.state_dict():
                _load_weights(layer, source.weights(number), pickled=allow_pickle)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save in the layout of sentence-transformers: the encoder in the folder, its
        modules in subfolders."""
        folder = Path(save_directory)
        cast("PreTrainedModel", self.base_model).save_pretrained(
            folder, *args, **kwargs
        )
        places = write(self.settings, folder)
        for place, layer in zip(places, self.sentence_modules.values(), strict=True):
            if weights := layer.state_dict():
                contiguous = {
                    name: tensor.contiguous() for name, tensor in weights.items()
                }
                save_file(contiguous, place / SAFETENSORS, metadata={"format": "pt"})


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


def project(model: SentenceEncoder) -> None:
    """Insert a linear map that changes nothing, so that vectors keep their width
    however the encoder is cut."""
    settings, number = with_projection(model.settings, model.config.hidden_size)
    if number is None:
        return
    layers = list(model.sentence_modules.values())
    layer = make_layer(settings.modules[number]).to(model.device)
    with torch.no_grad():
        nn.init.eye_(cast(nn.Linear, layer.linear).weight)
    set_settings(model.config, settings)
    model.install([*layers[:number], layer, *layers[number:]])


def set_projection(model: SentenceEncoder, map_ED: Tensor, *, normalise: bool) -> None:
    """Append this linear map, and optionally a normalisation, to the pooling of a model
    that has no other modules."""
    (pooling,) = model.settings.modules
    dense = Dense(map_ED.shape[1], len(map_ED), bias=False, activation="Identity")
    modules: tuple[SentenceModule, ...] = (
        (pooling, dense, Normalize()) if normalise else (pooling, dense)
    )
    set_settings(model.config, replace(model.settings, modules=modules))
    model.install([make_layer(module).to(model.device) for module in modules])
    assert model.projection is not None
    with torch.no_grad():
        model.projection.weight.copy_(map_ED)


def keep_pooling(model: SentenceEncoder) -> None:
    """Remove all modules except the first pooling, and all prompts."""
    pooling = next(
        module for module in model.settings.modules if isinstance(module, Pooling)
    )
    pooled = Pooling(pooling.modes, model.config.hidden_size)
    set_settings(model.config, SentenceSettings((pooled,)))
    model.install([make_layer(pooled)])


def limit_length(model: SentenceEncoder, folder: Path, tokenizer: Any) -> None:
    """Set how many tokens of a text a model reads, if the folder that it was loaded
    from lists its modules."""
    source = SentenceFolder.read(folder)
    if source.is_listed:
        length = source.encoder.choose_length(tokenizer, positions(model))
        set_settings(model.config, replace(model.settings, max_length=length))


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

        Raises TeacherError for modules that cannot be read or do not fit the encoder,
        and unless the family is an encoder.
        """
        source = SentenceFolder.read(folder)
        config = copy.deepcopy(config)
        if source.is_listed:
            set_settings(config, source.settings)
        if config.is_encoder_decoder or _CLASSES.get(type(config)) is None:
            raise TeacherError(
                f"{folder}: {config.model_type} models cannot embed texts: expected an "
                "encoder"
            )
        if not settings_of(config).embeds:
            raise TeacherError(
                f"{folder / MODULES}: has no pooling: expected a Pooling module"
            )
        source.check_width(config.hidden_size)
        return config


def _load_weights(layer: nn.Module, place: Path, *, pickled: bool) -> None:
    """Load the weights of a module, in float32. Raises TeacherError for a file that is
    missing or damaged, and for tensors that are missing, unknown, or of another shape
    than the module's config says."""
    files = find_weights(place, allow_pickle=pickled)
    saved = SavedTensors(files)
    shapes = {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
    with explain_load_errors(place):
        found = {name: info.shape for name, info in saved.infos.items()}
        for name in sorted(found.keys() | shapes.keys()):
            if found.get(name) != shapes.get(name):
                raise TeacherError(
                    f"{files.files[0]}: tensor {name!r} is "
                    f"{found.get(name, 'missing')}; its config.json expects "
                    f"{shapes.get(name, 'none')}: download both again"
                )
        layer.load_state_dict({name: saved.read(name) for name in shapes})
