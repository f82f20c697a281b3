"""Find the longest match in a set of words, for all positions at once, in a graph.

The words are a double-array trie (Aoe 1989, An efficient digital search algorithm by
using a double-array structure): from state s, symbol c leads to base[s] + c if
check[base[s] + c] == s, and nowhere otherwise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from compress.arrays import Longs
from compress.exporters.tokenizer.graph import (
    Value,
    arange,
    concat,
    maximum,
    minimum,
    op,
    where,
)

DEAD: Final = 0
"""The state without successors."""

TRIE_WINDOW: Final = 1 << 12
"""The number of bases that are tried at once for a node."""

Symbols = tuple[int, ...]


@dataclass(frozen=True)
class Trie:
    """Several sets of words, each with its own initial state.

    base, check   (states,) int32; value (states,) int32: the value of the word that
                  ends here, or -1
    roots         the first state of each set
    longest       symbols in the longest word
    """

    base: NDArray[np.int32]
    check: NDArray[np.int32]
    value: NDArray[np.int32]
    roots: tuple[int, ...]
    longest: int


def build(sets: Sequence[Mapping[Symbols, int]], symbols: int) -> Trie:
    """Build the trie of these sets of words, of symbols 0 <= c < `symbols`; words are
    not empty, values not negative."""
    # node -> symbol -> node; the first nodes are the roots
    children: list[dict[int, int]] = [{} for _ in sets]
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
    places, base = _place(children, len(sets), symbols)
    size = int(max(places)) + symbols + 1  # so that base + symbol is always inside
    arrays = [np.full(size, filling, np.int32) for filling in (DEAD, -1, -1)]
    for node, below in enumerate(children):
        arrays[0][places[node]] = base[node]
        arrays[2][places[node]] = values[node]
        for after in below.values():
            arrays[1][places[after]] = places[node]
    longest = max(len(word) for words in sets for word in words)
    return Trie(
        arrays[0],
        arrays[1],
        arrays[2],
        tuple(int(place) for place in places[: len(sets)]),
        longest,
    )


def _place(
    children: Sequence[Mapping[int, int]], roots: int, symbols: int
) -> tuple[Longs, Longs]:
    """Choose a distinct place and a base for every node, starting with the nodes that
    have the most children."""
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
            width = max(0, min(TRIE_WINDOW, len(free) - symbols - start))
            fits = free[start + below[0] : start + width + below[0]].copy()
            for symbol in below[1:]:
                fits &= free[start + symbol : start + width + symbol]
            if fits.any():
                break
            start += width
            if start + symbols >= len(free):
                free = np.concatenate([free, np.ones(len(free), bool)])
        base[node] = start + int(np.argmax(fits))
        free[base[node] + below] = False
        for symbol, after in children[node].items():
            places[after] = base[node] + symbol
    return places, base


def find_matches(
    trie: Trie, symbols_M: Value, states_M: Value, longest: Value | None = None
) -> tuple[Value, Value]:
    """Add the (K, M) int32 values of the words of 1 to K symbols that begin at each of
    M places, from `states_M` (int32), or -1 if there is no word; and (K, 1) numbers
    from 0 to K - 1.

    longest  int64 scalar: the most symbols that a match can have in these texts, which
             saves rounds
    """
    graph = symbols_M.graph
    rounds = graph.constant(trie.longest)
    if longest is not None:
        rounds = maximum(minimum(longest, rounds), 1)
    beyond = np.zeros(trie.longest, np.int32)
    steps_K1 = op("Range", 0, rounds, 1).unsqueeze(1)
    ahead_KM = steps_K1 + arange(symbols_M.size(0))
    symbols_KM = concat(symbols_M, beyond)[ahead_KM]
    body = graph.body("match")
    state_M = body.input("state", TensorProto.INT32)
    here_M = body.input("here", TensorProto.INT32)
    place_M = state_M.look_up(trie.base) + here_M
    led_M = place_M.look_up(trie.check).equals(state_M)
    after_M = where(led_M, place_M, np.array(DEAD, np.int32))
    body.output(after_M, TensorProto.INT32)
    body.output(op("Identity", after_M), TensorProto.INT32)
    _, states_KM = graph.run(body, states_M, symbols_KM, scan=True)
    return states_KM.look_up(trie.value), steps_K1


def longest_matches(
    trie: Trie, symbols_M: Value, states_M: Value, longest: Value | None = None
) -> tuple[Value, Value]:
    """Add (M,) int64 lengths and values of the longest word that `find_matches` finds
    at each place.

    Without a word, the length is 0 and the value -1.
    """
    values_KM, steps_K1 = find_matches(trie, symbols_M, states_M, longest)
    found = values_KM > np.array(-1, np.int32)
    sizes = where(found, steps_K1 + 1, 0)
    best_1M = op("ArgMax", sizes, axis=0, keepdims=1)
    lengths = op("GatherElements", sizes, best_1M, axis=0).flat()
    values = op("GatherElements", values_KM, best_1M, axis=0).flat()
    return lengths, values.integers()


def begin_matches(
    trie: Trie, symbols_M: Value, begins_M: Value, longest: Value | None = None
) -> tuple[Value, Value]:
    """Add the outputs of `longest_matches` at the places where words of the first set
    may begin; nothing elsewhere."""
    root, dead = np.array([trie.roots[0], DEAD], np.int32)
    return longest_matches(trie, symbols_M, where(begins_M, root, dead), longest)


def follow_chains(begun_N: Value, jumps_N: Value, longest: Value) -> Value:
    """Add (N,) bool: the places that are reached from the starting places (int64, 0 or
    1).

    From each place, `jumps_N` leads to the next. Following the chains from all places
    at once, by jumps of 1, 2, 4, ..., takes one round per bit of `longest`, the most
    places of a chain (int64 scalar).
    """
    graph = begun_N.graph
    body = graph.body("follow")
    body.input("step", shape=[])
    going = body.input("going", TensorProto.BOOL, [])
    jumps = body.input("jumps")
    reached = body.input("reached")
    body.output(op("Identity", going), TensorProto.BOOL, [])
    body.output(jumps[jumps])
    # counts paths; each round at most doubles the sum: far less than 2^63
    body.output(reached.scatter(jumps, reached, reduction="add"))
    powers = graph.constant([1 << bit for bit in range(32)])
    rounds = op("ReduceSum", (powers < longest).integers(), keepdims=0)
    _, reached_N = graph.run(body, rounds, None, jumps_N, begun_N)
    return reached_N.cast(TensorProto.BOOL)
