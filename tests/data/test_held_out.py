"""Many rows are not needed to decide: at most 10,000 are held out, of every class, and both numbers are said."""

import json
from collections import Counter

import numpy as np
import pytest

from compress.data import load_task
from compress.data.held_out import DECIDING_ROWS, describe_held_out, held_out_share
from compress.data.load import hold_out
from compress.tasks.classification import Classification
from tests.data.conftest import Folder

TASK = Classification("classification", ("text",), "label", ("a", "b", "c"), "accuracy")


@pytest.mark.parametrize("rows", [99_990, 150_000, 1_000_000])
def test_a_held_out_split_is_stratified_and_bounded(rows: int) -> None:
    labels = np.random.default_rng(0).choice(3, rows, p=[0.7, 0.299, 0.001])
    mask = hold_out(labels, TASK, 0, np.arange(rows))
    assert mask.sum() == pytest.approx(min(rows / 10, DECIDING_ROWS), rel=0.02)
    assert mask.sum() <= DECIDING_ROWS
    whole, held_out = Counter(labels.tolist()), Counter(labels[mask].tolist())
    for name, count in whole.items():
        assert held_out[name] == pytest.approx(count * mask.sum() / rows, abs=1.01)


def test_rows_that_repeat_are_held_out_together() -> None:
    labels = np.repeat([0, 1], 500)
    texts = np.where(np.arange(1000) % 5, np.arange(1000), np.arange(1000) // 50)  # a fifth has one of 20 texts
    mask = hold_out(labels, TASK, 0, texts)
    assert not set(texts[mask]) & set(texts[~mask])
    assert 0.06 < mask.mean() < 0.14
    assert np.array_equal(hold_out(labels, TASK, 0, -texts), mask), "only which keys are equal counts"


def test_what_is_held_out_and_known_is_said() -> None:
    mask = np.arange(1_000_000) % 100 == 0
    assert describe_held_out(mask, 3) == (
        "no validation split: held out 10,000 of 1,000,000 training rows (seed 3), which measure an accuracy of 90 % "
        "to 0.6 points"
    )
    assert "know" not in describe_held_out(np.arange(100) % 10 == 0, 0)


def test_the_share_is_a_tenth_of_few_rows() -> None:
    assert held_out_share(100_000) == 0.1
    assert held_out_share(1_000_000) == 0.01


@pytest.mark.parametrize("seed", range(6))
def test_rows_without_a_second_text_are_not_one_row(seed: int, folder: Folder) -> None:
    rows = [{"title": f"title {n}", "body": f"body {n}" if n % 2 else None, "label": "ab"[n % 2]} for n in range(100)]
    splits = []
    for empty in (None, ""):
        lines = "".join(json.dumps({**row, "body": row["body"] or empty}) + "\n" for row in rows)
        data = load_task(folder({"train.jsonl": lines}), text=["title", "body"], seed=seed)
        splits.append(data.validation["text"][:])
    assert splits[0] == splits[1]
    assert len(splits[0]) == 10


@pytest.mark.parametrize("seed", range(6))
def test_tags_that_only_held_out_sentences_have_are_known(seed: int, folder: Folder) -> None:
    lines = "".join(f"word{n} R{n}\nis VERB\n\n" for n in range(12))
    data = load_task(folder({"train.conll": lines}), kind="tagging", metric="accuracy", seed=seed)
    assert data.task.labels == (*sorted(f"R{n}" for n in range(12)), "VERB")


@pytest.mark.parametrize("seed", range(6))
def test_queries_that_cannot_be_scored_are_not_held_out(seed: int, folder: Folder) -> None:
    rows = [f"q{n}\tp{n}\t{int(n > 3)}\nq{n}\tother\t0\n" for n in range(8)]
    data = load_task(folder({"train.tsv": "query\tpassage\trelevance\n" + "".join(rows)}), kind="ranking", seed=seed)
    assert set(data.validation["text"][:]) < {f"q{n}" for n in range(4, 8)}
