"""What a bundle finds in a text: the answer to a question, or the entities that its words name."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from compress.data import windows
from compress.data.conll import OUTSIDE, entities
from compress.errors import BundleError
from compress.evaluation.qa import Windows, best_spans

Logits = Callable[[Iterable[Mapping[str, Sequence[int]]]], NDArray[np.float32]]
"""Encoded rows -> (tokens of all rows, outputs)."""

WORDS = re.compile(r"https?://\S+|[@#]?\w+(?:[-.'’&]\w+)*|[^\w\s]")
"""What counts as a word: an address, a name with its @ or #, letters and digits held together by single marks; any
other mark alone. Data of tagged words are cut about so."""


@dataclass(frozen=True)
class Answer:
    """What the model answers: `text`, the characters `start` to `end` of the context; '' where that holds no answer.

    score   the probability of its first times that of its last token, over all tokens of the context and "no answer"
    """

    text: str
    score: float
    start: int
    end: int

    def __str__(self) -> str:
        return f"{self.text or '(no answer)'}\t{self.score:.4f}"


@dataclass(frozen=True)
class Mark:
    """An entity: `text`, the characters `start` to `end`; score: the mean probability of its words' tags."""

    text: str
    label: str
    score: float
    start: int
    end: int


@dataclass(frozen=True)
class Marked:
    """The entities of a text, in its order."""

    marks: tuple[Mark, ...]

    def __str__(self) -> str:
        return ", ".join(f"{mark.label}: {mark.text} ({mark.score:.4f})" for mark in self.marks) or "(none)"


def answered(
    pairs: Sequence[tuple[str, str]], tokenizer: Tokenizer, logits: Logits, *, max_length: int, threshold: float
) -> list[Answer]:
    """An answer to each (question, context)."""
    if not pairs:
        return []
    found = list(
        windows.read_questions(tokenizer, [each for each, _ in pairs], [each for _, each in pairs], max_length)
    )
    rows = [window for each in found for window in each]
    question_R = np.repeat(np.arange(len(found)), [len(each) for each in found])
    lengths_R = np.array([len(window.row.ids) for window in rows])
    where = Windows(
        np.concatenate([window.starts for window in rows]),
        np.concatenate([window.ends for window in rows]),
        lengths_R,
        np.array([window.null for window in rows]),
        question_R,
    )
    values_T2 = _finite(logits(map(_fed, (window.row for window in rows))))
    spans = best_spans(values_T2, where)
    nulls_T = np.concatenate([[0], np.cumsum(lengths_R)[:-1]]) + where.nulls_R
    possible_T = where.starts_T >= 0
    possible_T[nulls_T] = True
    cuts = np.flatnonzero(np.diff(np.repeat(question_R, lengths_R), prepend=-1))
    log_p_T2 = _log_shares(np.where(possible_T[:, None], values_T2, -np.inf), cuts)
    texts = spans.texts([context for _, context in pairs], threshold)
    answers = []
    for n, text in enumerate(texts):
        if text:
            first, last = int(spans.first_Q[n]), int(spans.last_Q[n])
            start = pairs[n][1].index(text, int(spans.starts_Q[n]))
            score = float(np.exp(log_p_T2[first, 0] + log_p_T2[last, 1]))
            answers.append(Answer(text, score, start, start + len(text)))
        else:
            none = nulls_T[question_R == n]
            answers.append(Answer("", float(np.exp(log_p_T2[none].sum(1).max())), 0, 0))
    return answers


def marked(
    texts: Sequence[str], labels: Sequence[str], tokenizer: Tokenizer, logits: Logits, *, max_length: int
) -> list[Marked]:
    """The entities of each text, whose words are those of WORDS; `labels`: the tags in the order of the logits."""
    words = [[match.span() for match in WORDS.finditer(text)] for text in texts]
    cut = [[text[start:end] for start, end in spans] for text, spans in zip(texts, words, strict=True)]
    read = list(windows.read_words(tokenizer, cut, max_length))
    values_TV = _finite(logits(_fed(window.row) for each in read for window in each))
    at, answers = 0, []
    for text, spans, each in zip(texts, words, read, strict=True):
        tags, shares = [OUTSIDE] * len(spans), np.ones(len(spans))
        for window in each:
            for word, row_V in zip(window.word, values_TV[at : at + len(window.word)], strict=True):
                if word >= 0:
                    best = int(row_V.argmax())
                    tags[word], shares[word] = labels[best], 1 / np.exp(row_V - row_V[best]).sum()
            at += len(window.word)
        marks = []
        for label, first, last in entities(tags):
            start, end = spans[first][0], spans[last - 1][1]
            marks.append(Mark(text[start:end], label, float(shares[first:last].mean()), start, end))
        answers.append(Marked(tuple(marks)))
    return answers


def _fed(row: windows.Window) -> dict[str, list[int]]:
    return {"input_ids": row.ids, "attention_mask": [1] * len(row.ids), "token_type_ids": row.types}


def _finite(values: NDArray[np.float32]) -> NDArray[np.float64]:
    if not np.isfinite(values).all():
        raise BundleError("predict: the model's answer is not finite; its weights are broken")
    return values.astype(np.float64)


def _log_shares(values_T2: NDArray[np.float64], cuts: NDArray[np.integer]) -> NDArray[np.float64]:
    """log softmax of each column, over every stretch of tokens that begins at one of `cuts`."""
    sizes = np.diff(cuts, append=len(values_T2))
    shifted = values_T2 - np.repeat(np.maximum.reduceat(values_T2, cuts), sizes, axis=0)
    sums = np.log(np.add.reduceat(np.exp(shifted), cuts))
    shares: NDArray[np.float64] = shifted - np.repeat(sums, sizes, axis=0)
    return shares
