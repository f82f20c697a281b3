"""What tests of measured shapes share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the shapes that were exported already."""
    return tmp_path_factory.mktemp("exports")


@pytest.fixture
def exported_once(exports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Export every shape once; each precision is converted from the same file."""
    from tests.nas.shelved import export_once

    export_once(monkeypatch, exports)
