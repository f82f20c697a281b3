"""Scores of each class: as scikit-learn has them, and which falls are told from chance."""

from types import SimpleNamespace

import numpy as np
import pytest
from sklearn.metrics import f1_score, precision_recall_fscore_support

from compress.data.task import Task
from compress.evaluation import metrics
from compress.records.class_scores import (
    ClassChange,
    ClassScore,
    compare_classes,
    describe_changes,
    macro_f1,
    select_fallen,
)

THREE = Task("classification", ("text",), "label", ("a", "b", "c"), "accuracy")
MANY = Task("multilabel", ("text",), "label", ("x", "y"), "f1")


def test_scores_by_class_equal_scikit_learn() -> None:
    draw = np.random.default_rng(0)
    logits, labels = draw.normal(size=(60, 3)), draw.integers(0, 3, 60)
    found = THREE.by_class(SimpleNamespace(labels=labels), logits)
    expected = precision_recall_fscore_support(labels, logits.argmax(1), labels=[0, 1, 2], zero_division=0.0)
    assert [(one.precision, one.recall, one.f1, one.support) for one in found] == [
        pytest.approx(values) for values in zip(*expected, strict=True)
    ]
    assert [one.label for one in found] == ["a", "b", "c"]
    assert macro_f1(found) == pytest.approx(f1_score(labels, logits.argmax(1), average="macro"))


@pytest.mark.parametrize("classes", [1, 2, 3, 5])
def test_f1_equals_scikit_learn(classes: int) -> None:
    """Of few rows, so that some classes are neither predicted nor true."""
    draw = np.random.default_rng(classes)
    names = tuple(f"class {n}" for n in range(classes))
    one, many = (Task(kind, ("text",), "label", names, "f1") for kind in ("classification", "multilabel"))
    for _ in range(6):
        logits, labels = draw.normal(size=(4, classes)), draw.integers(0, classes, 4)
        flags = (draw.random((4, classes)) < 0.3).astype(float)
        average, chosen = ("binary" if classes == 2 else "macro"), {"zero_division": 0.0}
        assert one.score_rows(logits, labels)["f1"] == pytest.approx(
            f1_score(labels, logits.argmax(1), average=average, **chosen)
        )
        found, columns = many.score_rows(logits, flags), range(classes)
        assert found["f1"] == pytest.approx(f1_score(flags.ravel(), (logits > 0).ravel(), **chosen))
        macro = [f1_score(flags[:, n], logits[:, n] > 0, **chosen) for n in columns]
        assert found["f1_macro"] == pytest.approx(np.mean(macro))


def test_scores_by_class_of_multilabel() -> None:
    truth = np.array([[1, 0], [1, 1], [0, 0], [1, 0]], dtype=np.float32)
    found = MANY.by_class(SimpleNamespace(labels=truth), np.array([[1, -1], [-1, -1], [1, -1], [1, -1]]))
    assert found == (ClassScore("x", 2 / 3, 2 / 3, 2 / 3, 3), ClassScore("y", 0.0, 0.0, 0.0, 1))
    assert Task("regression", ("text",), "label", (), "pearson").by_class(None, np.zeros((2, 1))) == ()


def test_scores_by_label() -> None:
    found = metrics.scores_by_label([["B-PER", "I-PER", "O", "B-LOC"]], [["B-PER", "I-PER", "B-ORG", "O"]])
    assert {one.label: (one.precision, one.recall, one.support) for one in found} == {
        "LOC": (0.0, 0.0, 0), "ORG": (0.0, 0.0, 1), "PER": (1.0, 1.0, 1),
    }  # fmt: skip


def test_macro_f1() -> None:
    found = (ClassScore("a", 1.0, 0.5, 0.6, 4), ClassScore("b", 0.0, 0.0, 0.0, 0), ClassScore("c", 1.0, 1.0, 1.0, 2))
    assert macro_f1(found) == pytest.approx(0.8)
    assert macro_f1(()) is None


@pytest.mark.parametrize(
    ("change", "collapsed", "lost"),
    [
        (ClassChange("six of nine to none", 6 / 9, 0.0, 9), True, True),
        (ClassChange("one row", 1.0, 0.0, 1), False, True),
        (ClassChange("three rows, one less", 1.0, 2 / 3, 3), False, False),
        (ClassChange("far, and many rows", 0.95, 0.60, 100), True, False),
        (ClassChange("a little, and many rows", 0.95, 0.90, 5000), False, False),
        (ClassChange("better", 0.5, 0.9, 100), False, False),
        (ClassChange("never there", 0.0, 0.0, 100), False, False),
    ],
)
def test_collapsed_classes(change: ClassChange, collapsed: bool, lost: bool) -> None:
    assert (change.collapsed, change.lost) == (collapsed, lost)
    assert bool(select_fallen([change])) == (collapsed or lost)


def test_describe_falls() -> None:
    before = [ClassScore(f"c{n}", 1.0, 1.0, 1.0, 50) for n in range(6)]
    after = [ClassScore(f"c{n}", 1.0, n / 10, 1.0, 50) for n in range(6)]
    found = select_fallen(compare_classes(before, after))
    assert [one.label for one in found] == ["c0", "c1", "c2", "c3", "c4", "c5"]
    assert "nothing of c0 (recall 1.000 to 0.000, support 50)" in describe_changes(found)
    assert describe_changes(found).endswith("and 3 more")
