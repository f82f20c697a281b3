"""Store the word embeddings of an int8 file with a codebook, if training rounded them
to one (`compress.training.codebook`): one byte for each part of four numbers.

Nothing is rounded here. The parts in the same place of all rows, at most 256 different
ones, are numbered: the table holds the numbers, the codebook the parts. A row is looked
up in the table, then its parts in the codebook, with operators that every runtime has.
"""

from pathlib import Path

import numpy as np
from onnx import NodeProto, TensorProto

from compress.arrays import Array
from compress.exporters.rewrite.graph import Graph, attribute
from compress.exporters.session import read_model
from compress.models.codebook import find_codebook

NUMBERS = ".codes"
"""Suffix of the names of tables of numbers."""


def has_codebook(file: Path) -> bool:
    """Return True if a table of the ONNX file is stored with a codebook."""
    tensors = read_model(file).graph.initializer
    return any(tensor.name.endswith(NUMBERS) for tensor in tensors)


def pack_tables(graph: Graph) -> None:
    """Store byte tables with a codebook, if they have one and the result is smaller."""
    found = []
    for node in graph.nodes:
        table = _table_of_bytes(graph, node)
        codebook = None if table is None else find_codebook(table)
        if codebook is not None:
            found.append((node, codebook))
    if not found:
        return
    for node, codebook in found:
        _look_up_parts(graph, node, *codebook)
    graph.prune()
    graph.store()


def _table_of_bytes(graph: Graph, node: NodeProto) -> Array | None:
    """Return the table in which a node looks up rows of bytes; None for other nodes."""
    if node.op_type != "Gather" or attribute(node, "axis", 0) != 0:
        return None
    table = graph.value(node.input[0])
    bytes_in_rows = table is not None and table.dtype == np.uint8 and table.ndim == 2
    return table if bytes_in_rows else None


def _look_up_parts(
    graph: Graph,
    node: NodeProto,
    codes_VP: Array,
    book_PCN: Array,
) -> None:
    """Replace a lookup of rows by lookups of their parts."""
    table, ids = node.input
    name = node.name
    parts, values, numbers = book_PCN.shape
    codes = graph.constant(codes_VP, f"{table}{NUMBERS}")
    book = graph.constant(book_PCN.reshape(-1, numbers), f"{table}.book")
    first = np.arange(0, parts * values, values, dtype=np.int32)
    firsts = graph.constant(first, f"{table}.firsts")
    found = graph.add("Gather", [codes, ids], f"{name}/codes")
    wide = graph.add("Cast", [found], f"{name}/cast", to=TensorProto.INT32)
    places = graph.add("Add", [wide, firsts], f"{name}/places")
    looked_up = graph.add("Gather", [book, places], f"{name}/parts")
    shape = graph.integers(0, 0, parts * numbers)
    graph.replace(node, "Reshape", [looked_up, shape], name)
