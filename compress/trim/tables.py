"""The rows of tables that a trimmed vocabulary leaves: in a model of transformers, and in its ONNX files.

An ONNX file keeps everything else: how it was fused, quantised and tuned. Its rows are taken over as they are, so that
its logits do not change at all.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper

from compress.errors import ExportError
from compress.export.changed import save_changed
from compress.export.session import read_model


@torch.no_grad()
def cut_model(model: Any, kept: Sequence[int]) -> None:
    """Leaves, in place, the rows `kept` (ascending) of the word embedding and of an output layer over the vocabulary,
    and numbers the special tokens of the config anew."""
    rows = torch.tensor(kept)
    new = {old: index for index, old in enumerate(kept)}
    words, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    padding = words.padding_idx
    tables = [words.weight]
    if outputs is not None:
        bias = getattr(outputs, "bias", None)
        tables += [table for table in (outputs.weight, bias) if table is not None and table is not words.weight]
    for table in tables:
        table.data[: len(rows)] = table.data[rows.to(table.device)]
    model.resize_token_embeddings(len(rows))
    model.get_input_embeddings().padding_idx = None if padding is None else new[padding]
    for config in (model.config, getattr(model, "generation_config", None)):
        for name, number in special_ids(config).items():
            setattr(config, name, new[number] if isinstance(number, int) else [new[each] for each in number])


def special_ids(config: Any) -> dict[str, int | list[int]]:
    """The fields of a config that hold token ids: pad_token_id, ..."""
    found = {} if config is None else vars(config)
    return {
        name.removeprefix("_"): value
        for name, value in found.items()
        if name.endswith("_token_id") and isinstance(value, int | list)
    }


def pinned(model: Any) -> set[int]:
    """Ids that the model itself knows: of special tokens; and, where positions are counted from behind the padding id
    (RoBERTa), all up to that one, so that it stays."""
    ids: set[int] = set()
    for config in (model.config, getattr(model, "generation_config", None)):
        for value in special_ids(config).values():
            ids.update([value] if isinstance(value, int) else value)
    if (padding := model.get_input_embeddings().padding_idx) is not None:
        ids.add(padding)
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and (first := getattr(module, "padding_idx", None)) is not None:
            ids.update(range(first + 1))
    return {number for number in ids if number < model.get_input_embeddings().num_embeddings}


def cut_file(source: Path, target: Path, kept: Sequence[int]) -> None:
    """Writes the ONNX file `source` with these rows alone in every table that `input_ids` looks up.

    Raises ExportError where it looks none up.
    """
    model = read_model(source)
    tables = _looked_up(model.graph)
    if not tables:
        raise ExportError(f"{source}: no table is looked up by input_ids; expected a file of a bundle")
    for tensor in model.graph.initializer:
        if tensor.name in tables:
            rows = numpy_helper.to_array(tensor)[np.asarray(kept)]
            tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(rows), tensor.name))
    del model.graph.value_info[:]  # shapes of before
    save_changed(model, target)


def _looked_up(graph: onnx.GraphProto) -> set[str]:
    """The constants with a row per token: those that nodes reading the ids read too, whole or taken apart for being
    quantised, with as many rows as the largest of them."""
    constants = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    made = {node.output[0]: node for node in graph.node}
    ids = {"input_ids"}
    found: dict[str, int] = {}
    for node in graph.node:
        if node.op_type in ("Cast", "Identity") and node.input[0] in ids:
            ids.add(node.output[0])
        elif node.op_type in ("Gather", "GatherBlockQuantized", "EmbedLayerNormalization") and ids & set(node.input):
            read = list(node.input[2:3] if node.op_type == "EmbedLayerNormalization" else node.input)
            for name in read:
                if name in made and made[name].op_type in ("DequantizeLinear", "Cast", "Identity"):
                    read += made[name].input
            found |= {name: constants[name][0] for name in read if constants.get(name)}
    rows = max(found.values(), default=0)
    return {name for name, size in found.items() if size == rows}
