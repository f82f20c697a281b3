"""Make of tokens the rows that a model reads: truncation, the special tokens around a text, padding, mask, token types.

Shapes: B texts or pairs, R texts (B; of pairs 2B: all first ones, then all second ones), T tokens of all texts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, ValueInfoProto, helper
from tokenizers import Tokenizer

from compress.data.task import Task
from compress.errors import ExportError
from compress.exporters.tokenizer.trie import DOMAINS, EVERYTHING, GraphBuilder
from compress.exporters.tokenizer.wordpiece import WordPiece


@dataclass(frozen=True)
class RowPart:
    """One part of a row: a special token, or all that is left of a text (`token` is None), and its token type."""

    token: int | None
    second: bool
    segment: int


@dataclass(frozen=True)
class RowTemplate:
    """Describes how rows are made: the parts of a row in order, the most tokens in it, what shorter rows are filled up
    with."""

    parts: tuple[RowPart, ...]
    max_length: int
    padding: int

    @property
    def pair(self) -> bool:
        return any(part.second for part in self.parts)

    @property
    def room(self) -> int:
        """Count the tokens of the texts that a row holds."""
        return self.max_length - sum(part.token is not None for part in self.parts)


def read_off(tokenizer: Tokenizer, *, pair: bool, max_length: int, padding: int) -> RowTemplate:
    """Read off a tokenizer that neither pads nor truncates what it puts around one text, or two.

    Raises ExportError where it gives an example no tokens, or leaves no room in `max_length`.
    """
    row = tokenizer.encode("a", "a") if pair else tokenizer.encode("a")
    parts: list[RowPart] = []
    for token, segment, source in zip(row.ids, row.type_ids, row.sequence_ids, strict=True):
        part = RowPart(token if source is None else None, source == 1, segment)
        if part.token is not None or part not in parts:
            parts.append(part)
    frame = RowTemplate(tuple(parts), max_length, padding)
    if sum(part.token is None for part in parts) != 1 + pair:
        raise ExportError("tokenizer.json: the text 'a' has no tokens; expected a tokenizer that reads any text")
    if frame.room < 1 + pair:
        raise ExportError(
            f"max_length {max_length}: no room for a text beside {max_length - frame.room} special tokens"
        )
    return frame


def rows(graph: GraphBuilder, frame: RowTemplate, tokens_T: str, lines_T: str, texts: str) -> dict[str, str]:
    """Write input_ids, attention_mask and token_type_ids (B, longest row) of tokens, the text of each, and (1,) R."""
    counts_R = graph.sums(graph.full(graph.op("Shape", tokens_T), 1), lines_T, texts)
    before_R = graph.op("CumSum", counts_R, graph.constant(0), exclusive=1)
    place_T = graph.op("Sub", graph.numbers(graph.size(tokens_T, 0)), graph.op("Gather", before_R, lines_T))
    kept = _truncate(graph, frame, counts_R)
    batch = graph.size(kept[0], 0)
    ends, starts, own = _offsets(graph, frame, kept)
    longest = graph.op("Reshape", graph.op("ReduceMax", ends, keepdims=0), graph.constant([1]))
    line_B = graph.op("Mul", graph.numbers(batch), longest)
    fits_T = graph.op("Less", place_T, graph.op("Gather", graph.op("Concat", *kept, axis=0), lines_T))
    begin_R = graph.op("Concat", *(graph.op("Add", line_B, start) for start in starts), axis=0)
    at_T = graph.op("Add", graph.op("Gather", begin_R, lines_T), place_T)
    places = [graph.kept(at_T, fits_T), *(graph.op("Add", line_B, at) for at, _ in own)]
    values = [graph.kept(tokens_T, fits_T), *(graph.full(batch, part.token or 0) for _, part in own)]
    shape = graph.op("Concat", batch, longest, axis=0)

    def placed(numbers: Sequence[str], filling: int) -> str:
        empty = graph.full(graph.op("Mul", batch, longest), filling)
        flat = graph.op(
            "ScatterElements", empty, graph.op("Concat", *places, axis=0), graph.op("Concat", *numbers, axis=0), axis=0
        )
        return graph.op("Reshape", flat, shape)

    segments = [part.segment for part in frame.parts if part.token is None]
    types_R = graph.op("Concat", *(graph.full(batch, segment) for segment in segments), axis=0)
    types = [graph.kept(graph.op("Gather", types_R, lines_T), fits_T)]
    types += [graph.full(batch, part.segment) for _, part in own]
    real = graph.op("Less", graph.numbers(longest), graph.op("Unsqueeze", ends, graph.constant([1])))
    return {
        "input_ids": placed(values, frame.padding),
        "attention_mask": graph.integers(real),
        "token_type_ids": placed(types, 0),
    }


def _offsets(
    graph: GraphBuilder, frame: RowTemplate, kept: Sequence[str]
) -> tuple[str, list[str], list[tuple[str, RowPart]]]:
    """Write (B,) tokens of each row; where in a row each text starts; where each special token stands."""
    offset = graph.op("Mul", kept[0], graph.constant(0))
    starts, own = {}, []
    for part in frame.parts:
        if part.token is None:
            starts[part.second] = offset
            offset = graph.op("Add", offset, kept[part.second])
        else:
            own.append((offset, part))
            offset = graph.op("Add", offset, graph.constant(1))
    return offset, [starts[second] for second in sorted(starts)], own


def _truncate(graph: GraphBuilder, frame: RowTemplate, counts_R: str) -> list[str]:
    """Write (B,) tokens kept of each text, of the first and of the second one.

    Of a pair too long for the row: half the room each, the longer text having the odd token; where one takes less than
    half, the other has what is left. So truncates tokenizers 0.23 with `longest_first`.
    """
    room = frame.room
    if not frame.pair:
        return [graph.op("Min", counts_R, graph.constant(room))]
    half = graph.op("Div", graph.op("Shape", counts_R), graph.constant([2]))
    one = graph.op("Slice", counts_R, graph.constant([0]), half)
    other = graph.op("Slice", counts_R, half, graph.constant([EVERYTHING]))
    swapped = graph.op("Greater", one, other)
    short, long = graph.op("Min", one, other), graph.op("Max", one, other)
    left = graph.op("Max", short, graph.op("Sub", graph.constant(room), short))
    both = graph.op("Greater", graph.op("Add", short, left), graph.constant(room))
    short = graph.op("Where", both, graph.constant(room // 2), short)
    long = graph.op("Where", both, graph.constant(room - room // 2), graph.op("Min", long, left))
    return [graph.op("Where", swapped, long, short), graph.op("Where", swapped, short, long)]


LIKELY = 0.5
"""multilabel: a label is given from this probability on."""


def answer(graph: GraphBuilder, task: Task, logits_BK: str) -> list[ValueInfoProto]:
    """Add the outputs for a task's kind; return what they are.

    classification  label (B,) string, score (B,), probabilities (B, K)
    multilabel      label (B, K) string: '' for those below 0.5; score (B,): the highest probability; probabilities
    regression, ranking    score (B,)
    """
    told = [helper.make_tensor_value_info("score", TensorProto.FLOAT, ["batch_size"])]
    if task.numeric:
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


PREFIX = "text"
"""The prefix of every name in the part that is added."""

ROWS = ("input_ids", "attention_mask", "token_type_ids")


def reader(words: WordPiece, frame: RowTemplate, like: onnx.ModelProto) -> onnx.ModelProto:
    """Build the graph from `text` (and `text_pair`), (batch,) strings, to input_ids, attention_mask and token_type_ids
    (batch, longest row), in the operator set and format version of the model `like`."""
    graph = GraphBuilder(PREFIX)
    inputs = [helper.make_tensor_value_info("text", TensorProto.STRING, ["batch_size"])]
    texts = "text"
    if frame.pair:
        inputs.append(helper.make_tensor_value_info("text_pair", TensorProto.STRING, ["batch_size"]))
        texts = graph.op("Concat", "text", "text_pair", axis=0)
    tokens, lines = words.write(graph, texts)
    for name, tensor in rows(graph, frame, tokens, lines, graph.size(texts, 0)).items():
        graph.named(name, tensor)
    shape = ["batch_size", "sequence_length"]
    outputs = [helper.make_tensor_value_info(name, TensorProto.INT64, shape) for name in ROWS]
    made = helper.make_graph(graph.nodes, "texts", inputs, outputs, graph.constants)
    known = DOMAINS | {each.domain: each.version for each in like.opset_import}
    operators = [helper.make_opsetid(domain, number) for domain, number in known.items()]
    return helper.make_model(made, opset_imports=operators, ir_version=like.ir_version)


def joined(read: onnx.ModelProto, model: onnx.ModelProto, task: Task) -> onnx.ModelProto:
    """Put the model behind its reader: texts in, answers out. What the model does not read of a row is not made.

    Raises ExportError for a model that reads more than a row, or gives neither `logits` nor `sentence_embedding`.
    """
    wanted = [node.name for node in model.graph.input]
    if unknown := set(wanted) - set(ROWS):
        raise ExportError(f"the model's file reads {', '.join(sorted(unknown))} too; expected {', '.join(ROWS)}")
    given = "sentence_embedding" if task.kind == "embedding" else "logits"
    if not any(node.name == given for node in model.graph.output):
        raise ExportError(f"the model's file gives no {given}; expected a head for {task.kind}")
    ends = GraphBuilder(f"{PREFIX}/answer")
    outputs = [] if task.kind == "embedding" else answer(ends, task, given)
    graph = helper.make_graph(
        [*_list_needed(read.graph, wanted), *model.graph.node, *ends.nodes],
        "texts_to_labels",
        list(read.graph.input),
        [*outputs, *(node for node in model.graph.output if node.name == given)],
        [*read.graph.initializer, *model.graph.initializer, *ends.constants],
    )
    return helper.make_model(graph, opset_imports=read.opset_import, ir_version=read.ir_version)


def _list_needed(graph: onnx.GraphProto, outputs: Sequence[str]) -> list[onnx.NodeProto]:
    """List the nodes that these outputs need; a node's subgraph needs what it names, too."""
    wanted, kept = set(outputs), []
    for node in reversed(graph.node):
        if wanted & set(node.output):
            kept.append(node)
            wanted |= set(node.input)
            bodies = [attribute.g for attribute in node.attribute if attribute.HasField("g")]
            wanted |= {name for body in bodies for inner in body.node for name in inner.input}
    return kept[::-1]
