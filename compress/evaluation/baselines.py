"""Score answers without a model: always the same answer, and ones that look at single words."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compress.data.retrieval import WordIndex
from compress.data.task import METRICS
from compress.errors import DataError
from compress.evaluation import embedding, metrics
from compress.evaluation import qa as answers
from compress.evaluation.metrics import scores
from compress.evaluation.ranking import Candidates

if TYPE_CHECKING:
    from datasets import Dataset

    from compress.data.task import TaskData
    from compress.evaluation.evaluator import Evaluator

Array = NDArray[Any]

BAG_ROWS = 100_000
BAG_CHARACTERS = 20_000_000
GROUPS = 20
EXAMPLES = 2000
"""The most examples that the error of a lead is estimated on."""
_SENTENCES = re.compile(r"(?<=[.!?])\s+")


def baselines(data: TaskData, split: Dataset) -> dict[str, dict[str, float]]:
    """Score two answers without a model on `split`, by their name in a table: the first is `majority`'s."""
    if data.task.kind == "embedding":
        return {"BM25" if any(split["passage"][:]) else "shared words": embedding.word_scores(split)}
    if data.task.kind == "tagging":
        return {"majority": majority(data, split), "tag of each word": tag_of_each_word(data, split)}
    if data.task.kind == "qa":
        return {"majority": majority(data, split), "nearest sentence": nearest_sentence(split)}
    if data.task.kind == "ranking":
        return {"random order": majority(data, split), "BM25": bm25(split)}
    if "label" not in data.train.column_names:
        return {"majority": majority(data, split)}
    return {"majority": majority(data, split), "bag of words": bag_of_words(data, split)}


def majority(data: TaskData, split: Dataset) -> dict[str, float]:
    """Score always giving the training set's commonest class or tag, its mean, or its common labels; no answer to any
    question; or passages in an order drawn at random. Where the training set has no labels, the validation set's count.
    """
    if data.task.kind == "ranking":
        return _means(split, np.zeros(len(split)))  # equal scores stand in an order that says nothing
    if data.task.kind == "qa":
        return answers.answer_scores([""] * len(split), split["answers"][:])
    if data.task.kind == "tagging":
        commonest = Counter(tag for tags in data.train["tags"] for tag in tags).most_common(1)[0][0]
        return _tag_scores(data, [[commonest] * len(tags) for tags in split["tags"][:]], split)
    if data.task.kind == "embedding":  # the same vector for all
        return dict.fromkeys(METRICS["embedding"], 0.0)
    known, labels = _labels(data.train if "label" in data.train.column_names else data.validation), _labels(split)
    if data.task.kind == "regression":
        answer = np.array([known.mean()])
    elif data.task.kind == "multilabel":
        answer = known.mean(axis=0) - 0.5
    else:
        answer = np.bincount(known, minlength=data.task.outputs).astype(np.float64)
    return scores(data.task, np.tile(answer, (len(labels), 1)), labels)


def lead(data: TaskData, exam: Evaluator, logits: Array) -> tuple[float, float]:
    """Measure by how much logits score more than the majority's answer on an exam, and the standard error of that.

    The error is the jackknife's over GROUPS groups of at most EXAMPLES examples (Efron & Tibshirani 1993, chapter 11),
    which holds for every metric; infinite of a single example.
    """

    def difference(part: Evaluator, said: Array) -> float:
        metric = data.task.metric
        return part.scores(said)[metric] - majority(data, part.split)[metric]

    if data.task.kind == "embedding":  # its texts are compared with each other: no group can be left out
        low, high = exam.interval(logits)
        return exam.scores(logits)[data.task.metric], (high - low) / (2 * 1.96)
    groups = min(GROUPS, len(exam))
    if groups < 2:
        return difference(exam, logits), math.inf
    without = np.array([difference(*each) for each in exam.parts(logits, groups, EXAMPLES)])
    error = math.sqrt((groups - 1) * float(without.var()))
    return difference(exam, logits), error * math.sqrt(min(len(exam), EXAMPLES) / len(exam))


