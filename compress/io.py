"""Write files and folders atomically: into a temporary path, flushed, then renamed, so
that a power cut does no harm.

A sealed folder also holds `checksums.json`, the SHA-256 of each of its files, so that
damage is detected before use.
"""

import errno
import hashlib
import inspect
import json
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from compress.errors import DamagedError

JsonObject = dict[str, Any]
"""An object of JSON: name -> value."""

FULL = 2**16
"""A disk with fewer free bytes counts as full: writers leave less than their next block
unused."""
TORN = re.compile("unexpected pos|PytorchStreamWriter")
"""torch's messages for a file that it could not finish writing; another process may
have freed space since."""
CHECKSUMS = "checksums.json"
WINDOWS = sys.platform == "win32"
BEYOND = 2**30
"""The offset of the byte that is locked on Windows: beyond the end, because nobody else
can read a locked byte."""


@contextmanager
def name_disk_errors(path: Path) -> Iterator[None]:
    """Re-raise errors of a full or failing disk, from libraries too, as an OSError that
    names `path`."""
    from safetensors import SafetensorError

    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        code = (
            re.search(r"\(os error (\d+)\)", str(error))
            if isinstance(error, SafetensorError)
            else None
        )
        torn = isinstance(error, RuntimeError) and TORN.search(str(error))
        if not code and not torn and shutil.disk_usage(path.parent).free >= FULL:
            raise
        number = int(code[1]) if code else errno.ENOSPC
        raise OSError(number, os.strerror(number), str(path)) from error


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; rename it to `path` at the end, or remove it
    if anything fails.

    A link at `path` is replaced, not followed: `outputs.output_file` follows links, and
    writes into pipes and devices.
    """
    partial = beside(path, "partial")
    try:
        with name_disk_errors(path):
            yield partial
            move_into_place(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path, *, sealed: bool = False) -> Iterator[Path]:
    """Yield a temporary folder to fill; it replaces `path` at the end, and keeps its
    mode and owner.

    A link to a folder stays; the folder is replaced. sealed: add checksums.
    """
    path = follow_links(path)
    partial = beside(path, "partial")
    retired = beside(path, "retired")
    # a process was killed between the two renames below
    if retired.exists() and not path.exists():
        retired.rename(path)
    try:
        for leftover in (partial, retired):
            shutil.rmtree(leftover, ignore_errors=True)
        make_folder(path.parent)
        partial.mkdir()
        with name_disk_errors(path):
            yield partial
            if sealed:
                seal(partial)
            flush(partial)
            if path.exists():
                if not path.is_dir():
                    raise NotADirectoryError(
                        errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)
                    )
                keep_owner(partial, path.stat())
                path.rename(retired)
            _rename(partial, path)
    finally:
        for leftover in (partial, retired):
            shutil.rmtree(leftover, ignore_errors=True)


MOST_NAME = 255
"""Bytes of a name that every file system of Linux and macOS can store."""


def beside(path: Path, suffix: str) -> Path:
    """Return the temporary path next to a file or a folder, the same each time; a long
    name is replaced by its hash."""
    name = f".{path.name}.{suffix}"
    if len(os.fsencode(name)) > MOST_NAME:
        name = f".{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:32]}.{suffix}"
    return path.with_name(name)


MOST_LINKS = 40
"""Maximum links in a row that Linux follows."""


def follow_links(path: Path, until: Callable[[Path], bool] = lambda _: False) -> Path:
    """Return the path behind all links, which need not exist yet; stop at a path for
    which `until` is true.

    Raises OSError for links in a circle, and for names that no file can have.
    """
    at = path
    for _ in range(MOST_LINKS):
        at = Path(os.path.realpath(at.parent), at.name)
        if until(at) or not at.is_symlink():
            return at
        at = at.parent / at.readlink()
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def keep_owner(path: Path, found: os.stat_result) -> None:
    """Give a file or folder the owner, where that is allowed, and the mode of the one
    that it replaces."""
    now = path.stat()
    if hasattr(os, "chown") and (now.st_uid, now.st_gid) != (
        found.st_uid,
        found.st_gid,
    ):
        with suppress(PermissionError):
            os.chown(path, found.st_uid, found.st_gid)
    path.chmod(stat.S_IMODE(found.st_mode))


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, behind links too, and flush their names
    to the disk."""
    folder = follow_links(folder)
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        _flush(path.parent)


