"""Add a model's answer to the graph of a text file: a function for each form that an
answer has, which a task names (`Task.form`). Each returns the types of its outputs.

Shapes: B texts or pairs, L tokens of a row, K labels.
"""

import math
from collections.abc import Sequence

import numpy as np
from onnx import TensorProto, ValueInfoProto, helper

from compress.data.task import Task
from compress.evaluation.qa import LONGEST_ANSWER
from compress.exporters.tokenizer.trie import GraphBuilder

BATCH = "batch_size"
LIKELY_LABEL = 0.5
"""multilabel: the least probability of a label that is returned."""


def vector(graph: GraphBuilder, task: Task, threshold: float) -> list[ValueInfoProto]:
    """Add nothing: the model's output is the answer."""
    return []


def number(graph: GraphBuilder, task: Task, threshold: float) -> list[ValueInfoProto]:
    """Add score (B,)."""
    graph.name_output("score", graph.flat("logits"))
    return [_describe("score", BATCH)]


def label(graph: GraphBuilder, task: Task, threshold: float) -> list[ValueInfoProto]:
    """Add label (B,) string, score (B,), probabilities (B, K)."""
    probabilities = graph.op("Softmax", "logits", axis=1)
    best, highest = _choose(graph, probabilities, axis=1)
    graph.name_output("score", graph.flat(highest))
    graph.name_output("probabilities", probabilities)
    names = graph.constant(list(task.labels))
    graph.name_output("label", graph.op("Gather", names, graph.flat(best)))
    return _describe_labels(task, [BATCH], several=False)


def labels(graph: GraphBuilder, task: Task, threshold: float) -> list[ValueInfoProto]:
    """Add label (B, K) string, '' for those below LIKELY_LABEL; score (B,), the highest
    probability; probabilities (B, K)."""
    probabilities = graph.op("Sigmoid", "logits")
    _, highest = _choose(graph, probabilities, axis=1)
    graph.name_output("score", graph.flat(highest))
    graph.name_output("probabilities", probabilities)
    names = graph.constant(list(task.labels))
    least = graph.constant(np.array(LIKELY_LABEL, np.float32))
    likely = graph.op("GreaterOrEqual", probabilities, least)
    graph.name_output("label", graph.op("Where", likely, names, graph.constant([""])))
    return _describe_labels(task, [BATCH], several=True)


def words(graph: GraphBuilder, task: Task, threshold: float) -> list[ValueInfoProto]:
    """Add what `label` adds for every token; label '' where no word begins."""
    probabilities = graph.op("Softmax", "logits", axis=2)
    best, highest = _choose(graph, probabilities, axis=2)
    graph.name_output("score", graph.op("Squeeze", highest, graph.constant([2])))
    graph.name_output("probabilities", probabilities)
    names = graph.constant([*task.labels, ""])
    found = graph.op("Squeeze", best, graph.constant([2]))
    nothing = graph.constant(len(task.labels))
    found = graph.op("Where", _covers(graph, "words"), found, nothing)
    graph.name_output("label", graph.op("Gather", names, found))
    return _describe_labels(task, [BATCH, "sequence_length"], several=False)


def _choose(graph: GraphBuilder, probabilities: str, *, axis: int) -> tuple[str, str]:
    """Add the number of the highest logit, and its probability."""
    best = graph.op("ArgMax", "logits", axis=axis, keepdims=1)
    return best, graph.op("GatherElements", probabilities, best, axis=axis)


def _describe(
    name: str, *shape: str | int, kind: int = TensorProto.FLOAT
) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, list(shape))


def _describe_labels(
    task: Task, shape: Sequence[str], *, several: bool
) -> list[ValueInfoProto]:
    whole: list[str | int] = [*shape, len(task.labels)]
    return [
        _describe("label", *whole[: None if several else -1], kind=TensorProto.STRING),
        _describe("score", *shape),
        _describe("probabilities", *whole),
    ]


def _covers(graph: GraphBuilder, spans_BL2: str) -> str:
    """Add (B, L) bool: whether these spans cover characters, and are not (0, 0)."""
    ends = graph.op("Gather", spans_BL2, graph.constant(1), axis=2)
    return graph.op("Greater", ends, graph.constant(0))


def span(graph: GraphBuilder, task: Task, threshold: float) -> list[ValueInfoProto]:
    """Add the outputs for questions, as in `data.answers.Answer`: answer (B, 2), the
    first character of the context and the end, (0, 0) for no answer, and score
    (B,)."""
    length = graph.size("start_logits", 1)
    at = graph.numbers(length)
    context = _covers(graph, "offsets")
    possible = graph.op("Or", context, graph.op("Equal", at, graph.constant(0)))
    never = graph.constant(np.array(-np.inf, np.float64))
    doubles = [
        graph.op("Cast", name, to=TensorProto.DOUBLE)
        for name in ("start_logits", "end_logits")
    ]
    shares = [
        graph.op("Softmax", graph.op("Where", possible, each, never), axis=1)
        for each in doubles
    ]
    first, last = (graph.op("Where", context, each, never) for each in doubles)
    sums = graph.op(
        "Add",
        graph.op("Unsqueeze", first, graph.constant([2])),
        graph.op("Unsqueeze", last, graph.constant([1])),
    )
    width = graph.op("Sub", at, graph.op("Unsqueeze", at, graph.constant([1])))
    short = graph.op("Less", width, graph.constant(LONGEST_ANSWER))
    forward = graph.op("GreaterOrEqual", width, graph.constant(0))
    sums = graph.op("Where", graph.op("And", short, forward), sums, never)
    flat = graph.op("Reshape", sums, graph.constant([0, -1]))
    best = graph.op("ArgMax", flat, axis=1, keepdims=1)
    edges = [graph.op("Div", best, length), graph.op("Mod", best, length)]
    if math.isfinite(threshold):
        none = graph.op(
            "Add",
            *(
                graph.op(
                    "Slice",
                    each,
                    graph.constant([0]),
                    graph.constant([1]),
                    graph.constant([1]),
                )
                for each in doubles
            ),
        )
        margin = graph.op("Sub", none, graph.op("GatherElements", flat, best, axis=1))
        given = graph.integers(
            graph.op("LessOrEqual", margin, graph.constant(np.array(threshold)))
        )
        edges = [graph.op("Mul", edge, given) for edge in edges]
    starts = graph.op("Gather", "offsets", graph.constant(0), axis=2)
    ends = graph.op("Gather", "offsets", graph.constant(1), axis=2)
    pairs = zip((starts, ends), edges, strict=True)
    graph.name_output(
        "answer",
        graph.op(
            "Concat",
            *(graph.op("GatherElements", *pair, axis=1) for pair in pairs),
            axis=1,
        ),
    )
    found = [
        graph.op("GatherElements", share, edge, axis=1)
        for share, edge in zip(shares, edges, strict=True)
    ]
    graph.name_output(
        "score",
        graph.op("Cast", graph.flat(graph.op("Mul", *found)), to=TensorProto.FLOAT),
    )
    return [
        helper.make_tensor_value_info("answer", TensorProto.INT64, ["batch_size", 2]),
        helper.make_tensor_value_info("score", TensorProto.FLOAT, ["batch_size"]),
    ]
