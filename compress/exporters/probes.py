"""Choose the texts on which an exported file is compared with its model, and draw their
tokens.

A tracer that mistakes a size for a constant only warns, and the file is wrong at every
other size. Effects of the distance between tokens (windows, buckets of relative
positions, tables of positions) show in the longest text; effects of the length itself
(a switch to other attention, blocks of a length) show just above each length in the
config. The longest text has `max_length` tokens, or as many as fit into MOST_WORK and
MOST_SCORES.
"""

import math
import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from compress import families
from compress.models.flops import count_parameters, count_tables
from compress.slicing.shape import find_setting, positions

TRACED = (2, 5)
"""The (rows, tokens) at which a graph is traced."""
SHORT_TEXTS = ((1, 1), (1, 2), (3, 7))
"""The (rows, tokens) at which every file is compared."""
PROBED_LENGTH = 512
"""The longest text, in tokens, unless `max_length` is given."""
MOST_WORK = 5e11
"""The most floating-point operations for comparing one text, on each side: about 10 s
on one slow core."""
MOST_SCORES = 2**28
"""The most attention scores of a layer for comparing one text: 1 GB."""
BATCHED = 64
"""The most tokens of a text that is compared in a batch, with padding in one of its
rows."""
CHARACTERS = 0x110000
"""The number of ids of a family that reads characters (CANINE): their code points."""
CHANGING = re.compile(
    "window|local_attention|bucket|relative_pos|max_distance|block_size|chunk|segment|landmark"
)
"""Names of config settings that hold lengths, in tokens, at which attention may
change."""


@dataclass(frozen=True)
class Probe:
    """The shape of a batch on which a file is compared; if it has several rows, the
    first one is padded."""

    rows: int
    tokens: int

    def __str__(self) -> str:
        tokens = f"{self.tokens} token{'s' * (self.tokens > 1)}"
        return tokens if self.rows == 1 else f"{self.rows} rows of {tokens}"


def choose_probes(model: nn.Module, max_length: int | None = None) -> list[Probe]:
    """Choose the shapes at which the file is compared with its model, short ones first.

    max_length  the most tokens of a text that the file is made for; None:
                PROBED_LENGTH, or the model's positions
    """
    most = min(longest_text(model, max_length), affordable_length(model))
    edges = {
        length for edge in changing_lengths(model.config) for length in (edge, edge + 1)
    }
    lengths = sorted(
        {length for length in (*edges, min(BATCHED, most), most) if 1 < length <= most}
    )
    short = [Probe(rows, tokens) for rows, tokens in SHORT_TEXTS if tokens <= most]
    return [
        *short,
        *(Probe(2 if length <= BATCHED else 1, length) for length in lengths),
    ]


@dataclass(frozen=True)
class Switch:
    """A setting that makes a model read texts of more than `tokens` tokens in another
    way than shorter ones."""

    setting: str
    tokens: int
    remedy: str = ""


def find_switch(config: Any) -> Switch | None:
    """Find the setting that makes a model read long texts in another way; None if it
    reads all texts in the same way."""
    if getattr(config, "attention_type", "") == "block_sparse":
        tokens = (5 + 2 * config.num_random_blocks) * config.block_size
        remedy = (
            ", or set attention_type to original_full, which answers long texts a "
            "little differently"
        )
        return Switch("attention_type: block_sparse", tokens, remedy)
    settings = text_config(config)
    scaling = getattr(settings, "rope_parameters", None) or {}
    # one for each kind of layer
    kinds = [scaling, *(each for each in scaling.values() if isinstance(each, dict))]
    if any(each.get("rope_type") == "dynamic" for each in kinds):
        return Switch("rope_type: dynamic", settings.max_position_embeddings)
    return None


def longest_text(model: nn.Module, max_length: int | None) -> int:
    """Return the most tokens of the texts that the file is made for."""
    limit = positions(model)
    if max_length is not None:
        return max_length if limit is None else min(max_length, limit)
    return PROBED_LENGTH if limit is None else min(PROBED_LENGTH, limit)


def affordable_length(model: nn.Module) -> int:
    """Return the most tokens of a text on which model and file can be compared within
    MOST_WORK and MOST_SCORES."""
    config = text_config(model.config)
    heads = _size(config, "heads", usual=16)
    linear = 2 * (count_parameters(model) - count_tables(model))
    # scores and contexts
    square = 4 * _size(config, "layers", usual=24) * _size(config, "hidden", usual=1024)
    by_work = (math.sqrt(linear**2 + 4 * square * MOST_WORK) - linear) / (2 * square)
    return int(min(by_work, math.sqrt(MOST_SCORES / heads)))


def _size(config: Any, size: str, *, usual: int) -> int:
    """Return a size of the config; `usual` if the family has another name for it, or a
    different size in each layer."""
    settings = SimpleNamespace(**config.to_dict())
    name = find_setting(settings, size)
    value = None if name is None else getattr(settings, name)
    return value if isinstance(value, int) else usual


def changing_lengths(config: Any) -> list[int]:
    """List the lengths in a config, in tokens, at which attention may change."""
    found = set[int]()
    for name, value in text_config(config).to_dict().items():
        values = value if isinstance(value, list | tuple) else [value]
        if CHANGING.search(name):
            found |= {
                each
                for each in values
                if isinstance(each, int) and not isinstance(each, bool) and each > 1
            }
    return sorted(found)


def text_config(config: Any) -> Any:
    """Return the text part of the config of a family that also reads images."""
    return config if config.is_encoder_decoder else config.get_text_config()


def draw(model: nn.Module, probe: Probe, *, segments: bool) -> dict[str, Tensor]:
    """Draw random inputs, in the order of the file's; of several rows, the first one is
    masked at its end."""
    config: Any = model.config
    rows = probe.rows
    tokens = probe.tokens
    ids = torch.randint(
        vocabulary_of(config),
        (rows, tokens),
        generator=torch.Generator().manual_seed(0),
    )
    mask = torch.ones_like(ids)
    if rows > 1:
        mask[0, tokens // 2 + 1 :] = 0
    padding = getattr(text_config(config), "pad_token_id", None) or 0
    # T5 classifies at the end-of-text token, of which each row has one
    if config.is_encoder_decoder:
        ids = ids.where(ids != config.eos_token_id, padding)
        ids.scatter_(1, mask.sum(1, keepdim=True) - 1, config.eos_token_id)
    batch = {"input_ids": ids.where(mask == 1, padding), "attention_mask": mask}
    if segments and has_segments(config):
        batch["token_type_ids"] = (
            torch.arange(tokens)
            .ge(tokens // 2)
            .long()
            .expand(rows, tokens)
            .contiguous()
        )
    return batch


def has_segments(config: Any) -> bool:
    """Check that a model of this config tells the two texts of a pair apart."""
    uncounted = families.find(config.model_type).segments_uncounted
    return uncounted or (getattr(config, "type_vocab_size", None) or 0) > 1


def vocabulary_of(config: Any) -> int:
    """Return the number of token ids, or of characters for a family that hashes
    characters."""
    size = getattr(text_config(config), "vocab_size", None)
    return CHARACTERS if size is None else int(size)
