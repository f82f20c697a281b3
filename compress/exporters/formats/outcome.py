"""What an export made: the files, how exact they are, and what there is to know of them."""

import importlib
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compress.errors import ExportError
from compress.exporters.parity import Difference
from compress.provenance import install_command

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from compress.exporters.formats import Exported
    from compress.records.certificate import Tried

FAR = 0.1
"""A largest difference beyond this share of the largest logit is warned of."""


@dataclass(frozen=True)
class Made:
    """One file.

    file         path inside the folder, with forward slashes; a model in two files is named by the first, the other
                 is in `with_files`
    precision    of the weights; `note`: what it is, where that does not say it all
    difference   from the fp32 ONNX file's logits on made-up rows; none of a file that is no model
    certificate  of the ONNX file it was made of, as JSON, where that carries one
    """

    file: str
    precision: str
    difference: Difference | None
    note: str = ""
    with_files: tuple[str, ...] = ()
    certificate: str = ""


@dataclass(frozen=True)
class Outcome:
    """What a format wrote; verdicts are sentences on where and how to run it, versions of what made it."""

    files: tuple[Made, ...]
    verdicts: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    packages: tuple[str, ...] = ("onnx", "onnxruntime")


def far_off(made: Sequence[Made]) -> list[str]:
    """A warning for each file whose answers are far from fp32's."""
    return [
        f"{each.file}: logits differ from fp32's by up to {each.difference.largest:.2g} where the largest is "
        f"{each.difference.logit:.2g}, on {each.difference.rows} rows of random tokens; score it on real data before "
        "it ships"
        for each in made
        if each.difference is not None and not each.difference.relative <= FAR
    ]


def required(module: str, extra: str) -> Any:
    """The module that an extra brings. Raises ExportError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ExportError(
            f"{package} is not installed; expected it for this format: {install_command(extra)}"
        ) from error


@contextmanager
def converting(name: str, model_type: str, runtime: str) -> Iterator[None]:
    """Whatever a runtime's converter fails with becomes an ExportError that says what takes every family."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError) as error:
        first = (str(error).splitlines() or [""])[0]
        raise ExportError(
            f"{name}: {model_type} cannot be exported to {runtime} ({type(error).__name__}: {first}); --for onnx and "
            "--for ort take every family"
        ) from error


def show(exported: "Exported", console: "Console") -> None:
    """What was raced and the files as tables, then the verdicts and warnings, each a line of its own."""
    if exported.tried:
        console.print(race_table(exported.tried))
    console.print(table(exported))
    for verdict in exported.verdicts:
        console.print(verdict, markup=False, highlight=False)
    for warning in exported.warnings:
        console.print(f"warning: {warning}", markup=False, highlight=False, style="yellow")
    console.print(f"{exported.path}: export.json says what is in it", markup=False, highlight=False)


def race_table(tried: "Sequence[Tried]") -> "Table":
    """Build a table of every variant: its time at each setting, and what became of it."""
    from rich.table import Table

    shown = Table(box=None, pad_edge=False)
    settings = list(dict.fromkeys(name for each in tried for name in each.p50_ms))
    shown.add_column("variant")
    for name in settings:
        shown.add_column(f"ms, {name}", justify="right")
    shown.add_column("")
    for each in tried:
        times = [f"{each.p50_ms[name]:.2f}" if name in each.p50_ms else "" for name in settings]
        became = "kept" if each.chosen else ("" if each.passed else "refused")
        shown.add_row(each.variant, *times, ": ".join(filter(None, (became, each.reason))))
    return shown


def table(exported: "Exported") -> "Table":
    """File, precision, size and difference, one line each."""
    from rich.table import Table

    shown = Table(box=None, pad_edge=False)
    for name, side in (("file", "left"), ("precision", "left"), ("MB", "right"), ("differs by", "right"), ("", "left")):
        shown.add_column(name, justify=side, overflow="fold", no_wrap=name != "")  # type: ignore[arg-type]
    for made in exported.files:
        size = sum(exported.sizes[name] for name in (made.file, *made.with_files)) / 1e6
        apart = "" if made.difference is None else f"{made.difference.largest:.1e} of {made.difference.logit:.2g}"
        shown.add_row(made.file, made.precision, f"{size:.2f}", apart, made.note)
    return shown


@contextmanager
def quiet() -> Iterator[None]:
    """Warnings, and what is written to the file descriptors of standard output and error meanwhile, are dropped.
    Errors are raised as ever: they do not come this way."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    kept = [os.dup(number) for number in (1, 2)]
    try:
        with tempfile.TemporaryFile() as dropped, warnings.catch_warnings(action="ignore"):
            for number in (1, 2):
                os.dup2(dropped.fileno(), number)
            yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number, original in zip((1, 2), kept, strict=True):
            os.dup2(original, number)
            os.close(original)
