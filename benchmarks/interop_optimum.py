#!/usr/bin/env python3
"""Do folders exported under transformers 5 load where optimum lives? (optimum-onnx needs transformers < 4.58.)

Run by the python of a venv of its own, without compress in it:

    python3 -m venv optimum
    optimum/bin/pip install torch==2.13.0
    optimum/bin/pip install transformers==4.57.6 optimum==2.1.0 optimum-onnx==0.1.0 onnxruntime==1.31.1 onnx==1.23.2
    optimum/bin/pip install sentence-transformers==6.2.0
    optimum/bin/python benchmarks/interop_optimum.py runs/sst2/bundle vectors/ gpt2/ ...

A bundle: AutoTokenizer and the Auto class of its head load it as it is, with its labels and the tokens of its
tokenizer.json; the ORTModel of its head loads both ONNX files, and gives torch's logits from the float32 one and plain
onnxruntime's from the int8 one. Embeddings: the same with ORTModelForFeatureExtraction, and sentence-transformers gives
the same vectors with backend="onnx" as with torch. A model that writes text: ORTModelForCausalLM or
ORTModelForSeq2SeqLM writes what transformers writes, greedily and with beams. Prints one line per folder; exits with 1
if any fails.
"""

import argparse
import json
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
import transformers
from optimum import onnxruntime as optimum
from tokenizers import Tokenizer
from transformers import AutoTokenizer, BatchEncoding

TEXTS = ["a good film, and never dull!", "The plot is very poor; it was sad", "a dull scene and " * 30]
TOLERANCE = 1e-4
HEADS = {
    "classification": "ModelForSequenceClassification",
    "multilabel": "ModelForSequenceClassification",
    "regression": "ModelForSequenceClassification",
    "tagging": "ModelForTokenClassification",
    "qa": "ModelForQuestionAnswering",
    "embedding": "Model",
    "encoder": "Model",
}
ORT_HEADS = {**HEADS, **dict.fromkeys(("embedding", "encoder"), "ModelForFeatureExtraction")}
OUTPUTS = ("logits", "start_logits", "end_logits", "last_hidden_state")
FILES = ("model.onnx", "model_quantized.onnx")


def check(folder: Path) -> str:
    """Describe the measured differences; raise AssertionError, or what the libraries raise."""
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    if manifest.get("kind") == "generative":
        return check_writer(folder)
    task = manifest["task"] or {"kind": "encoder", "labels": [], "text": ["text"]}
    words = check_outputs(folder, task["kind"], manifest["max_length"], task)
    return f"{words}, {check_vectors(folder)}" if task["kind"] == "embedding" else words


def check_outputs(folder: Path, kind: str, max_length: int, task: dict[str, Any]) -> str:
    pairs = (TEXTS, TEXTS[::-1]) if len(task["text"]) == 2 else (TEXTS,)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.model_max_length == max_length, "tokenizer: other length"
    model = getattr(transformers, f"Auto{HEADS[kind]}").from_pretrained(folder).eval()
    if task["labels"]:
        assert list(model.config.id2label.values()) == task["labels"], "config.json: other labels"

    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    plain.enable_truncation(max_length)
    for row in zip(*pairs, strict=True):
        assert tokenizer(*row, truncation=True)["input_ids"] == plain.encode(*row).ids, "tokenizer: other tokens"

    # Row by row: an int8 graph scales its activations by the whole batch.
    rows = [tokenizer(*row, truncation=True, return_tensors="pt") for row in zip(*pairs, strict=True)]
    with torch.no_grad():
        expected = flat([model(**row) for row in rows])
    words = []
    for name in FILES:
        head = getattr(optimum, f"ORT{ORT_HEADS[kind]}")
        runtime = head.from_pretrained(folder, subfolder="onnx", file_name=name)
        found = flat([runtime(**row) for row in rows])
        reference = expected if name == FILES[0] else plain_outputs(folder / "onnx" / name, rows)
        difference = (found - reference).abs().max().item()
        assert difference <= TOLERANCE, f"{name}: outputs differ by {difference:.2g}"
        words.append(f"{name} {difference:.1e}")
    return ", ".join(words) + f" (int8 from fp32 {(found - expected).abs().max():.1e})"


def flat(outputs: list[Any]) -> torch.Tensor:
    return torch.cat([output[name].flatten() for output in outputs for name in OUTPUTS if name in output])


def plain_outputs(path: Path, rows: list[BatchEncoding]) -> torch.Tensor:
    session = onnxruntime.InferenceSession(path)
    names = [node.name for node in session.get_inputs()]
    wanted = [node.name for node in session.get_outputs() if node.name in OUTPUTS]
    feeds = [{name: row[name].numpy() for name in names} for row in rows]
    return flat([dict(zip(wanted, map(torch.from_numpy, session.run(wanted, feed)), strict=True)) for feed in feeds])


def check_vectors(folder: Path) -> str:
    """sentence-transformers with torch, with ONNX, and what the file itself calls sentence_embedding."""
    from sentence_transformers import SentenceTransformer

    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS, batch_size=1)
    words = []
    for name in FILES:
        settings = {"file_name": f"onnx/{name}", "provider": "CPUExecutionProvider"}
        model = SentenceTransformer(str(folder), device="cpu", backend="onnx", model_kwargs=settings)
        found = model.encode(TEXTS, batch_size=1)
        cosine = (found * expected).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(expected, axis=1)
        if name == FILES[0]:
            assert np.abs(found - expected).max() <= TOLERANCE, f"{name}: other vectors: {cosine}"
        words.append(f"{name} cosine {cosine.min():.4f}")
    return "sentence-transformers " + ", ".join(words)


def check_writer(folder: Path) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pair = (folder / "onnx/encoder_model.onnx").is_file()
    kind = "ModelForSeq2SeqLM" if pair else "ModelForCausalLM"
    model = getattr(transformers, f"Auto{kind}").from_pretrained(folder).eval()
    names = {} if pair else {"file_name": FILES[0]}
    runtime = getattr(optimum, f"ORT{kind}").from_pretrained(folder, subfolder="onnx", **names)
    for text in TEXTS[:2]:
        row = dict(tokenizer(text, return_tensors="pt"))
        row.pop("token_type_ids", None)
        for beams in (1, 3):
            settings = {"max_new_tokens": 12, "do_sample": False, "num_beams": beams, "pad_token_id": 0}
            expected, found = (each.generate(**row, **settings).tolist() for each in (model, runtime))
            assert found == expected, f"{beams} beams: {found}, expected {expected}"
    return f"{kind} writes the same, greedily and with 3 beams"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    failed = False
    for folder in parser.parse_args().folders:
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
