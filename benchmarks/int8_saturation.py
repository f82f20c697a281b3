"""Does an int8 file answer on x86 processors without VNNI what the certificate computes? In emulation.

    apt-get install qemu-user
    python -m benchmarks.int8_saturation BUNDLE=DATA... --rows 100 --out FILE

Each bundle's fp32 file is quantised in several ways, for any processor and with weights of the full range. The runner
of `compress bench` answers rows of DATA with each file, here and under qemu's model of processors with AVX2 and without
VNNI. `compress.quantization.saturation` computes the same answers here. They must be equal, and the logits within
TOLERANCE.

qemu 7.2 emulates AVX2 but neither AVX-512 nor VNNI: its Cascadelake-Server and Icelake-Server compute as Haswell does.
The control with VNNI is hence this machine, if it has it.
"""

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import load_pair, log, make_parser, write_result
from compress.benchmark.jobs import logits_job
from compress.benchmark.remote import runner
from compress.evaluation.evaluator import Evaluator
from compress.exporters.artifact import Bundle
from compress.exporters.int8 import quantize_dynamic, quantize_static
from compress.exporters.rewrite.saturation import list_saturating
from compress.quantization.saturation import saturate
from compress.quantization.smoothquant import observe_channels, smooth

QEMU = "qemu-x86_64"
PROCESSORS = ("Haswell", "Skylake-Client")
TOLERANCE = 0.05
"""Emulated processors have other kernels for floats than this one: a code of an activation may differ by one."""
CALIBRATED = 128
ALPHA = 0.7


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("pairs", nargs="+", metavar="BUNDLE=DATA")
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--processors", nargs="+", default=list(PROCESSORS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if shutil.which(QEMU) is None:
        sys.exit(f"skipped: {QEMU} is not installed; apt-get install qemu-user")
    version = subprocess.run([QEMU, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    found = []
    for pair in args.pairs:
        name, bundle, data = load_pair(pair)
        rows = bundle.load_data(data)
        evaluator = bundle.evaluator(rows.measured[1]).subsample(args.rows)
        calibration = bundle.evaluator(rows.train).subsample(CALIBRATED)
        with tempfile.TemporaryDirectory() as scratch:
            for way, make in list_ways(bundle, calibration, Path(scratch)).items():
                file = Path(scratch) / "int8.onnx"
                make(file)
                for line in compare(bundle, file, evaluator, args.processors):
                    found.append({"bundle": name, "file": way, **line})
                    log(json.dumps(found[-1]))
    write_result(args.out, {"qemu": version, "tolerance": TOLERANCE, "results": found})
    wrong = [line for line in found if line["predicted_from_emulated"] > TOLERANCE or line["answers_mispredicted"]]
    sys.exit(f"{len(wrong)} of {len(found)} predictions are wrong" if wrong else 0)


def list_ways(bundle: Bundle, calibration: Evaluator, folder: Path) -> Mapping[str, Callable[[Path], None]]:
    """Ways to quantise: name -> a function that writes the file."""
    source = bundle.files()["fp32"]
    smoothed = folder / "smoothed.onnx"
    seen = observe_channels(source, calibration.rows, threads=os.cpu_count() or 1)
    ranges = smooth(source, smoothed, seen, alpha=ALPHA)
    return {
        "dynamic": lambda file: quantize_dynamic(source, file),
        "dynamic, full range": lambda file: quantize_dynamic(source, file, full_range=True),
        "smoothquant": lambda file: quantize_static(smoothed, file, ranges),
        "smoothquant, full range": lambda file: quantize_static(smoothed, file, ranges, full_range=True),
    }


def compare(bundle: Bundle, file: Path, evaluator: Evaluator, processors: Sequence[str]) -> list[dict[str, Any]]:
    """Compare native, computed and emulated answers, for each processor."""
    native = compute_logits([sys.executable], file, evaluator)
    began = time.perf_counter()
    found = saturate(file, evaluator.rows, bundle.task, threads=os.cpu_count() or 1)
    seconds = time.perf_counter() - began
    lines = []
    for processor in processors:
        emulated = compute_logits([QEMU, "-cpu", processor, sys.executable], file, evaluator)
        scores = {
            name: evaluator.scores(logits)[bundle.task.metric]
            for name, logits in (("native", native), ("computed", found.saturated), ("emulated", emulated))
        }
        lines.append(
            {
                "processor": processor,
                "rows": len(evaluator),
                "products_that_can_saturate": len(list_saturating(file)),
                "products_that_saturate": len(found.shares),
                "largest_share": max(found.shares.values(), default=0.0),
                "emulated_from_native": largest(emulated, native),
                "computed_from_exact": largest(found.saturated, found.exact),
                "exact_from_native": largest(found.exact, native),
                "predicted_from_emulated": largest(found.saturated, emulated),
                "answers_changed": evaluator.count_changed(emulated, native),
                "answers_changed_predicted": evaluator.count_changed(found.saturated, found.exact),
                "answers_mispredicted": evaluator.count_changed(found.saturated, emulated),
                "scores": scores,
                "seconds_to_compute": seconds,
            }
        )
    return lines


def largest(one: Any, other: Any) -> float:
    return float(np.abs(one - other).max())


def compute_logits(python: list[str], file: Path, evaluator: Evaluator) -> Any:
    """Logits (rows, outputs) by the runner of `compress bench`, in this Python."""
    job = {**logits_job(file), "path": str(file.resolve()), "affinity": []}
    columns = [
        name for name in ("input_ids", "attention_mask", "token_type_ids") if name in evaluator.rows.column_names
    ]
    rows = [{name: list(map(int, row[name])) for name in columns} for row in evaluator.rows]
    command = [*python, str(runner.__file__), json.dumps(job)]
    done = subprocess.run(command, input=json.dumps({"rows": rows}) + "\n", capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr[-3000:]}")
    said = json.loads(done.stdout.splitlines()[-1])["logits"]
    return np.stack([np.frombuffer(base64.b64decode(data), np.float32).reshape(shape) for shape, data in said])


if __name__ == "__main__":
    main()
