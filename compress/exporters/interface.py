"""Describe the inputs and outputs of a model file."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from onnx import TensorProto, ValueInfoProto

from compress.exporters.session import read_model


@dataclass(frozen=True)
class Port:
    """An input or an output of a file.

    type   of its numbers, as NumPy calls it, or string
    shape  the size of each axis, or the name of one whose size is open
    """

    name: str
    type: str
    shape: tuple[int | str, ...]

    @staticmethod
    def from_onnx(value: ValueInfoProto) -> "Port":
        """Read an input or an output of an ONNX graph."""
        tensor = value.type.tensor_type
        name = TensorProto.DataType.Name(tensor.elem_type).lower()
        if name == "float":
            name = "float32"
        sizes = tensor.shape.dim
        shape = [size.dim_param or size.dim_value or "open" for size in sizes]
        return Port(value.name, name, tuple(shape))

    def __str__(self) -> str:
        return f"{self.name} {self.type} ({', '.join(map(str, self.shape))})"


@dataclass(frozen=True)
class Interface:
    """The inputs and outputs of a file, in its order."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    @property
    def length(self) -> int:
        """Return the number of tokens in every row; 0 if it varies."""
        tokens = self.inputs[0].shape[-1]
        return tokens if isinstance(tokens, int) else 0

    def fix(self, tokens: int | str, integers: str) -> "Interface":
        """Return the interface of a file that takes one row of this many tokens, as
        integers of this type."""
        sizes: Mapping[int | str, int | str] = {
            "batch_size": 1,
            "sequence_length": tokens,
        }

        def fixed(port: Port) -> Port:
            shape = [sizes.get(size, size) for size in port.shape]
            return replace(port, shape=tuple(shape))

        outputs = map(fixed, self.outputs)
        inputs = [replace(port, type=integers) for port in map(fixed, self.inputs)]
        return Interface(tuple(inputs), tuple(outputs))


def read_interface(path: Path) -> Interface:
    """Read the inputs and outputs of an ONNX file."""
    graph = read_model(path).graph
    weights = {each.name for each in graph.initializer}
    given = [each for each in graph.input if each.name not in weights]
    inputs = map(Port.from_onnx, given)
    outputs = map(Port.from_onnx, graph.output)
    return Interface(tuple(inputs), tuple(outputs))
