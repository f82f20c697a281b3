"""Find where data comes from: an embedded set, a local folder or file, a file for each
split, or the hub.

`intents` has what people ask of an assistant on a phone or at home: 25 intents,
generated from templates (benchmarks/intents) that the splits do not share, and hard for
a bag of words. Scores on it compare models; they do not estimate how well a model
understands people.

Rules. A file of a folder belongs to the split that its name contains as a word:
train; validation, valid, val or dev; test; the last such word counts. If no file of a
folder has one, its subfolders are searched, and their names count too
(`data/train-00000.parquet`, `train/rows.csv`); a subfolder for each split with a folder
for each class has one text per file (`train/pos/1.txt`, as in IMDb); a single file is
the training split. Files that differ only in digits, or in the hub's hash, are shards
of one split. Of several validation files the first in the order validation, valid, val,
dev (then by name) is taken. The task is that of the training split: columns and classes
are detected only there.

This module imports no heavy library, so that `check` and `check_corpus` refuse a wrong
name at once.
"""

from __future__ import annotations

import http.client
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeVar

from compress.data import documents
from compress.data.schema import list_requested, plain, refuse_unknown, split_names
from compress.data.table_files import (
    SUFFIXES,
    class_folders,
    is_table_file,
    open_tables,
)
from compress.data.tables import Table
from compress.data.text_files import reading, refuse_special
from compress.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from pyarrow import RecordBatch

Role = Literal["train", "validation", "test"]
SplitFiles = dict[Role, list[Path]]
CorpusKind = Literal["pydoc", "parallel", "languages", "local", "hub"]
Item = TypeVar("Item")

EMBEDDED_DATA: Final = {"intents": Path(__file__).with_name("resources") / "intents"}
SPLIT_WORDS: Final[Mapping[str, Role]] = {
    "train": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "eval": "validation",
    "test": "test",
}
"""The words that name a split, preferred ones first."""

SUITES: Final = {
    "glue": "nyu-mll/glue",
    "super_glue": "aps/super_glue",
    "tweet_eval": "cardiffnlp/tweet_eval",
}
"""Hub ids of benchmarks, whose tasks are named `suite/task`."""

NOT_REACHED: Final = "the hub cannot be reached, and its local cache does not have it"
ANSWER_SECONDS: Final = 5.0
"""Seconds that the hub may take to answer; without this check its client retries for
minutes."""


def check(
    source: str, text: Sequence[str] | None = None, label: str | None = None
) -> None:
    """Refuse a source of labelled data that is missing or empty, has no training split,
    or lacks a column that is named.

    `load_task` checks its rows, and whether the hub has it, unless it cannot be asked.
    """
    if (found := local_files(source)) is None:
        if not _is_cached(source) and not is_hub_reachable():
            raise _not_on_hub(source, NOT_REACHED)
        return
    name, files = found
    folder = local(source)
    with reading(source):
        is_folder = folder.is_dir()
        if is_folder and is_beir(folder):
            return
        if "train" not in files:
            raise _no_training_split(name, _list_entries(folder))
        for path in files["train"]:
            if not is_folder or is_table_file(path):
                _refuse_empty(path)
    check_columns(source, text, label)


def check_columns(source: str, text: Sequence[str] | None, label: str | None) -> None:
    """Refuse columns that no table of a local source has. Other faults are reported
    when it is read."""
    names = list_requested(text, label)
    if not names or local_files(source) is None:
        return
    try:
        found = find(source, [*(text or ()), *split_names(label)])
    except DataError:
        return
    known = {column for _, table in found.tables() for column in table.columns}
    parts = split_names(None if label in known else label)
    refuse_unknown(
        found.train, [each for each in [*(text or ()), *parts] if each not in known]
    )


def is_beir(folder: Path) -> bool:
    """Check whether a folder has the layout of BEIR's retrieval sets: see
    `data.retrieval`."""
    files = (folder / "corpus.jsonl", folder / "queries.jsonl")
    return all(file.is_file() for file in files) and (folder / "qrels").is_dir()


def check_corpus(source: str) -> None:
    """Refuse a source of unlabelled text that is missing; reading it shows whether it
    has text."""
    kind, files = find_corpus(source)
    with reading(source):
        for file in files if kind in ("local", "languages") else ():
            refuse_special(file)


