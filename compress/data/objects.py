"""Keep teachers and data that are handed over as objects, by their contents: all else knows them by a path.

The same objects lead to the same path, which is what a run is resumed by.
"""

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from compress import io
from compress.data import sources
from compress.data.cache import cached, home, scratch
from compress.errors import DataError, TeacherError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    TeacherLike = str | Path | tuple[PreTrainedModel, PreTrainedTokenizerBase]


class TableLike(Protocol):
    """A pandas DataFrame, or a datasets.Dataset."""

    to_parquet: Any


DataLike = str | Path | TableLike | Mapping[str, TableLike]


def teacher_path(teacher: "TeacherLike") -> str:
    """Return what a teacher is called; a model and its tokenizer are saved first. Raises TeacherError."""
    if isinstance(teacher, str | Path):
        return str(teacher)
    pair = teacher if isinstance(teacher, tuple) else (teacher,)
    if len(pair) != 2 or not all(hasattr(each, "save_pretrained") for each in pair):
        raise TeacherError(
            f"teacher: found {_kinds(pair)}; expected an alias, a folder, a hub id, or a model with its tokenizer: "
            "teacher=(model, tokenizer)"
        )
    return _keep("models", {"": lambda folder: [each.save_pretrained(folder) for each in pair]})


def data_path(data: "DataLike") -> str:
    """Return what a data set is called; tables are written first, each to the file of its split. Raises DataError."""
    if isinstance(data, str | Path):
        return str(data)
    splits: dict[str, Any] = dict(data) if isinstance(data, Mapping) else {"train": data}
    if not splits or not all(hasattr(table, "to_parquet") for table in splits.values()):
        raise DataError(
            f"data: found {_kinds(splits.values())}; expected a folder, a file, a hub id, a DataFrame or Dataset, or "
            "{'train': ..., 'test': ...} of these"
        )
    if strange := [name for name in splits if sources.split_word(str(name)) is None or not str(name).isidentifier()]:
        raise DataError(f"data: no split {strange[0]!r}; expected train, validation and test")
    kind = type(next(iter(splits.values()))).__name__
    return _keep("tables", {f"{name}.parquet": partial(_write, table) for name, table in splits.items()}, f"{kind}-")


def _write(table: Any, path: Path) -> None:
    """Write a table as parquet; a Dataset writes its class names into the file."""
    from datasets import Dataset

    if isinstance(table, Dataset):
        table.to_parquet(str(path))
    else:
        table.to_parquet(path, index=False)


def _keep(kind: str, parts: Mapping[str, Any], prefix: str = "") -> str:
    """Return the folder, named by its contents, that holds what these write; it is made once."""
    with scratch(home() / kind) as folder:
        for name, write in parts.items():
            try:
                write(folder / name)
            except (ValueError, TypeError, NotImplementedError) as error:  # pandas' and Arrow's own are of these
                raise DataError(f"{kind}: {name} cannot be written: {error}. Give each column one type") from error
        written = sorted(path for path in folder.iterdir() if path.is_file())
        entry = home() / kind / f"{prefix}{io.hash_files(written)[:24]}"
        return str(cached(entry, lambda into: shutil.copytree(folder, into, dirs_exist_ok=True)))


def _kinds(values: Any) -> str:
    return ", ".join(type(value).__name__ for value in values) or "nothing"
