"""Write files and folders that are whole or absent, also after a power cut: write beside, flush, then rename.

A sealed folder also holds `checksums.json`, the SHA-256 of each of its files, so that damage is found before use.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from compress.errors import DamagedError

FULL = 2**16
"""A disk with fewer bytes free is full: writers leave what is less than their next block."""
CHECKSUMS = "checksums.json"
WINDOWS = sys.platform == "win32"
BEYOND = 2**30
"""The byte of a file that Windows locks for all of it, beyond its end: nobody else can read a byte that is locked."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Re-raise errors of a full or failing disk as an OSError that names `path`, also those of libraries."""
    from safetensors import SafetensorError

    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        told = re.search(r"\(os error (\d+)\)", str(error)) if isinstance(error, SafetensorError) else None
        if not told and shutil.disk_usage(path.parent).free >= FULL:
            raise
        number = int(told[1]) if told else errno.ENOSPC
        raise OSError(number, os.strerror(number), str(path)) from error


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """Yield a path beside `path` to write to; give it the name `path` at the end, or remove it if anything fails."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with naming(path):
            yield partial
            put(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def filled(path: Path, *, sealed: bool = False) -> Iterator[Path]:
    """Yield a new folder beside `path` to fill; let it take the place of `path` at the end, with `sealed` sealed."""
    partial, retired = (path.with_name(f".{path.name}.{suffix}") for suffix in ("partial", "retired"))
    if retired.exists() and not path.exists():  # a process was killed between the two renames below
        retired.rename(path)
    try:
        for left_over in (partial, retired):
            shutil.rmtree(left_over, ignore_errors=True)
        make(path.parent)
        partial.mkdir()
        with naming(path):
            yield partial
            if sealed:
                seal(partial)
            flush(partial)
            if path.exists():
                path.rename(retired)
            _rename(partial, path)
    finally:
        for left_over in (partial, retired):
            shutil.rmtree(left_over, ignore_errors=True)


def make(folder: Path) -> None:
    """Create a folder and those above it that are missing, and flush their names to the disk."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        _flush(each.parent)


def put(partial: Path, path: Path) -> None:
    """Flush a finished file or folder to the disk, rename it to `path` over a file of that name, flush the rename."""
    flush(partial)
    _rename(partial, path)


def flush(path: Path) -> None:
    """Flush a file, or a folder with all files below it, to the disk, and let others read it as the umask says.

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
    if WINDOWS and path.is_dir():  # which cannot be opened there; NTFS keeps a journal of its names
        return
    handle = os.open(path, os.O_RDWR if WINDOWS else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def lock(file: IO[str], *, wait: bool = False, shared: bool = False) -> None:
    """Lock an open file until it is closed, or its process gone. Raises BlockingIOError where another holds it.

    shared   others may hold it so too; on Windows they may not
    """
    if not WINDOWS:
        import fcntl

        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
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
    """Write the checksums of all files below `folder` into it; given `names`, add those of these files alone."""
    added = _names(folder) if names is None else names
    known = checksums(folder) if names is not None and (folder / CHECKSUMS).exists() else {}
    _list(folder, known | {name: sha256(folder / name) for name in added})


def checksums(folder: Path) -> dict[str, str]:
    """Read the checksums in a sealed folder, by the names of its files. Raises DamagedError where there are none."""
    try:
        digests = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
        return {str(name): str(digest) for name, digest in digests.items()}
    except FileNotFoundError:
        raise DamagedError(folder, [f"{CHECKSUMS} is missing"]) from None
    except (ValueError, AttributeError, RecursionError):
        raise DamagedError(folder, [f"{CHECKSUMS} cannot be read"]) from None


def verify(folder: Path) -> None:
    """Compare a sealed folder with its checksums. Raises DamagedError, which lists every file that differs."""
    expected = checksums(folder)
    if problems := _differing(folder, expected):
        raise DamagedError(folder, [f"{name} {problem}" for name, problem in problems.items()])


def drop_damaged(folder: Path) -> None:
    """Remove every file that differs from the checksums of its folder: what is left is as it was written."""
    try:
        expected = checksums(folder)
    except DamagedError:
        expected = {}
    problems = _differing(folder, expected)
    for name in problems:
        (folder / name).unlink(missing_ok=True)
    _list(folder, {name: digest for name, digest in expected.items() if name not in problems})


def _differing(folder: Path, expected: Mapping[str, str]) -> dict[str, str]:
    """Return the names of files that differ from the checksums `expected`, each with the problem."""
    present = _names(folder)
    problems = dict.fromkeys(sorted(expected.keys() - present), "is missing")
    problems |= dict.fromkeys(sorted(present - expected.keys()), "is not one of its files")
    for name in sorted(expected.keys() & present):
        try:
            if sha256(folder / name) != expected[name]:
                problems[name] = "has changed since it was written"
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            problems[name] = "cannot be read from the disk"
    return problems


def _list(folder: Path, digests: Mapping[str, str]) -> None:
    with written(folder / CHECKSUMS) as partial:
        partial.write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")


def usable(folder: Path, warn: Callable[[str], None]) -> bool:
    """Tell whether a sealed folder is there and as it was written. One that is damaged is removed, with a warning."""
    if not folder.is_dir():
        return False
    try:
        verify(folder)
    except DamagedError as error:
        warn(f"{error} It is made again.")
        shutil.rmtree(folder)
        return False
    return True


def write_json(path: Path, content: Any) -> None:
    """Write indented JSON to a file, whole or not at all."""
    with written(path) as partial:
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def load_json(path: Path, remedy: str) -> dict[str, Any]:
    """Load a JSON object from a file of ours. Raises DamagedError, with `remedy`, where the file holds none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DamagedError(path, ["it is missing"], remedy) from None
    except (ValueError, RecursionError):
        raise DamagedError(path, ["it cannot be read as JSON"], remedy) from None
    if not isinstance(found, dict):
        raise DamagedError(path, [f"it holds a {type(found).__name__}, where an object was expected"], remedy)
    return found


def sha256(path: Path) -> str:
    """Compute the hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _names(folder: Path) -> set[str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix() for path in files} - {CHECKSUMS}


def of_files(paths: Iterable[Path]) -> str:
    """Hex digest over the names and contents of files, in the order of their names."""
    total = hashlib.sha256()
    for path in sorted(paths, key=lambda each: each.name):
        total.update(path.name.encode())
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def of_value(value: Any) -> str:
    """Hex digest of plain data: dictionaries, lists, strings, numbers."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
