"""The forecasts of what does not distil: searches, labels, int8 files, trimmed vocabularies. All leave nothing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from compress.commands import forecast as forecasting
from compress.commands import forecast_search as forecast_searching
from compress.commands import label as labelling
from compress.commands import quantize, trim
from compress.commands.forecast_search import forecast_search
from compress.config.options import Int8Options, MeasureOptions, StudyOptions
from compress.errors import BundleError
from compress.nas.config import Budget, Space
from compress.prompting.http_model import Endpoint, RemoteModel
from compress.records.forecast import Forecast, Phase
from tests import command, tiny
from tests.nas.shelved import PLAIN, SPACE, weighing
from tests.prompting.language_models import FakeLanguageModel
from tests.prompting.test_label import KNOWS, PROMPT, lines


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecasting, "LONG", (6, 6))
    monkeypatch.setattr(forecasting, "ROWS", 3)
    monkeypatch.setattr("compress.benchmark.devices.open_device", weighing)


def by_name(found: Forecast) -> dict[str, Phase]:
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


def test_phases_of_a_search(tmp_path: Path, home: Path, trials: None) -> None:
    found = searched(tmp_path, SPACE, budget=Budget(max_latency_ms=2.0, max_params=15000))
    phases = by_name(found)
    assert list(phases) == [
        "teacher", "measuring", "importance", "supernet", "trials", "short distillations", "timing finalists",
        "final: final", "export and measure",
    ]  # fmt: skip
    assert phases["supernet"].steps == (12, 12)
    assert phases["short distillations"].steps == (12, 12), "two finalists of six steps"
    assert phases["trials"].note == "5 shapes"
    assert 0 < phases["trials"].seconds[0] < phases["trials"].seconds[1], "half of the rows tell which are pruned"
    assert phases["measuring"].note == "9 files", "7 shapes, and the teacher in both precisions"
    (expected,) = found.out_of_reach
    assert expected.startswith("--max-latency-ms 2: the smallest shape")
    assert not (tmp_path / "out").exists()


def test_phases_of_a_plain_search(tmp_path: Path, home: Path, trials: None) -> None:
    found = searched(tmp_path, PLAIN, study=StudyOptions(trials=4, winners=2, minutes=9.0))
    phases = by_name(found)
    assert "supernet" not in phases and "short distillations" not in phases
    assert phases["final: final"].steps == (24, 24)
    assert found.minutes[1] <= 9.0
    space = Space.load(str(tmp_path / "space.yaml"))
    share = forecast_searching.forecast_trials((1.0, 2.0), StudyOptions(minutes=10.0), space, 0)
    assert share.seconds == (396.0, 396.0) and share.note == "198 shapes or more"


def asked(tmp_path: Path, speaker: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Phase]:
    monkeypatch.setattr(labelling, "open_language_model", lambda *_, **__: speaker)
    (tmp_path / "prompt.yaml").write_text(PROMPT, encoding="utf-8")
    data = lines(tmp_path / "texts.txt", *(f"a good film {at}" for at in range(20)))
    given = {"teacher": "told", "prompt": str(tmp_path / "prompt.yaml"), "data": data, "out": tmp_path / "out.jsonl"}
    return by_name(labelling.forecast_labelling(**given))


def test_labelling_with_a_local_model(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = labelling.ask

    def second_each(speaker: Any, prompts: Any, answers: Any, *, console: Console) -> Any:
        return replace(ask(speaker, prompts, answers, console=console), seconds=float(len(prompts)))

    monkeypatch.setattr(labelling, "ask", second_each)
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
    assert phase.note == "19 rows, 1 were answered now"


@pytest.mark.parametrize("method", ["auto", "dynamic", "smoothquant"])
def test_phases_of_a_quantization(tmp_path: Path, home: Path, method: Any) -> None:
    bundle, data = tiny.bundle(tmp_path / "bundle"), tiny.reviews(tmp_path / "data")
    before = {path.name: path.read_bytes() for path in bundle.path.rglob("*") if path.is_file()}
    found = quantize.forecast_quantization(bundle, data, method=method, int8=Int8Options(rows=32))
    phases = by_name(found)
    calibrated = [] if method == "dynamic" else ["calibration"]
    assert list(phases) == ["fp32 answers", *calibrated, "choice of products", "certificate"]
    assert all(0 < phase.seconds[0] <= phase.seconds[1] for phase in found.phases)
    if method == "auto":
        assert phases["calibration"].seconds[0] < phases["calibration"].seconds[1], "smoothquant may follow static"
    assert found.disk_mb > sum(map(len, before.values())) / 1e6
    assert {path.name: path.read_bytes() for path in bundle.path.rglob("*") if path.is_file()} == before


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


def test_phases_of_training_for_int8(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecasting, "LONG", (6, 6))
    bundle, data = tiny.bundle(tmp_path / "bundle"), tiny.reviews(tmp_path / "data")
    given: dict[str, Any] = {"method": "qat", "overrides": ["stages.0.steps=8"], "int8": Int8Options(rows=32)}
    found = quantize.forecast_quantization(bundle, data, out=tmp_path / "new", **given)
    assert [phase.name for phase in found.phases][-3:] == ["fp32 answers", "choice of products", "certificate"]
    assert any(phase.steps == (8, 8) for phase in found.phases)
    assert not (tmp_path / "new").exists()
    with pytest.raises(BundleError, match="give --out another folder"):
        quantize.forecast_quantization(bundle, data, **given)
