"""A gate passes what is as good, fails what is worse, and says where it cannot tell."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import onnx
import pytest
from datasets import Dataset

from compress.benchmark import arguments
from compress.commands import gate as command
from compress.data.task import Task
from compress.errors import BundleError
from compress.evaluation.statistics import bootstrap_interval
from compress.exporters.artifact import Bundle
from compress.exporters.manifest import BUNDLE_FILES
from compress.records.gate_result import GateCheck
from compress.records.latency import DeviceError, Latency, Setting
from tests import command as line
from tests import tiny
from tests.latencies import steady

SETTING = Setting(1, 1, 8)
Noise = Callable[[int], tuple[float, float]]


@dataclass(frozen=True)
class Ratio:
    """A device on which the new file takes `ratio` times as long, but for `noise` of the n-th pass."""

    ratio: float
    noise: Noise = lambda _: (1.0, 1.0)
    name: str = "ratio"
    passes: Any = None

    def facts(self) -> dict[str, str]:
        return {}

    def race(self, files: Mapping[str, Path], settings: Sequence[Setting], *, rounds: int, runs: int) -> list[Latency]:
        at = [next(self.passes) for _ in range(2)]
        times = {
            name: tuple(2.0 * (self.ratio if which else 1.0) * self.noise(n)[which] for n in at)
            for which, name in enumerate(files)
        }
        return [replace(steady(name, settings[0], 2.0), passes=each) for name, each in times.items()]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Bundle]:
    folder = tmp_path_factory.mktemp("gate")
    return tiny.bundle(folder / "old"), tiny.bundle(folder / "new", model=tiny.bert(seed=1))


def latency(pair: tuple[Bundle, Bundle], ratio: float, noise: Noise = lambda _: (1.0, 1.0), **more: Any) -> GateCheck:
    files = [bundle.path / BUNDLE_FILES["int8"] for bundle in pair]
    device: Any = Ratio(ratio, noise, passes=count())
    given = {"max_slower": 0.05, "minutes": 5.0, "say": lambda _: None, **more}
    return command.compare_latency(device, files, SETTING, **given)


def lognormal(scale: float, seed: int = 0) -> Noise:
    draw = np.random.default_rng(seed)
    return lambda _: tuple(np.exp(scale * draw.standard_normal(2)))


def test_a_quiet_device_decides_quickly(pair: tuple[Bundle, Bundle]) -> None:
    same, slower = latency(pair, 1.0), latency(pair, 1.1)
    assert (same.outcome, same.samples, same.change) == ("passed", 8, 0.0)
    assert (slower.outcome, slower.samples) == ("failed", 8)
    assert slower.change == pytest.approx(0.1)
    assert slower.new == pytest.approx(2.2)


def test_a_noisy_device_is_measured_longer(pair: tuple[Bundle, Bundle]) -> None:
    found = latency(pair, 1.1, lognormal(0.2, seed=1))
    assert found.outcome == "failed"
    assert found.samples > 8
    assert found.low is not None
    assert found.high is not None
    assert 0.05 < found.low < 0.1 < found.high


def test_time_runs_out(pair: tuple[Bundle, Bundle]) -> None:
    found = latency(pair, 1.05, lognormal(0.3), minutes=0)
    assert (found.outcome, found.samples, found.low, found.high) == ("cannot be told", 2, None, None)
    assert "more minutes" in found.reason


def test_noise_causes_no_wrong_verdict(pair: tuple[Bundle, Bundle]) -> None:
    outcomes = {
        ratio: [latency(pair, ratio, lognormal(0.1, seed)).outcome for seed in range(40)] for ratio in (1.0, 1.1)
    }
    assert outcomes[1.0].count("failed") == 0
    assert outcomes[1.1].count("passed") == 0


def test_a_single_disturbed_pass_decides_nothing(pair: tuple[Bundle, Bundle]) -> None:
    assert latency(pair, 1.0, lambda n: (1.0, 9.0 if n == 3 else 1.0)).outcome == "passed"


def test_a_clock_too_coarse_for_the_file_is_an_error(pair: tuple[Bundle, Bundle]) -> None:
    with pytest.raises(DeviceError, match="larger --batch"):
        latency(pair, 0.0)


def score(bundles: Sequence[Bundle], rows: int, max_drop: float) -> GateCheck:
    task = bundles[0].task
    draw = np.random.default_rng(0)
    texts = [" ".join(draw.choice(tiny.WORDS, 6)) for _ in range(rows)]
    expected = [each.label for each in bundles[0].predict(texts)]  # type: ignore[union-attr]
    split = Dataset.from_dict({"text": texts, "label": [task.labels.index(label) for label in expected]})
    return command.compare_scores(
        bundles, [each.path / BUNDLE_FILES["int8"] for each in bundles], split, max_drop=max_drop
    )


def test_equal_answers_pass(pair: tuple[Bundle, Bundle]) -> None:
    found = score([pair[0], pair[0]], 20, 0.0)
    assert (found.outcome, found.change, found.low, found.high) == ("passed", 0.0, 0.0, 0.0)


def test_rows_that_both_answer_wrongly_in_different_ways_leave_room_for_doubt(tmp_path: Path) -> None:
    task = Task("classification", ("sentence",), "label", ("a", "b", "c"), "accuracy")
    bundles = [tiny.bundle(tmp_path / str(at), model=tiny.bert(3, seed=at), task=task) for at in range(2)]
    texts = [" ".join(np.random.default_rng(at).choice(tiny.WORDS, 6)) for at in range(400)]
    answers = [[each.label for each in bundle.predict(texts)] for bundle in bundles]  # type: ignore[union-attr]
    rows = [
        {"text": text, "label": task.labels.index(({*task.labels} - {one, other}).pop())}
        for text, one, other in zip(texts, *answers, strict=True)
        if one != other
    ]
    files = [each.path / BUNDLE_FILES["int8"] for each in bundles]
    found = command.compare_scores(bundles, files, Dataset.from_list(rows), max_drop=0.0)
    assert (found.outcome, found.change) == ("cannot be told", 0.0)
    assert found.low is not None and found.high is not None and found.low < 0 < found.high


def test_a_large_drop_fails(pair: tuple[Bundle, Bundle]) -> None:
    worse = score(pair, 400, 0.05)
    assert worse.outcome == "failed"
    assert worse.low is not None
    assert worse.high is not None
    assert worse.low < worse.change < worse.high < -0.05
    few = score(pair, 20, -worse.change)
    assert few.outcome == "cannot be told"
    assert "these rows" in few.reason


@pytest.mark.parametrize("metric", ["f1", "matthews"])
def test_other_metrics_use_a_bootstrap(
    pair: tuple[Bundle, Bundle], metric: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "bootstrap_interval", partial(bootstrap_interval, resamples=50))
    changed = [replace(each, manifest=replace(each.manifest, task=replace(each.task, metric=metric))) for each in pair]
    found = score(changed, 120, 0.05)
    assert (found.unit, found.outcome, found.old) == (metric, "failed", 1.0)


def test_weights_in_other_files_count(pair: tuple[Bundle, Bundle], tmp_path: Path) -> None:
    """OpenVINO's .bin, and the data that large ONNX files keep elsewhere."""
    whole = onnx.load(pair[0].path / BUNDLE_FILES["fp32"])
    for name in ("old", "new"):
        onnx.save_model(
            whole, tmp_path / f"{name}.onnx", save_as_external_data=True, location=f"{name}.data", size_threshold=0
        )
        (tmp_path / f"{name}.xml").write_text("<net/>")
        (tmp_path / f"{name}.bin").write_bytes(bytes(1000 if name == "old" else 2000))
    outside = (tmp_path / "old.data").stat().st_size
    size = command.compare_sizes([tmp_path / "old.onnx", tmp_path / "new.onnx"], max_larger=0.0)
    assert size.old == size.new == pytest.approx(((tmp_path / "old.onnx").stat().st_size + outside) / 1e6)
    assert size.outcome == "passed"
    larger = command.compare_sizes([tmp_path / "old.xml", tmp_path / "new.xml"], max_larger=0.5)
    assert (larger.outcome, larger.old, larger.new) == ("failed", 0.001006, 0.002006)


