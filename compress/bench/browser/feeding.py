"""What a page is told of a file: how to open it, what to feed it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from compress.bench import jobs
from compress.bench.protocol import DeviceError, Setting
from compress.bench.runner import feeds
from compress.export.session import read_model, vocabulary_size


@dataclass(frozen=True)
class Fed:
    """One ONNX file, the session entries it asks for, and the numpy types of its inputs by name."""

    path: Path
    entries: Mapping[str, str]
    types: Mapping[str, Any]

    @staticmethod
    def of(path: Path) -> "Fed":
        """Raises DeviceError or ExportError for what is no text encoder in one ONNX file."""
        if jobs.runtime_of(path) != "onnxruntime":
            raise DeviceError(f"{path}: a browser runs ONNX files only")
        (whole,) = jobs.parts(path)
        return Fed(path, jobs.logits_job(path)["entries"], jobs.input_types(whole))

    @cached_property
    def vocabulary(self) -> int:
        return vocabulary_size(read_model(self.path), self.path)

    def drawn(self, setting: Setting) -> list[dict[str, Any]]:
        """The inputs that every device times the file with, as the page takes them."""
        return _tensors(feeds(self.types, setting.batch, setting.seq, self.vocabulary))

    def row(self, row: Mapping[str, Sequence[int]]) -> list[dict[str, Any]]:
        """One encoded text, as the page takes it. Raises DeviceError when it lacks an input of the file."""
        if missing := [name for name in self.types if name not in row]:
            raise DeviceError(f"{self.path}: a row has {', '.join(row)}; expected {', '.join(missing)} too")
        return _tensors({name: np.asarray([row[name]], kind) for name, kind in self.types.items()})


def _tensors(arrays: Mapping[str, NDArray[Any]]) -> list[dict[str, Any]]:
    return [
        {"name": name, "type": array.dtype.name, "dims": array.shape, "data": array.ravel().tolist()}
        for name, array in arrays.items()
    ]


def probe() -> bytes:
    """An ONNX file that gives back what it gets: opening it starts a runtime, and shows whether it starts at all."""
    given, got = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y"))
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "probe", [given], [got])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    return model.SerializeToString()
