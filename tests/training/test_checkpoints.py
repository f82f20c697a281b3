"""A stage continues from a checkpoint that is whole, or not at all: damage to one costs steps, never other weights."""

import json
import pickle
import shutil
from contextlib import nullcontext
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from compress.errors import DamagedError
from compress.io import CHECKSUMS, seal, verify
from compress.training.stage import Trained
from compress.training.step import Distillation
from compress.training.trainer import Spent, list_checkpoints
from tests import learning
from tests.damage import KINDS, damaged
from tests.training.test_train import ByStep, assert_same, logged

STAGE = learning.stage(schedule="constant", checkpoint=2, evaluate=2)
FILES = (
    "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "best.safetensors",
    "costs.json", CHECKSUMS,
)  # fmt: skip


def run(path: Path, *, until: int | None = None, stage: Any = STAGE) -> tuple[Distillation, Trained | None, str]:
    """Train, up to a Ctrl-C after so many steps; return the step, its record, and what was printed."""
    step, console = learning.step(dropout=True), Console(file=(output := StringIO()), width=1000)
    if until is not None:
        learning.interrupt(step, until)
    trained = None
    with pytest.raises(KeyboardInterrupt) if until is not None else nullcontext():
        trained = learning.train(step, stage, path, score=ByStep(path), console=console)
    return step, trained, output.getvalue()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Distillation, Path]:
    path = tmp_path_factory.mktemp("whole")
    return run(path)[0], path


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("interrupted")
    run(path, until=7)
    return path


@pytest.fixture
def copy(interrupted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(interrupted, tmp_path / "run"))


def stage_of(path: Path) -> Path:
    return learning.run(path).stage(STAGE.name)


def test_the_newest_two_checkpoints_are_sealed_and_share_no_file(interrupted: Path) -> None:
    kept = list_checkpoints(stage_of(interrupted))
    assert [each.name for each in kept] == ["checkpoint-6", "checkpoint-4"]
    for each in kept:
        verify(each)
        assert set(FILES) == {file.name for file in each.iterdir()}
        assert {file.stat().st_nlink for file in each.iterdir()} == {1}


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (name, kind)
        for at, name in enumerate(FILES) for kind in KINDS
        if name in ("optimizer.pt", CHECKSUMS) or kind == KINDS[at % len(KINDS)]
    ],
)  # fmt: skip
def test_a_damaged_checkpoint_is_skipped(copy: Path, whole: tuple[Distillation, Path], name: str, damage: str) -> None:
    newest, before = list_checkpoints(stage_of(copy))
    damaged(newest / name, damage)
    step, _, said = run(copy)
    assert_same(step, whole[0], atol=0)
    assert logged(copy)[-1]["step"] == 8
    (warning,) = [line for line in said.splitlines() if line.startswith("warning")]
    for part in (str(newest), *([name] if name != CHECKSUMS else []), "step 4", "2 steps"):
        assert part in warning
    assert before.name == "checkpoint-4"


def test_without_a_whole_checkpoint_the_stage_starts_from_its_beginning(
    copy: Path, whole: tuple[Distillation, Path]
) -> None:
    for each in list_checkpoints(stage_of(copy)):
        damaged(each / "optimizer.pt", "bit")
    step, trained, said = run(copy)
    assert_same(step, whole[0], atol=0)
    warnings = [line for line in said.splitlines() if line.startswith("warning")]  # progress tells steps too
    assert [len([line for line in warnings if part in line]) for part in ("6 steps", "4 steps")] == [1, 1]
    assert "beginning" in said
    assert trained is not None
    assert trained.steps == 8
    assert [each.name for each in list_checkpoints(stage_of(copy))] == ["checkpoint-8", "checkpoint-6"]


class Poison:
    """What a pickle can do to who loads it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("the pickle's code has run",)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors", "costs.json"])
def test_a_foreign_checkpoint_runs_no_code(copy: Path, name: str) -> None:
    """Its checksums are right: who can write the file can write them, too."""
    newest = list_checkpoints(stage_of(copy))[0]
    torch.save({"state": Poison()}, newest / name, pickle_module=pickle)
    (newest / CHECKSUMS).unlink()
    seal(newest)
    with pytest.raises(DamagedError, match=r"Remove .*checkpoint-6") as caught:
        run(copy)
    assert newest in (caught.value.path, caught.value.path.parent)


# What a stage took


def test_costs_are_summed_over_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tick of the clock is a step's forward pass."""
    clock = [0.0]
    monkeypatch.setattr("compress.training.trainer.time.perf_counter", lambda: clock[0])
    forward = Distillation.forward

    def slow(self: Distillation, **batch: Any) -> Any:
        clock[0] += 1.0
        return forward(self, **batch)

    monkeypatch.setattr(Distillation, "forward", slow)
    for until in (3, 3, 3):
        clock[0] += 1000.0  # between two processes
        run(tmp_path, until=until)
    clock[0] += 1000.0
    _, trained, _ = run(tmp_path)
    assert trained is not None
    assert (trained.steps, trained.examples, trained.seconds) == (8, 64, 8.0)
    _, again, _ = run(tmp_path)
    assert again == trained
    assert Spent.load(list_checkpoints(stage_of(tmp_path))[0]).peak_rss_mb == trained.peak_rss_mb > 0


def test_the_log_sums_up_the_whole_stage(copy: Path, whole: tuple[Distillation, Path]) -> None:
    run(copy)
    assert logged(copy)[-1]["train_loss"] == logged(whole[1])[-1]["train_loss"]
    spent = json.loads((list_checkpoints(stage_of(copy))[0] / "costs.json").read_text(encoding="utf-8"))
    assert spent["seconds"] <= logged(copy)[-1]["train_runtime"]


def test_losses_between_two_checkpoints_are_logged_as_without_the_interruption(tmp_path: Path) -> None:
    """The log has a line every five steps, and one at every checkpoint: none is a mean that a kill has cut."""
    stage = learning.stage(steps=500, checkpoint=7, evaluate=0, lr=1e-3)
    for path in (tmp_path / "whole", tmp_path / "halved"):
        run(path, until=12 if path.name == "halved" else 18, stage=stage)
    run(tmp_path / "halved", until=11, stage=stage)
    assert logged(tmp_path / "halved") == logged(tmp_path / "whole")
    assert [line["step"] for line in logged(tmp_path / "whole")] == [5, 7, 10, 14, 15]
