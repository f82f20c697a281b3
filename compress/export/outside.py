"""What a foreign ONNX file may make this machine read: weights beside it, in its own folder, and nothing else.

An ONNX file may keep its weights in other files, under any name it likes. onnxruntime reads them when it opens the
file, so names are checked first.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath

import onnx

from compress.errors import ExportError

HARMLESS_PREFIXES = ("optimization.", "mlas.")
HARMLESS = frozenset(
    {
        "session.disable_double_qdq_remover",
        "session.disable_prepacking",
        "session.disable_quant_qdq",
        "session.dynamic_block_base",
        "session.enable_quant_qdq_cleanup",
        "session.force_spinning_stop",
        "session.inter_op.allow_spinning",
        "session.intra_op.allow_spinning",
        "session.intra_op_thread_affinities",
        "session.qdqisint8allowed",
        "session.set_denormal_as_zero",
        "session.use_device_allocator_for_initializers",
        "session.x64quantprecision",
    }
)
"""Session settings that a file may ask for: how to compute. Others name folders and files to read or to write."""


def check_weights(model: onnx.ModelProto, path: Path) -> list[str]:
    """The other files in which the file at `path` keeps weights, by their names in its folder.

    Raises ExportError for a name that is absolute, above the folder, reached through a link that leads out of it,
    missing, or shorter than the weights it should hold.
    """
    elsewhere = [tensor for tensor in _tensors(model) if tensor.data_location == onnx.TensorProto.EXTERNAL]
    return sorted({_checked(tensor, path) for tensor in elsewhere})


def check_entries(entries: object, path: Path) -> dict[str, str]:
    """The session settings a file asks for. Raises ExportError unless they are names and texts, all harmless."""
    if not isinstance(entries, dict) or not all(isinstance(value, str) for value in entries.values()):
        raise ExportError(f"{path}: its session settings are no names with texts; the file is damaged, or not ours")
    for name in entries:
        if name not in HARMLESS and not name.startswith(HARMLESS_PREFIXES):
            raise ExportError(
                f"{path}: asks for the session setting {name!r}, which is none that a file may choose; it is not opened"
            )
    return entries


def _checked(tensor: onnx.TensorProto, path: Path) -> str:
    told = {entry.key: entry.value for entry in tensor.external_data}
    name, folder = told.get("location", ""), path.parent.resolve()
    strange = not name or "\0" in name or PurePosixPath(name).is_absolute() or PureWindowsPath(name).drive
    if strange or ".." in PureWindowsPath(name).parts or not (folder / name).resolve().is_relative_to(folder):
        raise ExportError(
            f"{path}: keeps the weight {tensor.name!r} in {name!r}, outside its own folder; nothing was read from "
            "there. If you trust it, put its weights beside it"
        )
    if not (folder / name).is_file():
        raise ExportError(f"{path}: keeps the weight {tensor.name!r} in {name!r}, which is missing; copy it beside it")
    size = (folder / name).stat().st_size
    try:
        start, length = int(told.get("offset", 0)), int(told.get("length", 0))
    except ValueError:
        start, length = -1, 0
    if min(start, length) < 0 or start + length > size:
        raise ExportError(
            f"{path}: the weight {tensor.name!r} should be at {told.get('offset', 0)} + {told.get('length', 0)} bytes "
            f"of {name!r}, which has {size}; the file is damaged or cut short: copy it again"
        )
    return name


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor of the file, those of branches, loops and functions too."""
    yield from _of_graph(model.graph)
    for function in model.functions:
        yield from _of_nodes(function.node)


def _of_graph(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _of_nodes(graph.node)


def _of_nodes(nodes: "list[onnx.NodeProto]") -> Iterator[onnx.TensorProto]:
    for attribute in (attribute for node in nodes for attribute in node.attribute):
        yield from (attribute.t, *attribute.tensors)
        for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
            yield from (sparse.values, sparse.indices)
        for graph in (attribute.g, *attribute.graphs):
            yield from _of_graph(graph)
