"""Unlabelled text: where its documents come from, and how they become blocks of tokens. Nothing is held in memory."""

from __future__ import annotations

import http.client
import json
import urllib.request
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count, islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from compress.data import cache, documents, paths
from compress.data.resources import pydoc
from compress.data.sentences import Template, tokenised
from compress.data.text_files import reading
from compress.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

ENCODING: Final = "1"
"""Part of every cache key: raise it when what `encode_corpus` writes changes."""

BLOCKS_PER_WRITE: Final = 1000
WRITES_PER_PART: Final = 50
"""Writes in one file: about 40 MB of blocks of 128 tokens, which a process that is stopped has to make again."""

HUB_SECONDS: Final = 10.0
"""How long the hub may take to answer at all."""


@dataclass(frozen=True)
class Corpus:
    """Text without labels. Each call of `documents` starts anew and streams; a document's lines are kept.

    `fingerprint` changes when the text does, wherever it lies.
    """

    name: str
    fingerprint: str
    documents: Callable[[], Iterator[str]]
    parallel: bool = False
    """Whether each document is a text and its translation, a line each."""

    def part(self, held_out: bool, every: int = 50) -> Corpus:
        """Only the documents held out, or all others: those whose number from 1 is a multiple of `every`.

        A corpus too small for two of these holds out two at equal distance, one of two or three documents only one.
        DataError for a single document.
        """
        count = sum(1 for _ in islice(self.documents(), 2 * every))
        if count < 2:
            raise DataError(
                f"{self.name}: one document, of which none can be held out. Separate its documents by blank lines, "
                "or give more text."
            )
        every = min(every, max(2, count // 2))
        name = f"{self.name} ({'held out' if held_out else 'without what is held out'})"
        fingerprint = cache.digest("part", self.fingerprint, str(held_out), str(every))
        return replace(self, name=name, fingerprint=fingerprint, documents=partial(_part, self, held_out, every))


def _part(corpus: Corpus, held_out: bool, every: int) -> Iterator[str]:
    for number, document in enumerate(corpus.documents(), start=1):
        if (number % every == 0) is held_out:
            yield document


def load_corpus(source: str) -> Corpus:
    """`pydoc`; a text, jsonl or parquet file, a Wikipedia-extractor dump or its tar, a folder of these; or a hub id.

    Documents are separated by blank lines in plain text, are the articles of a dump, the column `text` of the others.
    A hub data set (`owner/name`, `owner/name:configuration`) is streamed from its train split. Parallel text is what
    `data.parallel` reads; its documents are pairs. DataError, within 30 seconds, where there is no such source or no
    text in it.
    """
    kind, path = paths.corpus_kind(source), paths.local(source)
    match kind:
        case "pydoc":
            corpus = Corpus("pydoc", pydoc.fingerprint(), pydoc.documents)
        case "parallel":
            pair = documents.find_parallel(path)
            corpus = Corpus(path.name, _contents(path, pair), partial(documents.read_parallel, pair), parallel=True)
        case "local":
            corpus = _local(path)
        case "hub":
            corpus = _hub(source)
    if not any(document.strip() for document in corpus.documents()):
        raise DataError(f"{source}: there is no text in it.")
    return corpus


def _local(path: Path) -> Corpus:
    with reading(path):
        files = documents.find(path)
    return Corpus(path.resolve().name, _contents(path, files), partial(documents.read, files))


def _contents(path: Path, files: Sequence[Path]) -> str:
    names = [str(file.relative_to(path)) if path.is_dir() else file.name for file in files]
    with reading(path):
        return cache.digest("files", *names, *files)


def _hub(source: str) -> Corpus:
    name, _, configuration = source.partition(":")
    try:
        revision = _revision(name)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise DataError(
            f"{source}: no such file or folder here, and the hub does not give such a data set ({error}). "
            "Instead: a text file or folder, a Wikipedia-extractor dump, or the embedded corpus 'pydoc'."
        ) from error
    fingerprint = cache.digest("hub", name, configuration, revision)
    return Corpus(source, fingerprint, partial(_streamed, name, configuration or None, revision))


def _revision(name: str) -> str:
    """The commit of a data set's main branch. Asked for plainly: the hub's own client retries for minutes."""
    from datasets import config
    from huggingface_hub import get_token

    if config.HF_HUB_OFFLINE:
        raise ConnectionError("HF_HUB_OFFLINE forbids asking it")
    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"{config.HF_ENDPOINT}/api/datasets/{name}", headers=headers)
    with urllib.request.urlopen(request, timeout=HUB_SECONDS) as answer:
        return str(json.load(answer)["sha"])


def _streamed(name: str, configuration: str | None, revision: str) -> Iterator[str]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        for row in load_dataset(name, configuration, split="train", revision=revision, streaming=True):
            if not isinstance(row.get("text"), str):
                raise DataError(f"{name}: no text in a column 'text'.{did_you_mean('text', row)}")
            yield row["text"]
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise DataError(f"{name}: cannot be streamed from the hub: {error}") from error


def encode_corpus(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, max_length: int, *, limit_tokens: int | None = None
) -> Dataset:
    """The corpus as blocks of at most `max_length` tokens, special tokens included; columns as `batches.encode` writes.

    Whole sentences are packed greedily; only one longer than a block is cut. A block never crosses documents: the
    column `document` (number in the corpus) is equal for the blocks of one, which follow each other. With
    `limit_tokens` the block that reaches it is the last. Streamed once to the cache, by the fingerprints of corpus and
    tokenizer, and memory-mapped.
    """
    from compress.data.collate import fingerprint

    key = cache.digest(ENCODING, corpus.fingerprint, fingerprint(tokenizer), str(max_length), str(limit_tokens))
    entry = cache.home() / "corpora" / key
    cache.cached(entry, lambda folder: _encode(folder, corpus, tokenizer, max_length, limit_tokens))
    return cache.dataset(entry, key)


def _encode(
    folder: Path, corpus: Corpus, tokenizer: PreTrainedTokenizerBase, max_length: int, limit_tokens: int | None
) -> None:
    """Write the parts of an encoded corpus that `folder` lacks: the first missing one, and all behind it."""
    parts = [folder / f"{number:05d}.arrow" for number in range(len(list(folder.glob("*.arrow"))) + 1)]
    whole = list(takewhile(Path.exists, parts))
    encoded = _encoded(corpus, tokenizer, max_length, limit_tokens, done=_Done.of(whole))
    with closing(encoded) as batches:  # its progress bar ends before an error is told
        for number in count(len(whole)):
            some = list(islice(batches, 1))
            if not some:
                break
            with cache.part(folder, f"{number:05d}.arrow") as path:
                cache.write(path, chain(some, islice(batches, WRITES_PER_PART - 1)))
    if not (folder / "00000.arrow").exists():
        raise DataError(f"{corpus.name}: no token to learn from; the tokenizer makes nothing of its text.")


@dataclass(frozen=True)
class _Done:
    """What the finished parts hold: blocks, tokens, the last document, and how many of the blocks are its."""

    blocks: int = 0
    tokens: int = 0
    document: int = 0
    of_document: int = 0

    @classmethod
    def of(cls, parts: Sequence[Path]) -> _Done:
        if not parts:
            return cls()
        tables = [cache.table(path).select(["length", "document"]) for path in parts]
        table = pa.concat_tables(tables)
        document = table["document"][-1].as_py()
        of_document = pc.sum(pc.equal(table["document"], document)).as_py()
        return cls(len(table), pc.sum(table["length"]).as_py(), document, of_document)


def _encoded(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, max_length: int, limit_tokens: int | None, *, done: _Done
) -> Generator[pa.RecordBatch, None, None]:
    """Yield the blocks behind those that are done already."""
    from datasets.utils import tqdm

    frame = Template.of(tokenizer, 1)
    if max_length <= frame.size:
        raise DataError(f"max_length {max_length}: a block needs {frame.size} special tokens and room for text.")
    blocks = islice(_blocks(corpus, tokenizer, max_length - frame.size, done.document), done.of_document, None)
    index, tokens = done.blocks, done.tokens
    with tqdm(desc=f"Encoding {corpus.name}", unit=" tokens", unit_scale=True, initial=tokens) as progress:
        while (limit_tokens is None or tokens < limit_tokens) and (batch := list(islice(blocks, BLOCKS_PER_WRITE))):
            ends = tokens + np.cumsum([len(block) + frame.size for _, block in batch])
            if limit_tokens is not None:
                batch = batch[: int(np.searchsorted(ends, limit_tokens)) + 1]
            yield _record_batch(batch, frame, index)
            index += len(batch)
            progress.update(int(ends[len(batch) - 1]) - tokens)
            tokens = int(ends[len(batch) - 1])


def _record_batch(blocks: Sequence[tuple[int, list[int]]], frame: Template, index: int) -> pa.RecordBatch:
    lengths = np.array([len(block) + frame.size for _, block in blocks], np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    before, after = frame.ids
    flat = chain.from_iterable(chain(before, block, after) for _, block in blocks)
    columns = {
        "input_ids": np.fromiter(flat, np.int32, offsets[-1]),
        "attention_mask": np.ones(offsets[-1], np.int8),
    }
    if frame.types is not None and frame.text_types is not None:
        columns["token_type_ids"] = types = np.full(offsets[-1], frame.text_types[0], np.int8)
        for place, kind in enumerate(frame.types[0]):
            types[offsets[:-1] + place] = kind
        for place, kind in enumerate(reversed(frame.types[1]), start=1):
            types[offsets[1:] - place] = kind
    lists = {name: pa.ListArray.from_arrays(offsets, values) for name, values in columns.items()}
    numbers = pa.array(range(index, index + len(blocks)), pa.int64())
    owners = pa.array([document for document, _ in blocks], pa.int64())
    return pa.record_batch(lists | {"length": pa.array(lengths), "index": numbers, "document": owners})


def _blocks(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, room: int, start: int
) -> Iterator[tuple[int, list[int]]]:
    """Yield document number and tokens, without special ones, of each block from the document `start` on."""
    block: list[int] = []
    owner = 0
    for number, ids in tokenised(corpus, tokenizer, start=start):
        if block and (number != owner or len(block) + len(ids) > room):
            yield owner, block
            block = []
        owner = number
        cut = max(0, (len(ids) - 1) // room * room)
        yield from ((number, ids[start : start + room]) for start in range(0, cut, room))
        block = block + ids[cut:]
    if block:
        yield owner, block
