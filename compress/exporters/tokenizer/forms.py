"""Add a model's answer to the graph of a text file: one function for each form of
answer (`Task.form`).

Shapes: B texts or pairs, L tokens of a row, K labels.
"""

import math

import numpy as np
from onnx import TensorProto

from compress.data.task import Task
from compress.evaluation.qa import LONGEST_ANSWER
from compress.exporters.tokenizer.graph import (
    Dimensions,
    GraphBuilder,
    Value,
    arange,
    concat,
    op,
    where,
)

BATCH = "batch_size"


def vector(graph: GraphBuilder, task: Task, threshold: float) -> None:
    """Add nothing: the model's output is the answer."""


def number(graph: GraphBuilder, task: Task, threshold: float) -> None:
    """Add score (B,)."""
    score_B = Value(graph, "logits").flat()
    graph.output(score_B, TensorProto.FLOAT, [BATCH], name="score")


def label(graph: GraphBuilder, task: Task, threshold: float) -> None:
    """Add label (B,) string, score (B,), probabilities (B, K)."""
    logits_BK = Value(graph, "logits")
    probabilities_BK = op("Softmax", logits_BK, axis=1)
    best_B1, highest_B1 = _choose(logits_BK, probabilities_BK, axis=1)
    label_B = best_B1.flat().look_up(list(task.labels))
    shape: Dimensions = [BATCH]
    labels = len(task.labels)
    score_B = highest_B1.flat()
    _output_labels(graph, label_B, score_B, probabilities_BK, shape, labels=labels)


def labels(graph: GraphBuilder, task: Task, threshold: float) -> None:
    """Add label (B, K) string, '' for labels whose logit is not above 0, as in
    `tasks.multilabel`; score (B,), the highest probability; probabilities (B, K)."""
    logits_BK = Value(graph, "logits")
    probabilities_BK = op("Sigmoid", logits_BK)
    _, highest_B1 = _choose(logits_BK, probabilities_BK, axis=1)
    label_BK = where(logits_BK > np.array(0, np.float32), list(task.labels), [""])
    shape: Dimensions = [BATCH, len(task.labels)]
    graph.output(label_BK, TensorProto.STRING, shape, name="label")
    score_B = highest_B1.flat()
    graph.output(score_B, TensorProto.FLOAT, [BATCH], name="score")
    graph.output(probabilities_BK, TensorProto.FLOAT, shape, name="probabilities")


def words(graph: GraphBuilder, task: Task, threshold: float) -> None:
    """Add the outputs of `label` for every token; label '' where no word begins."""
    logits_BLK = Value(graph, "logits")
    probabilities_BLK = op("Softmax", logits_BLK, axis=2)
    best_BL1, highest_BL1 = _choose(logits_BLK, probabilities_BLK, axis=2)
    score_BL = op("Squeeze", highest_BL1, [2])
    begins_BL = _covers(Value(graph, "words"))
    best_BL = where(begins_BL, op("Squeeze", best_BL1, [2]), len(task.labels))
    label_BL = best_BL.look_up([*task.labels, ""])
    shape = [BATCH, "sequence_length"]
    labels = len(task.labels)
    _output_labels(graph, label_BL, score_BL, probabilities_BLK, shape, labels=labels)


def _choose(logits: Value, probabilities: Value, *, axis: int) -> tuple[Value, Value]:
    """Add the index of the highest logit, and its probability."""
    best = op("ArgMax", logits, axis=axis, keepdims=1)
    return best, op("GatherElements", probabilities, best, axis=axis)


def _output_labels(
    graph: GraphBuilder,
    label: Value,
    score: Value,
    probabilities: Value,
    shape: Dimensions,
    *,
    labels: int,
) -> None:
    graph.output(label, TensorProto.STRING, shape, name="label")
    graph.output(score, TensorProto.FLOAT, shape, name="score")
    shape = [*shape, labels]
    graph.output(probabilities, TensorProto.FLOAT, shape, name="probabilities")


def _covers(spans_BL2: Value) -> Value:
    """Add (B, L) bool: whether these spans cover characters, and are not (0, 0)."""
    return spans_BL2.take(1, axis=2) > 0


def span(graph: GraphBuilder, task: Task, threshold: float) -> None:
    """Add the outputs for questions, as in `data.answers.Answer`: answer (B, 2), the
    first character of the context and the end, (0, 0) for no answer, and score
    (B,)."""
    starts_BL = Value(graph, "start_logits")
    length = starts_BL.size(1)
    at_L = arange(length)
    offsets_BL2 = Value(graph, "offsets")
    context_BL = _covers(offsets_BL2)
    possible_BL = context_BL | at_L.equals(0)
    never = np.array(-np.inf, np.float64)
    doubles = [
        each.cast(TensorProto.DOUBLE)
        for each in (starts_BL, Value(graph, "end_logits"))
    ]
    shares = [
        op("Softmax", where(possible_BL, each, never), axis=1) for each in doubles
    ]
    first_BL, last_BL = (where(context_BL, each, never) for each in doubles)
    sums_BLL = first_BL.unsqueeze(2) + last_BL.unsqueeze(1)
    width_LL = at_L - at_L.unsqueeze(1)
    short_LL = (width_LL < LONGEST_ANSWER) & (width_LL >= 0)
    flat = op("Reshape", where(short_LL, sums_BLL, never), [0, -1])
    best_B1 = op("ArgMax", flat, axis=1, keepdims=1)
    edges = [best_B1 // length, best_B1 % length]
    if math.isfinite(threshold):
        none_B1 = op("Add", *(op("Slice", each, [0], [1], [1]) for each in doubles))
        margin_B1 = none_B1 - op("GatherElements", flat, best_B1, axis=1)
        given_B1 = (margin_B1 <= np.array(threshold)).integers()
        edges = [edge * given_B1 for edge in edges]
    answer = [
        op("GatherElements", offsets_BL2.take(side, axis=2), edge, axis=1)
        for side, edge in enumerate(edges)
    ]
    found = [
        op("GatherElements", share, edge, axis=1)
        for share, edge in zip(shares, edges, strict=True)
    ]
    graph.output(concat(*answer, axis=1), shape=[BATCH, 2], name="answer")
    score_B = op("Mul", *found).flat().cast(TensorProto.FLOAT)
    graph.output(score_B, TensorProto.FLOAT, [BATCH], name="score")
