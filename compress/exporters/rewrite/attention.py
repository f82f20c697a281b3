"""Find attention in a graph by its structure, represent it as one node during
rewriting, and expand the node again.

The node reads queries, keys, values, each (rows, tokens, heads x size), and, if there
is a mask, the tensor that is added to the keys, or with `mask_on_scores` to the scores.
It writes (rows, tokens, heads x value_size). With `tokens_first`, the first two axes of
all these tensors are swapped.
"""

from dataclasses import dataclass, replace
from functools import partial

from onnx import NodeProto

from compress.exporters.rewrite.graph import (
    ATTENTION_OPERATOR,
    OURS,
    Graph,
    MismatchError,
    Wiring,
    attribute,
    find_all,
    find_writer,
    rank,
    require,
)

BY_HEAD = [0, 2, 1, 3]
KEYS_BY_HEAD = [0, 2, 3, 1]
TURNED = [1, 0, 2]
KEYS_TURNED = [1, 2, 0]


@dataclass(frozen=True)
class Linear:
    """A product with a constant weight, and its constant bias; without a bias, `sum` is
    the product itself."""

    product: NodeProto
    sum: NodeProto
    weight: str
    bias: str

    @property
    def source(self) -> str:
        return self.product.input[0]


@dataclass(frozen=True)
class AttentionCore:
    """An attention of the form that `to_onnx` exports: softmax(queries @ keys x scale +
    mask of the keys) @ values.

    node    concatenates the heads, or after `collapse` represents the attention
    name    its path in the model
    inputs  queries, keys, values
    """

    node: NodeProto
    name: str
    inputs: tuple[str, ...]
    mask: str
    heads: int
    size: int
    value_size: int
    scale: float

    @staticmethod
    def around(wiring: Wiring, softmax: NodeProto) -> "AttentionCore":
        """Find the attention of this softmax. Raises MismatchError for one of another
        form."""
        require(attribute(softmax, "axis", -1) in (-1, 3))
        context, joined = find_context(wiring, softmax.output[0])
        scores, mask = _before_mask(wiring, softmax.input[0])
        scores, scale = _before_scale(wiring, scores)
        product = wiring.writer(scores, "MatMul")
        queries = _by_head(wiring, product.input[0], BY_HEAD)
        keys = _by_head(wiring, product.input[1], KEYS_BY_HEAD)
        values = _by_head(wiring, context.input[1], BY_HEAD)
        require(queries.heads == keys.heads == values.heads)
        require(not mask or masks_keys(wiring, mask))
        name = softmax.name.removesuffix("/Softmax")
        inputs = queries.source, keys.source, values.source
        return AttentionCore(
            joined, name, inputs, mask, queries.heads, queries.size, values.size, scale
        )


@dataclass(frozen=True)
class _ByHead:
    """A tensor (rows, tokens, heads x size) that is split by head."""

    source: str
    heads: int
    size: int


def collapse(graph: Graph) -> list[AttentionCore]:
    """Replace every attention of the known form by one node."""
    softmaxes = graph.of_type("Softmax")
    cores = find_all(partial(AttentionCore.around, Wiring(graph)), softmaxes)
    for at, core in enumerate(cores):
        node = graph.replace(
            core.node,
            ATTENTION_OPERATOR,
            core.inputs,
            core.name,
            domain=OURS,
            heads=core.heads,
            size=core.size,
            value_size=core.value_size,
            tokens_first=0,
        )
        cores[at] = replace(core, node=node)
    graph.kept |= {core.mask for core in cores if core.mask}
    graph.prune()
    return cores


def linear(wiring: Wiring, name: str, *, bare: bool = False) -> Linear:
    """Find the product whose sum with a bias is `name`; with `bare`, also a product
    without a bias."""
    graph = wiring.graph
    require(wiring.read_once(name))
    alone = find_writer(wiring.writers, name, "MatMul") if bare else None
    if alone is not None and graph.tokenwise(alone):
        return Linear(alone, alone, alone.input[1], "")
    total = wiring.writer(name, "Add")
    for bias, inner in (tuple(total.input), tuple(reversed(total.input))):
        if rank(graph.value(bias)) == 1:
            node = wiring.writer(inner, "MatMul")
            require(wiring.read_once(inner) and graph.tokenwise(node))
            return Linear(node, total, node.input[1], bias)
    raise MismatchError


