"""Check evaluators of questions and tagged words, however they are cut into rows, and their baselines."""

from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForQuestionAnswering, AutoModelForTokenClassification

from compress.data import TaskData, load_task
from compress.data.collate import Collate
from compress.data.constants import IGNORE_INDEX
from compress.data.task import Task
from compress.evaluation import baselines, metrics
from compress.evaluation.evaluator import Evaluator
from compress.training.teacher_cache import teacher_cache
from tests import marked, tiny

LENGTH = 10
"""Tokens of a row: every sentence and context needs several."""


@pytest.fixture
def words(tmp_path: Path) -> TaskData:
    return load_task(str(marked.sentences(tmp_path / "words.conll", count=40)))


@pytest.fixture
def asked(tmp_path: Path) -> TaskData:
    return load_task(str(marked.questions(tmp_path / "questions.json", count=40)))


def exam(data: TaskData, length: int = LENGTH) -> Evaluator:
    return Evaluator.from_split(data.task, data.train, tiny.tokenizer(), length)


def perfect(exam: Evaluator) -> np.ndarray:
    """Logits that say what the rows' labels say."""
    parts = []
    for row in exam.rows:
        logits = np.zeros((row["length"], exam.task.outputs))
        if exam.task.kind == "qa":
            first, last = row["labels"]
            logits[first, 0] = logits[last, 1] = 5.0
        else:
            for at, label in enumerate(row["labels"]):
                logits[at, max(label, 0)] = -5.0 if label == IGNORE_INDEX else 5.0
        parts.append(logits)
    return np.concatenate(parts)


def test_words_without_tokens_are_outside() -> None:
    split = Dataset.from_dict({"words": [["\u200b", "good"]], "tags": [[1, 1]]})
    task = Task("tagging", ("words",), "tags", ("O", "B-x"), "f1")
    test = Evaluator.from_split(task, split, tiny.tokenizer(), 8)
    assert test.tags(np.array([[0.0, 1.0]] * 3)) == [["O", "B-x"]]


def test_agreement(words: TaskData, asked: TaskData) -> None:
    test = exam(words)
    right, other = perfect(test), perfect(test)
    at = int(np.flatnonzero(np.concatenate([np.array(row["word"]) >= 0 for row in test.rows]))[0])
    other[at] = -other[at]
    total = sum(map(len, words.train["words"]))
    assert test.agreement(right, right) == 1.0
    assert test.agreement(other, right) == pytest.approx(1 - 1 / total)
    test = exam(asked, 32)
    assert test.agreement(perfect(test), 3 * perfect(test)) == 1.0
    answered = test.agreement(perfect(test), perfect(test), thresholds=(-np.inf, None))
    assert answered == pytest.approx(1 / 4)  # one says nothing at all, the other leaves a quarter unanswered


def test_threshold(asked: TaskData) -> None:
    test = exam(asked, 32)
    logits = perfect(test)
    silent = test.scores(logits, threshold=-np.inf)
    assert (silent["f1"], silent["f1_answerable"], silent["f1_of_spans"]) == (pytest.approx(1 / 4), 0.0, 1.0)
    assert test.scores(logits, threshold=np.inf)["f1"] == pytest.approx(3 / 4)
    assert test.scores(logits, threshold=test.threshold(logits))["f1"] == 1.0
    certain = Task("qa", asked.task.text, asked.task.label, (), "f1")
    assert Evaluator(certain, test.split, test.rows).threshold(logits) == np.inf


@pytest.mark.parametrize("padding", ["right", "left"])
def test_logits_equal_those_of_single_rows(padding: str, words: TaskData, asked: TaskData, tmp_path: Path) -> None:
    for data, head in ((words, AutoModelForTokenClassification), (asked, AutoModelForQuestionAnswering)):
        test = exam(data, 16)
        model = tiny.model("bert", head=head, labels=data.task.outputs)
        found = metrics.logits(model, test.rows, Collate(tiny.tokenizer()), batch=5)
        assert found.shape == (sum(test.rows["length"]), data.task.outputs)
        at = 0
        for row in test.rows.select(range(6)):
            with torch.no_grad():
                out = model(
                    input_ids=torch.tensor([row["input_ids"]]), token_type_ids=torch.tensor([row["token_type_ids"]])
                )
            alone = out.logits if "logits" in out else torch.stack([out.start_logits, out.end_logits], -1)
            np.testing.assert_allclose(found[at : at + row["length"]], alone[0], atol=1e-5)
            at += row["length"]
        collate = Collate(tiny.tokenizer(), left=padding == "left")
        kept = teacher_cache(
            model, test.rows, collate, tmp_path / data.task.kind, wants=frozenset({"logits"}), layers=[], batch=7
        )
        batch = collate([test.rows[n] for n in (2, 0, 5)])
        shown = kept.signals(batch, frozenset({"logits"})).logits
        starts = np.cumsum([0, *test.rows["length"]])
        expected = np.concatenate([found[starts[n] : starts[n + 1]] for n in (2, 0, 5)])
        np.testing.assert_allclose(shown[batch["attention_mask"].bool()], expected, atol=1e-4)


def test_baselines_of_words(words: TaskData) -> None:
    found = words.task.baselines(words, words.validation)
    assert list(found) == ["majority", "tag of each word"]
    assert found["majority"]["f1"] == 0.0
    assert found["majority"]["accuracy"] > 0.3
    assert 0.7 < found["tag of each word"]["f1"] <= 1.0
    assert found["tag of each word"]["accuracy"] > found["majority"]["accuracy"]


def test_baselines_of_questions(asked: TaskData) -> None:
    found = asked.task.baselines(asked, asked.train)
    assert list(found) == ["majority", "nearest sentence"]
    assert found["majority"]["f1"] == pytest.approx(1 / 4)
    split = Dataset.from_dict(
        {
            "question": ["Who sells fish?", "Anything?"],
            "context": ["Bread is sold. Fish is what Ann sells! Ann sells.", ""],
            "answers": [["Ann"], ["x"]],
        }
    )
    # "fish is what ann sells" and "ann": one word of 5 + 1
    assert baselines.nearest_sentence(split)["f1"] == pytest.approx((2 / 6 + 0) / 2)