def find_corpus(source: str) -> tuple[CorpusKind, list[Path]]:
    """Return the kind of an unlabelled source, and its files if it is local. DataError
    if it does not exist."""
    if source == "pydoc":
        return "pydoc", []
    path = local(source)
    with reading(source):
        if pair := documents.find_parallel(path):
            return "parallel", pair
        if parts := documents.find_languages(path):
            return "languages", [
                file for part in parts.values() for file in find_corpus(str(part))[1]
            ]
        if path.exists():
            return "local", documents.find(path)
    if (
        _is_hub_id(source)
        and documents.kind(path.name) is None
        and not source.startswith(".")
    ):
        return "hub", []
    raise _missing(source)


def local(source: str) -> Path:
    """Return the path that a source may name. DataError if it cannot be a path."""
    if not source.strip() or "\0" in source:
        raise _no_source(source)
    if source in EMBEDDED_DATA:
        return EMBEDDED_DATA[source]
    try:
        return Path(source).expanduser()
    except RuntimeError as error:  # ~user without a home directory
        raise DataError(f"{source}: no such folder: {error}") from None


def local_files(source: str) -> tuple[str, SplitFiles] | None:
    """Return the name of a local source, and its files for each split, preferred ones
    first and of any type.

    None for a hub id. DataError for anything else.
    """
    if re.match(r"\w+=", source):
        named = _split_files(source)
        return " + ".join(path.name for path in named.values()), {
            role: [path] for role, path in named.items()
        }
    path = local(source)
    with reading(source):
        if path.is_dir():
            entries = [entry for entry in _entries(path) if not entry.is_dir()]
            return path.resolve().name, by_role(
                (entry.stem, entry) for entry in entries
            ) or _below(path)
        if path.exists():
            return path.name, {"train": [path]}
    path = Path(source)
    looks_like_path = (
        source.startswith((".", "~")) or source.endswith("/") or is_table_file(path)
    )
    has_local_parent = len(path.parts) > 2 or (
        len(path.parts) == 2 and path.parent.is_dir()
    )
    if looks_like_path or path.is_absolute() or has_local_parent:
        raise _missing(source)
    if not _is_hub_id(source):
        raise _no_source(source)
    return None


def _below(folder: Path) -> SplitFiles:
    """Find the splits of a folder whose own files name no split, by the rules above;
    empty without a training split."""
    below = [file for file in sorted(folder.glob("[!.]*/[!.]*")) if is_table_file(file)]
    own = [entry for entry in _entries(folder) if is_table_file(entry)]
    for named in (
        ((entry.name, entry) for entry in _entries(folder) if class_folders(entry)),
        (
            (" ".join(file.relative_to(folder).with_suffix("").parts), file)
            for file in below
        ),
        (("train", file) for file in own if len(own) == 1),
    ):
        if "train" in (files := by_role(named)):
            return files
    return {}


def _split_files(source: str) -> dict[Role, Path]:
    """Parse a source that names a file for each split, `train=a.tsv,test=b.tsv`."""
    files: dict[Role, Path] = {}
    for part in re.split(r",(?=\w+=)", source):
        word, _, name = part.partition("=")
        if word not in SPLIT_WORDS:
            raise DataError(
                f"{source}: no split {word!r}.{did_you_mean(word, SPLIT_WORDS)}"
            )
        if SPLIT_WORDS[word] in files:
            raise DataError(
                f"{source}: names two files for the {SPLIT_WORDS[word]} split; "
                "expected one."
            )
        files[SPLIT_WORDS[word]] = path = local(name)
        with reading(name):
            if not path.exists():
                raise DataError(f"{source}: {name}: no such file.{neighbours(path)}")
            _refuse_empty(path)
    if "train" not in files:
        raise DataError(
            f"{source}: names no training split; expected train=FILE among them."
        )
    return files


def by_role(parts: Iterable[tuple[str, Item]]) -> dict[Role, list[Item]]:
    """Group parts by the split that their names contain, preferred names first; leave
    out parts without one."""
    order = list(SPLIT_WORDS)
    ranked = [
        (order.index(word), stem != word, stem, part)
        for stem, part in parts
        if (word := split_word(stem))
    ]
    groups: dict[Role, list[Item]] = {}
    for rank, *_, part in sorted(ranked, key=lambda entry: entry[:3]):
        groups.setdefault(SPLIT_WORDS[order[rank]], []).append(part)
    return groups


def split_word(name: str) -> str | None:
    """Return the word that names a split in a file or split name."""
    words = [word for word in re.split(r"[^a-z]+", name.lower()) if word in SPLIT_WORDS]
    return words[-1] if words else None


