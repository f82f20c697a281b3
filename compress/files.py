"""Files and folders that are whole or not there: written beside, then renamed."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FULL = 2**16
"""A disk with fewer bytes free is full: writers leave what is less than their next block."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """What the system, or a library in words of its own, makes of a full disk: an OSError that names `path`."""
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
    """A path beside `path` to write to; it takes the name `path` at the end, and is removed if anything fails."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with naming(path):
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
        with naming(path):
            yield partial
        if path.exists():
            path.rename(retired)
        partial.rename(path)
    finally:
        for left_over in (partial, retired):
            shutil.rmtree(left_over, ignore_errors=True)
