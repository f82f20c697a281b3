"""Build ONNX graphs node by node; and a graph of the longest match in a set of words,
for all positions at once.

The words are a double-array trie (Aoe 1989, An efficient digital search algorithm by
using a double-array structure): from state s, symbol c leads to base[s] + c if
check[base[s] + c] == s, and nowhere otherwise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from compress.exporters.session import MICROSOFT

Attribute = int | float | str | Sequence[int] | Sequence[str]

CLASSIC = "ai.onnx.ml"
DOMAINS = {MICROSOFT: 1, CLASSIC: 2}
"""The operator sets of the graphs besides ONNX's own; onnxruntime's standard builds
have both."""

EVERYTHING = np.iinfo(np.int64).max


class GraphBuilder:
    """Nodes and constants in the order in which they were added; all names begin with
    `prefix`."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[TensorProto] = []
        self._known: dict[tuple[str, tuple[int, ...], bytes], str] = {}

    def op(
        self, kind: str, *inputs: str, domain: str = "", **attributes: Attribute
    ) -> str:
        """Add a node and return the name of its output. `onnx.checker`, which checks
        every file, refuses attributes that the operator does not have."""
        name = f"{self.prefix}/{kind}_{len(self.nodes)}"
        node = helper.make_node(kind, inputs, [name], name=name, domain=domain)
        node.attribute.extend(
            helper.make_attribute(key, value) for key, value in attributes.items()
        )
        self.nodes.append(node)
        return name

    def name_output(self, name: str, tensor: str) -> None:
        """Make `tensor` an output of the graph called `name`."""
        self.nodes.append(
            helper.make_node(
                "Identity", [tensor], [name], name=f"{self.prefix}/as_{name}"
            )
        )

    def constant(
        self, value: NDArray[np.generic] | Sequence[int] | Sequence[str] | int
    ) -> str:
        """Add a constant: numbers become int64, texts strings, an array keeps its type;
        equal ones share a name."""
        array = np.asarray(value)
        tensor = (
            helper.make_tensor(
                "",
                TensorProto.STRING,
                array.shape,
                [text.encode() for text in array.ravel().tolist()],
            )
            if array.dtype.kind in "UO"
            else numpy_helper.from_array(array)
        )
        content = tensor.SerializeToString(deterministic=True)
        key = (str(array.dtype.kind), array.shape, content)
        if key not in self._known:
            tensor.name = self._known[key] = (
                f"{self.prefix}/constant_{len(self.constants)}"
            )
            self.constants.append(tensor)
        return self._known[key]

    def size(self, tensor: str, axis: int) -> str:
        """Add (1,): one dimension of a tensor."""
        return self.op("Gather", self.op("Shape", tensor), self.constant([axis]))

    def flat(self, tensor: str) -> str:
        return self.op("Reshape", tensor, self.constant([-1]))

    def scalar(self, tensor: str) -> str:
        return self.op("Reshape", tensor, self.constant(np.empty(0, np.int64)))

    def full(self, shape: str, value: int = 0) -> str:
        """Add an int64 tensor of this shape, filled with `value`."""
        name = f"{self.prefix}/ConstantOfShape_{len(self.nodes)}"
        filling = helper.make_tensor("value", TensorProto.INT64, [1], [value])
        self.nodes.append(
            helper.make_node(
                "ConstantOfShape", [shape], [name], name=name, value=filling
            )
        )
        return name

    def numbers(self, count: str) -> str:
        """Add (count,): 0, 1, 2, ... for a (1,) count."""
        return self.op("Range", self.constant(0), self.scalar(count), self.constant(1))

    def integers(self, tensor: str) -> str:
        """Cast bools, or small integers, to int64."""
        return self.op("Cast", tensor, to=TensorProto.INT64)

    def sums(self, values: str, places: str, count: str) -> str:
        """Add (count,): the sum of the values of each place."""
        return self.op(
            "ScatterElements", self.full(count), places, values, axis=0, reduction="add"
        )

    def columns(self, *vectors: str) -> str:
        """Add (n, vectors): (n,) vectors as columns."""
        ones = self.constant([1])
        return self.op(
            "Concat",
            *(self.op("Unsqueeze", vector, ones) for vector in vectors),
            axis=1,
        )

    def slice(self, vector: str, first: int, end: int = EVERYTHING) -> str:
        """Add the values of a vector from `first` to before `end`."""
        return self.op("Slice", vector, self.constant([first]), self.constant([end]))

    def shift(self, vector: str, by: int, kind: type = np.int64) -> str:
        """Add the values of a vector, of this type, each `by` places later; False, or
        0, where none is left."""
        empty = self.constant(np.zeros(abs(by), kind))
        whole = self.op(
            "Concat", *((empty, vector) if by > 0 else (vector, empty)), axis=0
        )
        return self.slice(whole, 0, -by) if by > 0 else self.slice(whole, -by)

    def look_up(self, table: NDArray[np.generic] | Sequence[int], numbers: str) -> str:
        """Add the values of a constant table at these places."""
        return self.op("Gather", self.constant(table), numbers)

    def select(self, values: str, where: str) -> str:
        """Select those of (n,) or (n, ...) values where the condition (n,) holds."""
        return self.op("Compress", values, where, axis=0)


DEAD: Final = 0
"""The state from which no symbol leads on."""

TRIE_WINDOW: Final = 1 << 12
"""Bases that are tried at once for a node."""

