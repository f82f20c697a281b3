"""The two graphs that are written: one that reads texts, and the same with a model behind it."""

from collections.abc import Sequence

import onnx
from onnx import TensorProto, helper

from compress.data.task import Task
from compress.errors import ExportError
from compress.export.text import frame as frames
from compress.export.text.answer import answer
from compress.export.text.frame import Frame
from compress.export.text.nodes import DOMAINS, Graph
from compress.export.text.wordpiece import WordPiece

PREFIX = "text"
"""Of every name in the part that is added."""

ROWS = ("input_ids", "attention_mask", "token_type_ids")


def reader(words: WordPiece, frame: Frame, like: onnx.ModelProto) -> onnx.ModelProto:
    """`text` (and `text_pair`), (batch,) strings -> input_ids, attention_mask, token_type_ids (batch, longest row), in
    the operator set and format version of the model `like`."""
    graph = Graph(PREFIX)
    inputs = [helper.make_tensor_value_info("text", TensorProto.STRING, ["batch_size"])]
    texts = "text"
    if frame.pair:
        inputs.append(helper.make_tensor_value_info("text_pair", TensorProto.STRING, ["batch_size"]))
        texts = graph.op("Concat", "text", "text_pair", axis=0)
    tokens, lines = words.write(graph, texts)
    for name, tensor in frames.rows(graph, frame, tokens, lines, graph.size(texts, 0)).items():
        graph.named(name, tensor)
    shape = ["batch_size", "sequence_length"]
    outputs = [helper.make_tensor_value_info(name, TensorProto.INT64, shape) for name in ROWS]
    made = helper.make_graph(graph.nodes, "texts", inputs, outputs, graph.constants)
    return helper.make_model(made, opset_imports=_operators(like), ir_version=like.ir_version)


def joined(read: onnx.ModelProto, model: onnx.ModelProto, task: Task) -> onnx.ModelProto:
    """The model behind its reader: texts in, answers out. What the model does not read of a row is not made.

    Raises ExportError for a model that reads more than a row, or gives no `logits`.
    """
    wanted = [node.name for node in model.graph.input]
    if unknown := set(wanted) - set(ROWS):
        raise ExportError(f"the model's file reads {', '.join(sorted(unknown))} too; expected {', '.join(ROWS)}")
    if not any(node.name == "logits" for node in model.graph.output):
        raise ExportError("the model's file gives no logits; expected a head for classification or regression")
    ends = Graph(f"{PREFIX}/answer")
    outputs = answer(ends, task, "logits")
    graph = helper.make_graph(
        [*_needed(read.graph, wanted), *model.graph.node, *ends.nodes],
        "texts_to_labels",
        list(read.graph.input),
        [*outputs, *(node for node in model.graph.output if node.name == "logits")],
        [*read.graph.initializer, *model.graph.initializer, *ends.constants],
    )
    return helper.make_model(graph, opset_imports=read.opset_import, ir_version=read.ir_version)


def _needed(graph: onnx.GraphProto, outputs: Sequence[str]) -> list[onnx.NodeProto]:
    """The nodes that these outputs need; a node's subgraph needs what it names, too."""
    wanted, kept = set(outputs), []
    for node in reversed(graph.node):
        if wanted & set(node.output):
            kept.append(node)
            wanted |= set(node.input)
            bodies = [attribute.g for attribute in node.attribute if attribute.HasField("g")]
            wanted |= {name for body in bodies for inner in body.node for name in inner.input}
    return kept[::-1]


def _operators(like: onnx.ModelProto) -> list[onnx.OperatorSetIdProto]:
    known = {each.domain: each.version for each in like.opset_import}
    return [helper.make_opsetid(domain, number) for domain, number in (DOMAINS | known).items()]
