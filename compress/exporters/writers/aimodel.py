"""Run a Core AI program, read back from its asset, in NumPy.

Core AI runs only on Apple's systems; to check an asset elsewhere, every operator is
computed by its definition in coreai-core. Float16 values of the program are rounded to
float16 after each operator, while products are summed in float32. Neither the order of
additions nor the speed is Core AI's.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import expit, softmax

from compress.arrays import Array
from compress.errors import ExportError
from compress.exporters.writers.context import import_extra
from compress.exporters.writers.mil import gelu

TYPES: Mapping[str, type] = {
    "f32": np.float32,
    "f16": np.float16,
    "i1": np.bool_,
    "si8": np.int8,
    "si32": np.int32,
    "si64": np.int64,
    "si16": np.int16,
    "ui4": np.uint8,
    "ui6": np.uint8,
    "ui8": np.uint8,
    "ui32": np.uint32,
}
PACKED = {"ui4": 4, "ui6": 6}
"""Bits of the types whose numbers are packed without gaps, lowest bit first."""


STORED = re.compile(r'(\w+): "0x([0-9A-F]*)"')


class CoreAiProgram:
    """The program of an asset: call it with its inputs by name; it returns its outputs
    in order.

    A program has a function for each input length; the one for the given inputs is run.

    functions   the name of each -> the names, shapes and types of its inputs, such as
                ((1, 128), "si32")
    outputs     the name of each -> the names of its outputs
    operators   the names of the first one's operators, constants left out, in the order
                in which they are computed
    """

    def __init__(self, asset: Path) -> None:
        program = import_extra("coreai.authoring", "coreai").AIProgram._load_bytecode(
            asset / "main.mlirb"
        )
        self._module = program._module._mlir_module  # owns all below
        self._graphs = {
            _text(graph, "sym_name"): graph for graph in self._module.body.operations
        }
        public = {
            name: graph
            for name, graph in self._graphs.items()
            if "priv" not in graph.attributes
        }
        self.functions = {
            name: {
                _name(given): (tuple(value.type.shape), str(value.type.element_type))
                for given, value in zip(
                    graph.attributes["arg_attrs"], _block(graph).arguments, strict=True
                )
            }
            for name, graph in public.items()
        }
        self.outputs = {
            name: [_name(each) for each in graph.attributes["res_attrs"]]
            for name, graph in public.items()
        }
        text = str(self._module)
        # weights: hexadecimal bytes after a header of four bytes
        stored = text[text.find("dialect_resources") :]
        self._stored = {
            name: bytes.fromhex(digits)[4:] for name, digits in STORED.findall(stored)
        }
        self._constants = dict[Any, Array]()
        self.operators = list(self._list_operators(next(iter(public.values()))))
        if unknown := sorted(set(self.operators) - set(CORE_AI_OPERATORS)):
            raise ExportError(
                f"{asset.name}: its operators {', '.join(unknown)} cannot be computed "
                "outside of Core AI by this version, so its answers cannot be checked; "
                "--for onnx and --for ort take every family"
            )

    def __call__(self, inputs: Mapping[str, Array]) -> list[Array]:
        shapes = {name: array.shape for name, array in inputs.items()}
        for function, given in self.functions.items():
            if shapes == {name: shape for name, (shape, _) in given.items()}:
                return self._run(
                    self._graphs[function], [inputs[name] for name in given]
                )
        raise ValueError(
            f"no function reads {shapes}; expected the shapes of one of "
            f"{self.functions}"
        )

    def _list_operators(self, graph: Any) -> Iterator[str]:
        for step in _block(graph).operations:
            name = _operator(step)
            if name == "invoke":
                yield from self._list_operators(self._graphs[_callee(step)])
            elif name not in ("constant", "output"):
                yield name

    def _run(self, graph: Any, inputs: list[Array]) -> list[Array]:
        block = _block(graph)
        known = dict(zip(block.arguments, inputs, strict=True))
        for step in block.operations:
            name = _operator(step)
            given = [known[each] for each in step.operands]
            if name == "output":
                return given
            if name == "constant":
                made: Any = (self._read(step),)
            elif name == "invoke":
                made = self._run(self._graphs[_callee(step)], given)
            else:
                wide = [
                    each.astype(np.float32) if each.dtype == np.float16 else each
                    for each in given
                ]
                more = {each.name: str(each.attr) for each in step.attributes}
                made = CORE_AI_OPERATORS[name](*wide, **more)
            for value, array in zip(
                step.results,
                made if isinstance(made, (tuple, list)) else (made,),
                strict=True,
            ):
                known[value] = (
                    np.asarray(array)
                    .astype(TYPES[str(value.type.element_type)])
                    .reshape(value.type.shape)
                )
        raise AssertionError("every graph ends with its outputs")

    def _read(self, step: Any) -> Array:
        """Read a constant, once."""
        value = step.results[0]
        attribute = step.attributes["value"]
        if value not in self._constants:
            stored = re.match(r"dense_resource<(\w+)>", str(attribute)[:200])
            kind = str(value.type.element_type)
            if stored and kind in PACKED:
                array = _unpack_bits(self._stored[stored[1]], PACKED[kind])
            else:
                array = (
                    np.frombuffer(self._stored[stored[1]], TYPES[kind])
                    if stored
                    else np.array(attribute)
                )
            shape = tuple(value.type.shape)
            self._constants[value] = (
                array.reshape(shape) if stored else np.broadcast_to(array, shape)
            )
        return self._constants[value]


def _block(graph: Any) -> Any:
    return graph.regions[0].blocks[0]


def _operator(step: Any) -> str:
    return str(step.name).removeprefix("coreai.").removeprefix("decomposable.")


def _text(operation: Any, name: str) -> str:
    return str(operation.attributes[name]).strip('"')


def _name(attributes: Any) -> str:
    return str(attributes["coreai.name"]).strip('"')


def _callee(step: Any) -> str:
    """Read the name of the graph that is invoked: `#param.constant<@NAME> :
    !param.symbol`."""
    return _text(step, "callee").partition("@")[2].partition(">")[0]


def _unpack_bits(stored: bytes, bits: int) -> Array:
    split = np.unpackbits(np.frombuffer(stored, np.uint8), bitorder="little").reshape(
        -1, bits
    )
    return np.packbits(split, axis=-1, bitorder="little")


def _slice(x: Array, first: Array, end: Array, stride: Array) -> Array:
    return x[
        tuple(slice(*map(int, each)) for each in zip(first, end, stride, strict=True))
    ]


def _gather_nd(x: Array, indices: Array) -> Array:
    return x[tuple(np.moveaxis(indices, -1, 0))]


def _pad(x: Array, padding: Array, value: Array, padding_mode: str) -> Array:
    if "constant" not in padding_mode:
        raise ExportError(
            f"pad in the mode {padding_mode} cannot be computed outside of Core AI by "
            "this version"
        )
    return np.pad(x, padding.astype(int).reshape(-1, 2), constant_values=value)


def _scan(x: Array, axis: Array, reverse: Array, scan_op: str) -> Array:
    if reverse or not scan_op.startswith("0 "):
        raise ExportError(
            "a scan that is reversed, or not of sums, cannot be computed outside of "
            "Core AI by this version"
        )
    return x.cumsum(int(axis), dtype=x.dtype)


def _broadcast(x: Array, sizes: Array, axes: Array) -> Array:
    shape = list(x.shape)
    for size, axis in zip(sizes, axes, strict=True):
        shape[int(axis)] = int(size)
    return np.broadcast_to(x, shape)


def _unpack(data: Array, scale: Array, before: Array, after: Array) -> Array:
    for axis, size in enumerate(data.shape):
        scale = scale.repeat(size // scale.shape[axis], axis)
        before = before.repeat(size // before.shape[axis], axis)
        after = after.repeat(size // after.shape[axis], axis)
    return scale * (data.astype(np.float32) - before) + after


def _look_up(indices: Array, table: Array, axis: Array) -> Array:
    if table.size != table.shape[-2]:
        raise ExportError(
            "tables of blocks, or of vectors, cannot be computed outside of Core AI by "
            "this version"
        )
    return table.ravel()[indices]


CORE_AI_OPERATORS: Mapping[str, Callable[..., Any]] = {
    "argmax": lambda x, axis: np.argmax(x, int(axis), keepdims=True),
    "blockwise_shift_scale": _unpack,
    "broadcast_in_dims": _broadcast,
    "broadcasting_add": np.add,
    "broadcasting_batch_matmul": np.matmul,
    "broadcasting_bitwise_and": np.bitwise_and,
    "broadcasting_divide": np.divide,
    "broadcasting_equal": np.equal,
    "broadcasting_floor_divide": np.floor_divide,
    "broadcasting_greater": np.greater,
    "broadcasting_maximum": np.maximum,
    "broadcasting_minimum": np.minimum,
    "broadcasting_mul": np.multiply,
    "broadcasting_not_equal": np.not_equal,
    "broadcasting_pow": np.power,
    "broadcasting_sub": np.subtract,
    "broadcasting_where": np.where,
    "cast": lambda x: x,  # to the type of its result
    "concat": lambda axis, *values: np.concatenate(values, int(axis)),
    "gather_along_axis": lambda x, indices, axis: np.take_along_axis(
        x, indices, int(axis)
    ),
    "gather_nd": _gather_nd,
    "gelu": lambda x, approximate: gelu(
        x, "TANH_APPROXIMATION" if "tanh" in approximate else "EXACT"
    ),
    "log": np.log,
    "lut_to_dense": _look_up,
    "not": np.logical_not,
    "pad": _pad,
    "reduce_mean": lambda x, axes: x.mean(tuple(map(int, axes)), keepdims=True),
    "relu": lambda x: np.maximum(x, 0),
    "reshape": lambda x, shape: x.reshape([int(size) for size in shape]),
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "scan": _scan,
    "silu": lambda x: x * expit(x),
    "slice": _slice,
    "softmax": lambda x, axis: softmax(x, int(axis)),
    "split": lambda x, sizes, axis: np.split(
        x, np.cumsum(sizes)[:-1].astype(int).tolist(), int(axis)
    ),
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "transpose": lambda x, order: x.transpose([int(axis) for axis in order]),
}
"""The operators, with arguments in the order of coreai-core's definitions;
`broadcasting_` operators broadcast like NumPy."""
