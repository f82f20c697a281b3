"""Say which versions made a result, and how to install a package that is missing."""

import re
import shlex
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

if TYPE_CHECKING:
    from packaging.requirements import Requirement

DISTRIBUTION = "compress-kit"
"""The name of this package on package indexes, where `compress` belongs to somebody else."""


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the version of each of `packages` that is installed; `compress` is this one."""
    from compress import __version__

    found = {}
    for name in packages:
        try:
            found[name] = __version__ if name == "compress" else version(name)
        except PackageNotFoundError:
            continue
    return found


def install_command(extra: str) -> str:
    """Return the pip command that installs what the extra `extra` of our own metadata lists."""
    return shlex.join(["pip", "install", *(str(each).partition(";")[0].strip() for each in _list_requirements(extra))])


def lacks(extra: str) -> str:
    """Say which package of an extra is not installed, or not in a version that it takes; '' where all are."""
    for each in _list_requirements(extra):
        try:
            found = version(each.name)
        except PackageNotFoundError:
            return f"{each.name} is not installed"
        if not each.specifier.contains(found, prereleases=True):
            return f"{each.name} {found} is installed, {each.specifier} is needed"
    return ""


def _list_requirements(extra: str) -> "list[Requirement]":
    from packaging.requirements import Requirement

    listed = [Requirement(line) for line in requires(DISTRIBUTION) or ()]
    wanted = [each for each in listed if f'extra == "{extra}"' in str(each.marker)]
    assert wanted, f"pyproject.toml has no extra {extra}"
    return wanted


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
    """Return the command to type to run this again, without passwords: it is kept, and ships with bundles."""
    name = Path(sys.argv[0]).name
    program = ["python", "-m", "compress"] if name == "__main__.py" else [name]
    return shlex.join([*program, *map(redact, sys.argv[1:])])


def option_of(command: str, option: str) -> str | None:
    """Return the value of an option in a command line that was kept; None where it was not given."""
    try:
        words = shlex.split(command)
    except ValueError:  # of an odd quotation mark: it was not written by `command_line`
        return None
    for word, after in zip(words, [*words, ""][1:], strict=True):
        if word == option and after:
            return after
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return None


def resume_command(out: Path | str, command: str) -> str:
    """Return the command that continues the run in `out`, by the one that began it; '' where that is none of ours."""
    words = shlex.split(command)
    if words[:1] != ["compress"] and words[1:3] != ["-m", "compress"]:
        return ""
    given = [] if option_of(command, "--out") else ["--out", str(out)]
    return shlex.join([*words, *given, *([] if "--resume" in words else ["--resume"])])
