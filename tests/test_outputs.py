"""What a user names is written whole or not at all, and nothing but a file is ever replaced."""

import os
import shutil
import socket
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from compress.errors import OutputError
from compress.io import atomic_folder, make_folder
from compress.outputs import check_new_file, check_output_file, check_output_folder, output_file

CONTENT = "new\n"
UNPRIVILEGED = 65534


def write(path: Path) -> None:
    with output_file(path) as partial:
        partial.write_text(CONTENT, encoding="utf-8")


def make_device(path: Path, kind: int, major: int, minor: int) -> None:
    """Make a device of its own: a test that goes wrong must not replace the machine's."""
    try:
        os.mknod(path, 0o666 | kind, os.makedev(major, minor))
        if kind == stat.S_IFCHR:
            path.open("rb").close()  # which a folder that is mounted without devices refuses
    except OSError as error:
        pytest.skip(f"devices are made by root only, on Linux: {error}")


@pytest.fixture
def unprivileged(tmp_path: Path) -> Iterator[Path]:
    """Work without root's rights, in a folder of one's own."""
    own = tmp_path / "own"
    own.mkdir()
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        yield own
        return
    above = [folder for folder in tmp_path.parents if folder.is_relative_to("/tmp") and folder != Path("/tmp")]
    modes = {folder: stat.S_IMODE(folder.stat().st_mode) for folder in (tmp_path, *above)}
    for folder, mode in modes.items():
        folder.chmod(mode | 0o055)
    os.chown(own, UNPRIVILEGED, UNPRIVILEGED)
    os.seteuid(UNPRIVILEGED)
    yield own
    os.seteuid(0)
    for folder, mode in modes.items():
        folder.chmod(mode)


def test_a_new_file_has_the_mode_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write(tmp_path / "new")
    finally:
        os.umask(before)
    assert (tmp_path / "new").read_text() == CONTENT
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o664, 0o755])
def test_an_existing_file_keeps_its_mode_and_owner(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "old"
    path.write_text("old")
    if os.geteuid() == 0:
        os.chown(path, 1234, 4321)
    path.chmod(mode)
    before = path.stat()
    write(path)
    after = path.stat()
    assert path.read_text() == CONTENT
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)


def test_an_existing_folder_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    path.mkdir(mode=0o700)
    with atomic_folder(path) as partial:
        (partial / "new").touch()
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert [each.name for each in path.iterdir()] == ["new"]