def move_into_place(partial: Path, path: Path) -> None:
    """Flush a finished file or folder, rename it to `path`, and flush the rename.

    A file at `path` is replaced, by one with its mode and owner.
    """
    flush(partial)
    if path.is_file():
        keep_owner(partial, path.stat())
    _rename(partial, path)


def flush(path: Path) -> None:
    """Flush a file, or a folder with all files below it, to the disk, and apply the
    umask.

    Some libraries create files that only their owner may read.
    """
    os.umask(umask := os.umask(0o077))
    for folder, _, names in os.walk(path) if path.is_dir() else ():
        for name in names:
            flush(Path(folder, name))
        _flush(Path(folder))
    if path.is_file() and not path.is_symlink():
        path.chmod(0o666 & ~umask | path.stat().st_mode & 0o111)
        _flush(path)


def _rename(partial: Path, path: Path) -> None:
    partial.replace(path)
    _flush(path.parent)


def _flush(path: Path) -> None:
    if WINDOWS and path.is_dir():  # folders cannot be opened there; NTFS journals names
        return
    handle = os.open(path, os.O_RDWR if WINDOWS else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def lock(file: IO[str], *, wait: bool = False, shared: bool = False) -> None:
    """Lock an open file until it is closed or its process ends. Raises BlockingIOError
    if another process holds it.

    shared  let others hold a shared lock too; ignored on Windows
    """
    if not WINDOWS:
        import fcntl

        fcntl.flock(
            file,
            (fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            | (0 if wait else fcntl.LOCK_NB),
        )
        return
    import msvcrt

    windows: Any = msvcrt
    while True:
        at = os.lseek(file.fileno(), 0, os.SEEK_CUR)
        os.lseek(file.fileno(), BEYOND, os.SEEK_SET)
        try:
            windows.locking(file.fileno(), windows.LK_NBLCK, 1)
            return
        except OSError as error:
            if not wait:
                raise BlockingIOError(error.errno, error.strerror) from error
            time.sleep(0.2)
        finally:
            os.lseek(file.fileno(), at, os.SEEK_SET)


def seal(folder: Path, names: Iterable[str] | None = None) -> None:
    """Write checksums of all files below `folder`; with `names`, add or update only the
    checksums of these files."""
    old = (
        read_checksums(folder)
        if names is not None and (folder / CHECKSUMS).exists()
        else {}
    )
    added = _list_files(folder) if names is None else names
    _write_checksums(folder, old | {name: sha256(folder / name) for name in added})


def read_checksums(folder: Path) -> dict[str, str]:
    """Read the checksums of a sealed folder, keyed by file name. Raises DamagedError if
    there are none."""
    try:
        digests = parse_json(folder / CHECKSUMS)
        return {str(name): str(digest) for name, digest in digests.items()}
    except FileNotFoundError:
        raise DamagedError(folder, [f"{CHECKSUMS} is missing"]) from None
    except (ValueError, AttributeError, RecursionError):
        raise DamagedError(folder, [f"{CHECKSUMS} cannot be read"]) from None


def verify(folder: Path) -> None:
    """Compare a sealed folder with its checksums. Raises DamagedError, which lists
    every file that differs."""
    if problems := _find_differences(folder, read_checksums(folder)):
        raise DamagedError(
            folder, [f"{name} {problem}" for name, problem in problems.items()]
        )


def drop_damaged(folder: Path) -> None:
    """Remove every file of a sealed folder that differs from its checksum."""
    try:
        expected = read_checksums(folder)
    except DamagedError:
        expected = {}
    problems = _find_differences(folder, expected)
    for name in problems:
        (folder / name).unlink(missing_ok=True)
    _write_checksums(
        folder,
        {name: digest for name, digest in expected.items() if name not in problems},
    )


def _find_differences(folder: Path, expected: Mapping[str, str]) -> dict[str, str]:
    """Return what is wrong with each file that differs from its expected checksum."""
    present = _list_files(folder)
    problems = dict.fromkeys(sorted(expected.keys() - present), "is missing")
    problems |= dict.fromkeys(
        sorted(present - expected.keys()), "is not one of its files"
    )
    for name in sorted(expected.keys() & present):
        try:
            if sha256(folder / name) != expected[name]:
                problems[name] = "has changed since it was written"
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            problems[name] = "cannot be read from the disk"
    return problems


def _write_checksums(folder: Path, digests: Mapping[str, str]) -> None:
    write_json(folder / CHECKSUMS, digests)


def keep_if_intact(folder: Path, warn: Callable[[str], None]) -> bool:
    """Return True if a sealed folder exists and is undamaged. A damaged one is removed,
    with a warning."""
    if not folder.is_dir():
        return False
    try:
        verify(folder)
    except DamagedError as error:
        warn(f"{error} It will be made again.")
        shutil.rmtree(folder)
        return False
    return True


def write_text(path: Path, text: str) -> None:
    """Write a text to a file, atomically."""
    with atomic_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any) -> None:
    """Write indented JSON to a file, atomically."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def write_hub_json(path: Path, content: Any) -> None:
    """Write JSON to a file, atomically, with the letters of every script, as the hub's
    libraries do."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def parse_json(path: Path) -> Any:
    """Parse a JSON file. Raises OSError, ValueError or RecursionError."""
    return json.loads(path.read_text(encoding="utf-8"))


def load_json(path: Path, remedy: str) -> dict[str, Any]:
    """Load a JSON object from a file of ours. Raises DamagedError, with `remedy`, if
    the file holds none."""
    try:
        content = parse_json(path)
    except FileNotFoundError:
        raise DamagedError(path, ["it is missing"], remedy) from None
    except (ValueError, RecursionError):
        raise DamagedError(path, ["it cannot be read as JSON"], remedy) from None
    if not isinstance(content, dict):
        raise DamagedError(
            path, [f"it holds a {type(content).__name__}, expected an object"], remedy
        )
    return content


def sha256(path: Path) -> str:
    """Compute the SHA-256 of a file as a hex string."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _list_files(folder: Path) -> set[str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix() for path in files} - {CHECKSUMS}


def hash_files(paths: Iterable[Path]) -> str:
    """Compute the SHA-256 over the names and contents of files, sorted by name and then
    by path, as a hex string."""
    total = hashlib.sha256()
    for path in sorted(paths, key=lambda path: (path.name, path)):
        total.update(path.name.encode())
        total.update(bytes.fromhex(sha256(path)))
    return total.hexdigest()


def hash_sample(path: Path, blocks: int = 2, size: int = 1 << 16) -> str:
    """Compute the SHA-256 over the length of a file and evenly spaced blocks of `size`
    bytes, including the first and the last bytes, as a hex string."""
    length = path.stat().st_size
    total = hashlib.sha256(str(length).encode())
    last = max(0, length - size)
    with path.open("rb") as file:
        for block in range(blocks):
            file.seek(last * block // max(1, blocks - 1))
            total.update(file.read(size))
    return total.hexdigest()


def hash_value(value: Any) -> str:
    """Compute the SHA-256 of plain data (dictionaries, lists, strings, numbers) as a
    hex string."""
    return hashlib.sha256(
        json.dumps(value, sort_keys=True, default=str).encode()
    ).hexdigest()


def source_files(function: Callable[..., Any] | None) -> list[Path]:
    """List the file in which a function is defined, if it has one."""
    if function is None:
        return []
    try:
        file = inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:  # a callable object, or a function written in C
        file = (
            inspect.getsourcefile(type(function))
            if type(function).__module__ != "builtins"
            else None
        )
    return [Path(file)] if file and Path(file).is_file() else []
