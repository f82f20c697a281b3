"""Trackers show what is trained, and change nothing of it. Those that are not installed are refused at once.

The trackers themselves are tried where they are installed (requirements/trackers.txt); the fake one is always.
"""

import importlib.util
import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

import compress
from compress import provenance
from compress.commands import preflight
from compress.config.options import RunOptions
from compress.errors import CompressError
from compress.jobs.request import DistillRequest
from compress.training import tracking
from compress.training.run import Run
from compress.training.stage import train
from tests import command, learning

STAGE = learning.stage(checkpoint=4)
FAKE = """
import os, random
from types import SimpleNamespace
run, begun, api = None, [], SimpleNamespace(api_key=None)
Settings = dict
random.seed(1)  # as some packages do when they are imported

class Run:
    def __init__(self, **settings):
        self.settings, self.logged, self.summary, self.ended = settings, [], {}, None
        self.id = settings["id"] or f"id{len(begun)}"
        self.dir, self.url = os.path.join(settings["dir"], "wandb", "files"), ""
    def _label(self, code): pass
    def finish(self, exit_code):
        global run
        run, self.ended = None, exit_code

class Config(dict):
    def update(self, values, allow_val_change): super().update(values)
config = Config()

def init(**settings):
    global run
    run = Run(**settings)
    begun.append(run)
    return run

def log(values):
    run.logged.append(values)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package of the same interface as wandb, as far as transformers' callback and ours use it."""
    package = tmp_path / "packages" / "wandb"
    (package / "sdk" / "lib").mkdir(parents=True)
    for name, text in {"": FAKE, "sdk": "", "sdk/lib": ""}.items():
        (package / name / "__init__.py").write_text(text, encoding="utf-8")
    (package / "sdk/lib/config_util.py").write_text("class ConfigError(Exception): pass\n", encoding="utf-8")
    for name in [name for name in sys.modules if name.partition(".")[0] == "wandb"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    importlib.invalidate_caches()
    import wandb

    yield wandb
    for name in [name for name in sys.modules if name.partition(".")[0] == "wandb"]:
        del sys.modules[name]


def tracked(path: Path, tracker: str | None, *, until: int | None = None) -> Any:
    """Train the stage, in a run with this tracker; interrupted after `until` passes."""
    path.mkdir(exist_ok=True)
    (path / "run.json").write_text("{}", encoding="utf-8")
    step = learning.step(STAGE.objective, dropout=True)
    torch.manual_seed(11)
    if until is not None:
        learning.interrupt(step, until)
    run = Run(path, seed=7, main=True, track=tracker)
    train(step, STAGE, learning.rows(), learning.context(), run)
    return step


def same(one: Any, other: Any) -> bool:
    ours, theirs = learning.weights(one), learning.weights(other)
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


def resumed(path: Path, tracker: str) -> None:
    """A tracked stage that is interrupted and goes on ends with the weights of one that is not tracked."""
    with pytest.raises(KeyboardInterrupt):
        tracked(path, tracker, until=6)
    assert same(tracked(path, tracker), tracked(path.parent / "untracked", None))


def test_a_stage_is_one_run_of_the_tracker(fake: Any, tmp_path: Path) -> None:
    resumed(tmp_path / "first", "wandb")
    one, other = fake.begun
    assert one.id == other.id
    assert (one.ended, other.ended) == (1, 0)
    assert one.settings["dir"] == tmp_path / "first"
    assert (one.settings["group"], one.settings["name"]) == ("first", "lesson")
    assert one.settings["mode"] == "offline", "the tests forbid to ask the hub"
    losses = {
        each["train/global_step"]: each["train/loss"]
        for run in (one, other)
        for each in run.logged
        if "train/loss" in each
    }
    lines = map(json.loads, (tmp_path / "first" / "log.jsonl").read_text(encoding="utf-8").splitlines())
    assert losses == {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert set(losses) == set(range(1, 9))


def test_the_part_of_a_run_is_in_its_group(fake: Any, tmp_path: Path) -> None:
    (tmp_path / "found").mkdir()
    (tmp_path / "found" / "run.json").write_text("{}", encoding="utf-8")
    run = Run(tmp_path / "found" / "students" / "12", seed=7, main=True, track="wandb")
    run.path.mkdir(parents=True)
    train(learning.step(), STAGE, learning.rows(), learning.context(), run)
    assert [(each.settings["group"], each.settings["name"]) for each in fake.begun] == [("found", "students/12/lesson")]


@pytest.mark.parametrize(
    ("key", "asked", "answers", "mode", "expected"),
    [
        ("key", True, True, None, None),
        (None, True, True, None, "offline"),
        ("key", False, True, None, "offline"),
        ("key", True, False, None, "offline"),
        ("key", False, False, "online", "online"),
    ],
)
def test_wandb_uses_its_server_only_if_allowed_and_reachable(
    fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    key: str | None, asked: bool, answers: bool, mode: str | None, expected: str | None,
) -> None:  # fmt: skip
    fake.api.api_key = key
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", not asked)
    monkeypatch.setattr(tracking, "is_reachable", lambda server: answers)
    if mode:
        monkeypatch.setenv("WANDB_MODE", mode)
    tracked(tmp_path / "run", "wandb")
    assert fake.begun[0].settings["mode"] == expected


def test_a_tracker_that_does_not_begin_is_an_error_of_the_users(
    fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**_: Any) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(fake, "init", init)
    with pytest.raises(CompressError, match="PermissionError: not yours"):
        tracked(tmp_path / "run", "wandb")


@pytest.mark.parametrize("fails", ["init", "log", "end"])
def test_a_tracker_that_fails_later_is_warned_of_once_and_left(
    fails: str, fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("gone")

    warned = list[str]()
    monkeypatch.setattr(tracking, "warn", lambda console, text: warned.append(text))
    with pytest.raises(KeyboardInterrupt):
        tracked(tmp_path / "run", "wandb", until=6)
    with monkeypatch.context() as patch:
        patch.setattr(*{"init": (fake, "init"), "log": (fake, "log"), "end": (fake.Run, "finish")}[fails], fail)
        assert same(tracked(tmp_path / "run", "wandb"), tracked(tmp_path / "untracked", None))
    assert len(warned) == 1
    assert "ConnectionError: gone" in warned[0]
    lines = map(json.loads, (tmp_path / "run" / "log.jsonl").read_text(encoding="utf-8").splitlines())
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 9))
    if fails == "log":
        assert fake.begun[-1].ended == 1
    tracked(tmp_path / "run", "wandb")
    assert fake.begun[-1].ended == 0, "the next time it is tried again"
    assert len(warned) == 1


def test_an_interrupt_is_not_hidden_by_a_tracker_that_fails_at_the_end(
    fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(fake.Run, "finish")
    with pytest.raises(KeyboardInterrupt):
        tracked(tmp_path / "run", "wandb", until=6)


def test_tensorboard_files_are_always_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for tracker in (None, "tensorboard"):
        tracked(tmp_path / str(tracker), tracker)
        assert list((tmp_path / str(tracker) / "tensorboard" / "lesson").glob("events.*"))


def test_a_plan_is_not_tracked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Prepared(Exception):  # noqa: N818 - no error
        pass

    def opened(request: DistillRequest, **_: Any) -> None:
        raise Prepared(request.options.track)

    monkeypatch.setattr("compress.commands.distill.open_job", opened)
    with pytest.raises(Prepared, match="None"):
        compress.forecast(teacher="minilm", data="intents", options=RunOptions(track="mlflow"))


@pytest.mark.parametrize("found", ["", "0.1"])
@pytest.mark.parametrize("name", preflight.TRACKERS[1:])
def test_a_tracker_that_is_absent_or_too_old_is_refused_before_anything_is_loaded(
    name: str, found: str, shelf: command.Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str:
        if package == name and not found:
            raise metadata.PackageNotFoundError(package)
        return found if package == name else metadata.version(package)

    monkeypatch.setattr(provenance, "version", version)
    told = command.run(*shelf.distill(tmp_path / "run", "--track", name))
    assert command.refused(told, tmp_path / "run", f"pip install {provenance.shlex.quote(_pin(name))}")
    assert not (tmp_path / "run").exists()


def _pin(name: str) -> str:
    (line,) = [line for line in metadata.requires(provenance.DISTRIBUTION) or () if line.startswith(f"{name}>")]
    return line.partition(";")[0].strip()


def test_an_unknown_tracker_is_refused() -> None:
    with pytest.raises(CompressError, match="Did you mean 'mlflow'"):
        preflight.check_tracker("mlfow")


# ---- the trackers themselves


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run, with nothing set that would send what is logged elsewhere."""
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_MODE", "WANDB_PROJECT", "TRACKIO_SPACE_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "first" / "trackio"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "first"


@pytest.mark.filterwarnings("default")
def test_mlflow_itself(alone: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    resumed(alone, "mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{alone / 'mlflow.db'}")
    (experiment,) = [each for each in client.search_experiments() if each.name == "first"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("lesson", "FINISHED")
    assert {each.step for each in client.get_metric_history(run.info.run_id, "loss")} == set(range(1, 9))
    assert {path.name for path in alone.parent.iterdir()} == {"first", "untracked"}


@pytest.mark.filterwarnings("default")
def test_wandb_itself(alone: Path) -> None:
    pytest.importorskip("wandb")
    resumed(alone, "wandb")
    found = sorted((alone / "wandb").glob("offline-run-*"))
    assert len({path.name.rpartition("-")[2] for path in found}) == 1
    assert all(list(path.glob("run-*.wandb")) for path in found)
    assert len(found) == 2


@pytest.mark.filterwarnings("default")
def test_trackio_itself(alone: Path) -> None:
    pytest.importorskip("trackio")
    resumed(alone, "trackio")
    from trackio.sqlite_storage import SQLiteStorage

    assert SQLiteStorage.get_runs("first") == ["lesson"]
    logged = SQLiteStorage.get_logs("first", "lesson")
    assert {each["train/global_step"] for each in logged if "train/loss" in each} == set(range(1, 9))
