"""A link as a QR code in the terminal, for a phone's camera."""

import importlib
from io import StringIO

from compress.provenance import install_command


def code(link: str) -> str:
    """Draw the code in half-block characters; return a line that says what to install where `segno` is missing."""
    try:
        segno = importlib.import_module("segno")
    except ModuleNotFoundError:
        return f"For a QR code of this link: {install_command('lan')}"
    drawn = StringIO()
    segno.make(link, error="m").terminal(drawn, compact=True)
    return drawn.getvalue()
