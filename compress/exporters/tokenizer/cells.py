"""Describe the cells of all texts of a batch, one after another: characters, special
tokens and ends of texts, which a graph selects, removes and inserts.

Shapes: N cells of all texts; R texts of at most C cells.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from onnx import TensorProto

from compress.exporters.tokenizer.graph import (
    Value,
    arange,
    columns,
    concat,
    full,
    minimum,
    op,
    where,
)
from compress.exporters.tokenizer.wordpiece import PAD, cut, cut_prompt, put_before


@dataclass(frozen=True)
class Cells:
    """The tensors (N,) that describe the cells of all texts.

    codes     the number of a character, a special token, or the boundary between two
              texts
    rows      the number of its text
    kinds     the class that a splitter needs; equal to the codes until it is known
    starts    the first character of its text that it covers, ends: the end of them; if
              requested
    """

    codes: Value
    rows: Value
    kinds: Value
    starts: Value | None = None
    ends: Value | None = None

    def select(self, kept_N: Value) -> "Cells":
        """Add the cells that are kept."""
        return self._each(lambda value: value.select(kept_N))

    def at(self, places: Value) -> "Cells":
        """Add the cells at these places."""
        return self._each(lambda value: value[places])

    def _each(self, change: Callable[[Value], Value]) -> "Cells":
        values = vars(self).items()
        return Cells(**{name: value and change(value) for name, value in values})


def cut_texts(
    texts_R: Value, whole: Sequence[str], prompt: str = ""
) -> tuple[Value, Value]:
    """Add (R, C) strings: the matches of `whole` in a text after `prompt`, the longest
    first, its other characters, and PAD at its end, once or more; and (N,): the text of
    each."""
    parts = [re.escape(each) for each in sorted(whole, key=len, reverse=True)]
    strings_RC = cut(texts_R, "|".join((*parts, "(?s:.)")))
    strings_RC = put_before(strings_RC, texts_R, cut_prompt(prompt, whole))
    lines = texts_R.size(0)
    end = op("Expand", [PAD], concat(lines, [1]))
    strings_RC = concat(strings_RC, end, axis=1)
    rows_RC = op("Expand", columns(arange(lines)), strings_RC.shape())
    return strings_RC, rows_RC.flat()


def is_among(vector: Value, values: Sequence[int]) -> Value:
    """Add bools: whether each number is among these values."""
    beyond = max(values) + 1
    table = np.isin(np.arange(beyond + 1), values)
    return minimum(vector, beyond).look_up(table)


def measure(
    cells: Cells, shape: Value, lengths: Sequence[int], covered: Sequence[int]
) -> tuple[Cells, Value]:
    """Add the characters that each of R x C cells covers, and the number of characters
    (R,) of each text.

    lengths   the number of characters of each code; the last one is also used for all
              higher codes; covered: the last ones of these that the cell covers
    """
    places = minimum(cells.codes, len(lengths) - 1)
    lengths_RC = op("Reshape", places.look_up(lengths), shape)
    ends_N = lengths_RC.cumsum(axis=1).flat()
    starts_N = ends_N - places.look_up(covered)
    sizes_R = lengths_RC.sum(1)
    return replace(cells, starts=starts_N, ends=ends_N), sizes_R


def remove(cells: Cells, removed_N: Value, *, boundary: int, kind: int = 0) -> Cells:
    """Turn some cells into boundaries of this code and kind."""
    codes = where(removed_N, boundary, cells.codes)
    kinds = where(removed_N, kind, cells.kinds)
    return replace(cells, codes=codes, kinds=kinds)


def insert(
    cells: Cells, needed_N: Value, *, code: int, kind: int = 0, width: int
) -> Cells:
    """Insert a cell before some cells. It covers the `width` characters before the
    cell, or the same characters as the cell."""
    shape = cells.codes.shape()
    kept = columns(needed_N.integers(), full(shape, 1)).cast(TensorProto.BOOL)

    def join(new: Value, old: Value) -> Value:
        return columns(new, old).flat().select(kept.flat())

    starts = cells.starts and cells.starts - width
    ends = cells.starts if width else cells.ends
    return Cells(
        join(full(shape, code), cells.codes),
        join(cells.rows, cells.rows),
        join(full(shape, kind), cells.kinds),
        starts and cells.starts and join(starts, cells.starts),
        ends and cells.ends and join(ends, cells.ends),
    )


def drop_repeated(cells: Cells, boundary: int) -> Cells:
    """Reduce runs of boundaries to one; short texts have them up to the length of the
    longest."""
    ended_N = is_among(cells.codes, [boundary])
    again_N = ended_N & ended_N.shift(1, bool)
    return cells.select(~again_N)


def insert_spaces(
    cells: Cells, dropped_N: Value, *, boundary: int, code: int, kind: int = 0
) -> Cells:
    """Turn white space between a tagger's words into boundaries, and insert the space
    before every word."""
    cells = remove(cells, dropped_N, boundary=boundary)
    inner = ~is_among(cells.codes, [boundary])
    begins = ~inner.shift(1, bool) & inner
    return insert(cells, begins, code=code, kind=kind, width=1)


def take_spaces(
    cells: Cells, stripping_N: Value, blank_N: Value, *, boundary: int
) -> tuple[Cells, Value | None]:
    """Turn the white space before special tokens that take it into boundaries. With
    spans, also add (N,): where the run of white space before a cell, or around it,
    begins."""
    follows_N = blank_N.shift(1, bool) & (blank_N | stripping_N)
    # runs of white space, with the special token after each
    begins_N = ~follows_N
    runs_N = begins_N.integers().cumsum() - 1
    taken = stripping_N.integers().sums(runs_N, runs_N.shape())
    taken_N = taken[runs_N] > 0
    kept = remove(cells, taken_N & blank_N, boundary=boundary)
    if cells.starts is None:
        return kept, None
    firsts_N = begins_N.nonzero()[runs_N]
    return kept, cells.starts[firsts_N]
