"""From logits to what an app shows: the label as a text, its score, all probabilities.

Shapes: B texts, K outputs of the model.
"""

import numpy as np
from onnx import TensorProto, ValueInfoProto, helper

from compress.data.task import Task
from compress.export.text.nodes import Graph

LIKELY = 0.5
"""multilabel: a label is given from this probability on."""


def answer(graph: Graph, task: Task, logits_BK: str) -> list[ValueInfoProto]:
    """Adds the outputs for a task's kind, and says what they are.

    classification  label (B,) string, score (B,), probabilities (B, K)
    multilabel      label (B, K) string: '' for those below 0.5; score (B,): the highest probability; probabilities
    regression      score (B,)
    """
    told = [helper.make_tensor_value_info("score", TensorProto.FLOAT, ["batch_size"])]
    if task.kind == "regression":
        graph.named("score", graph.flat(logits_BK))
        return told
    several = task.kind == "multilabel"
    probabilities = graph.op("Sigmoid", logits_BK) if several else graph.op("Softmax", logits_BK, axis=1)
    best = graph.op("ArgMax", logits_BK, axis=1, keepdims=1)
    graph.named("score", graph.flat(graph.op("GatherElements", probabilities, best, axis=1)))
    graph.named("probabilities", probabilities)
    labels = graph.constant(list(task.labels))
    if several:
        likely = graph.op("GreaterOrEqual", probabilities, graph.constant(np.array(LIKELY, np.float32)))
        graph.named("label", graph.op("Where", likely, labels, graph.constant([""])))
    else:
        graph.named("label", graph.op("Gather", labels, graph.flat(best)))
    shape: list[str | int] = ["batch_size", len(task.labels)]
    return [
        helper.make_tensor_value_info("label", TensorProto.STRING, shape if several else shape[:1]),
        *told,
        helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, shape),
    ]
