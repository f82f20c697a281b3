"""Addresses that hold passwords: what may be shown and kept of them."""

import re
from pathlib import Path


def hidden(where: Path | str) -> str:
    """The address without its password, in whichever of its places one stands; any other text as it is."""
    without = re.sub(r"(://[^:/?]*):.*@", r"\1:***@", str(where))
    return re.sub(r"(password=)[^&]*", r"\1***", without)
