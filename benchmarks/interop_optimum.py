#!/usr/bin/env python3
"""Do bundles written under transformers 5 load where optimum lives? (optimum-onnx needs transformers < 4.58.)

Run by the python of a venv of its own, without compress in it:

    python3 -m venv optimum
    optimum/bin/pip install torch==2.13.0
    optimum/bin/pip install transformers==4.57.6 optimum==2.1.0 optimum-onnx==0.1.0 onnxruntime==1.31.1 onnx==1.23.2
    optimum/bin/python benchmarks/interop_optimum.py runs/sst2/bundle ...

For every bundle: AutoTokenizer and AutoModelForSequenceClassification load it as it is, with its labels and the tokens
of its tokenizer.json; ORTModelForSequenceClassification loads both ONNX files, and gives torch's logits from the
float32 one and plain onnxruntime's from the int8 one. Prints one line per bundle; exits with 1 if any fails.
"""

import argparse
import json
import sys
import traceback
import warnings
from pathlib import Path

import onnxruntime
import torch
from optimum.onnxruntime import ORTModelForSequenceClassification
from tokenizers import Tokenizer
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BatchEncoding

TEXTS = ["a good film, and never dull!", "The plot is very poor; it was sad", "a dull scene and " * 30]
TOLERANCE = 1e-4


def check(folder: Path) -> str:
    """The measured differences in words; raises AssertionError, or what the libraries raise."""
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    task = manifest["task"]
    pairs = (TEXTS, TEXTS[::-1]) if len(task["text"]) == 2 else (TEXTS,)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.model_max_length == manifest["max_length"], "tokenizer: other length"
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    if task["labels"]:
        assert list(model.config.id2label.values()) == task["labels"], "config.json: other labels"

    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    plain.enable_truncation(manifest["max_length"])
    for row in zip(*pairs, strict=True):
        assert tokenizer(*row, truncation=True)["input_ids"] == plain.encode(*row).ids, "tokenizer: other tokens"

    # Row by row: an int8 graph scales its activations by the whole batch.
    rows = [tokenizer(*row, truncation=True, return_tensors="pt") for row in zip(*pairs, strict=True)]
    with torch.no_grad():
        expected = torch.cat([model(**row).logits for row in rows])
    words = []
    for name in ("model.onnx", "model_quantized.onnx"):
        runtime = ORTModelForSequenceClassification.from_pretrained(folder, subfolder="onnx", file_name=name)
        logits = torch.cat([runtime(**row).logits for row in rows])
        reference = expected if name == "model.onnx" else plain_logits(folder / "onnx" / name, rows)
        difference = (logits - reference).abs().max().item()
        assert difference <= TOLERANCE, f"{name}: logits differ by {difference:.2g}"
        words.append(f"{name} {difference:.1e}")
    return ", ".join(words) + f" (int8 from fp32 {(logits - expected).abs().max():.1e})"


def plain_logits(path: Path, rows: list[BatchEncoding]) -> torch.Tensor:
    session = onnxruntime.InferenceSession(path)
    names = [node.name for node in session.get_inputs()]
    feeds = [{name: row[name].numpy() for name in names} for row in rows]
    return torch.cat([torch.from_numpy(session.run(["logits"], feed)[0]) for feed in feeds])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs="+", type=Path)
    failed = False
    for folder in parser.parse_args().bundles:
        with warnings.catch_warnings(record=True):
            try:
                print(f"ok      {folder}: {check(folder)}")
            except (AssertionError, OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
                failed = True
                traceback.print_exc()
                print(f"FAILED  {folder}: {type(error).__name__}: {error}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
