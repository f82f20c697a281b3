"""Find candidates to replace each word of a text, by a masked language model and by
word vectors, and cache them.

Jiao et al. 2020, arXiv:1909.10351, Algorithm 1, lines 4-9. `augment` draws from them
and lists the deviations.

Shapes: B passes, L tokens, R masked positions, V vocabulary, M candidates, W words that
are looked up, P words of a pool, D width of a word vector.
"""

import copy
import hashlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.data import cache, tokenize
from compress.data.masking import Frame, Words
from compress.errors import DataError
from compress.models import precision
from compress.models.signals import has_lm_head, read
from compress.progress import Progress
from compress.slicing.shape import positions

WORDS_PER_BATCH: Final = 512
GLOVE_ROWS: Final = 100_000
"""Rows of a vector file that are read, the most frequent words, as in the authors'
code."""

PLAIN_WORD: Final = re.compile(r"[a-z]+")


def nearest(
    occurring: Collection[str],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    most: int,
    file: str | None,
    single_tokens: bool = False,
) -> dict[str, list[str]]:
    """Find the `most` words with the largest cosine to each occurring word of several
    tokens, or also of one token.

    Vectors come from a GloVe text file, or are the means of the tokens' input
    embeddings, for the occurring words and those of the vocabulary. Only words of
    letters a-z that have a vector are included. Raises DataError.
    """
    words = {word for word in occurring if PLAIN_WORD.fullmatch(word)}
    if not words:
        return {}
    if file:
        pool, vectors_PD = _glove(Path(file))
    else:
        vocabulary = {
            str(tokenizer.decode([token])).strip().lower()
            for token in range(len(tokenizer))
        }
        pool = sorted(
            words | {word for word in vocabulary if PLAIN_WORD.fullmatch(word)}
        )
        vectors_PD = _embed_words(pool, model, tokenizer)
    place = {word: at for at, word in enumerate(pool)}
    queries = sorted(words & place.keys())
    if queries and not single_tokens:
        queries = [
            word
            for word, ids in zip(queries, _pieces(queries, tokenizer), strict=True)
            if len(ids) > 1
        ]
    vectors_PD = normalize(vectors_PD, dim=-1)
    near = dict[str, list[str]]()
    for start in range(0, len(queries), WORDS_PER_BATCH):
        batch = queries[start : start + WORDS_PER_BATCH]
        cosine_WP = vectors_PD[[place[word] for word in batch]] @ vectors_PD.T
        best_WM = cosine_WP.topk(min(most + 1, len(pool))).indices.tolist()
        for word, best in zip(batch, best_WM, strict=True):
            near[word] = [pool[at] for at in best if pool[at] != word][:most]
    return near


