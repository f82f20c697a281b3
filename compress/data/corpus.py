"""Load unlabelled text, and tokenise its documents into blocks and rows. Everything is
streamed."""

from __future__ import annotations

import http.client
import json
import urllib.request
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count, groupby, islice, takewhile
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from compress import io
from compress.data import cache, documents, pydoc, sources
from compress.data.blocks import divide_evenly, id_type, limit_batches, pack, to_batch
from compress.data.encoder import encoder_of
from compress.data.encoding_processes import encode_documents
from compress.data.sentences import (
    SentenceTokens,
    join_lines,
    keep_lines,
    split_lines,
)
from compress.data.templates import Template
from compress.data.text_files import reading
from compress.data.tokenize import RowMapping, fingerprint, row_batches
from compress.errors import DataError, did_you_mean
from compress.progress import Progress

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

CORPUS_ENCODING: Final = "3"
"""Part of every cache key; raise it when `encode_corpus` or `build_rows` writes
something else."""

TextBuilder = Callable[..., Iterator[dict[str, Any]]]
"""(documents, frame, *, max_length, rng, **options) -> rows of input_ids and other
columns, ints per row or token."""

BLOCKS_PER_PART: Final = 50_000
"""Blocks per file (13 MB at 128 tokens each): the work that an interrupted process has
to repeat."""

HASHED_BYTES: Final = 1 << 28
"""Bytes in all up to which files are hashed whole, which takes about a second."""
SAMPLED_BLOCKS: Final = 1024
"""Blocks that are hashed of larger files, at least one per file."""
SAMPLED_BYTES: Final = 1 << 16
"""Bytes of a block that is hashed of a larger file."""

HUB_SECONDS: Final = 10.0
"""Seconds that the hub may take to answer."""


