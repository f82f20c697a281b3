"""Define what commands share: options, help, verbosity, and the reporting of errors."""

import errno
import os
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO, get_args

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import ArgumentInfo

from compress import __version__
from compress.cli.interrupts import INTERRUPTED, TERMINATED, exit_code
from compress.config import PANELS
from compress.machine import process_rank
from compress.progress import SCREEN, Say
from compress.terminal import printable, separate_results

if TYPE_CHECKING:
    from compress.console import Screen
    from compress.records.forecast import Forecast

USER_ERROR = 2
UNCERTIFIED = 3
"""Exit code if a file was made, but its score drops by more than allowed."""
FAILED = 1
UNDECIDED = 3
"""Exit codes of `compress gate`."""
HELP = ["-h", "--help"]
"""Options that print a command's help."""


CommandFunction = Callable[..., None]


class _SharedCommand:
    """Mixin for all commands: help lists the options in groups, and an option that is
    given twice is refused."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parse the arguments; help and completion come first.

        A missing option is named with its help. Click would silently take the last
        value of an option given twice, the current folder for an empty path, and a
        file's name for the folder `name/`.
        """
        words = list(args)
        try:
            rest = super().parse_args(ctx, args)  # type: ignore[misc]  # of the Click class that it is mixed into
        except typer.BadParameter as error:
            # it is missing, not wrong
            if not error.message and (about := getattr(error.param, "help", None)):
                error.message = f"Expected: {about}"
            raise
        if not ctx.resilient_parsing:
            values, _, given = self.make_parser(ctx).parse_args(args=words)  # type: ignore[attr-defined]
            for option, count in Counter(given).items():
                if count > 1 and not (
                    option.multiple or option.is_flag or option.count
                ):
                    ctx.fail(
                        f"{option.opts[0]} was given {count} times; expected once."
                    )
                _check_path(ctx, option, values.get(option.name))
        return rest

    def get_help_option_names(self, ctx: Any) -> list[str]:
        """Return the names of the help option, also for a command that is used without
        the root command."""
        return HELP

    def get_params(self, ctx: Any) -> Any:
        """List the parameters; for completion, without checks: Typer would import
        pydantic, which takes 0.1 s."""
        parameters = super().get_params(ctx)  # type: ignore[misc]  # of the Click class that it is mixed into
        if ctx.resilient_parsing:
            for parameter in parameters:
                parameter.process_value = lambda _, value: value
        return parameters

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options, group by group, then the subcommands of a group
        of commands."""
        groups: dict[str, list[tuple[str, str]]] = {
            title: [] for title in ("Arguments", *PANELS, "Other options")
        }
        for parameter in self.get_params(ctx):
            default = (
                "Arguments"
                if parameter.param_type_name == "argument"
                else "Other options"
            )
            if (record := parameter.get_help_record(ctx)) is not None:
                groups[getattr(parameter, "rich_help_panel", None) or default].append(
                    _shorten(parameter, *record)
                )
        formatter.write_paragraph()
        formatter.write_text("Defaults and ranges are in brackets.")
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
        if isinstance(self, TyperGroup):
            self.format_commands(ctx, formatter)


def _check_path(ctx: Any, option: Any, text: Any) -> None:
    """Refuse an empty path, and a folder where a file is expected."""
    callback = ctx.command.callback
    parameter = signature(callback).parameters.get(option.name) if callback else None
    kind, *infos = get_args(parameter.annotation) if parameter else (None,)
    if Path not in (kind, *get_args(kind)) or not isinstance(text, str):
        return
    if not text:
        ctx.fail(f"{option.opts[0]}: expected a path, found an empty text.")
    if text.endswith(("/", os.sep)) and not all(
        getattr(info, "dir_okay", True) for info in infos
    ):
        ctx.fail(
            f"{option.opts[0]} {text}: expected a file, found the name of a folder."
        )


class Command(_SharedCommand, TyperCommand):
    """A command whose help lists its options in groups."""


class CommandGroup(_SharedCommand, TyperGroup):
    """A command with subcommands, whose help lists its options in groups."""


OPTION_WIDTH = 24
"""Maximum characters of an option with its values; longer lists of values go into its
help."""


def _shorten(parameter: Any, name: str, text: str) -> tuple[str, str]:
    """Shorten an option's help, to one line if possible: `<int>`, and its range next to
    the default: `[1; >=1]`."""
    name = re.sub(r"<(?:list\[)?(\w+)(?:\]| range)>", r"<\1>", name)
    text = (
        re.sub(r"(\S+)<=x<=(\S+)\]", r"\1 to \2]", text)
        .replace("x>=", ">=")
        .replace("  [default: ", " [")
        .replace("  [", " [")
    )
    values = re.search(r"<\w+(\|\w+)+>", name)
    if len(name) > OPTION_WIDTH and values:
        name = name.replace(values[0], f"<{parameter.opts[0].lstrip('-')}>")
        about, bracket, rest = text.partition(" [")
        text = (
            f"{about.removesuffix('.')}: "
            f"{values[0][1:-1].replace('|', ', ')}.{bracket}{rest}"
        )
    return name, text


def with_option_groups(
    *, without: Collection[str] = ()
) -> Callable[[CommandFunction], CommandFunction]:
    """Turn the fields of a command's option groups into options of the command.

    A parameter whose type is a dataclass is a group: on the command line its fields
    replace it, except those named in `without`, which keep their defaults.
    """

    def expand(command: CommandFunction) -> CommandFunction:
        groups = dict[str, Callable[..., Any]]()
        flat = list[Parameter]()
        for parameter in signature(command, eval_str=True).parameters.values():
            group = parameter.annotation
            if not is_dataclass(group):
                flat.append(parameter)
                continue
            assert isinstance(group, type)
            groups[parameter.name] = group
            flat += [
                each
                for each in signature(group, eval_str=True).parameters.values()
                if each.name not in without
            ]

        @wraps(command)
        def run(**arguments: Any) -> None:
            with user_errors():
                for name, group in groups.items():
                    own = {
                        each: arguments.pop(each)
                        for each in signature(group).parameters
                        if each in arguments
                    }
                    arguments[name] = group(**own)
            command(**arguments)

        _set_signature(run, flat)
        return run

    return expand


def _set_signature(function: CommandFunction, parameters: Sequence[Parameter]) -> None:
    """Let inspect and Typer see these parameters, all of them keyword-only."""
    keywords = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in parameters]
    function.__signature__ = Signature(keywords)  # type: ignore[attr-defined]  # unknown to typeshed
    function.__annotations__ = {each.name: each.annotation for each in parameters}


Level = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True)
class Output:
    """Hold how much a command prints, and when it began (time.perf_counter).

    last     prints the line that was held back
    screens  one per standard stream
    options  parameter of the command -> its name on the command line, such as
             `--max-drop`
    results  where the result is printed; None: standard output
    """

    level: Level = "info"
    began: float = field(default_factory=time.perf_counter)
    last: list[Callable[[], None]] = field(default_factory=list)
    screens: "dict[bool, Screen]" = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    results: TextIO | None = None


_OUTPUT: ContextVar[Output | None] = ContextVar("output", default=None)


def print_version(wanted: bool) -> None:
    """Print the version and exit, if --version was given."""
    if wanted:
        print(f"compress {__version__}")
        raise typer.Exit


Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print only errors and the last line.")
]
LogLevel = Annotated[
    Level,
    typer.Option(
        metavar="LEVEL", help="debug, info, warning or error (same as --quiet)."
    ),
]
Version = Annotated[
    bool,
    typer.Option(
        "--version",
        "-V",
        callback=print_version,
        is_eager=True,
        help="Print the version.",
    ),
]


OwnCode = Annotated[
    str | None,
    typer.Option(help="Allow your own kind of task to run from this folder."),
]


@contextmanager
def _allow_kinds(folder: str | None) -> Iterator[None]:
    """Let the user's own kinds of task run from this folder, if one is given."""
    if folder is None:
        yield
        return
    from compress.config import user_code

    with user_errors(), user_code.allow_kinds(folder):
        yield


