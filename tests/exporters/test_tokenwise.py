"""Bundles of questions and of words: both files compute the model, and predicting is what examining does."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForQuestionAnswering, AutoModelForTokenClassification

from compress.data import load_task
from compress.data.windows import find_words
from compress.evaluation.evaluator import Evaluator
from compress.exporters.artifact import Bundle
from tests import marked, tiny

HEADS = {"qa": AutoModelForQuestionAnswering, "tagging": AutoModelForTokenClassification}


Written = Callable[..., tuple[Bundle, Any, Evaluator]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Write each bundle once; tests only read it."""
    return cache(lambda kind, length=20: write_bundle(tmp_path_factory.mktemp("written"), kind, length))


def write_bundle(folder: Path, kind: str, length: int) -> tuple[Bundle, Any, Evaluator]:
    """A bundle of random weights, its model, and an evaluator whose texts need several rows."""
    write, name = (marked.questions, "train.json") if kind == "qa" else (marked.sentences, "train.conll")
    data = load_task(str(write(folder / name, count=40)))
    model = tiny.model("bert", head=HEADS[kind], labels=data.task.outputs)
    bundle = tiny.bundle(folder / "bundle", model=model, task=data.task, max_length=length)
    return bundle, model, Evaluator.from_split(data.task, data.train, tiny.tokenizer(), length)


def test_answers_are_those_of_the_evaluator(written: Written, tmp_path: Path) -> None:
    shared, _, evaluator = written("qa")
    bundle = shared.copy_to(tmp_path / "bundle")
    logits = bundle.logits(evaluator.rows, precision="fp32")
    margins = evaluator.spans(logits).margin_Q
    threshold = float(np.median(margins))
    bundle = bundle.set_threshold(threshold)
    assert Bundle.load(bundle.path).manifest.threshold == threshold
    pairs = list(zip(evaluator.split["question"][:], evaluator.split["context"][:], strict=True))
    found = Bundle.load(bundle.path).predict(pairs, precision="fp32")
    assert [answer.text for answer in found] == evaluator.texts(logits, threshold=threshold)
    assert {answer.text == "" for answer in found} == {True, False}
    for answer, (_, context) in zip(found, pairs, strict=True):
        assert context[answer.start : answer.end] == answer.text
        assert 0 < answer.score <= 1
    always = bundle.set_threshold(float("inf")).predict(pairs, precision="fp32")
    assert all(answer.text for answer in always)
    assert bundle.predict([]) == []


def test_the_probability_of_an_answer_is_over_its_context_and_none(written: Written) -> None:
    bundle, model, _ = written("qa", 64)
    (answer,) = bundle.set_threshold(float("inf")).predict([("is it ?", "the good film")], precision="fp32")
    batch = tiny.tokenizer()("is it ?", "the good film", return_tensors="pt")
    with torch.no_grad():
        out = model(**batch)
    possible = [0, 5, 6, 7]
    assert batch["input_ids"].shape[1] == 9
    first, last = (logits[0, possible].softmax(0)[1:] for logits in (out.start_logits, out.end_logits))
    best = max(float(first[i] * last[j]) for i in range(3) for j in range(i, 3))
    assert answer.score == pytest.approx(best, abs=1e-5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "@paulwalk saw it, http://t.co/a?b=1 #now!",
            ["@paulwalk", "saw", "it", ",", "http://t.co/a?b=1", "#now", "!"],
        ),
        ("U.S.-based A&M won't pay 3.5%.", ["U.S", ".", "-", "based", "A&M", "won't", "pay", "3.5", "%", "."]),
        ("Zoë🙂 東京 — naïve", ["Zoë", "🙂", "東", "京", "—", "naïve"]),
        ("नरेंद्र मोदी दिल्ली में हैं।", ["नरेंद्र", "मोदी", "दिल्ली", "में", "हैं", "।"]),
        ("வணக்கம், السَّلام-عليكم", ["வணக்கம்", ",", "السَّلام-عليكم"]),
        ("می\u200cخواهم Donau\u00addampf cafe\u0301s", ["می\u200cخواهم", "Donau\u00addampf", "cafe\u0301s"]),
        ("I ❤\ufe0f葛\U000e0100城 1\ufe0f\u20e3", ["I", "❤\ufe0f", "葛\U000e0100", "城", "1\ufe0f\u20e3"]),
        ("\u0301 a", ["\u0301", "a"]),
        ("王明2021年去iPhone店, カタ 서울에서", [*"王明", "2021", *"年去", "iPhone", "店", ",", *"カタ", "서울에서"]),
        ("  \n", []),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert [text[start:end] for start, end in find_words(text)] == words
