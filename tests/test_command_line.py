"""What is kept of the command that was typed."""

import pytest

from compress.ship import command_line


def test_passwords_of_addresses_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = ["compress", "search", "--storage", "postgresql://me:secret@host/db", "--data", "a b", "--out=runs/x"]
    monkeypatch.setattr("sys.argv", typed)
    assert command_line() == "compress search --storage 'postgresql://me:***@host/db' --data 'a b' --out=runs/x"