@dataclass(frozen=True)
class Source:
    """Hold the splits of a source, not yet read, by role; the preferred one of a role
    first."""

    name: str
    train: Table
    validation: Sequence[Table]
    test: Sequence[Table]
    notes: tuple[str, ...] = ()

    def tables(self) -> Iterator[tuple[Role, Table]]:
        """Yield each split with its role."""
        yield "train", self.train
        yield from (("validation", split) for split in self.validation)
        yield from (("test", split) for split in self.test)


def find(source: str, columns: Sequence[str]) -> Source:
    """Open the splits of a source; the requested `columns` help to recognise headers.
    Raises DataError."""
    name = source
    notes: tuple[str, ...] = ()
    if (local_splits := local_files(source)) is None:
        hub, notes = load_hub_splits(source)
        splits = by_role(hub.items())
        description = f"splits {', '.join(hub)}"
    else:
        name, files = local_splits
        description = ""
        if local(source).is_dir():
            named = chain(*files.values())
            unread = [
                path for path in named if not (path.is_dir() or is_table_file(path))
            ]
            notes = tuple(
                f"skipped {path.name}: its name does not end in {', '.join(SUFFIXES)}"
                for path in unread
            )
            files = {
                role: [path for path in paths if path not in unread]
                for role, paths in files.items()
            }
            description = _list_entries(local(source))
        every = list(chain(*files.values()))
        if len(every) == 1 and not is_table_file(every[0]):
            raise DataError(
                f"{every[0]}: expected a file that ends in {', '.join(SUFFIXES)}."
            )
        opened = {
            path: table.check() for path, table in open_tables(every, columns).items()
        }
        splits = {
            role: join_shards({path: opened[path] for path in paths})
            for role, paths in files.items()
        }
    train = splits.get("train")
    if not train:
        raise _no_training_split(name, description)
    if len(train) > 1:
        raise _several_training_splits(name, (split.place for split in train))
    return Source(
        name, train[0], splits.get("validation", []), splits.get("test", []), notes
    )


def group_shards(paths: Iterable[Path]) -> list[list[Path]]:
    """Group files of a folder whose names differ only in digits, and in the hash before
    the suffix that the hub used to add: each group is a split."""
    groups: dict[tuple[Path, str], list[Path]] = {}
    for path in paths:
        key = path.parent, re.sub(r"-[0-9a-f]{16}(?=\.)|\d+", "0", path.name)
        groups.setdefault(key, []).append(path)
    return list(groups.values())


def choose_files(
    name: str, files: Mapping[Role, Sequence[Path]]
) -> tuple[SplitFiles, list[str]]:
    """Choose the files of each split, the shards of the preferred one, and return notes
    on them and on files that are skipped. DataError for several training splits."""
    chosen: SplitFiles = {}
    notes = []
    for role, paths in files.items():
        if not paths:
            continue
        first, *others = group_shards(paths)
        if others and role == "train":
            raise _several_training_splits(
                name, (group[0] for group in (first, *others))
            )
        chosen[role] = first
        if len(first) > 1:
            names = ", ".join(path.name for path in first)
            notes.append(f"{role}: read {names} as one split")
        notes += [
            f"skipped {path.name}: {first[0].name} is the {role} split"
            for group in others
            for path in group
        ]
    return chosen, notes


def join_shards(files: Mapping[Path, Table]) -> list[Table]:
    """Join files whose names differ only in digits into one split."""
    joined = []
    for group in group_shards(files):
        tables = [files[path] for path in group]
        first, *others = tables
        for other in others:
            if _has_lists(other) != _has_lists(first):
                raise DataError(
                    f"{other.place}: its columns, or which of them have lists, differ "
                    f"from those of {first.place}, another shard."
                )
        joined.append(
            replace(
                first,
                batches=partial(_read_all, tables),
                notes=(*first.notes, f"{first.name}: read {len(tables)} files as one"),
            )
            if others
            else first
        )
    return joined


def _has_lists(table: Table) -> dict[str, bool]:
    """Return of each column whether it has lists."""
    return {name: table.has_lists(name) for name in table.columns}


def _read_all(parts: Sequence[Table], columns: Sequence[str]) -> Iterator[RecordBatch]:
    for part in parts:
        yield from part.read(columns)


