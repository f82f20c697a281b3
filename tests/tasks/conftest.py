"""Find the toy kind of task by its name, as the others."""

from pathlib import Path

import pytest

import compress.tasks

TOYS = str(Path(__file__).parent / "toy")


@pytest.fixture(scope="package", autouse=True)
def toys() -> object:
    compress.tasks.__path__.append(TOYS)
    yield
    compress.tasks.__path__.remove(TOYS)
