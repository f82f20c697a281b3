"""Write to a path that the user named: completely or not at all, and never in place of
something that is not a file.

    nothing, a regular file   written next to it and renamed: other hard links keep the
                              old content. A new file gets the mode of the umask; an
                              existing one keeps its mode and, where allowed, its owner
    a symbolic link           the file or folder that it names is written, now or for
                              the first time; the link stays
    a pipe, a character device, a descriptor of this process (/dev/stdout)
                              written through, once everything is complete
    a folder, a socket, a block device, what may not be written
                              refused by name

Folders are written by `io.atomic_folder`, in which the user's rules for links and modes
hold too."""

import errno
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from compress.errors import BundleError, OutputError
from compress.io import beside, follow_links, move_into_place, name_disk_errors
from compress.terminal import STANDARD_OUTPUT

_STREAMS = (stat.S_ISFIFO, stat.S_ISCHR)
_NOT_FILES = {
    stat.S_IFDIR: "is a folder",
    stat.S_IFSOCK: "is a socket",
    stat.S_IFBLK: "is a block device",
}
_DESCRIPTORS = re.compile(r"/dev/fd|/proc/(?P<process>\d+)(?:/task/\d+)?/fd")
"""The folders of a process's open files, whose entries look like links but are the open
files themselves."""


@dataclass(frozen=True)
class _Place:
    """The place that a path names.

    path        behind all links
    found       what lies there; None if nothing does
    descriptor  the number of this process's open file that the path stands for, if it
                does
    """

    path: Path
    found: os.stat_result | None
    descriptor: int | None

    @property
    def is_stream(self) -> bool:
        """Return True if bytes can only be written through it, not renamed into its
        place."""
        if _is_descriptor(self.path):
            return True
        return self.found is not None and any(
            fits(self.found.st_mode) for fits in _STREAMS
        )


def check_output_file(
    path: Path, option: str, example: str, inputs: Iterable[Path] = ()
) -> None:
    """Raise OutputError, before any work is done, if a file cannot be written there, or
    is one of the inputs.

    option   the name of the argument that holds the path, for the message
    example  the name of a file that would do
    inputs   files that are read
    """
    place = _locate(path, option)
    _check(place, path, f"--{option} {path}", example)
    if place.found is None or place.is_stream:
        return
    for each in inputs:
        if each.is_file() and path.samefile(each):
            raise OutputError(
                f"--{option} {path}: is also an input, {each}; expected another file, "
                f"such as {example}"
            )


def check_new_file(path: Path, option: str, example: str) -> None:
    """Raise OutputError as `check_output_file` does, and for a regular file, which
    would be replaced."""
    place = _locate(path, option)
    _check(place, path, f"--{option} {path}", example)
    if place.found is not None and not place.is_stream:
        raise OutputError(
            f"--{option} {path}: already exists; expected a new file, such as {example}"
        )


def check_name(path: Path, option: str) -> None:
    """Raise OutputError for a path that no file or folder can have: too long, a circle
    of links, a zero byte."""
    _locate(path, option)


def check_output_folder(path: Path, option: str) -> None:
    """Raise OutputError, before any work is done, if a folder cannot be written or
    replaced there."""
    where = f"--{option} {path}"
    place = _locate(path, option)
    if place.found is not None and not stat.S_ISDIR(place.found.st_mode):
        raise OutputError(f"{where}: exists and is not a folder; expected a new folder")
    if place.found is not None and os.path.ismount(place.path):
        raise OutputError(
            f"{where}: is a mount point, which cannot be replaced; name a new folder "
            "inside it"
        )
    if place.path == Path.cwd():
        raise OutputError(
            f"{where}: is the current folder, which would be replaced; name a new "
            "folder inside it"
        )
    existing = next(folder for folder in place.path.parents if folder.exists())
    if not existing.is_dir():
        raise OutputError(
            f"{where}: {existing} is a file; expected a path inside a folder"
        )
    if not _may_write(existing):
        raise OutputError(
            f"{where}: cannot be created, since {existing} is not writable; expected "
            "another folder"
        )


def check_new_folder(path: Path) -> None:
    """Raise BundleError if the folder exists, OutputError if it cannot be written."""
    check_output_folder(path, "out")
    if path.exists():
        raise BundleError(
            f"{path}: exists; expected a new folder, since trimming changes every file"
        )


