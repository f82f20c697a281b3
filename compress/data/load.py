"""From a source to a task with its splits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from compress.data import cache, conll, schema, sources, squad
from compress.data import schema as columns
from compress.data.audit import audited
from compress.data.objects import DataLike, data_path
from compress.data.paths import Role, local_files
from compress.data.schema import Cells, Choice, Coding
from compress.data.sources import Source
from compress.data.table import Rows, at
from compress.data.task import METRICS, Examples, Kind, Task, TaskData
from compress.errors import DataError, did_you_mean

HELD_OUT_GROUPS = 0.1


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
        tables |= _hold_out_groups(files["train"], splits["train"], kind, seed, notes)
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


def _hold_out_groups(path: Path, train: Examples, kind: Kind, seed: int, notes: list[str]) -> dict[Role, pa.Table]:
    """Training rows that stay, and those of every tenth group, at random, which become the validation split."""
    groups = np.asarray(train.groups)
    names = np.random.default_rng(seed).permutation(np.unique(groups))
    if len(names) < 2:
        what = "texts" if kind == "qa" else "sentences"
        raise DataError(f"{path}: too few {what} to hold some out: add a validation split.")
    held = np.isin(groups, names[: max(1, round(HELD_OUT_GROUPS * len(names)))])
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


HELD_OUT = 0.1
"""The share of the training rows that becomes the validation split where the source has none."""

Labels = NDArray[np.int64] | NDArray[np.float32]


@dataclass(frozen=True)
class Raw:
    """A split on disk in its source's spelling: columns `line`, `text`, `text_pair` for pairs, and the label cells."""

    name: str
    table: pa.Table
    cells: Cells


def load_task(
    source: DataLike,
    *,
    text: Sequence[str] | None = None,
    label: str | None = None,
    kind: Kind | None = None,
    metric: str | None = None,
    seed: int = 0,
    unlabelled: bool = False,
) -> TaskData:
    """The task that a source holds, with its splits on disk, memory-mapped.

    source  an embedded set (`intents`), a folder or file (tsv, csv, txt, jsonl, json, parquet, the json of SQuAD,
            CoNLL's columns), a file for each split (`train=a.tsv,test=b.tsv`), a hub id; or a DataFrame, Dataset, or
            {split: either of them}
    text    one or two column names, detected when None; the columns of files without header are "1", "2", ...
    label   the label column, or several 0/1 columns joined by commas; detected when None
    kind    detected from the labels when None
    metric  one of METRICS[kind]; the first when None
    seed    chooses the rows held out for validation where the source has no validation split
    unlabelled  accept a training split without labels, and give it no column `label`: the validation split then names
            columns and classes

    The rules of detection stand at the top of `sources`, `delimited`, `columns` and `labels`, of questions and tagged
    words at the top of `annotated`, `squad` and `conll`; guesses become notes.
    Where no test split has labels, a second validation split takes its place. Raises DataError.
    """
    if kind is not None and kind not in METRICS:
        raise DataError(f"no kind of task {kind!r}.{did_you_mean(kind, METRICS)}")
    source = data_path(source)
    by_columns = text is not None or label is not None
    if not by_columns and (files := find(source, kind)) is not None:
        return audited(load(*files, metric=metric, seed=seed))
    found = sources.find(source, named=[*(text or ()), *(part.strip() for part in (label or "").split(",") if part)])
    guide = _guide(found, label) if unlabelled else found.train
    choice = columns.choose(guide, text, label)
    notes = [*found.notes, *choice.notes]
    with cache.scratch(cache.home() / "data") as folder:
        learned = _read(guide, choice, folder, notes)
        coding = schema.learn(learned.cells, kind, guide.classes.get(choice.label[0]))
        task = _task(choice, coding, metric)
        _refuse_constant(learned, schema.encode(learned.cells, coding), coding)
        _note_numbers(coding, kind, guide.classes, notes)
        train = learned if guide is found.train else _read(found.train, choice._replace(label=()), folder, notes)
        raws = {"train": train} | _others(found, choice, coding, folder, notes)
        encoded = {role: schema.encode(raw.cells, coding) for role, raw in raws.items() if raw.cells.columns}
        masks: dict[str, NDArray[np.bool_]] = {}
        if "validation" not in raws:
            masks = _hold_out(train, encoded["train"], coding.kind, seed, notes)
            raws["validation"], encoded["validation"] = train, encoded["train"]
        splits = folder / "splits"
        splits.mkdir()
        for role, raw in raws.items():
            _write(splits / f"{role}.arrow", raw, encoded.get(role), masks.get(role))
        datasets, fingerprint = cache.keep_splits(splits, coding.kind, *coding.names)
    return audited(TaskData(
        found.name, task, datasets["train"], datasets["validation"], datasets.get("test"), fingerprint, tuple(notes)
    ))  # fmt: skip


