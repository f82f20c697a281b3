"""Keep a teacher's outputs on disk, so that later epochs and later runs need not compute them again.

A folder per (teacher, rows, what is read, precision), with a cache entry (see `data.cache`) for each shard of rows,
memory-mapped. Several processes make different shards at a time.

Logits are (rows, V), or (tokens, V) of a teacher that answers per token, float32, and sentence vectors (rows, E) in
float16; hidden states are (tokens, D), the rows' real tokens one after another; attention scores are the (H, n, n) of
each row's n tokens one after another. The latter two are float32, or where the teacher computes in bfloat16 bfloat16
(int16 to NumPy).

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
from numpy.typing import NDArray
from torch import Tensor, nn

from compress.data.cache import cached, part
from compress.data.collate import Batching
from compress.errors import ObjectiveError
from compress.models.signals import ATTENTION, LayerAttention, Signals, open_attention, read
from compress.progress import Progress
from compress.slicing.shape import Shape

ENCODING = "3"
"""Part of every cache key: raise it when what is written of the same rows changes."""
SHARD = 1 << 15
"""Rows per shard."""


@dataclass(frozen=True)
class TeacherCache:
    """Play the teacher in a Distillation: answers for rows by their `index`.

    lengths   real tokens of each row; starts: where they begin within the row's shard
    logits    shards of (rows, V) or (tokens, V), empty when logits were not asked for
    hidden    hidden-state number (0: embeddings) -> shards of (tokens, D)
    states    how many hidden states the teacher has, embeddings included
    scores    0-based layer -> shards of its rows' attention scores; heads: how many it has
    """

    lengths: NDArray[np.int64]
    starts: NDArray[np.int64]
    logits: tuple[NDArray[Any], ...]
    hidden: Mapping[int, tuple[NDArray[Any], ...]]
    states: int
    scores: Mapping[int, tuple[NDArray[Any], ...]] = field(default_factory=dict)
    heads: int = 0

    @cached_property
    def squares(self) -> NDArray[np.int64]:
        """Return where each row's pairs of tokens begin within its shard."""
        return _starts(self.lengths**2)

    @property
    def tokenwise(self) -> bool:
        """Return True if the logits are one per token; where every row has one token, that is the same."""
        rows = min(SHARD, len(self.lengths))
        return bool(self.logits) and len(self.logits[0]) != rows

    def signals(self, batch: Mapping[str, Tensor], wants: frozenset[str]) -> Signals:
        """Return the teacher's signals for this batch; all of them are zero at pads, which no loss counts."""
        index, device = batch["index"].tolist(), batch["index"].device
        mask_BL = batch["attention_mask"]
        real_BL = mask_BL.bool().cpu().numpy()

        def spread(shards: Sequence[NDArray[Any]]) -> Tensor:
            """Spread what is kept per token to (B, L, width), float32: zero at pads."""
            out_BLD = np.zeros((*mask_BL.shape, shards[0].shape[1]), dtype=shards[0].dtype)
            for row, i in enumerate(index):
                start = self.starts[i]
                out_BLD[row, real_BL[row]] = shards[i // SHARD][start : start + self.lengths[i]]
            return _as_tensor(out_BLD).to(device).float()

        def spread_pairs(shards: Sequence[NDArray[Any]]) -> Tensor:
            """Spread scores to (B, H, L, L), in the type that they are kept in."""
            longest = mask_BL.shape[1]
            out_BHLL = np.zeros((len(index), self.heads, longest, longest), dtype=shards[0].dtype)
            for row, i in enumerate(index):
                start, tokens = self.heads * squares[i], self.lengths[i]
                real = slice(first := int(real_BL[row].argmax()), first + tokens)
                block = shards[i // SHARD][start : start + self.heads * tokens**2]
                out_BHLL[row, :, real, real] = block.reshape(self.heads, tokens, tokens)
            return _as_tensor(out_BHLL).to(device)

        logits = None
        if self.logits and self.tokenwise:
            logits = spread(self.logits)
        elif self.logits:
            kept = np.stack([self.logits[i // SHARD][i % SHARD] for i in index])
            logits = torch.from_numpy(kept).to(device).float()
        squares = self.squares
        hidden: list[Any] = [None] * self.states
        for state, shards in self.hidden.items():
            hidden[state] = spread(shards)
        nothing = torch.empty(0)
        attention = [LayerAttention(nothing, nothing, nothing, nothing)] * (self.states - 1 if self.scores else 0)
        for layer, shards in self.scores.items():
            attention[layer] = LayerAttention(nothing, nothing, nothing, spread_pairs(shards))
        return Signals(mask_BL, logits, tuple(hidden), tuple(attention))


def of_logits(logits_NV: NDArray[Any], rows: Dataset) -> TeacherCache:
    """Make a cache of logits that are known already: one row of them for each of `rows`, in their order."""
    lengths = np.asarray(rows["length"][:], dtype=np.int64)
    assert len(lengths) == len(logits_NV), "each row has its own"
    shards = tuple(logits_NV[at : at + SHARD] for at in range(0, len(logits_NV), SHARD))
    return TeacherCache(lengths, _starts(lengths), shards, {}, states=1)


def _starts(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where each row's tokens begin within its own shard."""
    begin = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    first = np.arange(len(lengths)) // SHARD * SHARD
    return begin - begin[first]


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
    """Open the shards in `folder`, computing those that it lacks. `layers`: 0-based teacher layers that are read.
    vectors: the teacher's logits are sentence vectors.

    Raises ObjectiveError when queries, keys or values are wanted.
    """
    if others := (wants & ATTENTION) - {"scores"}:
        raise ObjectiveError(
            "cache_teacher keeps logits, hidden states and attention scores, but this objective reads "
            f"{', '.join(sorted(others))}; set cache_teacher: false"
        )
    if "scores" in wants:
        if "sliding_attention" in (getattr(teacher.config, "layer_types", None) or ()):
            raise ObjectiveError(
                "cache_teacher does not keep which tokens a layer with a window sees, which losses on scores need; set "
                "cache_teacher: false"
            )
        open_attention(teacher)
    states = ([0] if "embeddings" in wants else []) + ([layer + 1 for layer in layers] if "layers" in wants else [])
    states, scored = sorted(set(states)), sorted(set(layers)) if "scores" in wants else []
    lengths = np.asarray(rows["length"][:], dtype=np.int64)
    kept = [
        *(["logits"] if "logits" in wants else []),
        *(f"hidden{n}" for n in states),
        *(f"scores{n}" for n in scored),
    ]

    def make(shard: int, entry: Path) -> None:
        if not all((entry / f"{what}.npy").is_file() for what in kept):
            _write(
                teacher, rows, collate, entry, shard, states=states, scored=scored, lengths=lengths, wants=wants,
                batch=batch, bf16=bf16, vectors=vectors,
            )  # fmt: skip

    shards, processes = list(range(-(-len(rows) // SHARD))), PartialState()
    own = shards[processes.process_index :: processes.num_processes]
    for shard in [*own, *(each for each in shards if each not in own)]:  # the others' last: they are made meanwhile
        cached(folder / f"{shard:05d}", partial(make, shard))

    def opened(what: str) -> tuple[NDArray[Any], ...]:
        return tuple(np.load(folder / f"{shard:05d}" / f"{what}.npy", mmap_mode="r") for shard in shards)

    logits = opened("logits") if "logits" in wants else ()
    hidden = {k: opened(f"hidden{k}") for k in states}
    scores = {n: opened(f"scores{n}") for n in scored}
    total = int(getattr(teacher.config, "num_hidden_layers", 0)) + 1
    heads = Shape.from_config(teacher.config).heads if scored else 0
    return TeacherCache(lengths, _starts(lengths), logits, hidden, total, scores, heads)


@torch.inference_mode()
def _write(
    teacher: nn.Module,
    rows: Dataset,
    collate: Batching,
    folder: Path,
    shard: int,
    *,
    states: Sequence[int],
    scored: Sequence[int],
    lengths: NDArray[np.int64],
    wants: frozenset[str],
    batch: int,
    bf16: bool,
    vectors: bool,
) -> None:
    """Run the teacher over one shard in batches of like lengths, into memory-mapped parts of its entry."""
    teacher.eval()
    device = next(teacher.parameters()).device
    first, last = shard * SHARD, min((shard + 1) * SHARD, len(rows))
    order = first + np.argsort(lengths[first:last], kind="stable")
    starts, tokens = _starts(lengths), int(lengths[first:last].sum())
    squares, pairs = _starts(lengths**2), int((lengths[first:last] ** 2).sum())
    files: dict[str, Any] = {}
    with ExitStack() as unfinished:
        bar = unfinished.enter_context(Progress("teacher's outputs", len(rows), "rows", done=first))
        for at in range(0, len(order), batch):
            chosen = [int(i) for i in order[at : at + batch]]
            inputs = {name: value.to(device) for name, value in collate([rows[i] for i in chosen]).items()}
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                shown = read(teacher, inputs, wants)
            parts = {f"hidden{state}": _as_numpy(shown.hidden[state], bf16) for state in states}
            parts |= {f"scores{layer}": _as_numpy(shown.scores[layer], bf16) for layer in scored}
            if shown.logits is not None and "logits" in wants:
                logits = _as_numpy(shown.logits, False)
                parts["logits"] = logits.astype(np.float16) if vectors else logits
            real_BL = inputs["attention_mask"].bool().cpu().numpy()
            for name, value in parts.items():
                per_row, heads = value.ndim == 2, value.shape[1]
                if name not in files:
                    width = value.shape[-1]
                    shape = (heads * pairs,) if value.ndim == 4 else (last - first if per_row else tokens, width)
                    path = unfinished.enter_context(part(folder, f"{name}.npy"))
                    files[name] = np.lib.format.open_memmap(path, mode="w+", dtype=value.dtype, shape=shape)
                for row, i in enumerate(chosen):
                    if per_row:
                        files[name][i - first] = value[row]
                    elif value.ndim == 4:
                        block = value[row][:, real_BL[row]][..., real_BL[row]]
                        files[name][heads * squares[i] :][: block.size] = block.reshape(-1)
                    else:
                        files[name][starts[i] : starts[i] + lengths[i]] = value[row, real_BL[row]]
            bar.advance(len(chosen))
        for file in files.values():
            file.flush()


def _as_tensor(kept: NDArray[Any]) -> Tensor:
    """Undo `_as_numpy`."""
    tensor = torch.from_numpy(kept)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.int16 else tensor


def _as_numpy(tensor: Tensor, bf16: bool) -> NDArray[Any]:
    """Return float32, or with `bf16` the bits of bfloat16, which NumPy does not know, as int16."""
    kept = tensor.to(torch.bfloat16).view(torch.int16) if bf16 else tensor.float()
    array: NDArray[Any] = kept.cpu().numpy()
    return array