def bag_of_words(data: TaskData, split: Dataset) -> dict[str, float]:
    """Score on `split` words and pairs of words, TF-IDF weighted, under one linear model per class.

    Logistic regression (one against the rest) for classes and labels, ridge regression for numbers. A pair shows both
    texts, their product, their difference and their cosine. Learns from at most BAG_ROWS evenly spaced training rows,
    of these at most about BAG_CHARACTERS characters. Raises DataError for training texts without a word.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import Ridge

    texts, known = _bag(data)
    words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"\w+|[^\w\s]")
    try:
        words.fit([text for column in texts for text in column])
    except ValueError as error:
        raise DataError(f"{data.name}: train's texts hold no words ({error}); look at the text columns.") from error
    features, asked = _features(words, texts), _features(words, _texts(split))
    if data.task.kind == "regression":
        answers = Ridge(alpha=1.0).fit(features, known).predict(asked)[:, None]
    elif data.task.kind == "multilabel":
        answers = np.stack([_separate(features, column > 0.5, asked) for column in known.T], axis=1)
    elif data.task.outputs == 2:
        margin = _separate(features, known == 1, asked)
        answers = np.stack([-margin, margin], axis=1)
    else:
        answers = np.stack([_separate(features, known == one, asked) for one in range(data.task.outputs)], axis=1)
    return scores(data.task, answers, _labels(split))


def tag_of_each_word(data: TaskData, split: Dataset) -> dict[str, float]:
    """Score giving every word the tag it has most often in train, however it is written there; a word
    that train does not have gets the commonest tag."""
    seen: dict[str, Counter[int]] = {}
    for words, tags in zip(data.train["words"], data.train["tags"], strict=True):
        for word, tag in zip(words, tags, strict=True):
            seen.setdefault(word.lower(), Counter())[tag] += 1
    commonest = sum(seen.values(), Counter()).most_common(1)[0][0]
    usual = {word: counts.most_common(1)[0][0] for word, counts in seen.items()}
    said = [[usual.get(word.lower(), commonest) for word in words] for words in split["words"][:]]
    return _tag_scores(data, said, split)


def _tag_scores(data: TaskData, said: Sequence[Sequence[int]], split: Dataset) -> dict[str, float]:
    names = data.task.labels
    one, other = ([[names[n] for n in tags] for tags in every] for every in (said, split["tags"][:]))
    return metrics.entity_scores(one, other)


def nearest_sentence(split: Dataset) -> dict[str, float]:
    """Score answering with the sentence of the context that shares most of the question's words, each
    weighing the less the more sentences of the context have it; the first of several."""
    said = [_nearest(question, context) for question, context in zip(split["question"], split["context"], strict=True)]
    return answers.answer_scores(said, split["answers"][:])


def _nearest(question: str, context: str) -> str:
    sentences = _SENTENCES.split(context)
    bags = [set(answers.normalise_answer(sentence).split()) for sentence in sentences]
    asked = set(answers.normalise_answer(question).split())
    weights = {word: math.log(1 + len(bags) / count) for word in asked if (count := sum(word in bag for bag in bags))}
    shares = [sum(weights[word] for word in bag & weights.keys()) for bag in bags]
    return sentences[int(np.argmax(shares))]


def bm25(split: Dataset) -> dict[str, float]:
    """Score putting the passages of each query in the order of BM25, over all passages of the split."""
    texts, numbers = np.unique(np.asarray(split["text_pair"][:], dtype=object), return_inverse=True)
    return _means(split, WordIndex.from_texts(texts.tolist()).score(split["text"][:], numbers))


def _means(split: Dataset, score_R: Array) -> dict[str, float]:
    return {name: float(values.mean()) for name, values in Candidates.from_split(split).scores(score_R).items()}


def _labels(split: Dataset) -> Array:
    return np.asarray(split["label"][:])


def _texts(split: Dataset) -> list[list[str]]:
    return [split[name][:] for name in ("text", "text_pair") if name in split.column_names]


def _bag(data: TaskData) -> tuple[list[list[str]], Array]:
    """Return the texts and labels of train that the bag of words learns from."""
    rows = np.arange(0, len(data.train), math.ceil(len(data.train) / BAG_ROWS))
    train = data.train.select(rows)
    texts = _texts(train)
    stride = max(1, math.ceil(sum(len(text) for column in texts for text in column) / BAG_CHARACTERS))
    return [column[::stride] for column in texts], _labels(train)[::stride]


def _features(words: Any, texts: Sequence[list[str]]) -> Any:
    """Compute sparse features (rows, features) of one text, or of two and what they share."""
    from scipy.sparse import csr_matrix, hstack

    if len(texts) == 1:
        return words.transform(texts[0])
    one, other = (words.transform(column) for column in texts)
    shared = one.multiply(other)
    return hstack([one, other, shared, abs(one - other), csr_matrix(shared.sum(axis=1))]).tocsr()


def _separate(features: Any, inside: Array, asked: Any) -> Array:
    """Predict log odds (rows of `asked`) of being inside; certain where all training rows are, or none is."""
    from sklearn.linear_model import LogisticRegression

    if inside.all() or not inside.any():
        return np.full(asked.shape[0], 1e3 if inside.all() else -1e3)
    model = LogisticRegression(solver="liblinear", max_iter=1000)
    return np.asarray(model.fit(features, inside).decision_function(asked))
