"""Make a model's input rows of tokens: truncation, special tokens, padding, mask, token
types.

Shapes: B texts or pairs, R texts (B; of pairs 2B: all first ones, then all second
ones), T tokens of all texts.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import TensorProto, helper

from compress.data.encoder import TextEncoder
from compress.data.task import Task
from compress.data.windows import WORD_PATTERN, Side
from compress.errors import ExportError
from compress.exporters.session import input_names
from compress.exporters.tokenizer import forms
from compress.exporters.tokenizer.bytelevel import ByteLevel
from compress.exporters.tokenizer.trie import DOMAINS, EVERYTHING, GraphBuilder
from compress.exporters.tokenizer.unigram import Unigram
from compress.exporters.tokenizer.wordpiece import (
    SURROGATES,
    UNICODE,
    Range,
    Tokens,
    WordPiece,
    characters,
    cut,
    join_ranges,
)
from compress.kinds import Kind, find


@dataclass(frozen=True)
class RowPart:
    """One part of a row: a special token, or the tokens of a text (`token` is None),
    and its token type."""

    token: int | None
    second: bool
    segment: int


@dataclass(frozen=True)
class RowTemplate:
    """Describe rows.

    parts       in order
    max_length  the most tokens
    padding     the id of the padding token
    task        the kind of task
    side        the end of a long text that is cut off
    prompt      what is put before each text
    """

    parts: tuple[RowPart, ...]
    max_length: int
    padding: int
    task: type[Task]
    side: Side = "right"
    prompt: str = ""

    @property
    def pair(self) -> bool:
        return any(part.second for part in self.parts)

    @property
    def room(self) -> int:
        """Return how many tokens of texts a row holds."""
        return self.max_length - sum(part.token is not None for part in self.parts)

    @property
    def question(self) -> int | None:
        """Return the most tokens of a question; None for other texts."""
        return self.task.longest_question(self.max_length)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Name the outputs on characters."""
        return self.task.graph_spans


def read_template(
    encoder: TextEncoder, *, pair: bool, max_length: int, kind: Kind = "classification"
) -> RowTemplate:
    """Read the special tokens around one text, or two, and how a long text is cut off.

    Raises ExportError where an example has no tokens, or `max_length` leaves no room
    for a text.
    """
    tokenizer = encoder.backend
    settings = encoder.settings
    tokenizer.no_truncation()
    row = tokenizer.encode("a", "a") if pair else tokenizer.encode("a")
    parts: list[RowPart] = []
    for token, segment, source in zip(
        row.ids, row.type_ids, row.sequence_ids, strict=True
    ):
        part = RowPart(token if source is None else None, source == 1, segment)
        if part.token is not None or part not in parts:
            parts.append(part)
    padding = settings.pad_token_id or 0  # which the mask hides
    frame = RowTemplate(
        tuple(parts), max_length, padding, find(kind), settings.truncation_side
    )
    if sum(part.token is None for part in parts) != 1 + pair:
        raise ExportError(
            "tokenizer.json: the text 'a' has no tokens; expected a tokenizer that "
            "reads any text"
        )
    if frame.room < 1 + (pair if frame.question is None else frame.question):
        raise ExportError(
            f"max_length {max_length}: no room for a text beside "
            f"{max_length - frame.room} special tokens"
        )
    return frame


