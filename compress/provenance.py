"""Record what made a result: versions, date and command, without passwords; and say how
to install what is missing."""

import re
import shlex
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

if TYPE_CHECKING:
    from packaging.requirements import Requirement

DISTRIBUTION = "compress-kit"
"""The name of this package on package indexes, where `compress` is another project."""


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the version of each installed package of `packages`; `compress` means this
    package."""
    from compress import __version__

    found = {}
    for name in packages:
        try:
            found[name] = __version__ if name == "compress" else version(name)
        except PackageNotFoundError:
            continue
    return found


def list_requirements(extra: str = "") -> "list[Requirement]":
    """List the requirements of the base install, or of one of our extras.

    Raises PackageNotFoundError if this package runs without being installed.
    """
    from packaging.requirements import Requirement

    declared = [Requirement(line) for line in requires(DISTRIBUTION) or ()]
    return [
        each
        for each in declared
        if str(each.marker or "").partition("extra ==")[2].strip(" \"'") == extra
    ]


def find_problem(requirement: "Requirement") -> tuple[str, str]:
    """Return the installed version of a package ('' if absent), and why it is not
    accepted ('' if it is)."""
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        return "", "not installed"
    accepted = requirement.specifier.contains(installed, prereleases=True)
    return (
        installed,
        ""
        if accepted
        else f"{installed} is installed; {requirement.specifier} is needed",
    )


def find_missing(extra: str) -> str:
    """Say which requirement of an extra is missing or has the wrong version; '' if all
    are met."""
    problems = {each.name: find_problem(each)[1] for each in list_requirements(extra)}
    return next(
        (f"{name}: {problem}" for name, problem in problems.items() if problem), ""
    )


def install_command(*extras: str) -> str:
    """Return the pip command that installs the requirements of some of our extras."""
    wanted = [
        str(each).partition(";")[0].strip()
        for extra in extras
        for each in list_requirements(extra)
    ]
    assert wanted, f"pyproject.toml has no extra {extras}"
    return shlex.join(["pip", "install", *wanted])


def shell_command(*words: str | Path) -> str:
    """Return a `compress` command with these words, quoted for a shell."""
    return shlex.join(["compress", *map(str, words)])


def predict_command(bundle: Path, *, pair: bool) -> str:
    """Return a `compress predict` command for a bundle, with placeholders for the
    texts. pair: its rows have two texts."""
    return shell_command(
        "predict", bundle, "a text", *(["--pair", "its second text"] if pair else [])
    )


REDACTED = "***"


def redact(where: Path | str) -> str:
    """Hide the password of an address, and everything after its `?`; other text is
    returned unchanged.

    A password may hold any character unescaped, so the last @ ends it. If a `?` comes
    before that @, what follows the @ may still be a part of the password, and
    everything is hidden.
    """
    head, scheme, rest = str(where).partition("://")
    if not scheme:
        return re.sub(r"(?is)(pass(?:word|wd)?=).*", rf"\1{REDACTED}", head)
    if "@" in rest.partition("?")[2]:
        return head + scheme + REDACTED
    rest = re.sub(r"(?s)^([^:/?#@]*:)?.*@", rf"\1{REDACTED}@", rest)
    return head + scheme + re.sub(r"(?s)([?&#]).*", rf"\1{REDACTED}", rest)


def redact_in(words: str, where: str) -> str:
    """Hide in a message what `redact` hides of the address, including fragments that a
    database driver quotes."""
    found = re.match(r"(?s)(?:(?:[^:/?#@]*:)?(.*)@)?(.*)", where.partition("://")[2])
    password, rest = found.groups("") if found else ("", "")
    values = [
        password,
        *(each.partition("=")[2] or each for each in re.split("[?&#]", rest)[1:]),
    ]
    values += [rest] if "?" in password else []
    whole = {form for value in values for form in (value, unquote(value)) if form}
    for secret in sorted(whole, key=len, reverse=True):
        words = words.replace(secret, REDACTED)
    for part in {
        part for secret in whole for part in re.split(r"[@:/?#&=;,\s]+", secret) if part
    }:
        words = re.sub(rf"(?<!\w){re.escape(part)}(?!\w)", REDACTED, words)
    return words


def timestamp() -> str:
    """Return the time in UTC, to the second, in ISO format."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def command_line() -> str:
    """Return the command line of this process without passwords: it is recorded, and
    ships with bundles."""
    name = Path(sys.argv[0]).name
    program = ["python", "-m", "compress"] if name == "__main__.py" else [name]
    return shlex.join([*program, *map(redact, sys.argv[1:])])


def option_of(command: str, option: str) -> str | None:
    """Return the value of an option in a recorded command line, or None if it was not
    given."""
    try:
        words = shlex.split(command)
    except ValueError:  # an unbalanced quotation mark: not written by `command_line`
        return None
    for word, after in zip(words, [*words, ""][1:], strict=True):
        if word == option and after:
            return after
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return None


def resume_command(out: Path | str, command: str) -> str:
    """Return the command that continues the run in `out`, given the one that began it;
    '' if that is not a `compress` command."""
    words = shlex.split(command)
    if words[:1] != ["compress"] and words[1:3] != ["-m", "compress"]:
        return ""
    given = [] if option_of(command, "--out") else ["--out", str(out)]
    return shlex.join([*words, *given, *([] if "--resume" in words else ["--resume"])])
