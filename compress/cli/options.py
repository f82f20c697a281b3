"""Options that commands share, how a command talks, and what becomes of an error."""

import errno
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from compress.config.options import PANELS
from compress.terminal import printable

if TYPE_CHECKING:
    from compress.console import Screen

USER_ERROR, INTERRUPTED = 2, 130
UNCERTIFIED = 3
"""Exit code of a file that was made, and loses more than it may."""
FAILED, UNDECIDED = 1, 3
"""Exit codes of a gate."""


class Command(TyperCommand):
    """A command whose help lists its options in groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and the options, group by group."""
        _write_groups(self, ctx, formatter)


class CommandGroup(TyperGroup):
    """A command with others below it, whose help lists its options in groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options, group by group, then the commands."""
        _write_groups(self, ctx, formatter)
        self.format_commands(ctx, formatter)


def _write_groups(command: Any, ctx: Any, formatter: Any) -> None:
    groups: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Arguments", *PANELS, "Other options")}
    for parameter in command.get_params(ctx):
        usual = "Arguments" if parameter.param_type_name == "argument" else "Other options"
        if (record := parameter.get_help_record(ctx)) is not None:
            groups[getattr(parameter, "rich_help_panel", None) or usual].append(record)
    for title, records in groups.items():
        if records:
            with formatter.section(title):
                formatter.write_dl(records)


def grouped(*, without: Collection[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the fields of its groups of options as options of its own.

    A parameter whose type is a dataclass is such a group: its fields take its place on the command line, but those in
    `without`, which keep their defaults.
    """

    def expand(command: Callable[..., None]) -> Callable[..., None]:
        groups, flat = dict[str, Callable[..., Any]](), list[Parameter]()
        for parameter in signature(command, eval_str=True).parameters.values():
            group = parameter.annotation
            if not is_dataclass(group):
                flat.append(parameter)
                continue
            assert isinstance(group, type)
            groups[parameter.name] = group
            flat += [each for each in signature(group, eval_str=True).parameters.values() if each.name not in without]

        @wraps(command)
        def run(**given: Any) -> None:
            for name, group in groups.items():
                own = {each: given.pop(each) for each in signature(group).parameters if each in given}
                given[name] = group(**own)
            command(**given)

        # inspect and Typer read it, typeshed does not know it
        run.__signature__ = Signature([each.replace(kind=Parameter.KEYWORD_ONLY) for each in flat])  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in flat}
        return run

    return expand


def console(as_json: bool = False) -> "Screen":
    """Open the console for progress and tables: standard error if standard output is for JSON; silent but in rank 0."""
    from compress.console import Screen

    return Screen(stderr=as_json, quiet=os.environ.get("RANK", "0") != "0")


def print_result(text: str) -> None:
    """Print what a command found to standard output, the same on every terminal."""
    print(printable(text.removesuffix("\n")))


def print_json(command: str, found: "str | Path | Mapping[str, Any]") -> None:
    """Print what a command found as JSON, after the name and version of its form (docs/json.md).

    found  as values, or as the text or the file of a record
    """
    import json

    text = found.read_text(encoding="utf-8") if isinstance(found, Path) else found
    values = json.loads(text) if isinstance(text, str) else text
    print_result(json.dumps({"schema": schema(command), **values}, ensure_ascii=False, indent=1))


def schema(command: str) -> str:
    """Name the form of a command's JSON; the number changes when something in it is taken away or means another."""
    return f"compress.{command}/1"


@contextmanager
def told(hint: str = "") -> Iterator[None]:
    """Errors of the user's become a message and exit code 2, Ctrl-C 130; a traceback is a bug of ours."""
    from compress.errors import CompressError

    try:
        yield
    except CompressError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        raise typer.Exit(USER_ERROR) from None
    except OSError as error:
        if error.errno in (None, errno.EPIPE):  # a library's own, and a reader that has read enough
            raise
        name = error.filename2 or error.filename  # of a copy or a rename, the place that could not be written
        where = f"{name}: " if name else ""
        words = f"error: {where}{error.strerror}. Nothing half-written is left. {hint}".rstrip()
        print(printable(words), file=sys.stderr)
        raise typer.Exit(USER_ERROR) from None
    except KeyboardInterrupt:
        print(printable(f"\ninterrupted. {hint}"), file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
