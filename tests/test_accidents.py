"""What can happen to a run: a full disk, Ctrl-C, no network, numbers that explode. It is said, and it can go on."""

import errno
import math
import os
import pydoc
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from compress.exporters.artifact import Bundle
from compress.training.trainer import StepTrainer
from tests import children, command
from tests.command import Shelf, partial, refused

SHORT = ("--set", "stages.0.steps=2", "--set", "stages.1.steps=4", "--set", "stages.1.checkpoint=1")
NO_SPACE = os.strerror(errno.ENOSPC)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("a small disk can be mounted by root only")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(disk: Path, leave: int) -> None:
    with (disk / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(2**16))
        except OSError as error:
            assert error.errno == errno.ENOSPC
        file.truncate(file.tell() - leave)


def fills(disk: Path, function: str, leave: int, patch: pytest.MonkeyPatch) -> None:
    """The disk is full but for `leave` bytes from the first call of `function` on, of checkpoints the second."""
    where, _, name = function.rpartition(".")
    owner: Any = pydoc.locate(where)
    call: Callable[..., Any] = getattr(owner, name)
    calls: list[int] = []

    def called(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == (2 if "_save_checkpoint" in name else 1):
            fill(disk, leave)
        return call(*args, **kwargs)

    patch.setattr(owner, name, called)


MOMENTS = (
    ("compress.training.run.Run.open", 0),
    ("compress.training.stage.train", 0),
    ("compress.training.trainer.StepTrainer.evaluate", 0),
    ("compress.training.stage._save_result", 20_000),
    ("compress.training.trainer.StepTrainer._save_checkpoint", 0),  # the weights: safetensors
    ("compress.training.trainer.StepTrainer._save_checkpoint", 100_000),  # the optimiser: torch
    ("compress.exporters.bundle_files.write_encoder", 20_000),
    ("compress.exporters.bundle_files.write_encoder", 60_000),  # fp32
    ("compress.exporters.bundle_files.write_encoder", 130_000),  # int8
    ("compress.jobs.shipping.measure", 0),
    ("compress.jobs.shipping.card_fields", 0),
)


def test_a_full_disk(shelf: Shelf, tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch, hastened: None) -> None:
    """Again and again, ever later. A bundle is there only once it is whole; with room again, the run goes on."""
    words = shelf.distill(disk / "run", *SHORT, "--set", "teacher.steps=1", "--gate", "warn")
    for moment, leave in MOMENTS:
        with monkeypatch.context() as patch:
            fills(disk, moment, leave, patch)
            result = command.run(*words)
        assert result.code == 2, (moment, result)
        assert result.err.startswith(f"error: {disk / 'run'}"), (moment, result)
        assert NO_SPACE in result.err
        begun = (disk / "run" / "run.json").is_file()
        assert ("--resume" if begun else "Nothing was written. Run the same command again.") in result.err
        assert len(result.err.splitlines()) == 1
        assert partial(disk / "run") == []
        assert not (disk / "run" / "bundle").exists()
        (disk / "filler").unlink()
        words = [*words, "--resume"] if begun and "--resume" not in words else words
    result = command.run(*words)
    assert result.code == 0, result.err
    Bundle.load(disk / "run" / "bundle")


def test_a_full_disk_of_caches(shelf: Shelf, tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPRESS_HOME", str(disk))
    fill(disk, 0)
    out = tmp_path / "run"
    assert refused(command.run(*shelf.distill(out)), out, f"cannot use the cache {disk}", NO_SPACE, "COMPRESS_HOME")


@pytest.mark.parametrize("stage", ["teacher", "prediction"])
def test_numbers_that_explode(shelf: Shelf, tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compute_loss, out = StepTrainer.compute_loss, tmp_path / "run"

    def exploding(trainer: StepTrainer, *args: Any, **kwargs: Any) -> Any:
        return compute_loss(trainer, *args, **kwargs) * (math.inf if trainer.stage.name == stage else 1)

    monkeypatch.setattr(StepTrainer, "compute_loss", exploding)
    assert refused(command.run(*shelf.distill(out)), out, f"stage {stage}: the loss is inf at step", "lower lr (now")


def test_a_batch_that_processes_cannot_share(shelf: Shelf, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = shelf.distill(out, "--set", "stages.1.batch=15")
    at = arguments.index("--out")
    started = children.start_together([*arguments[:at], *arguments[at + 2 :]], out, processes=2)
    assert [children.finish(child) for child in started] == [2, 2]
    for rank in range(2):
        named = (
            f"error: process {rank} on {socket.gethostname()}: tiny: stage prediction: batch 15 cannot be split evenly"
        )
        assert f"{named} over 2 processes" in children.said(out)
    assert "Traceback" not in children.said(out)
    assert not out.exists()
