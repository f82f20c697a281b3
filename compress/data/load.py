"""Load a task with its splits from a source."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from compress.arguments import DataLike, SeedNumber, check_arguments
from compress.arrays import Flags, Longs
from compress.data import cache, labels, schema, sources
from compress.data.audit import Keys, audit, compare_rows
from compress.data.held_out import describe_held_out, held_out_share
from compress.data.labels import Coding, LabelColumn, Labels
from compress.data.objects import data_path
from compress.data.schema import ChosenColumns
from compress.data.soft_labels import SoftLabelColumns
from compress.data.sources import Role, Source
from compress.data.tables import Table
from compress.data.task import Examples, Task, TaskData, UnsavedTask, join_examples
from compress.data.text_files import head
from compress.errors import DataError, did_you_mean
from compress.kinds import Kind, find
from compress.progress import Progress

if TYPE_CHECKING:
    from datasets import Dataset

DETECTED: Final = ("ranking", "tagging", "embedding", "qa", "generation")
"""The kinds that the files of a source show, in the order in which they are tried;
other kinds show in the labels."""
TABLE_SUFFIXES: Final = (".csv", ".jsonl", ".ndjson", ".parquet")
"""Files that are always tables."""


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

    source  the embedded set `intents`; a folder or file (tsv, csv, txt, jsonl, json,
            parquet, the json of SQuAD, the columns of CoNLL); a file for each split
            (`train=a.tsv,test=b.tsv`); a hub id; or a DataFrame, a Dataset, or {split:
            either of them}
    text    one or two column names, detected if None; files without a header have the
            columns "1", "2", ...
    label   the label column, or several 0/1 columns joined by commas; detected if None
    kind    detected from the labels if None
    metric  one of the metrics of the kind; the first if None
    seed    chooses the rows to hold out for validation if the source has no validation
            split
    unlabelled  accept a training split without labels, and leave out its column
                `label`; the validation split then
            determines the columns and classes

    The rules of detection are at the top of `sources`, `tables`, `dialects`,
    `delimited` and `labels`, and for questions, tagged words, vectors and rankings at
    the top of `squad`, `conll`, `embedding` and `ranking`; guesses become notes. If no
    test split has labels, a second validation split takes its place. Raises DataError.
    """
    request = DataRequest(
        data_path(source), text, label, kind, metric, seed, unlabelled
    )
    unsaved = _read_detected(request)
    with cache.scratch(cache.home() / "data") as folder:
        if unsaved is None:
            unsaved = _load_texts(request, folder)
        name, task, batches, notes = unsaved
        identity = (
            task.kind,
            *task.labels,
            *([str(task.unanswerable)] if task.tokenwise else []),
        )
        splits, fingerprint = cache.keep_splits(folder, batches, *identity)
    return audit(
        TaskData(
            name,
            task,
            splits["train"],
            splits["validation"],
            splits.get("test"),
            fingerprint,
            tuple(notes),
        )
    )


@dataclass(frozen=True)
class DataRequest:
    """The arguments of `load_task`; see there."""

    source: str
    text: Sequence[str] | None
    label: str | None
    kind: Kind | None
    metric: str | None
    seed: int
    unlabelled: bool

    @property
    def names_columns(self) -> bool:
        return self.text is not None or self.label is not None

    @property
    def detects(self) -> bool:
        """Check whether neither the columns nor the kind are requested."""
        return self.kind is None and not self.names_columns

    @cached_property
    def opened(self) -> Source:
        """Open the tables of the source."""
        names = [*(self.text or ()), *schema.split_names(self.label)]
        return sources.find(self.source, names)


def _read_detected(request: DataRequest) -> UnsavedTask | None:
    """Read the task of a kind that the source shows, or of the requested kind; None for
    a kind that only labels show."""
    offered = [find(kind) for kind in DETECTED]
    if request.kind is not None:
        offered = [find(request.kind)]
    readers = [each.read_files for each in offered]
    for read in [*readers, *(each.read_tables for each in offered)]:
        if (unsaved := read(request)) is not None:
            return cast("UnsavedTask", unsaved)
    return None


