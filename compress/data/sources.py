"""Where data comes from: an embedded set, a local folder or file, a file for each split, or the hub.

Stated rules. A file of a folder belongs to the split that its name says, as a word of it: train; validation, valid,
val or dev; test; the last such word counts. Files that differ only in digits are shards of one split. Of several
validation files the first in the order validation, valid, val, dev (then by name) is taken. The task is that of the
training split: columns and classes are detected there alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal

from compress.data import delimited, hub, records
from compress.data.rows import Rows
from compress.errors import DataError, did_you_mean

Role = Literal["train", "validation", "test"]

EMBEDDED: Final = ("intents",)
WORDS: Final[tuple[tuple[str, Role], ...]] = (
    ("train", "train"),
    ("validation", "validation"),
    ("valid", "validation"),
    ("val", "validation"),
    ("dev", "validation"),
    ("test", "test"),
)
SUFFIXES: Final = (*delimited.SUFFIXES, *records.SUFFIXES)


@dataclass(frozen=True)
class Source:
    """What a source offers: every split not yet read, by role; the preferred one of a role first."""

    name: str
    train: Rows
    validation: tuple[Rows, ...]
    test: tuple[Rows, ...]
    notes: tuple[str, ...] = ()


def find(source: str, named: Sequence[str]) -> Source:
    """Resolve what the user wrote. `named`: the columns asked for, which help to tell headers. DataError otherwise."""
    if source in EMBEDDED:
        return _embedded(source)
    if files := named_files(source):
        opened = _open(list(files.values()), named)
        parts = {role: (opened[path],) for role, path in files.items()}
        return Source(_joint_name(files), *parts["train"], parts.get("validation", ()), parts.get("test", ()))
    path = Path(source).expanduser()
    if path.is_dir():
        return _folder(path, named)
    if path.is_file():
        return _file(path, named)
    if _is_path(source):
        raise DataError(f"{source}: there is no such file or folder.{_neighbours(path)}")
    if not hub.is_id(source):
        raise DataError(
            f"{source!r} is no data source: expected a folder, a file, a hub id such as glue/sst2, or 'intents'."
        )
    splits, notes = hub.splits(source)
    return _by_role(source, [(name, rows) for name, rows in splits.items()], f"splits {', '.join(splits)}", notes)


def named_files(source: str) -> dict[Role, Path]:
    """The files of a source that names one for each split, `train=a.tsv,test=b.tsv`; none for any other source.

    DataError for a split or file that there is not, and without a training split.
    """
    if not re.match(r"\w+=", source):
        return {}
    roles, files = dict(WORDS), {}
    for part in re.split(r",(?=\w+=)", source):
        word, _, name = part.partition("=")
        if word not in roles:
            raise DataError(f"{source}: no split {word!r}.{did_you_mean(word, roles)}")
        files[roles[word]] = Path(name).expanduser()
        if not files[roles[word]].is_file():
            raise DataError(f"{source}: {name}: there is no such file.{_neighbours(Path(name).expanduser())}")
    if "train" not in files:
        raise DataError(f"{source}: names no training split; expected train=FILE among them.")
    return files


def local_files(source: str) -> tuple[str, dict[Role, list[Path]]] | None:
    """The name of a source that is here, and its files for each split, the preferred first, whatever they hold."""
    if files := named_files(source):
        return _joint_name(files), {role: [path] for role, path in files.items()}
    path = Path(source).expanduser()
    if source in EMBEDDED or not path.exists():
        return None
    if path.is_file():
        return path.name, {"train": [path]}
    entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith(".") and entry.is_file())
    order = [word for word, _ in WORDS]
    words = [(order.index(word), entry) for entry in entries if (word := _word(entry.stem)) is not None]
    found: dict[Role, list[Path]] = {}
    for rank, entry in sorted(words):
        found.setdefault(WORDS[rank][1], []).append(entry)
    return path.resolve().name, found


def _joint_name(files: Mapping[Role, Path]) -> str:
    return " + ".join(path.name for path in files.values())


def _embedded(name: str) -> Source:
    from compress.data.embedded import intents

    splits = {
        split: records.from_records(f"{name} [{split}]", partial(enumerate, rows, 1), unit="row")
        for split, rows in intents.splits().items()
    }
    return Source(name, splits["train"], (splits["validation"],), (splits["test"],))


def _is_path(source: str) -> bool:
    """Whether a source that does not exist was meant as a path: it looks like one, or begins in a folder here."""
    path = Path(source)
    if source.startswith((".", "~")) or source.endswith("/") or path.is_absolute() or path.suffix.lower() in SUFFIXES:
        return True
    return len(path.parts) > 2 or (len(path.parts) == 2 and path.parent.is_dir())


def _neighbours(path: Path) -> str:
    if not path.parent.is_dir():
        return f" Neither is there a folder {path.parent}."
    return did_you_mean(path.name, [entry.name for entry in path.parent.iterdir()])


def _file(path: Path, named: Sequence[str]) -> Source:
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(f"{path}: expected a file that ends in {', '.join(SUFFIXES)}.")
    return Source(path.name, _open([path], named)[path], (), ())


def _folder(folder: Path, named: Sequence[str]) -> Source:
    entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    files = [entry for entry in entries if entry.suffix.lower() in SUFFIXES and _word(entry.stem) and entry.is_file()]
    opened = _open(files, named)
    shards: dict[tuple[str, str], list[Rows]] = {}
    for path, rows in opened.items():
        shards.setdefault((re.sub(r"\d+", "0", path.stem), path.suffix), []).append(rows)
    splits = [(stem, _joined(parts)) for (stem, _), parts in shards.items()]
    found = ", ".join(entry.name for entry in entries[:20]) or "nothing"
    return _by_role(folder.resolve().name, splits, f"{folder} holds {found}", ())


def _open(files: Sequence[Path], named: Sequence[str]) -> dict[Path, Rows]:
    texts = [path for path in files if path.suffix.lower() in delimited.SUFFIXES]
    opened = delimited.open_files(texts, named)
    return {path: opened[path] if path in opened else records.open_file(path) for path in files}


def _joined(parts: Sequence[Rows]) -> Rows:
    """Shards as one split."""
    first, *others = parts
    for other in others:
        if other.columns != first.columns:
            raise DataError(f"{other.place}: its columns are not those of {first.place}, the shard before it.")
    if not others:
        return first
    return replace(first, read=lambda columns: (batch for part in parts for batch in part.read(columns)))


def _word(name: str) -> str | None:
    """The split's word in a file or split name."""
    known = {word for word, _ in WORDS}
    words = [word for word in re.split(r"[^a-z]+", name.lower()) if word in known]
    return words[-1] if words else None


def _by_role(name: str, splits: Iterable[tuple[str, Rows]], found: str, notes: Sequence[str]) -> Source:
    order = [word for word, _ in WORDS]
    ranked = sorted(
        ((order.index(word), stem != word, stem, rows) for stem, rows in splits if (word := _word(stem))),
        key=lambda entry: entry[:3],
    )
    roles: dict[Role, list[Rows]] = {"train": [], "validation": [], "test": []}
    for rank, _, _, rows in ranked:
        roles[WORDS[rank][1]].append(rows)
    if not roles["train"]:
        raise DataError(
            f"{name}: no training split; {found}. Expected a file with 'train' as a word of its name, "
            f"ending in {', '.join(SUFFIXES)}."
        )
    if len(roles["train"]) > 1:
        places = " and ".join(rows.place for rows in roles["train"])
        raise DataError(f"{name}: which is the training split, {places}? Keep one in the folder.")
    return Source(name, roles["train"][0], tuple(roles["validation"]), tuple(roles["test"]), tuple(notes))
