"""A link as a QR code in the terminal, for a phone's camera."""

import importlib
from io import StringIO


def code(link: str) -> str:
    """The code in half-block characters; a line that names the extra where `segno` is not installed."""
    try:
        segno = importlib.import_module("segno")
    except ModuleNotFoundError:
        return "For a QR code of this link: pip install 'compress[lan]'"
    drawn = StringIO()
    segno.make(link, error="m").terminal(drawn, compact=True)
    return drawn.getvalue()
