"""Check metrics against values computed by hand, the order of a model's logits, and the baselines of texts."""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import nn

from compress.data.task import Task, TaskData
from compress.errors import CompressError, DataError
from compress.evaluation import baselines, metrics
from compress.evaluation.evaluator import Evaluator
from compress.kinds import Kind


def task(kind: Kind = "classification", labels: int = 2, *, pair: bool = False, metric: str = "accuracy") -> Task:
    text = ("one", "two") if pair else ("one",)
    return Task(kind, text, "label", tuple(f"class {n}" for n in range(labels)), metric)


def answers(*classes: int, of: int = 2) -> np.ndarray:
    """Logits (rows, of) whose largest is at the given classes."""
    return np.eye(of)[list(classes)] * 3 - 1


NUMBER = task("regression", 0, metric="pearson")
TAGS = task("multilabel", 3, metric="f1")
NO_THRESHOLDS = (None, None)


def test_binary_classification() -> None:
    # the last class: 2 found and right, 1 found and wrong, 1 missed; 1 rightly passed over
    found = task().score_rows(answers(1, 1, 1, 0, 0), np.array([1, 1, 0, 1, 0]))
    assert found["accuracy"] == pytest.approx(3 / 5)
    assert found["f1"] == pytest.approx(2 * 2 / (2 * 2 + 1 + 1))
    assert found["matthews"] == pytest.approx((2 * 1 - 1 * 1) / math.sqrt(3 * 3 * 2 * 2))


def test_f1_of_three_classes_is_macro() -> None:
    found = task(labels=3).score_rows(answers(0, 1, 1, 2, of=3), np.array([0, 1, 2, 2]))
    assert found["f1"] == pytest.approx((1 + 2 / 3 + 2 / 3) / 3)
    assert found["accuracy"] == pytest.approx(3 / 4)


@pytest.mark.parametrize(
    ("predicted", "true"), [((1, 1, 1), (0, 1, 1)), ((0, 0, 0), (0, 0, 0)), ((0, 1, 0), (1, 1, 1))]
)
def test_constant_classes_have_no_correlation(predicted: Sequence[int], true: Sequence[int]) -> None:
    found = task().score_rows(answers(*predicted), np.array(true))
    assert found["matthews"] == 0.0
    assert np.isfinite(list(found.values())).all()


def test_regression() -> None:
    found = NUMBER.score_rows(np.array([[1.0], [2.0], [4.0]]), np.array([1.0, 3.0, 2.0]))
    assert found["mse"] == pytest.approx((0 + 1 + 4) / 3)
    # deviations (-4/3, -1/3, 5/3) and (-1, 1, 0)
    assert found["pearson"] == pytest.approx((4 / 3 - 1 / 3) / math.sqrt(42 / 9 * 2))
    assert found["spearman"] == pytest.approx(0.5)


@pytest.mark.parametrize("value", [0.0, 2.7, 1e9])
def test_constant_numbers_have_no_correlation(value: float) -> None:
    found = NUMBER.score_rows(np.full((4, 1), value, dtype=np.float32), np.array([1.0, 3.0, 2.0, 5.0]))
    assert found["pearson"] == found["spearman"] == 0.0
    assert NUMBER.score_rows(np.array([[1.0], [2.0]]), np.array([value, value]))["pearson"] == 0.0


def test_multilabel() -> None:
    logits = np.array([[1.0, -1.0, -1.0], [1.0, 1.0, -1.0], [-1.0, 0.0, 2.0]])
    labels = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0], [0.0, 0.0, 1.0]])
    found = TAGS.score_rows(logits, labels)
    # by label: (1 right, 1 wrong, 0 missed), (1, 0, 0), (1, 0, 1); a logit of 0 is no decision for the label
    assert found["f1"] == pytest.approx(2 * 3 / (2 * 3 + 1 + 1))
    assert found["f1_macro"] == pytest.approx((2 / 3 + 1 + 2 / 3) / 3)
    assert found["accuracy"] == pytest.approx(2 / 3)


def test_single_label_counts_positives() -> None:
    found = task("multilabel", 1).score_rows(np.array([[-1.0], [-1.0], [1.0]]), np.array([[0.0], [1.0], [1.0]]))
    assert found["f1"] == found["f1_macro"] == pytest.approx(2 / 3)


def test_labels_never_predicted_score_zero() -> None:
    found = TAGS.score_rows(np.full((2, 3), -1.0), np.zeros((2, 3)))
    assert found == {"f1": 0.0, "f1_macro": 0.0, "accuracy": 1.0}


