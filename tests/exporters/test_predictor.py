"""A bundle predicts what torch and transformers would, whatever company a text is in."""

import atexit
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer

from compress.data.answers import Outcome, Prediction
from compress.data.collate import Collate
from compress.data.encoder import Text
from compress.data.task import Task
from compress.data.tokenize import encode
from compress.errors import ArgumentError, BundleError, DataError
from compress.evaluation import metrics
from compress.exporters.artifact import Bundle
from compress.exporters.predictor import answer_lines
from compress.kinds import Kind
from tests import tiny

TEXTS = [
    "A good film!",
    "the plot is never dull, but slow",
    "",
    "bad bad BAD",
    "so sharp and warm and fun and not too cold . " * 9,
    "unknown wörds ?",
]
PAIRS = list(zip(TEXTS, TEXTS[::-1], strict=True))
LABELS = ("no", "maybe", "yes")


@cache
def bundle(kind: Kind, *, pair: bool = False) -> tuple[Bundle, Any]:
    """A written bundle with the model that is in it: its head is moved and widened, so that TEXTS get all answers."""
    labels = () if kind == "regression" else LABELS
    task = Task(kind, ("one", "two") if pair else ("one",), "label", labels, "f1")
    model = tiny.bert(len(labels) or 1)
    with torch.no_grad():
        words = tiny.tokenizer()(TEXTS, padding=True, truncation=True, max_length=12, return_tensors="pt")
        seen = model(**words).logits
        model.classifier.weight.mul_(4)
        model.classifier.bias.sub_(4 * seen.mean(0))
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    return tiny.bundle(folder / "bundle", model=model, task=task, max_length=12), model


def expected(written: Bundle, model: Any, texts: list[Any]) -> torch.Tensor:
    """Logits of torch on what the bundle's tokenizer, loaded by transformers, gives for one padded batch."""
    tokenizer = AutoTokenizer.from_pretrained(written.path)
    columns = list(zip(*texts, strict=True)) if isinstance(texts[0], tuple) else [texts]
    batch = tokenizer(*map(list, columns), truncation=True, padding=True, return_tensors="pt")
    with torch.no_grad():
        return model(**batch).logits


@pytest.mark.parametrize("texts", [TEXTS, PAIRS], ids=["single", "pairs"])
def test_a_tokenizer_that_keeps_the_end_of_a_text_is_read_the_same_everywhere(texts: list[Any], tmp_path: Path) -> None:
    """By `predict`, by scoring, and by transformers with the bundle's tokenizer and with the teacher's."""
    tokenizer = tiny.tokenizer()
    tokenizer.truncation_side = "left"
    task = Task("classification", ("one", "two") if texts is PAIRS else ("one",), "label", LABELS, "f1")
    model = tiny.bert(3)
    written = tiny.bundle(tmp_path, model=model, tokenizer=tokenizer, task=task, max_length=12)
    wanted = expected(written, model, texts)
    predictor = written.open("fp32")
    found = predictor.logits(predictor.encode(texts))
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    columns = [texts] if texts is TEXTS else list(zip(*texts, strict=True))
    split = Dataset.from_dict({name: list(each) for name, each in zip(("text", "text_pair"), columns, strict=False)})
    np.testing.assert_array_equal(written.logits(written.evaluator(split).rows, precision="fp32"), found)
    rows = encode(split, tokenizer, 12)
    np.testing.assert_allclose(metrics.logits(model, rows, Collate(tokenizer)), wanted, atol=1e-5)
    assert not np.allclose(expected(bundle("classification", pair=texts is PAIRS)[0], model, texts), wanted, atol=1e-2)


@dataclass(frozen=True)
class Fussy:
    """Refuses an empty text, as a predictor does whose tokenizer has no padding token."""

    task: Task

    def predict(self, texts: Sequence[Text]) -> Sequence[Outcome]:
        if "" in texts:
            raise DataError("a text has no tokens")
        return [Prediction("", 1.0, {}) for _ in texts]


def test_a_text_that_cannot_be_read_is_the_error_of_its_line() -> None:
    lines = list(answer_lines(Fussy(Task("regression", ("text",), "score", (), "pearson")), [b"a", b"", b"b", b"\xff"]))
    assert [line.error.partition(":")[0] for line in lines] == ["", "line 2", "", "line 4"]
    assert [line.answer is None for line in lines] == [False, True, False, True]


@pytest.mark.parametrize("texts", [TEXTS, PAIRS], ids=["single", "pairs"])
def test_classes_are_torchs(texts: list[Any]) -> None:
    written, model = bundle("classification", pair=texts is PAIRS)
    probabilities = expected(written, model, texts).softmax(-1).tolist()
    found = written.predict(texts, precision="fp32", threads=2)
    assert [list(answer.scores) for answer in found] == [list(LABELS)] * len(texts)
    for answer, row in zip(found, probabilities, strict=True):
        assert list(answer.scores.values()) == pytest.approx(row, abs=1e-5)
        assert (answer.label, answer.score) == max(answer.scores.items(), key=lambda item: item[1])
    assert len({answer.label for answer in found}) > 1
    close = zip(written.predict(texts), probabilities, strict=True)
    assert all(list(answer.scores.values()) == pytest.approx(row, abs=0.1) for answer, row in close)


def test_multilabel_names_every_label_that_is_probable() -> None:
    written, model = bundle("multilabel")
    probabilities = expected(written, model, TEXTS).sigmoid().tolist()
    found = written.predict(TEXTS, precision="fp32")
    for answer, row in zip(found, probabilities, strict=True):
        assert list(answer.scores.values()) == pytest.approx(row, abs=1e-5)
        chosen = [label for label, value in zip(LABELS, row, strict=True) if value > 0.5]
        assert answer.label == ", ".join(chosen)
        assert answer.score == pytest.approx(max(row), abs=1e-5)


def test_regression_is_a_number() -> None:
    written, model = bundle("regression", pair=True)
    numbers = expected(written, model, PAIRS)[:, 0].tolist()
    found = written.predict(PAIRS, precision="fp32")
    assert [answer.score for answer in found] == pytest.approx(numbers, abs=1e-5)
    assert all((answer.label, answer.scores) == ("", {}) for answer in found)


@pytest.mark.parametrize("precision", ["int8", "fp32"])
def test_logits_do_not_depend_on_other_rows(precision: Any) -> None:
    written, _ = bundle("classification")
    rows = [tiny.tokenizer()(text, truncation=True, max_length=12) for text in TEXTS]
    together = written.logits(rows, precision=precision, threads=3)
    alone = np.concatenate([written.logits([row], precision=precision) for row in rows])
    assert together.dtype == np.float32
    assert (together == alone).all()
    assert written.logits([], precision=precision).shape == (0, 3)


def test_wrong_inputs_are_refused() -> None:
    single, _ = bundle("classification")
    pairs, _ = bundle("classification", pair=True)
    with pytest.raises(ArgumentError, match=r"expected one text \(one\)"):
        single.predict([("a", "b")])
    for wrong in ("ab", ("a", "b", "c"), ("a", 1)):
        with pytest.raises(ArgumentError, match=r"expected a pair of texts \(one and two\)"):
            pairs.predict([wrong])  # type: ignore[list-item]  # what is tested
    with pytest.raises(BundleError, match="expected token_type_ids too"):
        single.logits([{"input_ids": [2, 3], "attention_mask": [1, 1]}])
    assert single.predict([]) == []