def with_verbosity(
    command: CommandFunction,
    *,
    reads_bundles: bool = False,
) -> CommandFunction:
    """Add the options for how much a command prints; and if it reads bundles,
    `--allow-code`, since their kind of task may be the user's own code."""

    parameters = signature(command, eval_str=True).parameters.values()
    names = {parameter.name: _option_name(parameter) for parameter in parameters}

    @wraps(command)
    def run(*, quiet: bool, log_level: Level, version: bool, **arguments: Any) -> None:
        del version  # its callback has exited already
        with user_errors():
            is_first()  # or the launch is refused
        output = Output("error" if quiet else log_level, options=names)
        if output.level == "debug":
            import logging

            os.environ["TRANSFORMERS_VERBOSITY"] = "debug"
            logging.basicConfig(level=logging.DEBUG)
        arguments = {name: _expand_home(value) for name, value in arguments.items()}
        as_json = arguments.get("as_json", False)
        token = _OUTPUT.set(output)
        SCREEN.set(lambda: console(as_json))
        try:
            with separate_results() if as_json else nullcontext(sys.stdout) as results:
                _OUTPUT.set(replace(output, results=results))
                with _allow_kinds(arguments.get("allow_code")):
                    if reads_bundles:
                        del arguments["allow_code"]
                    command(**arguments)
        except BaseException as error:
            if not isinstance(error, typer.Exit) or error.exit_code in (
                USER_ERROR,
                INTERRUPTED,
                TERMINATED,
            ):
                output.last.clear()
            raise
        finally:
            _OUTPUT.reset(token)
            SCREEN.set(None)
            for print_last in output.last:
                print_last()

    options: dict[str, tuple[Any, Any]] = {
        "quiet": (Quiet, False),
        "log_level": (LogLevel, "info"),
        "version": (Version, False),
    }
    if reads_bundles:
        options["allow_code"] = (OwnCode, None)
    shared = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in options.items()
    ]
    _set_signature(run, [*parameters, *shared])
    return run


