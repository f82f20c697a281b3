"""Find attention in a graph by its structure, represent it as one node during the
rewriting, and expand that again.

The node reads queries, keys, values, each (rows, tokens, heads x size), and where there
is a mask the tensor that is added to the keys, or with `mask_on_scores` to the scores.
It writes (rows, tokens, heads x value_size). With `tokens_first` the first two axes of
all of these are swapped.
"""

from dataclasses import dataclass, replace

from onnx import NodeProto

from compress.exporters.rewrite.graph import (
    ATTENTION_OPERATOR,
    OURS,
    Array,
    Graph,
    Readers,
    Writers,
    attribute,
    find_writer,
    trace_back,
)

BY_HEAD = [0, 2, 1, 3]
KEYS_BY_HEAD = [0, 2, 3, 1]
TURNED = [1, 0, 2]
KEYS_TURNED = [1, 2, 0]


@dataclass(frozen=True)
class Linear:
    """A product with a constant weight and its constant bias; without a bias `sum` is
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
    def around(
        graph: Graph, softmax: NodeProto, writers: Writers, readers: Readers
    ) -> "AttentionCore | None":
        """Find the attention of this softmax; None for one of another form."""
        context, joined = find_context(readers, softmax.output[0])
        scores, mask = _before_mask(graph, softmax.input[0], writers)
        scores, scale = _before_scale(graph, scores, writers)
        multiplied = find_writer(writers, scores, "MatMul")
        if (
            context is None
            or joined is None
            or multiplied is None
            or attribute(softmax, "axis", -1) not in (-1, 3)
        ):
            return None
        parts = [
            _by_head(graph, multiplied.input[0], BY_HEAD, writers, readers),
            _by_head(graph, multiplied.input[1], KEYS_BY_HEAD, writers, readers),
            _by_head(graph, context.input[1], BY_HEAD, writers, readers),
        ]
        found = [part for part in parts if part is not None]
        if (
            len(found) < 3
            or len({part.heads for part in found}) > 1
            or (mask and not masks_keys(graph, mask, writers))
        ):
            return None
        queries, _, values = found
        name = softmax.name.removesuffix("/Softmax")
        inputs = tuple(part.source for part in found)
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
    writers = graph.writers()
    readers = graph.readers()
    softmaxes = [node for node in graph.nodes if node.op_type == "Softmax"]
    cores = [
        core
        for node in softmaxes
        if (core := AttentionCore.around(graph, node, writers, readers)) is not None
    ]
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


def linear(
    graph: Graph, name: str, writers: Writers, readers: Readers, *, bare: bool = False
) -> Linear | None:
    """Find the product whose sum with a bias is `name`; with `bare` also one without a
    bias."""
    total = find_writer(writers, name, "Add")
    alone = find_writer(writers, name, "MatMul") if bare else None
    if alone is not None and len(readers[name]) == 1 and graph.tokenwise(alone):
        return Linear(alone, alone, alone.input[1], "")
    if total is None or len(readers[name]) != 1:
        return None
    for bias, inner in (tuple(total.input), tuple(reversed(total.input))):
        node = find_writer(writers, inner, "MatMul")
        if (
            node is not None
            and len(readers[inner]) == 1
            and graph.tokenwise(node)
            and _rank(graph.value(bias)) == 1
        ):
            return Linear(node, total, node.input[1], bias)
    return None


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

    With tokens first rows and heads are one axis: onnxruntime's product then reads the
    transposed tensor in place.
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


def only_reader(
    readers: Readers, name: str, operator: str, perm: list[int] | None = None
) -> NodeProto | None:
    """Return the only node that reads `name`, if it is of this operator."""
    found = readers.get(name, [])
    if len(found) != 1 or found[0].op_type != operator:
        return None
    return found[0] if perm is None or attribute(found[0], "perm") == perm else None


def find_context(
    readers: Readers, probabilities: str
) -> tuple[NodeProto | None, NodeProto | None]:
    """Find the product of probabilities and values, and the node that concatenates its
    heads."""
    context = only_reader(readers, probabilities, "MatMul")
    turned = context and only_reader(readers, context.output[0], "Transpose", BY_HEAD)
    return context, turned and only_reader(readers, turned.output[0], "Reshape")


def masks_keys(graph: Graph, name: str, writers: Writers) -> bool:
    """Check whether a tensor (rows, 1, 1, tokens) is computed from `attention_mask`
    (rows, tokens) alone."""
    axes: list[int] = []
    while name in writers:
        node = writers[name]
        if node.op_type == "Unsqueeze":
            if len(node.input) < 2:  # an opset below 13
                return False
            value = graph.value(node.input[1])
            axes = [*([-1] if value is None else value.reshape(-1).tolist()), *axes]
        elif node.op_type not in ("Add", "Cast", "Mul", "Sub"):
            return False
        varying = graph.varying(node)
        if len(varying) != 1 or any(
            _rank(graph.value(each)) for each in node.input if each not in varying
        ) != (node.op_type == "Unsqueeze"):
            return False
        name = varying[0]
    return name == "attention_mask" and axes == [1, 2]


def _before_mask(graph: Graph, name: str, writers: Writers) -> tuple[str, str]:
    """Find the scores before a mask is added, and the mask."""
    added = find_writer(writers, name, "Add")
    if added is None:
        return name, ""
    first, second = added.input
    return (second, first) if masks_keys(graph, first, writers) else (first, second)


def _before_scale(graph: Graph, name: str, writers: Writers) -> tuple[str, float]:
    """Find the scores before they are scaled by a constant, and the factor."""
    node = writers.get(name)
    factor = (
        graph.scalar(node.input[1])
        if node is not None and node.op_type in ("Mul", "Div")
        else None
    )
    if node is None or not factor:
        return name, 1.0
    return node.input[0], factor if node.op_type == "Mul" else 1.0 / factor


def _by_head(
    graph: Graph, name: str, perm: list[int], writers: Writers, readers: Readers
) -> _ByHead | None:
    nodes = trace_back(writers, name, "Transpose", "Reshape")
    product = linear(graph, nodes[1].input[0], writers, readers) if nodes else None
    if product is None or attribute(nodes[0], "perm") != perm:
        return None
    # rows, tokens, heads, size, the first two computed
    sizes = find_writer(writers, nodes[1].input[1], "Concat")
    last = (
        None if sizes is None or len(sizes.input) != 4 else graph.scalar(sizes.input[3])
    )
    bias = graph.value(product.bias)
    if not last or bias is None or last < 1 or bias.size % last:
        return None
    return _ByHead(nodes[1].input[0], int(bias.size // last), int(last))


def _rank(value: Array | None) -> int:
    return 0 if value is None else value.ndim