@dataclass(frozen=True)
class Corpus:
    """Describe unlabelled text. Each call of `documents` streams it again; the lines of
    a document are kept.

    `fingerprint` changes when the text does, wherever it is stored.
    """

    name: str
    fingerprint: str
    documents: Callable[[], Iterator[str]]
    parallel: bool = False
    """True if each document is a text and its translation, on two lines."""
    languages: tuple[int, ...] = ()
    """The number of a part's language, or the two numbers of a pair; empty for other
    text."""
    parts: tuple[Corpus, ...] = ()
    """The text of each language, and of each pair of them, if there are several."""
    line_ends: bool = False
    """True if the line ends of a text are read, too; otherwise they are spaces."""

    @classmethod
    def from_parts(cls, name: str, parts: Mapping[str, Corpus]) -> Corpus:
        """Join the texts of languages (`en`) and of pairs (`en-fr`), which are numbered
        in alphabetical order."""
        codes = sorted({code for each in parts for code in each.split("-")})
        numbered = tuple(
            replace(part, languages=tuple(map(codes.index, each.split("-"))))
            for each, part in parts.items()
        )
        fingerprint = cache.digest(
            "languages", *parts, *(part.fingerprint for part in numbered)
        )
        return cls(name, fingerprint, partial(_read_all, numbered), parts=numbered)

    @property
    def language_count(self) -> int:
        """The number of languages; 0 if they are not told apart."""
        return max(
            (number + 1 for part in self.parts for number in part.languages), default=0
        )

    def with_line_ends(self, kept: bool = True) -> Corpus:
        """Return the corpus for a causal language model, whose texts are the documents
        unchanged, if the line ends are to be `kept`; translations are read as
        before."""
        if not kept:
            return self
        return replace(
            self,
            fingerprint=cache.digest("line ends", self.fingerprint),
            parts=tuple(part.with_line_ends() for part in self.parts),
            line_ends=True,
        )

    def part(self, held_out: bool, every: int = 50) -> Corpus:
        """Keep only the held-out documents, whose number, from 1, is a multiple of
        `every`; or only the others.

        A corpus too small for two held-out documents holds out two, evenly spaced; one
        of two or three documents holds out one. Raises DataError for a single document.
        Each language has its own held-out documents.
        """
        name = f"{self.name} ({'held out' if held_out else 'without what is held out'})"
        if self.parts:
            parts = tuple(part.part(held_out, every) for part in self.parts)
            fingerprint = cache.digest("parts", *(part.fingerprint for part in parts))
            return replace(
                self,
                name=name,
                fingerprint=fingerprint,
                documents=partial(_read_all, parts),
                parts=parts,
            )
        count = sum(1 for _ in islice(self.documents(), 2 * every))
        if count < 2:
            raise DataError(
                f"{self.name}: has only one document, so none can be held out. "
                "Separate documents by blank lines, or add more text."
            )
        every = min(every, max(2, count // 2))
        fingerprint = cache.digest("part", self.fingerprint, str(held_out), str(every))

        def documents() -> Iterator[str]:
            return (
                document
                for number, document in enumerate(self.documents(), start=1)
                if (number % every == 0) is held_out
            )

        return replace(self, name=name, fingerprint=fingerprint, documents=documents)


def _read_all(parts: Sequence[Corpus]) -> Iterator[str]:
    return chain.from_iterable(part.documents() for part in parts)


def load_corpus(source: str) -> Corpus:
    """Open `pydoc`, a text, jsonl or parquet file, a Wikipedia-extractor dump or its
    tar, a folder of these, a hub id.

    Documents are separated by blank lines in plain text; they are the articles of a
    dump, and the column `text` of other files. A hub data set (`owner/name`,
    `owner/name:configuration`) is streamed from its train split. The documents of
    parallel text (see `documents.read_parallel`) are pairs. The languages of a folder
    (see `documents.find_languages`) are read one after another. DataError, within 30
    seconds, if the source does not exist or has no text.
    """
    kind, files = sources.find_corpus(source)
    if kind == "pydoc":
        corpus = Corpus("pydoc", pydoc.fingerprint(), pydoc.documents)
    elif kind == "hub":
        corpus = _hub(source)
    elif kind == "languages":
        path = sources.local(source)
        parts = {
            name: load_corpus(str(part))
            for name, part in documents.find_languages(path).items()
        }
        corpus = Corpus.from_parts(path.resolve().name, parts)
    else:
        path = sources.local(source)
        parallel = kind == "parallel"
        names = [
            str(file.relative_to(path)) if path.is_dir() else file.name
            for file in files
        ]
        with reading(path):
            fingerprint = _hash_files(names, files)
        read = documents.read_parallel if parallel else documents.read
        corpus = Corpus(
            path.name if parallel else path.resolve().name,
            fingerprint,
            partial(read, files),
            parallel,
        )
    if not any(document.strip() for document in corpus.documents()):
        raise DataError(f"{source}: has no text.")
    return corpus


def _hash_files(names: Sequence[str], files: Sequence[Path]) -> str:
    """Hash files with their names. Above HASHED_BYTES, only sizes, modification times
    and evenly spaced blocks are hashed: a change elsewhere shows in the time."""
    facts = [file.stat() for file in files]
    if sum(fact.st_size for fact in facts) <= HASHED_BYTES:
        return cache.digest("files", *names, *files)
    blocks = max(1, SAMPLED_BLOCKS // len(files))
    words = [io.hash_sample(path, blocks, SAMPLED_BYTES) for path in files]
    times = [str(fact.st_mtime_ns) for fact in facts]
    return cache.digest("sampled", *names, *words, *times)


def _hub(source: str) -> Corpus:
    from datasets import config
    from huggingface_hub import get_token

    name, _, configuration = source.partition(":")
    token = get_token()
    request = urllib.request.Request(f"{config.HF_ENDPOINT}/api/datasets/{name}")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        if config.HF_HUB_OFFLINE:
            raise ConnectionError("HF_HUB_OFFLINE is set")
        # not the hub's own client, which retries for minutes
        with urllib.request.urlopen(request, timeout=HUB_SECONDS) as answer:
            revision = str(json.load(answer)["sha"])
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise DataError(
            f"{source}: no such file or folder, and the hub does not provide such a "
            f"data set ({error}). Use a text file or folder, a Wikipedia-extractor "
            "dump, or the embedded corpus 'pydoc'."
        ) from error
    fingerprint = cache.digest("hub", name, configuration, revision)
    return Corpus(
        source, fingerprint, partial(_stream, name, configuration or None, revision)
    )


def _stream(name: str, configuration: str | None, revision: str) -> Iterator[str]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        for row in load_dataset(
            name, configuration, split="train", revision=revision, streaming=True
        ):
            if not isinstance(row.get("text"), str):
                raise DataError(
                    f"{name}: no column 'text' of texts.{did_you_mean('text', row)}"
                )
            yield row["text"]
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise DataError(f"{name}: cannot be streamed from the hub: {error}") from error


@dataclass(frozen=True)
class Document:
    """Hold the token ids of each sentence of a document, without special tokens, and
    its number in the corpus.

    There is at least one sentence, and none is empty. A `parallel` document has two: a
    text and its translation. `languages` has the number of its language, or of both
    languages of a pair, if the corpus tells languages apart.
    """

    number: int
    sentences: list[list[int]]
    parallel: bool = False
    languages: tuple[int, ...] = ()


def iterate_documents(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Document]:
    """Yield the documents that have tokens, in order, holding the tokens of only one
    tokenizer call in memory.

    Joined, the tokens of a document's sentences equal the tokens of the document as
    running text, or as it is: see `compress.data.sentences`.
    """
    found = chain.from_iterable(
        zip(batch.documents.tolist(), batch.tokens.rows(), strict=True)
        for batch in _encode(corpus, tokenizer)
    )
    for number, group in groupby(found, key=itemgetter(0)):
        sentences = [ids for _, (ids, _) in group if ids]
        if len(sentences) > corpus.parallel:  # both, of a parallel document
            yield Document(number, sentences, corpus.parallel, corpus.languages)


def encode_corpus(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    *,
    limit_tokens: int | None = None,
) -> Dataset:
    """Write a corpus as blocks of at most `max_length` tokens, including special
    tokens; columns as in `encode`, but without a mask, and without token types that are
    all 0: both follow from the length.

    Whole sentences are packed greedily; only one longer than a block is cut. A block
    never crosses documents: the column `document` has its number in the corpus, and
    blocks of a document follow each other. The block that reaches `limit_tokens` is the
    last. Streamed to the cache once, keyed by the fingerprints of corpus and tokenizer,
    and memory-mapped; an interrupted attempt is resumed.
    """
    around = Template.from_tokenizer(tokenizer, 1).surroundings()
    room = max_length - around.size
    if room < 1:
        raise DataError(
            f"max_length {max_length}: too short for a block of {around.size} "
            "special tokens and text."
        )
    kind = id_type(tokenizer)

    def make(folder: Path) -> None:
        """Write the first missing part of `folder`, and all after it."""
        paths = (folder / f"{number:05d}.arrow" for number in count())
        done = [
            cache.table(path).select(["length", "document"])
            for path in takewhile(Path.exists, paths)
        ]
        blocks = tokens = document = of_document = 0
        if done:
            table = pa.concat_tables(done)
            blocks = len(table)
            tokens = pc.sum(table["length"]).as_py()
            document = table["document"][-1].as_py()
            of_document = pc.sum(pc.equal(table["document"], document)).as_py()
        found = pack(_encode(corpus, tokenizer, start=document), room)
        batches = (to_batch(block, owners, around, kind) for block, owners in found)
        with closing(
            limit_batches(
                batches,
                limit_tokens,
                f"encoding {corpus.name}",
                skip=of_document,
                rows=blocks,
                tokens=tokens,
            )
        ) as limited:
            parts = divide_evenly(limited, BLOCKS_PER_PART)
            for number, part in enumerate(parts, start=len(done)):
                with cache.part(folder, f"{number:05d}.arrow") as path:
                    cache.write(path, [part])
        if not (folder / "00000.arrow").exists():
            raise DataError(
                f"{corpus.name}: no tokens; the tokenizer returns none for its text."
            )

    key = cache.digest(
        CORPUS_ENCODING,
        corpus.fingerprint,
        fingerprint(tokenizer),
        str(max_length),
        str(limit_tokens),
    )
    return cache.dataset(
        cache.load_or_create(cache.home() / "corpora" / key, make), key
    )


def _encode(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, *, start: int = 0
) -> Iterator[SentenceTokens]:
    """Encode the sentences of a corpus from the document `start` on."""
    documents = islice(enumerate(corpus.documents()), start, None)
    read = keep_lines if corpus.line_ends else join_lines
    if corpus.parallel:
        read = split_lines
    return encode_documents(documents, encoder_of(tokenizer), read=read)


def build_rows(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    builder: TextBuilder,
    name: str,
    options: Mapping[str, Any],
    *,
    max_length: int,
    seed: int,
    limit_tokens: int | None = None,
) -> Dataset:
    """Write the rows that `builder`, called `name`, makes from a corpus, with length
    and index added.

    The row that reaches `limit_tokens` is the last. A corpus of several languages
    yields rows of each part, up to an equal share of the limit, with the columns `part`
    (its number) and `paired` (1 for translations). Streamed to the cache once, keyed by
    corpus, tokenizer, the file of the builder, its options, length, seed and limit;
    then memory-mapped. DataError for no rows, or an invalid one.
    """
    settings = json.dumps(
        [dict(options), max_length, seed, limit_tokens], sort_keys=True
    )
    key = cache.digest(
        "built",
        CORPUS_ENCODING,
        name,
        settings,
        corpus.fingerprint,
        fingerprint(tokenizer),
        *io.source_files(builder),
    )
    what = f"{name} of {corpus.name}"

    parts = corpus.parts or (corpus,)
    share = None if limit_tokens is None else -(-limit_tokens // len(parts))

    def rows() -> Iterator[RowMapping]:
        from compress.data.masking import Frame  # torch

        rng = np.random.default_rng(seed)
        frame = Frame.from_tokenizer(tokenizer)
        columns: dict[str, bool] = {}
        for number, part in enumerate(parts):
            marks = (
                {"part": number, "paired": int(part.parallel)} if corpus.parts else {}
            )
            built = builder(
                iterate_documents(part, tokenizer),
                frame,
                max_length=max_length,
                rng=rng,
                **options,
            )
            yield from _limit(
                _check_rows(built, columns, max_length, what, marks),
                share,
                f"rows of {what}",
            )

    empty = (
        f"{corpus.name}: {name} makes no rows from it. Add text, or use a larger "
        "max_length."
    )
    kind = id_type(tokenizer)

    def batches() -> Iterator[pa.RecordBatch]:
        return row_batches(rows(), kind=kind, masked=False)

    return cache.rows("corpora", key, batches, empty=empty)


def _check_rows(
    rows: Iterator[RowMapping],
    is_list: dict[str, bool],
    max_length: int,
    what: str,
    marks: Mapping[str, int],
) -> Iterator[RowMapping]:
    """Check rows against the columns of the first row, kept in `is_list` (column ->
    whether it holds lists), and add `marks`."""
    for number, row in enumerate(rows):
        if not is_list:
            is_list |= {column: isinstance(cell, list) for column, cell in row.items()}
        _check_row(row, is_list, max_length, f"{what}, row {number}")
        yield {**row, **marks}


def _check_row(
    row: RowMapping, is_list: Mapping[str, bool], max_length: int, where: str
) -> None:
    """Raise DataError unless a row has the columns of the first row, and its lists one
    number per token."""
    if row.keys() != is_list.keys() or "input_ids" not in row:
        raise DataError(
            f"{where}: has {', '.join(row)}; expected input_ids and the columns of the "
            "first row."
        )
    length = len(row["input_ids"])
    if not 0 < length <= max_length:
        raise DataError(
            f"{where}: {length} tokens; expected 1 to max_length = {max_length}."
        )
    for name in row:
        if isinstance(row[name], list) != is_list[name] or (
            is_list[name] and len(row[name]) != length
        ):
            raise DataError(
                f"{where}: {name} must be one number, or a list of {length}, one per "
                "token."
            )


def _limit(
    rows: Iterator[RowMapping], limit_tokens: int | None, what: str
) -> Generator[RowMapping, None, None]:
    """Yield rows, with a progress bar, up to the one that reaches the limit."""
    tokens = 0
    with Progress(what, limit_tokens, "tokens") as bar:
        while (limit_tokens is None or tokens < limit_tokens) and (
            row := next(rows, None)
        ) is not None:
            yield row
            tokens += len(row["input_ids"])
            bar.advance(len(row["input_ids"]))
