"""Group rows of tokens by length, and pad them to the longest row of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, count
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch.utils.data import Sampler

from compress.data.constants import IGNORE_INDEX
from compress.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from compress.arrays import Flags, Ints, Longs

    RowNumbers = Sequence[int] | Ints

BATCHES_PER_SORT: Final = 50

_LEFT_OUT: Final = frozenset(
    {
        "attention_mask",
        "length",
        "document",
        "part",
        "paired",
        "example",
        "word",
        "starts",
        "ends",
        "null",
    }
)

RowBatches = list[list[int]]
"""The numbers of the rows of each batch."""

Batching = Callable[[Sequence[Mapping[str, Any]]], dict[str, torch.Tensor]]
"""Rows -> one batch."""


class Collate:
    """Batch rows of `encode`, padded to the longest: on the right, or on the `left`
    with position_ids (B, L).

    The tokenizer's own padding side is ignored: see `models.padding`.

    input_ids, attention_mask and columns with one int per token: int64 (B, L). labels:
    int64 (B,) class ids, float32 (B, 1) numbers, float32 (B, C) of 0 and 1, int64 (B,
    C) for C whole numbers per row, or int64 (B, L) for one per token (padded with -100,
    other columns with 0). index and other columns of single ints: int64 (B,); relevance
    and scores of passages: float32 (B,). Columns in _LEFT_OUT, or of any other type,
    are left out. Raises DataError for a tokenizer without a padding token.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, left: bool = False
    ) -> None:
        self.padding = {
            "input_ids": require_pad_token(tokenizer),
            "token_type_ids": tokenizer.pad_token_type_id,
            "labels": IGNORE_INDEX,
        }
        self.left = left

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        lengths = np.fromiter(
            (len(row["input_ids"]) for row in rows), np.int64, len(rows)
        )
        longest = int(lengths.max())
        positions = np.arange(longest)
        starts = longest - lengths if self.left else np.zeros_like(lengths)
        mask = (positions >= starts[:, None]) & (
            positions < (starts + lengths)[:, None]
        )
        batch = {"attention_mask": torch.from_numpy(mask.astype(np.int64))}
        if self.left:
            batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp_min(0)
        for name in (column for column in rows[0] if column not in _LEFT_OUT):
            cells = [row[name] for row in rows]
            if _per_token(cells, lengths):
                padded = np.full(mask.shape, self.padding.get(name, 0), np.int64)
                # one flat copy is ten times as fast as row by row, or nested lists
                padded[mask] = np.fromiter(
                    chain.from_iterable(cells), np.int64, lengths.sum()
                )
                batch[name] = torch.from_numpy(padded)
            elif name == "labels":
                labels = np.asarray(cells)
                is_int = labels.dtype.kind == "i"
                labels = (
                    labels.astype(np.int64)
                    if is_int
                    else labels.astype(np.float32).reshape(len(cells), -1)
                )
                batch[name] = torch.from_numpy(labels)
                # positions in the row, which begins after its padding
                if "null" in rows[0]:
                    batch[name] += torch.from_numpy(starts)[:, None]
            elif isinstance(cells[0], int) or name in ("relevance", "scores"):
                batch[name] = torch.tensor(cells)
        return batch


def require_pad_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of the padding token, or raise DataError if there is none."""
    if tokenizer.pad_token_id is None:
        raise DataError(
            f"{tokenizer.name_or_path or type(tokenizer).__name__}: its tokenizer has "
            "no padding token. Set pad_token in its tokenizer_config.json, or in "
            "Python: tokenizer.pad_token = tokenizer.eos_token"
        )
    return int(tokenizer.pad_token_id)


def _per_token(cells: Sequence[Any], lengths: Longs) -> bool:
    """Check whether each row has one int per token."""
    if (
        not isinstance(cells[0], list)
        or [len(cell) for cell in cells] != lengths.tolist()
    ):
        return False
    return all(isinstance(number, int) for number in next(filter(None, cells), []))


class Seq2SeqCollate:
    """Batch rows of a source and a target for an encoder-decoder: the source as
    `Collate` does, and

    labels             int64 (B, M): the targets, padded with -100 to the longest
    decoder_input_ids  int64 (B, M): the targets shifted right, as `model` does it

    Rows without `labels` get neither.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
    ) -> None:
        self.source = Collate(tokenizer)
        self.begin: Any = model.prepare_decoder_input_ids_from_labels

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        batch = self.source(
            [
                {name: cell for name, cell in row.items() if name != "labels"}
                for row in rows
            ]
        )
        if "labels" not in rows[0]:
            return batch
        targets = [row["labels"] for row in rows]
        lengths = np.array([len(target) for target in targets])
        labels = np.full((len(rows), lengths.max()), IGNORE_INDEX, np.int64)
        labels[np.arange(lengths.max()) < lengths[:, None]] = np.concatenate(targets)
        batch["labels"] = torch.from_numpy(labels)
        return batch | {"decoder_input_ids": self.begin(labels=batch["labels"])}


