"""Text that is safe to show: names, labels and answers come from elsewhere, and a terminal obeys control characters."""

import re

MOST_TEXT = 600
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters apart from tab and newline, line separators, changes of direction, and halves of characters."""


def printable(text: str) -> str:
    r"""Escape what a terminal would obey or cannot show, as in \x1b; tabs and newlines stay."""
    return _OBEYED.sub(lambda found: ascii(found[0])[1:-1], text)


def one_line(text: str, most: int = MOST_TEXT) -> str:
    """Put a text of unknown origin on one line, without what a terminal would obey, of at most `most` characters."""
    words = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return words if len(words) <= most else words[: most - 3] + "..."
