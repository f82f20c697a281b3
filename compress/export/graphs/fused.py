"""Attention as onnxruntime's own optimiser fuses it, for the race: it is not always faster (docs/export-speed.md)."""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, numpy_helper

from compress.export.graphs.attention import collapse
from compress.export.graphs.net import Net
from compress.export.session import metadata

MICROSOFT = "com.microsoft"


def attention_fused(model: ModelProto, *, norms: bool) -> ModelProto | None:
    """The float32 model after `onnxruntime.transformers.optimizer`, with its SkipLayerNormalization where `norms`. None
    where no attention is of the form that can be fused."""
    cores = collapse(Net(model))
    if not cores:
        return None
    from onnxruntime.transformers.fusion_options import FusionOptions
    from onnxruntime.transformers.optimizer import optimize_model

    options = FusionOptions("bert")
    options.enable_skip_layer_norm = norms
    options.enable_bias_skip_layer_norm = norms
    options.enable_embed_layer_norm = False
    heads, width = cores[0].heads, cores[0].heads * cores[0].size
    with tempfile.TemporaryDirectory() as scratch, _silent():
        path = Path(scratch) / "divided.onnx"
        onnx.save_model(_divided(model), path)
        found = optimize_model(
            str(path), "bert", num_heads=heads, hidden_size=width, optimization_options=options, opt_level=0
        )
    fused: ModelProto = found.model
    fused.producer_name, fused.producer_version = model.producer_name, model.producer_version
    if MICROSOFT not in {each.domain for each in fused.opset_import}:
        fused.opset_import.append(onnx.helper.make_opsetid(MICROSOFT, 1))
    onnx.helper.set_model_props(fused, metadata(model))
    return fused


def _divided(model: ModelProto) -> ModelProto:
    """Scores divided by the root of the size instead of multiplied by its inverse: the one form the optimiser knows."""
    made = ModelProto()
    made.CopyFrom(model)
    graph = made.graph
    writers = {name: node for node in graph.node for name in node.output}
    constants = {tensor.name: tensor for tensor in graph.initializer}
    constants |= {node.output[0]: node.attribute[0].t for node in graph.node if node.op_type == "Constant"}
    for node in [node for node in graph.node if node.op_type == "Softmax"]:
        added = writers.get(node.input[0])
        scaled = added and writers.get(added.input[0])
        if scaled is None or scaled.op_type != "Mul" or scaled.input[1] not in constants:
            continue
        inverse = 1.0 / numpy_helper.to_array(constants[scaled.input[1]])
        name = f"{scaled.name}/inverse"
        graph.initializer.append(numpy_helper.from_array(np.asarray(inverse, np.float32), name))
        scaled.op_type = "Div"
        scaled.input[1] = name
    return made


@contextmanager
def _silent() -> Iterator[None]:
    """The optimiser logs what it thinks of the model's producer, and of tables' sizes."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
