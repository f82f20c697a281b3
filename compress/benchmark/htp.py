"""Answer rows on the emulator of Qualcomm's HTP (Hexagon Tensor Processor), which comes with onnxruntime-qnn for x86-64
Linux. Its answers are those of the processor's arithmetic; its time says nothing of a phone's, so none is measured.

The emulator runs in a process of its own: one that dies takes nothing with it. Its Python is ours where onnxruntime-qnn
is installed beside us, else the one that the environment variable COMPRESS_NPU_PYTHON names.
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
from numpy.typing import NDArray

from compress.exporters.predictor import answers_tokens, fixed_length, pad
from compress.exporters.session import EncodedRow, open_session
from compress.provenance import install_command
from compress.records.latency import DeviceError

PYTHON = "COMPRESS_NPU_PYTHON"
SCRIPT = Path(__file__).parent / "remote" / "htp.py"
NAME = "emulator of the HTP (version 75), x86-64"


@dataclass(frozen=True)
class Emulated:
    """The answers of the emulator: each row's outputs, without the batch and the padding; the nodes left to the CPU,
    the bytes of the context binary, the seconds that a row took here, and the versions that ran it."""

    answers: list[list[NDArray[np.float32]]]
    left: tuple[str, ...]
    context_bytes: int
    seconds: float
    runtime: str


def find_emulator() -> str:
    """Find the Python that has the emulator; '' for none."""
    if chosen := os.environ.get(PYTHON):
        return chosen
    return sys.executable if importlib.util.find_spec("onnxruntime_qnn") else ""


def how_to_install() -> str:
    """Say how to get the emulator."""
    return (
        f"{install_command('npu')} (x86-64 Linux), or name the Python of an environment that has it: "
        f"{PYTHON}=/path/to/python"
    )


def emulate(
    python: str,
    file: Path,
    rows: Sequence[EncodedRow],
    *,
    outputs: Sequence[str] | None = None,
    timeout: float = 3600,
) -> Emulated:
    """Run every row on the emulator, with the fallback to the CPU off unless there is a node that it does not take.

    outputs  those of the file that are wanted; None: all
    timeout  of all of it, in seconds
    Raises DeviceError where the emulator cannot be started, dies, or does not end in time.
    """
    session = open_session(file, threads=1)
    names, length = [node.name for node in session.get_inputs()], fixed_length(session)
    if length is None:
        raise DeviceError(f"{file}: has open shapes; expected a file of a fixed length, as --for npu writes")
    given_outputs = list(enumerate(session.get_outputs()))
    wanted = [(n, answers_tokens(node)) for n, node in given_outputs if outputs is None or node.name in outputs]
    with tempfile.TemporaryDirectory(prefix="compress-htp.") as scratch:
        given, found, context = (Path(scratch) / name for name in ("rows.npz", "answers.npz", "context"))
        context.mkdir()
        feeds: dict[str, Any] = {
            name: np.concatenate([pad(np.asarray([row[name]]), length) for row in rows]) for name in names
        }
        np.savez(given, **feeds)
        command = [python, str(SCRIPT), str(file.resolve()), str(given), str(found), str(context)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
        except OSError as error:
            raise DeviceError(f"{python}: cannot be started ({error.strerror}); {how_to_install()}") from None
        except subprocess.TimeoutExpired:
            raise DeviceError(f"{NAME}: did not answer {len(rows)} rows in {timeout:g} seconds") from None
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise DeviceError(f"{NAME}: failed: {last[:500]}; {how_to_install()}")
        told = json.loads(done.stdout.strip().splitlines()[-1])
        with np.load(found) as loaded:
            values = [(loaded[str(n)], cut) for n, cut in wanted]
    tokens = [len(row[names[0]]) for row in rows]
    answers = [[each[at, : tokens[at]] if cut else each[at] for each, cut in values] for at in range(len(rows))]
    return Emulated(answers, tuple(told["left"]), told["context_bytes"], told["seconds"], told["runtime"])