def _expand_home(value: Any) -> Any:
    """Replace `~` in paths: shells leave it in `--out=~/file`. The `~` of an unknown
    user stays."""
    if isinstance(value, list):
        return [_expand_home(each) for each in value]
    if not isinstance(value, Path):
        return value
    return Path(os.path.expanduser(value))  # noqa: PTH111  # which does not raise for an unknown user


def _option_name(parameter: Parameter) -> str:
    """Return a parameter's name on the command line: `--max-drop`, or for an argument
    `BUNDLE`."""
    for each in get_args(parameter.annotation)[1:]:
        if isinstance(each, ArgumentInfo):
            return parameter.name.upper()
        for name in getattr(each, "param_decls", None) or ():
            if name.startswith("--"):
                return str(name)
    return f"--{parameter.name.replace('_', '-')}"


def console(as_json: bool = False, *, answer: bool = False) -> "Screen":
    """Open the console: standard error if standard output is for JSON; silent in all
    processes but the first.

    answer  for the command's result, which is printed at any level, unlike progress and
            notes
    """
    from compress.console import Screen

    output = _OUTPUT.get() or Output()
    last = None if answer or output.level in ("debug", "info") else output.last
    screen = Screen(
        stderr=as_json,
        quiet=not is_first(),
        last=last,
        warnings=output.level != "error",
    )
    # one screen, which knows its progress bar
    return screen if answer else output.screens.setdefault(as_json, screen)


def announce(doing: str, out: Path, as_json: bool = False) -> None:
    """Say what a run does and where, before it imports torch, which takes seconds."""
    console(as_json).print(f"{doing}, in {out}: loading torch", soft_wrap=True)


def printer(as_json: bool = False, *, answer: bool = False) -> Say:
    """Return a function that prints a line to the console, however long."""
    return partial(console(as_json, answer=answer).print, soft_wrap=True)


def is_first() -> bool:
    """Return True in the only process of a command, or in the one of several that
    prints."""
    return process_rank() == 0


def _place() -> str:
    """Name this process, if its command has several; '' if it has one."""
    if (os.environ.get("WORLD_SIZE") or "1") == "1":
        return ""
    return f"process {os.environ.get('RANK', '0')} on {socket.gethostname()}: "


