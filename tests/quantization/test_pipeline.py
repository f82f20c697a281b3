"""`compress quantize`: every kind of task, every method, in place or beside; and what it refuses."""

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from compress.commands import quantize
from compress.data import load_task
from compress.errors import BundleError, CompressError
from compress.evaluation.evaluator import Evaluator
from compress.exporters.artifact import Bundle
from compress.exporters.session import CERTIFICATE_KEY as KEY
from compress.exporters.session import metadata, read_model
from compress.quantization import select
from compress.quantization.certify import ScoreDrop
from compress.records.run_report import Report
from tests import command, tiny

TEXTS = ["a film is good", "the story is bad", "this plot is dull and slow", "the scene was warm", "so fun"]


def data(folder: Path, kind: str) -> str:
    """A small set of this kind with train and dev files."""
    if kind == "classification":
        return tiny.reviews(folder)
    folder.mkdir(parents=True)
    for split, count in (("train", 40), ("dev", 24)):
        if kind == "tagging":
            words = "the\tO\nfilm\tB-x\nis\tO\ngood\tO\n\n"
            (folder / f"{split}.conll").write_text(words * count, encoding="utf-8")
        elif kind == "qa":
            (folder / f"{split}-v1.1.json").write_text(
                json.dumps({"version": "1.1", "data": squad()}), encoding="utf-8"
            )
        else:
            lines = [f"{' '.join(tiny.WORDS[at % 20 : at % 20 + 3])}\t{at / 7:.3f}" for at in range(count)]
            (folder / f"{split}.tsv").write_text("text\tlabel\n" + "\n".join(lines) + "\n", encoding="utf-8")
    return f"train={folder / 'train.conll'},validation={folder / 'dev.conll'}" if kind == "tagging" else str(folder)


def squad() -> list[dict[str, object]]:
    """A question on each text; its last word answers."""
    paragraphs = []
    for at, text in enumerate(TEXTS):
        answer = {"text": text.split()[-1], "answer_start": text.rindex(" ") + 1}
        paragraphs.append(
            {"context": text, "qas": [{"id": f"{at}", "question": "is the film good ?", "answers": [answer]}]}
        )
    return [{"title": "t", "paragraphs": paragraphs}]


def bundle(path: Path, source: str, kind: str, *, seed: int = 0) -> Bundle:
    """A random model of the task that `source` holds."""
    from transformers import (
        AutoModelForQuestionAnswering,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )

    heads = {"tagging": AutoModelForTokenClassification, "qa": AutoModelForQuestionAnswering}
    task = load_task(source, kind=kind).task
    head = heads.get(kind, AutoModelForSequenceClassification)
    model = tiny.model("bert", labels=task.outputs, seed=seed, head=head)
    return tiny.bundle(path, model=model, task=task, max_length=32)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.jobs.quantize.QUANTIZE_ROUNDS", 2)
    monkeypatch.setattr("compress.jobs.quantize.QUANTIZE_RUNS", 1)


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, str]:
    folder = tmp_path_factory.mktemp("reviews")
    source = data(folder / "data", "classification")
    return bundle(folder / "bundle", source, "classification"), source


@pytest.mark.parametrize("kind", ["classification", "regression", "tagging", "qa"])
def test_every_kind_of_task_is_quantised_and_certified(kind: str, tmp_path: Path) -> None:
    source = data(tmp_path / "data", kind)
    made = bundle(tmp_path / "bundle", source, kind)
    before = sorted(path.read_bytes() for path in (tmp_path / "bundle").rglob("*") if path.is_file())
    done = quantize.quantize(made, source, out=tmp_path / "new", max_drop=1.0)
    assert before == sorted(path.read_bytes() for path in (tmp_path / "bundle").rglob("*") if path.is_file())
    assert done.proof.certified
    assert (done.proof.metric, done.proof.split) == (made.task.metric, "validation")
    assert Bundle.load(tmp_path / "new") == done.bundle
    assert "MatMulIntegerToFloat" in {node.op_type for node in read_model(done.bundle.files()["int8"]).graph.node}
    assert json.loads(metadata(read_model(done.bundle.files()["int8"]))[KEY])["certified"] is True
    assert Report.from_json(done.bundle.path / "report.json").certificates == (done.proof,)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--method dynamic", "dynamic int8"),
        ("--method static", "static int8, "),
        ("--method static --calibration percentile --percentile 99", "static int8, percentile 99"),
        ("--method static --form qdq --target-cpu vnni", ", full range, qdq"),
        ("--method smoothquant", "SmoothQuant static int8, alpha 0."),
        ("--method auto", "static int8, "),
    ],
)
def test_in_place_by_every_method(reviews: tuple[Bundle, str], words: str, expected: str, tmp_path: Path) -> None:
    made = reviews[0].copy_to(tmp_path / "bundle")
    result = command.run(
        "quantize", str(made.path), "--data", reviews[1], "--max-drop", "100", "--json", *words.split()
    )
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert expected in found["certificate"]["method"]
    after = Bundle.load(made.path)
    assert after.manifest.files["onnx/model.onnx"] == made.manifest.files["onnx/model.onnx"]
    assert metadata(read_model(after.files()["int8"]))["compress.precision"] == "int8"
    assert Report.from_json(after.path / "report.json").certificates[0].method == found["certificate"]["method"]
    assert command.partial(tmp_path) == []