def _guide(found: Source, label: str | None) -> Rows:
    """The split that names columns and classes: train, or where that has no labels the validation split that does."""
    labelled = [rows for rows in (found.train, *found.validation[:1]) if columns.has_label(rows, label)]
    return next(iter(labelled), found.train)


def _task(choice: Choice, coding: Coding, metric: str | None) -> Task:
    metrics = METRICS[coding.kind]
    if metric is not None and metric not in metrics:
        raise DataError(f"metric {metric!r} does not score a {coding.kind} task.{did_you_mean(metric, metrics)}")
    return Task(coding.kind, choice.text, ",".join(choice.label), coding.names, metric or metrics[0])


def _read(rows: Rows, choice: Choice, folder: Path, notes: list[str]) -> Raw:
    """Copy the chosen columns of a split to disk, and note what is odd about its rows."""
    columns.existing(rows, (*choice.text, *choice.label))
    notes.extend(rows.notes)
    texts = ["text", "text_pair"][: len(choice.text)]
    answers = [f"label {name}" for name in choice.label]
    batches = (
        pa.record_batch(_without_nulls(batch.columns, len(texts)), names=["line", *texts, *answers])
        for batch in rows.read((*choice.text, *choice.label))
    )
    path = folder / f"{cache.digest(rows.place)}.raw"
    table = cache.table(path if path.exists() else cache.write(path, batches))
    table = _labelled(rows, choice, table, answers, notes)
    _note_empty(rows, choice, table, texts, notes)
    cells = Cells(
        rows.place, rows.unit, table["line"], dict(zip(choice.label, map(table.column, answers), strict=True))
    )
    return Raw(rows.name, table.select(texts), cells)


def _without_nulls(columns: Sequence[pa.Array], texts: int) -> list[pa.Array]:
    line, *rest = columns
    return [line, *(pc.fill_null(column, "") for column in rest[:texts]), *rest[texts:]]


def _labelled(rows: Rows, choice: Choice, table: pa.Table, answers: Sequence[str], notes: list[str]) -> pa.Table:
    """The rows without those that a source of class ids marks as having no label (-1), unless it marks all."""
    if not answers or choice.label[0] not in rows.classes:
        return table
    keep = pc.is_valid(table[answers[0]])
    dropped = len(table) - (pc.sum(keep).as_py() or 0)
    if dropped in {0, len(table)}:
        return table
    notes.append(f"{rows.name}: {dropped} rows that the source marks as unlabelled are left out")
    return table.filter(keep)


def _note_empty(rows: Rows, choice: Choice, table: pa.Table, texts: Sequence[str], notes: list[str]) -> None:
    for name, column in zip(choice.text, texts, strict=True):
        empty = pc.equal(pc.utf8_trim_whitespace(table[column]), "")
        count = pc.sum(empty).as_py() or 0
        if count == len(table):
            raise DataError(f"{rows.place}: the text column {name!r} is empty in every row. Name another with --text.")
        if count:
            lines = table["line"].filter(empty).slice(0, 5).to_pylist()
            notes.append(
                f"{rows.name}: {count} of {len(table)} texts in {name!r} are empty ({at(rows.unit, lines, count)})"
            )


