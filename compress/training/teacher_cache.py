"""Cache a teacher's outputs on disk, so that later epochs and runs need not compute
them again.

There is one folder per (teacher, rows, signals, precision), with a memory-mapped cache
entry (see `data.cache`) for each shard of rows. Several processes write different
shards at the same time.

Logits are float32, (rows, V), or (tokens, V) if the teacher answers per token; sentence
vectors are float16, (rows, E). Hidden states are (tokens, D), the rows' real tokens
concatenated; attention scores are the concatenated (H, n, n) of each row's n tokens.
Both are float32, or bfloat16 (int16 in NumPy) if the teacher computes in bfloat16.

Shapes: B batch, L tokens, H heads, D hidden, V classes.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from datasets import Dataset
from torch import Tensor, nn

from compress.arrays import Array, Longs, whole_numbers
from compress.data.cache import load_or_create, part
from compress.data.collate import Batching
from compress.errors import ObjectiveError
from compress.models.memory import input_device
from compress.models.signals import (
    ATTENTION,
    LayerAttention,
    Signals,
    has_unseen_tokens,
    open_attention,
    read,
)
from compress.progress import Progress
from compress.slicing.shape import Shape
from compress.tensors import Tensors

OUTPUTS_ENCODING = "3"
"""Part of every cache key: raise it when the files of the same rows change."""
SHARD = 1 << 15
"""Rows per shard."""
UNSEEN_REASON = (
    "cache_teacher does not store which tokens a layer with local or causal attention "
    "sees, but losses on scores need it"
)
"""Why the attention scores of some families are not cached."""


@dataclass(frozen=True)
class TeacherCache:
    """Replace the teacher in a Distillation by cached outputs, which are looked up by
    the `index` of rows.

    lengths   number of real tokens of each row; starts: where they begin within the
              row's shard
    logits    shards of (rows, V) or (tokens, V); empty if no logits are cached
    hidden    hidden-state number (0: embeddings) -> shards of (tokens, D)
    states    number of hidden states of the teacher, embeddings included
    scores    0-based layer -> shards of its rows' attention scores; heads: number of
              attention heads
    """

    lengths: Longs
    starts: Longs
    logits: tuple[Array, ...]
    hidden: Mapping[int, tuple[Array, ...]]
    states: int
    scores: Mapping[int, tuple[Array, ...]] = field(default_factory=dict)
    heads: int = 0

    @cached_property
    def squares(self) -> Longs:
        """Offsets of each row's pairs of tokens within its shard."""
        return _starts(self.lengths**2)

    @property
    def tokenwise(self) -> bool:
        """Return True if there are logits per token; if every row has one token, both
        layouts are the same."""
        rows = min(SHARD, len(self.lengths))
        return bool(self.logits) and len(self.logits[0]) != rows

    def signals(self, batch: Tensors, wants: frozenset[str]) -> Signals:
        """Return the teacher's signals for this batch, which are zero at padding."""
        index = batch["index"].tolist()
        device = batch["index"].device
        mask_BL = batch["attention_mask"]
        real_BL = mask_BL.bool().cpu().numpy()

        def spread(shards: Sequence[Array]) -> Tensor:
            """Pad values per token to (B, L, width), float32."""
            out_BLD = np.zeros(
                (*mask_BL.shape, shards[0].shape[1]), dtype=shards[0].dtype
            )
            for row, i in enumerate(index):
                start = self.starts[i]
                out_BLD[row, real_BL[row]] = shards[i // SHARD][
                    start : start + self.lengths[i]
                ]
            return _as_tensor(out_BLD).to(device).float()

        def spread_pairs(shards: Sequence[Array]) -> Tensor:
            """Pad scores to (B, H, L, L), in the type in which they are stored."""
            longest = mask_BL.shape[1]
            out_BHLL = np.zeros(
                (len(index), self.heads, longest, longest), dtype=shards[0].dtype
            )
            for row, i in enumerate(index):
                start = self.heads * self.squares[i]
                tokens = self.lengths[i]
                real = slice(first := int(real_BL[row].argmax()), first + tokens)
                block = shards[i // SHARD][start : start + self.heads * tokens**2]
                out_BHLL[row, :, real, real] = block.reshape(self.heads, tokens, tokens)
            return _as_tensor(out_BHLL).to(device)

        logits = None
        if self.logits and self.tokenwise:
            logits = spread(self.logits)
        elif self.logits:
            logits = (
                torch.from_numpy(
                    np.stack([self.logits[i // SHARD][i % SHARD] for i in index])
                )
                .to(device)
                .float()
            )
        hidden: list[Any] = [None] * self.states
        for state, shards in self.hidden.items():
            hidden[state] = spread(shards)
        nothing = torch.empty(0)
        attention = [LayerAttention(nothing, nothing, nothing, nothing)] * (
            self.states - 1 if self.scores else 0
        )
        for layer, shards in self.scores.items():
            attention[layer] = LayerAttention(
                nothing, nothing, nothing, spread_pairs(shards)
            )
        return Signals(mask_BL, logits, tuple(hidden), tuple(attention))


def cache_logits(logits_NV: Array, rows: Dataset) -> TeacherCache:
    """Make a cache of known logits, one row for each of `rows` in order."""
    lengths = whole_numbers(rows, "length")
    assert len(lengths) == len(logits_NV), "there is one row of logits for each row"
    shards = tuple(logits_NV[at : at + SHARD] for at in range(0, len(logits_NV), SHARD))
    return TeacherCache(lengths, _starts(lengths), shards, {}, states=1)


def _starts(lengths: Longs) -> Longs:
    """Return the offset of each row within its shard."""
    begin = np.cumsum(lengths) - lengths
    first = np.arange(len(lengths)) // SHARD * SHARD
    return begin - begin[first]


def _make_progress(lengths: Longs, first: int, order: Longs) -> Progress:
    """Make the progress bar for rows in this order, from `first` on. All tokens are
    assumed to take the same time."""
    tokens = lengths[:first].sum() + np.append(0, np.cumsum(lengths[order]))

    def share(done: float) -> float:
        return float(tokens[int(done) - first] / lengths.sum())

    return Progress("teacher's outputs", len(lengths), "rows", done=first, share=share)


def explain_uncacheable(teacher: Any, wants: frozenset[str]) -> str:
    """Explain why these signals of a teacher cannot be cached; '' if they can."""
    if others := (wants & ATTENTION) - {"scores"}:
        names = ", ".join(sorted(others))
        return (
            "cache_teacher keeps logits, hidden states and attention scores, but this "
            f"objective reads {names}"
        )
    return UNSEEN_REASON if "scores" in wants and has_unseen_tokens(teacher) else ""


def teacher_cache(
    teacher: nn.Module,
    rows: Dataset,
    collate: Batching,
    folder: Path,
    *,
    wants: frozenset[str],
    layers: Sequence[int],
    batch: int = 64,
    bf16: bool = False,
    vectors: bool = False,
) -> TeacherCache:
    """Open the cache in `folder`, after computing the shards that are missing.

    layers    0-based teacher layers that are read
    vectors   the teacher's logits are sentence vectors

    Raises ObjectiveError for signals that cannot be cached.
    """
    if problem := explain_uncacheable(teacher, wants):
        raise ObjectiveError(f"{problem}; set cache_teacher: false")
    if "scores" in wants:
        open_attention(teacher)
    read_states = {layer + 1 for layer in layers} if "layers" in wants else set()
    states = sorted(read_states | ({0} if "embeddings" in wants else set()))
    scored = sorted(set(layers)) if "scores" in wants else []
    names = [
        *wants & {"logits"},
        *(f"hidden{state}" for state in states),
        *(f"scores{layer}" for layer in scored),
    ]
    lengths = whole_numbers(rows, "length")
    # the outputs of a row, by the dimensions of a batch: vectors, vectors per token,
    # pairs per head
    counts = {2: np.ones_like(lengths), 3: lengths, 4: lengths**2}
    starts = {dimensions: _starts(count) for dimensions, count in counts.items()}

    @torch.inference_mode()
    def write(shard: int, entry: Path) -> None:
        """Run the teacher over one shard in batches of similar lengths, and write the
        outputs to memory-mapped parts of its entry."""
        if all((entry / f"{name}.npy").is_file() for name in names):
            return
        teacher.eval()
        device = input_device(teacher)
        first = shard * SHARD
        last = min((shard + 1) * SHARD, len(rows))
        order = first + np.argsort(lengths[first:last], kind="stable")
        files = dict[str, Any]()
        with ExitStack() as unfinished:
            bar = unfinished.enter_context(_make_progress(lengths, first, order))
            for at in range(0, len(order), batch):
                chosen = [int(i) for i in order[at : at + batch]]
                inputs = {
                    name: value.to(device)
                    for name, value in collate([rows[i] for i in chosen]).items()
                }
                with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                    signals = read(teacher, inputs, wants)
                parts = {
                    f"hidden{state}": _as_numpy(signals.hidden[state], bf16)
                    for state in states
                }
                parts |= {
                    f"scores{layer}": _as_numpy(_scores_of_all(signals, layer), bf16)
                    for layer in scored
                }
                if signals.logits is not None and "logits" in wants:
                    parts["logits"] = _as_numpy(signals.logits, False).astype(
                        "f2" if vectors else "f4", copy=False
                    )
                real_BL = inputs["attention_mask"].bool().cpu().numpy()
                for name, value in parts.items():
                    heads = value.shape[1] if value.ndim == 4 else 1
                    if name not in files:
                        count = heads * int(counts[value.ndim][first:last].sum())
                        width = value.shape[-1:] if value.ndim < 4 else ()
                        path = unfinished.enter_context(part(entry, f"{name}.npy"))
                        files[name] = np.lib.format.open_memmap(
                            path,
                            mode="w+",
                            dtype=value.dtype,
                            shape=(count, *width),
                        )
                    for row, i in enumerate(chosen):
                        block = value[row : row + 1]
                        if value.ndim > 2:
                            block = value[row][..., real_BL[row], :]
                        if value.ndim == 4:
                            block = block[..., real_BL[row]].reshape(-1)
                        start = heads * starts[value.ndim][i]
                        files[name][start : start + len(block)] = block
                bar.advance(len(chosen))
            for file in files.values():
                file.flush()

    shards = list(range(-(-len(rows) // SHARD)))
    processes = PartialState()
    own = shards[processes.process_index :: processes.num_processes]
    # meanwhile other processes write their shards
    for shard in [*own, *(other for other in shards if other not in own)]:
        load_or_create(folder / f"{shard:05d}", partial(write, shard))

    def load(name: str) -> tuple[Array, ...]:
        return tuple(
            np.load(folder / f"{shard:05d}" / f"{name}.npy", mmap_mode="r")
            for shard in shards
        )

    return TeacherCache(
        lengths,
        starts[3],
        load("logits") if "logits" in wants else (),
        {state: load(f"hidden{state}") for state in states},
        int(getattr(teacher.config, "num_hidden_layers", 0)) + 1,
        {layer: load(f"scores{layer}") for layer in scored},
        Shape.from_config(teacher.config).heads if scored else 0,
    )


def _scores_of_all(signals: Signals, layer: int) -> Tensor:
    """Return the scores of a layer in which every token attends to all. Raises
    ObjectiveError for other layers."""
    if signals.attention[layer].seen_BLL is not None:
        raise ObjectiveError(f"{UNSEEN_REASON}; set cache_teacher: false")
    return signals.scores[layer]


def _as_tensor(array: Array) -> Tensor:
    """Undo `_as_numpy`."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.int16 else tensor


def _as_numpy(tensor: Tensor, bf16: bool) -> Array:
    """Convert to float32, or with `bf16` to the bits of bfloat16 as int16, as NumPy has
    no bfloat16."""
    converted = tensor.to(torch.bfloat16).view(torch.int16) if bf16 else tensor.float()
    array: Array = converted.cpu().numpy()
    return array
