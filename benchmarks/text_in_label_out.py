#!/usr/bin/env python3
"""Does a text file read all of Unicode as its tokenizer does, what does reading cost, and does JavaScript agree?

    python -m benchmarks.text_in_label_out runs/sst2/bundle --data sst2/dev.tsv --out result.json [--node FOLDER]

FOLDER holds a node_modules with onnxruntime-web and onnxruntime-node. Texts come from the first column of a TSV file
with a header. Latencies are medians of interleaved rounds, one text and one thread at a time: the text file with a
text, and the bundle's int8 file with the ids that `tokenizers` makes of it, its time included.
"""

import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from benchmarks.common import make_parser, read_texts, write_result
from compress.data.encoder import Text, TextEncoder
from compress.exporters.artifact import TEXT, Bundle
from compress.exporters.session import open_session, read_model
from compress.exporters.tokenizer import build
from compress.exporters.tokenizer.build import MODELS, reader
from compress.exporters.tokenizer.text_model import (
    TEXTS,
    find_differences,
    list_hard_texts,
    make_feeds,
    read_rows,
    text_model,
)
from compress.kinds import Kind

CHARACTERS = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
SCRIPTS = [*range(0x3100), *range(0xAC00, 0xAD00), *range(0xFE00, 0x10000), *range(0x1F300, 0x1F700)]


def iterate_batches(characters: Sequence[str], size: int) -> list[Sequence[str]]:
    return [characters[at : at + size] for at in range(0, len(characters), size)]


def all_characters() -> dict[str, list[str]]:
    """Every character inside a word, every one between spaces, and random ones among each other."""
    draw = random.Random(0)
    low = [chr(code) for code in SCRIPTS]
    return {
        "inside words": ["".join(f"a{each}e " for each in some) for some in iterate_batches(CHARACTERS, 40)],
        "between spaces": [" ".join(some) for some in iterate_batches(CHARACTERS, 100)],
        "random": ["".join(draw.choices(low, k=draw.randint(0, 60))) for _ in range(10_000)],
    }


def count_differences(bundle: Bundle, kind: Kind) -> dict[str, Any]:
    """Count how many of these texts are read otherwise; rows are long enough to hold all of each. Of a tagger words and
    offsets are compared too, of questions the offsets of their contexts, which are these texts."""
    words = TextEncoder.from_folder(bundle.path)
    made = build.read_template(words, pair=kind == "qa", max_length=512, kind=kind)
    started = time.perf_counter()
    described = json.loads(words.backend.to_str())
    pieces = MODELS[described["model"]["type"]].from_tokenizer(words.backend, described)
    model = reader(pieces, made, read_model(bundle.files()["int8"]))
    seconds = time.perf_counter() - started
    with tempfile.TemporaryDirectory() as scratch:
        onnx.save_model(model, Path(scratch) / "reader.onnx")
        session = open_session(Path(scratch) / "reader.onnx", threads=1)
        kinds: dict[str, Sequence[Text]] = {"hard": list_hard_texts(made)}
        for name, texts in all_characters().items():
            kinds[name] = [("what ?", text) for text in texts] if kind == "qa" else texts
        told = {
            name: {"texts": len(given), "different": len(find_differences(session, words, made, given))}
            for name, given in kinds.items()
        }
    return {"made_in_s": seconds, "reader_bytes": model.ByteSize(), "nodes": len(model.graph.node), "texts": told}


def race_files(bundle: Bundle, texts: Sequence[str], rounds: int) -> dict[str, float]:
    """Median milliseconds a text."""
    opened = open_session(bundle.path / TEXT, threads=1)
    predictor = bundle.open("int8")
    names = [node.name for node in predictor.session.get_inputs()]

    def with_ids(text: str) -> None:
        row = predictor.tokenizer.encode(text)
        known = {"input_ids": row.ids, "attention_mask": row.attention_mask, "token_type_ids": row.type_ids}
        predictor.session.run(None, {name: np.asarray([known[name]], np.int64) for name in names})

    words = TextEncoder.from_folder(bundle.path)
    kind = bundle.task.kind
    template = build.read_template(words, pair=False, max_length=bundle.manifest.max_length, kind=kind)
    ready = {
        text: {name: np.asarray([row[name]], np.int64) for name in names}
        for text, row in zip(texts, read_rows(words, template, texts), strict=True)
    }

    ways: dict[str, Callable[[str], Any]] = {
        "int8 file, ids ready": lambda text: predictor.session.run(None, ready[text]),
        "text file": lambda text: opened.run(None, make_feeds([text])),
        "tokenizers + int8 file": with_ids,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            for text in texts:
                started = time.perf_counter()
                run(text)
                times[name].append(1e3 * (time.perf_counter() - started))
    found = {name: statistics.median(each[len(texts) :]) for name, each in times.items()}
    bare, whole = (np.reshape(times[name], (rounds, -1))[1:] for name in ("int8 file, ids ready", "text file"))
    return found | {
        "text file over ids ready, of pairs": float(np.median(whole - bare)),
        "text file over ids ready, of the best rounds": float(np.median(whole.min(0) - bare.min(0))),
    }


def compare_javascript(bundle: Bundle, texts: Sequence[str], folder: Path, package: str) -> dict[str, Any]:
    """Return the largest logit difference from Python, and the labels that differ; of texts without U+0000.

    JavaScript hands the runtime C strings, which end there.
    """
    texts = [text for text in texts if "\0" not in text]
    script = Path(__file__).with_suffix(".mjs")
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(list(texts), file)
        file.flush()
        command = ["node", str(script), str(folder.resolve()), package, str(bundle.path / TEXT), file.name]
        told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    session = open_session(bundle.path / TEXT, threads=1)
    found = [session.run(["label", "logits"], make_feeds([text])) for text in texts]
    pairs = list(zip(found, told["answers"], strict=True))
    return {
        "version": told["version"],
        "texts": len(texts),
        "labels_different": sum(label[0] != other["label"] for (label, _), other in pairs),
        "largest_logit_difference": max(
            float(np.abs(logits[0] - other["logits"]).max()) for (_, logits), other in pairs
        ),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--node", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    told = parser.parse_args()
    kinds: tuple[Kind, ...] = ("classification",)
    texts = read_texts(told.data)[: told.rows]
    with tempfile.TemporaryDirectory() as scratch:
        bundle = text_model(Bundle.load(told.bundle).copy_to(Path(scratch) / "int8"), texts=texts)
        whole = text_model(bundle.copy_to(Path(scratch) / "fp32"), precision="fp32")
        if bundle.task.kind == "tagging":
            kinds = ("tagging", "qa")
        load = os.getloadavg()[0]
        result = {
            "equal": {kind: count_differences(bundle, kind) for kind in kinds},
            "bytes": {"text file": (bundle.path / TEXT).stat().st_size, "int8": bundle.files()["int8"].stat().st_size},
            "median_ms": race_files(bundle, texts, told.rounds),
            "load_before_and_after": [load, os.getloadavg()[0]],
        }
        if told.node:
            result["javascript"] = {
                f"{package}, {name}": compare_javascript(each, [*texts, *TEXTS], told.node, package)
                for package in ("onnxruntime-web", "onnxruntime-node")
                for name, each in (("fp32", whole), ("int8", bundle))
            }
    write_result(told.out, result, ("onnxruntime", "tokenizers", "onnx"))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