def load_hub_splits(source: str) -> tuple[dict[str, Table], tuple[str, ...]]:
    """Load the splits of a hub data set by the hub's names, and notes. DataError within
    30 seconds if it fails."""
    from datasets import config, load_dataset
    from datasets.exceptions import DatasetsError

    from compress.data.arrow_tables import from_dataset

    path, _, configuration = source.partition(":")
    suite, _, task = path.partition("/")
    if suite in SUITES and task:
        path = SUITES[suite]
        configuration = task
    before = config.HF_HUB_OFFLINE
    reached = is_hub_reachable()
    # `datasets` reads the environment only when it is imported
    config.HF_HUB_OFFLINE = not reached
    try:
        loaded = load_dataset(path, configuration or None)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        reason = str(error).strip().splitlines()[-1].rstrip(".")
        if not reached:
            reason = f"{NOT_REACHED} ({reason})"
        raise _not_on_hub(source, reason) from error
    finally:
        config.HF_HUB_OFFLINE = before
    notes = (
        ()
        if reached
        else (f"the hub cannot be reached: {source} comes from the local cache",)
    )
    return {
        str(name): from_dataset(f"{source} [{name}]", split).check()
        for name, split in loaded.items()
    }, notes


def hub_id(name: str) -> tuple[str, str] | None:
    """Return the hub's id and the configuration of a data set `owner/name:part` or
    `suite/task`.

    None for other names: one without an owner may also be a folder.
    """
    path, _, configuration = name.partition(":")
    suite, slash, task = path.partition("/")
    if not slash or not _is_hub_id(name):
        return None
    return (SUITES[suite], task) if suite in SUITES else (path, configuration)


def is_hub_reachable() -> bool:
    """Check whether the hub, or the mirror in HF_ENDPOINT, answers; False if
    HF_HUB_OFFLINE is set.

    The hub's clients would wait for minutes, or for ever.
    """
    from huggingface_hub import constants

    return not constants.HF_HUB_OFFLINE and is_reachable(constants.ENDPOINT)


def is_reachable(endpoint: str) -> bool:
    """Check whether a server answers a request, through the proxies in force, within
    ANSWER_SECONDS."""
    request = urllib.request.Request(endpoint, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS):
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500  # "bad gateway" is the answer of a proxy
    except (OSError, http.client.HTTPException):
        return False


def _is_hub_id(source: str) -> bool:
    """Check whether a source is written like the hub's data sets: `name`, `owner/name`,
    `owner/name:part`."""
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?", source) is not None


def _is_cached(source: str) -> bool:
    """Check whether one of the hub's caches has a folder of this data set; each cache
    spells its name differently."""
    from huggingface_hub import constants

    name = source.partition(":")[0]
    suite, slash, _ = name.partition("/")
    wanted = plain(SUITES.get(suite, name) if slash else name).replace("/", "")
    prepared = os.environ.get("HF_DATASETS_CACHE", Path(constants.HF_HOME, "datasets"))
    return any(
        plain(entry.name.removeprefix("datasets--")) == wanted
        for cache in (Path(constants.HF_HUB_CACHE), Path(prepared))
        if cache.is_dir()
        for entry in cache.iterdir()
    )


def _missing(source: str) -> DataError:
    return DataError(f"{source}: no such file or folder.{neighbours(local(source))}")


def _not_on_hub(source: str, reason: str) -> DataError:
    hint = neighbours(local(source), close=True)
    return DataError(
        f"{source}: no such file or folder.{hint} As a data set of the hub: {reason}. "
        "Use a folder with train.tsv (csv, jsonl, parquet), the embedded set "
        "'intents', or a hub cache that has it (set HF_HOME)."
    )


def _no_source(source: str) -> DataError:
    return DataError(
        f"{source!r} is not a data source: expected a folder, a file, a hub id such as "
        "glue/sst2, or 'intents'."
    )


def _no_training_split(name: str, description: str) -> DataError:
    return DataError(
        f"{name}: no training split; {description}. Expected a file with 'train' as a "
        f"word of its name, ending in {', '.join(SUFFIXES)}."
    )


def _several_training_splits(name: str, places: Iterable[object]) -> DataError:
    return DataError(
        f"{name}: several training splits, {' and '.join(map(str, places))}. Keep one "
        "of them in the folder."
    )


def _entries(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))


def _list_entries(folder: Path) -> str:
    return (
        f"{folder} holds "
        f"{', '.join(entry.name for entry in _entries(folder)[:20]) or 'nothing'}"
    )


def neighbours(path: Path, *, close: bool = False) -> str:
    """Return a hint for a path that does not exist: a similar name next to it; without
    `close` also what else is there, or that the folder is missing."""
    if not path.parent.is_dir():
        return "" if close else f" The folder {path.parent} does not exist either."
    hint = did_you_mean(path.name, [entry.name for entry in path.parent.iterdir()])
    return "" if close and "Did you mean" not in hint else hint


def _refuse_empty(path: Path) -> None:
    refuse_special(path)
    if not path.stat().st_size:
        raise DataError(f"{path} is empty; expected rows of a text and a label.")