def run_folder(
    out: Path | None,
    recipe: str,
    data: str | None,
    *,
    resume: bool,
) -> Path:
    """Return the folder of a run; if none is given, choose one by the names of recipe
    and data."""
    if out is not None:
        return out
    with user_errors():
        from compress.commands import preflight

        return preflight.choose_out(recipe, data or "text", resume=resume)


def _continuation(hint: str | Path) -> str:
    """Return a hint; for the folder of a run, say which command continues it, and as
    how many processes if there are several."""
    if isinstance(hint, str):
        return hint
    if not (hint / "run.json").is_file():
        return "Nothing was written. Run the same command again."
    from compress.provenance import command_line, resume_command

    processes = os.environ.get("WORLD_SIZE") or "1"
    launched = "" if processes == "1" else f", launched as {processes} processes"
    return f"Continue with{launched}: {resume_command(hint, command_line())}"


def results() -> TextIO:
    """Return the stream that a command's result is printed to."""
    return (_OUTPUT.get() or Output()).results or sys.stdout


def print_result(text: str) -> None:
    """Print the result of a command to standard output, the same on every terminal."""
    print(printable(text.removesuffix("\n")), file=results(), flush=True)


def print_forecast(
    forecast: "Callable[..., Forecast]",
    as_json: bool,
    **arguments: Any,
) -> None:
    """Forecast what a command with these arguments would take, and print that.

    The command has imported what it needs by now; the seconds that this took are its
    first phase.
    """
    from compress.records.forecast import PhaseEstimate
    from compress.reporting.terminal import forecast_lines

    seconds = time.perf_counter() - (_OUTPUT.get() or Output()).began
    found = forecast(**arguments)
    found = replace(
        found,
        phases=(PhaseEstimate("starting", seconds=(seconds, seconds)), *found.phases),
    )
    if as_json and is_first():
        print_json("plan", found.to_json())
    elif not as_json:
        for line in forecast_lines(found):
            printer(answer=True)(line)


def print_json(command: str, result: "str | Path | Mapping[str, Any]") -> None:
    """Print the result of a command as JSON, after the name and version of its schema
    (docs/json.md).

    result  values, or a record as JSON text or as a file
    """
    import json

    text = result.read_text(encoding="utf-8") if isinstance(result, Path) else result
    values = json.loads(text) if isinstance(text, str) else text
    print_result(
        json.dumps({"schema": schema(command), **values}, ensure_ascii=False, indent=1)
    )


def schema(command: str) -> str:
    """Name the schema of a command's JSON; its number grows when a field is removed or
    changes its meaning."""
    return f"compress.{command}/1"


@contextmanager
def user_errors(hint: str | Path = "") -> Iterator[None]:
    """Turn user errors into a message and exit code 2, Ctrl-C into 130, SIGTERM into
    143.

    hint  how to continue, or the folder of the run, which may not have begun

    Any traceback is a bug of ours.
    """
    from compress.errors import ArgumentError, CompressError

    try:
        yield
    except CompressError as error:
        output = _OUTPUT.get() or Output()
        if output.level == "debug":
            import traceback

            traceback.print_exc()
        named = (
            error.renamed(output.options) if isinstance(error, ArgumentError) else error
        )
        message = f"error: {_place()}{named}"
        code = USER_ERROR
    except OSError as error:
        # a library's own error, or a reader that has read enough
        if error.errno in (None, errno.EPIPE):
            raise
        # for a copy or rename, the path that could not be written
        name = error.filename2 or error.filename
        where = f"{name}: " if name else ""
        message = (
            f"error: {_place()}{where}{error.strerror}. Nothing half-written is left. "
            f"{_continuation(hint)}"
        ).rstrip()
        code = USER_ERROR
    except KeyboardInterrupt as interrupt:
        message = f"\ninterrupted. {_continuation(hint)}"
        code = exit_code(interrupt)
    else:
        return
    print(printable(message), file=sys.stderr)
    raise typer.Exit(code)
