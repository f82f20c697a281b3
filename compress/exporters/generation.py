"""Write and run bundles of generative models: decoders such as GPT-2 and Llama as one
file, T5 as two.

    GPT-2  onnx/model.onnx
    T5     onnx/encoder_model.onnx  onnx/decoder_model_merged.onnx
    and each in int8, as onnx/model_quantized.onnx

The names are the ones that optimum's ORTModelForCausalLM and ORTModelForSeq2SeqLM, and
transformers.js, expect. Loading a bundle and generating text import neither torch nor
transformers."""

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from compress import families
from compress.errors import ExportError
from compress.exporters.artifact import Bundle, writing
from compress.exporters.manifest import Manifest
from compress.exporters.text_generator import TextGenerator

GENERATION_TOLERANCE = 1e-3
"""The largest difference of the files' logits from the model's, relative to the largest
logit (or to 1)."""


def write(
    path: Path,
    *,
    model: Any,
    tokenizer: Any,
    max_length: int,
    card: Mapping[str, Any],
    opset: int = 17,
) -> Bundle:
    """Write a decoder or T5: weights, tokenizer, and the graphs in fp32 and int8,
    checked against the model.

    `card` has the fields of `Card`. Raises ExportError for another architecture, for a
    model of over 2 GB, and if the files do not compute the same as the model.
    """
    from compress.exporters.card import Card, file_card
    from compress.exporters.int8 import quantize_dynamic
    from compress.exporters.onnx import as_float32, check_size
    from compress.models.checkpoints import save_checkpoint

    manifest = Manifest.from_model(model, max_length, kind="generative")
    content = Card.parse(card)
    check_size(model, content.name)
    plain = as_float32(model)
    plain.set_attn_implementation("eager")
    about = ABOUT.format(kind=plain.config.model_type)
    page = file_card(
        content, "transformers", "text-generation", about=[about], load=LOAD
    )
    with writing(path, manifest, page) as folder:
        save_checkpoint(folder, plain, tokenizer, max_length)
        raw = folder / "raw"
        graphs = _trace(plain, raw, opset)
        _finish(raw, folder / "onnx", "")
        check(plain, folder)
        for graph in graphs:
            quantize_dynamic(
                raw / graph, raw / graph.replace(".onnx", "_quantized.onnx")
            )
        _finish(raw, folder / "onnx", "_quantized")
        shutil.rmtree(raw)
    return Bundle.load(path)


def _trace(plain: Any, folder: Path, opset: int) -> list[str]:
    from compress.exporters import decoders

    modules: dict[str, dict[str, Any]] = {
        "decoder": {"model.onnx": decoders.CausalDecoder},
        "encoder-decoder": {
            "encoder_model.onnx": decoders.SourceEncoder,
            "first.onnx": partial(decoders.T5Decoder, first=True),
            "following.onnx": partial(decoders.T5Decoder, first=False),
        },
    }
    stacks = families.find(plain.config.model_type).generates
    if not stacks:
        known = families.names("generates")
        raise ExportError(
            f"{type(plain).__name__}: cannot be exported as a generative model; "
            f"expected one of {known}"
        )
    folder.mkdir()
    for file, module in modules[stacks].items():
        decoders.trace(module(plain), folder / file, opset=opset)
    return list(modules[stacks])


def _finish(raw: Path, target: Path, suffix: str) -> None:
    """Write the graphs as they ship: T5's decoders merged into one file, shared
    matrices stored once."""
    import onnx

    from compress.exporters.decoders import merge_decoders, tie_matrices
    from compress.exporters.session import read_model

    target.mkdir(exist_ok=True)
    if (raw / f"first{suffix}.onnx").is_file():
        decoder = merge_decoders(
            read_model(raw / f"first{suffix}.onnx"),
            read_model(raw / f"following{suffix}.onnx"),
        )
        onnx.save_model(
            tie_matrices(decoder), target / f"decoder_model_merged{suffix}.onnx"
        )
    for name in ("model", "encoder_model"):
        if (raw / f"{name}{suffix}.onnx").is_file():
            onnx.save_model(
                tie_matrices(read_model(raw / f"{name}{suffix}.onnx")),
                target / f"{name}{suffix}.onnx",
            )


def check(model: Any, folder: Path) -> float:
    """Compute the largest difference between the folder's fp32 logits, computed in
    several steps, and the model's, computed in one; relative to the largest logit (or
    to 1). Raises ExportError if it exceeds GENERATION_TOLERANCE."""
    import torch

    seeded = torch.Generator().manual_seed(0)
    generator = TextGenerator.open(folder, "fp32")
    ids = torch.randint(model.config.vocab_size, (1, 9), generator=seeded)
    source = torch.randint(model.config.vocab_size, (1, 6), generator=seeded)
    with torch.no_grad():
        out = (
            model(ids)
            if generator.encoder is None
            else model(input_ids=source, decoder_input_ids=ids)
        )
    expected = out.logits[0].numpy()
    past = generator.begin(source[0].tolist())
    found = []
    for part in ids[0].split([5, 1, 2, 1]):
        logits, past = generator.step(past, part.tolist())
        found.append(logits)
    difference = float(np.abs(np.concatenate(found) - expected).max())
    largest = float(np.abs(expected).max())
    if not difference <= GENERATION_TOLERANCE * max(
        1.0, largest
    ):  # so that NaN fails too
        raise ExportError(
            f"{type(model).__name__}: the ONNX files' logits differ from the model's "
            f"by {difference:.2g} where the largest is {largest:.2g}; the weights may "
            "hold NaN, or this architecture cannot be traced"
        )
    return difference / max(1.0, largest)


ABOUT = """{kind}, as ONNX with the keys and values of the tokens before as inputs and outputs. Made with compress. optimum's
ORTModelForCausalLM or ORTModelForSeq2SeqLM (`subfolder="onnx"`) and transformers.js load this folder."""  # noqa: E501
LOAD = """from compress import Bundle

Bundle.load(".").complete(["a text"])  # int8, without torch"""
