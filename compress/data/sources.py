"""Where data comes from: an embedded set, a local folder or file, a file for each split, or the hub.

Stated rules. A file of a folder belongs to the split that its name says, as a word of it: train; validation, valid,
val or dev; test; the last such word counts. Files that differ only in digits are shards of one split. Of several
validation files the first in the order validation, valid, val, dev (then by name) is taken. The task is that of the
training split: columns and classes are detected there alone.
"""

from __future__ import annotations

import http.client
import re
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from compress.data import paths, readers
from compress.data.paths import DELIMITED, EMBEDDED, SUFFIXES, WORDS, Role, split_word
from compress.data.readers import from_dataset
from compress.data.table import Rows
from compress.data.text_files import reading, refuse_special
from compress.errors import DataError

if TYPE_CHECKING:
    from datasets import DatasetDict

SUITES: Final = {"glue": "nyu-mll/glue", "super_glue": "aps/super_glue", "tweet_eval": "cardiffnlp/tweet_eval"}
"""Data sets of many tasks, which `suite/task` names as the papers do."""

ANSWER_SECONDS = 5.0
"""How long the hub may take to answer at all; without this check its client retries for minutes."""


def load_hub_splits(source: str) -> tuple[dict[str, Rows], tuple[str, ...]]:
    """The splits of a hub data set by the hub's names, and notes. DataError within 30 s when it cannot be had."""
    path, configuration = _address(source)
    notes: tuple[str, ...] = ()
    offline = not answers()
    with _cache_only(offline):
        loaded = _load(source, path, configuration, offline=offline)
    if offline:
        notes = (f"the hub was not reached: {source} comes from the local cache",)
    return {str(name): from_dataset(f"{source} [{name}]", split) for name, split in loaded.items()}, notes


def _address(source: str) -> tuple[str, str | None]:
    name, _, configuration = source.partition(":")
    suite, _, task = name.partition("/")
    if suite in SUITES and task:
        return SUITES[suite], task
    return name, configuration or None


def answers() -> bool:
    """Whether the hub, or the mirror that HF_ENDPOINT names, answers: one request, through the proxies in force.

    HF_HUB_OFFLINE is a no. Worth asking first: the hub's clients wait for an answer for minutes, or for ever.
    """
    from datasets import config

    if config.HF_HUB_OFFLINE:
        return False
    request = urllib.request.Request(config.HF_ENDPOINT, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS):
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500  # a proxy's own "bad gateway" is no answer of the hub
    except (OSError, http.client.HTTPException):
        return False


@contextmanager
def _cache_only(offline: bool) -> Iterator[None]:
    """`datasets` reads this switch from the environment once, when imported; here it holds for one call."""
    from datasets import config

    before = config.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = offline
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before


def _load(source: str, path: str, configuration: str | None, *, offline: bool) -> DatasetDict:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        return load_dataset(path, configuration)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        said = str(error).strip().splitlines()[-1].rstrip(".")
        reason = f"the hub cannot be reached, nor does its local cache have it ({said})" if offline else said
        raise DataError(
            f"{source}: {reason}. Instead: a folder with train.tsv (csv, jsonl, parquet), the embedded set 'intents', "
            "or a hub cache that has it (HF_HOME names the cache)."
        ) from error


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
    splits, notes = load_hub_splits(source)
    return _by_role(source, [(name, rows) for name, rows in splits.items()], f"splits {', '.join(splits)}", notes)


def _embedded(name: str) -> Source:
    from compress.data.resources import intents

    splits = {
        split: readers.from_records(f"{name} [{split}]", partial(enumerate, rows, 1), unit="row")
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
    opened = readers.open_files(texts, named)
    return {path: opened[path] if path in opened else readers.open_file(path) for path in files}


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
