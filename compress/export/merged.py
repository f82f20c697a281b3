"""Two decoders in one file: `use_cache_branch` says which of them runs, and what both hold is held once."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

SWITCH = "use_cache_branch"


def merged(first: onnx.ModelProto, following: onnx.ModelProto) -> onnx.ModelProto:
    """One model with the inputs of both and the outputs of `first`; the switch is a bool (1,).

    `following` gives back what it was given for an output of `first` that it does not have itself.
    """
    weights: dict[str, onnx.TensorProto] = {}
    then, otherwise = (
        _branch(model.graph, prefix, weights) for model, prefix in ((following, "following"), (first, "first"))
    )
    inputs = {each.name: each for model in (first, following) for each in model.graph.input}
    switch = helper.make_tensor_value_info(SWITCH, TensorProto.BOOL, [1])
    names = [each.name for each in first.graph.output]
    node = helper.make_node("If", [SWITCH], names, "choose", then_branch=then, else_branch=otherwise)
    graph = helper.make_graph(
        [node], "merged", [*inputs.values(), switch], list(first.graph.output), list(weights.values())
    )
    versions = {each.domain: each for model in (first, following) for each in model.opset_import}
    made = helper.make_model(graph, opset_imports=list(versions.values()), ir_version=first.ir_version)
    helper.set_model_props(made, {each.key: each.value for each in first.metadata_props})
    made.producer_name, made.producer_version = first.producer_name, first.producer_version
    return made


def _branch(graph: onnx.GraphProto, prefix: str, weights: dict[str, onnx.TensorProto]) -> onnx.GraphProto:
    """The graph as a branch: its weights are added to `weights`, under a name that tells their content."""
    told = {each.name: _content(each) for each in graph.initializer}
    for each in graph.initializer:
        if told[each.name] not in weights:
            kept = onnx.TensorProto()
            kept.CopyFrom(each)
            kept.name = told[each.name]
            weights[kept.name] = kept
    outer = {each.name: each.name for each in graph.input} | {"": ""}
    names = outer | told
    nodes = [_renamed(node, names, prefix) for node in graph.node]
    outputs = []
    for each in graph.output:
        output = onnx.ValueInfoProto()
        output.CopyFrom(each)
        source = names.get(each.name, f"{prefix}/{each.name}")
        if source in outer.values() or source in weights:  # a branch gives what it made itself
            nodes.append(helper.make_node("Identity", [source], [f"{prefix}/{each.name}/same"]))
            source = f"{prefix}/{each.name}/same"
        output.name = source
        outputs.append(output)
    return helper.make_graph(nodes, prefix, [], outputs)


def _renamed(node: onnx.NodeProto, names: Mapping[str, str], prefix: str) -> onnx.NodeProto:
    changed = onnx.NodeProto()
    changed.CopyFrom(node)
    changed.name = f"{prefix}{node.name}" if node.name.startswith("/") else f"{prefix}/{node.name}"
    changed.input[:] = [names.get(name, f"{prefix}/{name}") for name in node.input]
    changed.output[:] = [f"{prefix}/{name}" if name else "" for name in node.output]
    return changed


def _content(tensor: onnx.TensorProto) -> str:
    """A name of the tensor's values, type and shape."""
    values = numpy_helper.to_array(tensor)
    digest = hashlib.sha256(values.tobytes()).hexdigest()[:24]
    return f"weight/{tensor.data_type}/{'x'.join(map(str, tensor.dims))}/{digest}"


def tied(model: onnx.ModelProto, *, smallest: int = 2**16) -> onnx.ModelProto:
    """The model with matrices that are another's transpose read from it, as a head is from the embedding it shares.

    onnxruntime turns them when it opens the file. Changes `model`; matrices of fewer values than `smallest` stay.
    """
    tables = [each for each in model.graph.initializer if len(each.dims) == 2 and np.prod(each.dims) >= smallest]
    arrays = {each.name: numpy_helper.to_array(each) for each in tables}
    known = {_digest(array): name for name, array in arrays.items()}
    turned: dict[str, str] = {}
    for name, array in reversed(arrays.items()):  # the table comes before the head that is made of it
        other = known.get(_digest(array.T))
        if other is not None and other != name and other not in turned:
            turned[name] = other
    kept = [each for each in model.graph.initializer if each.name not in turned]
    nodes = [
        helper.make_node("Transpose", [other], [name], f"tied/{name}", perm=[1, 0]) for name, other in turned.items()
    ]
    nodes = [*nodes, *model.graph.node]
    del model.graph.initializer[:], model.graph.node[:]
    model.graph.initializer.extend(kept)
    model.graph.node.extend(nodes)
    return model


def _digest(array: "NDArray[Any]") -> str:
    return f"{array.shape}{hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()}"
