"""Rows of a split as batches of tensors: tokenised once, grouped by length, padded to the longest of a batch."""

from __future__ import annotations

import inspect
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import Sampler

from compress.data import cache, windows
from compress.data.constants import IGNORE_INDEX
from compress.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset
    from numpy.typing import NDArray
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from compress.data.task import Task

ROWS_PER_CALL = 1000

_TYPES: Final[Mapping[str, pa.DataType]] = {
    "input_ids": pa.list_(pa.int32()),
    "attention_mask": pa.list_(pa.int8()),
    "token_type_ids": pa.list_(pa.int8()),
    "labels": pa.list_(pa.int32()),
    "length": pa.int32(),
    "index": pa.int64(),
    "example": pa.int64(),
    "starts": pa.list_(pa.int32()),
    "ends": pa.list_(pa.int32()),
    "null": pa.int32(),
    "word": pa.list_(pa.int32()),
}

Row = dict[str, Any]


def encoded(split: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Iterator[pa.RecordBatch]:
    """The rows of a split of any kind, see `batches.encode`, many at a time."""
    if "question" in split.column_names:
        yield from _batches(_questions(split, backend(tokenizer, "questions"), max_length), tokenizer)
    elif "words" in split.column_names:
        yield from _batches(_sentences(split, backend(tokenizer, "words"), max_length), tokenizer)
    else:
        yield from _texts(split, tokenizer, max_length)


def backend(tokenizer: PreTrainedTokenizerBase, what: str) -> Tokenizer:
    """The fast tokenizer inside, which tells where its tokens come from."""
    if not tokenizer.is_fast:
        raise DataError(
            f"{type(tokenizer).__name__} does not tell which characters its tokens come from, and {what} cannot do "
            "without; expected a fast tokenizer, as AutoTokenizer gives for all common models."
        )
    return windows.plain(tokenizer.backend_tokenizer)


def _texts(split: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Iterator[pa.RecordBatch]:
    start = 0
    for table in split.with_format("arrow").iter(ROWS_PER_CALL):
        texts = [table[name].to_pylist() for name in ("text", "text_pair") if name in table.column_names]
        tokens = tokenizer(*texts, truncation=True, max_length=max_length, padding=False, return_attention_mask=True)
        names = ("input_ids", "attention_mask", "token_type_ids")
        columns = {name: pa.array(tokens[name], _TYPES[name]) for name in names if name in tokens}
        if "label" in table.column_names:
            columns["labels"] = table["label"].combine_chunks()
        columns["length"] = pa.array(map(len, tokens["input_ids"]), _TYPES["length"])
        columns["index"] = pa.array(range(start, start + len(table)), _TYPES["index"])
        yield pa.record_batch(columns)
        start += len(table)


def _questions(split: Dataset, tokenizer: Tokenizer, max_length: int) -> Iterator[Row]:
    """The first of a question's answers is the one to be learned."""
    example = 0
    for part in split.iter(ROWS_PER_CALL):
        columns = (part["context"], part["answers"], part["starts"])
        asked = windows.asked(tokenizer, part["question"], part["context"], max_length)
        for found, context, answers, starts in zip(asked, *columns, strict=True):
            for window in found:
                labels = [window.null, window.null]
                if answers:
                    assert context.startswith(answers[0], starts[0])
                    labels = window.span(starts[0], starts[0] + len(answers[0]))
                spots = {"starts": window.starts, "ends": window.ends, "null": window.null}
                yield {**_tokens(window.row), "labels": labels, "example": example, **spots}
            example += 1


def _sentences(split: Dataset, tokenizer: Tokenizer, max_length: int) -> Iterator[Row]:
    example = 0
    for part in split.iter(ROWS_PER_CALL):
        for found, tags in zip(windows.read(tokenizer, part["words"], max_length), part["tags"], strict=True):
            for window in found:
                labels = [IGNORE_INDEX if word < 0 else tags[word] for word in window.word]
                yield {**_tokens(window.row), "labels": labels, "example": example, "word": window.word}
            example += 1


def _tokens(row: windows.Window) -> Row:
    ids = row.ids
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "token_type_ids": row.types, "length": len(ids)}


def _batches(rows: Iterator[Row], tokenizer: PreTrainedTokenizerBase) -> Iterator[pa.RecordBatch]:
    held: list[Row] = []
    start = 0

    def batch() -> pa.RecordBatch:
        left_out = set() if "token_type_ids" in tokenizer.model_input_names else {"token_type_ids"}
        columns = {name: [row[name] for row in held] for name in held[0] if name not in left_out}
        columns["index"] = list(range(start, start + len(held)))
        return pa.record_batch({name: pa.array(cells, _TYPES[name]) for name, cells in columns.items()})

    for row in rows:
        held.append(row)
        if len(held) == ROWS_PER_CALL:
            yield batch()
            start += len(held)
            held = []
    if held:
        yield batch()


ENCODING = "1"
"""Part of every cache key: raise it when what `encode` writes changes."""

_LEFT_OUT = frozenset({"attention_mask", "length", "document", "example", "word", "starts", "ends", "null"})

BATCHES_PER_SORT = 50


def encode(split: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Dataset:
    """The split tokenised: input_ids, attention_mask, token_type_ids (if the tokenizer makes them), labels (if the
    split has any), length (tokens), index (row number). No padding.

    Texts are `text` and, for pairs, `text_pair`; the longer of a pair is truncated first. Words and questions take
    several rows where they are too long for one (see `windows`), and more columns: example (their number in the
    split), and

    words       labels: the tag at the first token of each word, -100 elsewhere; word: the number of the word there, -1
    questions   labels: [first, last] token of the answer, both `null` where the row does not hold it; null: the token
                that stands for no answer; starts, ends: the characters of the context that each token covers, -1

    Written once to the cache, by the fingerprints of split and tokenizer, and memory-mapped.
    """
    key = cache.digest(ENCODING, split._fingerprint, fingerprint(tokenizer), str(max_length))
    batches = partial(encoded, split, tokenizer, max_length)
    return cache.rows("encoded", key, batches, empty="the split has no rows to tokenise.")


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of all that decides which tokens a text becomes; not the padding and truncation that each call sets."""
    settings = [type(tokenizer).__name__, tokenizer.truncation_side, *tokenizer.model_input_names]
    if tokenizer.is_fast:
        state = json.loads(tokenizer.backend_tokenizer.to_str()) | {"padding": None, "truncation": None}
        return cache.digest(*settings, json.dumps(state))
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return cache.digest(*settings, *(path for path in sorted(Path(folder).rglob("*")) if path.is_file()))


Batching = Callable[[Sequence[Mapping[str, Any]]], dict[str, torch.Tensor]]
"""Rows -> one batch."""


class Collate:
    """Rows of `encode` as one batch, padded to its longest row on the tokenizer's padding side.

    input_ids, attention_mask, and every column with one int a token: int64 (B, L). labels: int64 (B,) class ids,
    float32 (B, 1) numbers, float32 (B, C) of 0 and 1, int64 (B, C) where each row has C whole numbers, or int64 (B, L)
    where it has one a token (padded with -100, as other columns are with 0). index and every other column of single
    ints: int64 (B,). Left out: length, document, what tells the answers of words and questions, and columns of any
    other kind. DataError for a tokenizer that cannot pad.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if tokenizer.pad_token_id is None:
            raise DataError(
                f"{type(tokenizer).__name__} has no padding token, so rows of different lengths make no batch. "
                "Set one, for example: tokenizer.pad_token = tokenizer.eos_token"
            )
        self.padding = {
            "input_ids": tokenizer.pad_token_id,
            "token_type_ids": tokenizer.pad_token_type_id,
            "labels": IGNORE_INDEX,
        }
        self.left = tokenizer.padding_side == "left"

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        lengths = np.fromiter((len(row["input_ids"]) for row in rows), np.int64, len(rows))
        longest = int(lengths.max())
        positions = np.arange(longest)
        starts = longest - lengths if self.left else np.zeros_like(lengths)
        mask = (positions >= starts[:, None]) & (positions < (starts + lengths)[:, None])
        batch = {"attention_mask": torch.from_numpy(mask.astype(np.int64))}
        for name in (each for each in rows[0] if each not in _LEFT_OUT):
            cells = [row[name] for row in rows]
            if _per_token(cells, lengths):
                padded = np.full(mask.shape, self.padding.get(name, 0), np.int64)
                # one flat copy: row by row, or through nested lists, costs ten times as much
                padded[mask] = np.fromiter(chain.from_iterable(cells), np.int64, lengths.sum())
                batch[name] = torch.from_numpy(padded)
            elif name == "labels":
                batch[name] = _labels(cells)
                if "null" in rows[0]:  # places in the row, which begins behind its padding
                    batch[name] += torch.from_numpy(starts)[:, None]
            elif isinstance(cells[0], int):
                batch[name] = torch.tensor(cells)
        return batch


def _per_token(cells: Sequence[Any], lengths: NDArray[np.int64]) -> bool:
    """Whether each row has a list of ints, as many as it has tokens."""
    if not isinstance(cells[0], list) or [len(cell) for cell in cells] != lengths.tolist():
        return False
    return all(isinstance(number, int) for number in next(filter(None, cells), []))


def _labels(values: list[Any]) -> torch.Tensor:
    labels = np.asarray(values)
    if labels.dtype.kind == "i":
        return torch.from_numpy(labels.astype(np.int64))
    return torch.from_numpy(labels.astype(np.float32).reshape(len(values), -1))


class LengthGrouped(Sampler[int]):
    """Row numbers such that each consecutive `batch_size` of them (the batch of all processes together) are of like
    length, in an order that only (seed, epoch) decide: never the global generator, so a resumed run sees the same rows.

    Rows are shuffled, sorted by length within every 50 batches, and the batches shuffled. The batch with the longest
    row comes first, so that memory runs out at once or never; a batch that is not full comes last. With `whole` there
    is none: some rows come twice in an epoch, so that every batch splits evenly over processes.
    """

    def __init__(
        self, lengths: Sequence[int] | NDArray[np.integer], batch_size: int, *, seed: int, whole: bool = False
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
        rng = np.random.default_rng([self.seed, self.epoch])
        rows = np.resize(rng.permutation(len(self.lengths)), len(self))
        stretch = np.arange(len(rows)) // (self.batch_size * BATCHES_PER_SORT)
        rows = rows[np.lexsort((-self.lengths[rows], stretch))]
        full = len(rows) // self.batch_size
        batches, rest = rows[: full * self.batch_size].reshape(full, self.batch_size), rows[full * self.batch_size :]
        order = rng.permutation(full)
        if full:
            longest = int(self.lengths[batches[order, 0]].argmax())
            order[[0, longest]] = order[[longest, 0]]
        return iter([*batches[order].reshape(-1).tolist(), *rest.tolist()])


class TokenBudget(Sampler[list[int]]):
    """Batches of row numbers with at most `tokens` tokens each, padding included: the shorter the rows, the more of
    them. The order is decided by (seed, epoch) alone.

    Rows are shuffled, sorted by length within stretches of about 50 batches, and the batches shuffled. A row longer
    than `tokens` is a batch of its own.
    """

    def __init__(self, lengths: Sequence[int] | NDArray[np.integer], tokens: int, *, seed: int) -> None:
        self.lengths = np.asarray(lengths)
        self.tokens = tokens
        self.seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.batches = self._batches()  # once: loops ask for the length many times

    def __len__(self) -> int:
        """Batches in this epoch: epochs may differ by a few."""
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        batches = self.batches
        order = np.random.default_rng([self.seed, self.epoch, 1]).permutation(len(batches))
        return iter([batches[at] for at in order])

    def _batches(self) -> list[list[int]]:
        rows = np.random.default_rng([self.seed, self.epoch]).permutation(len(self.lengths))
        stretch = np.cumsum(self.lengths[rows]) // (self.tokens * BATCHES_PER_SORT)
        rows = rows[np.lexsort((-self.lengths[rows], stretch))]
        batches: list[list[int]] = []
        longest = 0
        for row, length in zip(rows.tolist(), self.lengths[rows].tolist(), strict=True):
            longest = max(longest, length)
            if not batches or longest * (len(batches[-1]) + 1) > self.tokens:
                batches.append([])
                longest = length
            batches[-1].append(row)
        return batches


SEQ2SEQ_ENCODING: Final = "1"
"""Part of every cache key: raise it when what `encode_task` writes of the same rows changes."""

ROWS_PER_WRITE: Final = 1000

Builder = Callable[..., Iterator[dict[str, Any]]]
"""(split, task, tokenizer, *, max_length, options) -> rows of input_ids and labels, the target's token ids."""


def encode_task(
    split: Dataset,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    builder: Builder,
    options: Mapping[str, Any],
    *,
    max_length: int,
) -> Dataset:
    """The rows that `builder` makes of a split, in its order: input_ids, attention_mask, labels, length, index.

    length counts source and target. Written once to the cache, by all that decides the rows, and memory-mapped.
    DataError when nothing comes, or a row without a source or a target.
    """
    about = json.dumps([builder.__qualname__, dict(options), max_length, task.kind, task.text, task.labels])
    source = inspect.getsourcefile(inspect.unwrap(builder))
    files = [Path(source)] if source and Path(source).is_file() else []
    key = cache.digest("seq2seq", SEQ2SEQ_ENCODING, about, split._fingerprint, fingerprint(tokenizer), *files)

    def batches() -> Iterator[pa.RecordBatch]:
        return _pair_batches(builder(split, task, tokenizer, max_length=max_length, **options))

    empty = f"{builder.__qualname__} makes no row of the split; it needs at least one example."
    return cache.rows("encoded", key, batches, empty=empty)


def _pair_batches(rows: Iterator[Mapping[str, Any]]) -> Iterator[pa.RecordBatch]:
    index = 0
    while batch := list(islice(rows, ROWS_PER_WRITE)):
        for number, row in enumerate(batch, start=index):
            if not row.get("input_ids") or not row.get("labels"):
                raise DataError(f"row {number} has {dict(row)}; expected input_ids and labels, neither of them empty.")
        sources, targets = ([row[name] for row in batch] for name in ("input_ids", "labels"))
        lengths = [len(source) + len(target) for source, target in zip(sources, targets, strict=True)]
        columns = {
            "input_ids": pa.array(sources, pa.list_(pa.int32())),
            "attention_mask": pa.array([[1] * len(source) for source in sources], pa.list_(pa.int8())),
            "labels": pa.array(targets, pa.list_(pa.int32())),
            "length": pa.array(lengths, pa.int32()),
            "index": pa.array(range(index, index + len(batch)), pa.int64()),
        }
        yield pa.record_batch(columns)
        index += len(batch)


class Seq2SeqCollate:
    """Rows with a target as one batch: what `Collate` makes of the source, and

    labels             int64 (B, M): the targets, padded with -100 to the longest of them
    decoder_input_ids  int64 (B, M): the targets moved one to the right, as `model` begins them

    Rows without `labels` get none. `model` is an encoder-decoder.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
        self.source = Collate(tokenizer)
        self.begin: Any = model.prepare_decoder_input_ids_from_labels

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        batch = self.source([{name: cell for name, cell in row.items() if name != "labels"} for row in rows])
        if "labels" not in rows[0]:
            return batch
        targets = [row["labels"] for row in rows]
        lengths = np.array([len(target) for target in targets])
        labels = np.full((len(rows), lengths.max()), IGNORE_INDEX, np.int64)
        labels[np.arange(lengths.max()) < lengths[:, None]] = np.concatenate(targets)
        batch["labels"] = torch.from_numpy(labels)
        return batch | {"decoder_input_ids": self.begin(labels=batch["labels"])}
