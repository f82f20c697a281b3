"""What is kept and shown of commands and addresses that hold passwords."""

from pathlib import Path
from urllib.parse import quote

import pytest

import compress
from compress.provenance import command_line, redact, redact_in


def test_command_lines_hide_passwords(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = ["compress", "search", "--storage", "postgresql://me:secret@host/db", "--data", "a b", "--out=runs/x"]
    monkeypatch.setattr("sys.argv", typed)
    assert command_line() == "compress search --storage 'postgresql://me:***@host/db' --data 'a b' --out=runs/x"


PASSWORDS = [
    "word",
    "w@rd",
    "@word@",
    "wo:rd",
    "wo/rd",
    "wo?rd=1",
    "wo#rd",
    "wo%40rd",
    "wo rd",
    "wo\nrd",
    "a=b&wo;rd",
    "://",
]


@pytest.mark.parametrize("password", PASSWORDS)
def test_no_part_of_a_password_is_shown(password: str) -> None:
    for address in (
        f"postgresql://me:{password}@host:5432/db",
        f"--storage=postgresql+psycopg://me:{quote(password, safe='')}@host:5432/db?sslmode=require",
    ):
        output = redact(address)
        assert "me:***@host:5432/db" in output or "?" in password
        assert all(part not in output for part in ("word", "w@", "rd", "%40", "a=b"))


@pytest.mark.parametrize("password", PASSWORDS)
@pytest.mark.parametrize("name", ["password", "passwd", "PASSWORD", "sslpassword", "options", "token"])
def test_a_password_in_the_query_is_not_shown(password: str, name: str) -> None:
    output = redact(f"postgresql://host/db?user=me&{name}={password}")
    assert all(part not in output.replace("password", "") for part in ("word", "rd", "a=b"))


def test_other_text_is_unchanged() -> None:
    for text in ("postgresql://host:5432/db", "grpc://host:13000", "runs/x", "sqlite:///study.db", "me@host"):
        assert redact(text) == text
    assert redact("https://token@host/x") == "https://***@host/x"


def test_fragments_of_passwords_are_hidden_in_messages() -> None:
    url = "postgresql://me:p@ss@host/db?options=-c%20x%3Dhush&sslmode=odd"
    expected = redact_in("could not resolve 'ss@host' for password of me: bad options -c x=hush, sslmode odd", url)
    assert expected == "could not resolve '***@host' for password of me: bad options ***, sslmode ***"


def test_only_provenance_reads_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads sys.argv elsewhere keeps what was typed."""
    readers = [path for path in Path(compress.__file__).parent.rglob("*.py") if "sys.argv" in path.read_text()]
    assert sorted(path.name for path in readers) == ["agent.py", "htp.py", "probe.py", "provenance.py", "runner.py"]
