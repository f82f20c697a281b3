"""What identifies files and settings: SHA-256 over their bytes."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def of_files(paths: Iterable[Path]) -> str:
    """Hex digest over the names and contents of files, in the order of their names."""
    total = hashlib.sha256()
    for path in sorted(paths, key=lambda each: each.name):
        total.update(path.name.encode())
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def of_value(value: Any) -> str:
    """Hex digest of plain data: dictionaries, lists, strings, numbers."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
