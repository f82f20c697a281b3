"""Graphs that tests quantise: a model's export, a chain of products in a few lines, and rows that they read."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from compress.exporters.onnx import to_onnx
from compress.exporters.rewrite.forms import SHIPPED_FORM, Form
from compress.exporters.session import EncodedRow, open_session
from compress.records.latency import Latency, Setting, Sustained
from tests import learning, tiny
from tests.latencies import steady

Array = np.ndarray[Any, Any]


def exported(path: Path, family: str = "bert", *, form: Form | None = SHIPPED_FORM, **changes: Any) -> Path:
    to_onnx(tiny.model(family, **changes), path, segments=False, form=form)
    return path


def rows(count: int = 24) -> list[dict[str, Any]]:
    names = ("input_ids", "attention_mask")
    return [{name: row[name] for name in names} for row in learning.rows(count)]


def logits(path: Path, given: Sequence[Mapping[str, Any]]) -> Array:
    """Each row run alone."""
    session = open_session(path, threads=1)
    names = [node.name for node in session.get_inputs()]
    return np.stack([session.run(None, {name: np.array([row[name]]) for name in names})[0][0] for row in given])


def one_product(path: Path, matrix: Array, bias: Array | None) -> Path:
    """x (batch, tokens, in) @ matrix (+ bias), named `product`."""
    made = "y" if bias is None else "raw"
    nodes = [helper.make_node("MatMul", ["x", "w"], [made], name="product")]
    tensors = [numpy_helper.from_array(matrix.astype(np.float32), "w")]
    if bias is not None:
        nodes.append(helper.make_node("Add", ["b", "raw"], ["y"], name="bias"))
        tensors.append(numpy_helper.from_array(bias.astype(np.float32), "b"))
    shapes = {"x": ["batch", "tokens", matrix.shape[0]], "y": ["batch", "tokens", matrix.shape[1]]}
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in shapes.items())
    graph = helper.make_graph(nodes, "graph", [x], [y], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save_model(model, path)
    return path


def operators(path: Path) -> list[str]:
    return [node.op_type for node in onnx.load_model(path).graph.node]


class Rule:
    """A device that answers as this machine does, unless told to spoil a file, and takes as long as it is told."""

    name = "rule"

    def __init__(self, p50: Callable[[str, Path], float], spoils: Callable[[Path], bool] = lambda _: False) -> None:
        self.p50, self.spoils, self.raced, self.settings = p50, spoils, list[str](), list[Setting]()

    def facts(self) -> dict[str, str]:
        return {"cpu": "a rule", "runtime": "none"}

    def race(self, files: Mapping[str, Path], settings: Sequence[Setting], *, rounds: int, runs: int) -> list[Latency]:
        self.raced += files
        self.settings += settings
        return [steady(name, setting, self.p50(name, file)) for setting in settings for name, file in files.items()]

    def sustain(self, files: Mapping[str, Path], setting: Setting, *, seconds: float) -> list[Sustained]:
        raise NotImplementedError

    def logits(self, file: Path, rows: Sequence[EncodedRow]) -> list[NDArray[np.float32]]:
        found = list(logits(file, rows))
        return [-each for each in found] if self.spoils(file) else found
