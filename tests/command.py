"""Run the command line in this process: exit code, standard output, standard error."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import click
from transformers.utils.logging import disable_progress_bar
from typer.main import get_command
from typer.testing import CliRunner

from compress.cli import app, configure_libraries
from tests import tiny


@dataclass(frozen=True)
class Result:
    """The result of a command."""

    code: int
    out: str
    err: str


def run(*words: str, stdin: str | bytes = "") -> Result:
    """Run `compress *words` in this process; a bug raises."""
    configure_libraries()
    disable_progress_bar()  # transformers reads the variable for it when imported, here long ago
    with mock.patch.object(sys, "argv", ["compress", *words]):
        result = CliRunner().invoke(app, words, input=stdin, prog_name="compress", catch_exceptions=False)
    return Result(result.exit_code, result.stdout, result.stderr)


def keep_last(words: Sequence[str]) -> list[str]:
    """Drop an option with its value where it comes again, as commands refuse it, but for those of lists."""
    kept, rest = list[str](), list(words)
    while rest:
        word = rest.pop(0)
        value = [rest.pop(0)] if word.startswith("--") and rest and not rest[0].startswith("--") else []
        if not word.startswith("--") or word in ("--set", "--text") or word not in rest:
            kept += [word, *value]
    return kept


def refused(result: Result, out: Path, *expected: str) -> bool:
    """Check that a command was refused: exit code 2, one paragraph on standard error, nothing half-written in `out`."""
    assert result.code == 2
    assert result.err.startswith("error: ")
    assert "\n\n" not in result.err
    assert [part for part in expected if part not in result.err] == [], result.err
    assert partial(out) == []
    assert not (out / "bundle").exists()
    return True


def check_parses(words: str) -> None:
    """Check that a command line of ours parses, without running it."""
    first, name, *rest = shlex.split(words, comments=True)
    assert first == "compress"
    assert "..." not in rest
    each = _group().commands[name]
    parent = None
    while rest and rest[0] in getattr(each, "commands", {}):
        parent, name = click.Context(each, info_name=name, parent=parent), rest.pop(0)
        each = each.commands[name]
    each.make_context(name, rest, parent=parent)


@cache
def _group() -> Any:
    return get_command(app)


def partial(out: Path) -> list[Path]:
    """List unfinished files and folders under a directory."""
    return [path for path in out.rglob("*") if "partial" in path.name or "retired" in path.name]


class _BeginsError(Exception):
    """Raised where training would begin."""


def accepted(*words: str) -> bool:
    """Return True if `compress *words` reaches the first training."""

    def begin(*_: object) -> NoReturn:
        raise _BeginsError

    with mock.patch("compress.teachers.checkpoint.with_head", begin):
        try:
            run(*words)
        except _BeginsError:
            return True
        return False


@dataclass(frozen=True)
class Shelf:
    """A tiny teacher, data and recipe on disk."""

    teacher: str
    data: str
    recipe: str

    @staticmethod
    def fill(folder: Path) -> "Shelf":
        teacher = tiny.checkpoint(folder / "teacher")
        return Shelf(teacher, tiny.reviews(folder / "reviews"), tiny.recipe(folder / "recipes"))

    def distill(self, out: Path, *more: str, **changed: str) -> list[str]:
        """Return the words of `compress distill` with these into `out`; `changed` replaces options."""
        options: Mapping[str, str] = {
            "teacher": self.teacher, "recipe": self.recipe, "data": self.data, "out": str(out), **changed,
        }  # fmt: skip
        return ["distill", *(word for name, value in options.items() for word in (f"--{name}", value)), *more]
