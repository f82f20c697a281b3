"""Describe the parts of all texts of a batch, one after another: characters, special
tokens and ends of texts, which a graph selects, removes and inserts.

Shapes: N parts of all texts; R texts of at most C parts.
"""

import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np
from onnx import TensorProto

from compress.exporters.tokenizer.trie import GraphBuilder
from compress.exporters.tokenizer.wordpiece import PAD, cut, cut_prompt, put_before


@dataclass(frozen=True)
class Cells:
    """The tensors (N,) that describe the cells of all texts.

    codes     the number of a character, a special token, or the boundary between two
              texts
    rows      the number of its text
    kinds     what a splitter needs to know about it; '' where nothing
    starts    the first character of its text that it covers, ends: the end; '' where
              not requested
    """

    codes: str
    rows: str
    kinds: str = ""
    starts: str = ""
    ends: str = ""


def cut_texts(
    graph: GraphBuilder, texts_R: str, whole: Sequence[str], prompt: str = ""
) -> tuple[str, str]:
    """Add (R, C) strings: each of `whole` in a text after `prompt`, the longest first,
    its other characters, and PAD at its end, once or more; and (N,): the number of the
    text of each."""
    parts = [re.escape(each) for each in sorted(whole, key=len, reverse=True)]
    strings_RC = cut(graph, texts_R, "|".join((*parts, "(?s:.)")))
    strings_RC = put_before(graph, strings_RC, texts_R, cut_prompt(prompt, whole))
    lines = graph.size(texts_R, 0)
    one = graph.constant([1])
    end = graph.op(
        "Expand", graph.constant([PAD]), graph.op("Concat", lines, one, axis=0)
    )
    strings_RC = graph.op("Concat", strings_RC, end, axis=1)
    rows_RC = graph.op(
        "Expand", graph.columns(graph.numbers(lines)), graph.op("Shape", strings_RC)
    )
    return strings_RC, graph.flat(rows_RC)


def is_among(graph: GraphBuilder, vector: str, values: Sequence[int]) -> str:
    """Add bools: which numbers are among these values."""
    beyond = max(values) + 1
    table = np.isin(np.arange(beyond + 1), values)
    return graph.look_up(table, graph.op("Min", vector, graph.constant(beyond)))


def measure(
    graph: GraphBuilder,
    cells: Cells,
    shape: str,
    lengths: Sequence[int],
    covered: Sequence[int],
) -> tuple[Cells, str]:
    """Add the characters that cells cover, of R x C cells, and the characters (R,) of
    each text.

    lengths   characters of each code, of the last one also for all higher codes;
              covered: the last ones of these that the cell covers
    """
    places = graph.op("Min", cells.codes, graph.constant(len(lengths) - 1))
    lengths_RC = graph.op("Reshape", graph.look_up(lengths, places), shape)
    ends_N = graph.flat(graph.op("CumSum", lengths_RC, graph.constant(1)))
    starts_N = graph.op("Sub", ends_N, graph.look_up(covered, places))
    sizes_R = graph.op("ReduceSum", lengths_RC, graph.constant([1]), keepdims=0)
    return replace(cells, starts=starts_N, ends=ends_N), sizes_R


def select(graph: GraphBuilder, cells: Cells, kept_N: str) -> Cells:
    """Add the cells that are kept."""
    return Cells(*(each and graph.select(each, kept_N) for each in astuple(cells)))


def gather(graph: GraphBuilder, cells: Cells, places: str) -> Cells:
    """Add the cells at these places."""
    return Cells(
        *(each and graph.op("Gather", each, places) for each in astuple(cells))
    )


def remove(
    graph: GraphBuilder, cells: Cells, removed_N: str, *, boundary: int, kind: int = 0
) -> Cells:
    """Make boundaries, of this code and kind, of some cells."""
    codes = graph.op("Where", removed_N, graph.constant(boundary), cells.codes)
    kinds = cells.kinds and graph.op(
        "Where", removed_N, graph.constant(kind), cells.kinds
    )
    return replace(cells, codes=codes, kinds=kinds)


def insert(
    graph: GraphBuilder,
    cells: Cells,
    needed_N: str,
    *,
    code: int,
    kind: int = 0,
    width: int,
) -> Cells:
    """Insert a cell before some cells. It covers `width` characters before the cell, or
    the same as the cell."""
    shape = graph.op("Shape", cells.codes)
    kept = graph.op(
        "Cast",
        graph.columns(graph.integers(needed_N), graph.full(shape, 1)),
        to=TensorProto.BOOL,
    )

    def join(new: str, old: str) -> str:
        return graph.select(graph.flat(graph.columns(new, old)), graph.flat(kept))

    starts = cells.starts and graph.op("Sub", cells.starts, graph.constant(width))
    return Cells(
        join(graph.full(shape, code), cells.codes),
        join(cells.rows, cells.rows),
        cells.kinds and join(graph.full(shape, kind), cells.kinds),
        cells.starts and join(starts, cells.starts),
        cells.ends and join(cells.starts if width else cells.ends, cells.ends),
    )


def drop_repeated(graph: GraphBuilder, cells: Cells, boundary: int) -> Cells:
    """Leave one of several boundaries in a row, which a short text has up to the length
    of the longest."""
    ended_N = is_among(graph, cells.codes, [boundary])
    again_N = graph.op("And", ended_N, graph.shift(ended_N, 1, bool))
    return select(graph, cells, graph.op("Not", again_N))


def insert_spaces(
    graph: GraphBuilder,
    cells: Cells,
    dropped_N: str,
    *,
    boundary: int,
    code: int,
    kind: int = 0,
) -> Cells:
    """Make boundaries of white space between a tagger's words, and insert the space
    that every word follows."""
    cells = remove(graph, cells, dropped_N, boundary=boundary)
    inner = graph.op("Not", is_among(graph, cells.codes, [boundary]))
    begins = graph.op("And", graph.op("Not", graph.shift(inner, 1, bool)), inner)
    return insert(graph, cells, begins, code=code, kind=kind, width=1)


def take_spaces(
    graph: GraphBuilder, cells: Cells, stripping_N: str, blank_N: str, *, boundary: int
) -> tuple[Cells, str]:
    """Make boundaries of the white space before special tokens that take it. Add also
    (N,): where the run of white space begins that is before a cell, or contains it; ''
    without spans."""
    follows_N = graph.op(
        "And", graph.shift(blank_N, 1, bool), graph.op("Or", blank_N, stripping_N)
    )
    # of runs of white space, with the special token after it
    begins_N = graph.op("Not", follows_N)
    runs_N = graph.op(
        "Sub",
        graph.op("CumSum", graph.integers(begins_N), graph.constant(0)),
        graph.constant(1),
    )
    taken = graph.sums(graph.integers(stripping_N), runs_N, graph.op("Shape", runs_N))
    taken_N = graph.op("Greater", graph.op("Gather", taken, runs_N), graph.constant(0))
    kept = remove(graph, cells, graph.op("And", taken_N, blank_N), boundary=boundary)
    if not cells.starts:
        return kept, ""
    firsts_N = graph.op("Gather", graph.flat(graph.op("NonZero", begins_N)), runs_N)
    return kept, graph.op("Gather", cells.starts, firsts_N)
