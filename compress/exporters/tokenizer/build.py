"""Make a model's input rows of tokens: truncation, special tokens, padding, mask, token
types.

Shapes: B texts or pairs, R texts (B; for pairs 2B: all first texts, then all second
ones), T tokens of all texts.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import onnx
from onnx import TensorProto, helper

from compress.data.encoder import TextEncoder
from compress.data.task import Task
from compress.data.windows import SPACED_LETTER, Side, word_pattern
from compress.errors import ExportError
from compress.exporters.session import input_names
from compress.exporters.tokenizer import forms
from compress.exporters.tokenizer.bytelevel import ByteLevel
from compress.exporters.tokenizer.graph import (
    DOMAINS,
    GraphBuilder,
    Value,
    arange,
    columns,
    concat,
    full,
    maximum,
    minimum,
    op,
    where,
)
from compress.exporters.tokenizer.unigram import Unigram
from compress.exporters.tokenizer.wordpiece import (
    SURROGATES,
    UNICODE,
    CodeRange,
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
    side        the end at which a long text is truncated
    prompt      the text that is put before each text
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
        """Return the number of text tokens that a row holds."""
        return self.max_length - sum(part.token is not None for part in self.parts)

    @property
    def question(self) -> int | None:
        """Return the most tokens of a question; None for other texts."""
        return self.task.longest_question(self.max_length)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Name the outputs about characters."""
        return self.task.graph_spans


def read_template(
    encoder: TextEncoder, *, pair: bool, max_length: int, kind: Kind = "classification"
) -> RowTemplate:
    """Read the special tokens around one or two texts, and how long texts are
    truncated.

    Raises ExportError if an example has no tokens, or `max_length` leaves no room for a
    text.
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


def rows(frame: RowTemplate, tokens: Tokens, texts: Value) -> dict[str, Value]:
    """Add input_ids, attention_mask and token_type_ids (B, longest row) for the tokens
    of `texts` (1,) texts, and the offsets (B, longest row, 2) of tokens with spans, in
    pairs only of the second text; (0, 0) elsewhere."""
    tokens_T = tokens.ids_T
    lines_T = tokens.lines_T
    counts_R = full(tokens_T.shape(), 1).sums(lines_T, texts)
    before_R = counts_R.cumsum(exclusive=True)
    place_T = arange(tokens_T.size(0)) - before_R[lines_T]
    kept = _truncate(frame, counts_R)
    kept_T = concat(*kept)[lines_T]
    if frame.side == "left":  # the first tokens of a long text would be before its row
        cut_T = counts_R[lines_T] - kept_T
        place_T = place_T - cut_T
        fits_T = place_T >= 0
    else:
        fits_T = place_T < kept_T
    batch = kept[0].size(0)
    ends, starts, own = _offsets(frame, kept)
    if not own:  # a text without tokens is a padding token, as in `Encoder.encode`
        ends = maximum(ends, 1)
    longest = op("Reshape", ends.max(), [1])
    line_B = arange(batch) * longest
    begin_R = concat(*(line_B + start for start in starts))
    at_T = begin_R[lines_T] + place_T
    places = [at_T.select(fits_T), *(line_B + at for at, _ in own)]
    shape = concat(batch, longest)

    def place(numbers_T: Value, special: Sequence[int], filling: int = 0) -> Value:
        """Place one number per token, and per special token of the row, in rows."""
        numbers = [numbers_T.select(fits_T), *(full(batch, each) for each in special)]
        empty = full(batch * longest, filling)
        return empty.scatter(concat(*places), concat(*numbers)).reshape(shape)

    types_BL = full(shape)
    if any(part.segment for part in frame.parts):
        segments = [part.segment for part in frame.parts if part.token is None]
        types_R = concat(*(full(batch, segment) for segment in segments))
        types_BL = place(types_R[lines_T], [part.segment for _, part in own])
    real = arange(longest) < ends.unsqueeze(1)
    made = {
        "input_ids": place(
            tokens_T, [part.token or 0 for _, part in own], frame.padding
        ),
        "attention_mask": real.integers(),
        "token_type_ids": types_BL,
    }
    spans = tokens.spans_T2
    if spans is None:
        return made
    if frame.pair:
        spans = spans * columns((lines_T >= batch).integers())
    # the first row is for all other tokens
    table = op("Pad", spans, [1, 0, 0, 0])
    numbers_T = arange(tokens_T.size(0)) + 1
    offsets = table[place(numbers_T, [0] * len(own))]
    if len(frame.outputs) == 1:
        return made | {"offsets": offsets}
    return made | {
        "offsets": op("Slice", offsets, [0], [2], [2]),
        "words": op("Slice", offsets, [2], [4], [2]),
    }


def _offsets(
    frame: RowTemplate, kept: Sequence[Value]
) -> tuple[Value, list[Value], list[tuple[Value, RowPart]]]:
    """Add the number of tokens of each row (B,), and the positions of its texts and of
    its special tokens."""
    offset = kept[0] * 0
    starts = {}
    own = []
    for part in frame.parts:
        if part.token is None:
            starts[part.second] = offset
            offset = offset + kept[part.second]
        else:
            own.append((offset, part))
            offset = offset + 1
    return offset, [starts[second] for second in sorted(starts)], own


def _truncate(frame: RowTemplate, counts_R: Value) -> list[Value]:
    """Add the numbers of tokens (B,) that are kept of the first and of the second text.

    In a pair that is too long, each text gets half the room, the longer one the odd
    token; if one needs less than half, the other gets the rest. tokenizers 0.23
    truncates like this with `longest_first`.
    """
    room = frame.room
    if not frame.pair:
        return [minimum(counts_R, room)]
    half = counts_R.shape() // 2
    one = counts_R[:half]
    other = counts_R[half:]
    # like the first window of `windows.read_questions`, on the left like the last
    if frame.question is not None:
        one = minimum(one, frame.question)
        return [one, minimum(other, room - one)]
    swapped = one > other
    short = minimum(one, other)
    long = maximum(one, other)
    left = maximum(short, room - short)
    both = short + left > room
    short = where(both, room // 2, short)
    long = where(both, room - room // 2, minimum(long, left))
    return [where(swapped, long, short), where(swapped, short, long)]


PREFIX = "text"
"""The prefix of all names that are added to the model's graph."""

