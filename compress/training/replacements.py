"""Find what each word of a text may be replaced by, from a masked language model and from word vectors; kept on disk.

Jiao et al. 2020, arXiv:1909.10351, Algorithm 1, lines 4-9. `augment` draws from it and states what differs.

Shapes: B passes, L tokens, R masked positions, V vocabulary, M candidates, W words asked about, P words of a pool,
D width of a word vector.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.nn.utils.rnn import pad_sequence

from compress.data import cache, tokenize
from compress.data.masking import Frame, Words
from compress.errors import DataError
from compress.models import precision
from compress.models.signals import has_lm_head, read
from compress.progress import Progress
from compress.slicing.shape import positions

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WORDS_PER_BATCH: Final = 512
GLOVE_ROWS: Final = 100_000
"""Rows of a vector file that are read, the most frequent words: as the authors' code."""

PLAIN: Final = re.compile(r"[a-z]+")


def nearest(
    seen: Collection[str],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    most: int,
    file: str | None,
    every: bool = False,
) -> dict[str, list[str]]:
    """Find the `most` words with the largest cosine to each seen word that is several tokens, or to `every` one.

    Vectors come from a GloVe text file, or are the means of the tokens' input embeddings, over the seen words and the
    vocabulary's. Only words of letters a-z count; those without a vector are left out. Raises DataError.
    """
    words = {word for word in seen if PLAIN.fullmatch(word)}
    if not words:
        return {}
    if file:
        pool, vectors_PD = _glove(Path(file))
    else:
        whole = {str(tokenizer.decode([each])).strip().lower() for each in range(len(tokenizer))}
        pool = sorted(words | {word for word in whole if PLAIN.fullmatch(word)})
        vectors_PD = _embed_words(pool, model, tokenizer)
    place = {word: at for at, word in enumerate(pool)}
    known = sorted(words & place.keys())
    if known and not every:
        known = [word for word, ids in zip(known, _pieces(known, tokenizer), strict=True) if len(ids) > 1]
    vectors_PD = normalize(vectors_PD, dim=-1)
    near: dict[str, list[str]] = {}
    for start in range(0, len(known), WORDS_PER_BATCH):
        some = known[start : start + WORDS_PER_BATCH]
        cosine_WP = vectors_PD[[place[word] for word in some]] @ vectors_PD.T
        best_WM = cosine_WP.topk(min(most + 1, len(pool))).indices.tolist()
        for word, best in zip(some, best_WM, strict=True):
            near[word] = [pool[at] for at in best if pool[at] != word][:most]
    return near