class LengthGrouped(Sampler[int]):
    """Order rows so that each `batch_size` consecutive ones (the batch of all
    processes) have similar lengths.

    The order depends only on (seed, epoch), not on the global generator, so that a
    resumed run sees the same rows. Rows are shuffled, sorted by length within every 50
    batches, and the batches shuffled. The batch with the longest row comes first, so
    that memory runs out at once or never; an incomplete batch comes last. With `whole`,
    no batch is incomplete: some rows come twice per epoch, so that every batch splits
    evenly over processes.
    """

    def __init__(
        self,
        lengths: RowNumbers,
        batch_size: int,
        *,
        seed: int,
        whole: bool = False,
    ) -> None:
        self.lengths = np.asarray(lengths)
        self.batch_size = batch_size
        self.seed = seed
        self.whole = whole
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        rows = len(self.lengths)
        return -(-rows // self.batch_size) * self.batch_size if self.whole else rows

    def __iter__(self) -> Iterator[int]:
        # an array of all rows is kept for as long as one of them is to come
        order = self._order().astype(np.int32)
        return map(int, order)

    def _order(self) -> Longs:
        rng = np.random.default_rng([self.seed, self.epoch])
        shuffled = rng.permutation(len(self.lengths))
        rows = np.resize(shuffled, len(self))
        sorted_at_once = self.batch_size * BATCHES_PER_SORT
        stretch = np.arange(len(rows)) // sorted_at_once
        longest_first = -self.lengths[rows]
        rows = rows[np.lexsort((longest_first, stretch))]
        full = len(rows) // self.batch_size
        whole = full * self.batch_size
        batches = rows[:whole].reshape(full, self.batch_size)
        rest = rows[whole:]
        order = rng.permutation(full)
        if full:
            longest = int(self.lengths[batches[order, 0]].argmax())
            order[[0, longest]] = order[[longest, 0]]
        return np.append(batches[order].reshape(-1), rest)


class BatchOrder(Sampler[list[int]]):
    """Make batches of rows in an order that depends only on (seed, epoch). A subclass
    makes the batches of an epoch; they are kept, since training loops ask for their
    number many times."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.batches = self._batches()

    def __len__(self) -> int:
        """Count the batches of this epoch; other epochs may have a few more or
        fewer."""
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def _batches(self) -> RowBatches:
        raise NotImplementedError

    def _random(self, *more: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, self.epoch, *more])


class TokenBudget(BatchOrder):
    """Make batches of at most `tokens` tokens, including padding, in an order that
    depends only on (seed, epoch).

    Rows are shuffled, sorted by length within stretches of about 50 batches, and the
    batches shuffled. A row longer than `tokens` is a batch by itself.
    """

    def __init__(self, lengths: RowNumbers, tokens: int, *, seed: int) -> None:
        self.lengths = np.asarray(lengths)
        self.tokens = tokens
        super().__init__(seed)

    def __iter__(self) -> Iterator[list[int]]:
        order = self._random(1).permutation(len(self.batches))
        return iter([self.batches[at] for at in order])

    def _batches(self) -> RowBatches:
        rows = self._random().permutation(len(self.lengths))
        stretch = np.cumsum(self.lengths[rows]) // (self.tokens * BATCHES_PER_SORT)
        rows = rows[np.lexsort((-self.lengths[rows], stretch))]
        batches: RowBatches = []
        longest = 0
        for row, length in zip(rows.tolist(), self.lengths[rows].tolist(), strict=True):
            longest = max(longest, length)
            if not batches or longest * (len(batches[-1]) + 1) > self.tokens:
                batches.append([])
                longest = length
            batches[-1].append(row)
        return batches


class LanguageSampled(BatchOrder):
    """Make batches of one language, or of one pair of languages, in an order that
    depends only on (seed, epoch).

    Text and translations take turns; the language or pair of a turn, of `passes`
    batches, is drawn with a probability proportional to the `power` of its share of the
    rows. An epoch has as many batches as hold each row once; the rows of rare languages
    come more often, others less.

    part      of each row: the number of its language or pair
    paired    of each row: 1 if it is a pair of translations
    budgets   the most tokens of a batch, including padding: of text, of translations
    """

    def __init__(
        self,
        part: RowNumbers,
        paired: RowNumbers,
        lengths: RowNumbers,
        budgets: tuple[int, int],
        *,
        power: float,
        passes: int,
        seed: int,
    ) -> None:
        numbers = np.asarray(part)
        kinds = np.asarray(paired)
        lengths = np.asarray(lengths)
        self.power = power
        self.passes = passes
        self.turns = [
            [
                (rows, TokenBudget(lengths[rows], budgets[kind], seed=seed))
                for number in np.unique(numbers[kinds == kind])
                for rows in [np.flatnonzero(numbers == number)]
            ]
            for kind in np.unique(kinds)
        ]
        self.steps = -(
            -sum(len(order) for turn in self.turns for _, order in turn) // passes
        )
        super().__init__(seed)

    def _batches(self) -> RowBatches:
        rng = self._random()
        shares = [
            np.array([len(rows) for rows, _ in turn]) ** self.power
            for turn in self.turns
        ]
        streams = [
            [self._repeat(rows, order) for rows, order in turn] for turn in self.turns
        ]
        drawn = [
            rng.choice(len(each), self.steps, p=each / each.sum()) for each in shares
        ]
        turns = (
            (step % len(streams), step)
            for step in range(self.steps)
            for _ in range(self.passes)
        )
        return [next(streams[kind][drawn[kind][step]]) for kind, step in turns]

    def _repeat(self, rows: Longs, order: TokenBudget) -> Iterator[list[int]]:
        for again in count():
            order.set_epoch(self.epoch * 1_000_000 + again)
            yield from (rows[batch].tolist() for batch in order)


class QueryGrouped(BatchOrder):
    """Make batches of whole queries with at most `rows` rows, in an order that depends
    only on (seed, epoch).

    Queries are shuffled, sorted by their longest row within stretches of about 50
    batches, and packed into batches one after another; the batch with the longest row
    comes first, the others are shuffled. A query with too many rows is sampled anew in
    each epoch: relevant rows for half of the batch, then others.
    """

    def __init__(
        self,
        query: RowNumbers,
        lengths: RowNumbers,
        relevance: Sequence[float] | NDArray[np.floating] | Flags,
        rows: int,
        *,
        seed: int,
    ) -> None:
        self.lengths = np.asarray(lengths)
        self.relevant = np.asarray(relevance) > 0
        self.rows = rows
        places = np.unique(np.asarray(query), return_inverse=True)[1]
        order = np.argsort(places, kind="stable")
        self.queries = np.split(order, np.cumsum(np.bincount(places))[:-1])
        super().__init__(seed)

    def __iter__(self) -> Iterator[list[int]]:
        order = self._random(1).permutation(len(self.batches))
        longest = int(np.argmax([self.lengths[self.batches[at]].max() for at in order]))
        order[[0, longest]] = order[[longest, 0]]
        return iter([self.batches[at] for at in order])

    def _batches(self) -> RowBatches:
        rng = self._random()
        queries = [
            self._draw(self.queries[n], rng) for n in rng.permutation(len(self.queries))
        ]
        sizes = np.array([len(query) for query in queries])
        longest = np.array([self.lengths[query].max() for query in queries])
        stretch = np.cumsum(sizes) // (self.rows * BATCHES_PER_SORT)
        batches: RowBatches = []
        for at in np.lexsort((-longest, stretch)):
            if not batches or len(batches[-1]) + sizes[at] > self.rows:
                batches.append([])
            batches[-1] += queries[at].tolist()
        return batches

    def _draw(self, rows: Longs, rng: np.random.Generator) -> Longs:
        if len(rows) <= self.rows:
            return rows
        rows = rng.permutation(rows)
        relevant = rows[self.relevant[rows]]
        others = rows[~self.relevant[rows]]
        relevant = relevant[: max(self.rows // 2, self.rows - len(others))]
        return np.sort(np.concatenate([relevant, others[: self.rows - len(relevant)]]))


Order = LengthGrouped | BatchOrder
"""A sampler of rows or batches."""