def _pieces(
    words: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> list[list[int]]:
    """Return the token ids of words inside a text, that is after a space."""
    ids: list[list[int]] = tokenizer(
        [f" {word}" for word in words], add_special_tokens=False
    )["input_ids"]
    return ids


@torch.inference_mode()
def _embed_words(
    words: Sequence[str], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Tensor:
    """Sum the input embeddings of each word's tokens, (P, D): the direction is that of
    their mean."""
    table: Any = model.get_input_embeddings()
    pieces = _pieces(words, tokenizer)
    flat = torch.tensor(
        [token for ids in pieces for token in ids], device=table.weight.device
    )
    owner = torch.repeat_interleave(
        torch.arange(len(words)), torch.tensor([len(ids) for ids in pieces])
    )
    total_PD = torch.zeros(len(words), table.weight.shape[1])
    return total_PD.index_add_(0, owner, table.weight[flat].float().cpu())


def _glove(path: Path) -> tuple[list[str], Tensor]:
    """Read the words and vectors of a text file with a word and its numbers on each
    line. Raises DataError."""
    words = []
    rows = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(islice(file, GLOVE_ROWS), start=1):
                word, *numbers = line.rstrip("\n").split(" ")
                if PLAIN_WORD.fullmatch(word):
                    words.append(word)
                    rows.append(np.array(numbers, np.float32))
                    if len(rows[-1]) != len(rows[0]):
                        raise DataError(
                            f"{path}, line {number}: {len(rows[-1])} numbers; "
                            f"expected {len(rows[0])}, as on other lines"
                        )
    except OSError as error:
        raise DataError(
            f"{path}: word vectors cannot be read: {error.strerror}"
        ) from error
    except ValueError as error:
        raise DataError(
            f"{path}, line {number}: expected a word and its numbers, separated by "
            "spaces"
        ) from error
    if not words:
        raise DataError(
            f"{path}: contains no words; expected a word and its numbers on each line, "
            "as GloVe has them"
        )
    return words, torch.from_numpy(np.stack(rows))


REPLACEMENTS_ENCODING: Final = "2"
"""Part of every cache key: raise it when `find_candidates` writes other rows for the
same texts."""

TOKENS_READ: Final = 128
"""Tokens of a text that are read; words after them are unchanged."""
TEXTS_PER_WRITE: Final = 4096
TOKENS_PER_BATCH: Final = 8192

WORD: Final = re.compile(r"[^\W_]+")

_NEGATED = (
    *("ai", "are", "could", "did", "do", "does", "had", "has", "have", "is"),
    *("might", "must", "need", "sha", "should", "was", "were", "wo", "would"),
)
CONTRACTED: Final = frozenset(f"{verb}n" for verb in _NEGATED) | {
    "d",
    "ll",
    "m",
    "ma",
    "o",
    "s",
    "t",
    "ve",
    "y",
}
"""The parts of contractions that are split at their apostrophes."""
MORE_STOP_WORDS: Final = frozenset({"did", "does", "doing", "having", "just", "theirs"})
"""The rest of the authors' stop words that scikit-learn's list lacks."""


@dataclass(frozen=True)
class ReplacedWord:
    """A word at text[start:end]; `token`: its index among the text's tokens, None if it
    has several tokens."""

    start: int
    end: int
    token: int | None


@dataclass(frozen=True)
class CandidateOptions:
    """Configure the search for candidates.

    most      candidates per word
    vectors   a GloVe file; None: the model's embeddings
    masked    mask words of a single token, `together` of a text in one pass, with or
              without the original text `beside` it
    """

    most: int
    vectors: str | None = None
    masked: bool = True
    together: int = 1
    beside: bool = True


def find_candidates(
    texts: pa.Array,
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    options: CandidateOptions,
) -> pa.Table:
    """Return one row for each of `texts`: `starts` and `ends` of the words that have
    candidates, and `candidates`.

    They are computed once for the same texts, model and options, then memory-mapped.
    Raises DataError for a model or tokenizer that cannot fill in masks, and for an
    invalid file of vectors.
    """
    if not tokenizer.is_fast:
        raise DataError(
            f"{type(tokenizer).__name__} does not report token offsets: use a fast "
            "tokenizer"
        )
    if options.masked and (tokenizer.mask_token_id is None or not has_lm_head(lm)):
        raise DataError(
            f"{type(lm).__name__} cannot fill in masks: use a model with a masked "
            "language model's head"
        )
    if options.vectors and not Path(options.vectors).is_file():
        raise DataError(f"{options.vectors}: no such file of word vectors")
    weights = hashlib.sha256()
    words = hashlib.sha256()
    for parameter in lm.parameters():
        weights.update(
            parameter.detach()
            .cpu()
            .flatten()
            .contiguous()
            .view(torch.uint8)
            .numpy()
            .data
        )
    for text in texts:
        words.update(text.as_py().encode() + b"\0")
    parts = [
        weights.hexdigest(),
        words.hexdigest(),
        tokenize.fingerprint(tokenizer),
        repr(options),
    ]
    key = cache.digest(
        REPLACEMENTS_ENCODING,
        *parts,
        *([Path(options.vectors)] if options.vectors else []),
    )
    entry = cache.load_or_create(
        cache.home() / "candidates" / key,
        lambda folder: cache.write(
            folder / "rows.arrow", _find(texts, lm, tokenizer, options)
        ),
    )
    return cache.table(entry / "rows.arrow")


def _find(
    texts: pa.Array,
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    options: CandidateOptions,
) -> Iterator[pa.RecordBatch]:
    masks = _Masks.from_model(lm, tokenizer, options) if options.masked else None
    occurring = {word.lower() for text in texts for word in WORD.findall(text.as_py())}
    near = nearest(
        occurring,
        lm,
        tokenizer,
        most=options.most,
        file=options.vectors,
        single_tokens=not options.masked,
    )
    with Progress("words in place of words", len(texts), "texts") as bar:
        for start in range(0, len(texts), TEXTS_PER_WRITE):
            chunk = texts[start : start + TEXTS_PER_WRITE].to_pylist()
            ids, words = _words(chunk, tokenizer, masks.room if masks else TOKENS_READ)
            tokens = [
                [word.token for word in each if word.token is not None]
                for each in words
            ]
            filled = masks.fill(ids, tokens) if masks else {}
            rows = list[list[tuple[int, int, list[str]]]]()
            for at, (text, each) in enumerate(zip(chunk, words, strict=True)):
                rows.append([])
                for word in each:
                    if masks and word.token is not None:
                        candidates = filled[at, word.token]
                    else:
                        candidates = near.get(text[word.start : word.end].lower(), [])
                    if candidates:
                        rows[-1].append((word.start, word.end, candidates))
            kinds = (pa.int32(), pa.int32(), pa.list_(pa.string()))
            columns = [
                pa.array([[word[n] for word in row] for row in rows], pa.list_(kind))
                for n, kind in enumerate(kinds)
            ]
            yield pa.record_batch(columns, names=["starts", "ends", "candidates"])
            bar.advance(len(chunk))


def _words(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, room: int
) -> tuple[list[list[int]], list[list[ReplacedWord]]]:
    """Return the first `room` token ids of each text (the last, if its tokenizer
    truncates the beginning), and the words among them that may be replaced."""
    from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

    stop_words = ENGLISH_STOP_WORDS | CONTRACTED | MORE_STOP_WORDS
    encoded = tokenizer(
        list(texts),
        add_special_tokens=False,
        truncation=True,
        max_length=room,
        return_offsets_mapping=True,
    )
    words = list[list[ReplacedWord]]()
    for text, spans in zip(texts, encoded["offset_mapping"], strict=True):
        # sentencepiece includes the space before a word
        exact = {
            (start + len(s) - len(s.lstrip()), end): at
            for at, (start, end) in enumerate(spans)
            if (s := text[start:end])
        }
        first, limit = (spans[0][0], spans[-1][1]) if spans else (0, 0)
        for_text = []
        for match in WORD.finditer(text):
            word = match[0].lower()
            inside = first <= match.start() and match.end() <= limit
            if inside and PLAIN_WORD.fullmatch(word) and word not in stop_words:
                for_text.append(ReplacedWord(*match.span(), exact.get(match.span())))
        words.append(for_text)
    return encoded["input_ids"], words


@dataclass(frozen=True)
class _Masks:
    """Fill in words by a masked language model, whose linear layers are in bfloat16 if
    that is faster here."""

    lm: Any
    words: Words
    frame: Frame
    options: CandidateOptions
    names: Mapping[int, str]
    bf16: bool

    @classmethod
    def from_model(
        cls,
        lm: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        options: CandidateOptions,
    ) -> "_Masks":
        bf16 = precision.choose("auto") == "bf16"
        if bf16:
            lm = copy.deepcopy(lm)
            precision.cast_linear_layers(lm)
        words = Words.from_tokenizer(tokenizer)
        tokens = (words.starts_V & ~words.special_V).nonzero().flatten().tolist()
        names = {
            token: name
            for token in tokens
            if (name := str(tokenizer.decode([token])).strip())
        }
        return cls(
            lm.eval(), words, Frame.from_tokenizer(tokenizer), options, names, bf16
        )

    @property
    def room(self) -> int:
        """The number of tokens of a text that fit the model."""
        known = positions(self.lm)
        beside = self.options.beside
        return (
            TOKENS_READ
            if known is None
            else min(TOKENS_READ, (known - self.frame.room(beside)) // (1 + beside))
        )

    def fill(
        self, texts: Sequence[list[int]], tokens: Sequence[list[int]]
    ) -> dict[tuple[int, int], list[str]]:
        """Return {(text, token): candidate words} for the given tokens of each text,
        each masked once.

        Words that are masked in one pass are not neighbours if there are several
        passes.
        """
        passes = [
            (at, places[first::stride])
            for at, places in enumerate(tokens)
            if places
            for stride in [-(-len(places) // self.options.together)]
            for first in range(stride)
        ]
        passes.sort(key=lambda each: -len(texts[each[0]]))  # the longest first
        found = dict[tuple[int, int], list[str]]()
        remaining = iter(passes)
        beside = self.options.beside
        for first in remaining:
            length = self.frame.room(beside) + (1 + beside) * len(texts[first[0]])
            batch = [first, *islice(remaining, max(0, TOKENS_PER_BATCH // length - 1))]
            best_RM = iter(self._best(batch, texts).tolist())
            for at, places in batch:
                for place in places:
                    found[at, place] = [
                        self.names[token]
                        for token in next(best_RM)
                        if token in self.names
                    ]
        return found

    @torch.inference_mode()
    def _best(
        self, batch: Sequence[tuple[int, list[int]]], texts: Sequence[list[int]]
    ) -> Tensor:
        """Return token ids (R, M), most probable first; R is in the order of the passes
        and of the places in each."""
        rows = []
        beside = self.options.beside
        for at, places in batch:
            masked = list(texts[at])
            for place in places:
                masked[place] = self.words.need_mask("augmentation")
            rows.append(
                self.frame.pair(masked, texts[at])
                if beside
                else self.frame.single(masked)
            )
        before = len((self.frame.paired if beside else self.frame.alone).ids[0])
        device = next(self.lm.parameters()).device
        padding = {"input_ids": self.words.pad, "attention_mask": 0}
        columns = {"attention_mask": [[1] * len(row["input_ids"]) for row in rows]}
        columns |= {name: [row[name] for row in rows] for name in rows[0]}
        inputs = {
            name: pad_sequence(
                [torch.tensor(row) for row in column], True, padding.get(name, 0)
            ).to(device)
            for name, column in columns.items()
        }
        at_BL = torch.zeros_like(inputs["input_ids"], dtype=torch.bool)
        for row, (_, places) in enumerate(batch):
            at_BL[row, torch.tensor(places) + before] = True
        with torch.autocast(device.type, torch.bfloat16, enabled=self.bf16):
            logits_RV = read(self.lm, inputs, frozenset({"logits"}), at_BL=at_BL).logits
        assert logits_RV is not None
        return (
            logits_RV[:, : self.words.size]
            .topk(min(self.options.most, self.words.size))
            .indices
        )
