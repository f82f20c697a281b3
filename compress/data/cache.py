"""Cache results under $COMPRESS_HOME: each entry is a folder with checksums, verified
before use and remade if damaged.

<kind>/<key>/            an entry: Arrow files, which are memory-mapped, or other files
<kind>/.<key>.partial/   an unfinished entry; its finished parts are listed in its
                         checksums
<kind>/.<key>.lock       held by the process that makes the entry, and released when it
                         ends
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import pyarrow as pa

from compress import io
from compress.errors import DamagedError, DataError
from compress.progress import note, show_progress

if TYPE_CHECKING:
    from datasets import Dataset

RESUMABLE_SECONDS: Final = 7 * 24 * 3600
"""Seconds after which the finished parts of an interrupted entry are removed."""


def home() -> Path:
    """Return the folder of the caches: $COMPRESS_HOME, else ~/.cache/compress."""
    return Path(os.environ.get("COMPRESS_HOME") or "~/.cache/compress").expanduser()


def load_or_create(entry: Path, make: Callable[[Path], object]) -> Path:
    """Return the folder of an entry, verified; `make` fills it if it is missing or
    damaged.

    `make` is given a folder and writes the files missing there: it may already hold
    files that an interrupted attempt finished with `part`, or the intact files of a
    damaged entry. One process makes an entry while others wait for it. An intact entry
    is not written to. Raises DataError if the entry has to be made and the disk is full
    or read-only.
    """
    with explained(entry.parent):
        if is_whole(entry):
            return entry
        entry.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(entry)
        with locked(entry):
            if _damage(entry):  # unless another process has made it meanwhile
                _fill(entry, make)
    return entry


def is_whole(entry: Path) -> bool:
    """Check whether an entry exists as it was written; print a note if it is
    damaged."""
    if not entry.exists():
        return False
    problem = _damage(entry)
    if problem:
        note(f"{problem} It will be made again.")
    return problem is None


@contextmanager
def part(folder: Path, name: str) -> Iterator[Path]:
    """Yield the path of a file of an unfinished entry to write; once finished, it
    survives an interruption."""
    with io.atomic_file(folder / name) as partial:
        yield partial
    io.seal(folder, [name])


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """Yield a temporary directory next to the entries of `folder`, or elsewhere if that
    is read-only; it is removed afterwards."""
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            with tempfile.TemporaryDirectory() as elsewhere:
                yield Path(elsewhere)
            return
        name = folder / uuid.uuid4().hex
        _remove_leftovers(name)
        with locked(name):
            try:
                _partial(name).mkdir()
                yield _partial(name)
            finally:
                shutil.rmtree(_partial(name), ignore_errors=True)


def write(
    path: Path,
    batches: Iterable[pa.RecordBatch],
    *,
    empty: str = "there are no rows to write",
) -> Path:
    """Stream batches into an Arrow file, and return its path. Raises DataError(empty)
    if there are none."""
    batches = iter(batches)
    first = next(batches, None)
    if first is None:
        raise DataError(empty)
    with (
        pa.OSFile(str(path), "wb") as sink,
        pa.ipc.new_stream(sink, first.schema) as writer,
    ):
        writer.write_batch(first)
        for batch in batches:
            writer.write_batch(batch)
    return path


def rows(
    kind: str, key: str, batches: Callable[[], Iterable[pa.RecordBatch]], *, empty: str
) -> Dataset:
    """Return the cached rows of `key`, written from `batches` the first time. Raises
    DataError(empty) for no rows."""
    entry = load_or_create(
        home() / kind / key,
        lambda folder: write(folder / "rows.arrow", batches(), empty=empty),
    )
    return dataset(entry, key)


def keep_splits(
    folder: Path, splits: Mapping[Any, Iterable[pa.RecordBatch]], *identity: str
) -> tuple[dict[str, Dataset], str]:
    """Write splits to `folder`, and move them to the cache.

    Returns the memory-mapped splits by role, and one fingerprint of their contents and
    `identity`.
    """
    files = {
        role: write(
            folder / f"{role}.arrow",
            show_progress(splits[role], f"keeping {role}", unit="batches"),
        )
        for role in sorted(splits)
    }
    prints = {role: digest(path) for role, path in files.items()}
    fingerprint = digest(*identity, *(word for pair in prints.items() for word in pair))

    def move(into: Path) -> None:
        for path in files.values():
            shutil.move(path, into / path.name)

    kept = load_or_create(home() / "data" / fingerprint, move)
    return {
        role: dataset(kept / f"{role}.arrow", print_) for role, print_ in prints.items()
    }, fingerprint


def table(path: Path) -> pa.Table:
    """Open an Arrow file as a memory-mapped table."""
    return pa.ipc.open_stream(pa.memory_map(str(path))).read_all()


def dataset(path: Path, fingerprint: str) -> Dataset:
    """Open an Arrow file, or all Arrow files of an entry in the order of their names,
    as a memory-mapped dataset."""
    from datasets import Dataset
    from datasets.table import MemoryMappedTable, concat_tables

    paths = sorted(path.glob("*.arrow")) if path.is_dir() else [path]
    return Dataset(
        concat_tables([MemoryMappedTable.from_file(str(file)) for file in paths]),
        fingerprint=fingerprint,
    )


def digest(*parts: str | Path) -> str:
    """Hash texts and the contents of files to 32 hex digits."""
    total = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, Path):
            total.update(bytes.fromhex(io.sha256(part)))
        else:
            total.update(hashlib.sha256(part.encode()).digest())
    return total.hexdigest()


def _damage(entry: Path) -> DamagedError | None:
    try:
        io.verify(entry)
    except DamagedError as error:
        return error
    return None


def _fill(entry: Path, make: Callable[[Path], object]) -> None:
    partial = _partial(entry)
    if entry.exists():  # its intact files are kept
        shutil.rmtree(partial, ignore_errors=True)
        entry.rename(partial)
    try:
        if partial.exists():
            io.drop_damaged(partial)
        partial.mkdir(exist_ok=True)
        make(partial)
        io.seal(partial)
        io.move_into_place(partial, entry)
    finally:
        if partial.exists() and not _has_parts(partial):
            shutil.rmtree(partial)


def _remove_leftovers(entry: Path) -> None:
    """Remove unfinished entries next to `entry` whose processes have ended, unless they
    may still be resumed."""
    leftovers = [
        path
        for ending in ("partial", "lock")
        for path in entry.parent.glob(f".*.{ending}")
    ]
    for other in {entry.with_name(path.stem[1:]) for path in leftovers} - {entry}:
        with locked(other, wait=False) as is_ours:
            partial = _partial(other)
            if is_ours and not (
                _has_parts(partial)
                and time.time() - partial.stat().st_mtime < RESUMABLE_SECONDS
            ):
                shutil.rmtree(partial, ignore_errors=True)


def _has_parts(partial: Path) -> bool:
    try:
        return bool(io.read_checksums(partial))
    except DamagedError:
        return False


def _partial(entry: Path) -> Path:
    return entry.with_name(f".{entry.name}.partial")


@contextmanager
def locked(entry: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of an entry; without `wait`, yield False if another process holds
    it."""
    path = entry.with_name(f".{entry.name}.lock")
    while True:
        with path.open("a") as file:
            try:
                io.lock(file)
            except BlockingIOError:
                if not wait:
                    yield False
                    return
                note(f"another process is making {entry}; waiting for it")
                io.lock(file, wait=True)
            if not _is_open_file(file, path):  # its last holder has removed it
                continue
            try:
                yield True
            finally:
                # on Windows, if open elsewhere: its next holder removes it
                with suppress(PermissionError):
                    path.unlink(missing_ok=True)
            return


def _is_open_file(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Re-raise disk errors about `folder` as a DataError that says what to do."""
    try:
        yield
    except OSError as error:
        elsewhere = error.filename is not None and not str(error.filename).startswith(
            str(folder)
        )
        # raised by a library, or about another file
        if error.strerror is None or elsewhere:
            raise
        raise DataError(
            f"cannot use the cache {folder}: {error.strerror}. Free space there, or "
            "set COMPRESS_HOME to another disk."
        ) from error
