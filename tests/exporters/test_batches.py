"""A model of lookups answers a batch of rows bit by bit as it answers each of them alone."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compress.data.fast_tokens import TokenArrays
from compress.data.task import Task
from compress.exporters.arrow_columns import to_table
from compress.exporters.artifact import Bundle
from compress.exporters.batch_session import BatchSession
from compress.exporters.codebook import has_codebook
from compress.exporters.int8 import quantize_static
from compress.exporters.predictor import ROWS_PER_BATCH, Predictor, open_predictor
from compress.exporters.rewrite.graph import products
from compress.exporters.session import read_model
from compress.models.codebook import round_table
from compress.models.sentence_encoder import AutoModelForSentenceEmbedding
from compress.models.sentence_modules import Dense, Pooling
from compress.models.sentence_settings import SentenceSettings, set_settings, width_of
from compress.models.static import StaticConfig, StaticForSequenceClassification
from tests import tiny

LABELS = ("a", "b", "c")
TASKS = {
    "classification": Task("classification", ("text",), "label", LABELS, "accuracy"),
    "multilabel": Task("multilabel", ("text",), "labels", LABELS, "f1"),
    "regression": Task("regression", ("text",), "score", (), "pearson"),
    "pair": Task("classification", ("one", "other"), "label", LABELS, "accuracy"),
}
WORDS = len(tiny.SPECIAL) + len(tiny.WORDS)


def classifier(task: Task, *, vocabulary: int = WORDS, **settings: Any) -> Any:
    torch.manual_seed(0)
    names = dict(enumerate(task.output_names))
    config = StaticConfig(
        vocab_size=vocabulary, hidden_size=32, id2label=names, initializer_range=0.5, normalize=True, **settings
    )
    return StaticForSequenceClassification(config).eval()


def encoder() -> Any:
    torch.manual_seed(0)
    config = StaticConfig(vocab_size=WORDS, hidden_size=32, initializer_range=0.5)
    set_settings(config, SentenceSettings((Pooling(("mean",), 32), Dense(32, 8))))
    return AutoModelForSentenceEmbedding.from_config(config).eval()


@pytest.fixture(scope="module", params=[*TASKS, "embedding"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("batches") / "bundle"
    if request.param == "embedding":
        model = encoder()
        task = Task("embedding", ("text",), "similarity", (), "spearman", width=width_of(model.config))
        return tiny.bundle(folder, model=model, task=task)
    task = TASKS[request.param]
    return tiny.bundle(folder, model=classifier(task), task=task)


def draw_texts(count: int = ROWS_PER_BATCH + 50) -> list[str]:
    draw = random.Random(0)
    drawn = [" ".join(draw.choices(tiny.WORDS, k=draw.randint(1, 30))) for _ in range(count - 2)]
    return ["", *drawn, "film"]


def alone(opened: Predictor, texts: Sequence[Any]) -> np.ndarray:
    return opened.logits(opened.encode(texts))


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_batch_answers_each_row_as_alone(bundle: Bundle, precision: Any, threads: int) -> None:
    opened = bundle.open(precision, threads=threads)
    texts: Sequence[Any] = draw_texts()
    if bundle.task.pair:
        texts = list(zip(texts, reversed(texts), strict=True))
    assert opened.batches is not None
    together = opened.text_logits(texts)
    np.testing.assert_array_equal(together, alone(opened, texts))
    found = opened.predict(texts)
    assert found == [answer for text in texts for answer in opened.predict([text])]
    table = to_table(opened.answer_columns(texts), opened.answer_schema())
    assert table.to_pylist() == [each.columns() for each in found]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_any_number_of_rows_is_a_batch(bundle: Bundle, count: int) -> None:
    opened = bundle.open()
    rows = opened.encode([("film", text) if bundle.task.pair else text for text in draw_texts(8)])[:count]
    assert opened.batches is not None
    found = opened.batches.run(TokenArrays.from_rows([row["input_ids"] for row in rows]), threads=2)
    np.testing.assert_array_equal(found, opened.logits(rows))


def test_a_table_by_a_codebook_answers_in_batches(tmp_path: Path) -> None:
    task = TASKS["classification"]
    model = classifier(task, vocabulary=1200)
    table = model.static.word_embeddings.weight
    table.data = torch.tensor(round_table(table.detach().numpy(), np.zeros(1200, np.int64)))
    bundle = tiny.bundle(tmp_path / "bundle", model=model, task=task)
    assert has_codebook(bundle.files()["int8"])
    opened = bundle.open()
    assert opened.batches is not None
    np.testing.assert_array_equal(opened.text_logits(draw_texts()), alone(opened, draw_texts()))


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_model_with_layers_answers_rows_as_alone(tmp_path: Path, precision: Any) -> None:
    bundle = tiny.bundle(tmp_path / "bundle")
    assert BatchSession.from_file(bundle.files()[precision], None) is None, "there is no such graph for it"
    opened = bundle.open(precision, threads=2)
    assert (opened.batches is None) == (precision == "int8"), "whose scales depend on the batch"
    np.testing.assert_array_equal(opened.text_logits(draw_texts()), alone(opened, draw_texts()))


def test_int8_of_learned_ranges_answers_in_batches(tmp_path: Path) -> None:
    bundle = tiny.bundle(tmp_path / "bundle")
    source, target = bundle.files()["fp32"], bundle.files()["int8"]
    reads = {product.reads: (-4.0, 4.0) for product in products(read_model(source).graph)}
    quantize_static(source, target, reads)
    opened = open_predictor(bundle.path, target, task=bundle.task, max_length=16, threads=1)
    assert opened.batches is not None
    np.testing.assert_array_equal(opened.text_logits(draw_texts()), alone(opened, draw_texts()))


def test_a_session_that_answers_otherwise_is_not_used(tmp_path: Path) -> None:
    opened = tiny.bundle(tmp_path / "bundle").open("fp32")
    assert opened.batches is not None
    assert opened.batches.agrees(opened.logits, WORDS)
    assert not opened.batches.agrees(lambda rows: opened.logits(rows) + 1e-6, WORDS)
    assert not opened.batches.agrees(opened.logits, WORDS + 1000), "which the file cannot look up"


def test_few_texts_do_not_open_a_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BatchSession, "from_file", lambda *_: pytest.fail("opened"))
    task = TASKS["classification"]
    assert len(tiny.bundle(tmp_path / "bundle", model=classifier(task), task=task).predict(draw_texts(9))) == 9
