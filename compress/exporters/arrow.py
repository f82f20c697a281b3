"""Answer Arrow batches with a bundle, in any worker process of an engine.

Ray Data (`map_batches`) and Spark (`mapInArrow`) send a function to their workers and
call it with batches of rows. `ArrowPredictor` is this function.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from compress.data.arrow_tables import flatten, to_cells
from compress.errors import DataError
from compress.exporters.arrow_columns import to_table
from compress.exporters.predictor import Predictor, iterate_batches
from compress.exporters.row_files import choose_columns, to_texts

Rows = Any  # a pa.Table, or a pa.RecordBatch


@dataclass(frozen=True)
class ArrowPredictor:
    """Add the answers of a bundle to Arrow tables and batches, as `compress predict`
    adds them to a file. It can be pickled.

    open   returns the opened bundle; a process opens it once
    text   the columns of the one or two texts; None: those named like the bundle's, or
           the only one
    """

    open: Callable[[], Predictor]
    text: tuple[str, ...] | None

    def __call__(self, rows: Rows) -> Rows:
        """Return the rows with added columns for the answers. Raises DataError for
        columns that are missing, hold no texts, or would be overwritten."""
        schema = self.schema(rows.schema)
        whole = isinstance(rows, pa.Table)
        table = rows if whole else pa.Table.from_batches([rows])
        columns = self._answer(flatten(table)).columns
        if not whole:
            columns = [column.combine_chunks() for column in columns]
        return type(rows).from_arrays([*rows.columns, *columns], schema=schema)

    def _answer(self, table: pa.Table) -> pa.Table:
        """Return the columns of the answers."""
        predictor = self.open()
        chosen = choose_columns(
            predictor.task, table.column_names, "the batch", self.text
        )
        texts = to_texts([to_cells(table[name]).to_pylist() for name in chosen], chosen)
        types = predictor.answer_schema()
        parts = [
            to_table(predictor.answer_columns(batch), types)
            for batch in iterate_batches(texts, predictor.rows_per_batch)
        ]
        return pa.concat_tables([types.empty_table(), *parts])

    def map_batches(
        self, batches: Iterator[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        """Answer a stream of batches, as Spark's `mapInArrow` calls a function."""
        return map(self, batches)

    def schema(self, given: pa.Schema) -> pa.Schema:
        """Return the columns of the result, for rows with these columns. Raises
        DataError for a column that would be overwritten."""
        for field in self.open().answer_schema():
            if field.name in given.names:
                raise DataError(
                    f"the rows have a column {field.name!r}, which the answers "
                    "would overwrite; rename that column"
                )
            given = given.append(field)
        return given
