"""Compute what an int8 file answers on x86 processors without VNNI, on any machine:
see `exporters.rewrite.saturation`. `benchmarks.int8_saturation` holds it against an
emulated processor."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import Dataset

from compress.arrays import Array, Floats
from compress.data.task import Task
from compress.exporters.predictor import join_answers, run_rows
from compress.exporters.rewrite.saturation import (
    LARGEST_CODES,
    SATURATING,
    Codes,
    write_exact,
    write_saturated,
)
from compress.exporters.session import open_session, read_model


@dataclass(frozen=True)
class SaturatedAnswers:
    """The answers of a file for some rows.

    exact, saturated  the logits with exact sums, and without VNNI
    shares            product -> the share of its sums of two that leave 16 bits, if any
    """

    exact: Floats
    saturated: Floats
    shares: Mapping[str, float]


def saturate(
    file: Path,
    rows: Dataset,
    task: Task,
    *,
    threads: int,
) -> SaturatedAnswers:
    """Compute the logits of an int8 file, each row alone, with exact sums and as
    processors without VNNI do."""
    model = read_model(file)
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "copy.onnx"
        write_exact(model, copy)
        exact, observed = _run(copy, rows, task, threads=threads)
        saturated = exact
        limits: dict[str, Codes] = {}
        # saturated sums change what later products read
        while _raise_limits(limits, observed):
            write_saturated(model, copy, limits)
            saturated, observed = _run(copy, rows, task, threads=threads)
    shares = {}
    for name, values in _select(observed, SATURATING):
        share = np.concatenate(values, axis=None).mean()
        if share:
            shares[name] = float(share)
    return SaturatedAnswers(exact, saturated, shares)


Observed = Mapping[str, Sequence[Array]]
"""Output -> its value for each row."""


def _select(
    observed: Observed,
    prefix: str,
) -> Iterator[tuple[str, Sequence[Array]]]:
    """Yield the outputs whose names begin like this, with the rest of the names."""
    for name, values in observed.items():
        if name.startswith(prefix):
            yield name.removeprefix(prefix), values


def _raise_limits(limits: dict[str, Codes], observed: Observed) -> bool:
    """Raise the limits that activations exceed, with a margin; return whether there
    were any."""
    margin = 32
    raised = False
    for name, values in _select(observed, LARGEST_CODES):
        largest = np.max(values, axis=0)
        limit = limits.get(name)
        if limit is None or (largest > limit).any():
            raised = True
            limits[name] = largest.astype(int) + margin
    return raised


def _run(
    copy: Path,
    rows: Dataset,
    task: Task,
    *,
    threads: int,
) -> tuple[Floats, Observed]:
    """Run a copy of a file; return its logits and its other outputs."""
    session = open_session(copy, threads=1)
    names = [node.name for node in session.get_outputs()]
    observed = [name for name in names if name.startswith((LARGEST_CODES, SATURATING))]
    own = [name for name in names if name not in observed]
    answers = task.answer_outputs or own
    found = run_rows(session, rows, threads=threads, outputs=[*answers, *observed])
    count = len(answers)
    logits = join_answers(task, [row[:count] for row in found])
    values = {}
    for at, name in enumerate(observed, start=count):
        values[name] = [row[at] for row in found]
    return logits, values
