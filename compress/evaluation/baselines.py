"""Score predictions without a neural model: a constant one, and ones from single
words."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from compress.arrays import Array
from compress.data.retrieval import WordIndex
from compress.errors import DataError
from compress.evaluation import metrics, qa
from compress.evaluation.metrics import Scores

if TYPE_CHECKING:
    from datasets import Dataset

    from compress.data.task import TaskData
    from compress.evaluation.evaluator import Evaluator


BAG_ROWS = 100_000
BAG_CHARACTERS = 20_000_000
GROUPS = 20
EXAMPLES = 2000
"""Maximum examples from which the standard error of a lead is estimated."""
_SENTENCES = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])")


def of_labels(data: TaskData, split: Dataset) -> dict[str, Scores]:
    """Score the constant prediction, and the bag of words if the training texts have
    labels."""
    found = {"majority": data.task.majority(data, split)}
    if "label" in data.train.column_names:
        found["bag of words"] = bag_of_words(data, split)
    return found


def lead_over_majority(
    data: TaskData, evaluator: Evaluator, logits: Array
) -> tuple[float, float]:
    """Measure by how much logits score above `majority`, with the standard error of
    this lead.

    The error is the jackknife's over GROUPS groups of at most EXAMPLES examples (Efron
    & Tibshirani 1993, chapter 11), which holds for every metric; infinite for a single
    example.
    """

    def difference(part: Evaluator, part_logits: Array) -> float:
        metric = data.task.metric
        constant = data.task.majority(data, part.split)
        return part.scores(part_logits)[metric] - constant[metric]

    if (found := data.task.lead(data, evaluator, logits)) is not None:
        return found
    groups = min(GROUPS, len(evaluator))
    if groups < 2:
        return difference(evaluator, logits), math.inf
    without = np.array(
        [
            difference(*part)
            for part in evaluator.leave_groups_out(logits, groups, EXAMPLES)
        ]
    )
    error = math.sqrt((groups - 1) * float(without.var()))
    return difference(evaluator, logits), error * math.sqrt(
        min(len(evaluator), EXAMPLES) / len(evaluator)
    )


def bag_of_words(data: TaskData, split: Dataset) -> Scores:
    """Score linear models on the TF-IDF weights of words and pairs of words.

    Logistic regression (one against the rest) for classes and labels, ridge regression
    for numbers. Pairs of texts yield the features of both, their product, their
    difference and their cosine. Learns from at most BAG_ROWS evenly spaced training
    rows, with at most about BAG_CHARACTERS characters. Raises DataError for training
    texts without a word.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer

    texts, known = _bag(data)
    words = TfidfVectorizer(
        ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"\w+|[^\w\s]"
    )
    try:
        words.fit([text for column in texts for text in column])
    except ValueError as error:
        raise DataError(
            f"{data.name}: the training texts have no words ({error}); check the text "
            "columns."
        ) from error
    features = _features(words, texts)
    inputs = _features(words, _texts(split))
    logits = data.task.fit_linear(features, known, inputs)
    return data.task.score_rows(logits, _labels(split))


def tag_of_each_word(data: TaskData, split: Dataset) -> Scores:
    """Score giving every word its most frequent tag in the training set, ignoring case;
    words that the training set does not have get the most frequent tag of all."""
    counts = dict[str, Counter[int]]()
    for words, tags in zip(data.train["words"], data.train["tags"], strict=True):
        for word, tag in zip(words, tags, strict=True):
            counts.setdefault(word.lower(), Counter())[tag] += 1
    commonest = sum(counts.values(), Counter()).most_common(1)[0][0]
    tag_of = {word: of_word.most_common(1)[0][0] for word, of_word in counts.items()}
    return tag_scores(
        data,
        [
            [tag_of.get(word.lower(), commonest) for word in words]
            for words in split["words"][:]
        ],
        split,
    )


def tag_scores(
    data: TaskData, predicted: Sequence[Sequence[int]], split: Dataset
) -> Scores:
    """Score a tag for every word of a split, by its number."""
    names = data.task.labels
    return metrics.entity_scores(
        *(
            [[names[n] for n in tags] for tags in every]
            for every in (predicted, split["tags"][:])
        )
    )


def nearest_sentence(split: Dataset) -> Scores:
    """Score answering with the sentence of the context that shares the most words with
    the question, each weighted by its rarity among the sentences of the context; ties
    go to the first."""
    nearest = []
    for question, context in zip(split["question"], split["context"], strict=True):
        sentences = _SENTENCES.split(context)
        unspaced = qa.is_unspaced(context)
        bags = [
            set(qa.normalise_answer(sentence, unspaced=unspaced).split())
            for sentence in sentences
        ]
        words = set(qa.normalise_answer(question, unspaced=unspaced).split())
        weights = {
            w: math.log(1 + len(bags) / count)
            for w in words
            if (count := sum(w in bag for bag in bags))
        }
        shares = [sum(weights[word] for word in bag & weights.keys()) for bag in bags]
        nearest.append(sentences[int(np.argmax(shares))])
    return qa.answer_scores(nearest, split["answers"][:], split["context"][:])


def best_matches(split: Dataset) -> Array:
    """Score the passages of a ranking by BM25: (rows,)."""
    texts, numbers = np.unique(
        np.asarray(split["text_pair"][:], dtype=object), return_inverse=True
    )
    return WordIndex.from_texts(texts.tolist()).score(split["text"][:], numbers)


def _labels(split: Dataset) -> Array:
    return np.asarray(split["label"][:])


def _texts(split: Dataset) -> list[list[str]]:
    return [
        split[name][:] for name in ("text", "text_pair") if name in split.column_names
    ]


def _bag(data: TaskData) -> tuple[list[list[str]], Array]:
    """Return the training texts and labels that the bag of words learns from."""
    rows = np.arange(0, len(data.train), math.ceil(len(data.train) / BAG_ROWS))
    train = data.train.select(rows)
    texts = _texts(train)
    stride = max(
        1,
        math.ceil(
            sum(len(text) for column in texts for text in column) / BAG_CHARACTERS
        ),
    )
    return [column[::stride] for column in texts], _labels(train)[::stride]


def _features(words: Any, texts: Sequence[list[str]]) -> Any:
    """Compute sparse features (rows, features) of texts, or of pairs of texts."""
    from scipy.sparse import csr_matrix, hstack

    if len(texts) == 1:
        return words.transform(texts[0])
    one, other = (words.transform(column) for column in texts)
    shared = one.multiply(other)
    return hstack(
        [one, other, shared, abs(one - other), csr_matrix(shared.sum(axis=1))]
    ).tocsr()


def log_odds(features: Any, inside: Array, inputs: Any) -> Array:
    """Predict the log odds of a class for the rows of `inputs`; certain if all training
    rows have it, or none."""
    from sklearn.linear_model import LogisticRegression

    if inside.all() or not inside.any():
        return np.full(inputs.shape[0], 1e3 if inside.all() else -1e3)
    model = LogisticRegression(solver="liblinear", max_iter=1000)
    return np.asarray(model.fit(features, inside).decision_function(inputs))
