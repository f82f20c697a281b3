"""Contract of every phase: what it estimates covers what it then runs; trying it leaves nothing in the cache.

A phase of which nothing is estimated is among FREE."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from rich.console import Console

import compress
from compress.commands import label as labelling
from compress.commands import quantize, trim
from compress.commands.distill import forecast
from compress.commands.search import forecast_search
from compress.config.options import Int8Options, MeasureOptions, StudyOptions
from compress.config.recipe import Recipe
from compress.data.collate import LengthGrouped
from compress.errors import BundleError
from compress.jobs import trials
from compress.jobs.phase import Phase
from compress.jobs.pretrain import KeepCheckpoint, Present
from compress.jobs.shipping import Ship
from compress.models import precision
from compress.models.sentence_settings import SentenceSettings
from compress.nas import phases as phases_of_a_search
from compress.nas.config import Budget, Space
from compress.prompting.http_model import Endpoint, RemoteModel
from compress.prompting.vectors import open_source
from compress.quantization.certify import QuantizationEvaluator, ScoreDrop
from compress.records.forecast import Forecast, PhaseEstimate, size_mb
from compress.reporting.terminal import forecast_lines
from compress.teachers import prompted
from compress.teachers.checkpoint import CheckTeacher
from compress.teachers.labelling import WriteLabels
from compress.teachers.recorded import CheckAnswers
from compress.teachers.vectors import AskForVectors
from compress.teachers.writing import WriteAnswers
from compress.training import schedule
from compress.training.schedule import Length
from compress.training.stage import Trained
from tests import command, learning, marked, tiny, unshipped
from tests.commands.test_embedding import encoder
from tests.nas.shelved import PLAIN, SPACE, weighing
from tests.prompting.endpoint_server import serving
from tests.prompting.language_models import FakeLanguageModel
from tests.prompting.test_label import lines
from tests.prompting.test_teacher import KNOWS, PROMPT, QUICK
from tests.prompting.test_vectors import scripted


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "choose", lambda _: "fp32")
    monkeypatch.setattr(trials, "LONG", (6, 6))
    monkeypatch.setattr(trials, "ROWS", 3)


@pytest.fixture
def without_shipping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Export and race nothing, for tests of other phases."""
    monkeypatch.setattr(Ship, "estimate", lambda _, job: (job, []))


SHIPPING = ["vocabulary", "export", "quantise", "certify", "measure"]


def given(tmp_path: Path, recipe: str = tiny.RECIPE) -> dict[str, Any]:
    return {
        "teacher": tiny.checkpoint(tmp_path / "teacher"),
        "data": tiny.reviews(tmp_path / "data"),
        "recipe": tiny.recipe(tmp_path / "recipe", recipe),
    }


def kept(home: Path) -> set[str]:
    """The folders of the cache that hold anything but data and encoded rows."""
    return {each.name for each in home.iterdir() if each.is_dir()} - {"data", "encoded"}


FREE = {CheckTeacher, KeepCheckpoint, Present, WriteLabels, WriteAnswers, AskForVectors, CheckAnswers}
"""Phases that take no time worth an estimate, or that are done as the data are read."""


def test_every_phase_estimates_itself() -> None:
    left = [Phase]
    while left:
        each = left.pop()
        left += each.__subclasses__()
        if each not in FREE | {Phase}:
            assert {"run", "estimate"} <= vars(each).keys(), each