def test_auto_smooths_if_static_is_not_near(
    reviews: tuple[Bundle, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = iter([False])  # static is not; afterwards every file is
    monkeypatch.setattr(ScoreDrop, "near", lambda *_, **__: next(near, True))
    made = reviews[0].copy_to(tmp_path / "bundle")
    result = command.run("quantize", str(made.path), "--data", reviews[1], "--json")
    assert json.loads(result.out)["certificate"]["method"].startswith("SmoothQuant")


@pytest.fixture
def broken(reviews: tuple[Bundle, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Bundle, str]:
    """A bundle that answers its data without a fault, and dynamic int8 that makes another model of it."""
    source = tmp_path / "answered"
    source.mkdir()
    texts = [" ".join(tiny.WORDS[at % 25 : at % 25 + 4]) for at in range(40)]
    for split in ("train", "dev"):
        labels = (found.label for found in reviews[0].predict(texts, precision="fp32"))
        lines = [f"{text}\t{label}" for text, label in zip(texts, labels, strict=True)]
        (source / f"{split}.tsv").write_text("\n".join(["text\tlabel", *lines]) + "\n", encoding="utf-8")
    other = bundle(tmp_path / "other", str(source), "classification", seed=7).files()["int8"]
    monkeypatch.setattr(select, "quantize_dynamic", lambda _, target, **_options: shutil.copyfile(other, target))
    return reviews[0], str(source)


def test_a_missed_target_leaves_an_uncertified_file(broken: tuple[Bundle, str], tmp_path: Path) -> None:
    words = ("--data", broken[1], "--method", "dynamic", "--max-drop", "1", "--out", str(tmp_path / "new"))
    result = command.run("quantize", str(broken[0].path), *words)
    assert result.code == 3
    assert "NOT certified: " in result.out
    made = Bundle.load(tmp_path / "new")
    (proof,) = Report.from_json(made.path / "report.json").certificates
    assert not proof.certified
    assert "more than the 1 allowed" in proof.reason
    assert json.loads(metadata(read_model(made.files()["int8"]))[KEY])["certified"] is False


@pytest.mark.parametrize(
    "bad", [{"max_drop": -1.0}, {"max_drop": math.nan}, {"max_drop": math.inf}, {"rows": 0}, {"percentile": 101.0}]
)
def test_invalid_numbers_are_refused_before_any_work(
    bad: dict[str, Any], reviews: tuple[Bundle, str], tmp_path: Path
) -> None:
    with pytest.raises(CompressError, match=next(iter(bad))):
        tiny.call(quantize.quantize, bundle=reviews[0], data="no such data", out=tmp_path / "new", **bad)


def test_a_bundle_that_cannot_be_written_is_refused_before_any_work(
    reviews: tuple[Bundle, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda _, mode: mode != os.W_OK)
    with pytest.raises(BundleError, match="--out"):
        quantize.quantize(reviews[0], "no such data")


def test_a_kill_at_any_write_leaves_a_valid_bundle(
    reviews: tuple[Bundle, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A certificate is never of another file than the one beside it."""
    made = reviews[0].copy_to(tmp_path / "bundle")
    done = quantize.quantize(made, reviews[1], method="dynamic", out=str(tmp_path / "done"))

    class Killed(BaseException):
        pass

    real = Path.replace
    for survived in range(4):
        left = iter([real] * survived)

        def rename(path: Path, target: Path, left: Any = left) -> Path:
            if (step := next(left, None)) is None:
                raise Killed
            return Path(step(path, target))

        monkeypatch.setattr(Path, "replace", rename)
        with pytest.raises(Killed):
            Bundle.load(made.path).adopt(done.bundle, ["int8"])
        monkeypatch.setattr(Path, "replace", real)
        found = Bundle.load(made.path)
        listed = {"onnx/model_quantized.onnx", "report.json"} & found.manifest.files.keys()
        assert listed in (set(), {"onnx/model_quantized.onnx"}), "as it was, or neither"
        if not listed:
            with pytest.raises(BundleError, match="compress export"):  # no report says which data
                found.open("int8")
    again = quantize.quantize(Bundle.load(made.path), reviews[1], method="dynamic")
    assert list(again.sizes) == ["fp32", "int8"], "there was none before"
    assert Bundle.load(made.path) == again.bundle


def test_data_of_another_task_are_refused(reviews: tuple[Bundle, str], tmp_path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    for split in ("train", "dev"):
        lines = [f"a {label} film\t{label}" for label in ("good", "bad", "fine")] * 5
        (folder / f"{split}.tsv").write_text("text\tlabel\n" + "\n".join(lines) + "\n", encoding="utf-8")
    stamps = reviews[0].manifest.files
    result = command.run("quantize", str(reviews[0].path), "--data", str(folder))
    assert result.code == 2
    assert "classification of 3 labels (bad, fine, good)" in result.err
    assert "2 labels (negative, positive)" in result.err
    assert Bundle.load(reviews[0].path).manifest.files == stamps


def test_qat_is_compared_with_the_former_model(
    reviews: tuple[Bundle, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training that moves the float model too is a loss that its own fp32 file would not show."""
    monkeypatch.setenv("COMPRESS_HOME", str(tmp_path / "home"))
    words = ["--method", "qat", "--out", str(tmp_path / "trained"), "--max-drop", "100", "--json"]
    for each in ("steps=20", "batch=8", "lr=0.05", "warmup=0"):
        words += ["--set", f"stages.0.{each}"]
    result = command.run("quantize", str(reviews[0].path), "--data", reviews[1], *words)
    assert result.code == 0, result.err
    made = Bundle.load(tmp_path / "trained")
    proof = json.loads(metadata(read_model(made.files()["int8"]))[KEY])
    assert "learned in training" in proof["method"]
    exam = examined(made, reviews[1])
    before, after = (exam.scores(each.logits(exam.rows, precision="fp32"))["accuracy"] for each in (reviews[0], made))
    assert proof["before"] == pytest.approx(before)
    assert before != after, "the float model moved, so that this test can fail"


def examined(made: Bundle, source: str) -> Evaluator:
    found = load_task(source)
    split = found.validation if found.test is None else found.test
    return Evaluator.from_split(made.task, split, AutoTokenizer.from_pretrained(made.path), made.manifest.max_length)


@pytest.mark.parametrize("moment", ["compress.jobs.quantize.certify", "compress.jobs.quantize.mix"])
def test_an_interruption_leaves_the_bundle_as_it_was(
    moment: str, reviews: tuple[Bundle, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = reviews[0].copy_to(tmp_path / "bundle")

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(moment, interrupt)
    result = command.run("quantize", str(made.path), "--data", reviews[1], "--method", "dynamic")
    assert result.code == 130
    assert "not changed" in result.err
    assert Bundle.load(made.path) == made
    assert {path.name for path in tmp_path.iterdir()} <= {"bundle", "home"}


def test_a_smoothed_graph_that_answers_differently_is_refused(
    reviews: tuple[Bundle, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    smooth = select.smooth

    def broken(source: Path, target: Path, seen: object, *, alpha: float) -> object:
        found = smooth(source, target, seen, alpha=alpha)  # type: ignore[arg-type]
        tiny_again = tiny.model("bert", labels=2, seed=9)
        from compress.exporters.onnx import to_onnx

        to_onnx(tiny_again, target)
        return found

    monkeypatch.setattr(select, "smooth", broken)
    result = command.run("quantize", str(reviews[0].path), "--data", reviews[1], "--method", "smoothquant")
    assert result.code == 2
    assert "answers differently" in result.err


@pytest.mark.parametrize(
    ("words", "expected"),
    [(("--set", "stages.0.lr=1"), "--set"), (("--device", "lokal"), "local"), (("--method", "qat"), "--out")],
)
def test_options_that_do_not_apply_are_refused(
    words: tuple[str, str], expected: str, reviews: tuple[Bundle, str]
) -> None:
    result = command.run("quantize", str(reviews[0].path), "--data", reviews[1], *words)
    assert result.code == 2
    assert expected in result.err