class _Split(NamedTuple):
    """Hold the columns `text`, and for pairs `text_pair`, of a split, on disk, and its
    labels, if any."""

    name: str
    table: pa.Table
    labels: LabelColumn | None

    @property
    def texts(self) -> pa.Table:
        """The columns of text, without the answers of a teacher."""
        answers = {"teacher"} & {*self.table.column_names}
        return self.table.drop_columns([*answers])


def _choose(
    guide: Table, request: DataRequest, soft: SoftLabelColumns | None
) -> ChosenColumns:
    """Choose the columns of texts and labels; if there are no labels, a teacher's most
    probable ones are used."""
    if soft is None or schema.has_label(guide, request.label):
        return schema.choose(guide, request.text, request.label)
    texts, notes = schema.choose_text(guide, request.text, soft.columns)
    return ChosenColumns(texts, (request.label or "label",), notes)


def _load_texts(request: DataRequest, folder: Path) -> UnsavedTask:
    """Load a task whose rows are texts with labels; `folder` holds its columns until
    they are saved."""
    source = request.opened
    guide = source.train  # determines columns and classes
    if request.unlabelled and not schema.has_label(guide, request.label):
        guide = next(
            (
                split
                for split in source.validation[:1]
                if schema.has_label(split, request.label)
            ),
            guide,
        )
    soft = SoftLabelColumns.find(guide)
    columns = _choose(guide, request, soft)
    notes = [*source.notes, *columns.notes]
    labelled = _read(guide, columns, folder, notes, soft)
    assert labelled.labels is not None
    declared: Sequence[str] | None = (
        columns.label if len(columns.label) > 1 else guide.classes.get(columns.label[0])
    )
    if soft is not None:
        declared = soft.labels
        notes.append(
            f"{guide.name}: 'probabilities' are a teacher's answers, which the student "
            "learns; pruning reads only the labels"
        )
    coding = labels.learn(labelled.labels, request.kind, declared)
    metric = find(coding.kind).choose_metric(request.metric)
    task = Task(
        coding.kind, columns.text, ",".join(columns.label), coding.names, metric
    )
    _refuse_constant(guide.place, labels.encode(labelled.labels, coding), task)
    notes += coding.notes
    splits: dict[Role, _Split] = {"train": labelled}
    if guide is not source.train:
        splits = {
            "train": _read(source.train, columns._replace(label=()), folder, notes),
            "validation": labelled,
        }
    elif source.validation:
        splits["validation"] = _read(source.validation[0], columns, folder, notes, soft)
    if (
        test := _read_test(source, columns, coding, folder, notes, soft=soft)
    ) is not None:
        splits["test"] = test
    encoded = {
        role: labels.encode(split.labels, coding)
        for role, split in splits.items()
        if split.labels
    }
    masks: dict[Role, Flags] = {}
    if "validation" not in splits:
        texts = splits["train"].texts.to_batches()
        keys = compare_rows([batch.columns for batch in texts])
        held_out = hold_out(encoded["train"], task, request.seed, keys)
        if not held_out.any():
            raise DataError(
                f"{guide.place}: {len(np.unique(keys))} different rows are too few to "
                "hold some out; add a validation split."
            )
        notes.append(describe_held_out(held_out, request.seed))
        masks = {"train": ~held_out, "validation": held_out}
        splits["validation"] = splits["train"]
        encoded["validation"] = encoded["train"]
    batches = {
        role: _batches(split.table, encoded.get(role), masks.get(role))
        for role, split in splits.items()
    }
    return UnsavedTask(source.name, task, batches, notes)