@pytest.mark.parametrize(
    ("which", "logits", "labels", "error", "match"),
    [
        (task(), np.array([[0.0, np.nan], [0.0, 1.0]]), np.array([0, 1]), CompressError, "1 of 2 rows are not finite"),
        (task(), answers(0, 1, of=3), np.array([0, 1]), CompressError, r"shape \(2, 3\)"),
        (task(), answers(0, 1), np.array([0, 1, 1]), CompressError, r"expected \(3, 2\)"),
        (task(), np.zeros((0, 2)), np.zeros(0, dtype=int), CompressError, "at least one of the rows"),
        (task(), answers(0, 1), np.array([-1, -1]), DataError, "hidden labels"),
        (task(), answers(0, 1), np.array([0, 2]), DataError, "0 to 1"),
        (NUMBER, np.zeros((2, 1)), np.array([0.0, np.nan]), DataError, "not finite"),
    ],
)
def test_invalid_logits_or_labels(
    which: Task, logits: np.ndarray, labels: np.ndarray, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        which.score_rows(logits, labels)


def test_agreement() -> None:
    assert task().agreement(None, answers(0, 1, 1, 0), answers(0, 1, 0, 0), NO_THRESHOLDS) == 0.75
    one, other = np.array([[1.0, -1.0, -2.0]]), np.array([[5.0, 1.0, -3.0]])
    assert TAGS.agreement(None, one, other, NO_THRESHOLDS) == pytest.approx(2 / 3)
    line = np.array([[1.0], [2.0], [4.0]])
    assert NUMBER.agreement(None, line, 2 * line + 1, NO_THRESHOLDS) == pytest.approx(1.0)
    assert NUMBER.agreement(None, line, np.ones((3, 1)), NO_THRESHOLDS) == 0.0


def test_agreement_needs_the_same_rows() -> None:
    with pytest.raises(CompressError, match="same rows"):
        Evaluator(task(), None, None).agreement(answers(0, 1), answers(0, 1, 1))  # type: ignore[arg-type]


class Sums(nn.Module):
    """Logits (the sum of the tokens, a tenth of it by a matrix product), with dropout that would show in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.dropout = nn.Dropout(0.5)
        self.frozen = nn.Dropout(0.5).eval()
        self.lengths: list[int] = []

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor | None = None
    ) -> SimpleNamespace:
        assert labels is None and torch.is_inference_mode_enabled()
        assert not any(module.training for module in self.modules())
        self.lengths.append(input_ids.shape[1])
        sums = (self.dropout(self.weight * input_ids.float()) * attention_mask).sum(dim=1)
        return SimpleNamespace(logits=torch.stack([sums, (sums * 0.1) @ torch.eye(len(sums))], dim=1))


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    assert all(row.keys() == {"input_ids", "label"} for row in rows)
    width = max(len(row["input_ids"]) for row in rows)
    padded = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows])
    labels = torch.tensor([row["label"] for row in rows])
    return {"input_ids": padded, "attention_mask": (padded != 0).long(), "labels": labels, "index": labels}


def encoded(lengths: Sequence[int]) -> Dataset:
    ids = [[row + 1] * length for row, length in enumerate(lengths)]
    return Dataset.from_dict({"input_ids": ids, "length": list(lengths), "label": [0] * len(ids)})


def test_logits_keep_row_order_and_module_modes() -> None:
    lengths = [3, 9, 1, 4, 4, 8, 2]
    model = Sums()
    found = metrics.logits(model, encoded(lengths), collate, batch=2)
    assert found.dtype == np.float32 and found.shape == (7, 2)
    assert found[:, 0].tolist() == [(row + 1) * length for row, length in enumerate(lengths)]
    assert model.lengths == [9, 4, 3, 1]
    assert model.training and model.dropout.training and not model.frozen.training


def test_bf16_logits_are_float32() -> None:
    found = metrics.logits(Sums(), encoded([3, 5]), collate, bf16=True)
    assert found.dtype == np.float32
    assert found[:, 1] == pytest.approx([0.3, 1.0], rel=1e-2)
    assert found[0, 1] != np.float32(0.3)


def test_modes_are_restored_after_an_error() -> None:
    model = Sums()
    with pytest.raises(ZeroDivisionError):
        metrics.logits(model, encoded([3]), lambda rows: {"input_ids": 1 // 0})
    assert model.training and model.dropout.training and not model.frozen.training


def test_logits_of_no_rows() -> None:
    with pytest.raises(DataError, match="no rows"):
        metrics.logits(Sums(), encoded([3]).select([]), collate)


def data(which: Task, train: dict[str, list[Any]], test: dict[str, list[Any]]) -> TaskData:
    split = Dataset.from_dict(test)
    return TaskData("tiny", which, Dataset.from_dict(train), split, None, "0")


def test_majority_follows_the_training_set() -> None:
    tiny = data(task(), {"text": ["a"] * 3, "label": [0, 0, 1]}, {"text": ["a"] * 4, "label": [1, 1, 1, 0]})
    assert tiny.task.majority(tiny, tiny.validation)["accuracy"] == 0.25
    tiny = data(NUMBER, {"text": ["a"] * 2, "label": [1.0, 2.0]}, {"text": ["a"] * 2, "label": [1.5, 3.5]})
    assert tiny.task.majority(tiny, tiny.validation) == {"pearson": 0.0, "spearman": 0.0, "mse": 2.0}
    tags = {"text": ["a"] * 3, "label": [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]}
    tiny = data(TAGS, tags, tags)
    assert tiny.task.majority(tiny, tiny.validation)["f1"] == pytest.approx(2 * 2 / (2 * 2 + 1 + 1))


GOOD, BAD = ["a fine film", "fine acting", "so fine !"], ["a dull film", "dull acting", "so dull !"]


NAMES = ["ant", "bee", "cat", "dog", "elk", "fox", "gnu", "hen"]
PAIRS = [(one, other) for one in NAMES for other in NAMES]


@pytest.mark.parametrize(
    ("which", "train", "test", "expected"),
    [
        (
            task(),
            {"text": GOOD + BAD, "label": [1] * 3 + [0] * 3},
            {"text": ["fine and new", "dull"], "label": [1, 0]},
            1.0,
        ),
        (  # pairs of words, and signs
            task(),
            {"text": ["not good", "good not", "? good", "good ?"] * 3, "label": [0, 1, 0, 1] * 3},
            {"text": ["not good", "good not", "? good", "good ?"], "label": [0, 1, 0, 1]},
            1.0,
        ),
        (  # one of three classes is not in train
            task(labels=3),
            {"text": GOOD + BAD, "label": [2] * 3 + [0] * 3},
            {"text": ["fine", "dull", "odd"], "label": [2, 0, 1]},
            pytest.approx(2 / 3),
        ),
        (task(), {"text": GOOD, "label": [1] * 3}, {"text": ["fine", "dull"], "label": [1, 0]}, 0.5),
        (
            TAGS,
            {
                "text": ["red car", "red sky", "blue car", "blue sky"] * 2,
                "label": [[1.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]] * 2,
            },
            {"text": ["red red car", "blue sky"], "label": [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]},
            1.0,
        ),
        (
            task("regression", 0, pair=True, metric="pearson"),
            {
                "text": [one for one, _ in PAIRS],
                "text_pair": [other for _, other in PAIRS],
                "label": [5.0 * (one == other) for one, other in PAIRS],
            },
            {"text": ["ant", "yak", "bee"], "text_pair": ["ant", "bee", "dog"], "label": [5.0, 1.0, 0.0]},
            pytest.approx(0.95, abs=0.05),
        ),
    ],
    ids=["words", "bigrams", "unseen class", "one class", "multilabel", "pairs"],
)
def test_bag_of_words(which: Task, train: dict[str, Any], test: dict[str, Any], expected: Any) -> None:
    tiny = data(which, train, test)
    scores = baselines.bag_of_words(tiny, tiny.validation)
    assert scores["pearson" if which.kind == "regression" else "accuracy"] == expected
    assert scores == baselines.bag_of_words(tiny, tiny.validation)


def test_bag_of_words_without_a_word() -> None:
    tiny = data(task(), {"text": ["", " "], "label": [0, 1]}, {"text": ["a"], "label": [0]})
    with pytest.raises(DataError, match="have no words"):
        baselines.bag_of_words(tiny, tiny.validation)


def test_bag_of_words_limits_rows_and_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "BAG_ROWS", 10)
    texts, labels = (["fine", "dull"] * 15), ([1, 0] * 15)
    tiny = data(task(), {"text": texts, "label": labels}, {"text": ["fine", "dull"], "label": [1, 0]})
    seen, known = baselines._bag(tiny)
    assert len(seen[0]) == len(known) == 10
    assert baselines.bag_of_words(tiny, tiny.validation)["accuracy"] == 1.0
    monkeypatch.setattr(baselines, "BAG_CHARACTERS", 20)
    assert len(baselines._bag(tiny)[0][0]) == 5
