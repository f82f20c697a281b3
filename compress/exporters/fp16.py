"""Convert to float16: half the size, for GPUs, WebGPU and phones that compute in it; on
an x86 CPU it saves space, not time.

Nodes whose values come near float16's limit of 65504 on trial rows, such as
MobileBERT's residual stream, stay float32. The accuracy of the file cannot be measured
on a CPU, where onnxruntime computes most of it in float32; so the check is the fp32
graph with every intermediate result rounded to float16, as a GPU stores it.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from compress.errors import ExportError
from compress.exporters.int8 import PRECISION_KEY
from compress.exporters.rewrite.graph import attribute
from compress.exporters.session import (
    Feeds,
    create_session,
    difference,
    expose,
    onnx_run,
    read_model,
    save_changed,
    session_options,
)

LARGEST_FLOAT16 = 65504
FLOAT16_SAFE = LARGEST_FLOAT16 / 4
"""The largest value that is stored in float16: a quarter of its limit, as real texts
may exceed the trial rows."""

FP16_TOLERANCE = 0.02
"""The largest allowed difference of the logits from fp32's, relative to the largest
logit (or to 1); float16 usually differs by a few thousandths."""


def to_float16(source: Path, target: Path, rows: Sequence[Feeds]) -> tuple[str, ...]:
    """Write the fp32 ONNX file `source` in float16 to `target`; ids in and logits out
    keep their types. Return the names of the nodes that stay float32.

    Raises ExportError for a file that cannot be read, or whose logits in float16 differ
    from the fp32 ones.
    """
    from onnxruntime.transformers.float16 import convert_float_to_float16

    model = read_model(source)
    sizes = _sizes(model, source, rows)
    kept = tuple(
        node.name
        for node in model.graph.node
        if any(
            sizes.get(name, 0.0) > FLOAT16_SAFE for name in (*node.input, *node.output)
        )
    )
    rounded = _open(_round(model, sizes, kept), source)
    found = difference(onnx_run(source), lambda row: rounded.run(None, dict(row)), rows)
    if not found.relative <= FP16_TOLERANCE:  # so that NaN fails too
        raise ExportError(
            f"{source}: in float16 the logits differ from fp32's by "
            f"{found.largest:.2g} where the largest is {found.logit:.2g}; expected at "
            f"most {FP16_TOLERANCE:g} of it. Use int8 or w8 instead"
        )
    small = convert_float_to_float16(
        copy.deepcopy(model), keep_io_types=True, node_block_list=list(kept)
    )
    del small.graph.value_info[:]  # of float32 where casts were put in
    _join_casts(small.graph)
    save_changed(small, target, {PRECISION_KEY: "fp16"})
    return kept


def _join_casts(graph: onnx.GraphProto) -> None:
    """Let nodes that stay float32 read each other's results as they are: the converter
    puts a cast to float16, which may overflow, and one back between them."""
    halves = {
        node.output[0]: node.input[0]
        for node in graph.node
        if attribute(node, "to") == TensorProto.FLOAT16
    }
    for node in graph.node:
        if attribute(node, "to") == TensorProto.FLOAT:
            node.input[0] = halves.get(node.input[0], node.input[0])


def _sizes(
    model: onnx.ModelProto, source: Path, rows: Sequence[Feeds]
) -> dict[str, float]:
    """Find the largest |value| of each float32 intermediate result, over the rows."""
    names = [name for node in model.graph.node for name in node.output if name]
    session = _open(expose(model, names), source)
    order = [each.name for each in session.get_outputs()]
    sizes: dict[str, float] = {}
    for row in rows:
        for name, value in zip(order, session.run(None, dict(row)), strict=True):
            if value.dtype == np.float32 and value.size:
                sizes[name] = max(sizes.get(name, 0.0), float(np.abs(value).max()))
    return sizes


def _round(
    model: onnx.ModelProto, sizes: Mapping[str, float], kept: Sequence[str]
) -> onnx.ModelProto:
    """Round weights and results of the float32 graph to float16, except those of the
    nodes `kept`."""
    rounded = copy.deepcopy(model)
    graph = rounded.graph
    stay = set(kept)
    free = {name for node in graph.node if node.name in stay for name in node.input}
    for weight in graph.initializer:
        if weight.data_type == TensorProto.FLOAT and weight.name not in free:
            exact = onnx.numpy_helper.to_array(weight)
            # values beyond float16, such as float32's lowest in a mask, become its
            # largest, as in the converter
            values = np.where(
                np.isfinite(exact),
                np.clip(exact, -LARGEST_FLOAT16, LARGEST_FLOAT16),
                exact,
            )
            values = values.astype(np.float16).astype(np.float32)
            weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
    outputs = {each.name for each in graph.output}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        nodes.append(node)
        if node.name in stay:
            continue
        for index, name in enumerate(node.output):
            if name in sizes and name not in outputs:
                node.output[index] = f"{name}.exact"
                nodes.append(
                    helper.make_node(
                        "Cast",
                        [f"{name}.exact"],
                        [f"{name}.half"],
                        to=TensorProto.FLOAT16,
                    )
                )
                nodes.append(
                    helper.make_node(
                        "Cast", [f"{name}.half"], [name], to=TensorProto.FLOAT
                    )
                )
    del graph.node[:]
    graph.node.extend(nodes)
    return rounded


def _open(model: onnx.ModelProto, source: Path) -> onnxruntime.InferenceSession:
    """Open the model as it is: optimising would remove the casts, or intermediate
    results."""
    options = session_options(1, {})
    options.graph_optimization_level = (
        onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    )
    return create_session(model.SerializeToString(), options, source)
