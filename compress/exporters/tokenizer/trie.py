"""Longest match in a set of words, for all positions of a text at once: a trie in three arrays, walked by a graph.

The arrays are a double-array trie (Aoe 1989, An efficient digital search algorithm by using a double-array structure):
from state s, symbol c leads to base[s] + c if check[base[s] + c] == s, and nowhere otherwise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from compress.exporters.tokenizer.nodes import GraphBuilder

DEAD: Final = 0
"""The state that no symbol leads out of."""

Word = tuple[int, ...]


@dataclass(frozen=True)
class Trie:
    """Several sets of words, each with a state to begin at.

    base, check   (states,) int32; value (states,) int32: what a word that ends here stands for, or -1
    roots         where a walk begins, one for each set
    longest       symbols in the longest word
    """

    base: NDArray[np.int32]
    check: NDArray[np.int32]
    value: NDArray[np.int32]
    roots: tuple[int, ...]
    longest: int

    def match(self, symbols: Sequence[int], root: int) -> tuple[int, int]:
        """Find the longest word that `symbols` begins with: its length and value; (0, -1) for none."""
        state, found = self.roots[root], (0, -1)
        for length, symbol in enumerate(symbols, 1):
            place = int(self.base[state]) + symbol
            if place >= len(self.check) or self.check[place] != state:
                break
            state = place
            if self.value[state] >= 0:
                found = (length, int(self.value[state]))
        return found


def build(sets: Sequence[Mapping[Word, int]], symbols: int) -> Trie:
    """Build the trie of these sets of words, of symbols 0 <= c < `symbols`, none of them empty; values are not
    negative."""
    children: list[dict[int, int]] = [{} for _ in sets]  # node -> symbol -> node; the first nodes are the roots
    values = [-1] * len(sets)
    for root, words in enumerate(sets):
        for word, value in words.items():
            node = root
            for symbol in word:
                after = children[node].setdefault(symbol, len(children))
                if after == len(children):
                    children.append({})
                    values.append(-1)
                node = after
            values[node] = value
    places, base = _placed(children, len(sets), symbols)
    size = int(max(places)) + symbols + 1  # so that base + symbol is always inside
    arrays = [np.full(size, filling, np.int32) for filling in (DEAD, -1, -1)]
    for node, below in enumerate(children):
        arrays[0][places[node]], arrays[2][places[node]] = base[node], values[node]
        for after in below.values():
            arrays[1][places[after]] = places[node]
    longest = max(len(word) for words in sets for word in words)
    return Trie(arrays[0], arrays[1], arrays[2], tuple(int(place) for place in places[: len(sets)]), longest)


def _placed(
    children: Sequence[Mapping[int, int]], roots: int, symbols: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Choose a place and a base for every node, such that no two share one: nodes with most children first."""
    room = len(children) + 2 * symbols + roots + 1
    free = np.ones(room, bool)
    free[: roots + 1] = False  # DEAD and the roots
    places = np.zeros(len(children), np.int64)
    places[:roots] = np.arange(1, roots + 1)
    base = np.zeros(len(children), np.int64)
    lowest = 0
    for node in sorted(range(len(children)), key=lambda node: -len(children[node])):
        below = np.fromiter(children[node], np.int64)
        if not below.size:
            break
        lowest += int(np.argmax(free[lowest:]))
        below.sort()
        start = max(0, lowest - int(below[0]))
        while True:
            fits = free[start + below[0] : len(free) - symbols + below[0]].copy()
            for symbol in below[1:]:
                fits &= free[start + symbol : len(free) - symbols + symbol]
            if fits.any():
                break
            free = np.concatenate([free, np.ones(len(free), bool)])
        base[node] = start + int(np.argmax(fits))
        free[base[node] + below] = False
        for symbol, after in children[node].items():
            places[after] = base[node] + symbol
    return places, base


def longest_matches(graph: GraphBuilder, trie: Trie, symbols_M: str, states_M: str) -> tuple[str, str]:
    """Write (M,) int64 lengths and values of the longest words that begin at each of M places, from `states_M` (int32).

    A length is 0, and a value -1, where none does. Runs as many rounds as the longest match anywhere is long.
    """
    count = graph.size(symbols_M, 0)
    beyond = graph.constant(np.zeros(trie.longest, np.int32))
    padded = graph.op("Concat", symbols_M, beyond, axis=0)
    none = graph.op("Expand", graph.constant(np.array([-1], np.int32)), count)
    nought = graph.op("Expand", graph.constant(np.array([0], np.int32)), count)
    body = GraphBuilder(f"{graph.prefix}/match")
    step, going, state, length, value = (f"{body.prefix}/{name}" for name in ("step", "on", "state", "length", "value"))
    first = body.op("Reshape", step, body.constant([1]))
    here = body.op("Slice", padded, first, body.op("Add", first, count))
    base, check, values = (body.constant(array) for array in (trie.base, trie.check, trie.value))
    place = body.op("Add", body.op("Gather", base, state), here)
    led = body.op("Equal", body.op("Gather", check, place), state)
    after = body.op("Where", led, place, body.constant(np.array(DEAD, np.int32)))
    worth = body.op("Gather", values, after)
    ends = body.op("Greater", worth, body.constant(np.array(-1, np.int32)))
    so_far = body.op("Cast", body.op("Add", step, body.constant(1)), to=TensorProto.INT32)
    longer = body.op("Where", ends, so_far, length)
    best = body.op("Where", ends, worth, value)
    alive = body.op("Greater", body.op("ReduceMax", after, keepdims=0), body.constant(np.array(DEAD, np.int32)))
    inputs = [
        helper.make_tensor_value_info(step, TensorProto.INT64, []),
        helper.make_tensor_value_info(going, TensorProto.BOOL, []),
        *(helper.make_tensor_value_info(name, TensorProto.INT32, [None]) for name in (state, length, value)),
    ]
    outputs = [
        helper.make_tensor_value_info(alive, TensorProto.BOOL, []),
        *(helper.make_tensor_value_info(name, TensorProto.INT32, [None]) for name in (after, longer, best)),
    ]
    walk = helper.make_graph(body.nodes, "match", inputs, outputs, body.constants)
    rounds, begin = graph.constant(trie.longest), graph.constant(np.array(True))
    ended = f"{graph.prefix}/Loop_{len(graph.nodes)}"
    graph.nodes.append(
        helper.make_node(
            "Loop",
            [rounds, begin, states_M, nought, none],
            [f"{ended}/state", f"{ended}/length", f"{ended}/value"],
            name=ended,
            body=walk,
        )
    )
    return graph.integers(f"{ended}/length"), graph.integers(f"{ended}/value")
