"""Entities as conlleval reads them, by hand and beside seqeval."""

import random

import pytest
from seqeval.metrics import f1_score, precision_score, recall_score
from seqeval.metrics.sequence_labeling import get_entities

from compress.data.conll import Entity, entities, iob2
from compress.evaluation import metrics


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        ("O O", []),
        ("B-a I-a O B-b", [("a", 0, 2), ("b", 3, 4)]),
        ("B-a B-a", [("a", 0, 1), ("a", 1, 2)]),
        ("O I-a I-a", [("a", 1, 3)]),  # an I without a B begins an entity
        ("B-a I-b I-b", [("a", 0, 1), ("b", 1, 3)]),  # and so does one of another label
        ("I-a I-a B-a I-a", [("a", 0, 2), ("a", 2, 4)]),  # IOB1: B only where entities touch
        ("B-a E-a S-a O", [("a", 0, 2), ("a", 2, 3)]),
        ("S-a S-a", [("a", 0, 1), ("a", 1, 2)]),
        ("B-a L-a U-b", [("a", 0, 2), ("b", 2, 3)]),
        ("B-a I-a", [("a", 0, 2)]),
        ("NOUN VERB VERB", [("NOUN", 0, 1), ("VERB", 1, 2), ("VERB", 2, 3)]),
        ("B-creative-work I-creative-work", [("creative-work", 0, 2)]),
    ],
)
def test_entities(tags: str, found: list[tuple[str, int, int]]) -> None:
    assert entities(tags.split()) == [Entity(*each) for each in found]


@pytest.mark.parametrize(
    ("tags", "written"),
    [
        ("I-a I-a B-a O I-b", "B-a I-a B-a O B-b"),
        ("B-a I-a E-a S-b", "B-a I-a I-a B-b"),
        ("U-a B-b L-b", "B-a B-b I-b"),
        ("O I-a I-b", "O B-a B-b"),
        ("B-a I-a O", "B-a I-a O"),
    ],
)
def test_iob2(tags: str, written: str) -> None:
    assert iob2(tags.split()) == written.split()


def test_entity_scores() -> None:
    truth = [["B-a", "I-a", "O"], ["B-b", "O"], ["O"]]
    said = [["B-a", "O", "O"], ["B-b", "B-a"], ["O"]]
    # said: a(0,1), b(0,1), a(1,2); true: a(0,2), b(0,1); right: b
    found = metrics.entity_scores(said, truth)
    assert found["precision"] == pytest.approx(1 / 3)
    assert found["recall"] == pytest.approx(1 / 2)
    assert found["f1"] == pytest.approx(2 / 5)
    assert found["accuracy"] == pytest.approx(4 / 6)


def test_entities_of_another_sentence() -> None:
    assert metrics.entity_scores([["B-a"], ["O"]], [["O"], ["B-a"]])["f1"] == 0.0


def test_entity_scores_without_entities() -> None:
    assert metrics.entity_scores([["O"]], [["O"]]) == {"f1": 0.0, "precision": 0.0, "recall": 0.0, "accuracy": 1.0}


def test_entities_equal_seqeval() -> None:
    draw = random.Random(0)
    tags = ["O", *(f"{prefix}-{label}" for prefix in "BIES" for label in ("x", "y"))]
    every = [[[draw.choice(tags) for _ in range(draw.randint(1, 12))] for _ in range(200)] for _ in range(2)]
    said, truth = every[0], [(other * 12)[: len(one)] for one, other in zip(*every, strict=True)]
    for each in (*said, *truth):
        assert entities(each) == [(label, first, last + 1) for label, first, last in get_entities(each)]
    found = metrics.entity_scores(said, truth)
    assert found["f1"] == pytest.approx(f1_score(truth, said))
    assert found["precision"] == pytest.approx(precision_score(truth, said))
    assert found["recall"] == pytest.approx(recall_score(truth, said))
