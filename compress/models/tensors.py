"""Compare the tensors in weight files with those of a model, and say which may be left
unread, each with its reason.

transformers draws missing tensors at random, drops unknown ones, and does not report
those that a class lists as ignorable. Here every tensor of a file is accounted for by
its name, with the renaming that transformers applies.
"""

import copy
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from compress.models.folder import TensorInfo, WeightFiles, read_tensor_infos
from compress.tensors import TensorDict, Tensors

FLOATS: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Number formats of weights that are read, as safetensors writes them."""


@dataclass(frozen=True)
class SavedTensors:
    """The tensors in a checkpoint's weight files: what they are, and on request their
    values."""

    weights: WeightFiles

    @cached_property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Return shape and number format by name. Raises TeacherError for damaged
        files."""
        if not self.weights.pickled:
            return read_tensor_infos(self.weights)
        names = {dtype: name for name, dtype in FLOATS.items()}
        return {
            name: TensorInfo(
                tuple(tensor.shape), names.get(tensor.dtype, str(tensor.dtype))
            )
            for name, tensor in self._pickled.items()
        }

    @cached_property
    def _pickled(self) -> Tensors:
        """Open pickled weights, without reading them into memory if their format allows
        it."""
        found: TensorDict = {}
        for file in self.weights.files:
            try:
                state = torch.load(
                    file, map_location="cpu", weights_only=True, mmap=True
                )
            except RuntimeError:  # the format of torch before 1.6 cannot be mapped
                state = torch.load(file, map_location="cpu", weights_only=True)
            found |= {
                name: tensor
                for name, tensor in state.items()
                if isinstance(tensor, Tensor)
            }
        return found

    def read(self, name: str) -> Tensor:
        """Read one tensor."""
        if self.weights.pickled:
            return self._pickled[name]
        from safetensors import safe_open

        for file in self.weights.files:
            with safe_open(file, framework="pt") as tensors:
                if name in tensors.keys():  # noqa: SIM118  # no mapping
                    tensor: Tensor = tensors.get_tensor(name)
                    return tensor
        raise KeyError(name)

    @property
    def count(self) -> int:
        """Return the number of weights in all tensors."""
        return sum(math.prod(info.shape) for info in self.infos.values())

    @property
    def dtype(self) -> torch.dtype:
        """Return the number format of all weights; float32 if they have several
        formats."""
        formats = {info.format for info in self.infos.values() if info.format in FLOATS}
        return FLOATS[formats.pop()] if len(formats) == 1 else torch.float32


ShapePair = tuple[tuple[int, ...], tuple[int, ...]]
"""The shape of a tensor in the files, and in the model."""


@dataclass(frozen=True)
class TensorFit:
    """The result of comparing the tensors of files with those of a model.

    targets      the model's tensors that each tensor of the files becomes; several if
                 it is split
    missing      tensors of the model that no file has, besides copies that are tied to
                 others
    mismatched   tensors of the model with another shape in the files: (in the files, in
                 the model)
    unexpected   tensors of the files that the model has no place for
    doubled      tensors of the model that several tensors of the files would become
    """

    targets: Mapping[str, tuple[str, ...]]
    missing: frozenset[str]
    mismatched: Mapping[str, ShapePair]
    unexpected: frozenset[str]
    doubled: Mapping[str, tuple[str, ...]]


def compare(model: PreTrainedModel, infos: Mapping[str, TensorInfo]) -> TensorFit:
    """Compare a model's tensors with those of files. The model may be on the meta
    device."""
    state = model.state_dict()
    conversions = get_model_conversion_mapping(model)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    by_pattern = {
        pattern: each for each in converters for pattern in each.source_patterns
    }
    targets = dict[str, tuple[str, ...]]()
    sources: dict[str, list[str]] = defaultdict(list)
    converted = set[str]()
    for name in sorted(infos, key=_natural):
        renamed, pattern = rename_source_key(
            name, renamings, converters, model.base_model_prefix, state
        )
        if renamed not in state and name in state:
            renamed, pattern = rename_source_key(
                name, [], [], model.base_model_prefix, state
            )
        if renamed not in state:
            continue
        targets[name] = (renamed,)
        if pattern is not None:
            patterns = by_pattern[pattern].target_patterns
            targets[name] = tuple(
                renamed.replace(patterns[0], each) for each in patterns
            )
            converted.update(targets[name])
        for target in targets[name]:
            sources[target].append(name)
    return TensorFit(
        targets=targets,
        missing=frozenset(_find_missing(model, state, sources)),
        mismatched={
            target: (infos[names[0]].shape, tuple(state[target].shape))
            for target, names in sources.items()
            if target in state
            and target not in converted
            and infos[names[0]].shape != tuple(state[target].shape)
        },
        unexpected=frozenset(infos.keys() - targets.keys()),
        doubled={
            target: tuple(names)
            for target, names in sources.items()
            if len(names) > 1 and target not in converted
        },
    )


def _natural(name: str) -> list[Any]:
    """Sort layers by their numbers, as transformers does: some renamings depend on the
    order."""
    return [
        (1, int(part), "") if part.isdigit() else (0, 0, part)
        for part in name.split(".")
    ]


