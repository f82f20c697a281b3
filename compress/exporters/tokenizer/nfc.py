"""Build Unicode's canonical composition, NFC, as a graph: decompose characters, sort
their marks, compose them again.

The affected characters are found by asking tokenizers, whose Unicode version may be
older than Python's.

Shapes: N cells of all texts, M the same decomposed, W characters followed by others
that may be composed with them.
"""

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from onnx import TensorProto
from tokenizers import normalizers

from compress.arrays import Longs
from compress.exporters.tokenizer import trie
from compress.exporters.tokenizer.cells import Cells
from compress.exporters.tokenizer.graph import (
    Value,
    concat,
    full,
    maximum,
    minimum,
    op,
    where,
)
from compress.exporters.tokenizer.wordpiece import UNICODE, change_each, spell

COMPOSED_AWAY = -1
NFC_CLASSES = 256


@dataclass(frozen=True)
class Composition:
    """Tables that compose and decompose characters.

    decomposed  character -> the characters that it is decomposed into, if any
    classes     character -> its combining class, if it is not 0
    composed    two characters -> the character that they become
    """

    decomposed: Mapping[str, str]
    classes: Mapping[str, int]
    composed: Mapping[str, str]

    @property
    def letters(self) -> set[str]:
        """Return all characters that composition affects; others never change."""
        return {
            *self.decomposed,
            *"".join(self.decomposed.values()),
            *self.classes,
            *"".join(self.composed),
        }

    def changes(self, text: str) -> bool:
        """Check whether neighbours may change these characters, or other characters may
        become one of them."""
        made = {made for made in self.decomposed.values() if len(made) == 1}
        odd = {
            *self.decomposed,
            *self.classes,
            *made,
            *(pair[1] for pair in self.composed),
        }
        return not odd.isdisjoint(text) or text[-1:] in {
            pair[0] for pair in self.composed
        }


@lru_cache(maxsize=1)
def read_composition() -> Composition:
    """Ask tokenizers how it composes characters (takes 2 s)."""
    split = normalizers.NFD().normalize_str
    join = normalizers.NFC().normalize_str
    decomposed = {
        character: result
        for character, result in change_each(split)
        if result != character
    }
    classes = {}
    for character in map(chr, range(UNICODE)):
        if kind := unicodedata.combining(character):
            # marks of the first and of the last class
            below = character + "\u0334"
            above = "\u0345" + character
            if split(below) != below or (kind == 1 and split(above) != above):
                classes[character] = kind
    composed = {}
    for character, parts in decomposed.items():
        if len(parts) > 1 and join(character) == character:
            composed[join(parts[:-1]) + parts[-1]] = character
    return Composition(decomposed, classes, composed)


def compose(cells: Cells, numbers: Mapping[str, int]) -> Cells:
    """Add the cells in NFC; `numbers`: the codes of `Composition.letters`. Cells with
    other codes do not change.

    A composed character covers the text of the first character that it was composed of,
    as in tokenizers.
    """
    how = read_composition()
    other = max(numbers.values()) + 1  # stands for all codes that have no number
    becomes: list[tuple[int, ...]] = [(code,) for code in range(other + 1)]
    classes = np.zeros(other + 1, np.int64)
    follows = np.zeros(other + 1, bool)
    for letter, parts in how.decomposed.items():
        becomes[numbers[letter]] = tuple(numbers[part] for part in parts)
    for letter, kind in how.classes.items():
        classes[numbers[letter]] = kind
        follows[numbers[letter]] = True
    follows[[numbers[pair[1]] for pair in how.composed]] = True
    symbols_M, places_M, steps_M = spell(becomes, minimum(cells.codes, other))
    codes_M = symbols_M.integers()
    more_M = (steps_M > 0).integers()
    classes_M = codes_M.look_up(classes)
    runs_M = classes_M.equals(0).integers().cumsum()
    _, order_M = (runs_M * NFC_CLASSES + classes_M).sort()
    codes_M = codes_M[order_M]
    places_M = places_M[order_M]
    more_M = more_M[order_M]
    pairs = {
        tuple(numbers[letter] for letter in pair): numbers[made]
        for pair, made in how.composed.items()
    }
    heads_M = ~codes_M.look_up(follows)
    heads_M = concat(np.array([True]), heads_M[1:])
    after_M, more_M = _join(
        trie.build([pairs], other + 1), classes, heads_M, codes_M, more_M
    )
    kept_M = after_M > COMPOSED_AWAY
    codes_K = after_M.select(kept_M)
    more_K = more_M.select(kept_M)
    own_K = cells.codes[places_M.select(kept_M)]
    codes_K = where(codes_K.equals(other), own_K, codes_K)
    # A character takes as many of the text as it was made of, or none and covers the
    # one before
    adds_K = more_K > 0
    taken_K = maximum(1 - more_K, 0)
    source_K = taken_K.cumsum(exclusive=True) - adds_K.integers()
    return replace(cells.at(source_K), codes=codes_K)


def _join(
    pairs: trie.Trie,
    classes: Longs,
    heads_M: Value,
    codes_M: Value,
    more_M: Value,
) -> tuple[Value, Value]:
    """Add the codes (M,) after composition, COMPOSED_AWAY where a character became a
    part of an earlier one, and how many more characters each was made of than it was
    decomposed into, both before.

    In each round, every character of `heads_M` looks at the next one of the characters
    after it that are no heads.
    """
    begin_W = heads_M.nonzero()
    ends_W = concat(begin_W[1:], codes_M.size(0))
    rounds = (ends_W - begin_W).max()
    several_W = ends_W > begin_W + 1
    begin_W = begin_W.select(several_W)
    ends_W = ends_W.select(several_W)
    body = codes_M.graph.body("compose")
    step = body.input("step", shape=[])
    going = body.input("going", TensorProto.BOOL, [])
    codes, more, head, latest = map(body.input, ("codes", "more", "head", "latest"))
    place = begin_W + step + 1
    inside = place < ends_W
    place = where(inside, place, head)
    one = codes[head]
    other = codes[place]
    state = one + int(pairs.base[pairs.roots[0]])
    begun = state.look_up(pairs.check).integers().equals(pairs.roots[0])
    at = state.look_up(pairs.base).integers() + other
    led = at.look_up(pairs.check).integers().equals(state)
    kind = other.look_up(classes)
    clear = latest.equals(0) | (latest < kind)
    joins = inside & clear & (begun & led)
    made = where(joins, at.look_up(pairs.value).integers(), one)
    size = more[head] + (more[place] - 1)
    size = where(joins, size, more[head])
    gone = where(joins, place, head)
    left = where(joins, COMPOSED_AWAY, made)
    stays = inside & ~joins
    starts = stays & kind.equals(0)
    body.output(op("Identity", going), TensorProto.BOOL, [])
    body.output(codes.scatter(head, made).scatter(gone, left))
    body.output(more.scatter(head, size))
    body.output(where(starts, place, head))
    body.output(where(stays, kind, latest))
    first_W = full(begin_W.shape())
    codes_M, more_M, *_ = codes_M.graph.run(
        body, rounds - 1, None, codes_M, more_M, begin_W, first_W
    )
    return codes_M, more_M
