"""Find attention with rotary positions, and gated feed-forwards, as ModernBERT has
them.

ModernBERT computes queries, keys and values by one product, and both halves of a
feed-forward by one. Both are divided into separate products, so that unused tokens are
not computed and no copies are needed for splitting. The rotation of queries or keys is
one node during rewriting: it reads a tensor (rows, tokens, heads x size) and two tables
(1, tokens, size) of cosines and sines, and writes x cos + (second half of each head,
first half) (-sin, sin).
"""

import operator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from onnx import NodeProto

from compress.exporters.rewrite.attention import (
    BY_HEAD,
    AttentionCore,
    find_context,
    masks_keys,
)
from compress.exporters.rewrite.graph import (
    ATTENTION_OPERATOR,
    OURS,
    ROTARY,
    Graph,
    MismatchError,
    Wiring,
    attribute,
    find_all,
    find_writer,
    rank,
    require,
)

KEYS_LAST = [0, 1, 3, 2]
PARTS = ("queries", "keys", "values")


class _Axis(NamedTuple):
    """The last axis of a tensor of this rank."""

    tensor: str
    rank: int
    width: int


class _Part(NamedTuple):
    """The n-th of three parts of a product and its bias (or ""), split by head: (rows,
    heads, tokens, size)."""

    product: NodeProto
    bias: str
    place: int
    size: int


class _Rotation(NamedTuple):
    """Queries or keys before their rotation, and the tables of the rotation."""

    source: str
    cosines: str
    sines: str


@dataclass(frozen=True)
class _RotaryAttention:
    """One attention: the product of queries, keys and values, and its other parts."""

    part: _Part
    rotation: _Rotation
    mask: str
    scale: float
    softmax: NodeProto
    joined: NodeProto

    @staticmethod
    def around(wiring: Wiring, softmax: NodeProto) -> "_RotaryAttention":
        """Find the attention of this softmax. Raises MismatchError for one of another
        form."""
        require(attribute(softmax, "axis", -1) in (-1, 3))
        probabilities = softmax.output[0]
        with suppress(MismatchError):
            while True:
                probabilities = wiring.reader(probabilities, "Cast").output[0]
        context, joined = find_context(wiring, probabilities)
        added, scaled, scores = wiring.trace_back(
            softmax.input[0], "Add", "Mul", "MatMul"
        )
        scale = wiring.scalar(scaled.input[1])
        keys_last = wiring.writer(scores.input[1], "Transpose")
        require(attribute(keys_last, "perm") == KEYS_LAST)
        queries = _read_rotation(wiring, scores.input[0])
        keys = _read_rotation(wiring, keys_last.input[0])
        require(queries[1:] == keys[1:])
        sources = queries.source, keys.source, context.input[1]
        parts = [_part(wiring, name) for name in sources]
        require([part.place for part in parts] == [0, 1, 2])
        require(len({part.product.output[0] for part in parts}) == 1)
        mask = added.input[1]
        require(masks_keys(wiring, mask) or _masks_distance(wiring, mask))
        return _RotaryAttention(parts[0], queries, mask, scale, softmax, joined)

    def replace(self, graph: Graph) -> AttentionCore:
        """Replace this attention by one node that reads separate products."""
        name = self.softmax.name.removesuffix("/Softmax")
        size = self.part.size
        width = _columns(graph, self.part.product) // 3
        heads = width // size
        inputs = [
            _split_off(
                graph,
                self.part.product,
                self.part.bias,
                part,
                (n * width, (n + 1) * width),
            )
            for n, part in enumerate(PARTS)
        ]
        for n in range(2):
            rotated = [inputs[n], self.rotation.cosines, self.rotation.sines]
            inputs[n] = graph.add(
                ROTARY,
                rotated,
                f"{name}/{PARTS[n]}/turned",
                domain=OURS,
                heads=heads,
                size=size,
            )
        node = graph.replace(
            self.joined,
            ATTENTION_OPERATOR,
            [*inputs, self.mask],
            name,
            domain=OURS,
            heads=heads,
            size=size,
            value_size=size,
            tokens_first=0,
            mask_on_scores=1,
            local=int(not masks_keys(Wiring(graph), self.mask)),
        )
        return AttentionCore(
            node, name, tuple(inputs), "", heads, size, size, self.scale
        )


