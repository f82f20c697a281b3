"""Load a task with its splits from a source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from compress.data import cache, conll, embedding, ranking, schema, sources, squad
from compress.data.audit import audit
from compress.data.objects import DataLike, data_path
from compress.data.readers import RawSplit
from compress.data.schema import ChosenColumns, Coding, LabelColumn
from compress.data.sources import Role, Source
from compress.data.task import METRICS, Examples, Kind, Task, TaskData
from compress.data.text_files import head
from compress.errors import DataError, did_you_mean

HELD_OUT: Final = 0.1
"""The share of the training rows, or texts, that becomes the validation split where the source has none."""

FORMS: Final[Mapping[Kind, tuple[Callable[[Path], bool], Callable[[Path], Examples | None], str]]] = {
    "qa": (squad.is_squad, squad.read, f"the json of SQuAD, or tables with the columns {', '.join(squad.ASKED)}"),
    "tagging": (
        conll.is_conll, conll.read, "words and tags in columns, or tables with lists of words and of tags, such as "
        "tokens and ner_tags",
    ),
}  # fmt: skip
"""Annotated files by kind: what tells them, what reads them, what they are called."""
TABLES: Final = (".jsonl", ".ndjson", ".parquet")
"""Files that are tables, whatever they are asked to be."""

Labels = NDArray[np.int64] | NDArray[np.float32]


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
    """Load the task that a source holds, with its splits on disk, memory-mapped.

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

    The rules of detection stand at the top of `sources`, `readers` and `schema`, of questions, words, vectors and
    rankings at the top of `squad`, `conll`, `embedding` and `ranking`; guesses become notes. Where no test split has
    labels, a second validation split takes its place. Raises DataError.
    """
    if kind is not None and kind not in METRICS:
        raise DataError(f"no kind of task {kind!r}.{did_you_mean(kind, METRICS)}")
    source = data_path(source)
    unnamed = kind is None and text is None and label is None
    if kind == "ranking" or (unnamed and ranking.is_ranking(source)):
        return audit(_load_ranking(source, text, label, metric=metric, seed=seed))
    if kind == "embedding" or (unnamed and embedding.is_embedding(source)):
        return audit(embedding.load_embedding(source, text=text, label=label, metric=metric, seed=seed))
    if text is None and label is None and (annotated := _find_annotated(source, kind)) is not None:
        name, annotation, files = annotated
        examples = {role: FORMS[annotation][1](path) for role, path in files.items()}
        places = {role: str(path) for role, path in files.items()}
        return audit(_load_annotated(name, annotation, examples, places, metric=metric, seed=seed))
    found = sources.find(source, [*(text or ()), *(part.strip() for part in (label or "").split(",") if part)])
    if (tables := _read_annotated(found, kind, text, label)) is not None:
        return audit(_load_annotated(found.name, *tables, metric=metric, seed=seed, notes=found.notes))
    guide = found.train  # names columns and classes: train, or where that has no labels the validation split that does
    if unlabelled and not schema.has_label(guide, label):
        guide = next((split for split in found.validation[:1] if schema.has_label(split, label)), guide)
    columns = schema.choose(guide, text, label)
    notes = [*found.notes, *columns.notes]
    with cache.scratch(cache.home() / "data") as folder:
        splits: dict[Role, _Split] = {}
        learned = _read(guide, columns, folder, notes)
        assert learned.labels is not None
        declared = columns.label if len(columns.label) > 1 else guide.classes.get(columns.label[0])
        coding = schema.learn(learned.labels, kind, declared)
        task = Task(coding.kind, columns.text, ",".join(columns.label), coding.names, _metric(coding.kind, metric))
        _refuse_constant(guide.place, schema.encode(learned.labels, coding), coding)
        guessed = kind is None and not guide.classes and coding.kind == "classification" and coding.numeric
        if guessed and len(coding.names) > 2:
            notes.append(
                f"whole numbers are read as {len(coding.names)} classes; ask for the kind regression otherwise"
            )
        splits["train"] = learned
        if guide is not found.train:
            splits = {"train": _read(found.train, columns._replace(label=()), folder, notes), "validation": learned}
        elif found.validation:
            splits["validation"] = _read(found.validation[0], columns, folder, notes)
        if (test := _read_test(found, columns, coding, folder, notes)) is not None:
            splits["test"] = test
        encoded = {role: schema.encode(each.labels, coding) for role, each in splits.items() if each.labels}
        masks: dict[Role, NDArray[np.bool_]] = {}
        if "validation" not in splits:
            held = hold_out(encoded["train"], coding.kind, seed)
            if not held.any():
                raise DataError(
                    f"{guide.place}: {len(held)} rows are too few to hold some out: add a validation split."
                )
            notes.append(_held_out_note(held, seed))
            masks = {"train": ~held, "validation": held}
            splits["validation"], encoded["validation"] = splits["train"], encoded["train"]
        batches = {role: _batches(each.table, encoded.get(role), masks.get(role)) for role, each in splits.items()}
        datasets, fingerprint = cache.keep_splits(folder, batches, coding.kind, *coding.names)
    return audit(TaskData(
        found.name, task, datasets["train"], datasets["validation"], datasets.get("test"), fingerprint, tuple(notes)
    ))  # fmt: skip


def _metric(kind: Kind, metric: str | None) -> str:
    metrics = METRICS[kind]
    if metric is not None and metric not in metrics:
        raise DataError(f"metric {metric!r} does not score a {kind} task.{did_you_mean(metric, metrics)}")
    return metric or metrics[0]


@dataclass(frozen=True)
class _Split:
    """Hold the columns `text`, and `text_pair` for pairs, of a split, on disk, with its labels, if any."""

    name: str
    table: pa.Table
    labels: LabelColumn | None


def _read(split: RawSplit, columns: ChosenColumns, folder: Path, notes: list[str]) -> _Split:
    """Copy the chosen columns of a split to disk, and note what is odd about its rows."""
    names = (*columns.text, *columns.label)
    schema.refuse_unknown(split, names)
    notes.extend(split.notes)
    table = cache.table(cache.write(folder / f"{cache.digest(split.place)}.raw", split.read(names)))
    if columns.label and columns.label[0] in split.classes:
        labelled = pc.is_valid(table[columns.label[0]])
        dropped = len(table) - (pc.sum(labelled).as_py() or 0)
        if 0 < dropped < len(table):
            notes.append(f"{split.name}: {dropped} rows that the source marks as unlabelled are left out")
            table = table.filter(labelled)
    for name in columns.text:
        empty = np.flatnonzero(pc.equal(pc.fill_null(pc.utf8_trim_whitespace(table[name]), ""), ""))
        if len(empty) == len(table):
            raise DataError(f"{split.place}: the text column {name!r} is empty in every row. Name another with --text.")
        if len(empty):
            where = schema.at((empty[:5] + split.first).tolist(), len(empty))
            notes.append(f"{split.name}: {len(empty)} of {len(table)} texts in {name!r} are empty ({where})")
    labels = schema.label_column(split, columns.label, table.select(columns.label).columns) if columns.label else None
    texts = table.select(columns.text).rename_columns(["text", "text_pair"][: len(columns.text)])
    return _Split(split.name, texts, labels)


def _refuse_constant(place: str, encoded: Labels, coding: Coding) -> None:
    if not (encoded == encoded[0]).all():
        return
    only = "the same labels" if coding.kind == "multilabel" else f"the number {encoded[0]}"
    if coding.kind == "classification":
        only = f"the class {coding.names[int(encoded[0])]!r}"
    raise DataError(
        f"{place}: every training row has {only}: there is nothing to learn. Give rows with others too, or name the "
        "column of the labels by --label"
    )


def _read_test(found: Source, columns: ChosenColumns, coding: Coding, folder: Path, notes: list[str]) -> _Split | None:
    """Read the first test split that has labels, or else the second validation split; note what is passed over."""
    chosen: _Split | None = None
    for raw in (*found.test, *found.validation[1:]):
        if chosen is not None:
            notes.append(f"{raw.name} is passed over: {chosen.name} is the test split")
            continue
        split = _read(raw, columns, folder, notes) if set(columns.label) <= set(raw.columns) else None
        if split is None or split.labels is None or not schema.is_labelled(split.labels, coding):
            notes.append(f"{raw.name} has no labels: passed over")
            continue
        chosen = split
        if raw not in found.test:
            notes.append(f"{raw.name}, a second validation split, serves as the test split")
    return chosen


def _batches(texts: pa.Table, encoded: Labels | None, mask: NDArray[np.bool_] | None) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a final split that are in the mask: its texts and labels, if any."""
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
    """Mask every tenth row in the order of the labels, ties at random; no class loses its only row."""
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