def _read(
    split: Table,
    columns: ChosenColumns,
    folder: Path,
    notes: list[str],
    soft: SoftLabelColumns | None = None,
) -> _Split:
    """Copy the chosen columns of a split to disk, and note missing labels and empty
    texts."""
    names = (*columns.text, *columns.label)
    if soft is not None:
        soft.check(split)
        names = (*columns.text, *({*columns.label} & {*split.columns}), *soft.columns)
    schema.refuse_unknown(split, names)
    notes.extend(split.notes)
    # an error would leave its progress bar open
    with closing(_read_shown(split, names)) as rows:
        file = cache.write(folder / f"{cache.digest(split.place)}.raw", rows)
    table = cache.table(file)
    if soft is not None:
        table, unanswered = soft.read(table, columns.label[0], split)
        if unanswered:
            notes.append(f"{split.name}: left out {unanswered:,} unanswered texts")
    if columns.label and columns.label[0] in split.classes:
        labelled = pc.is_valid(table[columns.label[0]])
        unlabelled = len(table) - (pc.sum(labelled).as_py() or 0)
        if 0 < unlabelled < len(table):
            notes.append(
                f"{split.name}: left out {unlabelled} rows that the source marks as "
                "unlabelled"
            )
            table = table.filter(labelled)
    for name in columns.text:
        empty = _find_empty(table[name])
        if len(empty) == len(table):
            raise DataError(
                f"{split.place}: the text column {name!r} is empty in every row. Name "
                "another with --text."
            )
        if len(empty):
            where = labels.list_rows((empty[:5] + split.first).tolist(), len(empty))
            notes.append(
                f"{split.name}: {len(empty)} of {len(table)} texts in {name!r} are "
                f"empty ({where})"
            )
    column = (
        labels.label_column(split, columns.label, table.select(columns.label).columns)
        if columns.label
        else None
    )
    answers = () if soft is None else ("teacher",)
    kept = table.select([*columns.text, *answers]).rename_columns(
        [*("text", "text_pair")[: len(columns.text)], *answers]
    )
    return _Split(split.name, kept, column)


def _read_shown(
    split: Table, names: Sequence[str]
) -> Generator[pa.RecordBatch, None, None]:
    """Read columns of a split, and show how many rows are read."""
    with Progress(f"reading {split.name}", unit="rows") as bar:
        for batch in split.read(names):
            yield batch
            bar.advance(len(batch))


def _find_empty(column: pa.ChunkedArray) -> Longs:
    """Return the numbers of the rows without a text, a chunk at a time as they lie on
    disk."""
    trimmed = (pc.utf8_trim_whitespace(chunk) for chunk in column.chunks)
    texts = (pc.fill_null(chunk, "") for chunk in trimmed)
    empty = [pc.equal(chunk, "") for chunk in texts]
    mask = pa.chunked_array(empty, pa.bool_())
    return np.flatnonzero(mask)


def _refuse_constant(place: str, encoded: Labels, task: Task) -> None:
    if not (encoded == encoded[0]).all():
        return
    raise DataError(
        f"{place}: every training row has {task.describe_label(encoded[0])}, so there "
        "is nothing to learn. Add rows with other labels, or name the label column "
        "with --label."
    )


def _read_test(
    source: Source,
    columns: ChosenColumns,
    coding: Coding,
    folder: Path,
    notes: list[str],
    *,
    soft: SoftLabelColumns | None,
) -> _Split | None:
    """Read the first test split that has labels, or else a second validation split, and
    note which are skipped."""
    chosen: _Split | None = None
    for raw in (*source.test, *source.validation[1:]):
        if chosen is not None:
            notes.append(f"skipped {raw.name}: {chosen.name} is the test split")
            continue
        split = (
            _read(raw, columns, folder, notes, soft)
            if soft is not None or set(columns.label) <= set(raw.columns)
            else None
        )
        if (
            split is None
            or split.labels is None
            or not labels.is_labelled(split.labels, coding)
        ):
            notes.append(f"skipped {raw.name}: it has no labels")
            continue
        chosen = split
        if raw not in source.test:
            notes.append(f"{raw.name}, a second validation split, is the test split")
    return chosen


def _batches(
    texts: pa.Table, encoded: Labels | None, mask: Flags | None
) -> Iterator[pa.RecordBatch]:
    """Yield the texts and labels, if any, of the rows in the mask."""
    start = 0
    for batch in texts.to_batches():
        rows = slice(start, start + batch.num_rows)
        columns = {name: batch[name] for name in batch.schema.names}
        for name in columns.keys() - {"teacher"}:
            columns[name] = pc.fill_null(columns[name], "")
        if encoded is not None:
            columns["label"] = pa.array(encoded[rows].reshape(-1))
            if encoded.ndim > 1:
                offsets = (
                    np.arange(batch.num_rows + 1, dtype=np.int32) * encoded.shape[1]
                )
                columns["label"] = pa.ListArray.from_arrays(
                    pa.array(offsets), columns["label"]
                )
        whole = pa.record_batch(columns)
        yield whole if mask is None else whole.filter(pa.array(mask[rows]))
        start = rows.stop


