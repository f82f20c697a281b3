"""Build Unicode's canonical composition, NFC, as a graph: decompose characters, sort
their marks, compose them again.

Which characters it concerns is asked of tokenizers, whose Unicode may be older than
Python's.

Shapes: N cells of all texts, M the same decomposed, W characters with others after them
that may be composed with them.
"""

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper
from tokenizers import normalizers

from compress.exporters.tokenizer import trie
from compress.exporters.tokenizer.cells import Cells, gather
from compress.exporters.tokenizer.trie import GraphBuilder
from compress.exporters.tokenizer.wordpiece import (
    SURROGATES,
    UNICODE,
    WORDPIECE_BLOCK,
    isolate,
)

COMPOSED_AWAY = -1
NFC_CLASSES = 256


@dataclass(frozen=True)
class Composition:
    """Tables that compose and decompose characters.

    decomposed  character -> the characters that it is decomposed into, where it is
    classes     character -> its combining class, where it is not 0
    composed    two characters -> the one that they become
    """

    decomposed: Mapping[str, str]
    classes: Mapping[str, int]
    composed: Mapping[str, str]

    @property
    def letters(self) -> set[str]:
        """Return all characters that it concerns; all others stay as they are."""
        return {
            *self.decomposed,
            *"".join(self.decomposed.values()),
            *self.classes,
            *"".join(self.composed),
        }

    def changes(self, text: str) -> bool:
        """Check whether these characters may be changed by others beside them, or
        others may become one of them."""
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
    """Ask tokenizers how it composes characters (2 s)."""
    split = normalizers.NFD().normalize_str
    join = normalizers.NFC().normalize_str
    decomposed = {}
    for first in (
        first for first in range(0, UNICODE, WORDPIECE_BLOCK) if first not in SURROGATES
    ):
        block = list(map(chr, range(first, first + WORDPIECE_BLOCK)))
        results = zip(block, isolate(block, split), strict=True)
        decomposed.update(
            {character: result for character, result in results if result != character}
        )
    classes = {}
    for character in map(chr, range(UNICODE)):
        if kind := unicodedata.combining(character):
            # of the first and of the last class
            below = character + "\u0334"
            above = "\u0345" + character
            if split(below) != below or (kind == 1 and split(above) != above):
                classes[character] = kind
    composed = {}
    for character, parts in decomposed.items():
        if len(parts) > 1 and join(character) == character:
            composed[join(parts[:-1]) + parts[-1]] = character
    return Composition(decomposed, classes, composed)


def compose(graph: GraphBuilder, cells: Cells, numbers: Mapping[str, int]) -> Cells:
    """Add the cells in NFC; `numbers`: the codes of `Composition.letters`. Cells of all
    other codes stay as they are.

    What a composed character covers is the first of the characters that it was composed
    of, as in tokenizers.
    """
    how = read_composition()
    other = max(numbers.values()) + 1  # stands for all codes that have no number
    becomes = np.full(
        (other + 1, max(map(len, how.decomposed.values()))), COMPOSED_AWAY
    )
    becomes[:, 0] = np.arange(other + 1)
    classes = np.zeros(other + 1, np.int64)
    follows = np.zeros(other + 1, bool)
    for letter, parts in how.decomposed.items():
        becomes[numbers[letter], : len(parts)] = [numbers[part] for part in parts]
    for letter, kind in how.classes.items():
        classes[numbers[letter]] = kind
        follows[numbers[letter]] = True
    follows[[numbers[pair[1]] for pair in how.composed]] = True
    codes_N = graph.op("Min", cells.codes, graph.constant(other))
    flat = graph.flat(graph.look_up(becomes, codes_N))
    real = graph.op("Greater", flat, graph.constant(COMPOSED_AWAY))
    width = graph.constant(becomes.shape[1])
    at_M = graph.flat(graph.op("NonZero", real))
    codes_M = graph.select(flat, real)
    places_M = graph.op("Div", at_M, width)
    more_M = graph.integers(
        graph.op("Greater", graph.op("Mod", at_M, width), graph.constant(0))
    )
    classes_M = graph.look_up(classes, codes_M)
    runs_M = graph.op(
        "CumSum",
        graph.integers(graph.op("Equal", classes_M, graph.constant(0))),
        graph.constant(0),
    )
    order_M = _sort(
        graph,
        graph.op(
            "Add", graph.op("Mul", runs_M, graph.constant(NFC_CLASSES)), classes_M
        ),
    )
    codes_M = graph.op("Gather", codes_M, order_M)
    places_M = graph.op("Gather", places_M, order_M)
    more_M = graph.op("Gather", more_M, order_M)
    pairs = {
        tuple(numbers[letter] for letter in pair): numbers[made]
        for pair, made in how.composed.items()
    }
    heads_M = graph.op("Not", graph.look_up(follows, codes_M))
    heads_M = graph.op(
        "Concat", graph.constant(np.array([True])), graph.slice(heads_M, 1), axis=0
    )
    after_M, more_M = _join(
        graph, trie.build([pairs], other + 1), classes, heads_M, (codes_M, more_M)
    )
    kept_M = graph.op("Greater", after_M, graph.constant(COMPOSED_AWAY))
    codes_K = graph.select(after_M, kept_M)
    more_K = graph.select(more_M, kept_M)
    own_K = graph.op("Gather", cells.codes, graph.select(places_M, kept_M))
    codes_K = graph.op(
        "Where", graph.op("Equal", codes_K, graph.constant(other)), own_K, codes_K
    )
    # A character takes as many of the text as it was made of, or none and covers the
    # one before
    adds_K = graph.op("Greater", more_K, graph.constant(0))
    taken_K = graph.op(
        "Max", graph.op("Sub", graph.constant(1), more_K), graph.constant(0)
    )
    source_K = graph.op("CumSum", taken_K, graph.constant(0), exclusive=1)
    source_K = graph.op("Sub", source_K, graph.integers(adds_K))
    return replace(gather(graph, cells, source_K), codes=codes_K)