def _held_out_note(held: NDArray[np.bool_], seed: int) -> str:
    return f"no validation split: {held.sum()} of {len(held)} training rows are held out for it (seed {seed})"


def _find_annotated(source: str, kind: Kind | None) -> tuple[str, Kind, dict[Role, Path]] | None:
    """Find (name, kind, file of each split) of a source of annotated files, None where it is none.

    A `kind` that is asked for is not doubted: DataError where the source has no file for it.
    """
    found = sources.local_files(source)
    name, files = found or ("", {})
    files = {
        role: [path for path in paths if not path.is_dir()] for role, paths in files.items()
    }  # see `class_folders`
    for each, (matches, _, _) in FORMS.items():
        if kind not in (None, each):
            continue
        usable = {role: [path for path in paths if matches(path) or (kind and not _is_table(path))]
                  for role, paths in files.items()}  # fmt: skip
        chosen = {role: paths[0] for role, paths in usable.items() if paths}
        if chosen and "train" not in chosen:
            given = ", ".join(f"{role}={path}" for role, path in chosen.items())
            raise DataError(
                f"{source}: {given} but no training split. Name one: a file with 'train' as a word of its name, or "
                f"--data train={next(iter(chosen.values()))}"
            )
        if chosen:
            return name, each, chosen
    return None


