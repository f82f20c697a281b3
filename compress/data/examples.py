"""What the readers of annotated files (`squad`, `conll`) give."""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa


class Examples(NamedTuple):
    """A file's examples: a table of the columns that TaskData promises for the kind (tags still by name), the group of
    each row, which is never split when some are held out, and what the reader should know."""

    table: pa.Table
    groups: list[int]
    notes: tuple[str, ...] = ()
