"""Files and folders are whole or absent, flushed before they get their names, and damage to them is found."""

import os
import stat
from pathlib import Path

import pytest
import torch

from compress import io
from compress.errors import DamagedError
from compress.io import CHECKSUMS, atomic_file, atomic_folder, move_into_place, name_disk_errors, verify


def test_files_are_replaced_atomically(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in ("old", "new"):
        with atomic_file(path) as partial:
            partial.write_text(content, encoding="utf-8")
            assert not path.exists() or path.read_text(encoding="utf-8") == "old"
        assert path.read_text(encoding="utf-8") == content
    with pytest.raises(KeyboardInterrupt), atomic_file(path) as partial:
        partial.write_text("hal", encoding="utf-8")
        raise KeyboardInterrupt
    assert path.read_text(encoding="utf-8") == "new"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_folders_are_replaced_atomically(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    for content in ("old", "new"):
        with atomic_folder(path) as partial:
            (partial / content).touch()
            assert not path.exists() or (path / "old").is_file()
        assert [each.name for each in path.iterdir()] == [content], "nothing of the old one stays"
    with pytest.raises(KeyboardInterrupt), atomic_folder(path) as partial:
        (partial / "half").touch()
        raise KeyboardInterrupt
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]
    assert [each.name for each in path.iterdir()] == ["new"]


def test_leftovers_are_removed(tmp_path: Path) -> None:
    for left in (".folder.partial", ".folder.retired"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "half").touch()
    with atomic_folder(tmp_path / "folder") as partial:
        (partial / "whole").touch()
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]
    assert [each.name for each in (tmp_path / "folder").iterdir()] == ["whole"]


def test_a_retired_folder_is_restored(tmp_path: Path) -> None:
    retired = tmp_path / ".folder.retired"
    retired.mkdir()
    (retired / "old").touch()
    with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / "folder"):
        raise KeyboardInterrupt
    assert [each.name for each in (tmp_path / "folder").iterdir()] == ["old"]


def test_flush_comes_before_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, str]] = []

    def flushed(handle: int) -> None:
        events.append(("fsync", Path(f"/proc/self/fd/{handle}").readlink().name))

    rename = Path.replace

    def renamed(self: Path, target: Path) -> Path:
        events.append(("rename", target.name))
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "replace", renamed)
    with atomic_folder(tmp_path / "folder") as partial:
        (partial / "below").mkdir()
        (partial / "below" / "file").write_text("x")
    expected = {("fsync", ".folder.partial"), ("fsync", "below"), ("fsync", "file")}
    assert set(events[:-2]) == expected
    assert events[-2:] == [("rename", "folder"), ("fsync", tmp_path.name)]
    events.clear()
    with atomic_file(tmp_path / "file") as partial:
        partial.write_text("x")
    assert events == [("fsync", ".file.partial"), ("rename", "file"), ("fsync", tmp_path.name)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full is Linux's")
def test_a_file_that_torch_could_not_finish_is_a_full_disk(tmp_path: Path) -> None:
    """The folder's own disk has room, as after another process made some."""
    with pytest.raises(OSError, match="No space left") as refused, name_disk_errors(tmp_path / "optimizer.pt"):
        torch.save(torch.ones(100_000), "/dev/full")
    assert refused.value.filename == str(tmp_path / "optimizer.pt")


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o002, 0o664)])
def test_the_umask_decides_who_may_read(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        with atomic_folder(tmp_path / "folder") as partial:
            os.close(os.open(partial / "private", os.O_CREAT | os.O_WRONLY, 0o600))
        private = tmp_path / "private"
        os.close(os.open(private, os.O_CREAT | os.O_WRONLY, 0o600))
        move_into_place(private, tmp_path / "public")
    finally:
        os.umask(before)
    for path in (tmp_path / "folder" / "private", tmp_path / "public"):
        assert stat.S_IMODE(path.stat().st_mode) == mode


def sealed(path: Path) -> Path:
    with atomic_folder(path, sealed=True) as partial:
        (partial / "below").mkdir()
        (partial / "below" / "a").write_bytes(b"a" * 100)
        (partial / "b").write_bytes(b"b")
    return path


def test_a_sealed_folder_is_what_was_written(tmp_path: Path) -> None:
    verify(sealed(tmp_path / "folder"))


@pytest.mark.parametrize("name", ["below/a", "b", CHECKSUMS])
@pytest.mark.parametrize("damage", ["bit", "cut", "empty", "gone"])
def test_damage_to_a_sealed_folder_is_found(tmp_path: Path, name: str, damage: str) -> None:
    folder = sealed(tmp_path / "folder")
    path = folder / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    contents = {"bit": content, "cut": content[: len(content) // 2], "empty": b""}
    path.unlink() if damage == "gone" else path.write_bytes(contents[damage])
    with pytest.raises(DamagedError) as caught:
        verify(folder)
    assert caught.value.path == folder
    assert any(name in problem or name == CHECKSUMS for problem in caught.value.problems)


def test_a_file_added_to_a_sealed_folder_is_found(tmp_path: Path) -> None:
    folder = sealed(tmp_path / "folder")
    (folder / "more").touch()
    with pytest.raises(DamagedError) as caught:
        verify(folder)
    assert caught.value.problems == ["more is not one of its files"]


def test_checksums_that_are_no_table_are_damage(tmp_path: Path) -> None:
    folder = sealed(tmp_path / "folder")
    for content in ("[]", "3", "\x00", '{"b": "x"'):
        (folder / CHECKSUMS).write_text(content)
        with pytest.raises(DamagedError):
            io.verify(folder)


def test_files_of_one_name_are_hashed_in_one_order(tmp_path: Path) -> None:
    """A sentence encoder has a config.json, and one in the folder of its pooling."""
    files = [tmp_path / "config.json", tmp_path / "1_Pooling" / "config.json"]
    for number, file in enumerate(files):
        file.parent.mkdir(exist_ok=True)
        file.write_text(str(number))
    assert io.hash_files(files) == io.hash_files(files[::-1])
