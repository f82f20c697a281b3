"""Options that commands share, how a command talks, and what becomes of an error."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from compress.terminal import printable

if TYPE_CHECKING:
    from compress.console import Screen

PANELS = ("Data", "Training", "Budget", "Device", "Search", "Output")
"""The groups that options are listed in."""
data_option, training, budget, device_option, search_option, output = (
    partial(typer.Option, rich_help_panel=panel) for panel in PANELS
)

Teacher = Annotated[str, training(help="The teacher: an alias (minilm, bert-base, ...), a folder or a hub id.")]
Recipe = Annotated[str, training(help="The recipe: a name (see `compress recipes`) or the path of a .yaml file.")]
Overrides = Annotated[
    list[str] | None, training("--set", help="Change a number, such as stages.0.lr=3e-5. Repeatable.")
]
Seed = Annotated[int, training(help="Seed every random number of the run.")]
Precision = Annotated[Literal["auto", "bf16", "fp32"], training(help="Compute in this number format.")]
Resume = Annotated[bool, training("--resume", help="Continue the interrupted run in --out.")]
AllowPickle = Annotated[bool, training("--allow-pickle", help="Accept pickled weights that you trust.")]
AllowCode = Annotated[
    Path | None, training(help="Allow the recipe to run your own functions from this folder: it is a program then.")
]
OnWeakTeacher = Annotated[
    Literal["refuse", "warn"], training(help="Choose what a teacher no better than the majority leads to.")
]
DataName = Annotated[
    str, data_option(help="The data: intents, a folder with train and dev files, or a hub id such as glue/sst2.")
]
CorpusName = Annotated[str | None, data_option(help="Add unlabelled text: pydoc, a file, a folder or a hub id.")]
TextColumns = Annotated[list[str] | None, data_option(help="Name the text column; give it twice for pairs.")]
LabelColumn = Annotated[str | None, data_option(help="Name the label column.")]
Kind = Annotated[
    Literal["classification", "multilabel", "regression", "tagging", "qa"] | None,
    data_option(help="Name the kind of task where it is not detected."),
]
Metric = Annotated[str | None, data_option(help="Choose the best checkpoint by this score.")]
Out = Annotated[Path, output(help="The folder of the run.")]
Int8MaxDrop = Annotated[
    float | None,
    output("--max-drop", min=0, max=100,
           help="Points of the score that int8 may lose; default: 0.2, or 0.5 under a latency budget."),
]  # fmt: skip
MaxDrop = Annotated[float, output("--max-drop", min=0, max=100, help="Points of the score that int8 may lose.")]
Json = Annotated[bool, output("--json", help="Print the result as JSON.")]
DeviceName = Annotated[
    str, device_option(help="Measure on this device: local, ssh:[user@]host[:port], browser, adb or adb:SERIAL.")
]
Lan = Annotated[bool, device_option("--lan", help="Allow a browser on another machine, such as a phone, to connect.")]
DeviceTimeout = Annotated[
    float, device_option("--timeout", min=0.1, help="Give up a silent device after so many seconds.")
]
DevicePython = Annotated[
    str, device_option("--python", help="Use this interpreter on an ssh host; it has onnxruntime.")
]
ThreadCounts = Annotated[
    str, device_option("--threads", help="Measure with these numbers of threads, comma-separated.")
]
BatchSizes = Annotated[str, device_option("--batch", help="Measure with these batch sizes, comma-separated.")]
Lengths = Annotated[str, device_option("--seq", help="Measure at these lengths in tokens, comma-separated.")]
Threads = Annotated[int, device_option(min=1, help="Measure with so many threads.")]
Batch = Annotated[int, device_option(min=1, help="Measure with batches of so many texts.")]
USER_ERROR, INTERRUPTED = 2, 130
UNCERTIFIED = 3
"""Exit code of a file that was made, and loses more than it may."""


class Command(TyperCommand):
    """A command whose help lists its options in groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and the options, group by group."""
        _write_groups(self, ctx, formatter)


class Group(TyperGroup):
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


def console(as_json: bool = False) -> "Screen":
    """Open the console for progress and tables: standard error if standard output is for JSON; silent but in rank 0."""
    from compress.console import Screen

    return Screen(stderr=as_json, quiet=os.environ.get("RANK", "0") != "0")


def print_result(text: str) -> None:
    """Print what a command found to standard output, as JSON or otherwise; the same JSON on every terminal."""
    print(printable(text.removesuffix("\n")))


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