def test_a_distillation_takes_what_its_phases_estimate(tmp_path: Path, home: Path, monkeypatch: Any) -> None:
    """And the recipe that is written before anything runs is the one that ran, with its lengths."""
    recipe = tiny.RECIPE.replace(", max_length: 32", "").replace("    max_length: 32\n", "")
    recipe = recipe.replace("    checkpoint: 5\n", "    checkpoint: 5\n    augment: auto\n")
    arguments = given(tmp_path, recipe)
    found = forecast(**arguments)
    assert [each.name for each in found.phases] == ["teacher", "intermediate", "prediction", *SHIPPING]
    assert kept(home) == set()
    assert found.peak_rss_mb > 50
    unshipped.hasten(monkeypatch)
    run = tmp_path / "run"
    bundle = compress.distill(**arguments, out=run)
    for each in found.phases[:-5]:
        trained = Trained.read(run / "stages" / each.name / "model")
        assert each.steps[0] <= trained.steps <= each.steps[1]
        assert each.seconds[0] / 10 < trained.seconds < 10 * each.seconds[1] + 1
        assert size_mb(run / "stages" / each.name / "model") <= each.disk_mb
    vocabulary, export, quantise, *rest = found.phases[-5:]
    assert 0 < quantise.seconds[0] < quantise.seconds[1], "int8 may be smoothed, or kept in part"
    assert all(0 < each.seconds[0] == each.seconds[1] for each in (vocabulary, export, *rest))
    assert size_mb(bundle.path) < 3 * export.disk_mb
    written = (run / "recipe.yaml").read_text()
    assert written == (bundle.path / "recipe.yaml").read_text()
    assert "auto" not in [stage.max_length for stage in Recipe.load(str(run / "recipe.yaml")).stages]
    again, *_ = forecast(**arguments).phases
    assert (again.steps, again.seconds, again.cached) == ((0, 0), (0.0, 0.0), True)


def test_samples_include_the_longest_rows() -> None:
    rows = Dataset.from_dict({"length": [3, 9, 2, 8, 4, 1, 7, 5], "index": range(8)})
    drawn = trials.sample_rows(rows, 4, 2)
    assert drawn["index"][:] == list(range(len(drawn))) and len(drawn) <= 4
    assert {9, 8} <= set(drawn["length"][:])


def test_padded_tokens_are_counted() -> None:
    order = LengthGrouped([3, 9, 2, 8], 2, seed=0, whole=True)
    assert sorted(trials.count_padded_tokens(order)) == [6, 18]


@pytest.mark.usefixtures("without_shipping")
def test_early_stopping_gives_a_range(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "LEAST_AUTO_STEPS", 10)
    recipe = tiny.RECIPE.replace("    steps: 24\n", "    epochs: auto\n")
    found = {phase.name: phase for phase in forecast(**given(tmp_path / "plain", recipe)).phases}
    length = Length.plan(learning.stage(batch=16), 6)
    assert found["prediction"].steps == (length.least, length.most) == (10, 240)
    assert found["prediction"].seconds[1] == pytest.approx(24 * found["prediction"].seconds[0], rel=1e-6)
    recipe = recipe.replace("    epochs: auto\n", "    epochs: auto\n    augment: auto\n")
    found = {phase.name: phase for phase in forecast(**given(tmp_path / "varied", recipe)).phases}
    assert found["prediction"].steps[1] > length.most


@pytest.mark.usefixtures("without_shipping")
def test_trials_do_not_fill_the_cache(tmp_path: Path, home: Path) -> None:
    recipe = tiny.RECIPE.replace("    checkpoint: 5\n", "    checkpoint: 5\n    cache_teacher: true\n") + (
        "teacher_lm: {pretrain: teacher-lm, head: masked_lm, corrupt: bert.mask, steps: 9, batch: 8, max_length: 32,\n"
        "             lr: 1.0e-3, objective: [{loss: bert.masked_lm}]}\n"
    )
    recipe = recipe.replace("    steps: 12\n", "    steps: 12\n    augment: {by: tinybert.augment, copies: 3}\n")
    found = forecast(**given(tmp_path, recipe)).phases
    assert [(phase.name, phase.steps[0]) for phase in found][:3] == [
        ("teacher", 24), ("teacher-lm", 9), ("intermediate", 12),
    ]  # fmt: skip
    assert "3 variants of each row" in found[2].note
    assert kept(home) <= {"corpora"}


