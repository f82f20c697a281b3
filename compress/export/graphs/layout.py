"""Tokens on the first axis, rows on the second: then a head's queries, keys and values are where a product can read
them, and three of the four copies that attention costs are not made."""

from onnx import NodeProto

from compress.export.graphs.attention import TURNED
from compress.export.graphs.net import OURS, Net, attribute, set_attribute


def tokens_first(net: Net) -> int:
    """Turns everything from the last tensor that all of the first attention comes from; how many attentions are."""
    net.prune()
    attentions = net.attentions()
    start = _start(net, attentions[0]) if attentions else None
    if start is None:
        return 0
    nodes, before = list(net.nodes), _before(net, start)
    turned: dict[str, str] = {}
    back: dict[str, str] = {}
    _turn_tensor(net, start, turned)
    for node in nodes:
        read = net.varying(node)
        if not any(name in turned for name in read):
            continue
        if node.domain == OURS or net.tokenwise(node):
            if all(name in turned or name in before for name in read):
                for name in read:
                    _turn_tensor(net, name, turned)
                _turn(net, node, turned)
                continue
        elif _takes_tokens(net, node, turned):
            continue
        for name in read:  # what knows no other order gets the old one
            if name in turned and name not in back and name not in before:
                back[name] = net.add("Transpose", [turned[name]], f"{node.name}/rows_first", perm=TURNED)
        node.input[:] = [back.get(name, name) for name in node.input]
    for name in net.outputs:
        if name in turned:
            net.add("Transpose", [turned[name]], f"{name}/rows_first", output=name, perm=TURNED)
    return sum(attribute(node, "tokens_first") for node in attentions)


def _turn_tensor(net: Net, name: str, turned: dict[str, str]) -> None:
    if name not in turned:
        turned[name] = net.add("Transpose", [name], f"{name}/tokens_first", perm=TURNED)


def _before(net: Net, start: str) -> set[str]:
    """`start`, and the tensors that it comes from token by token: residuals begin there."""
    writers, found, open_ = net.writers(), set[str](), [start]
    while open_:
        name = open_.pop()
        found.add(name)
        node = writers.get(name)
        if node is not None and net.tokenwise(node):
            open_ += [each for each in net.varying(node) if each not in found]
    return found


def _turn(net: Net, node: NodeProto, turned: dict[str, str]) -> None:
    node.input[:] = [turned.get(name, name) for name in node.input]
    _rename(net, node, turned)
    if node.domain == OURS:
        set_attribute(node, "tokens_first", 1)


def _rename(net: Net, node: NodeProto, turned: dict[str, str]) -> None:
    before = node.output[0]
    turned[before] = net.renamed(node, f"{before}.tokens_first")


def _takes_tokens(net: Net, node: NodeProto, turned: dict[str, str]) -> bool:
    """A node that takes some tokens, or drops the axis of the only one: on the other axis."""
    if node.op_type == "Gather" and attribute(node, "axis", 0) == 1 and net.value(node.input[1]) is not None:
        node.input[0] = turned[node.input[0]]
        set_attribute(node, "axis", 0)
        index = net.value(node.input[1])
        if index is not None and index.ndim == 1:
            _rename(net, node, turned)
        return True
    if node.op_type == "Squeeze" and len(node.input) == 2:
        axes = net.value(node.input[1])
        if axes is not None and axes.reshape(-1).tolist() == [1]:
            node.input[:] = [turned[node.input[0]], net.integers(0)]
            return True
    return False


def _start(net: Net, attention: NodeProto) -> str | None:
    """The last tensor that queries, keys and values all come from, token by token."""
    writers = net.writers()
    order = {name: place for place, node in enumerate(net.nodes) for name in node.output}
    frontier = set(attention.input[:3])
    while len(frontier) > 1:
        latest = max(frontier, key=lambda name: order.get(name, -1))
        node = writers.get(latest)
        if node is None or not (net.tokenwise(node) or _takes_one(net, node)):
            return None
        frontier = (frontier - {latest}) | set(net.varying(node))
    return frontier.pop()


def _takes_one(net: Net, node: NodeProto) -> bool:
    """A node that takes tokens and keeps their axis."""
    if node.op_type != "Gather" or attribute(node, "axis", 0) != 1:
        return False
    index = net.value(node.input[1])
    return index is not None and index.ndim == 1