def collapse(graph: Graph) -> list[AttentionCore]:
    """Replace every attention of this form by one node, and divide the joint
    products."""
    softmaxes = graph.of_type("Softmax")
    found = find_all(partial(_RotaryAttention.around, Wiring(graph)), softmaxes)
    cores = [each.replace(graph) for each in found]
    if cores:
        _split_halves(graph)
        graph.prune()
    return cores


def _read_rotation(wiring: Wiring, name: str) -> _Rotation:
    """Read the parts of x cos + (-second half, first half) sin."""
    total = wiring.writer(wiring.uncast(name), "Add")
    kept, swapped = (wiring.writer(each, "Mul") for each in total.input)
    halves = wiring.writer(swapped.input[0], "Concat")
    require(len(halves.input) == 2 and attribute(halves, "axis") in (-1, 3))
    part = _part(wiring, kept.input[0])
    _, second = wiring.trace_back(halves.input[0], "Neg", "Slice")
    first = wiring.writer(halves.input[1], "Slice")
    tables = [wiring.writer(each.input[1], "Unsqueeze") for each in (kept, swapped)]
    require(all(wiring.value(each.input[1]).tolist() == [1] for each in tables))
    last = _Axis(wiring.uncast(kept.input[0]), 4, part.size)
    require(_span(wiring, first, last) == (0, part.size // 2))
    require(_span(wiring, second, last) == (part.size // 2, part.size))
    return _Rotation(kept.input[0], *(each.input[0] for each in tables))


def _part(wiring: Wiring, name: str) -> _Part:
    turned, flat, split, shaped = wiring.trace_back(
        wiring.uncast(name), "Transpose", "Squeeze", "Split", "Reshape"
    )
    require(attribute(turned, "perm") == BY_HEAD)
    product, bias = _find_product(wiring, shaped.input[0])
    # rows, tokens, three, heads, size
    sizes = wiring.writer(shaped.input[1], "Concat")
    require(wiring.value(split.input[1]).tolist() == [1, 1, 1])
    require(attribute(split, "axis", 0) in (-3, 2))
    require(len(sizes.input) == 5 and wiring.scalar(sizes.input[2]) == 3)
    size = wiring.scalar(sizes.input[-1])
    require(_columns(wiring.graph, product) % (3 * size) == 0)
    place = list(split.output).index(flat.input[0])
    return _Part(product, bias, place, int(size))


def _find_product(wiring: Wiring, name: str) -> tuple[NodeProto, str]:
    """Find the product with a constant matrix that computes a tensor, and its bias, or
    ""."""
    bias = ""
    added = find_writer(wiring.writers, name, "Add")
    if added is not None:
        first, second = added.input
        constant = first in wiring.graph.tensors
        bias, name = (first, second) if constant else (second, first)
        require(rank(wiring.graph.value(bias)) == 1)
    product = wiring.writer(name, "MatMul")
    require(wiring.graph.is_matrix(product.input[1]))
    return product, bias


def _columns(graph: Graph, product: NodeProto) -> int:
    return int(graph.tensors[product.input[1]].dims[1])


def _split_off(
    graph: Graph, product: NodeProto, bias: str, part: str, span: tuple[int, int]
) -> str:
    """Compute these columns of a product, and of its bias, with a separate product."""
    path = product.name.removesuffix("/MatMul")
    columns = slice(*span)
    weight = graph.value(product.input[1])
    added = graph.value(bias)
    assert weight is not None, "a constant matrix"
    name = graph.constant(weight[:, columns], f"{product.input[1]}.{part}")
    made = graph.add("MatMul", [product.input[0], name], f"{path}/{part}/MatMul")
    if added is None:
        return made
    return graph.add(
        "Add",
        [graph.constant(added[columns], f"{bias}.{part}"), made],
        f"{path}/{part}/Add",
    )


def _split_halves(graph: Graph) -> None:
    """Replace slices of a product's columns by products of these columns."""
    wiring = Wiring(graph)
    taken = dict[str, str]()
    for node in graph.of_type("Slice"):
        with suppress(MismatchError):
            product, bias = _find_product(wiring, node.input[0])
            axis = _Axis(node.input[0], 3, _columns(graph, product))
            span = _span(wiring, node, axis)
            part = "gates" if span[0] else "inputs"
            taken[node.output[0]] = _split_off(graph, product, bias, part, span)
    for node in graph.nodes:
        node.input[:] = [taken.get(name, name) for name in node.input]


def _span(wiring: Wiring, node: NodeProto, last: _Axis) -> tuple[int, int]:
    """Read the start and end of a Slice of a tensor's last axis."""
    require(len(node.input) >= 4)
    begin, end, axis, *step = (_integer(wiring, name, last) for name in node.input[1:])
    require(wiring.uncast(node.input[0]) == wiring.uncast(last.tensor))
    require(axis in (-1, last.rank - 1) and step in ([], [1]))
    return begin, min(end, last.width)


def _integer(wiring: Wiring, name: str, last: _Axis) -> int:
    """Compute an integer from constants and the size of this axis."""
    node = wiring.writers.get(name)
    if node is None:
        value = wiring.value(name)
        require(value.size == 1)
        return int(value.item())
    if node.op_type in ("Cast", "Squeeze", "Unsqueeze"):
        return _integer(wiring, node.input[0], last)
    if node.op_type == "Gather":
        shape = wiring.writer(node.input[0], "Shape")
        require(wiring.uncast(shape.input[0]) == wiring.uncast(last.tensor))
        require(wiring.graph.scalar(node.input[1]) in (-1, last.rank - 1))
        return last.width
    require(node.op_type in ARITHMETIC)
    one, other = (_integer(wiring, each, last) for each in node.input)
    return ARITHMETIC[node.op_type](one, other)


ARITHMETIC = {"Add": operator.add, "Mul": operator.mul, "Div": operator.floordiv}


def _masks_distance(wiring: Wiring, name: str) -> bool:
    """Check for a mask of padding and of tokens outside the window: (rows, 1,
    tokens, tokens)."""
    clipped = find_writer(wiring.writers, name, "Clip")
    added = clipped and find_writer(wiring.writers, clipped.input[0], "Add")
    return (
        added is not None
        and masks_keys(wiring, added.input[0])
        and _of_sizes(wiring, added.input[1])
    )


def _of_sizes(wiring: Wiring, name: str) -> bool:
    """Check whether a tensor depends on constants and sizes alone."""
    node = wiring.writers.get(name)
    if node is None:
        return name in wiring.graph.tensors
    return node.op_type == "Shape" or all(
        _of_sizes(wiring, each) for each in node.input if each
    )


def write_out(graph: Graph) -> None:
    """Expand every rotation into ONNX's own operators, on (rows, tokens, heads,
    size)."""
    tables: dict[str, str] = {}
    for node in [
        each for each in graph.nodes if (each.domain, each.op_type) == (OURS, ROTARY)
    ]:
        source, cosines, sines = node.input
        path = node.name
        heads = attribute(node, "heads")
        size = attribute(node, "size")
        for name in (cosines, sines):
            if name not in tables:
                tables[name] = graph.add(
                    "Unsqueeze", [name, graph.integers(2)], f"{name}/of_heads"
                )
                if name == sines:
                    signs = graph.constant(
                        np.repeat(np.array([-1, 1], np.float32), size // 2),
                        f"signs_{size}",
                    )
                    tables[name] = graph.add(
                        "Mul", [tables[name], signs], f"{name}/signed"
                    )
        by_head = graph.add(
            "Reshape", [source, graph.integers(0, 0, heads, size)], f"{path}/by_head"
        )
        halves = graph.split(by_head, [size // 2] * 2, f"{path}/halves")
        swapped = graph.add("Concat", halves[::-1], f"{path}/swapped", axis=-1)
        kept = graph.add("Mul", [by_head, tables[cosines]], f"{path}/cos")
        moved = graph.add("Mul", [swapped, tables[sines]], f"{path}/sin")
        total = graph.add("Add", [kept, moved], f"{path}/sum")
        graph.replace(
            node,
            "Reshape",
            [total, graph.integers(0, 0, heads * size)],
            f"{path}/joined",
        )
