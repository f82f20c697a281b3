"""A run that is killed, wherever, continues to bit-identical weights."""

import json
import os
import shlex
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor, equal

from tests import children, tiny
from tests.children import Waits
from tests.command import partial

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


class Interrupted(Waits):
    """Ctrl-C while it waits."""


class Terminated(Interrupted):
    """SIGTERM, from a cluster or a container that ends, while it waits."""


DEATHS: Sequence[children.Accident] = (
    Interrupted("teacher", 2),
    Waits("teacher", 8),
    children.dies_before_the_teacher_is_kept,
    children.dies_after_half_an_optimiser,
    children.dies_before_a_result_has_its_name,
    children.dies_between_two_stages,
    Interrupted("prediction", 7),
    Terminated("prediction", 9),
    children.dies_before_a_checkpoint_has_its_name,
    children.dies_before_the_older_checkpoint_goes,
    children.dies_with_new_best_weights_and_an_old_checkpoint,
    Waits("prediction", 14),
)


ENDS: Mapping[type[Waits], tuple[signal.Signals, int]] = {
    Waits: (signal.SIGKILL, -signal.SIGKILL),
    Interrupted: (signal.SIGINT, 130),
    Terminated: (signal.SIGTERM, 143),
}
"""The signal that ends a run, and its exit code then."""


def test_a_run_that_dies_again_and_again_ends_with_the_same_weights(
    command: list[str], uninterrupted: Path, tmp_path: Path
) -> None:
    """Killed in the middle of a stage and of every kind of writing, and interrupted by Ctrl-C, which says how to go
    on."""
    out = tmp_path / "run"
    for death in DEATHS:
        resumed = [*command, "--resume"] if out.exists() else command
        child = children.start(resumed, out, death)
        if isinstance(death, Waits):
            children.wait_for(child, out, death.stage, death.after)
            assert child.pid is not None
            os.kill(child.pid, ENDS[type(death)][0])
        ended, said = children.finish(child), children.said(out)
        assert ended == ENDS[type(death) if isinstance(death, Waits) else Waits][1], f"{death}: {said}"
        if isinstance(death, Interrupted):
            assert "Traceback" not in said
            go_on = said.strip().rpartition("interrupted. Continue with: ")[2]
            assert sorted(shlex.split(go_on)) == sorted(["compress", *command, "--out", str(out), "--resume"])
            assert partial(out) == []
        assert not (out / "bundle").exists()
    assert children.run([*command, "--resume"], out, children.does_not_ship) == 0, children.said(out)
    assert_same(out, uninterrupted)
    assert partial(out) == []


def test_a_finished_run_may_be_resumed(command: list[str], uninterrupted: Path, tmp_path: Path) -> None:
    """It is shipped and measured again, from the weights there are."""
    kept, report = losses(uninterrupted), uninterrupted / "bundle" / "report.json"
    before = load_file(uninterrupted / "bundle" / "model.safetensors")
    report.unlink()
    assert children.run([*command, "--resume"], uninterrupted) == 0, children.said(uninterrupted)
    assert "this run will export to ONNX, and" in children.said(uninterrupted), "its stages are done"
    assert report.is_file()
    after = load_file(uninterrupted / "bundle" / "model.safetensors")
    assert all(equal(after[name], before[name]) for name in before)
    assert losses(uninterrupted) == kept