def _pieces(words: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return token ids of words as they are inside a text: after a space."""
    ids: list[list[int]] = tokenizer([f" {word}" for word in words], add_special_tokens=False)["input_ids"]
    return ids


@torch.inference_mode()
def _embed_words(words: Sequence[str], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Return (P, D): of each word the mean of its tokens' input embeddings."""
    table: Any = model.get_input_embeddings()
    pieces = _pieces(words, tokenizer)
    flat = torch.tensor([each for ids in pieces for each in ids], device=table.weight.device)
    owner = torch.repeat_interleave(torch.arange(len(words)), torch.tensor([len(ids) for ids in pieces]))
    total_PD = torch.zeros(len(words), table.weight.shape[1])
    return total_PD.index_add_(0, owner, table.weight[flat].float().cpu())  # the mean's direction is the sum's


def _glove(path: Path) -> tuple[list[str], Tensor]:
    """Read the words and vectors of a text file with a word and its numbers a line. Raises DataError."""
    words, rows = [], []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(islice(file, GLOVE_ROWS), start=1):
                word, *numbers = line.rstrip("\n").split(" ")
                if PLAIN.fullmatch(word):
                    words.append(word)
                    rows.append(np.array(numbers, np.float32))
                    if len(rows[-1]) != len(rows[0]):
                        raise DataError(
                            f"{path}, line {number}: {len(rows[-1])} numbers where others have {len(rows[0])}"
                        )
    except OSError as error:
        raise DataError(f"{path}: word vectors cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path}, line {number}: expected a word and its numbers, separated by spaces") from error
    if not words:
        raise DataError(
            f"{path}: there is no word in it; expected a word and its numbers a line, as GloVe is given out"
        )
    return words, torch.from_numpy(np.stack(rows))


ENCODING: Final = "2"
"""Part of every cache key: raise it when what `candidates` writes changes."""

LONGEST: Final = 128
"""Tokens of a text that are looked at; words behind them stay as they are."""
TEXTS_PER_WRITE: Final = 4096
TOKENS_PER_BATCH: Final = 8192

WORD: Final = re.compile(r"[^\W_]+")

_NEGATED = (
    *("ai", "are", "could", "did", "do", "does", "had", "has", "have", "is"),
    *("might", "must", "need", "sha", "should", "was", "were", "wo", "would"),
)
CONTRACTED: Final = frozenset(f"{verb}n" for verb in _NEGATED) | {"d", "ll", "m", "ma", "o", "s", "t", "ve", "y"}
"""What a contraction leaves where it is cut at its apostrophe."""
OTHERS: Final = frozenset({"did", "does", "doing", "having", "just", "theirs"})
"""With the former, the authors' stop words that scikit-learn's list lacks."""


@dataclass(frozen=True)
class Word:
    """Place a word at text[start:end]; `token`: its place among the text's tokens, None where it is several of them."""

    start: int
    end: int
    token: int | None


@dataclass(frozen=True)
class Asked:
    """Say how candidates are found.

    most      candidates per word
    vectors   a GloVe file; None: the model's embeddings
    masked    words of one token by masks, `together` of a text in one pass, the text as it is `beside` that or not
    """

    most: int
    vectors: str | None = None
    masked: bool = True
    together: int = 1
    beside: bool = True


def candidates(texts: pa.Array, lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, asked: Asked) -> pa.Table:
    """Make one row for each of `texts`: `starts`, `ends` of the words that have candidates, and their `candidates`.

    Computed once for the same texts, model and settings, then memory-mapped. Raises DataError for a model or tokenizer
    that cannot fill in masks, and for a file of vectors that is none.
    """
    if not tokenizer.is_fast:
        raise DataError(
            f"{type(tokenizer).__name__} does not tell where in a text its tokens are: use a fast tokenizer"
        )
    if asked.masked and (tokenizer.mask_token_id is None or not has_lm_head(lm)):
        raise DataError(f"{type(lm).__name__} fills in no masks: give a model with a masked language model's head")
    if asked.vectors and not Path(asked.vectors).is_file():
        raise DataError(f"{asked.vectors}: there is no such file of word vectors")
    entry = cache.cached(
        cache.home() / "candidates" / _key(texts, lm, tokenizer, asked),
        lambda folder: cache.write(folder / "rows.arrow", _find(texts, lm, tokenizer, asked)),
    )
    return cache.table(entry / "rows.arrow")


def _key(texts: pa.Array, lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, asked: Asked) -> str:
    weights, words = hashlib.sha256(), hashlib.sha256()
    for parameter in lm.parameters():
        weights.update(parameter.detach().cpu().flatten().contiguous().view(torch.uint8).numpy().data)
    for text in texts:
        words.update(text.as_py().encode() + b"\0")
    parts = [weights.hexdigest(), words.hexdigest(), tokenize.fingerprint(tokenizer), repr(asked)]
    return cache.digest(ENCODING, *parts, *([Path(asked.vectors)] if asked.vectors else []))


def _find(
    texts: pa.Array, lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, asked: Asked
) -> Iterator[pa.RecordBatch]:
    masks = _Masks.of(lm, tokenizer, asked) if asked.masked else None
    seen = {word.lower() for text in texts for word in WORD.findall(text.as_py())}
    near = nearest(seen, lm, tokenizer, most=asked.most, file=asked.vectors, every=not asked.masked)
    chunks = [texts[start : start + TEXTS_PER_WRITE].to_pylist() for start in range(0, len(texts), TEXTS_PER_WRITE)]
    with Progress("words in place of words", len(texts), "texts") as bar:
        for chunk in chunks:
            ids, words = _words(chunk, tokenizer, masks.room if masks else LONGEST)
            filled = (
                masks.fill(ids, [[w.token for w in each if w.token is not None] for each in words]) if masks else {}
            )
            rows = []
            for at, (text, each) in enumerate(zip(chunk, words, strict=True)):
                found = [
                    filled[at, w.token]
                    if masks and w.token is not None
                    else near.get(text[w.start : w.end].lower(), [])
                    for w in each
                ]
                rows.append([(word.start, word.end, some) for word, some in zip(each, found, strict=True) if some])
            yield pa.record_batch(
                {
                    "starts": pa.array([[word[0] for word in row] for row in rows], pa.list_(pa.int32())),
                    "ends": pa.array([[word[1] for word in row] for row in rows], pa.list_(pa.int32())),
                    "candidates": pa.array(
                        [[word[2] for word in row] for row in rows], pa.list_(pa.list_(pa.string()))
                    ),
                }
            )
            bar.advance(len(chunk))


def _words(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, room: int
) -> tuple[list[list[int]], list[list[Word]]]:
    """Return the first `room` token ids of each text, and the words in them that may be replaced."""
    from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

    stop_words = ENGLISH_STOP_WORDS | CONTRACTED | OTHERS
    encoded = tokenizer(
        list(texts), add_special_tokens=False, truncation=True, max_length=room, return_offsets_mapping=True
    )
    found: list[list[Word]] = []
    for text, spans in zip(texts, encoded["offset_mapping"], strict=True):
        # sentencepiece counts the space before a word as its own
        exact = {
            (start + len(s) - len(s.lstrip()), end): at
            for at, (start, end) in enumerate(spans)
            if (s := text[start:end])
        }
        limit = spans[-1][1] if spans else 0
        found.append(
            [
                Word(*match.span(), exact.get(match.span()))
                for match in WORD.finditer(text)
                if match.end() <= limit and PLAIN.fullmatch(word := match[0].lower()) and word not in stop_words
            ]
        )
    return encoded["input_ids"], found


@dataclass(frozen=True)
class _Masks:
    """Fill in words by a masked language model; linear layers in bfloat16 where that is faster here."""

    lm: Any
    words: Words
    frame: Frame
    asked: Asked
    names: Mapping[int, str]
    bf16: bool

    @classmethod
    def of(cls, lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, asked: Asked) -> _Masks:
        bf16 = precision.choose("auto") == "bf16"
        if bf16:
            lm = copy.deepcopy(lm)
            precision.cast_linear_layers(lm)
        words = Words.from_tokenizer(tokenizer)
        whole = (words.starts_V & ~words.special_V).nonzero().flatten().tolist()
        names = {each: name for each in whole if (name := str(tokenizer.decode([each])).strip())}
        return cls(lm.eval(), words, Frame.from_tokenizer(tokenizer), asked, names, bf16)

    @property
    def room(self) -> int:
        """Return how many tokens of a text fit the model."""
        known = positions(self.lm)
        free = LONGEST if known is None else (known - self.frame.room(self.asked.beside)) // (1 + self.asked.beside)
        return min(LONGEST, free)

    def fill(self, texts: Sequence[list[int]], tokens: Sequence[list[int]]) -> dict[tuple[int, int], list[str]]:
        """Return {(text, token): words that may stand there} for the given places of each text, each masked once.

        Of several words masked in one pass none are neighbours, where there are enough of them.
        """
        passes = [
            (at, places[first::stride])
            for at, places in enumerate(tokens)
            if places
            for stride in [-(-len(places) // self.asked.together)]
            for first in range(stride)
        ]
        passes.sort(key=lambda each: -len(texts[each[0]]))
        found: dict[tuple[int, int], list[str]] = {}
        for batch in self._batches(passes, texts):
            best_RM = iter(self._best(batch, texts).tolist())
            for at, places in batch:
                for place in places:
                    found[at, place] = [self.names[each] for each in next(best_RM) if each in self.names]
        return found

    def _batches(
        self, passes: Sequence[tuple[int, list[int]]], texts: Sequence[list[int]]
    ) -> Iterator[list[tuple[int, list[int]]]]:
        """Yield batches of like length: the passes come longest first."""
        rest, size = iter(passes), self.frame.room(self.asked.beside)
        for first in rest:
            length = size + (1 + self.asked.beside) * len(texts[first[0]])
            yield [first, *islice(rest, max(0, TOKENS_PER_BATCH // length - 1))]

    @torch.inference_mode()
    def _best(self, batch: Sequence[tuple[int, list[int]]], texts: Sequence[list[int]]) -> Tensor:
        """Return (R, M) token ids, most probable first; R in the order of the passes and of the places in each."""
        rows = []
        for at, places in batch:
            masked = list(texts[at])
            for place in places:
                masked[place] = self.words.need_mask("augmentation")
            rows.append(self.frame.pair(masked, texts[at]) if self.asked.beside else self.frame.single(masked))
        before = len((self.frame.paired if self.asked.beside else self.frame.alone).ids[0])
        device = next(self.lm.parameters()).device
        padding = {"input_ids": self.words.pad, "attention_mask": 0}
        columns = {"attention_mask": [[1] * len(row["input_ids"]) for row in rows]}
        columns |= {name: [row[name] for row in rows] for name in rows[0]}
        inputs = {
            name: pad_sequence([torch.tensor(row) for row in column], True, padding.get(name, 0)).to(device)
            for name, column in columns.items()
        }
        at_BL = torch.zeros_like(inputs["input_ids"], dtype=torch.bool)
        for row, (_, places) in enumerate(batch):
            at_BL[row, torch.tensor(places) + before] = True
        with torch.autocast(device.type, torch.bfloat16, enabled=self.bf16):
            logits_RV = read(self.lm, inputs, frozenset({"logits"}), at_BL=at_BL).logits
        assert logits_RV is not None
        return logits_RV[:, : self.words.size].topk(min(self.asked.most, self.words.size)).indices
