"""Turn the labels of a source into what a model is trained on: class ids, numbers, or 0/1 vectors.

Stated rules. Several label columns, lists, or strings with `|` are multilabel; strings with commas are if they have
fewer distinct parts than distinct values ("a,b", "a", "b": two classes, not three). Numbers are regression if one of
them has a fraction, else classes. Words are classes. Classes that the source declares keep its order; others are
sorted, numbers by value. An empty cell or `nan` is a missing label, but in multilabel strings it means no class.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from compress.data.task import Kind
from compress.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from compress.data.readers import Cell, RawSplit

PAIRS: Final = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("question", "passage"),
    ("query", "passage"),
    ("query", "document"),
    ("#1string", "#2string"),
    ("text1", "text2"),
    ("texta", "textb"),
    ("text", "textpair"),
    ("sentencea", "sentenceb"),
    ("s1", "s2"),
)
SINGLES: Final = (
    *("text", "sentence", "review", "utterance", "content", "comment", "commenttext", "tweet", "message", "document"),
    *("passage", "query", "question", "description", "body", "input", "title"),
)
LABELS: Final = (
    *("label", "labels", "goldlabel", "class", "intent", "category", "score", "quality", "isduplicate", "target"),
    *("sentiment", "emotion", "rating", "stars", "similarity", "similarityscore", "relatednessscore", "topic"),
)
_KNOWN: Final = frozenset((*SINGLES, *LABELS, *(name for pair in PAIRS for name in pair)))


def plain(name: str) -> str:
    """Normalise a column name for comparison: without case, spaces, dashes and underscores."""
    return re.sub(r"[\s_\-]+", "", name.lower())


def is_known(name: str) -> bool:
    """Check whether this is a usual name of a text or label column."""
    return plain(name) in _KNOWN


def number(cell: str) -> float | None:
    """Parse a cell as a number, which may be NaN or infinite; None if it is not one."""
    try:
        return float(cell) if "_" not in cell else None
    except ValueError:
        return None


MANY_CLASSES: Final = 20
"""More classes than this must have at least two rows each on average, or the column is not a label."""
MOST_CLASSES: Final = 10_000
MOST_FLAGS: Final = 2**28
"""Rows times classes of a multilabel split, each of which takes four bytes: one gigabyte."""
LARGEST: Final = float(np.finfo(np.float32).max)
LARGEST_EXACT: Final = 2.0**53
"""Larger whole numbers are not exact as floats, and are kept as strings."""

_BLANK: Final = pa.array(["", "nan", "-1", "-1.0"])
_TRUE: Final = pa.array(["1", "1.0", "true"])
_FLAGS: Final = pa.array(["0", "0.0", "false", *_TRUE.to_pylist()])


def list_rows(numbers: Sequence[int], total: int) -> str:
    """List the first five of `total` rows: `rows 3, 7, 12`."""
    more = f" and {total - 5} more" if total > 5 else ""
    return f"row{'s' if total > 1 else ''} {', '.join(map(str, numbers[:5]))}{more}"


@dataclass(frozen=True)
class LabelColumn:
    """Hold the labels of a split as in its source: trimmed strings or lists of them, null for a missing label.

    first  the number of the first row in messages
    """

    place: str
    cells: pa.ChunkedArray
    first: int

    @property
    def has_lists(self) -> bool:
        return pa.types.is_list(self.cells.type)

    def list_rows(self, mask: pa.ChunkedArray | NDArray[np.bool_]) -> str:
        """List the rows in the mask."""
        rows = np.flatnonzero(np.asarray(mask)) + self.first
        return list_rows(rows[:5].tolist(), len(rows))

    def parts(self, separator: str | None) -> pa.ChunkedArray:
        """Return the labels of each row as a list; `separator` splits them if they are strings."""
        return pc.split_pattern(pc.fill_null(self.cells, ""), separator) if separator else self.cells

    def refuse_missing(self) -> None:
        """Raise DataError if a row has no label."""
        if count := self.cells.null_count:
            raise DataError(
                f"{self.place}: {count} of {len(self.cells)} rows have no label "
                f"({self.list_rows(pc.is_null(self.cells))}). Label or remove these rows."
            )

    def refuse_many(self, values: Sequence[str], most: int) -> None:
        """Raise DataError for too many classes."""
        if len(values) > most:
            raise DataError(
                f"{self.place}: the label column has {len(values)} different values in {len(self.cells)} rows, "
                f"such as {values[0][:60]!r}: it looks like text or an identifier. Name another column with --label."
            )


def label_column(split: RawSplit, names: Sequence[str], columns: Sequence[pa.ChunkedArray]) -> LabelColumn:
    """Take one label column of a split, or join several of 0 and 1 into lists of the names of those that are 1.

    A row whose flags are all blank has no label. DataError for flags other than 0 and 1.
    """
    if len(names) == 1 and pa.types.is_list(columns[0].type):
        return LabelColumn(split.place, columns[0], split.first)
    trimmed = [pc.utf8_trim_whitespace(column) for column in columns]
    if len(names) == 1:
        blank = pc.is_in(pc.utf8_lower(trimmed[0]), value_set=_BLANK.slice(0, 2))
        return LabelColumn(split.place, pc.if_else(blank, None, trimmed[0]), split.first)
    trimmed = [pc.fill_null(pc.utf8_lower(column), "") for column in trimmed]
    blank = np.all([np.asarray(pc.is_in(column, value_set=_BLANK)) for column in trimmed], axis=0)
    flags = np.stack([np.asarray(pc.is_in(column, value_set=_TRUE)) for column in trimmed], axis=1)
    offsets = pa.array(np.concatenate([[0], np.cumsum(flags.sum(axis=1))]), pa.int32())
    values = pa.array(names, pa.string()).take(pa.array(np.nonzero(flags)[1]))
    cells = pa.chunked_array([pa.ListArray.from_arrays(offsets, values, mask=pa.array(blank))])
    labels = LabelColumn(split.place, cells, split.first)
    for name, column in zip(names, trimmed, strict=True):
        invalid = ~np.asarray(pc.is_in(column, value_set=_FLAGS)) & ~blank
        if invalid.any():
            value = column[int(invalid.argmax())].as_py()
            raise DataError(
                f"{split.place}, {labels.list_rows(invalid)}: {value!r} in {name!r}; expected 0 or 1, as it is one of "
                "several label columns."
            )
    return labels


@dataclass(frozen=True)
class Coding:
    """Describe how the labels of a task are written: `separator` splits multilabel strings, None for lists."""

    kind: Kind
    names: tuple[str, ...]
    separator: str | None = None

    @property
    def numeric(self) -> bool:
        return bool(self.names) and all(number(name) is not None for name in self.names)


def learn(labels: LabelColumn, kind: Kind | None, declared: Sequence[str] | None) -> Coding:
    """Determine the coding of the training labels. DataError for missing labels, and for labels of no task."""
    if labels.has_lists or declared:
        only: Kind = "multilabel" if labels.has_lists else "classification"
        if kind not in {None, only}:
            raise DataError(f"{labels.place}: the kind {kind} was requested, but its label column makes it {only}.")
        if not labels.has_lists:
            return Coding(only, tuple(declared or ()))
    values = [] if labels.has_lists else pc.unique(labels.cells.drop_null()).to_pylist()
    separator = None
    if not labels.has_lists and kind in {None, "multilabel"}:
        parts = {part.strip() for value in values for part in value.split(",")}
        if any("|" in value for value in values):
            separator = "|"
        elif kind or (len(parts) < len(values) and all(number(value) is None for value in values)):
            separator = ","
    if labels.has_lists or separator:
        flat = pc.utf8_trim_whitespace(pc.list_flatten(labels.parts(separator)))
        names = tuple(declared) if declared else _sort({part for part in pc.unique(flat).to_pylist() if part})
        labels.refuse_many(names, min(MOST_CLASSES, MOST_FLAGS // max(1, len(labels.cells))))
        return Coding("multilabel", names, separator)
    kind = kind or _number_or_class(labels, values)
    labels.refuse_missing()
    if kind == "regression":
        return Coding(kind, ())
    labels.refuse_many(values, min(MOST_CLASSES, max(MANY_CLASSES, len(labels.cells) // 2)))
    return Coding(kind, _sort({_class_name(value) for value in values}))


def _class_name(value: str) -> str:
    """Name a class: whole numbers without decimals, so that 1 and 1.0 are the same class."""
    parsed = number(value)
    if parsed is None or not parsed.is_integer() or abs(parsed) > LARGEST_EXACT:
        return value
    return str(int(parsed))


def _sort(values: Set[str]) -> tuple[str, ...]:
    """Sort class names, by value if all are numbers."""
    numbers = {value: number(value) for value in values}
    if any(parsed is None for parsed in numbers.values()):
        return tuple(sorted(values))
    return tuple(sorted(values, key=lambda value: (numbers[value] or 0.0, value)))


def _number_or_class(labels: LabelColumn, values: Sequence[str]) -> Kind:
    numbers = [parsed for value in values if (parsed := number(value)) is not None]
    if numbers and len(numbers) < len(values):
        words = [value for value in values if number(value) is None]
        raise DataError(
            f"{labels.place}: labels are numbers in some rows and words in others "
            f"({labels.list_rows(pc.is_in(labels.cells, value_set=pa.array(words)))}: {words[0]!r}). "
            "Write them the same way, or request the kind classification if each is a class."
        )
    return "regression" if any(not parsed.is_integer() for parsed in numbers) else "classification"


def is_labelled(labels: LabelColumn, coding: Coding) -> bool:
    """Check whether any row has a label. -1 is none unless it is a class: benchmarks hide the labels of test splits."""
    cells = labels.cells
    if not labels.has_lists and "-1" not in coding.names:
        cells = pc.if_else(pc.is_in(cells, value_set=_BLANK), None, cells)
    return bool(cells.null_count < len(cells))


def encode(labels: LabelColumn, coding: Coding) -> NDArray[np.int64] | NDArray[np.float32]:
    """Encode the labels of a split: (rows,) class ids, (rows,) numbers, or (rows, classes) of 0 and 1.

    DataError for a label that is missing, not a number, or an unknown class.
    """
    if coding.kind == "multilabel":
        return _encode_multilabel(labels, coding)
    labels.refuse_missing()
    encoded = labels.cells.combine_chunks().dictionary_encode()
    values, codes = encoded.dictionary.to_pylist(), encoded.indices.to_numpy()
    if coding.kind == "regression":
        numbers = [number(value) for value in values]
        for value, parsed in zip(values, numbers, strict=True):
            if parsed is None or not abs(parsed) <= LARGEST:  # or NaN
                raise DataError(
                    f"{labels.place}, {labels.list_rows(pc.equal(labels.cells, value))}: {value[:60]!r} is not a "
                    "number below 3.4e38, which a regression needs in every row. Correct or remove these rows; if the "
                    "labels are classes, leave out --kind."
                )
        return np.asarray(numbers, np.float32)[codes]
    ids = {name: n for n, name in enumerate(coding.names)}
    names = [value if value in ids else _class_name(value) for value in values]
    if unknown := sorted(value for value, name in zip(values, names, strict=True) if name not in ids):
        if coding.numeric != any(number(value) is not None for value in unknown):
            hint = f" Its classes are {', '.join(coding.names[:10])}: write the labels of every split the same way."
        else:
            hint = did_you_mean(unknown[0], coding.names)
        raise _unknown_class(labels, pc.is_in(labels.cells, value_set=pa.array(unknown)), unknown, hint)
    return np.asarray([ids[name] for name in names], np.int64)[codes]


def _unknown_class(
    labels: LabelColumn, mask: pa.ChunkedArray | NDArray[np.bool_], unknown: Sequence[str], hint: str
) -> DataError:
    values = ", ".join(repr(value[:60]) for value in unknown[:5])
    return DataError(
        f"{labels.place}, {labels.list_rows(mask)}: the training split has no class {values}.{hint} Correct these "
        "labels, or add such rows to the training split."
    )


def _encode_multilabel(labels: LabelColumn, coding: Coding) -> NDArray[np.float32]:
    if labels.has_lists:
        labels.refuse_missing()
    lists = labels.parts(coding.separator)
    rows = pc.list_parent_indices(lists).to_numpy()
    flat = pc.fill_null(pc.utf8_trim_whitespace(pc.list_flatten(lists)), "")
    present = np.asarray(pc.not_equal(flat, ""))
    ids = pc.index_in(flat, value_set=pa.array(coding.names, pa.string()))
    unknown = present & np.asarray(pc.is_null(ids))
    if unknown.any():
        mask = np.zeros(len(lists), bool)
        mask[rows[unknown]] = True
        value = flat[int(unknown.argmax())].as_py()
        raise _unknown_class(labels, mask, [value], did_you_mean(value, coding.names))
    vectors = np.zeros((len(lists), len(coding.names)), np.float32)
    vectors[rows[present], pc.fill_null(ids, 0).to_numpy()[present]] = 1.0
    return vectors


class ChosenColumns(NamedTuple):
    """Name the columns of a task: one or two of text, and one of labels or several of 0 and 1. Guesses become notes."""

    text: tuple[str, ...]
    label: tuple[str, ...]
    notes: tuple[str, ...]


def choose(split: RawSplit, text: Sequence[str] | None, label: str | None) -> ChosenColumns:
    """Choose the text and label columns of the training split, as requested or detected. DataError if ambiguous."""
    labels: tuple[str, ...] = ()
    if label is not None:  # one column, or several joined by commas
        labels = (label,) if label in split.columns else tuple(part.strip() for part in label.split(","))
        refuse_unknown(split, labels)
    texts, notes = choose_text(split, text, labels, by_content=False)
    if not labels:
        usual = [column for name in LABELS for column in split.columns if plain(column) == name and column not in texts]
        if len(usual) > 1 and plain(usual[0]) not in LABELS[:3]:
            raise _ambiguous(split, f"which of {', '.join(map(repr, usual))} is the label")
        labels = tuple(usual[:1])
    if not texts:
        texts, notes = choose_text(split, None, labels)
    if not labels:
        if set(split.columns) <= set(texts):
            raise DataError(
                f"{split.place}: has texts, but no labels. Add a column of labels, have a language model write one "
                "(compress label), or learn vectors from the texts alone with --kind embedding."
            )
        rest = [name for name in split.columns if name not in texts and not _is_text(split.sample[name])]
        labels = _prefer_top_level([name for name in rest if not _is_row_number(split.sample[name])])
        if len(labels) > 1:  # a constant column is no label, such as CoLA's mark of what linguists reject
            labels = tuple(name for name in labels if len({str(cell) for cell in split.sample[name] if cell}) > 1)
        named = ", ".join(map(repr, labels))
        if len(labels) > 1 and all(_has_flags(split.sample[name]) for name in labels):
            notes = (*notes, f"took {named} as labels, several of which a text may have, because all are 0 or 1")
        elif len(labels) == 1:
            notes = (*notes, f"took {named} as the label, by its contents")
        else:
            raise _ambiguous(split, f"which of {named} is the label" if labels else "which column is the label")
    if shared := set(texts) & set(labels):
        raise DataError(f"{split.place}: column {shared.pop()!r} cannot be both text and label.")
    return ChosenColumns(texts, labels, notes)


def choose_text(
    split: RawSplit, text: Sequence[str] | None, labels: Sequence[str] = (), *, by_content: bool = True
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Choose the text columns, as requested, by their names, or else by their contents; and return notes of guesses.

    DataError if that is ambiguous; without `by_content` the result is empty then.
    """
    if text is not None:
        if not 1 <= len(text) <= 2 or len(set(text)) < len(text):
            raise DataError(
                f"{split.place}: expected one or two different text columns, not {', '.join(text) or 'none'}."
            )
        refuse_unknown(split, text)
        for name in text:
            if split.has_lists(name):
                raise DataError(f"{split.place}: column {name!r} contains lists, not text.")
        return tuple(text), ()
    columns = {plain(name): name for name in split.columns if name not in labels and not split.has_lists(name)}
    for first, second in PAIRS:
        if first in columns and second in columns:
            return (columns[first], columns[second]), ()
    singles = [columns[name] for name in SINGLES if name in columns]
    if singles:
        others = ", ".join(map(repr, singles[1:]))
        return (singles[0],), (f"took {singles[0]!r} as the text, not {others}",) if others else ()
    if not by_content:
        return (), ()
    texts = _prefer_top_level([name for name in split.columns if name not in labels and _is_text(split.sample[name])])
    if not 1 <= len(texts) <= 2:
        raise _ambiguous(split, "which column is the text")
    return texts, (f"took {' and '.join(map(repr, texts))} as the text, by the contents",)


