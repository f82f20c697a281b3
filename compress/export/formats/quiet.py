"""Silence for converters that print as they go, from native code, and warn of their own code's ways."""

import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Warnings, and what is written to the file descriptors of standard output and error meanwhile, are dropped.
    Errors are raised as ever: they do not come this way."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    kept = [os.dup(number) for number in (1, 2)]
    try:
        with tempfile.TemporaryFile() as dropped, warnings.catch_warnings(action="ignore"):
            for number in (1, 2):
                os.dup2(dropped.fileno(), number)
            yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number, original in zip((1, 2), kept, strict=True):
            os.dup2(original, number)
            os.close(original)
