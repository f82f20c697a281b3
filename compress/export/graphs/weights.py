"""What is done to all scores alike, done to the weights once; and products that read the same, made one."""

from collections.abc import Callable
from functools import partial

import numpy as np
import onnx
from onnx import NodeProto

from compress.export.graphs.attention import Core, Product, product
from compress.export.graphs.net import Array, Net, attribute, set_attribute


def fold_scales(net: Net, cores: list[Core]) -> None:
    """The scale of the scores goes into the weights of the queries."""
    for core, node in _nodes(net, cores):
        if core.scale != 1.0:
            made = _product(net, node.input[0])
            _reweigh(net, made, "scaled", partial(_scaled, factor=core.scale))


def mask_keys(net: Net, cores: list[Core]) -> None:
    """The mask is added to the keys (rows x tokens x width numbers) instead of to the scores (rows x heads x tokens x
    tokens): every head gets one feature more, 1 in all queries and the mask's value in the keys."""
    spread: dict[tuple[str, int, int, int], str] = {}
    for core, node in _nodes(net, cores):
        if not core.mask:
            continue
        heads, size, first = core.heads, core.size, attribute(node, "tokens_first")
        for name, bias in ((node.input[0], 1.0), (node.input[1], 0.0)):
            made = _product(net, name)
            _reweigh(net, made, "masked", partial(_widened, heads=heads, bias=bias))
        key = core.mask, heads, size, first
        if key not in spread:
            spread[key] = _spread(net, *key)
        node.input.append(spread[key])
        set_attribute(node, "size", size + 1)


def merge(net: Net) -> int:
    """Makes one product of the queries', keys' and values' products that read the same tensor; how many became one."""
    merged = 0
    for node in net.attentions():
        made = [_product(net, name) for name in node.input[:3]]
        for source in dict.fromkeys(each.source for each in made):
            alike = [each for each in made if each.source == source]
            if len(alike) > 1:
                _join(net, alike)
                merged += len(alike)
    return merged


def _nodes(net: Net, cores: list[Core]) -> list[tuple[Core, NodeProto]]:
    by_name = {node.name: node for node in net.attentions()}
    return [(core, by_name[core.name]) for core in cores]


def _product(net: Net, name: str) -> Product:
    found = product(net, name, net.writers(), net.readers())
    assert found is not None, "an attention's products are checked when it is found"
    return found


def _reweigh(net: Net, made: Product, suffix: str, change: Callable[[Array], Array]) -> None:
    """Other weight and bias; of a weight that several layers share, one other for all of them."""
    for node, name in ((made.product, made.weight), (made.sum, made.bias)):
        value = net.value(name)
        assert value is not None
        changed = net.constant(change(value), f"{name}.{suffix}")
        node.input[:] = [changed if each == name else each for each in node.input]


def _scaled(value: Array, factor: float) -> Array:
    return np.asarray(value * factor, value.dtype)


def _widened(value: Array, heads: int, bias: float) -> Array:
    """(..., heads x size) -> (..., heads x (size + 1)): of a weight 0, of a bias `bias` in the new places."""
    by_head = value.reshape(*value.shape[:-1], heads, -1)
    new = np.full((*by_head.shape[:-1], 1), bias if value.ndim == 1 else 0.0, value.dtype)
    return np.concatenate([by_head, new], axis=-1).reshape(*value.shape[:-1], -1)


def _spread(net: Net, mask: str, heads: int, size: int, first: int) -> str:
    """The mask (rows, 1, 1, tokens) as (rows, tokens, heads x (size + 1)), 0 but in the last place of every head."""
    column = net.add("Reshape", [mask, net.integers(0, -1, 1)], f"{mask}/column")
    if first:
        column = net.add("Transpose", [column], f"{mask}/tokens_first", perm=[1, 0, 2])
    places = np.zeros((heads, size + 1), np.float32)
    places[:, -1] = 1.0
    return net.add("Mul", [column, net.constant(places.reshape(-1), "mask_places")], f"{mask}/in_keys")


def _join(net: Net, alike: list[Product]) -> None:
    values = [(net.value(each.weight), net.value(each.bias)) for each in alike]
    weights, biases = ([value for value in group if value is not None] for group in zip(*values, strict=True))
    name = alike[0].product.name + ".merged"
    weight = net.constant(np.concatenate(weights, axis=1), f"{alike[0].weight}.merged")
    bias = net.constant(np.concatenate(biases), f"{alike[0].bias}.merged")
    whole = net.add("MatMul", [alike[0].source, weight], name)
    summed = net.add("Add", [bias, whole], alike[0].sum.name + ".merged")
    sizes = net.integers(*(len(each) for each in biases))
    parts = [each.sum.output[0] for each in alike]
    for each in alike:
        net.remove(each.sum)
    net.nodes.append(onnx.helper.make_node("Split", [summed, sizes], parts, name=f"{name}/Split", axis=-1))
