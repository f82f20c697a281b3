"""Options that commands share, how a command talks, and what becomes of an error."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from compress.terminal import printable

if TYPE_CHECKING:
    from compress.console import Screen

Recipe = Annotated[str, typer.Option(help="Name (see `compress recipes`) or path of a .yaml file.")]
Out = Annotated[Path, typer.Option(help="Directory of the run.")]
CorpusName = Annotated[str | None, typer.Option(help="Unlabelled text: pydoc, a file, folder or hub id.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="As in stages.0.lr=3e-5; repeatable.")]
Seed = Annotated[int, typer.Option(help="Of every random number of the run.")]
Precision = Annotated[Literal["auto", "bf16", "fp32"], typer.Option(help="What training computes in.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the interrupted run in --out.")]
AllowPickle = Annotated[bool, typer.Option("--allow-pickle", help="Accept pickled weights you trust.")]
AllowCode = Annotated[
    Path | None,
    typer.Option(help="Folder of your own functions that the recipe names: it is a program, and runs only so."),
]
OnWeakTeacher = Annotated[
    Literal["refuse", "warn"], typer.Option(help="What to do with a teacher no better than the majority.")
]
Int8MaxDrop = Annotated[
    float | None,
    typer.Option(
        "--max-drop", min=0, max=100, help="Points of the score that int8 may lose; default: 0.2, under a latency 0.5."
    ),
]
DeviceTimeout = Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds until a silent device is given up.")]
DevicePython = Annotated[str, typer.Option("--python", help="ssh: the interpreter there that has onnxruntime.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
USER_ERROR, INTERRUPTED = 2, 130
UNCERTIFIED = 3
"""Exit code of a file that was made, and loses more than it may."""


def console(as_json: bool = False) -> "Screen":
    """Where progress and tables go: standard output, or standard error when that is for JSON; silent but in rank 0."""
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
