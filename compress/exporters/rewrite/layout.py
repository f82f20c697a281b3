"""Put tokens on the first axis and rows on the second: then a product can read a head's
queries, keys and values in place, which saves three of the four copies per
attention."""

from collections.abc import Callable
from functools import partial

import numpy as np
import onnx
from onnx import NodeProto

from compress.arrays import Array
from compress.exporters.rewrite.attention import TURNED, AttentionCore, Linear, linear
from compress.exporters.rewrite.graph import (
    ATTENTION_OPERATOR,
    FACTOR_KEY,
    OURS,
    ROTARY,
    Graph,
    MismatchError,
    Wiring,
    attribute,
    find_writer,
    set_attribute,
)

TurnedNames = dict[str, str]
"""Name of a tensor -> name of the same with other axes."""


def tokens_first(graph: Graph) -> int:
    """Transpose everything after the last tensor on which the whole first attention
    depends; return the number of attentions.

    Nothing changes if a mask is added to the scores: with rows and heads on one axis,
    each head would need its own mask.
    """
    graph.prune()
    attentions = graph.attentions()
    on_scores = any(attribute(node, "mask_on_scores", 0) for node in attentions)
    start = None if on_scores or not attentions else _start(graph, attentions[0])
    if start is None:
        return 0
    nodes = list(graph.nodes)
    before = _find_sources(graph, start)
    turned: TurnedNames = {}
    back: TurnedNames = {}
    _turn_tensor(graph, start, turned)
    for node in nodes:
        read = graph.varying(node)
        if not any(name in turned for name in read):
            continue
        if node.domain == OURS or graph.tokenwise(node):
            if all(name in turned or name in before for name in read):
                for name in read:
                    _turn_tensor(graph, name, turned)
                node.input[:] = [turned.get(name, name) for name in node.input]
                _rename(graph, node, turned)
                if node.domain == OURS:
                    set_attribute(node, "tokens_first", 1)
                continue
        elif _takes_tokens(graph, node, turned):
            continue
        for name in read:  # all other nodes get the old order
            if name in turned and name not in back and name not in before:
                back[name] = graph.add(
                    "Transpose", [turned[name]], f"{node.name}/rows_first", perm=TURNED
                )
        node.input[:] = [back.get(name, name) for name in node.input]
    for name in graph.outputs:
        if name in turned:
            graph.add(
                "Transpose",
                [turned[name]],
                f"{name}/rows_first",
                output=name,
                perm=TURNED,
            )
    return sum(attribute(node, "tokens_first") for node in attentions)


def _turn_tensor(graph: Graph, name: str, turned: TurnedNames) -> None:
    if name not in turned:
        turned[name] = graph.add(
            "Transpose", [name], f"{name}/tokens_first", perm=TURNED
        )


def _find_sources(graph: Graph, start: str) -> set[str]:
    """Find `start` and the tensors from which it is computed token by token: residuals
    begin there."""
    writers = graph.writers()
    found = set[str]()
    open_ = [start]
    while open_:
        name = open_.pop()
        found.add(name)
        node = writers.get(name)
        if node is not None and graph.tokenwise(node):
            open_ += [each for each in graph.varying(node) if each not in found]
    return found


def _rename(graph: Graph, node: NodeProto, turned: TurnedNames) -> None:
    before = node.output[0]
    turned[before] = graph.rename_output(node, f"{before}.tokens_first")


def _gathers_tokens(node: NodeProto) -> bool:
    return node.op_type == "Gather" and attribute(node, "axis", 0) == 1


def _takes_tokens(graph: Graph, node: NodeProto, turned: TurnedNames) -> bool:
    """Change a node that gathers tokens, or drops their axis, to the first axis; return
    False for any other node."""
    # of a Gather or Squeeze
    constant = graph.value(node.input[1]) if len(node.input) == 2 else None
    if constant is None:
        return False
    if _gathers_tokens(node):
        node.input[0] = turned[node.input[0]]
        set_attribute(node, "axis", 0)
        if constant.ndim == 1:
            _rename(graph, node, turned)
        return True
    if node.op_type == "Squeeze" and constant.reshape(-1).tolist() == [1]:
        node.input[:] = [turned[node.input[0]], graph.integers(0)]
        return True
    return False