def test_other_hard_links_keep_the_old_content(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("old")
    (tmp_path / "other").hardlink_to(tmp_path / "one")
    write(tmp_path / "one")
    assert [(tmp_path / name).read_text() for name in ("one", "other")] == [CONTENT, "old"]


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_to_a_file_stays(tmp_path: Path, exists: bool) -> None:
    (tmp_path / "below").mkdir()
    if exists:
        (tmp_path / "below" / "file").write_text("old")
    (tmp_path / "first").symlink_to("second")
    (tmp_path / "second").symlink_to(tmp_path / "below" / "file")
    check_output_file(tmp_path / "first", "out", "x")
    write(tmp_path / "first")
    assert (tmp_path / "below" / "file").read_text() == CONTENT
    assert [(tmp_path / name).readlink().name for name in ("first", "second")] == ["second", "file"]
    assert [each.name for each in (tmp_path / "below").iterdir()] == ["file"]


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_to_a_folder_stays(tmp_path: Path, exists: bool) -> None:
    target = tmp_path / "elsewhere" / "target"
    if exists:
        target.mkdir(parents=True)
        (target / "old").touch()
    (tmp_path / "link").symlink_to(target)
    with atomic_folder(tmp_path / "link") as partial:
        (partial / "new").touch()
    assert (tmp_path / "link").readlink() == target
    assert [each.name for each in target.iterdir()] == ["new"]
    (tmp_path / "another").symlink_to(tmp_path / "run")
    make_folder(tmp_path / "another")
    assert (tmp_path / "run").is_dir()


@pytest.mark.parametrize(("name", "minor"), [("null", 3), ("zero", 5)])
def test_a_device_is_written_through(tmp_path: Path, name: str, minor: int) -> None:
    device = tmp_path / name
    make_device(device, stat.S_IFCHR, 1, minor)
    (tmp_path / "link").symlink_to(device)
    for path in (device, tmp_path / "link"):
        check_output_file(path, "out", "x")
        check_new_file(path, "out", "x")
        write(path)
        assert stat.S_ISCHR(device.stat().st_mode)
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(["link", name])


def test_a_device_that_is_full_is_named(tmp_path: Path) -> None:
    make_device(tmp_path / "full", stat.S_IFCHR, 1, 7)
    with pytest.raises(OutputError, match="full: cannot be written: No space left"):
        write(tmp_path / "full")
    assert stat.S_ISCHR((tmp_path / "full").stat().st_mode)


def test_a_pipe_gets_all_or_nothing(tmp_path: Path) -> None:
    pipe, got = tmp_path / "pipe", list[bytes]()
    os.mkfifo(pipe)
    check_new_file(pipe, "out", "x")
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    with pytest.raises(KeyboardInterrupt), output_file(pipe) as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    write(pipe)
    reader.join()
    assert got == [CONTENT.encode()]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files have names in /proc")
def test_an_open_file_is_written_where_it_stands(tmp_path: Path) -> None:
    """As /dev/stdout is while the shell has sent it to a file."""
    with (tmp_path / "log").open("w+b") as log:
        log.write(b"before\n")
        log.flush()
        write(Path(f"/dev/fd/{log.fileno()}"))
        log.write(b"after\n")
    assert (tmp_path / "log").read_text() == f"before\n{CONTENT}after\n"
    with (tmp_path / "log").open("rb") as log, pytest.raises(OutputError, match="not open for writing"):
        check_output_file(Path(f"/proc/self/fd/{log.fileno()}"), "out", "x")


def folder(path: Path) -> None:
    path.mkdir()


def listen(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path has 107 bytes at most
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)
    os.chdir(here)


def circle(path: Path) -> None:
    path.symlink_to(path.name)


def disk(path: Path) -> None:
    make_device(path, stat.S_IFBLK, 1, 0)


@pytest.mark.parametrize("make", [folder, listen, circle, disk])
def test_what_is_no_file_is_refused_and_left_alone(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "there"
    make(path)
    before = path.lstat()
    with pytest.raises(OutputError, match="there"):
        check_output_file(path, "out", "x")
    with pytest.raises(OutputError, match="there"):
        write(path)
    if make is not folder:
        with pytest.raises(OutputError, match="there"):
            check_output_folder(path, "out")
    assert path.lstat() == before
    assert [each.name for each in tmp_path.iterdir()] == ["there"]


@pytest.mark.parametrize("name", ["file/below", "absent/below", "x" * 256, "x" * 5000, "zero\0byte", "\ud800"])
def test_names_that_no_file_can_have_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="--out"):
        check_output_file(tmp_path / name, "out", "x")
    if not name.startswith("absent"):
        with pytest.raises(OutputError, match="--out"):
            check_output_folder(tmp_path / name, "out")
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("length", [240, 247, 255])
def test_the_longest_names_are_written(tmp_path: Path, length: int) -> None:
    write(tmp_path / ("f" * length))
    with atomic_folder(tmp_path / ("d" * length)) as partial:
        (partial / "new").touch()
    assert {each.name[:2] + str(len(each.name)) for each in tmp_path.iterdir()} == {f"ff{length}", f"dd{length}"}


def test_what_may_not_be_written_is_refused(unprivileged: Path) -> None:
    locked = unprivileged / "locked"
    locked.write_text("old")
    locked.chmod(0o444)
    with pytest.raises(OutputError, match="is not writable"):
        write(locked)
    assert locked.read_text() == "old"
    closed = unprivileged / "closed"
    closed.mkdir()
    (closed / "open").write_text("a longer content than the new one")
    closed.chmod(0o555)
    with pytest.raises(OutputError, match="is not writable"):
        write(closed / "new")
    with pytest.raises(OutputError, match="is not writable"):
        check_output_folder(closed / "new", "out")
    write(closed / "open")
    assert (closed / "open").read_text() == CONTENT, "its folder is read-only, so it is written in place"


def test_an_input_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "input").write_text("old")
    (tmp_path / "same").hardlink_to(tmp_path / "input")
    (tmp_path / "link").symlink_to("input")
    for name in ("input", "same", "link"):
        with pytest.raises(OutputError, match="is also an input"):
            check_output_file(tmp_path / name, "out", "x", [tmp_path / "absent", tmp_path / "input"])
    with pytest.raises(OutputError, match="already exists"):
        check_new_file(tmp_path / "link", "out", "x")


def test_a_file_that_is_mounted_by_itself_is_written_in_place(tmp_path: Path) -> None:
    """As one that a container is given."""
    for name in ("inside", "outside"):
        (tmp_path / name).write_text("a longer content than the new one")
    mount = ["mount", "--bind", str(tmp_path / "outside"), str(tmp_path / "inside")]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a file can be mounted by root only, on Linux")
    try:
        write(tmp_path / "inside")
    finally:
        subprocess.run(["umount", tmp_path / "inside"], check=True)
    assert (tmp_path / "outside").read_text() == CONTENT
    assert sorted(each.name for each in tmp_path.iterdir()) == ["inside", "outside"]


def test_the_current_folder_and_a_mounted_one_are_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for place in (Path(), tmp_path, Path("/")):
        with pytest.raises(OutputError, match="inside it"):
            check_output_folder(place, "out")
    check_output_folder(Path("new"), "out")
