#!/usr/bin/env python3
"""What does a browser cost, and does it answer the same? onnxruntime-web in Chromium beside onnxruntime on one machine.

    python -m benchmarks.browser_vs_native runs/sst2/bundle --data sst2/dev.tsv --rows 200 --out result.json

Within a device the files interleave; the two devices cannot, so the machine is measured before and after the browser,
and both are in the result. Rows come from the first column of a TSV file with a header.
"""

import shlex
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks.common import make_parser, read_texts, write_result
from compress.benchmark.browser import device
from compress.benchmark.browser.device import browser
from compress.benchmark.device import Device
from compress.benchmark.devices import open_device
from compress.exporters.artifact import Bundle
from compress.exporters.session import EncodedRow
from compress.records.latency import Setting

FLAGS = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"


def race_files(
    device: Device, files: Mapping[str, Path], settings: Sequence[Setting], args: Any
) -> list[dict[str, Any]]:
    return [asdict(latency) for latency in device.race(files, settings, rounds=args.rounds, runs=args.runs)]


def encode_rows(folder: Path, data: Path, rows: int) -> list[EncodedRow]:
    texts = read_texts(data)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    step = len(texts) // rows  # spread over the file, whose order may mean something
    encodings = tokenizer.encode_batch(texts[:: max(1, step)][:rows])
    return [
        {"input_ids": row.ids, "attention_mask": row.attention_mask, "token_type_ids": row.type_ids}
        for row in encodings
    ]


def compare_answers(
    device: Device, here: Device, files: Mapping[str, Path], rows: Sequence[EncodedRow]
) -> dict[str, dict[str, Any]]:
    """Per file: the greatest difference of a logit, and the share of rows with the same label."""
    found = {}
    for name, path in files.items():
        there, native = (np.stack(each.logits(path, rows)) for each in (device, here))
        found[name] = {
            "rows": len(rows),
            "max_difference": float(np.abs(there - native).max()),
            "agreement": float((there.argmax(1) == native.argmax(1)).mean()),
        }
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--seq", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--chromium", default=f"chromium {FLAGS}")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    files = Bundle.load(args.bundle).files()
    settings = [Setting(threads, 1, seq) for threads, seq in product(args.threads, args.seq)]
    rows = encode_rows(args.bundle, args.data, args.rows)
    opened: list[subprocess.Popen[bytes]] = []

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, open_device("local") as here:

        def visit(link: str) -> None:
            command = [*shlex.split(args.chromium), f"--user-data-dir={profile}", link]
            opened.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

        before = race_files(here, files, settings, args)
        try:
            with browser(visit=visit) as page:
                facts, there = page.facts(), race_files(page, files, settings, args)
                parity = compare_answers(page, here, files, rows)
        finally:
            for process in opened:
                process.terminate()
                process.wait()
        after = race_files(here, files, settings, args)
    result = {
        "browser": facts, "onnxruntime-web": device.WEB_VERSION, "native_before": before, "in_browser": there,
        "native_after": after, "parity": parity,
    }  # fmt: skip
    write_result(args.out, result)


if __name__ == "__main__":
    main()