def _is_table(path: Path) -> bool:
    return path.suffix.lower() in TABLES or (path.suffix.lower() == ".json" and head(path).lstrip().startswith("["))


def _read_annotated(
    found: Source, kind: Kind | None, text: Sequence[str] | None, label: str | None
) -> tuple[Kind, dict[Role, Examples | None], dict[Role, str]] | None:
    """Read the splits of tables with questions or tagged words, and return them with their places; None of others.

    Raises DataError where a `kind` that is asked for is not there.
    """
    offered: dict[Role, Sequence[RawSplit]] = {
        "train": [found.train], "validation": found.validation, "test": [*found.test, *found.validation[1:]]
    }  # fmt: skip
    raw = {role: splits[0] for role, splits in offered.items() if splits}
    places = {role: split.place for role, split in raw.items()}
    if kind in (None, "qa") and text is None and label is None and squad.is_table(found.train):
        return "qa", {role: squad.read_table(split) for role, split in raw.items()}, places
    if kind in (None, "tagging") and (columns := conll.table_columns(found.train, text, label)):
        return "tagging", {role: conll.read_table(split, columns) for role, split in raw.items()}, places
    if kind is not None and kind in FORMS:
        raise DataError(f"{found.train.place}: {kind} is learned from {FORMS[kind][2]}; found none of these.")
    return None


def _load_annotated(
    name: str,
    kind: Kind,
    found: Mapping[Role, Examples | None],
    places: Mapping[Role, str],
    *,
    metric: str | None,
    seed: int,
    notes: Sequence[str] = (),
) -> TaskData:
    """Load the task that annotated splits hold, written to the cache. Raises DataError."""
    metric, notes = _metric(kind, metric), list(notes)
    splits: dict[Role, Examples] = {}
    for role, examples in found.items():
        if examples is not None:
            notes += examples.notes
            splits[role] = examples
        elif role == "train":
            raise DataError(
                f"{places[role]}: no question has an answer: there is nothing to learn. Give training questions that "
                "have one"
            )
        else:
            notes.append(f"{Path(places[role]).name} has no answers: passed over")
    tables = {role: examples.table for role, examples in splits.items()}
    if "validation" not in tables:
        held = _hold_out_groups(places["train"], splits["train"].groups, kind, seed)
        notes.append(_held_out_note(held, seed))
        tables["validation"] = tables["train"].filter(pa.array(held))
        tables["train"] = tables["train"].filter(pa.array(~held))
    if kind == "qa":
        task = Task(kind, ("question", "context"), "answers", (), metric, _unanswerable(tables, notes))
    else:
        names = conll.labels(tables["train"]["tags"].to_pylist())
        task = Task(kind, ("words",), "tags", names, metric)
        tables = {role: _encode_tags(table, names, places.get(role, places["train"])) for role, table in tables.items()}
    with cache.scratch(cache.home() / "data") as folder:
        batches = {role: table.to_batches(max_chunksize=10_000) for role, table in tables.items()}
        datasets, fingerprint = cache.keep_splits(folder, batches, kind, *task.labels, str(task.unanswerable))
    return TaskData(
        name, task, datasets["train"], datasets["validation"], datasets.get("test"), fingerprint, tuple(notes)
    )


