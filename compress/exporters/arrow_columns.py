"""Make Arrow tables from columns."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from compress.errors import DataError


def to_table(columns: Mapping[str, Any], types: pa.Schema) -> pa.Table:
    """Make a table from columns, as `row_writers` describes them.

    types   of some columns; the types of the others follow from their values

    Raises DataError for a column with values of several types.
    """
    arrays = {}
    for name, column in columns.items():
        kind = types.field(name).type if name in types.names else None
        try:
            arrays[name] = _to_array(column, kind)
        except (pa.ArrowException, OverflowError) as error:
            raise DataError(
                f"the column {name!r} has values of several types ({error}), which an "
                "Arrow table has no room for; write a .jsonl file"
            ) from error
    return pa.table(arrays)


def _to_array(column: Any, kind: pa.DataType | None) -> pa.Array | pa.ChunkedArray:
    if isinstance(column, pa.Array | pa.ChunkedArray):
        decoded = pa.types.is_dictionary(column.type)
        return column.cast(column.type.value_type) if decoded else column
    if isinstance(column, Mapping):
        parts = [pa.array(values) for values in column.values()]
        return pa.StructArray.from_arrays(parts, list(column))
    if isinstance(column, np.ndarray) and column.ndim == 2:
        offsets = np.arange(0, column.size + 1, column.shape[1], dtype=np.int32)
        return pa.ListArray.from_arrays(offsets, pa.array(column.ravel()))
    array = pa.array(column, kind)
    return array.cast(pa.string()) if pa.types.is_null(array.type) else array
