"""Where data comes from: an embedded set, a local folder or file, a file for each split, or the hub.

Stated rules. A file of a folder belongs to the split that its name says, as a word of it: train; validation, valid,
val or dev; test; the last such word counts. Files that differ only in digits are shards of one split. Of several
validation files the first in the order validation, valid, val, dev (then by name) is taken. The task is that of the
training split: columns and classes are detected there alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from compress.data import delimited, hub, paths, records
from compress.data.paths import DELIMITED, EMBEDDED, SUFFIXES, WORDS, Role, split_word
from compress.data.rows import Rows
from compress.data.text import reading, refuse_special
from compress.errors import DataError


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
    if files := paths.named_files(source):
        opened = _open(list(files.values()), named)
        parts = {role: (opened[path],) for role, path in files.items()}
        return Source(paths.joint_name(files), *parts["train"], parts.get("validation", ()), parts.get("test", ()))
    path = paths.local(source)
    with reading(source):
        if path.is_dir():
            return _folder(path, named)
        if path.exists():
            return _file(path, named)
        if paths.is_missing(source):
            raise paths.missing(source)
    if not paths.is_hub_id(source):
        raise paths.no_source(source)
    splits, notes = hub.splits(source)
    return _by_role(source, [(name, rows) for name, rows in splits.items()], f"splits {', '.join(splits)}", notes)


def _embedded(name: str) -> Source:
    from compress.data.embedded import intents

    splits = {
        split: records.from_records(f"{name} [{split}]", partial(enumerate, rows, 1), unit="row")
        for split, rows in intents.splits().items()
    }
    return Source(name, splits["train"], (splits["validation"],), (splits["test"],))


def _file(path: Path, named: Sequence[str]) -> Source:
    refuse_special(path)
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(f"{path}: expected a file that ends in {', '.join(SUFFIXES)}.")
    return Source(path.name, _open([path], named)[path], (), ())


def _folder(folder: Path, named: Sequence[str]) -> Source:
    entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    files = [
        each for each in entries if each.suffix.lower() in SUFFIXES and split_word(each.stem) and not each.is_dir()
    ]
    opened = _open(files, named)
    shards: dict[tuple[str, str], list[Rows]] = {}
    for path, rows in opened.items():
        shards.setdefault((re.sub(r"\d+", "0", path.stem), path.suffix), []).append(rows)
    splits = [(stem, _joined(parts)) for (stem, _), parts in shards.items()]
    return _by_role(folder.resolve().name, splits, paths.holds(folder, entries), ())


def _open(files: Sequence[Path], named: Sequence[str]) -> dict[Path, Rows]:
    texts = [path for path in files if path.suffix.lower() in DELIMITED]
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


def _by_role(name: str, splits: Iterable[tuple[str, Rows]], found: str, notes: Sequence[str]) -> Source:
    order = [word for word, _ in WORDS]
    ranked = sorted(
        ((order.index(word), stem != word, stem, rows) for stem, rows in splits if (word := split_word(stem))),
        key=lambda entry: entry[:3],
    )
    roles: dict[Role, list[Rows]] = {"train": [], "validation": [], "test": []}
    for rank, _, _, rows in ranked:
        roles[WORDS[rank][1]].append(rows)
    if not roles["train"]:
        raise paths.no_training_split(name, found)
    if len(roles["train"]) > 1:
        places = " and ".join(rows.place for rows in roles["train"])
        raise DataError(f"{name}: which is the training split, {places}? Keep one in the folder.")
    return Source(name, roles["train"][0], tuple(roles["validation"]), tuple(roles["test"]), tuple(notes))