def _load_ranking(
    source: str, text: Sequence[str] | None, label: str | None, *, metric: str | None, seed: int
) -> TaskData:
    """Load queries and their passages, see `ranking`, the splits written to the cache. Raises DataError."""
    metric = _metric("ranking", metric)
    found = ranking.read(source, text, label)
    notes = [*found.notes, *(note for each in found.splits.values() for note in each.notes)]
    tables = {role: examples.table for role, examples in found.splits.items()}
    if "validation" not in tables:
        held = _hold_out_groups(source, found.splits["train"].groups, "ranking", seed)
        notes.append(_held_out_note(held, seed))
        tables["validation"], tables["train"] = (tables["train"].filter(pa.array(mask)) for mask in (held, ~held))
    ranking.check_learnable(tables["train"], f"{found.name} [train]")
    for role in [role for role in tables if role != "train"]:
        tables[role], said = ranking.keep_scored(tables[role], f"{found.name} [{role}]")
        notes += said
    task = Task("ranking", found.text, found.label, (), metric)
    with cache.scratch(cache.home() / "data") as folder:
        batches = {role: table.to_batches(max_chunksize=10_000) for role, table in tables.items()}
        datasets, fingerprint = cache.keep_splits(folder, batches, "ranking")
    return TaskData(
        found.name, task, datasets["train"], datasets["validation"], datasets.get("test"), fingerprint, tuple(notes)
    )


def _hold_out_groups(place: str, groups: Sequence[int], kind: Kind, seed: int) -> NDArray[np.bool_]:
    """Mask the rows of every tenth group, at random."""
    names = np.random.default_rng(seed).permutation(np.unique(groups))
    if len(names) < 2:
        what = {"qa": "texts", "ranking": "queries"}.get(kind, "sentences")
        raise DataError(f"{place}: too few {what} to hold some out: add a validation split.")
    return np.isin(np.asarray(groups), names[: max(1, round(HELD_OUT * len(names)))])


def _unanswerable(tables: Mapping[Role, pa.Table], notes: list[str]) -> bool:
    """Tell whether training questions without an answer teach to give none."""
    none = {role: pc.sum(pc.equal(pc.list_value_length(table["answers"]), 0)).as_py() for role, table in tables.items()}
    if none["train"] == len(tables["train"]):
        raise DataError("no training question has an answer: there is nothing to learn. Give some that have one")
    for role, count in none.items():
        if count and not none["train"]:
            notes.append(
                f"{role}: {count} of {len(tables[role])} questions have no answer; no training question shows that, so "
                "that each of them counts as wrong"
            )
    return bool(none["train"])


def _encode_tags(table: pa.Table, names: tuple[str, ...], place: str) -> pa.Table:
    """Replace the tags of a table by class ids."""
    tags = table["tags"].combine_chunks()
    ids = pc.index_in(tags.flatten(), value_set=pa.array(names))
    if ids.null_count:
        strange = tags.flatten().filter(pc.is_null(ids))[0].as_py()
        raise DataError(f"{place}: tag {strange!r} is none of the training split.{did_you_mean(strange, names)}")
    coded = pa.ListArray.from_arrays(tags.offsets, ids.cast(pa.int64()))
    return table.set_column(table.column_names.index("tags"), "tags", coded)
