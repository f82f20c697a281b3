"""The command line as whoever types it sees it: exit code, standard output, standard error."""

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from unittest import mock

from transformers.utils.logging import disable_progress_bar
from typer.main import get_command
from typer.testing import CliRunner

from compress.cli import app, settle_libraries
from tests import tiny


@dataclass(frozen=True)
class Told:
    """What a command told. Standard output and standard error apart."""

    code: int
    out: str
    err: str


def run(*words: str, stdin: str | bytes = "") -> Told:
    """`compress *words` in this process; what would be a traceback is raised."""
    settle_libraries()
    disable_progress_bar()  # transformers reads the variable for it when imported, here long ago
    with mock.patch.object(sys, "argv", ["compress", *words]):
        result = CliRunner().invoke(app, words, input=stdin, prog_name="compress", catch_exceptions=False)
    return Told(result.exit_code, result.stdout, result.stderr)


def refused(told: Told, out: Path, *said: str) -> bool:
    """One paragraph on standard error, exit code 2, and nothing in the directory that is not whole."""
    assert told.code == 2
    assert told.err.startswith("error: ")
    assert "\n\n" not in told.err
    assert [part for part in said if part not in told.err] == [], told.err
    assert partial(out) == []
    assert not (out / "bundle").exists()
    return True


def pasted(words: str) -> None:
    """What is shown is a command of ours whose every word is understood."""
    first, *rest = shlex.split(words)
    assert first == "compress"
    assert "..." not in words
    group = get_command(app)
    name = rest.pop(0)
    each = group.commands[name]  # type: ignore[attr-defined]
    while rest and rest[0] in getattr(each, "commands", {}):
        each = each.commands[rest.pop(0)]
    each.make_context(name, rest, resilient_parsing=False)


def partial(out: Path) -> list[Path]:
    """What is under a directory and was never finished."""
    return [path for path in out.rglob("*") if "partial" in path.name or "retired" in path.name]


class _BeginsError(Exception):
    """Training would begin now."""


def accepted(*words: str) -> bool:
    """Whether everything given is good: `compress *words` comes to the first training."""

    def begin(*_: object) -> NoReturn:
        raise _BeginsError

    with mock.patch("compress.training.finetune.with_head", begin):
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
        """The words of `compress distill` of these into `out`; `changed` options instead of ours."""
        options: Mapping[str, str] = {
            "teacher": self.teacher, "recipe": self.recipe, "data": self.data, "out": str(out), **changed,
        }  # fmt: skip
        return ["distill", *(word for name, value in options.items() for word in (f"--{name}", value)), *more]
