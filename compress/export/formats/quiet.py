"""Silence for converters whose native code prints as it goes."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """What is written to the file descriptors of standard output and error meanwhile is dropped. Errors are raised as
    ever: they do not come this way."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    kept = [os.dup(number) for number in (1, 2)]
    try:
        with tempfile.TemporaryFile() as dropped:
            for number in (1, 2):
                os.dup2(dropped.fileno(), number)
            yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number, original in zip((1, 2), kept, strict=True):
            os.dup2(original, number)
            os.close(original)
