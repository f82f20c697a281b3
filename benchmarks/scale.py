"""Measure how the cost of a run grows with its rows or its text.

    python -m benchmarks.scale --rows 2000 10000 100000 1000000 --out benchmarks/results/scale_MACHINE.json
    python -m benchmarks.scale --tokens 1e6 1e7 1e8 --text enwiki.txt --out benchmarks/results/scale_MACHINE.json

rows    `compress distill` on a made table of so many rows, each stage cut to 20 steps: seconds to the first line of
        output, to the first step, anonymous memory at most, bytes of the cache
tokens  `encode_corpus` on a text of about so many tokens, which repeats --text with a number in every line: tokens a
        second (beside `encode_batch_fast`: `benchmarks.encoding`), anonymous memory at most, and bytes of a token

Each size has a cache of its own, and runs in a process of its own. The exponent of a figure is the slope of its
logarithm over that of the size. It ends a run after its last step: what ships does not depend on the size.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.common import log, make_parser, run_worker, write_result
from compress.data import pydoc

RECIPE = """
paper: {title: What a run costs, authors: This benchmark, year: 2026, url: https://example.org}
about: Twenty steps of each stage.
teacher: {finetune: teacher, steps: 20, batch: 32, lr: 1.0e-4, max_length: 64, evaluate: 1}
student: {layers: 2, init: teacher}
stages:
  - distill: learn
    steps: 20
    batch: 32
    max_length: 64
    lr: 1.0e-4
    evaluate: 1
    objective: [{loss: hinton.soft_targets}]
"""
WORDS_OF_CLASS = ("good", "bad")
CHARACTERS_PER_TOKEN = 4.4
"""Characters of a token of English prose, about."""


def write_table(path: Path, rows: int) -> None:
    """Write a table of texts of 8 to 24 words, of which one decides the label."""
    draw = random.Random(0)
    words = sorted(set(" ".join(pydoc.documents()).split()))[:5000]
    with path.open("w", encoding="utf-8") as file:
        file.write("text\tlabel\n")
        for row in range(rows):
            text = draw.choices(words, k=draw.randint(7, 23))
            label = draw.randrange(2)
            text.insert(draw.randrange(len(text)), WORDS_OF_CLASS[label])
            clean = " ".join(text).replace('"', "")
            file.write(f"{row} {clean}\t{WORDS_OF_CLASS[label]}\n")


def write_text(path: Path, tokens: float, source: Path | None) -> None:
    """Write a text of about so many tokens: the lines of the source again and again, each time with other numbers."""
    lines = source.read_text(encoding="utf-8").splitlines() if source else "\n\n".join(pydoc.documents()).splitlines()
    left = tokens * CHARACTERS_PER_TOKEN
    copy = 0
    with path.open("w", encoding="utf-8") as file:
        while left > 0:
            for number, line in enumerate(lines):
                new = f"{line} {copy * 7919 + number}" if copy and line else line
                left -= file.write(f"{new}\n")
                if left <= 0:
                    break
            copy += 1


def anonymous_mb(process: int) -> float:
    """Read the anonymous memory of a process, in megabytes; 0 once it has ended."""
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("RssAnon")), 0.0)


def folder_mb(folder: Path) -> float:
    return sum(each.stat().st_size for each in folder.rglob("*") if each.is_file()) / 1e6


def read_steps(log_file: Path) -> list[str]:
    """Read the stages of the steps that a run has logged so far."""
    if not log_file.is_file():
        return []
    found = []
    for line in log_file.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if "loss" in entry or "eval_score" in entry:
            found.append(f"{entry['stage']} {'score' if 'eval_score' in entry else 'step'}")
    return found


def run_distillation(rows: int) -> dict[str, float]:
    """Run a distillation on a table until its student is scored."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_table(folder / "rows.tsv", rows)
        (folder / "scale.yaml").write_text(RECIPE, encoding="utf-8")
        run = folder / "run"
        options = ["--recipe", str(folder / "scale.yaml"), "--gate", "warn", "--out", str(run)]
        command = [
            sys.executable,
            "-m",
            "compress",
            "distill",
            "--teacher",
            "minilm",
            "--data",
            str(folder / "rows.tsv"),
        ]
        began = time.monotonic()
        process = subprocess.Popen(
            [*command, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"COMPRESS_HOME": str(folder / "home")},
        )
        said: list[tuple[float, str]] = []

        def listen() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                said.append((time.monotonic() - began, line.rstrip()))

        listener = threading.Thread(target=listen)
        listener.start()
        first_step = peak = 0.0
        while process.poll() is None:
            peak = max(peak, anonymous_mb(process.pid))
            steps = read_steps(run / "log.jsonl")
            if steps and not first_step:
                first_step = time.monotonic() - began
            if "learn score" in steps:
                process.terminate()
                break
            time.sleep(0.1)
        whole = time.monotonic() - began
        process.wait()
        listener.join()
        if not first_step:
            sys.exit("\n".join(line for _, line in said))
        silence = np.diff([0.0, *(at for at, _ in said), whole]).max()
        return {
            "first line s": said[0][0],
            "first step s": first_step,
            "longest silence s": float(silence),
            "whole s": whole,
            "anonymous MB": peak,
            "cache MB": folder_mb(folder / "home"),
        }


def encode_text(folder: Path) -> dict[str, float]:
    """Encode the text in a folder, and report how fast and how large; runs in a process of its own."""
    from transformers import AutoTokenizer

    from compress.data.corpus import encode_corpus, load_corpus
    from compress.models import checkpoints

    tokenizer = AutoTokenizer.from_pretrained(checkpoints.resolve("minilm"))
    text = folder / "text.txt"
    peak = 0.0
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.2):
            peak = max(peak, anonymous_mb(os.getpid()))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    began = time.monotonic()
    rows = encode_corpus(load_corpus(str(text)), tokenizer, 128)
    seconds = time.monotonic() - began
    done.set()
    watcher.join()
    tokens = int(np.asarray(rows.select_columns("length").with_format("arrow")[:]["length"]).sum())
    return {
        "tokens": tokens,
        "tokens/s": tokens / seconds,
        "seconds": seconds,
        "anonymous MB": peak,
        "bytes a token": folder_mb(folder / "home" / "corpora") * 1e6 / tokens,
    }


