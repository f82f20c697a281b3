"""Arrow files of ours on disk: written beside, then renamed; opened memory-mapped."""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from compress.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset


def home() -> Path:
    """Where our caches live: $COMPRESS_HOME, else ~/.cache/compress."""
    return Path(os.environ.get("COMPRESS_HOME") or Path.home() / ".cache" / "compress")


@contextmanager
def writing(folder: Path) -> Iterator[Path]:
    """A fresh directory beside `folder`'s own files, gone afterwards; a full or read-only disk is a DataError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as name:
            yield Path(name)
    except OSError as error:
        if error.strerror is None:  # not the disk's word, but a library's: no advice of ours fits
            raise
        raise DataError(
            f"cannot write the data cache {folder}: {error.strerror}. "
            "Make room there, or point COMPRESS_HOME to another disk."
        ) from error


def write(path: Path, batches: Iterable[pa.RecordBatch]) -> Path:
    """Stream batches of one schema, at least one of them, into an Arrow file; returns its path."""
    batches = iter(batches)
    first = next(batches)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, first.schema) as writer:
        writer.write_batch(first)
        for batch in batches:
            writer.write_batch(batch)
    return path


def keep(new: Path, final: Path) -> Path:
    """Give a finished file or directory its name; one that exists is as good, as names are made from contents."""
    if not final.exists():
        try:
            new.rename(final)
        except OSError as error:
            if error.errno not in {errno.EEXIST, errno.ENOTEMPTY}:
                raise
    return final


def keep_splits(splits: Path, *identity: str) -> tuple[dict[str, Dataset], str]:
    """The Arrow files in `splits`, one per role, in their place under `home()`: memory-mapped, by role, and the
    fingerprint of them all, which `identity` enters."""
    prints = {path.stem: digest(path) for path in sorted(splits.iterdir())}
    fingerprint = digest(*identity, *(word for pair in prints.items() for word in pair))
    kept = keep(splits, home() / "data" / fingerprint)
    return {role: dataset(kept / f"{role}.arrow", print_) for role, print_ in prints.items()}, fingerprint


def table(path: Path) -> pa.Table:
    """The rows of an Arrow file, memory-mapped."""
    return pa.ipc.open_stream(pa.memory_map(str(path))).read_all()


def dataset(path: Path, fingerprint: str) -> Dataset:
    """An Arrow file as a memory-mapped `datasets.Dataset` that carries the given fingerprint."""
    from datasets import Dataset
    from datasets.table import MemoryMappedTable

    return Dataset(MemoryMappedTable.from_file(str(path)), fingerprint=fingerprint)


def digest(*parts: str | Path) -> str:
    """A short hash of texts and of the contents of files."""
    total = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, Path):
            with part.open("rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
        else:
            total.update(hashlib.sha256(part.encode()).digest())
    return total.hexdigest()
