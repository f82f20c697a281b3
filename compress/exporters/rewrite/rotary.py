"""Find attention with rotary positions, and gated feed-forwards, as ModernBERT has
them.

ModernBERT computes queries, keys and values by one product, and both halves of a
feed-forward by one. These are divided into separate products, so that unused tokens are
not computed, and nothing is copied to be split. The rotation of queries or keys is one
node during the rewriting: it reads a tensor (rows, tokens, heads x size) and two tables
(1, tokens, size) of cosines and sines, and writes x cos + (second half of each head,
first half) (-sin, sin).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from onnx import NodeProto

from compress.exporters.rewrite.attention import (
    BY_HEAD,
    AttentionCore,
    find_context,
    masks_keys,
    only_reader,
)
from compress.exporters.rewrite.graph import (
    ATTENTION_OPERATOR,
    OURS,
    ROTARY,
    Graph,
    Readers,
    Writers,
    attribute,
    find_writer,
    trace_back,
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
    def around(
        graph: Graph, softmax: NodeProto, writers: Writers, readers: Readers
    ) -> "_RotaryAttention | None":
        """Find the attention of this softmax; None for one of another form."""
        probabilities = softmax.output[0]
        while (cast := only_reader(readers, probabilities, "Cast")) is not None:
            probabilities = cast.output[0]
        context, joined = find_context(readers, probabilities)
        nodes = trace_back(writers, softmax.input[0], "Add", "Mul", "MatMul")
        if (
            context is None
            or joined is None
            or not nodes
            or attribute(softmax, "axis", -1) not in (-1, 3)
        ):
            return None
        added, scaled, scores = nodes
        scale = graph.scalar(scaled.input[1])
        keys_last = find_writer(writers, scores.input[1], "Transpose")
        if not scale or keys_last is None or attribute(keys_last, "perm") != KEYS_LAST:
            return None
        queries = _read_rotation(graph, scores.input[0], writers)
        keys = _read_rotation(graph, keys_last.input[0], writers)
        if queries is None or keys is None or queries[1:] != keys[1:]:
            return None
        parts = [
            _part(graph, name, writers)
            for name in (queries.source, keys.source, context.input[1])
        ]
        found = [part for part in parts if part is not None]
        if [part.place for part in found] != [0, 1, 2] or len(
            {part.product.output[0] for part in found}
        ) > 1:
            return None
        mask = added.input[1]
        if not (
            masks_keys(graph, mask, writers) or _masks_distance(graph, mask, writers)
        ):
            return None
        return _RotaryAttention(found[0], queries, mask, scale, softmax, joined)

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
            local=int(not masks_keys(graph, self.mask, graph.writers())),
        )
        return AttentionCore(
            node, name, tuple(inputs), "", heads, size, size, self.scale
        )


def collapse(graph: Graph) -> list[AttentionCore]:
    """Replace every attention of this form by one node, and divide the joint
    products."""
    writers = graph.writers()
    readers = graph.readers()
    softmaxes = [node for node in graph.nodes if node.op_type == "Softmax"]
    found = [
        _RotaryAttention.around(graph, node, writers, readers) for node in softmaxes
    ]
    cores = [each.replace(graph) for each in found if each is not None]
    if cores:
        _split_halves(graph)
        graph.prune()
    return cores


def _read_rotation(graph: Graph, name: str, writers: Writers) -> _Rotation | None:
    """Read the parts of x cos + (-second half, first half) sin; None for anything
    else."""
    total = find_writer(writers, _uncast(name, writers), "Add")
    kept, swapped = (
        total and find_writer(writers, each, "Mul")
        for each in (total.input if total else ("", ""))
    )
    halves = swapped and find_writer(writers, swapped.input[0], "Concat")
    if (
        not (kept and swapped and halves)
        or len(halves.input) != 2
        or attribute(halves, "axis") not in (-1, 3)
    ):
        return None
    part = _part(graph, kept.input[0], writers)
    negated = find_writer(writers, halves.input[0], "Neg")
    second = negated and find_writer(writers, negated.input[0], "Slice")
    first = find_writer(writers, halves.input[1], "Slice")
    cosines = find_writer(writers, kept.input[1], "Unsqueeze")
    sines = find_writer(writers, swapped.input[1], "Unsqueeze")
    if not (part and first and second and cosines and sines):
        return None
    axes = [graph.value(each.input[1]) for each in (cosines, sines)]
    if any(each is None or each.tolist() != [1] for each in axes):
        return None
    last = _Axis(_uncast(kept.input[0], writers), 4, part.size)
    spans = [_span(graph, each, writers, last) for each in (first, second)]
    if spans != [(0, part.size // 2), (part.size // 2, part.size)]:
        return None
    return _Rotation(kept.input[0], cosines.input[0], sines.input[0])


def _part(graph: Graph, name: str, writers: Writers) -> _Part | None:
    nodes = trace_back(
        writers, _uncast(name, writers), "Transpose", "Squeeze", "Split", "Reshape"
    )
    if not nodes or attribute(nodes[0], "perm") != BY_HEAD:
        return None
    _, flat, split, shaped = nodes
    product = _find_product(graph, shaped.input[0], writers)
    # rows, tokens, three, heads, size
    sizes = find_writer(writers, shaped.input[1], "Concat")
    if product is None or sizes is None:
        return None
    equal = graph.value(split.input[1])
    size = graph.scalar(sizes.input[-1])
    if (
        equal is None
        or equal.tolist() != [1, 1, 1]
        or attribute(split, "axis", 0) not in (-3, 2)
    ):
        return None
    if (
        len(sizes.input) != 5
        or graph.scalar(sizes.input[2]) != 3
        or not size
        or _columns(graph, product[0]) % (3 * size)
    ):
        return None
    return _Part(*product, list(split.output).index(flat.input[0]), int(size))


def _find_product(
    graph: Graph, name: str, writers: Writers
) -> tuple[NodeProto, str] | None:
    """Find the product with a constant matrix that computes a tensor, and its bias, or
    ""."""
    bias = ""
    added = find_writer(writers, name, "Add")
    if added is not None:
        first, second = added.input
        bias, name = (first, second) if first in graph.tensors else (second, first)
        if (value := graph.value(bias)) is None or value.ndim != 1:
            return None
    product = find_writer(writers, name, "MatMul")
    return (
        None
        if product is None or not graph.is_matrix(product.input[1])
        else (product, bias)
    )


def _columns(graph: Graph, product: NodeProto) -> int:
    return int(graph.tensors[product.input[1]].dims[1])


def _split_off(
    graph: Graph, product: NodeProto, bias: str, part: str, span: tuple[int, int]
) -> str:
    """Compute these columns of a product, and of its bias, by a separate product."""
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
    writers = graph.writers()
    taken = dict[str, str]()
    for node in [each for each in graph.nodes if each.op_type == "Slice"]:
        made = _find_product(graph, node.input[0], writers)
        span = made and _span(
            graph, node, writers, _Axis(node.input[0], 3, _columns(graph, made[0]))
        )
        if made and span:
            taken[node.output[0]] = _split_off(
                graph, *made, "gates" if span[0] else "inputs", span
            )
    for node in graph.nodes:
        node.input[:] = [taken.get(name, name) for name in node.input]


def _span(
    graph: Graph, node: NodeProto, writers: Writers, last: _Axis
) -> tuple[int, int] | None:
    """Read the begin and end of a Slice of a tensor's last axis; None for any other
    Slice."""
    begin, end, axis, step = (
        _integer(graph, name, writers, last)
        for name in (*node.input[1:], *[""] * 4)[:4]
    )
    if (
        _uncast(node.input[0], writers) != _uncast(last.tensor, writers)
        or begin is None
        or end is None
    ):
        return None
    if axis not in (-1, last.rank - 1) or (len(node.input) > 4 and step != 1):
        return None
    return begin, min(end, last.width)


def _integer(graph: Graph, name: str, writers: Writers, last: _Axis) -> int | None:
    """Compute an integer from constants and the size of this axis; None where it
    depends on more."""
    value = graph.value(name)
    node = writers.get(name)
    if value is not None or node is None:
        return int(value.item()) if value is not None and value.size == 1 else None
    if node.op_type in ("Cast", "Squeeze", "Unsqueeze"):
        return _integer(graph, node.input[0], writers, last)
    if node.op_type == "Gather":
        shape = find_writer(writers, node.input[0], "Shape")
        same = shape is not None and _uncast(shape.input[0], writers) == _uncast(
            last.tensor, writers
        )
        return (
            last.width
            if same and graph.scalar(node.input[1]) in (-1, last.rank - 1)
            else None
        )
    one, other = (
        [_integer(graph, each, writers, last) for each in node.input] + [None, None]
    )[:2]
    if one is None or other is None or len(node.input) != 2:
        return None
    return {"Add": one + other, "Mul": one * other, "Div": one // max(other, 1)}.get(
        node.op_type
    )


def _masks_distance(graph: Graph, name: str, writers: Writers) -> bool:
    """Check for a mask of padding and of tokens that are too far away: (rows, 1,
    tokens, tokens)."""
    nodes = trace_back(writers, name, "Clip", "Add")
    return (
        bool(nodes)
        and masks_keys(graph, nodes[1].input[0], writers)
        and _of_sizes(graph, nodes[1].input[1], writers)
    )


def _of_sizes(graph: Graph, name: str, writers: Writers) -> bool:
    """Check whether a tensor depends on constants and sizes alone."""
    node = writers.get(name)
    if node is None:
        return name in graph.tensors
    return node.op_type == "Shape" or all(
        _of_sizes(graph, each, writers) for each in node.input if each
    )


def _uncast(name: str, writers: Writers) -> str:
    while (cast := find_writer(writers, name, "Cast")) is not None:
        name = cast.input[0]
    return name


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
