"""Folders of data written in the test."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

Folder = Callable[[Mapping[str, str | bytes]], str]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Write a folder of files; returns its path as a source."""

    def write(files: Mapping[str, str | bytes]) -> str:
        path = tmp_path / "set"
        path.mkdir(exist_ok=True)
        for name, content in files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write
