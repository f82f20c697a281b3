"""Run a Core ML program, read back from its package, in NumPy.

Core ML runs only on Apple's systems; to check a package elsewhere, every operator is
computed as Core ML's specification defines it. Float16 values of the program are
rounded to float16 after each operator, while products are summed in float32. Neither
the order of additions nor the speed is Core ML's.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import erf, expit, softmax

from compress.arrays import Array
from compress.errors import ExportError
from compress.exporters.writers.context import import_extra


class MilProgram:
    """The program of a package: call it with its inputs by name; it returns its outputs
    in order.

    operators   the names of its operators, constants left out, in the order in which
                they are computed
    """

    def __init__(self, package: Path) -> None:
        model = import_extra("coremltools", "coreml").models.MLModel(
            str(package), skip_model_load=True
        )
        load = import_extra(
            "coremltools.converters.mil.frontend.milproto.load", "coreml"
        ).load
        self.spec = model.get_spec()
        program = load(self.spec, self.spec.specificationVersion, model.weights_dir)
        self._function = program.functions["main"]
        self._kept = dict[Any, Array]()
        self._steps = []
        for step in self._function.operations:
            if step.op_type.startswith("constexpr_"):
                (self._kept[step.outputs[0]],) = _as_tuple(
                    step.materialized_val_inference()
                )
            elif step.op_type != "const":
                self._steps.append(step)
        self.operators = [step.op_type for step in self._steps]
        if unknown := sorted(set(self.operators) - set(MIL_OPERATORS)):
            raise ExportError(
                f"{package.name}: its operators {', '.join(unknown)} cannot be "
                "computed outside of Core ML by this version, so its answers cannot be "
                "checked; --for onnx and --for ort take every family"
            )

    def __call__(self, inputs: Mapping[str, Array]) -> list[Array]:
        known = dict(self._kept)
        for name, variable in self._function.inputs.items():
            known[variable] = inputs[name]

        def value(variable: Any) -> Any:
            if isinstance(variable, (list, tuple)):
                return [value(each) for each in variable]
            found = known.get(variable, variable.val)
            return (
                found.astype(np.float32)
                if getattr(found, "dtype", None) == np.float16
                else found
            )

        for step in self._steps:
            inputs = {name: value(each) for name, each in step.inputs.items()}
            outputs = _as_tuple(MIL_OPERATORS[step.op_type](**inputs))
            for variable, array in zip(step.outputs, outputs, strict=True):
                known[variable] = (
                    array.astype(np.float16)
                    if variable.is_tensor_or_scalar_of("fp16")
                    else array
                )
        return [np.asarray(value(each)) for each in self._function.outputs]


def _as_tuple(made: Any) -> tuple[Any, ...]:
    return made if isinstance(made, tuple) else (made,)


def _matmul(
    x: Array, y: Array, transpose_x: bool = False, transpose_y: bool = False
) -> Any:
    return (x.swapaxes(-1, -2) if transpose_x else x) @ (
        y.swapaxes(-1, -2) if transpose_y else y
    )


def _layer_norm(x: Array, axes: Sequence[int], epsilon: float, **affine: Array) -> Any:
    over = tuple(int(axis) for axis in axes)
    centred = x - x.mean(over, keepdims=True)
    normal = centred / np.sqrt(np.square(centred).mean(over, keepdims=True) + epsilon)
    return normal * affine.get("gamma", 1) + affine.get("beta", 0)


def gelu(x: Array, mode: str) -> Array:
    if mode == "EXACT":
        return (0.5 * x * (1 + erf(x / np.sqrt(2)))).astype(x.dtype)
    if mode == "TANH_APPROXIMATION":
        return (
            0.5
            * x
            * (
                1
                + np.tanh(
                    np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x**3)
                )
            )
        )
    return x * expit(1.702 * x)


def _slice(x: Array, begin: Sequence[int], end: Sequence[int], **more: Any) -> Any:
    """Slice; `more` holds stride, unless all are 1, and begin_mask, end_mask and
    squeeze_mask, unless all are False."""
    cuts = list[slice | int]()
    for axis, (first, last) in enumerate(zip(begin, end, strict=True)):
        open_first = "begin_mask" in more and bool(more["begin_mask"][axis])
        open_last = "end_mask" in more and bool(more["end_mask"][axis])
        squeezed = "squeeze_mask" in more and bool(more["squeeze_mask"][axis])
        step = int(more["stride"][axis]) if "stride" in more else 1
        ends = (None if open_first else int(first), None if open_last else int(last))
        cuts.append(int(first) if squeezed else slice(*ends, step))
    return x[tuple(cuts)]


def _cumsum(x: Array, axis: int, exclusive: bool, reverse: bool) -> Array:
    if exclusive or reverse:
        raise ExportError(
            "cumsum that is exclusive or reversed cannot be computed outside of Core "
            "ML by this version"
        )
    return x.cumsum(int(axis), dtype=x.dtype)


def _pad(
    x: Array, pad: Sequence[int], mode: str = "constant", constant_val: float = 0.0
) -> Array:
    if mode != "constant":
        raise ExportError(
            f"padding in the mode {mode} cannot be computed outside of Core ML by this "
            "version"
        )
    last = np.reshape(pad, (-1, 2)).tolist()
    return np.pad(
        x, [(0, 0)] * (x.ndim - len(last)) + last, constant_values=constant_val
    )


def _one_hot(
    indices: Array,
    one_hot_vector_size: int,
    axis: int,
    on_value: float,
    off_value: float,
) -> Array:
    made = np.where(
        indices[..., None] == np.arange(one_hot_vector_size), on_value, off_value
    )
    return np.moveaxis(made, -1, int(axis))


def _elementwise(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda x, y=None: function(x) if y is None else function(x, y)


ELEMENTWISE_MIL: Mapping[str, Callable[..., Array]] = {
    "abs": np.abs,
    "add": np.add,
    "cos": np.cos,
    "equal": np.equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "logical_and": np.logical_and,
    "mul": np.multiply,
    "not_equal": np.not_equal,
    "real_div": np.divide,
    "sigmoid": expit,
    "sin": np.sin,
    "sub": np.subtract,
    "tanh": np.tanh,
}
MIL_OPERATORS: Mapping[str, Callable[..., Any]] = {
    **{name: _elementwise(function) for name, function in ELEMENTWISE_MIL.items()},
    "cast": lambda x, dtype: np.asarray(x).astype(dtype.replace("fp", "float")),
    "clip": lambda x, **limits: np.clip(x, limits["alpha"], limits["beta"]),
    "concat": lambda values, axis, interleave: np.concatenate(
        [np.atleast_1d(one) for one in values], int(axis)
    ),
    "cumsum": _cumsum,
    "expand_dims": lambda x, axes: np.expand_dims(x, tuple(int(axis) for axis in axes)),
    "fill": lambda shape, value: np.full([int(size) for size in shape], value),
    "gather": lambda x, indices, axis, **_: np.take(x, indices, int(axis)),
    "gather_along_axis": lambda x, indices, axis, **_: np.take_along_axis(
        x, indices, int(axis)
    ),
    "gelu": gelu,
    "layer_norm": _layer_norm,
    "linear": lambda x, weight, bias: x @ weight.T + bias,
    "matmul": _matmul,
    "one_hot": _one_hot,
    "pad": _pad,
    "range_1d": lambda start, **more: np.arange(start, more["end"], more["step"]),
    "relu": lambda x: np.maximum(x, 0),
    "reshape": lambda x, shape: x.reshape(
        [x.shape[at] if size == 0 else int(size) for at, size in enumerate(shape)]
    ),
    "select": lambda cond, **kept: np.where(cond, kept["a"], kept["b"]),
    "shape": lambda x: np.asarray(x.shape, np.int32),
    "slice_by_index": _slice,
    "softmax": lambda x, axis: softmax(x, int(axis)),
    "split": lambda x, axis, num_splits=None, split_sizes=None: tuple(
        np.split(
            x,
            int(num_splits)
            if split_sizes is None
            else np.cumsum(split_sizes)[:-1].tolist(),
            int(axis),
        )
    ),
    "squeeze": lambda x, axes: np.squeeze(x, tuple(int(axis) for axis in axes)),
    "tile": lambda x, reps: np.tile(x, [int(count) for count in reps]),
    "transpose": lambda x, perm: np.transpose(x, [int(axis) for axis in perm]),
}
"""The operators, whose parameters have the names of the specification."""