def rows(
    graph: GraphBuilder, frame: RowTemplate, tokens: Tokens, texts: str
) -> dict[str, str]:
    """Add input_ids, attention_mask and token_type_ids (B, longest row) for the tokens
    of `texts` (1,) texts, and the offsets (B, longest row, 2) of tokens with spans, in
    pairs only of the second text; (0, 0) elsewhere."""
    tokens_T = tokens.ids_T
    lines_T = tokens.lines_T
    counts_R = graph.sums(graph.full(graph.op("Shape", tokens_T), 1), lines_T, texts)
    before_R = graph.op("CumSum", counts_R, graph.constant(0), exclusive=1)
    place_T = graph.op(
        "Sub",
        graph.numbers(graph.size(tokens_T, 0)),
        graph.op("Gather", before_R, lines_T),
    )
    kept = _truncate(graph, frame, counts_R)
    kept_T = graph.op("Gather", graph.op("Concat", *kept, axis=0), lines_T)
    if frame.side == "left":  # the first tokens of a long text would be before its row
        cut_T = graph.op("Sub", graph.op("Gather", counts_R, lines_T), kept_T)
        place_T = graph.op("Sub", place_T, cut_T)
        fits_T = graph.op("GreaterOrEqual", place_T, graph.constant(0))
    else:
        fits_T = graph.op("Less", place_T, kept_T)
    batch = graph.size(kept[0], 0)
    ends, starts, own = _offsets(graph, frame, kept)
    if not own:  # a text without tokens is a padding token, as in `Encoder.encode`
        ends = graph.op("Max", ends, graph.constant(1))
    longest = graph.op(
        "Reshape", graph.op("ReduceMax", ends, keepdims=0), graph.constant([1])
    )
    line_B = graph.op("Mul", graph.numbers(batch), longest)
    begin_R = graph.op(
        "Concat", *(graph.op("Add", line_B, start) for start in starts), axis=0
    )
    at_T = graph.op("Add", graph.op("Gather", begin_R, lines_T), place_T)
    places = [
        graph.select(at_T, fits_T),
        *(graph.op("Add", line_B, at) for at, _ in own),
    ]
    values = [
        graph.select(tokens_T, fits_T),
        *(graph.full(batch, part.token or 0) for _, part in own),
    ]
    shape = graph.op("Concat", batch, longest, axis=0)

    def placed(numbers: Sequence[str], filling: int) -> str:
        empty = graph.full(graph.op("Mul", batch, longest), filling)
        flat = graph.op(
            "ScatterElements",
            empty,
            graph.op("Concat", *places, axis=0),
            graph.op("Concat", *numbers, axis=0),
            axis=0,
        )
        return graph.op("Reshape", flat, shape, allowzero=1)

    if any(part.segment for part in frame.parts):
        segments = [part.segment for part in frame.parts if part.token is None]
        types_R = graph.op(
            "Concat", *(graph.full(batch, segment) for segment in segments), axis=0
        )
        types = [graph.select(graph.op("Gather", types_R, lines_T), fits_T)]
        types_BL = placed(
            [*types, *(graph.full(batch, part.segment) for _, part in own)], 0
        )
    else:
        types_BL = graph.full(shape)
    real = graph.op(
        "Less", graph.numbers(longest), graph.op("Unsqueeze", ends, graph.constant([1]))
    )
    made = {
        "input_ids": placed(values, frame.padding),
        "attention_mask": graph.integers(real),
        "token_type_ids": types_BL,
    }
    if not frame.outputs:
        return made
    spans = tokens.spans_T2
    if frame.pair:
        second_T = graph.integers(graph.op("GreaterOrEqual", lines_T, batch))
        spans = graph.op("Mul", spans, graph.columns(second_T))
    # the first row is for other tokens
    table = graph.op("Pad", spans, graph.constant([1, 0, 0, 0]))
    numbers_T = graph.select(
        graph.op("Add", graph.numbers(graph.size(tokens_T, 0)), graph.constant([1])),
        fits_T,
    )
    offsets = graph.op(
        "Gather", table, placed([numbers_T, *(graph.full(batch) for _ in own)], 0)
    )
    if len(frame.outputs) == 1:
        return made | {"offsets": offsets}
    edges = (graph.constant([edge]) for edge in (0, 2, 4))
    begin, middle, end = edges
    last = graph.constant([2])
    return made | {
        "offsets": graph.op("Slice", offsets, begin, middle, last),
        "words": graph.op("Slice", offsets, middle, end, last),
    }


def _offsets(
    graph: GraphBuilder, frame: RowTemplate, kept: Sequence[str]
) -> tuple[str, list[str], list[tuple[str, RowPart]]]:
    """Add the number of tokens of each row (B,), the places where its texts start, and
    those of its special tokens."""
    offset = graph.op("Mul", kept[0], graph.constant(0))
    starts = {}
    own = []
    for part in frame.parts:
        if part.token is None:
            starts[part.second] = offset
            offset = graph.op("Add", offset, kept[part.second])
        else:
            own.append((offset, part))
            offset = graph.op("Add", offset, graph.constant(1))
    return offset, [starts[second] for second in sorted(starts)], own


