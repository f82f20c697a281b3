"""Save teachers and data that are passed as objects, since all other code refers to
them by path.

The same contents lead to the same path, so that a run can be resumed.
"""

import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from compress import io
from compress.arguments import DataLike, TeacherLike, name_of
from compress.data import sources
from compress.data.cache import home, load_or_create, scratch
from compress.data.text_files import reading
from compress.errors import DataError


def teacher_path(teacher: TeacherLike) -> str:
    """Return the name or path of a teacher; a model and its tokenizer are saved."""
    if isinstance(teacher, tuple):
        return _save(
            "models",
            {"": lambda folder: [part.save_pretrained(folder) for part in teacher]},
        )
    return name_of(teacher)


def data_path(data: DataLike) -> str:
    """Return the name or path of a data set; tables, and those in a folder that
    `save_to_disk` of `datasets` wrote, are written to one file per split. Raises
    DataError."""
    if isinstance(data, str | os.PathLike):
        place = os.fspath(data)
        marks = ("dataset_dict.json", "state.json")  # of several splits, and of one
        with reading(place):
            if not any(Path(place, mark).is_file() for mark in marks):
                return place
        data = _load_saved(place)
    splits: dict[str, Any] = (
        dict(data) if isinstance(data, Mapping) else {"train": data}
    )
    if unknown := [
        name
        for name in splits
        if sources.split_word(str(name)) is None or not str(name).isidentifier()
    ]:
        raise DataError(
            f"data: no split {unknown[0]!r}; expected train, validation and test"
        )
    kind = type(next(iter(splits.values()))).__name__
    return _save(
        "tables",
        {f"{name}.parquet": partial(_write, table) for name, table in splits.items()},
        f"{kind}-",
    )


def _load_saved(folder: str) -> dict[str, Any]:
    """Load the splits of a folder by their names, without those that have no role."""
    from datasets import DatasetDict, load_from_disk

    try:
        loaded = load_from_disk(folder)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{folder}: cannot be read as a data set that save_to_disk wrote: {error}. "
            "Save it again, or write each split as parquet."
        ) from error
    if not isinstance(loaded, DatasetDict):
        return {"train": loaded}
    return {name: loaded[name] for name in loaded if sources.split_word(name)}


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
            except (ValueError, TypeError, NotImplementedError) as error:
                # as pandas and Arrow raise
                raise DataError(
                    f"{kind}: {name} cannot be written: {error}. Give each column a "
                    "single type."
                ) from error
        written = sorted(path for path in folder.iterdir() if path.is_file())
        entry = home() / kind / f"{prefix}{io.hash_files(written)[:24]}"
        return str(
            load_or_create(
                entry, lambda into: shutil.copytree(folder, into, dirs_exist_ok=True)
            )
        )
