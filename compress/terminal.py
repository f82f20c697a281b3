"""Make text of unknown origin safe for a terminal. Only the standard library is imported: every command needs this."""

import codecs
import io
import json
import re
import sys

MOST_TEXT = 600
ESCAPED = "compress.escaped"
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and newline, line separators, direction overrides, and lone surrogates."""


def printable(text: str) -> str:
    """Escape control characters; tabs and newlines stay."""
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def one_line(text: str, most: int = MOST_TEXT) -> str:
    """Return the text on one line of at most `most` characters, without control characters."""
    words = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return words if len(words) <= most else words[: most - 3] + "..."


def escape_unencodable() -> None:
    """Escape characters that the encoding of standard output or error lacks, so that none ends a command."""
    codecs.register_error(ESCAPED, _escape)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=ESCAPED)


def _escape(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end
