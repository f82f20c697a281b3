#!/usr/bin/env python3
"""Do exported folders say the same in transformers.js as in Python?

    python -m benchmarks.interop_js runs/sst2/bundle vectors/ gpt2/ ... [--modules DIR]

For every folder, a bundle, an encoder or a model that writes text, and for its fp32 and its int8 file: the tokens are
those of tokenizer.json, the outputs those of onnxruntime in Python, the label the one `Bundle.predict` gives, and
greedy generation writes the same tokens. `--modules` is a folder in whose node_modules @huggingface/transformers is;
without it, npm installs it into a folder that goes away. Prints one line per file; exits with 1 if any fails.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import make_parser
from compress.data.encoder import Text, TextEncoder
from compress.errors import CompressError
from compress.exporters.artifact import Bundle
from compress.exporters.manifest import Precision
from compress.exporters.session import open_session
from compress.exporters.text_generator import ENCODER, TextGenerator

PACKAGE = "@huggingface/transformers@4.3.1"
SCRIPT = Path(__file__).with_suffix(".mjs")
DTYPES: dict[Precision, str] = {"fp32": "fp32", "int8": "q8"}
TEXTS = (
    "a good film, and never dull!",
    "The plot is very poor; it was sad",
    "Café Zürich, 東京 and naïve 🙂 people",
    "a dull scene and " * 7,
)
"""None is cut: transformers.js cuts a text that is too long without its closing [SEP]."""

TOLERANCE = {"fp32": 1e-5, "int8": 0.05}
"""Largest difference relative to the largest output. transformers.js does not read a file's session settings: its
graph is fused otherwise, rounds otherwise, and in int8 a value on the edge falls into the next step."""


class MismatchError(AssertionError):
    """transformers.js says something else."""


def find_kind(folder: Path) -> str:
    """`causal`, `seq2seq`, `encoder`, or the kind of a bundle's task."""
    bundle = Bundle.load(folder)
    if bundle.manifest.kind != "generative":
        return bundle.task.kind if bundle.manifest.kind == "task" else "encoder"
    return "seq2seq" if (folder / ENCODER["fp32"]).is_file() else "causal"


def list_rows(folder: Path, kind: str) -> list[list[str]]:
    pairs = kind in ("classification", "multilabel", "regression", "qa") and Bundle.load(folder).task.pair
    return [[text, other] for text, other in zip(TEXTS, TEXTS[::-1], strict=True)] if pairs else [[t] for t in TEXTS]


def compare_outputs(folder: Path, kind: str, precision: Precision, answers: Sequence[Mapping[str, Any]]) -> str:
    """Describe the measured difference. Raises MismatchError."""
    rows = list_rows(folder, kind)
    if kind in ("causal", "seq2seq"):
        generator = TextGenerator.open(folder, precision)
        for answer in answers:
            ids = [int(each) for each in answer["ids"]]
            begun = len(ids) if kind == "causal" else 1
            check_equal(answer["written"][begun:], generator.generate(ids, new=12), f"{precision}: other text")
        return f"{len(rows)} texts continued alike"
    bundle = Bundle.load(folder)
    encoder = TextEncoder.from_folder(folder)
    session = open_session(bundle.files()[precision])
    names = [node.name for node in session.get_outputs()]
    worst = largest = 0.0
    for row, answer in zip(rows, answers, strict=True):
        text: Text = row[0] if len(row) == 1 else (row[0], row[1])
        (columns,) = encoder.encode([text], bundle.manifest.max_length)
        check_equal(answer["ids"], columns["input_ids"], f"{row}: other tokens")
        found = session.run(names, {node.name: np.array([columns[node.name]]) for node in session.get_inputs()})
        for name, array in zip(names, found, strict=True):
            largest = max(largest, float(np.abs(array).max()))
            worst = max(worst, float(np.abs(array.ravel() - np.array(answer["outputs"][name], np.float32)).max()))
        if kind == "classification":
            (said,) = bundle.predict([(row[0], row[1]) if len(row) == 2 else row[0]], precision=precision)
            check_equal(answer["label"], said.label, f"{row}: other label")  # type: ignore[union-attr]  # a label
    if worst > TOLERANCE[precision] * largest:
        raise MismatchError(f"{precision}: outputs differ by {worst:.2g} where the largest is {largest:.2g}")
    return f"{len(rows)} texts, {', '.join(names)} within {worst:.1e} of {largest:.3g}"


def check_equal(found: object, expected: object, what: str) -> None:
    if found != expected:
        raise MismatchError(f"{what}: {found}, expected {expected}")


def run(modules: Path, folders: Sequence[Path]) -> bool:
    """Tell whether all folders say the same, and print a line for each file."""
    jobs = [(folder.resolve(), find_kind(folder), precision) for folder in folders for precision in DTYPES]
    lines = [
        json.dumps({"folder": str(folder), "kind": kind, "dtype": DTYPES[precision], "rows": list_rows(folder, kind)})
        for folder, kind, precision in jobs
    ]
    command = ["node", str(SCRIPT), str(modules)]
    told = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, check=False)
    if told.returncode:
        print(told.stderr, file=sys.stderr)
    answers = [json.loads(line) for line in told.stdout.splitlines() if line.startswith("[{")]
    good = len(answers) == len(jobs)
    for (folder, kind, precision), answer in zip(jobs, answers, strict=False):
        try:
            print(f"ok      {folder} {precision}: {compare_outputs(folder, kind, precision, answer)}")
        except (MismatchError, CompressError) as error:
            good = False
            print(f"FAILED  {folder} {precision}: {error}")
    return good


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--modules", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        modules = args.modules or Path(scratch)
        if args.modules is None:
            # Scripts of the packages fetch what a CPU does not need.
            command = ["npm", "install", "--ignore-scripts", "--no-save", "--prefix", scratch, PACKAGE]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        sys.exit(0 if run(modules, args.folders) else 1)


if __name__ == "__main__":
    main()