def test_models_of_different_tasks_are_not_compared(pair: tuple[Bundle, Bundle], tmp_path: Path) -> None:
    task = Task("classification", ("text",), "label", ("a", "b", "c"), "accuracy")
    other = tiny.bundle(tmp_path / "other", model=tiny.bert(3), task=task)
    with pytest.raises(BundleError, match="different tasks"):
        command.gate(pair[0].path, other.path)


@pytest.mark.parametrize(("text", "share"), [("5%", 0.05), ("0.5 %", 0.005), ("0%", 0.0)])
def test_percentages(text: str, share: float) -> None:
    assert arguments.parse_percentage("max-slower", text) == share


@pytest.mark.parametrize(("ratio", "code", "tag"), [(1.0, 0, None), (1.2, 1, "failure"), (1.05, 3, "error")])
def test_the_command_in_every_output_format(
    pair: tuple[Bundle, Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ratio: float, code: int, tag: str
) -> None:
    """At exactly the limit nobody can tell."""
    old = str(pair[0].path)
    device: Any = Ratio(ratio, lognormal(0.01), passes=count())
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=count().__next__))  # each race takes a second
    monkeypatch.setattr(command, "open_chosen", lambda *_, **__: _Opened(device))
    files = ["--markdown", str(tmp_path / "gate.md"), "--junit", str(tmp_path / "gate.xml")]
    result = line.run("gate", old, old, "--data", tiny.reviews(tmp_path / "data"), "--minutes", "0.1", *files, "--json")
    assert result.code == code
    found = json.loads(result.out)
    assert [one["what"] for one in found["checks"]] == ["size", "score", "latency"]
    outcome = {0: "passed", 1: "failed", 3: "cannot be told"}[code]
    assert found["checks"][2]["outcome"] == outcome
    assert (tmp_path / "gate.md").read_text().startswith(f"## Gate: {outcome}\n")
    suite = ElementTree.fromstring((tmp_path / "gate.xml").read_text())
    assert suite.get("tests") == "3"
    cases = {case.get("name"): case for case in suite}
    assert cases["latency"][0].tag == (tag or "system-out")
    assert suite.get("failures") == ("1" if tag == "failure" else "0")


@dataclass
class _Opened:
    device: Any

    def __enter__(self) -> Any:
        return self.device

    def __exit__(self, *_: object) -> None:
        pass


def test_real_files_are_raced_here(pair: tuple[Bundle, Bundle]) -> None:
    files = [str(bundle.path / BUNDLE_FILES["fp32"]) for bundle in pair]
    result = line.run("gate", *files, "--max-slower", "900%", "--minutes", "0.1", "--seq", "8")
    assert result.code in (0, 3), "a machine that stands still for six seconds tells nothing"
    assert "latency" in result.out
