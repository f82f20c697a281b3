"""What is exported says the same elsewhere: in transformers here, in optimum, sentence-transformers and transformers.js
where they are. These live in environments of their own, which two variables name:

COMPRESS_OPTIMUM_PYTHON   a python with optimum-onnx and sentence-transformers (see benchmarks/interop_optimum.py)
COMPRESS_NODE_MODULES     a folder in whose node_modules @huggingface/transformers is (see benchmarks/interop_js.py)
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import (
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

from compress.data.task import Task
from compress.exporters import generation
from compress.exporters.artifact import Bundle
from compress.kinds import find
from compress.models.sentence_settings import SentenceSettings
from tests import tiny

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PAIR = ("text", "text_pair")
TASKS = {
    "labels": Task("classification", ("text",), "label", ("no", "yes", "maybe"), "accuracy"),
    "pairs": Task("classification", PAIR, "label", ("no", "yes", "maybe"), "accuracy"),
    "number": Task("regression", PAIR, "score", (), "pearson"),
    "tags": Task("tagging", ("words",), "tags", ("O", "B-film", "I-film"), "f1"),
    "spans": Task("qa", ("question", "context"), "answers", (), "f1"),
}
TOKENS = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0, "decoder_start_token_id": 0}
VOCABULARY = len(tiny.SPECIAL) + len(tiny.WORDS)


def headed(task: Task) -> Any:
    """A model for the task: DistilBERT, which has no segments, for tags; BERT otherwise."""
    heads = {"tagging": AutoModelForTokenClassification, "qa": AutoModelForQuestionAnswering}
    if task.kind in heads:
        return tiny.model(
            "distilbert" if task.kind == "tagging" else "bert", head=heads[task.kind], labels=task.outputs
        )
    return tiny.bert(task.outputs)


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A bundle of each task with labels, numbers or spans."""
    place = tmp_path_factory.mktemp("shipped")
    for name, task in TASKS.items():
        tiny.bundle(place / name, model=headed(task), task=task, max_length=64)
    return sorted(place.iterdir())


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A folder of each kind of model whose answers are no labels."""
    place = tmp_path_factory.mktemp("others")
    parts = {"tokenizer": tiny.tokenizer(), "max_length": 64}
    settings = SentenceSettings.pooled(32, normalise=True)
    encoder = tiny.with_settings(tiny.model("bert", head=AutoModel), settings)
    tiny.bundle(place / "vectors", model=encoder, task=find("embedding").from_settings(settings), max_length=64)
    torch.manual_seed(0)
    gpt2 = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=96, **TOKENS)
    generation.write(place / "gpt2", model=GPT2LMHeadModel(gpt2).eval(), card={"name": "gpt2"}, **parts)
    t5 = T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, **TOKENS)
    generation.write(place / "t5", model=T5ForConditionalGeneration(t5).eval(), card={"name": "t5"}, **parts)
    return sorted(place.iterdir())


def test_transformers_computes_the_same(shipped: list[Path]) -> None:
    for folder in shipped:
        bundle = Bundle.load(folder)
        model = getattr(transformers, bundle.task.head).from_pretrained(folder).eval()
        texts = ("a good film", "the plot was dull") if bundle.task.pair else ("a good film",)
        row = AutoTokenizer.from_pretrained(folder)(*texts, return_tensors="pt")
        with torch.no_grad():
            out = model(**row)
        expected = torch.stack([out.start_logits, out.end_logits], -1) if "start_logits" in out else out.logits
        plain = {name: tensor[0].tolist() for name, tensor in row.items()}
        found = bundle.logits([plain], precision="fp32")
        np.testing.assert_allclose(found.reshape(expected.shape), expected, atol=1e-5)


def message(command: list[str], count: int) -> None:
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("ok ") == count
    assert "FAILED" not in result.stdout


@pytest.mark.slow
def test_optimum_and_sentence_transformers_compute_the_same(shipped: list[Path], others: list[Path]) -> None:
    python = os.environ.get("COMPRESS_OPTIMUM_PYTHON")
    if not python:
        pytest.skip("COMPRESS_OPTIMUM_PYTHON names no python with optimum-onnx, which needs an environment of its own")
    message([python, str(BENCHMARKS / "interop_optimum.py"), *map(str, shipped + others)], len(shipped + others))


@pytest.mark.slow
def test_transformers_js_computes_the_same(shipped: list[Path], others: list[Path]) -> None:
    modules = os.environ.get("COMPRESS_NODE_MODULES")
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    if not modules:
        pytest.skip("COMPRESS_NODE_MODULES names no folder with @huggingface/transformers")
    command = [sys.executable, str(BENCHMARKS / "interop_js.py"), "--modules", modules, *map(str, shipped + others)]
    message(command, 2 * len(shipped + others))


def test_a_tokenizer_makes_what_the_model_reads(shipped: list[Path]) -> None:
    """DistilBERT with BERT's tokenizer: `model(**tokenizer(text))` is what everybody writes."""
    reads = {folder.name: AutoTokenizer.from_pretrained(folder).model_input_names for folder in shipped}
    assert reads["tags"] == ["input_ids", "attention_mask"]
    assert reads["labels"] == ["input_ids", "token_type_ids", "attention_mask"]
