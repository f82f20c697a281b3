"""A run that is killed, wherever, continues to bit-identical weights."""

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor, equal

from tests import children, tiny
from tests.children import Waits

STAGES = ("teacher", "intermediate", "prediction")
Weights = Mapping[str, Mapping[str, Tensor]]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A headless teacher, so fine-tuning it is the first of three stages; with dropout, so random numbers matter."""
    folder = tmp_path_factory.mktemp("given")
    teacher, recipe = tiny.checkpoint(folder / "teacher"), tiny.recipe(folder)
    data = tiny.reviews(folder / "data")
    return ["distill", "--teacher", teacher, "--recipe", recipe, "--data", data, "--precision", "fp32"]


@pytest.fixture(scope="module")
def uninterrupted(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPRESS_HOME", str(folder / "home"))
        assert children.run(command, folder / "run") == 0, children.said(folder / "run")
    return folder / "run"


def assert_same(one: Path, other: Path) -> None:
    """Weights of every stage, to the bit, and what the log says of every step."""
    for stage in STAGES:
        ours, theirs = (load_file(run / "stages" / stage / "model" / "model.safetensors") for run in (one, other))
        assert ours.keys() == theirs.keys()
        assert all(equal(ours[name], theirs[name]) for name in theirs), stage
    assert losses(one) == losses(other)


def losses(run: Path) -> list[tuple[str, int, float]]:
    lines = map(json.loads, (run / "log.jsonl").read_text(encoding="utf-8").splitlines())
    return [(line["stage"], line["step"], line["loss"]) for line in lines if "loss" in line]


def resumed(command: list[str], out: Path) -> None:
    assert children.run([*command, "--resume"], out, children.does_not_ship) == 0, children.said(out)


@pytest.mark.parametrize("place", [Waits("teacher", 8), Waits("prediction", 14)])
def test_killed_in_the_middle_of_a_stage(command: list[str], uninterrupted: Path, tmp_path: Path, place: Waits) -> None:
    child = children.start(command, tmp_path / "run", place)
    children.wait_for(child, tmp_path / "run", place.stage, place.after)
    child.kill()
    assert children.finish(child) == -signal.SIGKILL
    resumed(command, tmp_path / "run")
    assert_same(tmp_path / "run", uninterrupted)


@pytest.mark.parametrize(
    "accident",
    [
        children.dies_after_half_an_optimiser,
        children.dies_before_a_checkpoint_has_its_name,
        children.dies_before_the_older_checkpoint_goes,
        children.dies_with_new_best_weights_and_an_old_checkpoint,
        children.dies_before_a_result_has_its_name,
        children.dies_between_two_stages,
        children.dies_before_the_teacher_is_kept,
    ],
)
def test_killed_while_writing(
    command: list[str], uninterrupted: Path, tmp_path: Path, accident: children.Accident
) -> None:
    assert children.run(command, tmp_path / "run", accident) == -signal.SIGKILL, children.said(tmp_path / "run")
    resumed(command, tmp_path / "run")
    assert_same(tmp_path / "run", uninterrupted)
    left = [
        path for path in (tmp_path / "run").rglob("*") if path.suffix in (".partial", ".retired") and path.is_file()
    ]
    assert not left


def test_ctrl_c_says_how_to_continue(command: list[str], uninterrupted: Path, tmp_path: Path) -> None:
    child = children.start(command, tmp_path / "run", place := Waits("prediction", 7))
    children.wait_for(child, tmp_path / "run", place.stage, place.after)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGINT)
    assert children.finish(child) == 130
    assert "--resume" in children.said(tmp_path / "run")
    resumed(command, tmp_path / "run")
    assert_same(tmp_path / "run", uninterrupted)


def test_a_finished_run_may_be_resumed(command: list[str], uninterrupted: Path, tmp_path: Path) -> None:
    """It is shipped and measured again, from the weights there are."""
    kept, report = losses(uninterrupted), uninterrupted / "bundle" / "report.json"
    before = load_file(uninterrupted / "bundle" / "model.safetensors")
    report.unlink()
    assert children.run([*command, "--resume"], uninterrupted) == 0, children.said(uninterrupted)
    assert report.is_file()
    after = load_file(uninterrupted / "bundle" / "model.safetensors")
    assert all(equal(after[name], before[name]) for name in before)
    assert losses(uninterrupted) == kept
