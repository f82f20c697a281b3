"""Load a task with its splits from a source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from compress.arguments import DataLike, SeedNumber, check_arguments
from compress.data import cache, conll, embedding, labels, ranking, schema, sources, squad
from compress.data.audit import audit
from compress.data.labels import Coding, LabelColumn
from compress.data.objects import data_path
from compress.data.schema import ChosenColumns
from compress.data.sources import Role, Source
from compress.data.tables import Table
from compress.data.task import Examples, Kind, Task, TaskData, UnsavedTask, check_metric
from compress.data.text_files import head
from compress.errors import DataError, did_you_mean

HELD_OUT: Final = 0.1
"""The share of the training rows that becomes the validation split of a source without one."""

FORMS: Final[Mapping[Kind, tuple[Callable[[Path], bool], Callable[[Path], Examples | None], str]]] = {
    "qa": (squad.is_squad, squad.read, f"the json of SQuAD, or tables with the columns {', '.join(squad.COLUMNS)}"),
    "tagging": (
        conll.is_conll, conll.read, "files with a word and its tag in each line, or tables with lists of words and of "
        "tags, such as tokens and ner_tags",
    ),
}  # fmt: skip
"""Annotated files by kind: how to recognise them, how to read them, and what to call them."""
TABLES: Final = (".jsonl", ".ndjson", ".parquet")
"""Files that are always tables."""

Labels = NDArray[np.int64] | NDArray[np.float32]


@check_arguments
def load_task(
    source: DataLike,
    *,
    text: Sequence[str] | None = None,
    label: str | None = None,
    kind: Kind | None = None,
    metric: str | None = None,
    seed: SeedNumber = 0,
    unlabelled: bool = False,
) -> TaskData:
    """Load the task of a source, with its splits memory-mapped from disk.

    source  the embedded set `intents`; a folder or file (tsv, csv, txt, jsonl, json, parquet, the json of SQuAD, the
            columns of CoNLL); a file for each split (`train=a.tsv,test=b.tsv`); a hub id; or a DataFrame, a Dataset, or
            {split: either of them}
    text    one or two column names, detected if None; files without a header have the columns "1", "2", ...
    label   the label column, or several 0/1 columns joined by commas; detected if None
    kind    detected from the labels if None
    metric  one of METRICS[kind]; the first if None
    seed    chooses the rows to hold out for validation if the source has no validation split
    unlabelled  accept a training split without labels, and leave out its column `label`; the validation split then
            determines the columns and classes

    The rules of detection are at the top of `sources`, `tables`, `dialects`, `delimited` and `labels`, and for
    questions, tagged words, vectors and rankings at the top of `squad`, `conll`, `embedding` and `ranking`; guesses
    become notes. If no test split has labels, a second validation split takes its place. Raises DataError.
    """
    if kind is not None:
        check_metric(kind, None)
    source = data_path(source)
    detect = kind is None and text is None and label is None
    unsaved: UnsavedTask | None = None
    if kind == "ranking" or (detect and ranking.is_ranking(source)):
        unsaved = _load_ranking(source, text, label, metric=metric, seed=seed)
    elif kind == "embedding" or (detect and embedding.is_embedding(source)):
        unsaved = embedding.load_embedding(source, text=text, label=label, metric=metric, seed=seed)
    elif text is None and label is None and (annotated := _find_annotated(source, kind)) is not None:
        unsaved = _load_annotated(annotated, metric=metric, seed=seed)
    else:
        named = [*(text or ()), *(part.strip() for part in (label or "").split(",") if part)]
        opened = sources.find(source, named)
        if (annotated := _read_annotated(opened, kind, text, label)) is not None:
            unsaved = _load_annotated(annotated, metric=metric, seed=seed)
    with cache.scratch(cache.home() / "data") as folder:
        if unsaved is None:
            unsaved = _load_texts(opened, folder, text, label, kind, metric=metric, seed=seed, unlabelled=unlabelled)
        name, task, batches, notes = unsaved
        identity = (task.kind, *task.labels, *([str(task.unanswerable)] if task.kind in FORMS else []))
        splits, fingerprint = cache.keep_splits(folder, batches, *identity)
    return audit(
        TaskData(name, task, splits["train"], splits["validation"], splits.get("test"), fingerprint, tuple(notes))
    )


class _Split(NamedTuple):
    """Hold the columns `text`, and for pairs `text_pair`, of a split, on disk, and its labels, if any."""

    name: str
    table: pa.Table
    labels: LabelColumn | None


def _load_texts(
    source: Source,
    folder: Path,
    text: Sequence[str] | None,
    label: str | None,
    kind: Kind | None,
    *,
    metric: str | None,
    seed: int,
    unlabelled: bool,
) -> UnsavedTask:
    """Load a classification, multilabel or regression task; `folder` holds its columns until they are saved."""
    guide = source.train  # determines columns and classes
    if unlabelled and not schema.has_label(guide, label):
        guide = next((split for split in source.validation[:1] if schema.has_label(split, label)), guide)
    columns = schema.choose(guide, text, label)
    notes = [*source.notes, *columns.notes]
    labelled = _read(guide, columns, folder, notes)
    assert labelled.labels is not None
    declared = columns.label if len(columns.label) > 1 else guide.classes.get(columns.label[0])
    coding = labels.learn(labelled.labels, kind, declared)
    metric = check_metric(coding.kind, metric)
    task = Task(coding.kind, columns.text, ",".join(columns.label), coding.names, metric)
    _refuse_constant(guide.place, labels.encode(labelled.labels, coding), coding)
    notes += coding.notes
    splits: dict[Role, _Split] = {"train": labelled}
    if guide is not source.train:
        splits = {"train": _read(source.train, columns._replace(label=()), folder, notes), "validation": labelled}
    elif source.validation:
        splits["validation"] = _read(source.validation[0], columns, folder, notes)
    if (test := _read_test(source, columns, coding, folder, notes)) is not None:
        splits["test"] = test
    encoded = {role: labels.encode(split.labels, coding) for role, split in splits.items() if split.labels}
    masks: dict[Role, NDArray[np.bool_]] = {}
    if "validation" not in splits:
        held_out = hold_out(encoded["train"], coding.kind, seed)
        if not held_out.any():
            raise DataError(
                f"{guide.place}: {len(held_out)} rows are too few to hold some out; add a validation split."
            )
        notes.append(_held_out_note(held_out, seed))
        masks = {"train": ~held_out, "validation": held_out}
        splits["validation"], encoded["validation"] = splits["train"], encoded["train"]
    batches = {role: _batches(split.table, encoded.get(role), masks.get(role)) for role, split in splits.items()}
    return UnsavedTask(source.name, task, batches, notes)


def _read(split: Table, columns: ChosenColumns, folder: Path, notes: list[str]) -> _Split:
    """Copy the chosen columns of a split to disk, and note missing labels and empty texts."""
    names = (*columns.text, *columns.label)
    schema.refuse_unknown(split, names)
    notes.extend(split.notes)
    table = cache.table(cache.write(folder / f"{cache.digest(split.place)}.raw", split.read(names)))
    if columns.label and columns.label[0] in split.classes:
        labelled = pc.is_valid(table[columns.label[0]])
        unlabelled = len(table) - (pc.sum(labelled).as_py() or 0)
        if 0 < unlabelled < len(table):
            notes.append(f"{split.name}: left out {unlabelled} rows that the source marks as unlabelled")
            table = table.filter(labelled)
    for name in columns.text:
        empty = np.flatnonzero(pc.equal(pc.fill_null(pc.utf8_trim_whitespace(table[name]), ""), ""))
        if len(empty) == len(table):
            raise DataError(f"{split.place}: the text column {name!r} is empty in every row. Name another with --text.")
        if len(empty):
            where = labels.list_rows((empty[:5] + split.first).tolist(), len(empty))
            notes.append(f"{split.name}: {len(empty)} of {len(table)} texts in {name!r} are empty ({where})")
    column = labels.label_column(split, columns.label, table.select(columns.label).columns) if columns.label else None
    texts = table.select(columns.text).rename_columns(["text", "text_pair"][: len(columns.text)])
    return _Split(split.name, texts, column)


def _refuse_constant(place: str, encoded: Labels, coding: Coding) -> None:
    if not (encoded == encoded[0]).all():
        return
    only = "the same labels" if coding.kind == "multilabel" else f"the number {encoded[0]}"
    if coding.kind == "classification":
        only = f"the class {coding.names[int(encoded[0])]!r}"
    raise DataError(
        f"{place}: every training row has {only}, so there is nothing to learn. Add rows with other labels, or name "
        "the label column with --label."
    )


def _read_test(source: Source, columns: ChosenColumns, coding: Coding, folder: Path, notes: list[str]) -> _Split | None:
    """Read the first test split that has labels, or else a second validation split, and note which are skipped."""
    chosen: _Split | None = None
    for raw in (*source.test, *source.validation[1:]):
        if chosen is not None:
            notes.append(f"skipped {raw.name}: {chosen.name} is the test split")
            continue
        split = _read(raw, columns, folder, notes) if set(columns.label) <= set(raw.columns) else None
        if split is None or split.labels is None or not labels.is_labelled(split.labels, coding):
            notes.append(f"skipped {raw.name}: it has no labels")
            continue
        chosen = split
        if raw not in source.test:
            notes.append(f"{raw.name}, a second validation split, is the test split")
    return chosen


def _batches(texts: pa.Table, encoded: Labels | None, mask: NDArray[np.bool_] | None) -> Iterator[pa.RecordBatch]:
    """Yield the texts and labels, if any, of the rows in the mask."""
    start = 0
    for batch in texts.to_batches():
        rows = slice(start, start + batch.num_rows)
        columns = {name: pc.fill_null(batch[name], "") for name in batch.schema.names}
        if encoded is not None:
            columns["label"] = pa.array(encoded[rows].reshape(-1))
            if encoded.ndim > 1:
                offsets = np.arange(batch.num_rows + 1, dtype=np.int32) * encoded.shape[1]
                columns["label"] = pa.ListArray.from_arrays(pa.array(offsets), columns["label"])
        whole = pa.record_batch(columns)
        yield whole if mask is None else whole.filter(pa.array(mask[rows]))
        start = rows.stop


def hold_out(encoded: Labels, kind: Kind, seed: int) -> NDArray[np.bool_]:
    """Mask every tenth row in the order of the labels, ties in random order; no class loses its only row."""
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


def _held_out_note(held_out: NDArray[np.bool_], seed: int) -> str:
    return f"no validation split: held out {held_out.sum()} of {len(held_out)} training rows (seed {seed})"


class _Annotated(NamedTuple):
    """Hold the splits of a source of questions or tagged words; None is a split without answers."""

    name: str
    kind: Kind
    splits: Mapping[Role, Examples | None]
    places: Mapping[Role, str]
    notes: Sequence[str] = ()


def _find_annotated(source: str, kind: Kind | None) -> _Annotated | None:
    """Read the annotated files of a source; None if it has none.

    Files are not checked for a `kind` that was requested. DataError if there is no training split.
    """
    found = sources.local_files(source)
    name, files = found or ("", {})
    for form, (matches, read, _) in FORMS.items():
        if kind not in (None, form):
            continue
        usable = {
            role: [p for p in paths if not p.is_dir() and (matches(p) or (kind and not _is_table(p)))]
            for role, paths in files.items()
        }
        chosen = {role: paths[0] for role, paths in usable.items() if paths}
        if chosen and "train" not in chosen:
            given = ", ".join(f"{role}={path}" for role, path in chosen.items())
            raise DataError(
                f"{source}: {given} but no training split. Name one: a file with 'train' as a word of its name, or "
                f"--data train={next(iter(chosen.values()))}"
            )
        if chosen:
            examples = {role: read(path) for role, path in chosen.items()}
            return _Annotated(name, form, examples, {role: str(path) for role, path in chosen.items()})
    return None


def _is_table(path: Path) -> bool:
    return path.suffix.lower() in TABLES or (path.suffix.lower() == ".json" and head(path).lstrip().startswith("["))


def _read_annotated(
    source: Source, kind: Kind | None, text: Sequence[str] | None, label: str | None
) -> _Annotated | None:
    """Read tables with questions or tagged words; None if they have neither, or DataError if `kind` requests one."""
    offered: dict[Role, Sequence[Table]] = {
        "train": [source.train], "validation": source.validation, "test": [*source.test, *source.validation[1:]]
    }  # fmt: skip
    raw = {role: splits[0] for role, splits in offered.items() if splits}
    form: Kind
    splits: dict[Role, Examples | None]
    if kind in (None, "qa") and text is None and label is None and squad.is_table(source.train):
        form, splits = "qa", {role: squad.read_table(split) for role, split in raw.items()}
    elif kind in (None, "tagging") and (columns := conll.table_columns(source.train, text, label)):
        form, splits = "tagging", {role: conll.read_table(split, columns) for role, split in raw.items()}
    elif kind is not None and kind in FORMS:
        nested = ", ".join(map(repr, source.train.nested))
        found = f" Its columns {nested} have lists of lists or objects, which are not read." if nested else ""
        raise DataError(f"{source.train.place}: expected {FORMS[kind][2]}, for the kind {kind}.{found}")
    else:
        return None
    return _Annotated(source.name, form, splits, {role: split.place for role, split in raw.items()}, source.notes)


def _load_annotated(annotated: _Annotated, *, metric: str | None, seed: int) -> UnsavedTask:
    kind, places, notes = annotated.kind, annotated.places, list(annotated.notes)
    metric = check_metric(kind, metric)
    splits: dict[Role, Examples] = {}
    for role, examples in annotated.splits.items():
        if examples is not None:
            notes += examples.notes
            splits[role] = examples
        elif role == "train":
            raise _no_answers(places[role])
        else:
            notes.append(f"skipped {Path(places[role]).name}: it has no answers")
    tables = _with_validation(splits, places["train"], "texts" if kind == "qa" else "sentences", notes, seed)
    if kind == "qa":
        unanswerable = _count_unanswerable(tables, places["train"], notes)
        task = Task(kind, ("question", "context"), "answers", (), metric, unanswerable)
    else:
        names = conll.labels(tables["train"]["tags"].to_pylist())
        task = Task(kind, ("words",), "tags", names, metric)
        tables = {role: _encode_tags(table, names, places.get(role, places["train"])) for role, table in tables.items()}
    return _unsaved(annotated.name, task, tables, notes)


def _load_ranking(
    source: str, text: Sequence[str] | None, label: str | None, *, metric: str | None, seed: int
) -> UnsavedTask:
    metric = check_metric("ranking", metric)
    rankings = ranking.read(source, text, label)
    notes = [*rankings.notes, *(note for examples in rankings.splits.values() for note in examples.notes)]
    tables = _with_validation(rankings.splits, source, "queries", notes, seed)
    for role, table in tables.items():
        scorable, more = ranking.keep_scorable(table, f"{rankings.name} [{role}]")
        if role != "train":
            tables[role] = scorable
            notes += more
    return _unsaved(rankings.name, Task("ranking", rankings.text, rankings.label, (), metric), tables, notes)


def _unsaved(name: str, task: Task, tables: Mapping[Role, pa.Table], notes: Sequence[str]) -> UnsavedTask:
    return UnsavedTask(
        name, task, {role: table.to_batches(max_chunksize=10_000) for role, table in tables.items()}, notes
    )


def _with_validation(
    splits: Mapping[Role, Examples], place: str, groups: str, notes: list[str], seed: int
) -> dict[Role, pa.Table]:
    """Return the tables of the splits; without a validation split, hold out every tenth group of training rows."""
    tables = {role: examples.table for role, examples in splits.items()}
    if "validation" in tables:
        return tables
    numbers = np.random.default_rng(seed).permutation(np.unique(splits["train"].groups))
    if len(numbers) < 2:
        raise DataError(f"{place}: too few {groups} to hold some out; add a validation split.")
    held_out = np.isin(np.asarray(splits["train"].groups), numbers[: max(1, round(HELD_OUT * len(numbers)))])
    notes.append(_held_out_note(held_out, seed))
    tables["validation"] = tables["train"].filter(pa.array(held_out))
    tables["train"] = tables["train"].filter(pa.array(~held_out))
    return tables


def _no_answers(place: str) -> DataError:
    return DataError(f"{place}: no training question has an answer, so there is nothing to learn. Add some that have.")


def _count_unanswerable(tables: Mapping[Role, pa.Table], place: str, notes: list[str]) -> bool:
    """Return whether some training questions have no answer, and note evaluation questions that none teaches."""
    none = {role: pc.sum(pc.equal(pc.list_value_length(table["answers"]), 0)).as_py() for role, table in tables.items()}
    if none["train"] == len(tables["train"]):
        raise _no_answers(place)
    for role, count in none.items():
        if count and not none["train"]:
            notes.append(
                f"{role}: {count} of {len(tables[role])} questions have no answer, but every training question has "
                "one, so each of them will count as wrong"
            )
    return bool(none["train"])


def _encode_tags(table: pa.Table, names: tuple[str, ...], place: str) -> pa.Table:
    """Replace the tags of a table by class ids."""
    tags = table["tags"].combine_chunks()
    ids = pc.index_in(tags.flatten(), value_set=pa.array(names))
    if ids.null_count:
        unknown = tags.flatten().filter(pc.is_null(ids))[0].as_py()
        raise DataError(f"{place}: the training split has no tag {unknown!r}.{did_you_mean(unknown, names)}")
    encoded = pa.ListArray.from_arrays(tags.offsets, ids.cast(pa.int64()))
    return table.set_column(table.column_names.index("tags"), "tags", encoded)