def _truncate(graph: GraphBuilder, frame: RowTemplate, counts_R: str) -> list[str]:
    """Add the number of tokens (B,) that are kept of the first text, and of the second
    one.

    Of a pair that is too long each text gets half the room, the longer one the odd
    token; where one needs less than half, the other gets the rest. tokenizers 0.23
    truncates like this with `longest_first`.
    """
    room = frame.room
    if not frame.pair:
        return [graph.op("Min", counts_R, graph.constant(room))]
    half = graph.op("Div", graph.op("Shape", counts_R), graph.constant([2]))
    one = graph.op("Slice", counts_R, graph.constant([0]), half)
    other = graph.op("Slice", counts_R, half, graph.constant([EVERYTHING]))
    # like the first window of `windows.read_questions`, on the left like the last
    if frame.question is not None:
        one = graph.op("Min", one, graph.constant(frame.question))
        return [one, graph.op("Min", other, graph.op("Sub", graph.constant(room), one))]
    swapped = graph.op("Greater", one, other)
    short = graph.op("Min", one, other)
    long = graph.op("Max", one, other)
    left = graph.op("Max", short, graph.op("Sub", graph.constant(room), short))
    both = graph.op("Greater", graph.op("Add", short, left), graph.constant(room))
    short = graph.op("Where", both, graph.constant(room // 2), short)
    long = graph.op(
        "Where", both, graph.constant(room - room // 2), graph.op("Min", long, left)
    )
    return [
        graph.op("Where", swapped, long, short),
        graph.op("Where", swapped, short, long),
    ]


PREFIX = "text"
"""The prefix of all names that are added to the model's graph."""

Pieces = WordPiece | ByteLevel | Unigram
MODELS: Mapping[str, type[Pieces]] = {
    "WordPiece": WordPiece,
    "BPE": ByteLevel,
    "Unigram": Unigram,
}
"""The parts of tokenizers that can be a graph, by the type of model that tokenizer.json
names."""

ROW_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def reader(words: Pieces, frame: RowTemplate, like: onnx.ModelProto) -> onnx.ModelProto:
    """Build the graph from `text` (and `text_pair`), (batch,) strings, to input_ids,
    attention_mask and token_type_ids (batch, longest row), in the operator set and
    format version of the model `like`."""
    graph = GraphBuilder(PREFIX)
    inputs = [helper.make_tensor_value_info("text", TensorProto.STRING, ["batch_size"])]
    texts = "text"
    if frame.pair:
        inputs.append(
            helper.make_tensor_value_info(
                "text_pair", TensorProto.STRING, ["batch_size"]
            )
        )
        texts = graph.op("Concat", "text", "text_pair", axis=0)
    if "words" in frame.outputs:
        tokens = _tokenize_words(graph, words, texts)
    else:
        tokens = words.write(
            graph, texts, prompt=frame.prompt, spans=bool(frame.outputs)
        )
    for name, tensor in rows(graph, frame, tokens, graph.size(texts, 0)).items():
        graph.name_output(name, tensor)
    shape = ["batch_size", "sequence_length"]
    outputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, shape)
        for name in ROW_INPUTS
    ]
    outputs += [
        helper.make_tensor_value_info(name, TensorProto.INT64, [*shape, 2])
        for name in frame.outputs
    ]
    made = helper.make_graph(graph.nodes, "texts", inputs, outputs, graph.constants)
    known = DOMAINS | {each.domain: each.version for each in like.opset_import}
    operators = [
        helper.make_opsetid(domain, number) for domain, number in known.items()
    ]
    return helper.make_model(made, opset_imports=operators, ir_version=like.ir_version)


def _tokenize_words(graph: GraphBuilder, pieces: Pieces, texts_R: str) -> Tokens:
    """Add the tokens of the words of each text, split by `windows.WORDS`, every word
    tokenised by itself. Spans are (T, 4): the characters of the token, and those of the
    word that begins with it, (0, 0) at its other tokens."""
    letters = characters(_list_matches(r"\w"))
    spaces = characters(_list_matches(r"\s"))
    pattern = WORD_PATTERN.pattern.replace(r"[^\w\s]", f"[^{letters}{spaces}]").replace(
        r"\w", f"[{letters}]"
    )
    pattern = pattern.replace(r"\S", f"[^{spaces}]")
    parts_RP = cut(graph, texts_R, f"{pattern}|[{spaces}]+", "")
    # one at least
    parts = graph.op("Concat", graph.flat(parts_RP), graph.constant([""]), axis=0)
    tokens = pieces.write(graph, parts, spans=True, words=True)
    sizes = graph.op("Slice", tokens.sizes_R, graph.constant([0]), graph.constant([-1]))
    sizes_RP = graph.op("Reshape", sizes, graph.op("Shape", parts_RP), allowzero=1)
    starts_RP = graph.op("CumSum", sizes_RP, graph.constant(1), exclusive=1)
    starts_T = graph.op("Gather", graph.flat(starts_RP), tokens.lines_T)
    ends_T = graph.op(
        "Add", starts_T, graph.op("Gather", graph.flat(sizes_RP), tokens.lines_T)
    )
    before_T = graph.op("Concat", graph.constant([-1]), tokens.lines_T, axis=0)
    before_T = graph.op("Slice", before_T, graph.constant([0]), graph.constant([-1]))
    first_T = graph.integers(graph.op("Less", before_T, tokens.lines_T))
    word_T2 = graph.op("Mul", graph.columns(starts_T, ends_T), graph.columns(first_T))
    spans_T2 = graph.op("Add", tokens.spans_T2, graph.columns(starts_T))
    width = graph.op("Max", graph.size(parts_RP, 1), graph.constant([1]))
    lines_T = graph.op("Div", tokens.lines_T, width)
    return Tokens(tokens.ids_T, lines_T, graph.op("Concat", spans_T2, word_T2, axis=1))


def _list_matches(pattern: str) -> tuple[Range, ...]:
    """List the characters of a class of Python's regular expressions; RE2's classes are
    ASCII only."""
    every = "".join(chr(code) for code in range(UNICODE) if code not in SURROGATES)
    return join_ranges([ord(character) for character in re.findall(pattern, every)])


def join_reader(
    read: onnx.ModelProto, model: onnx.ModelProto, task: Task, threshold: float
) -> onnx.ModelProto:
    """Join the model to its reader: texts in, answers out. Parts of a row that the
    model does not read are left out.

    threshold  qa, see `Predictor`

    Raises ExportError for a model with other inputs, or without the outputs of its kind
    of task.
    """
    wanted = input_names(model)
    if unknown := set(wanted) - set(ROW_INPUTS):
        raise ExportError(
            f"the model's file reads {', '.join(sorted(unknown))} too; expected "
            f"{', '.join(ROW_INPUTS)}"
        )
    given = task.graph_outputs
    if missing := set(given) - {node.name for node in model.graph.output}:
        raise ExportError(
            f"the model's file has no {', '.join(sorted(missing))}; expected a head "
            f"for {task.kind}"
        )
    ends = GraphBuilder(f"{PREFIX}/answer")
    outputs = getattr(forms, task.form)(ends, task, threshold)
    spans = [node for node in read.graph.output if node.name not in ROW_INPUTS]
    graph = helper.make_graph(
        [
            *_list_needed(read.graph, [*wanted, *(node.name for node in spans)]),
            *model.graph.node,
            *ends.nodes,
        ],
        "texts_to_labels",
        list(read.graph.input),
        [
            *outputs,
            *(node for node in model.graph.output if node.name in given),
            *spans,
        ],
        [*read.graph.initializer, *model.graph.initializer, *ends.constants],
    )
    return helper.make_model(
        graph, opset_imports=read.opset_import, ir_version=read.ir_version
    )


def _list_needed(
    graph: onnx.GraphProto, outputs: Sequence[str]
) -> list[onnx.NodeProto]:
    """List the nodes that these outputs depend on, also through subgraphs."""
    wanted = set(outputs)
    kept = []
    for node in reversed(graph.node):
        if wanted & set(node.output):
            kept.append(node)
            wanted |= set(node.input)
            bodies = [
                attribute.g for attribute in node.attribute if attribute.HasField("g")
            ]
            wanted |= {
                name for body in bodies for inner in body.node for name in inner.input
            }
    return kept[::-1]
