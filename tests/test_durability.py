"""The files of a distillation are flushed before they are renamed, have the modes of the umask, and are few."""

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests import command, unshipped
from tests.command import Shelf

SHORT = ("--set", "stages.0.steps=2", "--set", "stages.1.steps=4", "--set", "stages.1.checkpoint=1", "--gate", "warn")


@dataclass
class Disk:
    """What was flushed, and what was given a name before it was. A file is flushed as long as it does not change."""

    folder: Path
    flushed: dict[int, int] = field(default_factory=dict)
    renamed: list[Path] = field(default_factory=list)
    unflushed: set[Path] = field(default_factory=set)
    names: set[Path] = field(default_factory=set)

    def flush(self, handle: int) -> None:
        found = os.fstat(handle)
        self.flushed[found.st_ino] = found.st_mtime_ns
        self.names.discard(Path(f"/proc/self/fd/{handle}").readlink())

    def rename(self, source: Path, target: Path) -> None:
        if not target.is_relative_to(self.folder) or any(
            part.endswith((".partial", ".retired")) for part in target.parts
        ):
            return  # what is not finished yet, and what is thrown away
        self.renamed.append(target)
        self.names.add(target.parent)
        for path in (source, *source.rglob("*")):
            found = path.stat()
            if self.flushed.get(found.st_ino) != found.st_mtime_ns:
                self.unflushed.add(target / path.relative_to(source))


@pytest.fixture(scope="module")
def distilled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Disk]]:
    folder = tmp_path_factory.mktemp("distilled")
    shelf, disk = Shelf.fill(folder / "shelf"), Disk(folder / "mine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPRESS_HOME", str(folder / "mine" / "home"))
        unshipped.hasten(patch)
        for name in ("rename", "replace"):
            move = getattr(os, name)

            def moved(source: Any, target: Any, move: Callable[..., None] = move, **kwargs: Any) -> None:
                disk.rename(Path(source), Path(target))
                move(source, target, **kwargs)

            patch.setattr(os, name, moved)
        patch.setattr(os, "fsync", disk.flush)
        umask = os.umask(0o027)
        try:
            assert command.run(*shelf.distill(folder / "mine" / "run", *SHORT)).code == 0
        finally:
            os.umask(umask)
    yield folder / "mine" / "run", disk


def test_flush_before_rename_in_a_run(distilled: tuple[Path, Disk]) -> None:
    run, disk = distilled
    named = {path.relative_to(run).as_posix() for path in disk.renamed if path.is_relative_to(run)}
    assert {"run.json", "recipe.yaml", "stages/prediction/checkpoints/checkpoint-4", "bundle"} < named
    assert {"stages/teacher/model", "stages/intermediate/model", "stages/prediction/best.safetensors"} < named
    assert disk.unflushed == set()
    assert disk.names == set(), "folders are flushed once a name in them has changed"


def test_the_umask_applies_to_a_run(distilled: tuple[Path, Disk]) -> None:
    run, _ = distilled
    modes = {path.relative_to(run): stat.S_IMODE(path.stat().st_mode) for path in run.rglob("*") if path.is_file()}
    assert {path: oct(mode) for path, mode in modes.items() if mode != 0o640} == {}
    assert Path("bundle", "model.safetensors") in modes


def test_a_finished_run_has_no_optimiser_states(distilled: tuple[Path, Disk]) -> None:
    run, _ = distilled
    assert [path for name in ("checkpoints", "best.safetensors", "optimizer.pt") for path in run.rglob(name)] == []
    assert {each.parent.name for each in run.rglob("model.safetensors")} == {"model", "bundle"}
    result = command.run("clean", str(run), "--dry-run")
    assert (result.code, result.out.split()[-2:]) == (0, ["0.0", "MB"])