def fit_exponents(
    sizes: Sequence[float], figures: Sequence[Mapping[str, float]], names: Sequence[str]
) -> dict[str, float]:
    """Fit the exponent of each figure, over what the smallest size takes."""
    found = {}
    for name in names:
        values = np.array([each[name] for each in figures])
        if len(values) > 1 and (values > 0).all():
            found[name] = float(np.polyfit(np.log(sizes), np.log(values), 1)[0])
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[])
    parser.add_argument("--tokens", type=float, nargs="*", default=[])
    parser.add_argument("--text", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--encode", type=Path, help="Encode the text in this folder, and print the figures.")
    given = parser.parse_args()
    if given.encode is not None:
        print(json.dumps(encode_text(given.encode)))
        return
    tables = {}
    for rows in given.rows:
        tables[rows] = run_distillation(rows)
        log(f"{rows:,} rows: " + ", ".join(f"{name} {value:,.1f}" for name, value in tables[rows].items()))
    texts = {}
    for tokens in given.tokens:
        with tempfile.TemporaryDirectory() as scratch:
            write_text(Path(scratch) / "text.txt", tokens, given.text)
            command = [sys.executable, "-m", "benchmarks.scale", "--encode", scratch]
            texts[tokens] = run_worker(command, COMPRESS_HOME=f"{scratch}/home")
        log(f"{tokens:,.0f} tokens: " + ", ".join(f"{name} {value:,.2f}" for name, value in texts[tokens].items()))
    exponents = {
        "rows": fit_exponents(list(tables), list(tables.values()), ["first step s", "cache MB"]),
        "tokens": fit_exponents(list(texts), list(texts.values()), ["seconds"]),
    }
    log(json.dumps(exponents))
    write_result(given.out, {"rows": tables, "tokens": texts, "exponents": exponents})


if __name__ == "__main__":
    main()
