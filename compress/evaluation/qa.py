"""Extract answers to questions, spans of a text, from logits, and score them (SQuAD 1.1
and 2.0).

Rajpurkar et al. 2016, arXiv:1606.05250, and 2018, arXiv:1806.03822: exact match and F1
over the words of normalised answers, the best over a question's gold answers; a
question without an answer is right if nothing is answered. Lewis et al. 2020,
arXiv:1910.07475, and their mlqa_evaluation_v1.py: answers in Chinese have no articles
and no punctuation of any script, and each of their characters is a word. Devlin et al.
2019, arXiv:1810.04805, Sec. 4.2 and 4.3: a span scores the start logit of its first
plus the end logit of its last token, and no answer scores those of the classification
token; no answer is given if it beats the best span by more than a threshold.

Shapes: T tokens of all rows, one row after another; R rows (windows of a text); Q
questions.

Deviation from MLQA's script, which is told the language: a question is compared as in
Chinese if its context is written without spaces between words, and that goes for
Japanese, Thai, Lao, Khmer and Burmese too. All other languages are compared as SQuAD's
script does; MLQA's also removes the articles and the punctuation of five of them.
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from compress.arrays import Array, Ints

LONGEST_ANSWER = 30
"""Maximum tokens of an answer (as in the code of BERT's authors)."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai and Lao, Burmese, Khmer
    # kana and marks of repetition
    "\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\uff66-\uff9f"
    # Chinese characters
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
"""A character of a script that puts no space between words."""


@dataclass(frozen=True)
class Windows:
    """Describe the rows of questions; a text that is too long for one row takes
    several.

    starts_T, ends_T   the characters of the context that a token covers; -1 for tokens
                       outside the context
    lengths_R          the length of each row in tokens
    nulls_R            the token of the row that stands for "no answer": the
                       classification token
    question_R         the question of each row, counted from 0, ascending
    """

    starts_T: Ints
    ends_T: Ints
    lengths_R: Ints
    nulls_R: Ints
    question_R: Ints


@dataclass(frozen=True)
class Spans:
    """Hold the best span of every question: its characters, its tokens (among the T of
    all rows), and its margin.

    margin_Q is the score of no answer (the lowest of the question's rows) minus the
    span's; infinite if no row has a token of the context.
    """

    starts_Q: Ints
    ends_Q: Ints
    first_Q: Ints
    last_Q: Ints
    margin_Q: Array

    def texts(self, contexts: Sequence[str], threshold: float) -> list[str]:
        """Return the answers; '' if the margin is above the threshold."""
        spans = zip(contexts, self.starts_Q, self.ends_Q, self.margin_Q, strict=True)
        return [
            "" if margin > threshold else context[start:end].strip()
            for context, start, end, margin in spans
        ]


def best_spans(logits_T2: Array, windows: Windows) -> Spans:
    """Find the span of at most LONGEST_ANSWER tokens of one row with the highest start
    + end logit, for every question."""
    begins_R = np.concatenate([[0], np.cumsum(windows.lengths_R)[:-1]]).astype(np.int64)
    row_T = np.repeat(np.arange(len(windows.lengths_R)), windows.lengths_R)
    first_T, last_T = logits_T2.astype(np.float64).T
    context_T = windows.starts_T >= 0
    score_T = np.full(len(first_T), -np.inf)
    width_T = np.zeros(len(first_T), np.int64)
    for width in range(min(LONGEST_ANSWER, len(first_T))):
        here = slice(0, len(first_T) - width)
        there = slice(width, len(first_T))
        inside = context_T[here] & context_T[there] & (row_T[here] == row_T[there])
        sums = np.where(inside, first_T[here] + last_T[there], -np.inf)
        better = sums > score_T[here]
        score_T[here][better] = sums[better]
        width_T[here][better] = width
    first_rows_Q = np.flatnonzero(np.diff(windows.question_R, prepend=-1))
    begins_Q = begins_R[first_rows_Q]
    best_Q = np.maximum.reduceat(score_T, begins_Q)
    question_T = np.repeat(
        np.arange(len(first_rows_Q)), np.diff(begins_Q, append=len(first_T))
    )
    hits = np.flatnonzero(score_T == best_Q[question_T])
    _, firsts = np.unique(question_T[hits], return_index=True)
    token_Q = hits[firsts]
    nulls_R = begins_R + windows.nulls_R
    null_Q = np.minimum.reduceat(first_T[nulls_R] + last_T[nulls_R], first_rows_Q)
    none_Q = np.isneginf(best_Q)
    last_Q = token_Q + width_T[token_Q]
    starts_Q = np.where(none_Q, 0, windows.starts_T[token_Q])
    ends_Q = np.where(none_Q, 0, windows.ends_T[last_Q])
    margin_Q = np.where(none_Q, np.inf, null_Q - np.where(none_Q, 0.0, best_Q))
    return Spans(starts_Q, ends_Q, token_Q, last_Q, margin_Q)


def is_unspaced(context: str) -> bool:
    """Return True if a text's language puts no space between words: if a quarter of its
    letters are of such a script.

    A text in another language may quote words of such a script.
    """
    if context.isascii() or not _UNSPACED.search(context):
        return False
    unspaced = len(_UNSPACED.findall(context))
    others = sum(letter.isalpha() for letter in _UNSPACED.sub("", context))
    return unspaced >= (unspaced + others) / 4


def normalise_answer(answer: str, *, unspaced: bool = False) -> str:
    """Normalise an answer: lower case, without ASCII punctuation, English articles and
    extra spaces.

    unspaced: without any punctuation, with a space around each character of a script
    that has none between words.
    """
    lower = answer.lower()
    if unspaced:
        plain = "".join(
            letter
            for letter in lower.translate(_PUNCTUATION)
            if unicodedata.category(letter)[0] != "P"
        )
        return " ".join(_UNSPACED.sub(r" \g<0> ", plain).split())
    plain = lower.translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def _normalise(answer: str, golds: Sequence[str], context: str | None) -> list[str]:
    """Normalise the answer, then the golds, all with or all without spaces."""
    texts = (answer, *golds)
    unspaced = any(map(_UNSPACED.search, texts))
    if context is not None:
        unspaced = is_unspaced(context)
    return [normalise_answer(text, unspaced=unspaced) for text in texts]


def exact(answer: str, golds: Sequence[str], context: str | None = None) -> float:
    """Return 1.0 if the normalised answer equals a normalised gold answer (see
    `right_answers`), else 0.0.

    context: the text that shows whether its language puts spaces between words; None:
    the answers themselves.
    """
    own, *right = _normalise(answer, golds, context)
    return float(own in right)


def f1(answer: str, golds: Sequence[str], context: str | None = None) -> float:
    """Compute the F1 of the words that answer and gold share, the best over the golds.
    context: as for `exact`."""
    own, *right = map(str.split, _normalise(answer, golds, context))
    return max(_f1(own, words) for words in right)


def _f1(answer: list[str], gold: list[str]) -> float:
    if not answer or not gold:
        return float(answer == gold)
    shared = (Counter(answer) & Counter(gold)).total()
    return 2 * shared / (len(answer) + len(gold))


def right_answers(golds: Sequence[str]) -> list[str]:
    """Return the golds that are not empty when normalised, or [""] (no answer) if there
    are none."""
    return [gold for gold in golds if normalise_answer(gold)] or [""]


def answer_scores(
    answers: Sequence[str],
    golds: Sequence[Sequence[str]],
    contexts: Sequence[str] | None = None,
) -> dict[str, float]:
    """Compute f1 and exact, means over questions. contexts: the text of each question,
    as for `exact`.

    If some questions have an answer and some have none, also f1_answerable, of the
    former, and no_answer, the share of the latter that were left unanswered.
    """
    right = list(map(right_answers, golds))
    of_questions: Sequence[str | None] = contexts or [None] * len(right)
    questions = list(zip(answers, right, of_questions, strict=True))
    f1_Q = np.array([f1(*question) for question in questions])
    exact_Q = np.array([exact(*question) for question in questions])
    none_Q = np.array([golds == [""] for golds in right])
    values = {"f1": float(f1_Q.mean()), "exact": float(exact_Q.mean())}
    if none_Q.any() and not none_Q.all():
        values |= {
            "f1_answerable": float(f1_Q[~none_Q].mean()),
            "no_answer": float(f1_Q[none_Q].mean()),
        }
    return values


def f1_of_spans(
    spans: Spans, contexts: Sequence[str], golds: Sequence[Sequence[str]]
) -> float | None:
    """Compute the mean F1 of the best spans over the questions that have an answer,
    without any threshold.

    None if no question has one.
    """
    questions = zip(
        spans.texts(contexts, np.inf), map(right_answers, golds), contexts, strict=True
    )
    values = [
        f1(answer, right, context)
        for answer, right, context in questions
        if right != [""]
    ]
    return float(np.mean(values)) if values else None


def best_threshold(
    spans: Spans,
    contexts: Sequence[str],
    golds: Sequence[Sequence[str]],
    *,
    metric: str,
) -> float:
    """Choose the threshold on the margin that yields the highest mean of `metric` (f1
    or exact) on these questions.

    It lies halfway between the margins of two questions, or 1 below the lowest (nothing
    is answered), or 1 above the highest (everything is).
    """
    score = {"f1": f1, "exact": exact}[metric]
    right = list(map(right_answers, golds))
    questions = zip(spans.texts(contexts, np.inf), right, contexts, strict=True)
    spans_Q = np.array([score(*question) for question in questions])
    none_Q = np.array([score("", golds) for golds in right])
    order = np.argsort(spans.margin_Q, kind="stable")
    order = order[np.isfinite(spans.margin_Q[order])]
    if not len(order):
        return 0.0
    margins = spans.margin_Q[order]
    between = np.concatenate(
        [[margins[0] - 1], (margins[:-1] + margins[1:]) / 2, [margins[-1] + 1]]
    )
    possible = np.concatenate([[True], margins[:-1] < margins[1:], [True]])
    totals = np.concatenate([[0.0], np.cumsum((spans_Q - none_Q)[order])])
    return float(between[np.where(possible, totals, -np.inf).argmax()])
