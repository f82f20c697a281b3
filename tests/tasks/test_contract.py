"""What holds for every kind of task."""

import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from compress import kinds
from compress.data import TaskData, load_task
from compress.data.audit import texts
from compress.data.collate import Collate
from compress.data.conll import entities
from compress.errors import BundleError, CompressError, DataError
from compress.evaluation import baselines, metrics
from compress.evaluation.evaluator import Evaluator
from compress.exporters.artifact import Bundle
from compress.models.sentence_settings import width_of
from compress.papers import t5
from compress.quantization.certify import compare_logits
from tests import tiny
from tests.tasks.cases import CASES, TOY


@pytest.fixture(scope="module", params=CASES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data of a kind, which the folder is called by."""
    made = tmp_path_factory.mktemp("data") / request.param
    CASES[request.param].write(made)
    return made


@pytest.fixture(scope="module")
def data(folder: Path) -> TaskData:
    return load_task(str(folder), kind=folder.name)


@pytest.fixture(scope="module")
def exam(data: TaskData) -> Evaluator:
    return Evaluator.from_split(data.task, data.train, tiny.tokenizer(), CASES[data.task.kind].length)


@pytest.fixture(scope="module")
def truth(exam: Evaluator) -> np.ndarray:
    return np.asarray(CASES[exam.task.kind].truth(exam), np.float64)


@pytest.fixture(scope="module")
def noise(truth: np.ndarray) -> np.ndarray:
    return np.random.default_rng(0).normal(size=truth.shape)


@pytest.fixture(scope="module")
def model(data: TaskData) -> Any:
    labels = data.task.outputs
    made = tiny.model("bert", head=data.task.auto_class(), labels=2 if data.task.vectors else labels)
    return made.eval()


@pytest.fixture(scope="module")
def bundle(data: TaskData, model: Any, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    width = width_of(model.config) if data.task.vectors else 0
    task = type(data.task)(**vars(data.task) | {"width": width})
    length = CASES[task.kind].length
    return tiny.bundle(tmp_path_factory.mktemp("bundle") / "b", model=model, task=task, max_length=length)


def test_every_kind_has_a_case() -> None:
    """But for those whose answers are texts, which no head of a task gives: tests/prompting/test_writing.py."""
    answered = {name for name in kinds.names() if not kinds.find(name).writes}
    assert {*answered, TOY} == set(CASES)


def test_a_kind_is_detected_or_requested(data: TaskData, exam: Evaluator) -> None:
    assert type(data.task) is kinds.find(data.task.kind)
    assert data.task.kind == type(data.task).kind
    assert data.task.metric in exam.task.metrics
    with pytest.raises(DataError, match="does not score"):
        data.task.choose_metric("no metric")


def test_true_answers_score_best(data: TaskData, exam: Evaluator, truth: np.ndarray, noise: np.ndarray) -> None:
    metric = data.task.metric
    found = exam.scores(truth)
    best = found[metric]
    assert all(found[each] == pytest.approx(1.0) for each in exam.task.metrics if each in found)
    assert exam.scores(noise)[metric] < best
    low, high = exam.interval(truth)
    assert low <= best <= high
    baseline = data.task.baselines(data, data.train)
    assert all(scores[metric] <= best for scores in baseline.values())
    ahead, error = baselines.lead_over_majority(data, exam, truth)
    assert ahead == pytest.approx(best - data.task.majority(data, data.train)[metric])
    assert 0 <= error < ahead


def test_the_mean_of_examples_is_the_score(exam: Evaluator, noise: np.ndarray) -> None:
    metric = exam.task.metric
    values = exam.example_scores(noise)
    if values is None:
        score, count = exam.metric_of_examples(noise)
        assert score(np.arange(count)) == pytest.approx(exam.scores(noise)[metric])
    else:
        assert values.mean() == pytest.approx(exam.scores(noise)[metric])
        assert len(values) == len(exam)


def test_a_model_agrees_with_itself(exam: Evaluator, truth: np.ndarray, noise: np.ndarray) -> None:
    for logits in (truth, noise):
        assert exam.agreement(logits, logits) == pytest.approx(1.0)
        assert exam.distance(logits, logits) == pytest.approx(0.0, abs=1e-9)
        assert exam.count_changed(logits, logits) in (0, None)
    assert exam.agreement(truth, -truth) < 1.0
    assert exam.distance(truth, -truth) > 0.01
    same = compare_logits(exam, noise, noise)
    assert (same.drop, same.difference) == (0.0, 0.0)
    assert same.near(0.0)


def test_parts_of_a_split_score_alone(exam: Evaluator, truth: np.ndarray) -> None:
    few = exam.subsample(20)
    assert 0 < len(few.rows) < len(exam.rows) == len(exam.subsample(10_000).rows)
    for part, logits in exam.leave_groups_out(truth, 4, 40):
        assert part.scores(logits)[exam.task.metric] == pytest.approx(1.0)
    sample, known = exam.sample(20, truth)
    assert known is not None and len(sample.rows) == len(few.rows)
    assert sample.scores(known)[exam.task.metric] == pytest.approx(1.0)
    assert exam.sample(10_000, truth)[0] is exam
    assert exam.sample(20, truth[:-1])[1] is None, "logits of other rows"


def test_a_thinned_split_can_be_scored(data: TaskData, exam: Evaluator) -> None:
    thin = Evaluator.from_split(
        data.task, data.task.thin(data.train, 20), tiny.tokenizer(), CASES[data.task.kind].length
    )
    assert 0 < len(thin.split) < len(exam.split)
    truth = np.asarray(CASES[data.task.kind].truth(thin), np.float64)
    assert thin.scores(truth)[data.task.metric] == pytest.approx(
        exam.scores(np.asarray(CASES[data.task.kind].truth(exam)))[data.task.metric]
    )


def test_invalid_logits_are_refused(exam: Evaluator, noise: np.ndarray) -> None:
    with pytest.raises(CompressError, match="expected"):
        exam.scores(noise[:-1])
    broken = noise.copy()
    broken[3] = np.nan
    with pytest.raises(CompressError, match="not finite"):
        exam.scores(broken)


def test_a_row_in_a_batch_equals_the_row_alone(exam: Evaluator, model: Any) -> None:
    rows = exam.rows.select(range(12))
    collate = Collate(tiny.tokenizer())
    alone = metrics.logits(model, rows, collate, batch=1)
    np.testing.assert_allclose(metrics.logits(model, rows, collate, batch=5), alone, atol=1e-5)


def test_predict_equals_the_evaluator(exam: Evaluator, model: Any, bundle: Bundle) -> None:
    logits = metrics.logits(model, exam.rows, Collate(tiny.tokenizer()))
    rows = exam.rows.remove_columns("length")
    exact = bundle.logits(rows, precision="fp32", threads=2)
    np.testing.assert_allclose(exact, logits, atol=1e-4)
    near = bundle.logits(rows)
    assert near.shape == exact.shape
    assert 0 < np.abs(near - exact).max() < 0.25 * np.abs(exact).max()
    assert bundle.logits([]).shape == (0, bundle.task.outputs)
    given = [text if len(text) > 1 else text[0] for text in texts(exam.split)]
    predictor = bundle.open("fp32")
    if not exam.task.tokenwise:
        encoded = predictor.encode(given)  # type: ignore[arg-type]
        assert [list(row["input_ids"]) for row in encoded] == exam.rows["input_ids"][:], "training reads the same"
    found = bundle.predict(given, precision="fp32")
    expected = _answers(exam, logits)
    assert len(found) == len(expected)
    for text, answer, other in zip(given, found, expected, strict=True):
        _check_places(text, answer.columns())
        _check_equal(answer.columns()["prediction"], other)


def test_arrow_batches_are_answered_as_predict_answers(exam: Evaluator, bundle: Bundle) -> None:
    given = [text if len(text) > 1 else text[0] for text in texts(exam.split)]
    names = bundle.task.text if bundle.task.pair else ("text",)
    columns = zip(*given, strict=True) if bundle.task.pair else [given]
    table = pa.table({"n": range(len(given)), **dict(zip(names, map(list, columns), strict=True))})
    answer = pickle.loads(pickle.dumps(bundle.arrow("fp32", text=names)))
    found = answer(table)
    assert found.schema.equals(answer.schema(table.schema))
    assert found.select(table.column_names).equals(table)
    expected = [each.columns() for each in bundle.predict(given, precision="fp32")]
    assert found.drop_columns(table.column_names).to_pylist() == expected
    (batch,) = answer.map_batches(iter(table.to_batches()))
    assert isinstance(batch, pa.RecordBatch)
    assert pa.Table.from_batches([batch]).equals(found)
    assert answer(table.slice(0, 0)).schema.equals(found.schema)


def test_many_logits_are_answered_as_single_ones(exam: Evaluator) -> None:
    task = exam.task
    if not hasattr(task, "answer_logits"):
        pytest.skip("answers are made one by one")
    for scale in (1e-3, 1.0, 30.0, 1e3):
        logits = scale * np.random.default_rng(0).normal(size=(200, task.outputs)).astype(np.float32).astype(np.float64)
        columns = task.answer_logits(logits)
        for row, values in enumerate(logits):
            scores = np.exp(values - values.max()) / np.exp(values - values.max()).sum()
            if not task.one_label:
                scores = 0.5 * (1.0 + np.tanh(0.5 * values))
            assert [each[row] for each in columns["prediction_scores"].values()] == scores.tolist()
            assert task.answer(values).columns()["prediction"] == columns["prediction"][row]
            assert columns["prediction_score"][row] == scores.max()


def _answers(exam: Evaluator, logits: np.ndarray) -> list[Any]:
    """Return what the evaluator takes for the answers: entities by their labels."""
    if exam.task.vectors:
        return list(logits)
    if not exam.task.tokenwise:
        return [exam.task.answer(row.astype(np.float64)).columns()["prediction"] for row in logits]
    if exam.task.word_labels:
        return [[entity.label for entity in entities(tags)] for tags in exam.tags(logits)]
    return exam.texts(logits, threshold=np.inf)


def _check_places(text: Any, columns: dict[str, Any]) -> None:
    """Check that marks, and answers to questions, are where they say to be, with probabilities."""
    found = columns["prediction"]
    if "prediction_start" in columns:
        assert text[1][columns["prediction_start"] : columns["prediction_end"]] == found
        assert 0 < columns["prediction_score"] <= 1
    for mark in found if isinstance(found, list) else ():
        if isinstance(mark, dict):
            assert text[mark["start"] : mark["end"]] == mark["text"]
            assert 0 < mark["score"] <= 1


def _check_equal(found: Any, expected: Any) -> None:
    if isinstance(found, list) and all(isinstance(each, dict) for each in found):
        found = [each["label"] for each in found]
    if isinstance(found, str) or not _is_numeric(found):
        assert found == expected
    else:
        np.testing.assert_allclose(found, expected, atol=1e-4)


def _is_numeric(answer: Any) -> bool:
    return bool(np.size(answer)) and np.asarray(answer).dtype.kind == "f"


def test_a_bundle_knows_its_task(bundle: Bundle) -> None:
    loaded = Bundle.load(bundle.path)
    assert loaded.task == bundle.task
    assert type(loaded.task) is type(bundle.task)
    card = (bundle.path / "README.md").read_text(encoding="utf-8")
    assert "It reads" in card
    assert bundle.task.head in card or bundle.task.vectors
    assert f"pipeline_tag: {bundle.task.hub_tag or bundle.task.pipeline}\n" in card
    assert all(f"- {label}" in card for label in bundle.task.labels)
    (code,) = (each for each in re.findall("```python\n(.+?)```", card, re.S) if "import onnxruntime\n" in each)
    for name in ("onnx/", "tokenizer.json"):
        code = code.replace(f'"{name}', f'"{bundle.path}/{name}')
    exec(code, {})


def test_losses_read_one_distribution_per_row(exam: Evaluator) -> None:
    mask_BL = torch.tensor([[1, 1, 1], [1, 1, 0]])
    shape = (2, 3, exam.task.outputs) if exam.task.tokenwise else (2, max(exam.task.outputs, 1))
    logits = torch.randn(shape)
    found = exam.task.distributions(logits, mask_BL)
    assert found.dim() == 2
    assert torch.isfinite(found).all()


def test_only_one_word_answers_are_written_as_text(exam: Evaluator) -> None:
    rows = exam.split.select(range(2))
    if exam.task.one_word:
        assert len(list(t5.text_to_text(rows, exam.task, tiny.tokenizer(), max_length=32))) == 2
    else:
        with pytest.raises(DataError, match="no one-word answer"):
            list(t5.text_to_text(rows, exam.task, tiny.tokenizer(), max_length=32))


def test_a_bundle_reads_labels_in_another_order_and_case(
    data: TaskData, folder: Path, bundle: Bundle, truth: np.ndarray
) -> None:
    def load(wanted: tuple[str, ...], **options: bool) -> TaskData:
        manifest = replace(bundle.manifest, task=replace(bundle.task, labels=wanted))
        return replace(bundle, manifest=manifest).load_data(str(folder), **options)

    labels = data.task.labels
    if not labels:
        assert load(()).fingerprint == data.fingerprint
        with pytest.raises(BundleError, match="Give the data that the bundle was made from"):
            load(("a", "b"))
        return
    names = tuple(label.upper() for label in reversed(labels))
    loaded = load(names)
    evaluator = Evaluator.from_split(loaded.task, loaded.train, tiny.tokenizer(), CASES[data.task.kind].length)
    assert loaded.task.labels == names
    assert evaluator.scores(truth[..., ::-1])[data.task.metric] == 1.0
    assert loaded.fingerprint != data.fingerprint
    unnamed = tuple(f"LABEL_{place}" for place in range(len(labels)))
    column = data.task.label_column
    assert load(unnamed).train[column][:] == data.train[column][:]
    with pytest.raises(BundleError, match="Give the data that the bundle was made from"):
        load((*labels, "other"))
    assert load((*labels, "other"), labels=False).task.labels == labels  # texts need no labels