Pieces = WordPiece | ByteLevel | Unigram
MODELS: Mapping[str, type[Pieces]] = {
    "WordPiece": WordPiece,
    "BPE": ByteLevel,
    "Unigram": Unigram,
}
"""The classes that build a tokenizer's graph, by the model type in tokenizer.json."""

ROW_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def reader(words: Pieces, frame: RowTemplate, like: onnx.ModelProto) -> onnx.ModelProto:
    """Build the graph from `text` (and `text_pair`), (batch,) strings, to input_ids,
    attention_mask and token_type_ids (batch, longest row), in the operator set and
    format version of the model `like`."""
    graph = GraphBuilder(PREFIX)
    texts = graph.input("text", TensorProto.STRING, ["batch_size"])
    if frame.pair:
        other = graph.input("text_pair", TensorProto.STRING, ["batch_size"])
        texts = concat(texts, other)
    if "words" in frame.outputs:
        tokens = _tokenize_words(words, texts)
    else:
        tokens = words.write(texts, prompt=frame.prompt, spans=bool(frame.outputs))
    for name, value in rows(frame, tokens, texts.size(0)).items():
        shape: list[str | int] = ["batch_size", "sequence_length"]
        if name in frame.outputs:
            shape.append(2)
        graph.output(value, shape=shape, name=name)
    known = DOMAINS | {each.domain: each.version for each in like.opset_import}
    operators = [
        helper.make_opsetid(domain, number) for domain, number in known.items()
    ]
    return helper.make_model(
        graph.proto("texts"), opset_imports=operators, ir_version=like.ir_version
    )


def _tokenize_words(pieces: Pieces, texts_R: Value) -> Tokens:
    """Add the tokens of the words of each text, split by `windows.find_words`, with
    every word tokenised separately. Spans are (T, 4): the characters of the token, and
    those of the word that begins with it, (0, 0) at its other tokens."""
    letters = characters(_list_matches(SPACED_LETTER))
    spaces = characters(_list_matches(r"\s"))
    pattern = word_pattern().pattern.replace(SPACED_LETTER, f"[{letters}]")
    pattern = pattern.replace(r"\s", spaces)
    parts_RP = cut(texts_R, f"{pattern}|[{spaces}]+", "")
    # one at least
    parts = concat(parts_RP.flat(), [""])
    tokens = pieces.write(parts, spans=True, words=True)
    assert tokens.sizes_R is not None and tokens.spans_T2 is not None, "with spans"
    sizes_RP = tokens.sizes_R[:-1].reshape(parts_RP.shape())
    starts_RP = sizes_RP.cumsum(axis=1, exclusive=True)
    starts_T = starts_RP.flat()[tokens.lines_T]
    ends_T = starts_T + sizes_RP.flat()[tokens.lines_T]
    before_T = concat([-1], tokens.lines_T)[:-1]
    first_T = (before_T < tokens.lines_T).integers()
    word_T2 = columns(starts_T, ends_T) * columns(first_T)
    spans_T2 = tokens.spans_T2 + columns(starts_T)
    width = maximum(parts_RP.size(1), [1])
    lines_T = tokens.lines_T // width
    return Tokens(tokens.ids_T, lines_T, concat(spans_T2, word_T2, axis=1))


@cache
def _list_matches(pattern: str) -> tuple[CodeRange, ...]:
    """List the characters of a class of Python's regular expressions, as RE2's classes
    are ASCII only."""
    every = "".join(chr(code) for code in range(UNICODE) if code not in SURROGATES)
    return join_ranges([ord(character) for character in re.findall(pattern, every)])


def join_reader(
    read: onnx.ModelProto, model: onnx.ModelProto, task: Task, threshold: float
) -> onnx.ModelProto:
    """Join the model to its tokenizer's graph: texts in, answers out. Parts of a row
    that the model does not read are left out.

    threshold  qa, see `Predictor`

    Raises ExportError for a model with unknown inputs, or without the outputs of its
    kind of task.
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
    getattr(forms, task.form)(ends, task, threshold)
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
            *ends.outputs,
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
