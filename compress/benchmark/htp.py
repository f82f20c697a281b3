"""Run rows on the emulator of Qualcomm's HTP (Hexagon Tensor Processor), which comes
with onnxruntime-qnn for x86-64 Linux. It reproduces the processor's arithmetic but not
its speed, so no latency is measured.

The emulator runs in a separate process, which may crash: with the Python that the
environment variable COMPRESS_NPU_PYTHON names, else with ours if it has
onnxruntime-qnn.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from compress.arrays import Floats
from compress.exporters.predictor import answers_tokens, fixed_length, pad
from compress.exporters.session import EncodedRow, open_session
from compress.provenance import install_command
from compress.records.latency import DeviceError

PYTHON = "COMPRESS_NPU_PYTHON"
HTP_SCRIPT = Path(__file__).parent / "remote" / "htp.py"
HTP_NAME = "emulator of the HTP (version 75), x86-64"


@dataclass(frozen=True)
class Emulated:
    """The result of an emulated run.

    answers        each row's outputs, without the batch axis and the padding
    left           the nodes that ran on the CPU
    context_bytes  the size of the context binary
    seconds        the emulator's time per row
    runtime        the versions that ran it
    """

    answers: list[list[Floats]]
    left: tuple[str, ...]
    context_bytes: int
    seconds: float
    runtime: str


def find_emulator() -> str:
    """Find a Python that has the emulator; return '' if there is none."""
    if python := os.environ.get(PYTHON):
        return python
    return sys.executable if importlib.util.find_spec("onnxruntime_qnn") else ""


def how_to_install() -> str:
    """Explain how to install the emulator."""
    return (
        f"{install_command('npu')} (x86-64 Linux), or name the Python of an "
        f"environment that has it: {PYTHON}=/path/to/python"
    )


def emulate(
    python: str,
    file: Path,
    rows: Sequence[EncodedRow],
    *,
    outputs: Sequence[str] | None = None,
    timeout: float = 3600,
) -> Emulated:
    """Run every row on the emulator; the CPU fallback is on only if the emulator does
    not support a node.

    outputs  the outputs of the file to return; None: all
    timeout  seconds for all rows together
    Raises DeviceError if the emulator cannot be started, crashes, or does not end in
    time.
    """
    session = open_session(file, threads=1)
    names = [node.name for node in session.get_inputs()]
    length = fixed_length(session)
    if length is None:
        raise DeviceError(
            f"{file}: has open shapes; expected a file of a fixed length, as --for npu "
            "writes"
        )
    nodes = enumerate(session.get_outputs())
    wanted = [
        (n, answers_tokens(node))
        for n, node in nodes
        if outputs is None or node.name in outputs
    ]
    with tempfile.TemporaryDirectory(prefix="compress-htp.") as scratch:
        inputs = Path(scratch) / "rows.npz"
        results = Path(scratch) / "answers.npz"
        context = Path(scratch) / "context"
        context.mkdir()
        feeds: dict[str, Any] = {
            name: np.concatenate([pad(np.asarray([row[name]]), length) for row in rows])
            for name in names
        }
        np.savez(inputs, **feeds)
        command = [
            python,
            str(HTP_SCRIPT),
            str(file.resolve()),
            str(inputs),
            str(results),
            str(context),
        ]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout, check=False
            )
        except OSError as error:
            raise DeviceError(
                f"{python}: cannot be started ({error.strerror}); {how_to_install()}"
            ) from None
        except subprocess.TimeoutExpired:
            raise DeviceError(
                f"{HTP_NAME}: did not answer {len(rows)} rows in {timeout:g} seconds"
            ) from None
        if done.returncode:
            last = (
                done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            )[-1]
            raise DeviceError(f"{HTP_NAME}: failed: {last[:500]}; {how_to_install()}")
        report = json.loads(done.stdout.strip().splitlines()[-1])
        with np.load(results) as arrays:
            values = [(arrays[str(n)], tokenwise) for n, tokenwise in wanted]
    tokens = [len(row[names[0]]) for row in rows]
    answers = [
        [
            array[at, : tokens[at]] if tokenwise else array[at]
            for array, tokenwise in values
        ]
        for at in range(len(rows))
    ]
    return Emulated(
        answers,
        tuple(report["left"]),
        report["context_bytes"],
        report["seconds"],
        report["runtime"],
    )
