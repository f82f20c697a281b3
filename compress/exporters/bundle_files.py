"""Write the files of an encoder into the folder of a bundle: weights, tokenizer, and
ONNX in fp32 and int8."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compress.data.encoder import TextEncoder, TokenizerSettings, tokenizer_name
from compress.data.task import Task
from compress.errors import BundleError
from compress.exporters.int8 import (
    quantize_dynamic,
    quantize_learned,
    read_learned_ranges,
)
from compress.exporters.manifest import BUNDLE_FILES
from compress.exporters.onnx import as_float32, makes_segments, to_onnx
from compress.models.checkpoints import save_checkpoint
from compress.slicing.shape import positions, token_rows


def check_parts(model: Any, tokenizer: Any, task: Task, max_length: int) -> None:
    """Raise BundleError unless model, tokenizer and task fit together, and DataError
    for a tokenizer that a bundle cannot hold; quick enough to call before training."""
    kind = type(model).__name__
    outputs = task.count_outputs(model.config)
    if outputs != task.outputs:
        raise BundleError(f"{kind}: {outputs} outputs; the task has {task.outputs}")
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise BundleError(
            f"{type(tokenizer).__name__}: cannot be saved as tokenizer.json, which the "
            "bundle needs; expected a fast tokenizer, as AutoTokenizer loads for all "
            "common models"
        )
    if not task.tokenwise:
        settings = TokenizerSettings.from_tokenizer(tokenizer)
        encoder = TextEncoder.from_backend(
            tokenizer.backend_tokenizer, settings, tokenizer_name(tokenizer)
        )
        encoder.check_truncation(max_length, pair=task.pair)
    size = token_rows(model)
    if size is not None and len(tokenizer) > size:
        raise BundleError(
            f"{kind}: embeds {size} tokens, the tokenizer has {len(tokenizer)}; they "
            "do not match"
        )
    limit = positions(model)
    if limit is not None and max_length > limit:
        raise BundleError(
            f"{kind}: max_length {max_length}; this model has {limit} positions"
        )


def write_encoder(
    folder: Path,
    model: Any,
    tokenizer: Any,
    max_length: int,
    *,
    task: Task | None = None,
    keep: Sequence[str] = (),
    opset: int = 17,
) -> None:
    """Write an encoder, which is not changed, in float32.

    task    of its head; None for an encoder without a head
    keep    the nodes of the graph that stay float32 in int8

    Raises ExportError as `to_onnx` does.
    """
    plain = as_float32(model)
    if task is not None:
        labels = (task.label,) if task.numeric else task.output_names
        plain.config.problem_type = task.problem
        plain.config.id2label = dict(enumerate(labels))
        plain.config.label2id = {label: index for index, label in enumerate(labels)}
        task.configure(plain.config, max_length)
    save_checkpoint(folder, plain, tokenizer, max_length)
    fp32 = folder / BUNDLE_FILES["fp32"]
    int8 = folder / BUNDLE_FILES["int8"]
    segments = makes_segments(tokenizer)
    to_onnx(plain, fp32, opset=opset, segments=segments, max_length=max_length)
    if learned := read_learned_ranges(plain.config):
        quantize_learned(fp32, int8, learned, keep=keep)
    else:
        quantize_dynamic(fp32, int8, keep=keep)