def has_label(split: RawSplit, label: str | None = None) -> bool:
    """Check whether the split has the columns that `label` names, or one with the usual name of a label."""
    if label is not None:
        return label in split.columns or {part.strip() for part in label.split(",")} <= set(split.columns)
    return any(plain(name) in LABELS for name in split.columns)


def refuse_unknown(split: RawSplit, columns: Sequence[str]) -> None:
    """Raise DataError for a column that the split does not have."""
    for column in columns:
        if column in split.columns:
            continue
        if split.headerless:
            hint = f" It has no header, so its columns are numbers:\n{split.examples()}"
        else:
            hint = did_you_mean(column, split.columns)
        raise DataError(f"{split.place}: no column {column!r}.{hint}")


def _prefer_top_level(names: Sequence[str]) -> tuple[str, ...]:
    """Leave out the fields of objects, `meta.source`, if there are other columns."""
    return tuple(name for name in names if "." not in name) or tuple(names)


def _is_text(cells: Sequence[Cell]) -> bool:
    texts = [cell for cell in cells if isinstance(cell, str) and cell]
    words = sum(len(cell.split(None, 100)) for cell in texts)
    return bool(texts) and words > 2 * len(texts) and 2 * len(set(texts)) > len(texts)


def _has_flags(cells: Sequence[Cell]) -> bool:
    flags = {cell.strip().lower() for cell in cells if isinstance(cell, str)}
    return bool(flags) and flags <= set(_FLAGS.to_pylist())


def _is_row_number(cells: Sequence[Cell]) -> bool:
    values = [cell for cell in cells if isinstance(cell, str)]
    return len(values) > 2 and len(set(values)) == len(values) and all(value.isdigit() for value in values)


def _ambiguous(split: RawSplit, what: str) -> DataError:
    return DataError(
        f"{split.place}: cannot tell {what}. Name the columns with --text and --label; several label columns of "
        "0 and 1 as --label a,b. "
        f"{'It has no header; its columns, by number' if split.headerless else 'Its columns'}, with an example each:\n"
        f"{split.examples()}"
    )
