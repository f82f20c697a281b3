"""What tests of endpoints share."""

from collections.abc import Iterator

import pytest

from compress.prompting import http_model
from tests.prompting.endpoint_server import KEY, Start, serving


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr(http_model, "FIRST_WAIT", 0.01)
    monkeypatch.setenv("TEST_KEY", KEY)
    with serving() as start:
        yield start


@pytest.fixture(autouse=True)
def any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a language model that a test makes have any name, as if the hub had it."""
    monkeypatch.setattr("compress.models.checkpoints.check", lambda *_, **__: None)
