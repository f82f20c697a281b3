"""Tiny data of every kind of task, and the logits of a model that knows the answers."""

import random
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np

from compress.data.constants import IGNORE_INDEX
from compress.evaluation.evaluator import Evaluator
from tests import marked, tiny

PAGE = Path(__file__).parents[2] / "docs" / "own-kind.md"
TOY = "pages.count"
"""A kind of the user's own: the one of the page, which is imported here."""


def page_code() -> str:
    """Return the file of a kind that the page shows."""
    blocks = re.findall("```python\n(.+?)```", PAGE.read_text(encoding="utf-8"), re.S)
    return str(next(block for block in blocks if "class" in block))


sys.modules[TOY] = ModuleType(TOY)
exec(page_code(), vars(sys.modules[TOY]))


@dataclass(frozen=True)
class Case:
    """Data of a kind, and what a model that knows the answers gives for them.

    write    writes a training file into a new folder
    truth    evaluator -> logits of its rows
    length   tokens of a row; of words and questions, so few that texts take several rows
    """

    write: Callable[[Path], object]
    truth: Callable[[Evaluator], np.ndarray]
    length: int = 32


def table(
    header: str, row: Callable[[random.Random, int], Sequence[object]], count: int = 60
) -> Callable[[Path], None]:
    """Return a function that writes a table of random rows."""

    def write(folder: Path) -> None:
        draw = random.Random(0)
        rows = [header.split(), *(row(draw, n) for n in range(count))]
        folder.mkdir(parents=True)
        lines = ["\t".join(map(str, cells)) for cells in rows]
        (folder / "train.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")

    return write


def words(draw: random.Random, count: int = 6) -> str:
    return " ".join(draw.choice(tiny.WORDS[:20]) for _ in range(count))


def one_hot(exam: Evaluator) -> np.ndarray:
    return 8 * np.eye(exam.task.outputs)[exam.labels] - 4


def tagged(exam: Evaluator) -> np.ndarray:
    labels = np.concatenate([np.array(row) for row in exam.rows["labels"]])
    return 8 * np.eye(exam.task.outputs)[np.where(labels == IGNORE_INDEX, 0, labels)] - 4


def spans(exam: Evaluator) -> np.ndarray:
    parts = []
    for row in exam.rows:
        logits = np.zeros((row["length"], 2))
        logits[row["labels"], [0, 1]] = 5.0
        parts.append(logits)
    return np.concatenate(parts)


def pointing(exam: Evaluator) -> np.ndarray:
    """Return a vector for each text, the same for texts that are judged alike and orthogonal for others."""
    vectors = np.eye(len(exam.split))
    for n, (others, values) in enumerate(zip(exam.split["related"], exam.split["relevance"], strict=True)):
        for other, value in zip(others, values, strict=True):
            vectors[other] = value * vectors[n] + (1 - value) * vectors[other]
    return vectors


CASES: Mapping[str, Case] = {
    "classification": Case(table("text label", lambda draw, n: (words(draw), ("bad", "fine", "good")[n % 3])), one_hot),
    "multilabel": Case(
        table("text label", lambda draw, n: (words(draw), ("a|b", "b", "a", "b|c")[n % 4])),
        lambda exam: 8 * exam.labels - 4,
    ),
    "regression": Case(
        table("text label", lambda draw, n: (words(draw), n % 7 + 0.5)), lambda exam: exam.labels[:, None]
    ),
    "tagging": Case(lambda folder: marked.sentences(folder / "train.conll", count=60), tagged, 6),
    "qa": Case(lambda folder: marked.questions(folder / "train.json", count=60), spans, 16),
    "embedding": Case(
        table("one other similarity", lambda draw, n: (f"{words(draw)} a{n}", f"{words(draw)} b{n}", n % 2)), pointing
    ),
    "ranking": Case(
        lambda folder: marked.rankings(folder / "train.tsv", count=40), lambda exam: exam.candidates.label_R[:, None]
    ),
    TOY: Case(table("text label", lambda draw, n: (words(draw), n % 4)), lambda exam: exam.labels[:, None]),
}
