"""Passwords: what may be shown and kept of addresses, of messages about them, and of the command that was typed."""

import re
import shlex
import sys
from pathlib import Path
from urllib.parse import unquote

HIDDEN = "***"


def redact(where: Path | str) -> str:
    """Hide the password of an address and all that follows its `?`; any other text stays as it is.

    A password may hold any character unescaped, so the last @ ends it, wherever a host might seem to begin before.
    Where a `?` comes first, what follows the @ may be the end of a password too, and all is hidden.
    """
    head, scheme, rest = str(where).partition("://")
    if not scheme:
        return re.sub(r"(?is)(pass(?:word|wd)?=).*", rf"\1{HIDDEN}", head)
    if "@" in rest.partition("?")[2]:
        return head + scheme + HIDDEN
    rest = re.sub(r"(?s)^([^:/?#@]*:)?.*@", rf"\1{HIDDEN}@", rest)
    return head + scheme + re.sub(r"(?s)([?&#]).*", rf"\1{HIDDEN}", rest)


def redact_in(words: str, where: str) -> str:
    """Hide in a message what `redact` hides of the address it is about, also the parts that a driver cut it to."""
    found = re.match(r"(?s)(?:(?:[^:/?#@]*:)?(.*)@)?(.*)", where.partition("://")[2])
    password, rest = found.groups("") if found else ("", "")
    values = [password, *(each.partition("=")[2] or each for each in re.split("[?&#]", rest)[1:])]
    values += [rest] if "?" in password else []
    whole = {form for value in values for form in (value, unquote(value)) if form}
    for secret in sorted(whole, key=len, reverse=True):
        words = words.replace(secret, HIDDEN)
    for part in {part for secret in whole for part in re.split(r"[@:/?#&=;,\s]+", secret) if part}:
        words = re.sub(rf"(?<!\w){re.escape(part)}(?!\w)", HIDDEN, words)
    return words


def command_line() -> str:
    """The command to type to run this again, without passwords: it is kept, and ships with bundles."""
    name = Path(sys.argv[0]).name
    program = ["python", "-m", "compress"] if name == "__main__.py" else [name]
    return shlex.join([*program, *map(redact, sys.argv[1:])])
