"""Options that commands share, how a command talks, and what becomes of an error."""

import errno
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from compress import __version__
from compress.config.options import PANELS
from compress.progress import SCREEN
from compress.terminal import printable

if TYPE_CHECKING:
    from compress.console import Screen
    from compress.records.forecast import Forecast

USER_ERROR, INTERRUPTED = 2, 130
UNCERTIFIED = 3
"""Exit code of a file that was made, and loses more than it may."""
FAILED, UNDECIDED = 1, 3
"""Exit codes of a gate."""


def _unchecked(found: Any, ctx: Any) -> Any:
    """Let completion take what is typed as it is: Typer would import pydantic to check it, which takes 0.1 s."""
    if ctx.resilient_parsing:
        for parameter in found:
            parameter.process_value = lambda _, value: value
    return found


class Command(TyperCommand):
    """A command whose help lists its options in groups."""

    def get_params(self, ctx: Any) -> Any:
        """List the parameters."""
        return _unchecked(super().get_params(ctx), ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and the options, group by group."""
        _write_groups(self, ctx, formatter)


class CommandGroup(TyperGroup):
    """A command with others below it, whose help lists its options in groups."""

    def get_params(self, ctx: Any) -> Any:
        """List the parameters."""
        return _unchecked(super().get_params(ctx), ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options, group by group, then the commands."""
        _write_groups(self, ctx, formatter)
        self.format_commands(ctx, formatter)


def _write_groups(command: Any, ctx: Any, formatter: Any) -> None:
    groups: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Arguments", *PANELS, "Other options")}
    for parameter in command.get_params(ctx):
        usual = "Arguments" if parameter.param_type_name == "argument" else "Other options"
        if (record := parameter.get_help_record(ctx)) is not None:
            groups[getattr(parameter, "rich_help_panel", None) or usual].append(_shorten(parameter, *record))
    formatter.write_paragraph()
    formatter.write_text("Defaults and ranges stand in brackets.")
    for title, records in groups.items():
        if records:
            with formatter.section(title):
                formatter.write_dl(records)


NAME_WIDTH = 24
"""Characters of an option and its values; more values than that are told in its help."""


def _shorten(parameter: Any, name: str, text: str) -> tuple[str, str]:
    """Write an option so that most need one line: `<int>` for any range, which follows its default: `[1; >=1]`."""
    name = re.sub(r"<(?:list\[)?(\w+)(?:\]| range)>", r"<\1>", name)
    text = (
        re.sub(r"(\S+)<=x<=(\S+)\]", r"\1 to \2]", text)
        .replace("x>=", ">=")
        .replace("  [default: ", " [")
        .replace("  [", " [")
    )
    values = re.search(r"<\w+(\|\w+)+>", name)
    if len(name) > NAME_WIDTH and values:
        name = name.replace(values[0], f"<{parameter.opts[0].lstrip('-')}>")
        said, bracket, rest = text.partition(" [")
        text = f"{said.removesuffix('.')}: {values[0][1:-1].replace('|', ', ')}.{bracket}{rest}"
    return name, text


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


Level = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True)
class Talk:
    """Describe how a command talks. last: prints the last line that was kept back; screens: one for each output."""

    level: Level = "info"
    last: list[Callable[[], None]] = field(default_factory=list)
    screens: "dict[bool, Screen]" = field(default_factory=dict)


_TALK: ContextVar[Talk | None] = ContextVar("talk", default=None)


def print_version(asked: bool) -> None:
    """Print the version and end, where that is asked."""
    if asked:
        print(f"compress {__version__}")
        raise typer.Exit


Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors and the last line alone.")]
LogLevel = Annotated[Level, typer.Option(metavar="LEVEL", help="debug, info, warning, or error, as --quiet.")]
Version = Annotated[
    bool, typer.Option("--version", "-V", callback=print_version, is_eager=True, help="Print the version.")
]


def talking(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that say how much it prints."""

    @wraps(command)
    def run(*, quiet: bool, log_level: Level, version: bool, **given: Any) -> None:
        del version  # which has ended the command
        talk = Talk("error" if quiet else log_level)
        if talk.level == "debug":
            import logging

            os.environ["TRANSFORMERS_VERBOSITY"] = "debug"
            logging.basicConfig(level=logging.DEBUG)
        token = _TALK.set(talk)
        SCREEN.set(lambda: console(given.get("as_json", False)))
        try:
            command(**given)
        except typer.Exit as end:
            if end.exit_code in (USER_ERROR, INTERRUPTED):
                talk.last.clear()
            raise
        except BaseException:
            talk.last.clear()
            raise
        finally:
            _TALK.reset(token)
            SCREEN.set(None)
            for say in talk.last:
                say()

    own = {"quiet": (Quiet, False), "log_level": (LogLevel, "info"), "version": (Version, False)}
    usual = signature(command, eval_str=True).parameters.values()
    shared = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in own.items()
    ]
    run.__signature__ = Signature([*(each.replace(kind=Parameter.KEYWORD_ONLY) for each in usual), *shared])  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in (*usual, *shared)}
    return run


def console(as_json: bool = False, *, answer: bool = False) -> "Screen":
    """Open the console: standard error if standard output is for JSON; silent but in rank 0.

    answer  whether it is for what was asked, which is printed at any level, instead of progress and notes
    """
    from compress.console import Screen

    talk = _TALK.get() or Talk()
    kept = None if answer or talk.level in ("debug", "info") else talk.last
    screen = Screen(stderr=as_json, quiet=not is_first(), last=kept, warnings=talk.level != "error")
    return screen if answer else talk.screens.setdefault(as_json, screen)  # one, which knows of its progress


def is_first() -> bool:
    """Tell whether this is the only process of a command, or the one that talks."""
    return os.environ.get("RANK", "0") == "0"


def run_folder(out: Path | None, recipe: str, data: str | None, *, resume: bool) -> Path:
    """Return the folder of a run, chosen by the names of its recipe and data where it is given none."""
    if out is not None:
        return out
    with told():
        from compress.commands import preflight

        return preflight.choose_out(recipe, data or "text", resume=resume)


def continuation(out: Path) -> str:
    """Say how an interrupted run goes on: by the command that was typed."""
    from compress.provenance import command_line, resume_command

    return f"Continue with: {resume_command(out, command_line())}"


def print_result(text: str) -> None:
    """Print what a command found to standard output, the same on every terminal."""
    print(printable(text.removesuffix("\n")))


def print_forecast(forecast: "Callable[..., Forecast]", as_json: bool, **given: Any) -> None:
    """Print what a command of these arguments would take."""
    from compress.reporting.terminal import forecast_lines

    found = forecast(**given, console=console(as_json))
    if as_json:
        print_json("plan", found.to_json())
    else:
        for line in forecast_lines(found):
            console(answer=True).print(line, highlight=False, markup=False, soft_wrap=True)


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
        if (_TALK.get() or Talk()).level == "debug":
            import traceback

            traceback.print_exc()
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