@contextmanager
def output_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; at the end its content is at `path`, in the
    way that suits what lies there.

    If anything fails, `path` is as it was. Raises OutputError for what
    `check_output_file` refuses, and where the content cannot be written in the end.
    """
    place = _locate(path, "out")
    _check(place, path, str(path), "result.json")
    if place.is_stream or _must_stay(place):
        with tempfile.TemporaryDirectory(prefix="compress-output.") as folder:
            complete = Path(folder) / (path.name[-100:] or "output")
            yield complete
            _write_through(complete, place, path)
        return
    partial = beside(place.path, "partial")
    try:
        with name_disk_errors(place.path):
            yield partial
            _replace(partial, place, path)
    finally:
        partial.unlink(missing_ok=True)


def _replace(partial: Path, place: _Place, path: Path) -> None:
    try:
        move_into_place(partial, place.path)
    except OSError as error:
        # of a file that is mounted by itself, as into a container
        if error.errno != errno.EBUSY:
            raise
        _write_through(partial, place, path)


def _locate(path: Path, option: str) -> _Place:
    """Follow the links of a path one by one. Raises OutputError for names that no file
    can have."""
    found: os.stat_result | None = None
    try:
        at = follow_links(path, until=_is_descriptor)
        with suppress(FileNotFoundError, NotADirectoryError):
            found = path.stat()
    except (OSError, ValueError) as error:
        # too long, a circle of links, no permission; a zero byte in it
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise OutputError(
            f"--{option} {str(path)[:200]!r}: cannot be a file's name: {reason}"
        ) from error
    descriptor = int(at.name) if _is_descriptor(at, of=os.getpid()) else None
    return _Place(at, found, descriptor)


def _is_descriptor(path: Path, of: int | None = None) -> bool:
    """Return True for an open file of a process; of: only of the process with this
    id."""
    match = _DESCRIPTORS.fullmatch(str(path.parent))
    if match is None or not path.name.isdecimal():
        return False
    return of is None or match["process"] in (None, str(of))


def _check(place: _Place, path: Path, where: str, example: str) -> None:
    """Raise OutputError for a place that holds something other than a file, or that is
    not writable."""
    if place.descriptor is not None:
        if not _is_writable(place.descriptor):
            raise OutputError(
                f"{where}: is not open for writing; expected a file to write, such as "
                f"{example}"
            )
        return
    if place.found is None:
        folder = place.path.parent
        if not folder.is_dir():
            problem = (
                f"{folder} is a file"
                if folder.exists()
                else f"there is no folder {folder}"
            )
            raise OutputError(
                f"{where}: {problem}; expected a file to write, such as {example}"
            )
        if not _may_write(folder):
            raise OutputError(
                f"{where}: the folder {folder} is not writable; expected a file "
                f"elsewhere, such as {example}"
            )
        return
    if kind := _NOT_FILES.get(stat.S_IFMT(place.found.st_mode)):
        raise OutputError(
            f"{where}: {kind}; expected a file to write, such as {example}"
        )
    if not _may_write(path):
        raise OutputError(
            f"{where}: is not writable; expected a writable file, such as {example}"
        )


def _may_write(path: Path) -> bool:
    """Return True if the user may write a file, or make files in a folder."""
    rights = os.W_OK | os.X_OK if path.is_dir() else os.W_OK
    return os.access(path, rights, effective_ids=os.access in os.supports_effective_ids)


def _is_writable(descriptor: int) -> bool:
    import fcntl  # not on Windows, where no path stands for an open file

    try:
        return fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
    except OSError:  # it is not open
        return False


def _must_stay(place: _Place) -> bool:
    """Return True for a file that can be written but not replaced, because its folder
    is read-only."""
    return place.found is not None and not _may_write(place.path.parent)


def _write_through(complete: Path, place: _Place, path: Path) -> None:
    """Copy a complete file into a pipe, a device, an open file, or over a file that
    cannot be renamed."""
    try:
        with complete.open("rb") as source, _open(place, path) as sink:
            shutil.copyfileobj(source, sink)
    except OSError as error:
        # the reader of standard output has closed it
        if error.errno == errno.EPIPE and place.descriptor is not None:
            raise
        raise OutputError(f"{path}: cannot be written: {error.strerror}") from error


def _open(place: _Place, path: Path) -> IO[bytes]:
    if place.descriptor is None:
        return path.open("wb")
    # keep the order: what was printed earlier comes first
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    number = STANDARD_OUTPUT.get() if place.descriptor == 1 else place.descriptor
    return os.fdopen(os.dup(number), "wb")