Symbols = tuple[int, ...]


@dataclass(frozen=True)
class Trie:
    """Several sets of words, each with a state to begin at.

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
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Choose a distinct place and a base for every node, first for nodes with most
    children."""
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
    graph: GraphBuilder, trie: Trie, symbols_M: str, states_M: str, *, longest: str = ""
) -> tuple[str, str]:
    """Add (K, M) int32 values of the words of 1 to K symbols that begin at each of M
    places, from `states_M` (int32), and -1 where there is none; and (K, 1) numbers from
    0 to K - 1.

    longest  int64 scalar: the most symbols that a match can have in these texts, which
             saves rounds
    """
    most = graph.constant(trie.longest)
    rounds = (
        graph.op("Max", graph.op("Min", longest, most), graph.constant(1))
        if longest
        else most
    )
    beyond = graph.constant(np.zeros(trie.longest, np.int32))
    steps_K1 = graph.op(
        "Unsqueeze",
        graph.op("Range", graph.constant(0), rounds, graph.constant(1)),
        graph.constant([1]),
    )
    ahead_KM = graph.op("Add", steps_K1, graph.numbers(graph.size(symbols_M, 0)))
    symbols_KM = graph.op(
        "Gather", graph.op("Concat", symbols_M, beyond, axis=0), ahead_KM
    )
    body = GraphBuilder(f"{graph.prefix}/match")
    state, here, kept = (f"{body.prefix}/{name}" for name in ("state", "here", "kept"))
    place = body.op("Add", body.op("Gather", body.constant(trie.base), state), here)
    led = body.op("Equal", body.op("Gather", body.constant(trie.check), place), state)
    after = body.op("Where", led, place, body.constant(np.array(DEAD, np.int32)))
    body.nodes.append(helper.make_node("Identity", [after], [kept], name=kept))
    line = [
        helper.make_tensor_value_info(name, TensorProto.INT32, [None])
        for name in (state, here, after, kept)
    ]
    walk = helper.make_graph(body.nodes, "match", line[:2], line[2:], body.constants)
    scan = f"{graph.prefix}/Scan_{len(graph.nodes)}"
    ends = [f"{scan}/state", f"{scan}/states"]
    graph.nodes.append(
        helper.make_node(
            "Scan",
            [states_M, symbols_KM],
            ends,
            name=scan,
            body=walk,
            num_scan_inputs=1,
        )
    )
    return graph.look_up(trie.value, ends[1]), steps_K1


def longest_matches(
    graph: GraphBuilder, trie: Trie, symbols_M: str, states_M: str, *, longest: str = ""
) -> tuple[str, str]:
    """Add (M,) int64 lengths and values of the longest of the words that `find_matches`
    finds at each place.

    Where there is none, the length is 0 and the value -1.
    """
    values_KM, steps_K1 = find_matches(
        graph, trie, symbols_M, states_M, longest=longest
    )
    found = graph.op("Greater", values_KM, graph.constant(np.array(-1, np.int32)))
    sizes = graph.op(
        "Where", found, graph.op("Add", steps_K1, graph.constant(1)), graph.constant(0)
    )
    best_1M = graph.op("ArgMax", sizes, axis=0, keepdims=1)
    lengths = graph.flat(graph.op("GatherElements", sizes, best_1M, axis=0))
    values = graph.flat(graph.op("GatherElements", values_KM, best_1M, axis=0))
    return lengths, graph.integers(values)


def follow_chains(graph: GraphBuilder, begun_N: str, jumps_N: str, longest: str) -> str:
    """Add (N,) bool: the places that are reached from those that are begun (int64, 0 or
    1).

    From each place `jumps_N` leads to the next; following the chains from all places at
    once, by jumps of 1, 2, 4, ..., takes as many rounds as `longest`, the most places
    of a chain (int64 scalar), has bits.
    """
    body = GraphBuilder(f"{graph.prefix}/follow")
    step, going, jumps, reached = (
        f"{body.prefix}/{name}" for name in ("step", "going", "jumps", "reached")
    )
    # counts paths, of which each round doubles the sum: less than 2^63 by far
    after = body.op("ScatterElements", reached, jumps, reached, axis=0, reduction="add")
    doubled = body.op("Gather", jumps, jumps)
    still = body.op("Identity", going)
    scalars = (step, TensorProto.INT64), (going, TensorProto.BOOL)
    inputs = [helper.make_tensor_value_info(*each, []) for each in scalars]
    inputs += [
        helper.make_tensor_value_info(name, TensorProto.INT64, [None])
        for name in (jumps, reached)
    ]
    outputs = [helper.make_tensor_value_info(still, TensorProto.BOOL, [])]
    outputs += [
        helper.make_tensor_value_info(name, TensorProto.INT64, [None])
        for name in (doubled, after)
    ]
    powers = graph.constant([1 << bit for bit in range(32)])
    rounds = graph.op(
        "ReduceSum", graph.integers(graph.op("Less", powers, longest)), keepdims=0
    )
    loop = f"{graph.prefix}/Loop_{len(graph.nodes)}"
    given = [rounds, "", jumps_N, begun_N]
    left = [f"{loop}/jumps", f"{loop}/reached"]
    walk = helper.make_graph(body.nodes, "follow", inputs, outputs, body.constants)
    graph.nodes.append(helper.make_node("Loop", given, left, name=loop, body=walk))
    return graph.op("Cast", left[1], to=TensorProto.BOOL)
