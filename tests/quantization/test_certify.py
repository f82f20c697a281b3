"""A certificate says what was lost, of which rows, where; the file carries it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset

from compress.benchmark.device import Device
from compress.benchmark.devices import open_device
from compress.data.task import Task
from compress.evaluation.evaluator import Evaluator
from compress.exporters.artifact import Bundle
from compress.exporters.manifest import BUNDLE_FILES
from compress.exporters.session import CERTIFICATE_KEY as KEY
from compress.exporters.session import metadata, read_model
from compress.io import sha256
from compress.quantization.certify import Claim, ScoreDrop, attach_certificate, certify, compare_logits, verdict
from compress.records.certificate import Certificate
from compress.records.class_scores import ClassChange
from compress.records.run_report import Report
from tests.quantization.test_mixed import TASK, bundle

ACCURACY = Task("classification", ("text",), "label", ("a", "b"), "accuracy")


@pytest.fixture(scope="module")
def here() -> Iterator[Device]:
    with open_device("local") as device:
        yield device


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Evaluator]:
    return bundle(tmp_path_factory.mktemp("certified") / "bundle", outlier_in=(0,))


def proof(shipped: tuple[Bundle, Evaluator], here: Device, max_drop: float) -> Certificate:
    return certify(shipped[0], "int8", shipped[1], here, Claim("dynamic int8", max_drop, "test", "d", ("x",)))


def test_certificates_compare_the_logits_of_both_files(shipped: tuple[Bundle, Evaluator], here: Device) -> None:
    made, evaluator = shipped
    found = proof(shipped, here, 1.0)
    exact, small = (made.logits(evaluator.rows, precision=each) for each in ("fp32", "int8"))
    assert found.before == evaluator.scores(exact)[TASK.metric] == 1.0
    assert found.after == evaluator.scores(small)[TASK.metric] < 1.0
    assert found.agreement == (exact.argmax(1) == small.argmax(1)).mean()
    assert found.max_logit_difference == pytest.approx(float(np.abs(exact - small).max()))
    assert (found.rows, found.split, found.artefact, found.kept) == (200, "test", BUNDLE_FILES["int8"], ("x",))
    assert found.device.startswith("local, ")
    assert found.runtime.startswith("onnxruntime ")


def test_the_verdict_is_about_the_drop(shipped: tuple[Bundle, Evaluator], here: Device) -> None:
    found = proof(shipped, here, 1.0)
    assert found.certified
    assert sum(one.support for one in found.classes) == 200
    missed = proof(shipped, here, found.drop - 0.01)
    assert not missed.certified
    assert "1.00 more than" in missed.reason


def test_a_gain_is_certified() -> None:
    assert verdict(ScoreDrop(0.9, 0.91, 0.99, 0.1), 0.0) == (True, "gains 1.00 points where 0 are allowed")
    assert verdict(ScoreDrop(0.9, 0.89, 0.99, 0.1), 0.005) == (
        False,
        "loses 1.00 points, 0.50 more than the 0.5 allowed",
    )
    assert verdict(ScoreDrop(0.9, 0.9 - 0.1, 0.99, 0.1), 0.1)[0], "what is allowed may be used up"


def test_a_collapsed_class_is_not_certified() -> None:
    outcome = ScoreDrop(
        0.95, 0.949, 0.99, 0.1, (ClassChange("rare", 6 / 9, 0.0, 9), ClassChange("often", 0.9, 0.9, 500))
    )
    kept, reason = verdict(outcome, 0.005)
    assert not kept
    assert "rare" in reason and "often" not in reason
    one_row = replace(outcome, classes=(ClassChange("single", 1.0, 0.0, 1),))
    kept, reason = verdict(one_row, 0.005)
    assert kept, "one row may be chance"
    assert "single" in reason, "and is named"


def test_the_file_and_the_report_carry_it(shipped: tuple[Bundle, Evaluator], here: Device, tmp_path: Path) -> None:
    made, evaluator = shipped[0].copy_to(tmp_path / "bundle"), shipped[1]
    before = made.logits(evaluator.rows)
    found = proof(shipped, here, 1.0)
    kept, signed = attach_certificate(made, "int8", found)
    assert (Bundle.load(kept.path).logits(evaluator.rows) == before).all()
    written = metadata(read_model(kept.files()["int8"]))
    assert Certificate.from_json(written[KEY]) == found
    assert written["compress.precision"] == "int8"
    assert signed == replace(found, sha256=sha256(kept.files()["int8"]))
    assert signed.exact_sha256 == sha256(kept.files()["fp32"])
    assert Report.from_json(kept.path / "report.json").certificates == (signed,)
    again, _ = attach_certificate(kept, "int8", proof(shipped, here, 0.5))
    assert [each.max_drop for each in Report.from_json(again.path / "report.json").certificates] == [0.5]


def changed(rows: int, wrong: int) -> ScoreDrop:
    """fp32 answers everything right, the other file `wrong` of the rows wrong."""
    labels = np.arange(rows) % 2
    evaluator = Evaluator(ACCURACY, Dataset.from_dict({"label": labels}), Dataset.from_dict({"length": [1] * rows}))
    exact = np.eye(2)[labels]
    other = exact.copy()
    other[:wrong] = other[:wrong, ::-1]
    return compare_logits(evaluator, exact, other)


@pytest.mark.parametrize(
    ("rows", "wrong", "limit", "near"),
    [
        (500, 1, 0.002, True),  # lost by rounding: 1 - 0.998 is more than 0.002
        (500, 2, 0.002, True),
        (500, 3, 0.002, False),
        (500, 2, 0.0, True),
        (100, 2, 0.005, True),
        (100, 3, 0.005, False),
        (10_000, 20, 0.002, True),
        (10_000, 21, 0.002, False),
    ],
)
def test_two_answers_are_allowed_on_any_number_of_rows_and_beyond_them_the_limit(
    rows: int, wrong: int, limit: float, near: bool
) -> None:
    outcome = changed(rows, wrong)
    assert outcome.changed == wrong
    assert outcome.near(limit) is outcome.keeps_score(limit) is near
    assert verdict(outcome, limit)[0] is near
    assert outcome.near(outcome.least_limit)


def test_the_verdict_mentions_unresolved_changes() -> None:
    good, reason = verdict(changed(100, 2), 0.005)
    assert good
    assert "1.50 more than the 0.5 allowed" in reason
    assert "2 changed answers" in reason


def test_answers_of_a_regression_all_differ_and_the_limit_is_the_limit() -> None:
    task = Task("regression", ("text",), "label", (), "pearson")
    evaluator = Evaluator(task, Dataset.from_dict({"label": [0.0, 1.0, 2.0]}), Dataset.from_dict({"length": [1] * 3}))
    outcome = compare_logits(evaluator, np.array([[0.0], [1.0], [2.0]]), np.array([[0.0], [2.0], [1.0]]))
    assert outcome.changed is None
    assert not outcome.near(0.1)


def test_answers_are_counted_by_the_example() -> None:
    task = Task("multilabel", ("text",), "label", ("a", "b"), "f1")
    evaluator = Evaluator(task, Dataset.from_dict({"label": [[1.0, 1.0]] * 3}), Dataset.from_dict({"length": [1] * 3}))
    assert evaluator.count_changed(np.array([[1, 1], [-1, -1], [1, 1]]), np.array([[1, 1], [1, 1], [1, -1]])) == 2