def write_out(graph: Graph) -> None:
    """Expand every attention node into ONNX's own operators."""
    for node in graph.attentions():
        path = node.name
        queries, keys, values, *mask = node.input
        on_scores = bool(attribute(node, "mask_on_scores", 0))
        if mask and not on_scores:
            keys = graph.add("Add", [keys, mask[0]], f"{path}/masked_keys")
        by_head = [
            _split_heads(graph, node, queries, "queries"),
            _split_heads(graph, node, keys, "keys"),
        ]
        scores = graph.add("MatMul", by_head, f"{path}/scores")
        if mask and on_scores:
            scores = graph.add("Add", [scores, mask[0]], f"{path}/masked_scores")
        probabilities = graph.add("Softmax", [scores], f"{path}/Softmax", axis=-1)
        by_head = [probabilities, _split_heads(graph, node, values, "values")]
        context = graph.add("MatMul", by_head, f"{path}/context")
        first = attribute(node, "tokens_first")
        turned = graph.add(
            "Transpose", [context], f"{path}/turned", perm=TURNED if first else BY_HEAD
        )
        width = attribute(node, "heads") * attribute(node, "value_size")
        shape = graph.integers(0, -1, width) if first else graph.integers(0, 0, width)
        graph.replace(node, "Reshape", [turned, shape], f"{path}/joined")


def _split_heads(graph: Graph, node: NodeProto, name: str, part: str) -> str:
    """Split queries, keys or values by head: (rows, heads, tokens, size), keys (rows,
    heads, size, tokens).

    With tokens first, rows and heads form one axis: onnxruntime's product then reads
    the transposed tensor in place.
    """
    heads = attribute(node, "heads")
    size = attribute(node, "value_size" if part == "values" else "size")
    first = attribute(node, "tokens_first")
    shape = graph.integers(0, -1, size) if first else graph.integers(0, 0, heads, size)
    split = graph.add("Reshape", [name, shape], f"{node.name}/{part}")
    turns = (TURNED, KEYS_TURNED) if first else (BY_HEAD, KEYS_BY_HEAD)
    return graph.add(
        "Transpose", [split], f"{node.name}/{part}_by_head", perm=turns[part == "keys"]
    )


def find_context(wiring: Wiring, probabilities: str) -> tuple[NodeProto, NodeProto]:
    """Find the product of probabilities and values, and the node that concatenates its
    heads."""
    context = wiring.reader(probabilities, "MatMul")
    turned = wiring.reader(context.output[0], "Transpose")
    require(attribute(turned, "perm") == BY_HEAD)
    return context, wiring.reader(turned.output[0], "Reshape")


def masks_keys(wiring: Wiring, name: str) -> bool:
    """Check whether a tensor (rows, 1, 1, tokens) is computed from `attention_mask`
    (rows, tokens) alone."""
    graph = wiring.graph
    axes: list[int] = []
    while name in wiring.writers:
        node = wiring.writers[name]
        if node.op_type == "Unsqueeze":
            if len(node.input) < 2:  # an opset below 13
                return False
            value = graph.value(node.input[1])
            axes = [*([-1] if value is None else value.reshape(-1).tolist()), *axes]
        elif node.op_type not in ("Add", "Cast", "Mul", "Sub"):
            return False
        varying = graph.varying(node)
        if len(varying) != 1 or any(
            rank(graph.value(each)) for each in node.input if each not in varying
        ) != (node.op_type == "Unsqueeze"):
            return False
        name = varying[0]
    return name == "attention_mask" and axes == [1, 2]


def _before_mask(wiring: Wiring, name: str) -> tuple[str, str]:
    """Find the scores before a mask is added, and the mask."""
    added = find_writer(wiring.writers, name, "Add")
    if added is None:
        return name, ""
    first, second = added.input
    return (second, first) if masks_keys(wiring, first) else (first, second)


def _before_scale(wiring: Wiring, name: str) -> tuple[str, float]:
    """Find the scores before they are scaled by a constant, and the factor."""
    node = wiring.writers.get(name)
    if node is None or node.op_type not in ("Mul", "Div"):
        return name, 1.0
    factor = wiring.graph.scalar(node.input[1])
    if not factor:
        return name, 1.0
    return node.input[0], factor if node.op_type == "Mul" else 1.0 / factor


def _by_head(wiring: Wiring, name: str, perm: list[int]) -> _ByHead:
    turned, split = wiring.trace_back(name, "Transpose", "Reshape")
    require(attribute(turned, "perm") == perm)
    product = linear(wiring, split.input[0])
    # rows, tokens, heads, size, the first two computed
    sizes = wiring.writer(split.input[1], "Concat")
    require(len(sizes.input) == 4)
    size = wiring.scalar(sizes.input[3])
    width = wiring.value(product.bias).size
    require(size >= 1 and width % size == 0)
    return _ByHead(split.input[0], int(width // size), int(size))
