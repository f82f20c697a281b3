"""Define what a model answers to a text, for each kind of task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from compress.arrays import Doubles, Floats
from compress.errors import BundleError

if TYPE_CHECKING:
    import pyarrow as pa

AnswerColumns = Mapping[str, Any]
"""The answers to many texts: column of the answers file -> values. A column is a list
with one value per text, an array of numbers (texts,) or vectors (texts, width), or a
dictionary of label -> numbers (texts,)."""


class Shown:
    """An answer that a terminal shows."""

    def lines(self, text: str) -> list[str]:
        """Return the lines that show the answer to a text: by default one."""
        return [f"{self}\t{text}"]


@dataclass(frozen=True)
class Prediction(Shown):
    """The prediction for one text.

    classification  label: the most probable; score: its probability; scores: every
                    label's probability, sum 1
    multilabel      label: all labels with probability > 0.5, joined by ", " ('' for
                    none); score: the highest probability; scores: every label's own
                    probability
    regression      label: ''; score: the number; scores: empty
    ranking         as for regression: the higher the score, the better the passage
                    answers the query
    """

    label: str
    score: float
    scores: dict[str, float]

    @staticmethod
    def from_graph(outputs: Mapping[str, Any], labels: Sequence[str]) -> Prediction:
        """Read the label, or labels, and probabilities that a text file answers."""
        probabilities = outputs["probabilities"].tolist()
        label = outputs["label"]
        if not isinstance(label, str):
            label = ", ".join(each for each in label if each)
        scores = dict(zip(labels, probabilities, strict=True))
        return Prediction(label, float(outputs["score"]), scores)

    @staticmethod
    def first(columns: AnswerColumns) -> Prediction:
        """Return the answer to the first text of `label_columns`."""
        scores = columns["prediction_scores"]
        return Prediction(
            columns["prediction"][0],
            float(columns["prediction_score"][0]),
            {label: float(values[0]) for label, values in scores.items()},
        )

    def __str__(self) -> str:
        return f"{self.label}\t{self.score:.4f}" if self.label else f"{self.score:.4f}"

    def columns(self) -> dict[str, Any]:
        """Return the columns of a row in a file of answers."""
        if not self.scores:
            return {"prediction": self.score}
        return {
            "prediction": self.label,
            "prediction_score": self.score,
            "prediction_scores": self.scores,
        }


@dataclass(frozen=True)
class Answer(Shown):
    """The answer to a question: `text`, the characters `start` to `end` of the context;
    '' for no answer.

    score   the probability of its first token times that of its last, over all tokens
            of the context and "no answer"
    """

    text: str
    score: float
    start: int
    end: int

    def __str__(self) -> str:
        return f"{self.text or '(no answer)'}\t{self.score:.4f}"

    def columns(self) -> dict[str, Any]:
        return {
            "prediction": self.text,
            "prediction_start": self.start,
            "prediction_end": self.end,
            "prediction_score": self.score,
        }


@dataclass(frozen=True)
class Mark:
    """An entity: `text`, the characters `start` to `end`; `score`, the mean probability
    of its words' tags."""

    text: str
    label: str
    score: float
    start: int
    end: int


@dataclass(frozen=True)
class Marked(Shown):
    """The entities of a text, in order."""

    marks: tuple[Mark, ...]

    def __str__(self) -> str:
        return (
            ", ".join(
                f"{mark.label}: {mark.text} ({mark.score:.4f})" for mark in self.marks
            )
            or "(none)"
        )

    def columns(self) -> dict[str, Any]:
        return {"prediction": [asdict(mark) for mark in self.marks]}


@dataclass(frozen=True)
class Vector(Shown):
    """The vector of a text."""

    numbers: tuple[float, ...]

    def __str__(self) -> str:
        return " ".join(f"{number:.6g}" for number in self.numbers)

    def columns(self) -> dict[str, Any]:
        return {"prediction": list(self.numbers)}


@dataclass(frozen=True)
class Nearest(Shown):
    """The texts nearest to a text, the nearest first, each with its cosine.

    ids   of the texts: see `exporters.predictor.NearestTexts`
    """

    texts: tuple[tuple[str, float], ...]
    ids: tuple[str, ...]

    def lines(self, text: str) -> list[str]:
        """Return the text, and below it a line for each text found: its cosine, its id
        and its words."""
        width = max(map(len, self.ids))
        found = [
            f"  {cosine:7.4f}  {name:<{width}}  {near}"
            for name, (near, cosine) in zip(self.ids, self.texts, strict=True)
        ]
        return [text, *found]

    def columns(self) -> dict[str, Any]:
        found = [
            {"id": name, "text": text, "score": cosine}
            for name, (text, cosine) in zip(self.ids, self.texts, strict=True)
        ]
        return {"prediction": found}


@dataclass(frozen=True)
class Written(Shown):
    """The text that a language model writes."""

    text: str

    def __str__(self) -> str:
        return self.text

    def columns(self) -> dict[str, Any]:
        return {"prediction": self.text}


Outcome = Prediction | Answer | Marked | Vector | Nearest | Written


def label_columns(
    answers: Sequence[str], scores_RV: Doubles, labels: Sequence[str]
) -> AnswerColumns:
    """Make the columns of answers with a probability for each label.

    answers     the label, or the labels, of each text
    scores_RV   the probabilities, in the order of `labels`
    """
    return {
        "prediction": answers,
        "prediction_score": scores_RV.max(axis=1),
        "prediction_scores": dict(zip(labels, scores_RV.T, strict=True)),
    }


def label_schema(labels: Sequence[str]) -> pa.Schema:
    """Return the Arrow types of `label_columns`."""
    import pyarrow as pa

    scores = pa.struct({label: pa.float64() for label in labels})
    return pa.schema(
        {
            "prediction": pa.string(),
            "prediction_score": pa.float64(),
            "prediction_scores": scores,
        }
    )


def join_columns(outcomes: Sequence[Outcome]) -> AnswerColumns:
    """Join the columns of single answers; without answers, return {}."""
    rows = [outcome.columns() for outcome in outcomes]
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}


def check_finite(values: Floats, of: str = "") -> Doubles:
    """Return a model's outputs in float64. Raises BundleError if one is not finite.

    of   names their text in the error, if that is known
    """
    if not np.isfinite(values).all():
        raise BundleError(
            f"predict: the model's output{of} is not finite; its weights are broken"
        )
    return values.astype(np.float64)