def _start(graph: Graph, attention: NodeProto) -> str | None:
    """Find the last tensor from which queries, keys and values are all computed token
    by token."""
    writers = graph.writers()
    order = {
        name: place for place, node in enumerate(graph.nodes) for name in node.output
    }
    frontier = set(attention.input[:3])
    while len(frontier) > 1:
        latest = max(frontier, key=lambda name: order.get(name, -1))
        node = writers.get(latest)
        if node is None:
            return None
        index = graph.value(node.input[1]) if _gathers_tokens(node) else None
        takes_tokens = index is not None and index.ndim == 1  # and keeps their axis
        if not takes_tokens and not graph.tokenwise(node):
            return None
        frontier = (frontier - {latest}) | set(graph.varying(node))
    return frontier.pop()


def one_token(graph: Graph) -> int:
    """Compute a single token where only one is used; return the number of changed
    nodes.

    Expects tokens on axis 1, and attention as one node.
    """
    taken = [node for node in graph.nodes if _gathers_tokens(node)]
    return sum(_push_back(graph, node) for node in taken)


def _push_back(graph: Graph, last: NodeProto) -> int:
    index = graph.value(last.input[1])
    if index is None or index.ndim != 0:
        return 0
    narrow = _narrow(graph, last)
    # its other readers need all tokens
    if not any(last.input[0] in node.output for node in narrow):
        return 0
    chosen = graph.integers(int(index))
    inside = {name for node in narrow for name in node.output}
    rows: dict[str, str] = {}
    for node in narrow:
        core = (node.domain, node.op_type) == (OURS, ATTENTION_OPERATOR)
        read = [node.input[0]] if core else graph.varying(node)
        if core and attribute(node, "local", 0):
            node.input[3] = graph.add(
                "Gather",
                [node.input[3], chosen],
                f"{node.name}/mask_of_one_token",
                axis=2,
            )
        for name in read:
            if name not in inside and name not in rows:
                rows[name] = graph.add(
                    "Gather", [name, chosen], f"{node.name}/one_token", axis=1
                )
        node.input[:] = [
            rows.get(name, name) if name in read else name for name in node.input
        ]
    graph.replace(last, "Squeeze", [last.input[0], graph.integers(1)], last.name)
    return len(narrow)


def _narrow(graph: Graph, last: NodeProto) -> list[NodeProto]:
    """List the nodes whose results are used, token by token, by `last` alone."""
    graph.prune()
    readers = graph.readers()
    narrow: dict[str, NodeProto] = {}

    def reads_by_row(reader: NodeProto, name: str) -> bool:
        # the graph's own output; the gathering node
        if not reader.output or reader.output[0] == last.output[0]:
            return bool(reader.output)
        only_as_queries = reader.domain != OURS or (
            list(reader.input).count(name) == 1 and reader.input[0] == name
        )
        return reader.output[0] in narrow and only_as_queries

    for node in reversed(graph.nodes):
        if not (node.domain == OURS or graph.tokenwise(node)) or len(node.output) != 1:
            continue
        if all(
            reads_by_row(reader, node.output[0])
            for reader in readers.get(node.output[0], [])
        ):
            narrow[node.output[0]] = node
    return list(reversed(narrow.values()))


def fold_scales(graph: Graph, cores: list[AttentionCore]) -> None:
    """Fold the scale of the scores into the weights of the queries."""
    for core in cores:
        if core.scale != 1.0:
            scale = partial(_scale, factor=core.scale)
            made = _product(graph, core.node.input[0])
            _reweigh(graph, made, "scaled", scale)
            made.product.metadata_props.add(key=FACTOR_KEY, value=repr(core.scale))


def mask_keys(graph: Graph, cores: list[AttentionCore]) -> None:
    """Add the mask to the keys (rows x tokens x width numbers) instead of the scores
    (rows x heads x tokens x tokens): every head gets one more feature, 1 in all queries
    and the mask's value in the keys."""
    spread: dict[tuple[str, int, int, int], str] = {}
    for core in (core for core in cores if core.mask):
        for name, bias in zip(core.node.input, (1.0, 0.0), strict=False):
            _reweigh(
                graph,
                _product(graph, name),
                "masked",
                partial(_widen, heads=core.heads, bias=bias),
            )
        key = core.mask, core.heads, core.size, attribute(core.node, "tokens_first")
        if key not in spread:
            spread[key] = _spread(graph, *key)
        core.node.input.append(spread[key])
        set_attribute(core.node, "size", core.size + 1)


