"""Make text of unknown origin safe for a terminal. Imports nothing but the standard library: every command needs it."""

import codecs
import io
import json
import re
import sys

MOST_TEXT = 600
ESCAPED = "compress.escaped"
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters apart from tab and newline, line separators, changes of direction, and halves of characters."""


def printable(text: str) -> str:
    """Escape what a terminal would obey; tabs and newlines stay."""
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def one_line(text: str, most: int = MOST_TEXT) -> str:
    """Put a text of unknown origin on one line, without what a terminal would obey, of at most `most` characters."""
    words = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return words if len(words) <= most else words[: most - 3] + "..."


def settle_streams() -> None:
    """Let no character end a command: what standard output's encoding lacks is escaped."""
    codecs.register_error(ESCAPED, _escape)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=ESCAPED)


def _escape(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end