def _find_missing(
    model: PreTrainedModel,
    state: Tensors,
    sources: Mapping[str, list[str]],
) -> Iterable[str]:
    """Find the tensors that are in no file, are not tied to one that is, and cannot be
    computed from the config."""
    tied = dict[str, set[str]]()
    for target, source in model.all_tied_weights_keys.items():
        group = tied.setdefault(source, {source})
        group.add(target)
        tied[target] = group
    buffers = {name for name, _ in model.named_buffers()}
    for name in state:
        computed = name in buffers and name.rpartition(".")[2] in (
            "position_ids",
            "token_type_ids",
        )
        if not computed and not tied.get(name, {name}) & sources.keys():
            yield name


def build_on_meta(
    model_class: type[PreTrainedModel], config: PreTrainedConfig
) -> PreTrainedModel:
    """Build a model without weights, which costs neither memory nor time, to compare
    tensors with it."""
    with torch.device("meta"):
        return model_class(copy.deepcopy(config))


# What may be left unread


@dataclass(frozen=True)
class ComputedTensor:
    """A kind of tensor in files that the model computes itself.

    pattern   how its name ends, as a regular expression
    what      what it is, and why it may be left unread
    same      whether a tensor of the files is what the model computes: (its values, the
              model) -> bool
    families  the model types that write it; empty: any
    """

    pattern: str
    what: str
    same: Callable[[Tensor, PreTrainedModel], bool]
    families: tuple[str, ...] = ()


def _counts_up(values: Tensor, _: PreTrainedModel) -> bool:
    return bool((values.flatten() == torch.arange(values.numel())).all())


def _is_zero(values: Tensor, _: PreTrainedModel) -> bool:
    return not bool(values.any())


def _is_frequency(values: Tensor, model: PreTrainedModel) -> bool:
    """Compare with the model's own frequencies, to the precision of bfloat16 and
    float16."""
    own = [
        buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")
    ]
    known = [
        each.float()
        for each in own
        if each.shape == values.shape and each.device.type != "meta"
    ]
    on_meta = any(each.device.type == "meta" for each in own)
    return on_meta or any(
        torch.allclose(values.float(), each, rtol=1e-2, atol=1e-6) for each in known
    )


def _is_causal_mask(values: Tensor, _: PreTrainedModel) -> bool:
    if values.numel() == 1:  # the number that masked scores are set to
        return True
    square = values.reshape(values.shape[-2:]).bool() if values.dim() >= 2 else values
    return square.dim() == 2 and bool((square == torch.ones_like(square).tril()).all())


def _always(*_: object) -> bool:
    return True


def _has_no_absolute_positions(_: Tensor, model: PreTrainedModel) -> bool:
    return not getattr(model.config, "position_biased_input", True)


COMPUTED: Final = (
    ComputedTensor(
        r"(^|\.)position_ids$",
        "the numbers 0, 1, 2, ... of the positions, which older versions of "
        "transformers saved",
        _counts_up,
    ),
    ComputedTensor(
        r"(^|\.)embeddings\.token_type_ids$",
        "token types of all zeros, which older versions of transformers saved",
        _is_zero,
    ),
    ComputedTensor(
        r"(^|\.)(original_)?inv_freq$",
        "the frequencies of rotary positions, which follow from the config",
        _is_frequency,
    ),
    ComputedTensor(
        r"\.(attn|attention)\.(masked_)?bias$",
        "a causal mask, which older versions of transformers saved",
        _is_causal_mask,
        ("gpt2", "gpt_neo", "gpt_neox", "gptj", "openai-gpt", "codegen", "imagegpt"),
    ),
    ComputedTensor(
        r"(^|\.)(encoder|decoder)\.version$",
        "the version of a file format of fairseq",
        _always,
    ),
    ComputedTensor(
        r"^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight$",
        "relative positions between decoder and encoder, which T5 does not have: its "
        "first port saved unused ones",
        _always,
        ("t5", "mt5", "umt5", "longt5", "switch_transformers"),
    ),
    ComputedTensor(
        r"(^|\.)embeddings\.position_embeddings\.weight$",
        "DeBERTa's absolute positions, which only the decoder of its pre-training adds "
        "(position_biased_input: false)",
        _has_no_absolute_positions,
        ("deberta", "deberta-v2"),
    ),
    ComputedTensor(
        r"^(lm_predictions|mask_predictions)\.",
        "the heads of DeBERTa's pre-training, under the names of its authors",
        _always,
        ("deberta", "deberta-v2"),
    ),
)
"""Tensors that any model may leave unread, if their values are what it computes
itself."""


def _is_computed(name: str, saved: SavedTensors, model: PreTrainedModel) -> bool:
    """Check whether a tensor of the files is one that this model computes itself, with
    the same values."""
    family = model.config.model_type
    for each in COMPUTED:
        if re.search(each.pattern, name) and (
            not each.families or family in each.families
        ):
            return each.same(saved.read(name), model)
    return False


def list_unread(
    fit: TensorFit, saved: SavedTensors, model: PreTrainedModel
) -> list[str]:
    """List the tensors of the files that a model has no place for and does not compute
    itself."""
    return [
        name for name in sorted(fit.unexpected) if not _is_computed(name, saved, model)
    ]
