"""Tasks from files that annotate texts instead of labelling them: questions (`squad`) and tagged words (`conll`).

Stated rules. What a file holds shows in its contents; its split is the word of its name (see `sources`). Where there is
no validation split, every tenth group of the training split is held out for it: whole articles or paragraphs of
questions, single sentences of words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from compress.data import cache, conll, squad
from compress.data.examples import Examples
from compress.data.paths import Role, local_files
from compress.data.task import METRICS, Kind, Task, TaskData
from compress.errors import DataError, did_you_mean

HELD_OUT = 0.1


class _Form(NamedTuple):
    matches: Callable[[Path], bool]
    expected: str


_FORMS: Mapping[Kind, _Form] = {
    "qa": _Form(squad.is_squad, "the json of SQuAD"),
    "tagging": _Form(conll.is_conll, "words and tags in columns"),
}


def find(source: str, kind: Kind | None) -> tuple[str, Kind, dict[Role, Path]] | None:
    """(name, kind, file of each split) of a source of annotated files, None where it is none.

    A `kind` that is asked for is not doubted: DataError where the source has no file for it.
    """
    found = local_files(source)
    if found is None:
        if kind is not None and kind in _FORMS:
            raise DataError(f"{source}: {kind} is learned from files or a folder of {_FORMS[kind].expected}.")
        return None
    name, files = found
    for each, form in _FORMS.items():
        if kind not in (None, each):
            continue
        mine = {role: next(iter(paths)) for role, paths in files.items() if paths}
        if kind is None:
            matching = {role: [path for path in paths if form.matches(path)] for role, paths in files.items()}
            mine = {role: paths[0] for role, paths in matching.items() if paths}
        if mine and "train" not in mine:
            given = ", ".join(f"{role}={path}" for role, path in mine.items())
            raise DataError(
                f"{source}: {given} but no training split. Name one: a file with 'train' as a word of its name, or "
                f"--data train={next(iter(mine.values()))}"
            )
        if mine:
            return name, each, mine
    if kind is not None and kind in _FORMS:
        raise DataError(f"{source}: no file of {_FORMS[kind].expected} in it whose name says its split.")
    return None


def load(name: str, kind: Kind, files: Mapping[Role, Path], *, metric: str | None, seed: int) -> TaskData:
    """The task that annotated files hold, its splits written to the cache. Raises DataError."""
    metrics = METRICS[kind]
    if metric is not None and metric not in metrics:
        raise DataError(f"metric {metric!r} does not score a {kind} task.{did_you_mean(metric, metrics)}")
    read = squad.read if kind == "qa" else conll.read
    notes: list[str] = []
    splits: dict[Role, Examples] = {}
    for role, path in files.items():
        examples = read(path)
        if examples is None:
            if role == "train":
                raise DataError(f"{path}: no question has an answer: there is nothing to learn.")
            notes.append(f"{path.name} has no answers: passed over")
            continue
        notes += examples.notes
        splits[role] = examples
    tables = {role: examples.table for role, examples in splits.items()}
    if "validation" not in tables:
        tables |= _hold_out(files["train"], splits["train"], kind, seed, notes)
    if kind == "qa":
        task = Task(kind, ("question", "context"), "answers", (), metric or metrics[0], _unanswerable(tables, notes))
    else:
        names = conll.labels(tables["train"]["tags"].to_pylist())
        task = Task(kind, ("words",), "tags", names, metric or metrics[0])
        tables = {role: _coded(table, names, files.get(role, files["train"])) for role, table in tables.items()}
    with cache.scratch(cache.home() / "data") as folder:
        (folder / "splits").mkdir()
        for role, table in tables.items():
            cache.write(folder / "splits" / f"{role}.arrow", table.to_batches(max_chunksize=10_000))
        datasets, fingerprint = cache.keep_splits(folder / "splits", kind, *task.labels, str(task.unanswerable))
    return TaskData(
        name, task, datasets["train"], datasets["validation"], datasets.get("test"), fingerprint, tuple(notes)
    )


def _hold_out(path: Path, train: Examples, kind: Kind, seed: int, notes: list[str]) -> dict[Role, pa.Table]:
    """Training rows that stay, and those of every tenth group, at random, which become the validation split."""
    groups = np.asarray(train.groups)
    names = np.random.default_rng(seed).permutation(np.unique(groups))
    if len(names) < 2:
        what = "texts" if kind == "qa" else "sentences"
        raise DataError(f"{path}: too few {what} to hold some out: add a validation split.")
    held = np.isin(groups, names[: max(1, round(HELD_OUT * len(names)))])
    notes.append(f"no validation split: {held.sum()} of {len(held)} training rows are held out for it (seed {seed})")
    return {"train": train.table.filter(pa.array(~held)), "validation": train.table.filter(pa.array(held))}


def _unanswerable(tables: Mapping[Role, pa.Table], notes: list[str]) -> bool:
    """Whether training questions without an answer teach to give none."""
    none = {role: pc.sum(pc.equal(pc.list_value_length(table["answers"]), 0)).as_py() for role, table in tables.items()}
    if none["train"] == len(tables["train"]):
        raise DataError("no training question has an answer: there is nothing to learn.")
    for role, count in none.items():
        if count and not none["train"]:
            notes.append(
                f"{role}: {count} of {len(tables[role])} questions have no answer; no training question shows that, so "
                "that each of them counts as wrong"
            )
    return bool(none["train"])


def _coded(table: pa.Table, names: tuple[str, ...], path: Path) -> pa.Table:
    """The table with its tags as class ids."""
    tags = table["tags"].combine_chunks()
    ids = pc.index_in(tags.flatten(), value_set=pa.array(names))
    if ids.null_count:
        strange = tags.flatten().filter(pc.is_null(ids))[0].as_py()
        raise DataError(f"{path}: tag {strange!r} is none of the training split.{did_you_mean(strange, names)}")
    coded = pa.ListArray.from_arrays(tags.offsets, ids.cast(pa.int64()))
    return table.set_column(table.column_names.index("tags"), "tags", coded)
