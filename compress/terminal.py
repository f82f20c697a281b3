"""Make text of unknown origin safe for a terminal. Only the standard library is
imported: every command needs this."""

import codecs
import io
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from contextvars import ContextVar
from typing import TextIO

STANDARD_OUTPUT: ContextVar[int] = ContextVar("standard_output", default=1)
"""The descriptor of standard output; not 1 while results are separated from other
output."""
MOST_TEXT = 600
ESCAPED = "compress.escaped"
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters except tab and newline, line separators, direction overrides, and
lone surrogates."""


def printable(text: str) -> str:
    """Escape control characters; tabs and newlines stay."""
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def one_line(text: str, most: int = MOST_TEXT) -> str:
    """Return the text on one line of at most `most` characters, without control
    characters."""
    words = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return words if len(words) <= most else words[: most - 3] + "..."


def escape_unencodable() -> None:
    """Escape characters that the encoding of standard output or error lacks, so that
    printing them cannot end a command."""
    codecs.register_error(ESCAPED, _escape)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=ESCAPED)


def _escape(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def open_closed_streams() -> None:
    """Open standard input, output and error if they are closed, so that no file of ours
    takes their numbers.

    A library that writes to standard error would otherwise write into that file, and
    `print` to standard output.
    """
    for number, name, mode in (
        (0, "stdin", "r"),
        (1, "stdout", "w"),
        (2, "stderr", "w"),
    ):
        try:
            os.fstat(number)
        except OSError:
            # the lowest free number, which is this one
            opened = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(opened, mode, encoding="utf-8"))


@contextmanager
def separate_results() -> Iterator[TextIO]:
    """Yield standard output for results; anything else that is written there meanwhile,
    by any library, goes to standard error.

    Raises BrokenPipeError at the end if the reader of the results has gone.
    """
    output = sys.stdout
    output.flush()
    try:
        in_this_process = output.fileno() == 1
    except (AttributeError, OSError, ValueError):
        # a test or a notebook has replaced it
        in_this_process = False
    if not in_this_process:
        with redirect_stdout(sys.stderr):
            yield output
        return
    results = os.fdopen(os.dup(1), "w", encoding=output.encoding, errors=output.errors)
    os.dup2(2, 1)
    token = STANDARD_OUTPUT.set(results.fileno())
    try:
        with redirect_stdout(sys.stderr):
            yield results
        results.flush()
    finally:
        STANDARD_OUTPUT.reset(token)
        os.dup2(results.fileno(), 1)
        with suppress(OSError):  # after an error the rest cannot be written either
            results.close()
