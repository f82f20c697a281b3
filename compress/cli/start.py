"""`compress doctor`: what this machine has, before anything is run."""

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from compress.cli.options import console, print_result, told
from compress.config.options import Json

if TYPE_CHECKING:
    from compress.records.diagnosis import Check, Diagnosis

UNSOUND = 1
"""Exit code of a machine on which the base install lacks something."""
INDENT = 24


def doctor(as_json: Json = False) -> None:
    """Say what this machine has for each command, and the one command that brings what is missing.

    Exit code 1: something that the base install needs is missing or broken. What only some commands need is no fault.

    Example: compress doctor --json
    """
    with told():
        from compress.commands.doctor import doctor as run

        shown = console(as_json)

        def say(check: "Check") -> None:
            if check.group != "packages" or check.state != "ok":
                for line in _lines(check, shown.width):
                    shown.print(line, markup=False, highlight=False, soft_wrap=True)

        found = run(say=say)
        if as_json:
            print_result(found.to_json())
        else:
            for line in _verdict(found):
                shown.print(line, markup=False, highlight=False, soft_wrap=True)
    if not found.ok:
        raise typer.Exit(UNSOUND)


def _lines(check: "Check", width: int) -> Iterator[str]:
    """Yield what was found; of what is missing, also what for, and the command that brings it, whole."""
    missing = check.state != "ok"
    head = f"{check.state:9}{check.name:15}"
    for words in (check.found, f"for {check.needed_for}" if missing and check.needed_for else ""):
        if words:
            wide = max(width, 2 * INDENT)
            yield from textwrap.wrap(words, wide, initial_indent=head, subsequent_indent=" " * INDENT)
            head = " " * INDENT
    if missing and check.remedy:
        yield " " * INDENT + check.remedy


def _verdict(found: "Diagnosis") -> Iterator[str]:
    packages = [each for each in found.checks if each.group == "packages"]
    good = [each for each in packages if each.state == "ok"]
    state = "ok" if len(good) == len(packages) else "broken"
    yield f"{state:9}{'packages':15}{len(good)} of {len(packages)} of the base install"
    lacking = [each.name for each in found.checks if each.state != "ok" and not each.required]
    yield ""
    if found.faults:
        yield f"The base install lacks: {', '.join(each.name for each in found.faults)}."
    else:
        yield "The base install has all it needs." + (f" Not here: {', '.join(lacking)}." if lacking else "")
