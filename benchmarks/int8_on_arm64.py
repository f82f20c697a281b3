"""Does an int8 file answer on arm64 what it answers here? In emulation: for correctness, never for speed.

    apt-get install qemu-user-static debootstrap
    debootstrap --foreign --arch=arm64 --variant=minbase --include=python3.11,libstdc++6 bookworm ROOT
    for each in ROOT/var/cache/apt/archives/*.deb; do dpkg-deb -x $each ROOT; done
    pip download --no-deps --only-binary=:all: --platform manylinux_2_28_aarch64 --python-version 3.11 \\
        onnxruntime==1.27.0 numpy flatbuffers protobuf packaging    # and unzip the wheels into SITE
    python -m benchmarks.int8_on_arm64 BUNDLE... --texts FILE --root ROOT --site SITE --here PYTHON

The runner of `compress bench` answers the texts of FILE (one per line), each by itself, under qemu's model of several
processors, which differ in the instructions that int8 products are made of, and natively by PYTHON, which has the same
onnxruntime. onnxruntime 1.30.0 and 1.31.1 die when imported under Debian 12's qemu 7.2; 1.22.1 and 1.27.0 do not.
"""

import base64
import json
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks.common import make_parser
from compress.benchmark.jobs import logits_job
from compress.benchmark.remote import runner
from compress.exporters.artifact import Bundle

PROCESSORS = {
    "cortex-a53": "asimd",
    "cortex-a76": "asimd, dot products",
    "max,sme=off": "asimd, dot products, i8mm, SVE2",
    "max": "asimd, dot products, i8mm, SVE2, SME",
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("bundles", nargs="+", type=Path)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--site", type=Path, required=True)
    parser.add_argument("--here", required=True)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    texts = args.texts.read_text(encoding="utf-8").splitlines()[: args.rows]
    known: dict[str, list[str]] = {
        cpu: ["qemu-aarch64-static", "-cpu", cpu, "-L", str(args.root), "-E", f"PYTHONPATH={args.site}",
              str(args.root / "usr" / "bin" / "python3.11")]
        for cpu in PROCESSORS
    }  # fmt: skip
    found = []
    for bundle in map(Bundle.load, args.bundles):
        rows = encode_texts(bundle, texts)
        for precision, file in bundle.files().items():
            native = compute_logits([args.here], file, rows)
            for cpu, python in known.items():
                there = compute_logits(python, file, rows)
                line = {
                    "bundle": bundle.path.name,
                    "precision": precision,
                    "processor": cpu,
                    "instructions": PROCESSORS[cpu],
                    "rows": len(rows),
                    "largest_difference": float(np.abs(native - there).max()),
                    "agreement": float((native.argmax(-1) == there.argmax(-1)).mean()),
                }
                found.append(line)
                print(json.dumps(line), flush=True)
    if args.out:
        args.out.write_text(
            json.dumps({**describe_setup(args.here), "results": found}, indent=1) + "\n", encoding="utf-8"
        )


def encode_texts(bundle: Bundle, texts: list[str]) -> list[dict[str, list[int]]]:
    tokenizer = Tokenizer.from_file(str(bundle.path / "tokenizer.json"))
    tokenizer.enable_truncation(bundle.manifest.max_length)
    rows = tokenizer.encode_batch(texts)
    return [{"input_ids": x.ids, "attention_mask": x.attention_mask, "token_type_ids": x.type_ids} for x in rows]


def compute_logits(python: list[str], file: Path, rows: list[dict[str, list[int]]]) -> Any:
    """Logits (rows, outputs)."""
    job = {**logits_job(file), "path": str(file.resolve()), "affinity": []}
    command = [*python, str(runner.__file__), json.dumps(job)]
    done = subprocess.run(command, input=json.dumps({"rows": rows}) + "\n", capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr}")
    said = json.loads(done.stdout.splitlines()[-1])["logits"]
    return np.stack([np.frombuffer(base64.b64decode(data), np.float32).reshape(shape) for shape, data in said])


def describe_setup(here: str) -> dict[str, str]:
    asked = [here, "-c", "import onnxruntime; print(onnxruntime.__version__)"]
    qemu = subprocess.run(["qemu-aarch64-static", "--version"], capture_output=True, text=True, check=True).stdout
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "here": platform.processor() or platform.machine(),
        "onnxruntime": subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip(),
        "qemu": qemu.splitlines()[0],
    }


if __name__ == "__main__":
    main()