def hold_out(encoded: Labels, task: Task, seed: int, keys: Keys) -> Flags:
    """Mask every tenth row in the order of the labels, ties in random order; no class
    loses its only row. Of many rows, fewer are masked: see `held_out_share`. Rows with
    the same key, whose texts repeat, count as one and are masked together."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(encoded))
    _, first = np.unique(keys[order], return_index=True)
    order = order[np.sort(first)]
    if not task.many_labels:
        order = order[np.argsort(encoded[order], kind="stable")]
    if task.one_label:
        counts = np.bincount(encoded[order])
        alike = counts[encoded[order]]
        order = order[alike > 1]
    step = math.ceil(1 / held_out_share(len(encoded)))
    if len(order) < 2:
        return np.zeros(len(encoded), bool)
    return np.isin(keys, keys[order[rng.integers(min(step, len(order))) :: step]])


class AnnotatedSplits(NamedTuple):
    """Hold the splits of a source of questions or tagged words; None is a split without
    answers."""

    name: str
    splits: Mapping[Role, Examples | None]
    places: Mapping[Role, str]
    notes: Sequence[str] = ()


def read_annotated_files(
    request: DataRequest,
    matches: Callable[[Path], bool],
    read: Callable[[Path], Examples | None],
) -> AnnotatedSplits | None:
    """Read the annotated files of a source; None if it has none.

    Files are not checked if the kind was requested. DataError if there is no training
    split.
    """
    found = None if request.names_columns else sources.local_files(request.source)
    name, files = found or ("", {})
    usable = {
        role: [
            path
            for path in paths
            if not path.is_dir()
            and (matches(path) or (request.kind and not _is_table(path)))
        ]
        for role, paths in files.items()
    }
    chosen, notes = sources.choose_files(
        name, {role: paths for role, paths in usable.items() if paths}
    )
    if not chosen:
        return None
    places = {role: str(paths[0]) for role, paths in chosen.items()}
    if "train" not in chosen:
        given = ", ".join(f"{role}={place}" for role, place in places.items())
        raise DataError(
            f"{request.source}: {given} but no training split. Name one: a file with "
            "'train' as a word of its name, or --data "
            f"train={next(iter(places.values()))}"
        )
    splits: dict[Role, Examples | None] = {}
    for role, paths in chosen.items():
        parts = [part for path in paths if (part := read(path)) is not None]
        splits[role] = join_examples(parts) if parts else None
    return AnnotatedSplits(name, splits, places, notes)


def _is_table(path: Path) -> bool:
    return path.suffix.lower() in TABLE_SUFFIXES or (
        path.suffix.lower() == ".json" and head(path).lstrip().startswith("[")
    )


def read_annotated_tables(
    source: Source, read: Callable[[Table], Examples | None]
) -> AnnotatedSplits:
    """Read tables with questions or tagged words."""
    offered: dict[Role, Sequence[Table]] = {
        "train": [source.train],
        "validation": source.validation,
        "test": [*source.test, *source.validation[1:]],
    }
    raw = {role: splits[0] for role, splits in offered.items() if splits}
    return AnnotatedSplits(
        source.name,
        {role: read(split) for role, split in raw.items()},
        {role: split.place for role, split in raw.items()},
        source.notes,
    )


def refuse_tables(request: DataRequest, expected: str) -> None:
    """Raise DataError if this kind was requested and no table shows it."""
    if request.kind is None:
        return
    table = request.opened.train
    nested = ", ".join(map(repr, table.nested))
    found = (
        f" Its columns {nested} have lists of lists or objects, which are not read."
        if nested
        else ""
    )
    raise DataError(
        f"{table.place}: expected {expected}, for the kind {request.kind}.{found}"
    )


def collect(
    annotated: AnnotatedSplits, groups: str, seed: int
) -> tuple[dict[Role, pa.Table], list[str]]:
    """Return the tables of the splits, one for validation among them, and notes.

    groups   the name, in the plural, of the parts that are held out as a whole

    DataError for a training split without answers.
    """
    notes = list(annotated.notes)
    splits: dict[Role, Examples] = {}
    for role, examples in annotated.splits.items():
        place = annotated.places[role]
        if examples is not None:
            notes += examples.notes
            splits[role] = examples
        elif role == "train":
            raise no_answers(place)
        else:
            notes.append(f"skipped {Path(place).name}: it has no answers")
    place = annotated.places["train"]
    return with_validation(splits, place, groups, notes, seed), notes


def unsaved(
    name: str, task: Task, tables: Mapping[Role, pa.Table], notes: Sequence[str]
) -> UnsavedTask:
    return UnsavedTask(
        name,
        task,
        {
            role: table.to_batches(max_chunksize=10_000)
            for role, table in tables.items()
        },
        notes,
    )


def with_validation(
    splits: Mapping[Role, Examples],
    place: str,
    groups: str,
    notes: list[str],
    seed: int,
    *,
    useful: Callable[[pa.Table], Flags] | None = None,
) -> dict[Role, pa.Table]:
    """Return the tables of the splits; without a validation split, hold out every tenth
    group of training rows, or fewer of many, and only groups with `useful` rows."""
    tables = {role: examples.table for role, examples in splits.items()}
    if "validation" in tables:
        return tables
    train = splits["train"]
    rows = np.asarray(train.groups)
    chosen = rows if useful is None else rows[useful(train.table)]
    numbers = np.random.default_rng(seed).permutation(np.unique(chosen))
    if len(numbers) < 2:
        raise DataError(
            f"{place}: too few {groups} to hold some out; add a validation split."
        )
    held_out = np.isin(
        rows,
        numbers[: max(1, round(held_out_share(len(train.groups)) * len(numbers)))],
    )
    notes.append(describe_held_out(held_out, seed))
    tables["validation"] = tables["train"].filter(pa.array(held_out))
    tables["train"] = tables["train"].filter(pa.array(~held_out))
    return tables


def no_answers(place: str) -> DataError:
    return DataError(
        f"{place}: no training question has an answer, so there is nothing to learn. "
        "Add questions with answers."
    )


def encode_tags(table: pa.Table, names: tuple[str, ...], place: str) -> pa.Table:
    """Replace the tags of a table by class ids."""
    tags = table["tags"].combine_chunks()
    ids = pc.index_in(tags.flatten(), value_set=pa.array(names))
    if ids.null_count:
        unknown = tags.flatten().filter(pc.is_null(ids))[0].as_py()
        raise DataError(
            f"{place}: the training split has no tag "
            f"{unknown!r}.{did_you_mean(unknown, names)}"
        )
    encoded = pa.ListArray.from_arrays(tags.offsets, ids.cast(pa.int64()))
    return table.set_column(table.column_names.index("tags"), "tags", encoded)


def use_labels(
    data: TaskData, names: tuple[str, ...], places: Sequence[int]
) -> TaskData:
    """Return the data with a model's names of the same labels, in the model's order.

    places   of the task's labels among `names`, from `Task.match_labels`
    """
    if names == data.task.labels:
        return data
    order = np.asarray(places)

    def recode(split: Dataset) -> Dataset:
        for name in {data.task.label_column, "teacher"} & {*split.column_names}:
            column = split.data.table[name].combine_chunks()
            lists = pa.types.is_list(column.type)
            moved = (column.values if lists else column).to_numpy()
            if moved.dtype.kind == "f":  # a number of each class
                moved = moved.reshape(-1, len(order))[:, np.argsort(order)].ravel()
            else:
                moved = order[moved]
            if lists:
                moved = pa.ListArray.from_arrays(column.offsets, moved)
            split = split.remove_columns(name).add_column(name, moved)
        return split

    return replace(
        data,
        task=replace(data.task, labels=names),
        train=recode(data.train),
        validation=recode(data.validation),
        test=data.test and recode(data.test),
        fingerprint=cache.digest(data.fingerprint, *names),
    )