def _others(found: Source, choice: Choice, coding: Coding, folder: Path, notes: list[str]) -> dict[str, Raw]:
    """The validation and the test split, where the source has them."""
    raws: dict[str, Raw] = {}
    if found.validation:
        raws["validation"] = _read(found.validation[0], choice, folder, notes)
    for rows in (*found.test, *found.validation[1:]):
        if "test" in raws:
            notes.append(f"{rows.name} is passed over: {raws['test'].name} is the test split")
            continue
        raw = _read(rows, choice, folder, notes) if set(choice.label) <= set(rows.columns) else None
        if raw is None or not schema.any_given(raw.cells, coding):
            notes.append(f"{rows.name} has no labels: passed over")
            continue
        raws["test"] = raw
        if rows not in found.test:
            notes.append(f"{rows.name}, a second validation split, serves as the test split")
    return raws


def _refuse_constant(train: Raw, encoded: Labels, coding: Coding) -> None:
    if not (encoded == encoded[0]).all():
        return
    if coding.kind == "multilabel":
        only = "the same labels"
    else:
        only = f"the class {coding.names[int(encoded[0])]!r}" if coding.names else f"the number {encoded[0]}"
    raise DataError(f"{train.cells.place}: every training row has {only}: there is nothing to learn.")


def _note_numbers(coding: Coding, kind: Kind | None, classes: Mapping[str, tuple[str, ...]], notes: list[str]) -> None:
    if kind is None and coding.kind == "classification" and coding.numeric and len(coding.names) > 2 and not classes:
        notes.append(f"whole numbers are read as {len(coding.names)} classes; ask for the kind regression otherwise")


def _write(path: Path, raw: Raw, encoded: Labels | None, mask: NDArray[np.bool_] | None) -> None:
    """One final split: its texts and labels, if any, of the rows in the mask."""

    def batches() -> Iterator[pa.RecordBatch]:
        start = 0
        for batch in raw.table.to_batches():
            rows = slice(start, start + batch.num_rows)
            answers = {} if encoded is None else {"label": _column(encoded[rows])}
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            whole = pa.record_batch(columns | answers)
            yield whole if mask is None else whole.filter(pa.array(mask[rows]))
            start = rows.stop

    cache.write(path, batches())


def _column(encoded: Labels) -> pa.Array:
    if encoded.ndim == 1:
        return pa.array(encoded)
    rows, classes = encoded.shape
    offsets = pa.array(np.arange(0, (rows + 1) * classes, classes, dtype=np.int32))
    return pa.ListArray.from_arrays(offsets, pa.array(encoded.reshape(-1)))


def _hold_out(train: Raw, encoded: Labels, kind: Kind, seed: int, notes: list[str]) -> dict[str, NDArray[np.bool_]]:
    """Which training rows stay, and which become the validation split."""
    mask = held_out(encoded, kind, seed)
    if not mask.any():
        raise DataError(f"{train.cells.place}: {len(mask)} rows are too few to hold some out: add a validation split.")
    notes.append(f"no validation split: {mask.sum()} of {len(mask)} training rows are held out for it (seed {seed})")
    return {"train": ~mask, "validation": mask}


def held_out(encoded: Labels, kind: Kind, seed: int) -> NDArray[np.bool_]:
    """A mask of every tenth row in the order of the labels, ties at random; no class loses its only row."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(encoded))
    if kind != "multilabel":
        order = order[np.argsort(encoded[order], kind="stable")]
    if kind == "classification":
        _, classes, counts = np.unique(encoded, return_inverse=True, return_counts=True)
        order = order[counts[classes[order]] > 1]
    step = round(1 / HELD_OUT)
    mask = np.zeros(len(encoded), bool)
    if len(order) > 1:
        mask[order[rng.integers(min(step, len(order))) :: step]] = True
    return mask