@pytest.mark.usefixtures("without_shipping")
def test_a_budget_is_not_raced_for(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.pruning.budget.resolve_budget", lambda *_: pytest.fail("raced"))
    changes = ["teacher.steps=8", "teacher.max_length=64", "stages.1.steps=4", "stages.1.augment=null"]
    recipe = Recipe.load("prune-taylor", ["target.speedup=2", *changes])
    found = forecast(**given(tmp_path) | {"recipe": recipe}).phases
    assert [phase.name for phase in found][1:] == ["all", "recover"]
    assert "race" in found[1].note and found[1].seconds[0] > 0


def test_a_time_limit_bounds_the_total() -> None:
    phases = (PhaseEstimate("one", (10, 20), (60.0, 600.0)), PhaseEstimate("two", (0, 0), (30.0, 30.0)))
    assert Forecast("", phases, 100.0).minutes == (1.5, 10.5)
    assert Forecast("", phases, 100.0, limit=3.0).minutes == (1.5, 3.0)
    assert json.loads(Forecast("", phases, 100.0, limit=1.0).to_json())["minutes"] == [1.0, 1.0]
    short = Forecast("", phases, 100.0, limit=0.25)
    assert short.minutes == (0.5, 0.5), "only training can be cut"
    assert "out of reach: --minutes 0.25; all but the training takes 0.5" in list(forecast_lines(short))


def test_the_probable_time_is_between_the_least_and_the_most() -> None:
    one = PhaseEstimate("one", (10, 20), (60.0, 600.0))
    phases = (one, PhaseEstimate("two", seconds=(30.0, 150.0), likely=0.25))
    found = Forecast("", phases, 100.0)
    assert found.likely_minutes == pytest.approx((330 + 60) / 60)
    assert json.loads(found.to_json())["likely_minutes"] == pytest.approx(6.5)
    assert list(forecast_lines(found))[-1].startswith("together 1.5 to 12.5 min, probably 6.5, ")
    assert Forecast("", phases, 100.0, limit=3.0).likely_minutes == 3.0
    assert (
        "probably" not in list(forecast_lines(Forecast("", (PhaseEstimate("one", seconds=(60.0, 60.0)),), 100.0)))[-1]
    )


def plan(**flat: Any) -> dict[str, PhaseEstimate]:
    """The phases of a forecast by name, each of which takes time."""
    found = tiny.call(forecast, **flat).phases
    assert all(0 < phase.seconds[0] <= phase.seconds[1] for phase in found)
    return {phase.name: phase for phase in found}


def test_a_prompted_teacher_answers_a_few_rows(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speaker = FakeLanguageModel(KNOWS, (-1.0, -1.0))
    monkeypatch.setattr(prompted, "open_language_model", lambda *_, **__: speaker)
    monkeypatch.setattr("compress.models.checkpoints.check", lambda *_, **__: None)
    ask = prompted.ask
    monkeypatch.setattr(prompted, "ask", lambda *given, **more: replace(ask(*given, **more), seconds=10.0))
    (tmp_path / "prompt.yaml").write_text(PROMPT, encoding="utf-8")
    init = f"student.init={tiny.checkpoint(tmp_path / 'student')}"
    phases = plan(
        teacher="gpt2", prompt=str(tmp_path / "prompt.yaml"), recipe="prompted", data=tiny.reviews(tmp_path / "data"),
        overrides=[*QUICK, init],
    )  # fmt: skip
    assert list(phases) == ["asking told", "soft-labels", *SHIPPING]
    assert phases["soft-labels"].steps == (30, 30)
    assert len(speaker.asked) == 1
    assert phases["asking told"].seconds == pytest.approx((10 * 135, 10 * 135), rel=0.3), "others may be longer"


@pytest.mark.parametrize("kind", ["file", "endpoint"])
def test_vectors_as_the_teacher(kind: str, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "SCORED", 20)  # of 50 held-out texts, which are compared with each other
    texts = [f"{one} {other} film" for one in tiny.WORDS[5:17] for other in tiny.WORDS[17:29]]
    (tmp_path / "made.txt").write_text("\n".join(texts))
    encoder(SentenceSettings.pooled(32, normalise=True), layers=2).save_pretrained(tmp_path / "start")
    tiny.tokenizer().save_pretrained(tmp_path / "start")
    changes = ["student.layers=1", f"student.init={tmp_path / 'start'}", "stages.0.epochs=2", "stages.0.lr=1e-2"]
    given = {
        "data": str(tmp_path / "made.txt"), "recipe": "leaf", "overrides": [*changes, "stages.0.max_length=16"],
    }  # fmt: skip
    if kind == "file":
        teacher = tmp_path / "made.npy"
        np.save(teacher, np.random.default_rng(0).normal(size=(len(texts), 40)))
        vectors, *shipped = plan(teacher=str(teacher), **given).values()
    else:
        teacher = tmp_path / "endpoint.yaml"
        with serving() as start:
            server = start(scripted(lambda _: 40))
            teacher.write_text(f"{{url: '{server.url}', model: m, mode: embeddings, batch: 8, concurrency: 2}}")
            asked, vectors, *shipped = plan(teacher=str(teacher), **given).values()
            known = open_source(str(teacher)).vectors(server.seen[0][1]["input"])
        assert [len(body["input"]) for _, body, _ in server.seen] == [8], "the trial's are kept"
        assert (known.shape, asked.note) == ((8, 40), f"{len(texts) - 8:,} texts")
        assert asked.seconds[0] == pytest.approx(asked.seconds[1] / 2)
    assert vectors.steps[0] > 0 and [each.name for each in shipped] == SHIPPING
    assert kept(home) <= {"vectors", "unlabelled"}


def test_scores_in_the_data_as_the_teacher(tmp_path: Path, home: Path) -> None:
    for name in ("train", "dev"):
        lines = marked.rankings(tmp_path / "plain.tsv", count=20).read_text().splitlines()
        scored = [f"{line}\t{'teacher_score' if n == 0 else n % 7}" for n, line in enumerate(lines)]
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / f"{name}.tsv").write_text("\n".join(scored))
    phases = plan(
        teacher=tiny.checkpoint(tmp_path / "student"), data=str(tmp_path / "data"), recipe="margin-mse",
        overrides=["stages.0.steps=9", "stages.0.max_length=32", "stages.0.batch=20", "stages.0.lr=5e-3"],
    )  # fmt: skip
    assert list(phases) == ["margins", *SHIPPING]
    assert phases["margins"].steps == (9, 9)


GENERAL = """
about: a general student
paper: {title: t, authors: a, year: 2020, url: "https://arxiv.org/abs/1909.10351"}
student: {layers: 1}
stages:
  - distill: general
    data: text
    steps: 30
    batch: 4
    max_length: 16
    lr: 1.0e-3
    objective: [{loss: tinybert.hidden, layers: uniform}]
  - finetune: task
    lr: 1.0e-3
"""


def test_pretraining_is_forecast(tmp_path: Path, home: Path) -> None:
    (tmp_path / "corpus.txt").write_text("\n\n".join(["the film is good .\nthe plot is bad ."] * 40), encoding="utf-8")
    arguments = {name: value for name, value in given(tmp_path, GENERAL).items() if name != "data"}
    arguments |= {"corpus": str(tmp_path / "corpus.txt")}
    found = compress.forecast_pretraining(**arguments)
    assert [(phase.name, phase.steps) for phase in found.phases] == [("general", (30, 30))]
    assert found.phases[0].seconds[0] > 0
    line = ["pretrain", "--plan", "--out", str(tmp_path / "run")]
    result = command.run(*line, *[word for name, value in arguments.items() for word in (f"--{name}", value)])
    assert result.code == 0
    assert not (tmp_path / "run").exists()


@pytest.fixture
def weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.benchmark.devices.open_device", weighing)


def by_name(found: Forecast) -> dict[str, PhaseEstimate]:
    return {phase.name: phase for phase in found.phases}


def searched(tmp_path: Path, space: str, **more: Any) -> Forecast:
    (tmp_path / "space.yaml").write_text(space, encoding="utf-8")
    given: dict[str, Any] = {
        "teacher": tiny.checkpoint(tmp_path / "teacher"), "data": tiny.reviews(tmp_path / "data"),
        "out": tmp_path / "out", "space": Space.load(str(tmp_path / "space.yaml")),
        "device": MeasureOptions(seq=16, shapes=7, rounds=2, runs=1, file="fp32"),
        "study": StudyOptions(trials=5, finalists=2), **more,
    }  # fmt: skip
    return forecast_search(**given)


def test_phases_of_a_search(tmp_path: Path, home: Path, weighed: None) -> None:
    found = searched(tmp_path, SPACE, budget=Budget(max_latency_ms=2.0, max_params=15000))
    phases = by_name(found)
    assert list(phases) == [
        "teacher", "measuring", "importance", "supernet", "trials", "short distillations", "timing finalists",
        "final: final", *SHIPPING[1:],
    ]  # fmt: skip
    assert phases["supernet"].steps == (12, 12)
    assert phases["short distillations"].steps == (12, 12), "two finalists of six steps"
    assert phases["trials"].note == "5 shapes"
    assert 0 < phases["trials"].seconds[0] < phases["trials"].seconds[1], "half of the rows tell which are pruned"
    assert phases["measuring"].note == "9 files", "7 shapes, and the teacher in both precisions"
    (expected,) = found.out_of_reach
    assert expected.startswith("--max-latency-ms 2: the smallest shape")
    assert not (tmp_path / "out").exists()


def test_phases_of_a_plain_search(tmp_path: Path, home: Path, weighed: None) -> None:
    found = searched(tmp_path, PLAIN, study=StudyOptions(trials=4, winners=2, minutes=9.0))
    phases = by_name(found)
    assert "supernet" not in phases and "short distillations" not in phases
    assert phases["final: final"].steps == (24, 24)
    assert found.minutes[1] <= 9.0
    space = Space.load(str(tmp_path / "space.yaml"))
    share = phases_of_a_search.estimate_trials((1.0, 2.0), StudyOptions(minutes=10.0), space, 0)
    assert share.seconds == (396.0, 396.0) and share.note == "198 shapes or more"


def asked(tmp_path: Path, speaker: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, PhaseEstimate]:
    monkeypatch.setattr(labelling, "open_language_model", lambda *_, **__: speaker)
    (tmp_path / "prompt.yaml").write_text(PROMPT, encoding="utf-8")
    data = lines(tmp_path / "texts.txt", *(f"a good film {at}" for at in range(20)))
    given = {"teacher": "told", "prompt": str(tmp_path / "prompt.yaml"), "data": data, "out": tmp_path / "out.jsonl"}
    return by_name(labelling.forecast_labelling(**given))


def test_labelling_with_a_local_model(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = prompted.ask

    def second_each(speaker: Any, prompts: Any, answers: Any, *, console: Console) -> Any:
        return replace(ask(speaker, prompts, answers, console=console), seconds=float(len(prompts)))

    monkeypatch.setattr(prompted, "ask", second_each)
    speaker = FakeLanguageModel(KNOWS, (-1.5, -1.0))
    (phase,) = asked(tmp_path, speaker, monkeypatch).values()
    assert len(speaker.asked) == 7, "one, two and four, which take more than three seconds"
    assert phase.seconds == pytest.approx((13.0, 13.0), rel=0.02)
    assert phase.samples_per_second == 1.0 and phase.note == "13 rows, 7 were answered now"
    again = asked(tmp_path, speaker, monkeypatch)
    assert again["answered before"].cached and again["answered before"].note == "7 rows"
    assert not (tmp_path / "out.jsonl").exists()


def test_labelling_with_an_endpoint(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = FakeLanguageModel(KNOWS, (-1.5, -1.0))
    monkeypatch.setattr(RemoteModel, "likelihoods", lambda _, prompts, answers: given.likelihoods(prompts, answers))
    speaker = RemoteModel(Endpoint(url="https://api.example.com/v1", model="m", concurrency=4))
    (phase,) = asked(tmp_path, speaker, monkeypatch).values()
    assert len(given.asked) == 1
    assert phase.seconds[0] == pytest.approx(phase.seconds[1] / 4), "four are under way at once"
    assert phase.note == "19 rows, 1 were answered now; about 19 requests, with 209 tokens of text"


@pytest.mark.parametrize("method", ["auto", "dynamic", "smoothquant"])
def test_phases_of_a_quantization(tmp_path: Path, home: Path, method: Any) -> None:
    bundle, data = tiny.bundle(tmp_path / "bundle"), tiny.reviews(tmp_path / "data")
    before = {path.name: path.read_bytes() for path in bundle.path.rglob("*") if path.is_file()}
    int8 = Int8Options() if method == "dynamic" else Int8Options(rows=32)
    found = quantize.forecast_quantization(bundle, data, method=method, int8=int8)
    phases = by_name(found)
    calibrated = [] if method == "dynamic" else ["calibration"]
    assert list(phases) == ["fp32 answers", *calibrated, "choice of products", "certificate"]
    assert all(0 < phase.seconds[0] <= phase.seconds[1] for phase in found.phases)
    if method == "auto":
        assert phases["calibration"].seconds[0] < phases["calibration"].seconds[1], "smoothquant may follow static"
    assert found.disk_mb > sum(map(len, before.values())) / 1e6
    assert {path.name: path.read_bytes() for path in bundle.path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(("max_drop", "likely"), [(0.1, 1), (0.3, 0)])
def test_a_quantization_is_long_if_the_first_file_loses_too_much(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, max_drop: float, likely: float
) -> None:
    bundle, data = tiny.bundle(tmp_path / "bundle"), tiny.reviews(tmp_path / "data")
    changed = ScoreDrop(0.9, 0.9, agreement=0.8, difference=0.1, changed=8)
    monkeypatch.setattr(QuantizationEvaluator, "outcome", lambda *_: changed)
    found = quantize.forecast_quantization(bundle, data, int8=Int8Options(rows=8), max_drop=max_drop)
    assert found.likely_minutes == pytest.approx(found.minutes[likely])


def test_phases_of_a_trimming(tmp_path: Path, home: Path) -> None:
    bundle, data = tiny.bundle(tmp_path / "bundle"), tiny.reviews(tmp_path / "data")
    phases = by_name(trim.forecast_trimming(str(bundle.path), tmp_path / "out", data=data))
    assert list(phases) == ["counting tokens", "writing", "scoring"]
    assert all(phase.seconds[0] > 0 for phase in phases.values())
    checkpoint = tiny.checkpoint(tmp_path / "checkpoint")
    assert list(by_name(trim.forecast_trimming(checkpoint, tmp_path / "out", data=data))) == [
        "counting tokens", "writing",
    ]  # fmt: skip
    assert not (tmp_path / "out").exists()
    result = command.run("trim", str(bundle.path), "--data", data, "--out", str(tmp_path / "out"), "--plan")
    assert result.code == 0 and "counting tokens" in result.out and "MB of disk" in result.out


def test_phases_of_training_for_int8(tmp_path: Path, home: Path) -> None:
    bundle, data = tiny.bundle(tmp_path / "bundle"), tiny.reviews(tmp_path / "data")
    given: dict[str, Any] = {"method": "qat", "overrides": ["stages.0.steps=8"]}
    found = quantize.forecast_quantization(bundle, data, out=tmp_path / "new", **given)
    assert [phase.name for phase in found.phases][-3:] == ["fp32 answers", "choice of products", "certificate"]
    assert any(phase.steps == (8, 8) for phase in found.phases)
    assert not (tmp_path / "new").exists()
    with pytest.raises(BundleError, match="give --out another folder"):
        quantize.forecast_quantization(bundle, data, **given)
