"""Save teachers and data that are passed as objects, since everything else knows them by a path.

The same contents lead to the same path, by which a run is resumed.
"""

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from compress import io
from compress.data import sources
from compress.data.cache import home, load_or_create, scratch
from compress.errors import DataError, TeacherError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    TeacherLike = str | Path | tuple[PreTrainedModel, PreTrainedTokenizerBase]


class TableLike(Protocol):
    """Describe a pandas DataFrame, or a datasets.Dataset."""

    to_parquet: Any


DataLike = str | Path | TableLike | Mapping[str, TableLike]


def teacher_path(teacher: "TeacherLike") -> str:
    """Return the name or path of a teacher; a model and its tokenizer are saved. Raises TeacherError."""
    if isinstance(teacher, str | Path):
        return str(teacher)
    pair = teacher if isinstance(teacher, tuple) else (teacher,)
    if len(pair) != 2 or not all(hasattr(each, "save_pretrained") for each in pair):
        raise TeacherError(
            f"teacher: expected an alias, a folder, a hub id, or a model with its tokenizer, "
            f"teacher=(model, tokenizer); found {_kinds(pair)}"
        )
    return _save("models", {"": lambda folder: [part.save_pretrained(folder) for part in pair]})


def data_path(data: "DataLike") -> str:
    """Return the name or path of a data set; tables are written to files of their split. Raises DataError."""
    if isinstance(data, str | Path):
        return str(data)
    splits: dict[str, Any] = dict(data) if isinstance(data, Mapping) else {"train": data}
    if not splits or not all(hasattr(table, "to_parquet") for table in splits.values()):
        raise DataError(
            "data: expected a folder, a file, a hub id, a DataFrame or Dataset, or {'train': ..., 'test': ...} of "
            f"these; found {_kinds(splits.values())}"
        )
    if unknown := [name for name in splits if sources.split_word(str(name)) is None or not str(name).isidentifier()]:
        raise DataError(f"data: no split {unknown[0]!r}; expected train, validation and test")
    kind = type(next(iter(splits.values()))).__name__
    return _save("tables", {f"{name}.parquet": partial(_write, table) for name, table in splits.items()}, f"{kind}-")


def _write(table: Any, path: Path) -> None:
    """Write a table as parquet; a Dataset writes its class names into the file."""
    from datasets import Dataset

    if isinstance(table, Dataset):
        table.to_parquet(str(path))
    else:
        table.to_parquet(path, index=False)


def _save(kind: str, parts: Mapping[str, Any], prefix: str = "") -> str:
    """Write the parts to a folder named by its contents, once, and return it."""
    with scratch(home() / kind) as folder:
        for name, write in parts.items():
            try:
                write(folder / name)
            except (ValueError, TypeError, NotImplementedError) as error:  # as pandas and Arrow raise
                raise DataError(
                    f"{kind}: {name} cannot be written: {error}. Give each column a single type."
                ) from error
        written = sorted(path for path in folder.iterdir() if path.is_file())
        entry = home() / kind / f"{prefix}{io.hash_files(written)[:24]}"
        return str(load_or_create(entry, lambda into: shutil.copytree(folder, into, dirs_exist_ok=True)))


def _kinds(values: Any) -> str:
    return ", ".join(type(value).__name__ for value in values) or "nothing"