def mask_scores(graph: Graph, cores: list[AttentionCore]) -> None:
    """Add the mask to the scores, as the model does."""
    for core in (core for core in cores if core.mask):
        core.node.input.append(core.mask)
        set_attribute(core.node, "mask_on_scores", 1)


def merge(graph: Graph) -> int:
    """Merge the products of queries, keys and values that read the same tensor; return
    the number of merged products."""
    merged = 0
    for node in graph.attentions():
        made = [_product(graph, name) for name in node.input[:3]]
        for source in dict.fromkeys(each.source for each in made):
            alike = [each for each in made if each.source == source]
            if len(alike) > 1:
                _join(graph, alike)
                merged += len(alike)
    return merged


def _product(graph: Graph, name: str) -> Linear:
    """Find a product of an attention; it was checked when the attention was found."""
    wiring = Wiring(graph)
    turned = find_writer(wiring.writers, name, ROTARY)
    product = name if turned is None else turned.input[0]
    try:
        return linear(wiring, product, bare=True)
    except MismatchError as error:
        raise AssertionError("products are checked with their attention") from error


def _reweigh(
    graph: Graph, made: Linear, suffix: str, change: Callable[[Array], Array]
) -> None:
    """Change weight and bias; a weight that layers share is changed only once."""
    for node, name in ((made.product, made.weight), (made.sum, made.bias)):
        if not name:
            continue
        value = graph.value(name)
        assert value is not None
        changed = graph.constant(change(value), f"{name}.{suffix}")
        node.input[:] = [changed if each == name else each for each in node.input]


def _scale(value: Array, factor: float) -> Array:
    return np.asarray(value * factor, value.dtype)


def _widen(value: Array, heads: int, bias: float) -> Array:
    """Extend (..., heads x size) to (..., heads x (size + 1)): by 0 in a weight, by
    `bias` in a bias."""
    by_head = value.reshape(*value.shape[:-1], heads, -1)
    new = np.full(
        (*by_head.shape[:-1], 1), bias if value.ndim == 1 else 0.0, value.dtype
    )
    return np.concatenate([by_head, new], axis=-1).reshape(*value.shape[:-1], -1)


def _spread(graph: Graph, mask: str, heads: int, size: int, first: int) -> str:
    """Expand the mask (rows, 1, 1, tokens) to (rows, tokens, heads x (size + 1)), 0
    except in the last place of every head."""
    column = graph.add("Reshape", [mask, graph.integers(0, -1, 1)], f"{mask}/column")
    if first:
        column = graph.add(
            "Transpose", [column], f"{mask}/tokens_first", perm=[1, 0, 2]
        )
    places = np.zeros((heads, size + 1), np.float32)
    places[:, -1] = 1.0
    return graph.add(
        "Mul",
        [column, graph.constant(places.reshape(-1), "mask_places")],
        f"{mask}/in_keys",
    )


def _join(graph: Graph, alike: list[Linear]) -> None:
    values = [(graph.value(each.weight), graph.value(each.bias)) for each in alike]
    weights, biases = (
        [value for value in group if value is not None]
        for group in zip(*values, strict=True)
    )
    name = alike[0].product.name + ".merged"
    weight = graph.constant(
        np.concatenate(weights, axis=1), f"{alike[0].weight}.merged"
    )
    summed = graph.add("MatMul", [alike[0].source, weight], name)
    if biases:
        bias = graph.constant(np.concatenate(biases), f"{alike[0].bias}.merged")
        summed = graph.add("Add", [bias, summed], alike[0].sum.name + ".merged")
    sizes = graph.integers(*(each.shape[1] for each in weights))
    parts = [each.sum.output[0] for each in alike]
    for each in alike:
        graph.remove(each.sum)
    graph.nodes.append(
        onnx.helper.make_node(
            "Split", [summed, sizes], parts, name=f"{name}/Split", axis=-1
        )
    )