def _sort(graph: GraphBuilder, keys_M: str) -> str:
    """Add (M,): the places of the keys in ascending order, of equal ones in their
    own."""
    ends = [
        f"{graph.prefix}/sorted_{len(graph.nodes)}",
        f"{graph.prefix}/order_{len(graph.nodes)}",
    ]
    given = [keys_M, graph.size(keys_M, 0)]
    graph.nodes.append(helper.make_node("TopK", given, ends, name=ends[0], largest=0))
    return ends[1]


def _join(
    graph: GraphBuilder,
    pairs: trie.Trie,
    classes: NDArray[np.int64],
    heads_M: str,
    decomposed: tuple[str, str],
) -> tuple[str, str]:
    """Add the codes (M,) after composition, COMPOSED_AWAY where a character became a
    part of one before, and how many characters more each was made of than it was
    decomposed into; `decomposed`: both before.

    In each round, every character of `heads_M` looks at the next one of those after it,
    which are no heads.
    """
    root = int(pairs.base[pairs.roots[0]])
    codes_M, more_M = decomposed
    begin_W = graph.flat(graph.op("NonZero", heads_M))
    ends_W = graph.op("Concat", graph.slice(begin_W, 1), graph.size(codes_M, 0), axis=0)
    rounds = graph.op("ReduceMax", graph.op("Sub", ends_W, begin_W), keepdims=0)
    several_W = graph.op("Greater", ends_W, graph.op("Add", begin_W, graph.constant(1)))
    begin_W = graph.select(begin_W, several_W)
    ends_W = graph.select(ends_W, several_W)
    body = GraphBuilder(f"{graph.prefix}/compose")
    step, going, codes, more, head, latest = (
        f"{body.prefix}/{name}"
        for name in ("step", "going", "codes", "more", "head", "latest")
    )
    place = body.op("Add", body.op("Add", begin_W, step), body.constant(1))
    inside = body.op("Less", place, ends_W)
    place = body.op("Where", inside, place, head)
    one = body.op("Gather", codes, head)
    other = body.op("Gather", codes, place)
    base = body.constant(pairs.base)
    check = body.constant(pairs.check)
    value = body.constant(pairs.value)
    state = body.op("Add", one, body.constant(root))
    begun = body.op(
        "Equal",
        body.integers(body.op("Gather", check, state)),
        body.constant(pairs.roots[0]),
    )
    at = body.op("Add", body.integers(body.op("Gather", base, state)), other)
    led = body.op("Equal", body.integers(body.op("Gather", check, at)), state)
    kind = body.look_up(classes, other)
    clear = body.op(
        "Or", body.op("Equal", latest, body.constant(0)), body.op("Less", latest, kind)
    )
    joins = body.op("And", body.op("And", inside, clear), body.op("And", begun, led))
    made = body.op("Where", joins, body.integers(body.op("Gather", value, at)), one)
    size = body.op(
        "Add",
        body.op("Gather", more, head),
        body.op("Sub", body.op("Gather", more, place), body.constant(1)),
    )
    size = body.op("Where", joins, size, body.op("Gather", more, head))
    codes_after = body.op("ScatterElements", codes, head, made, axis=0)
    more_after = body.op("ScatterElements", more, head, size, axis=0)
    gone = body.op("Where", joins, place, head)
    left = body.op("Where", joins, body.constant(COMPOSED_AWAY), made)
    codes_after = body.op("ScatterElements", codes_after, gone, left, axis=0)
    stays = body.op("And", inside, body.op("Not", joins))
    starts = body.op("And", stays, body.op("Equal", kind, body.constant(0)))
    head_after = body.op("Where", starts, place, head)
    latest_after = body.op("Where", stays, kind, latest)
    still = body.op("Identity", going)
    line = TensorProto.INT64, [None]
    inputs = [
        helper.make_tensor_value_info(step, TensorProto.INT64, []),
        helper.make_tensor_value_info(going, TensorProto.BOOL, []),
        *(
            helper.make_tensor_value_info(name, *line)
            for name in (codes, more, head, latest)
        ),
    ]
    outputs = [helper.make_tensor_value_info(still, TensorProto.BOOL, [])]
    outputs += [
        helper.make_tensor_value_info(name, *line)
        for name in (codes_after, more_after, head_after, latest_after)
    ]
    loop = f"{graph.prefix}/Loop_{len(graph.nodes)}"
    given = [
        graph.op("Sub", rounds, graph.constant(1)),
        "",
        codes_M,
        more_M,
        begin_W,
        graph.full(graph.op("Shape", begin_W)),
    ]
    ends = [f"{loop}/{name}" for name in ("codes", "more", "head", "latest")]
    walk = helper.make_graph(body.nodes, "compose", inputs, outputs, body.constants)
    graph.nodes.append(helper.make_node("Loop", given, ends, name=loop, body=walk))
    return ends[0], ends[1]
