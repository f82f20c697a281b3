"""Files and folders that are whole or not there: written beside, then renamed."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; it takes the name `path` at the end, and is removed if anything fails."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def filled(path: Path) -> Iterator[Path]:
    """A folder beside `path` to fill; it takes the name `path`, and the place of what was there, at the end."""
    partial, retired = (path.with_name(f".{path.name}.{suffix}") for suffix in ("partial", "retired"))
    try:
        for left_over in (partial, retired):  # of a process that was killed here
            shutil.rmtree(left_over, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        if path.exists():
            path.rename(retired)
        partial.rename(path)
    finally:
        for left_over in (partial, retired):
            shutil.rmtree(left_over, ignore_errors=True)
