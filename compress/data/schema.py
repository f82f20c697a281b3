"""From the labels a source spells to what a model is trained on: class ids, numbers, or a 0/1 vector.

Stated rules. Several label columns, lists, or strings with `|` are multilabel; strings with commas are when their
parts are fewer than their wholes ("a,b", "a", "b": two classes, not three). Numbers are regression as soon as one of
them has a fraction, else classes. Words are classes. Classes that the source declares keep its order; others are
sorted, numbers by value. An empty cell or `nan` is a missing label, except in multilabel strings: no class applies.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from compress.data.table import Cell, Rows, at
from compress.data.task import Kind
from compress.errors import DataError, did_you_mean

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
    """A column name without case, spaces, dashes and underscores: how names are compared."""
    return re.sub(r"[\s_\-]+", "", name.lower())


def is_known(name: str) -> bool:
    return plain(name) in _KNOWN


def number(cell: str) -> float | None:
    """The number a cell spells, NaN and the infinities included; None where it spells none."""
    try:
        return float(cell) if "_" not in cell else None
    except ValueError:
        return None


MANY_CLASSES = 20
"""More classes than this must recur: at least two rows each on average, or the column is no label."""
MOST_CLASSES = 10_000
MOST_FLAGS = 2**28
"""Rows times classes of a multilabel split, which has a number for each: one gigabyte."""
LARGEST = float(np.finfo(np.float32).max)
LARGEST_EXACT = 2.0**53
"""Whole numbers beyond are not told apart as floats, and stay as they are spelled."""


@dataclass(frozen=True)
class Cells:
    """The label column of one split (or its 0/1 columns, by name), with where its rows stand."""

    place: str
    unit: str
    lines: pa.ChunkedArray
    columns: Mapping[str, pa.ChunkedArray]

    @property
    def only(self) -> pa.ChunkedArray:
        (column,) = self.columns.values()
        return column

    def at(self, mask: pa.ChunkedArray | NDArray[np.bool_]) -> str:
        """`lines 3, 7 and 12`, of the rows in the mask."""
        chosen = self.lines.filter(pa.array(mask) if isinstance(mask, np.ndarray) else mask)
        return at(self.unit, chosen.slice(0, 5).to_pylist(), len(chosen))


@dataclass(frozen=True)
class Coding:
    """How the labels of a task are spelled: `separator` splits multilabel strings, None for lists."""

    kind: Kind
    names: tuple[str, ...]
    separator: str | None = None

    @property
    def numeric(self) -> bool:
        return bool(self.names) and all(number(name) is not None for name in self.names)


def learn(cells: Cells, kind: Kind | None, declared: Sequence[str] | None) -> Coding:
    """The coding that the training labels call for. DataError for labels that are missing, or that are no task."""
    if len(cells.columns) > 1:
        _only(kind, "multilabel", cells, "several label columns")
        return Coding("multilabel", tuple(cells.columns))
    column = cells.only
    if pa.types.is_list(column.type):
        _only(kind, "multilabel", cells, "a label column of lists")
        names = tuple(declared or _ordered(_parts(column)))
        _refuse_many(cells, names, flags=True)
        return Coding("multilabel", names)
    if declared:
        _only(kind, "classification", cells, "a label column of class names")
        return Coding("classification", tuple(declared))
    column = _trimmed(column)
    values = [value for value in pc.unique(column).to_pylist() if not _is_missing(value)]
    separator = _separator(values, kind)
    kind = kind or ("multilabel" if separator else _number_or_class(cells, column, values))
    if kind == "multilabel":
        names = _ordered(_parts(pc.split_pattern(column, separator or ",")))
        _refuse_many(cells, names, flags=True)
        return Coding(kind, names, separator or ",")
    _refuse_missing(cells, column)
    if kind == "regression":
        return Coding(kind, ())
    _refuse_many(cells, values)
    return Coding(kind, _ordered({_class(value) for value in values}))


def _only(asked: Kind | None, only: Kind, cells: Cells, what: str) -> None:
    if asked not in {None, only}:
        raise DataError(f"{cells.place}: {what} makes the task {only}, but {asked} was asked for.")


def _trimmed(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.utf8_trim_whitespace(column)


def _is_missing(value: str | None) -> bool:
    return value is None or value == "" or value.lower() == "nan"


def _class(value: str) -> str:
    """The name of a class: a whole number without its decimals, so that 1 and 1.0 are one class."""
    found = number(value)
    exact = found is not None and found.is_integer() and abs(found) <= LARGEST_EXACT
    return str(int(found)) if found is not None and exact else value


def _ordered(values: Iterable[str]) -> tuple[str, ...]:
    values = set(values)
    numbers = {value: number(value) for value in values}
    if any(found is None for found in numbers.values()):
        return tuple(sorted(values))
    return tuple(sorted(values, key=lambda value: (numbers[value] or 0.0, value)))


def _parts(lists: pa.ChunkedArray) -> set[str]:
    flat = pc.utf8_trim_whitespace(pc.list_flatten(lists))
    return {part for part in pc.unique(flat).to_pylist() if part}


def _separator(values: Sequence[str], kind: Kind | None) -> str | None:
    if kind not in {None, "multilabel"}:
        return None
    if any("|" in value for value in values):
        return "|"
    parts = {part.strip() for value in values for part in value.split(",")}
    return "," if len(parts) < len(values) and all(number(value) is None for value in values) else None


def _number_or_class(cells: Cells, column: pa.ChunkedArray, values: Sequence[str]) -> Kind:
    numbers = [found for value in values if (found := number(value)) is not None]
    if numbers and len(numbers) < len(values):
        words = [value for value in values if number(value) is None]
        where = cells.at(pc.is_in(column, value_set=pa.array(words)))
        raise DataError(
            f"{cells.place}: labels are numbers in some rows and words in others ({where}: {words[0]!r}). "
            "Write them one way, or ask for the kind classification if each is a class."
        )
    fractions = any(not found.is_integer() for found in numbers)
    return "regression" if fractions else "classification"


def _refuse_missing(cells: Cells, column: pa.ChunkedArray) -> None:
    mask = missing(column)
    if pc.any(mask).as_py():
        count = pc.sum(mask).as_py()
        raise DataError(
            f"{cells.place}: {count} of {len(column)} rows have no label ({cells.at(mask)}). "
            "Label these rows or take them out."
        )


def missing(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A mask of the rows without a label: null, empty, or NaN."""
    if pa.types.is_list(column.type):
        return pc.is_null(column)
    return pc.is_in(pc.utf8_lower(_trimmed(column)), value_set=pa.array(["", "nan", None]))


def any_given(cells: Cells, coding: Coding) -> bool:
    """Whether any row has a label. Benchmarks blank the labels of a test split with -1, which then is no class."""
    blank = [] if "-1" in coding.names else ["-1", "-1.0"]
    for column in cells.columns.values():
        given = pc.invert(missing(column))
        if not pa.types.is_list(column.type):
            given = pc.and_(given, pc.invert(pc.is_in(_trimmed(column), value_set=pa.array(blank, pa.string()))))
        if pc.any(given).as_py():
            return True
    return False


def _refuse_many(cells: Cells, values: Sequence[str], *, flags: bool = False) -> None:
    """Refuse more classes than labels have: hardly any that recurs, or with `flags` more than memory holds."""
    rows = len(cells.lines)
    most = min(MOST_CLASSES, MOST_FLAGS // max(1, rows)) if flags else min(MOST_CLASSES, max(MANY_CLASSES, rows // 2))
    if len(values) > most:
        (name,) = cells.columns
        raise DataError(
            f"{cells.place}: the label column {name!r} has {len(values)} different values in {rows} rows, "
            f"such as {values[0][:60]!r}: it looks like text or an identifier. Name another column with --label."
        )


def encode(cells: Cells, coding: Coding) -> NDArray[np.int64] | NDArray[np.float32]:
    """The labels of a split: (rows,) class ids, (rows,) numbers, or (rows, classes) of 0 and 1.

    DataError for a label that is missing, that is no number, or that is none of the classes.
    """
    if len(cells.columns) > 1:
        return np.stack([_flags(cells, name) for name in coding.names], axis=1)
    column = cells.only
    if coding.kind == "multilabel":
        if coding.separator is not None:
            column = pc.split_pattern(pc.fill_null(column, ""), coding.separator)
        return _vectors(cells, column, coding)
    column = _trimmed(column)
    _refuse_missing(cells, column)
    values = pc.unique(column)
    if coding.kind == "regression":
        numbers = [_finite(cells, column, value) for value in values.to_pylist()]
        return np.asarray(numbers, np.float32)[_codes(column, values)]
    ids = {name: n for n, name in enumerate(coding.names)}
    spelled = [value if value in ids else _class(value) for value in values.to_pylist()]
    _refuse_unknown(
        cells, column, [v for v, s in zip(values.to_pylist(), spelled, strict=True) if s not in ids], coding
    )
    return np.asarray([ids[value] for value in spelled], np.int64)[_codes(column, values)]


def _codes(column: pa.ChunkedArray, values: pa.Array) -> NDArray[np.int64]:
    codes: NDArray[np.int64] = pc.index_in(column, value_set=values).to_numpy().astype(np.int64)
    return codes


def _finite(cells: Cells, column: pa.ChunkedArray, value: str) -> float:
    found = number(value)
    if found is None or not abs(found) <= LARGEST:  # nor NaN
        where = cells.at(pc.equal(column, value))
        raise DataError(
            f"{cells.place}, {where}: {value[:60]!r} is no number that a model can learn; a regression needs one in "
            "every row, below 3.4e38."
        )
    return found


def _refuse_unknown(cells: Cells, column: pa.ChunkedArray, unknown: Sequence[str], coding: Coding) -> None:
    if not unknown:
        return
    where = cells.at(pc.is_in(column, value_set=pa.array(unknown)))
    shown = ", ".join(repr(value[:60]) for value in sorted(unknown)[:5])
    if coding.numeric != any(number(value) is not None for value in unknown):
        hint = f" Its classes are {', '.join(coding.names[:10])}: write the labels of every split the same way."
    else:
        hint = did_you_mean(unknown[0], coding.names)
    raise DataError(f"{cells.place}, {where}: label {shown} is no class of the training split.{hint}")


def _flags(cells: Cells, name: str) -> NDArray[np.float32]:
    column = _trimmed(cells.columns[name])
    values = pc.unique(column)
    flags = {"0": 0.0, "1": 1.0, "false": 0.0, "true": 1.0}
    wrong = [value for value in values.to_pylist() if value is None or _class(value).lower() not in flags]
    if wrong:
        where = cells.at(pc.is_in(column, value_set=pa.array(wrong, pa.string())))
        raise DataError(f"{cells.place}, {where}: {wrong[0]!r} in {name!r}; one of several label columns holds 0 or 1.")
    return np.asarray([flags[_class(value).lower()] for value in values.to_pylist()], np.float32)[
        _codes(column, values)
    ]


def _vectors(cells: Cells, lists: pa.ChunkedArray, coding: Coding) -> NDArray[np.float32]:
    _refuse_missing(cells, lists)
    rows = pc.list_parent_indices(lists).to_numpy()
    flat = pc.utf8_trim_whitespace(pc.list_flatten(lists))
    keep = pc.not_equal(pc.fill_null(flat, ""), "").to_numpy(zero_copy_only=False)
    ids = pc.index_in(flat, value_set=pa.array(coding.names, pa.string()))
    strange = keep & pc.is_null(ids).to_numpy(zero_copy_only=False)
    if strange.any():
        mask = np.zeros(len(lists), bool)
        mask[rows[strange]] = True
        value = flat.filter(pa.array(strange))[0].as_py()
        raise DataError(
            f"{cells.place}, {cells.at(mask)}: label {value!r} is no class of the training split."
            f"{did_you_mean(value, coding.names)}"
        )
    vectors = np.zeros((len(lists), len(coding.names)), np.float32)
    vectors[rows[keep], pc.fill_null(ids, 0).to_numpy()[keep]] = 1.0
    return vectors


class Choice(NamedTuple):
    text: tuple[str, ...]
    """The one or two text columns."""
    label: tuple[str, ...]
    """The label column, or several columns of 0 and 1."""
    notes: tuple[str, ...]


def choose(rows: Rows, text: Sequence[str] | None, label: str | None) -> Choice:
    """The text and label columns of the training split, as asked or detected. DataError when that cannot be told."""
    notes: list[str] = []
    answers = _named_label(rows, label) if label is not None else ()
    texts = _named_text(rows, text) if text is not None else _known_text(rows, answers, notes)
    if not answers:
        answers = _known_label(rows, texts)
    if not texts:
        texts = _text_by_content(rows, answers)
        notes.append(_guess("text", texts))
    if not answers:
        answers = _label_by_content(rows, texts)
        notes.append(_guess("label", answers))
    shared = set(texts) & set(answers)
    if shared:
        raise DataError(f"{rows.place}: column {shared.pop()!r} cannot be both text and label.")
    return Choice(texts, answers, tuple(notes))


def choose_text(rows: Rows, text: Sequence[str] | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The text columns alone, for rows that need no label, and the notes. DataError when that cannot be told."""
    notes: list[str] = []
    texts = _named_text(rows, text) if text is not None else _known_text(rows, (), notes)
    if not texts:
        texts = _text_by_content(rows, ())
        notes.append(_guess("text", texts))
    return texts, tuple(notes)


def has_label(rows: Rows, label: str | None = None) -> bool:
    """Whether there are the columns that `label` names, or, where it is None, one with a label's name."""
    if label is not None:
        return label in rows.columns or {part.strip() for part in label.split(",")} <= set(rows.columns)
    return any(plain(name) in LABELS for name in rows.columns)


def _guess(role: str, columns: Sequence[str]) -> str:
    return f"took {' and '.join(map(repr, columns))} for the {role}, from the contents"


def existing(rows: Rows, columns: Sequence[str]) -> None:
    """Refuse a column that the split does not have."""
    for column in columns:
        if column in rows.columns:
            continue
        if rows.headerless:
            hint = f" It has no header, so its columns are numbers:\n{rows.listing()}"
        else:
            hint = did_you_mean(column, rows.columns)
        raise DataError(f"{rows.place}: no column {column!r}.{hint}")


def _named_text(rows: Rows, text: Sequence[str]) -> tuple[str, ...]:
    if not 1 <= len(text) <= 2 or len(set(text)) < len(text):
        raise DataError(
            f"{rows.place}: one or two different text columns make a task, not {', '.join(text) or 'none'}."
        )
    existing(rows, text)
    for name in text:
        if rows.lists(name):
            raise DataError(f"{rows.place}: column {name!r} holds lists, not text.")
    return tuple(text)


def _named_label(rows: Rows, label: str) -> tuple[str, ...]:
    """One column, or several joined by commas."""
    columns = (label,) if label in rows.columns else tuple(part.strip() for part in label.split(","))
    existing(rows, columns)
    return columns


def _known_text(rows: Rows, answers: Sequence[str], notes: list[str]) -> tuple[str, ...]:
    found = {plain(name): name for name in rows.columns if name not in answers and not rows.lists(name)}
    for first, second in PAIRS:
        if first in found and second in found:
            return found[first], found[second]
    singles = [found[name] for name in SINGLES if name in found]
    if len(singles) > 1:
        notes.append(f"took {singles[0]!r} for the text, not {', '.join(map(repr, singles[1:]))}")
    return tuple(singles[:1])


def _known_label(rows: Rows, texts: Sequence[str]) -> tuple[str, ...]:
    found = [name for known in LABELS for name in rows.columns if plain(name) == known and name not in texts]
    if len(found) > 1 and plain(found[0]) not in LABELS[:3]:
        raise _ambiguous(rows, f"which of {', '.join(map(repr, found))} is the label")
    return tuple(found[:1])


def _text_by_content(rows: Rows, answers: Sequence[str]) -> tuple[str, ...]:
    texts = tuple(name for name in rows.columns if name not in answers and _is_text(rows.sample[name]))
    if not 1 <= len(texts) <= 2:
        raise _ambiguous(rows, "which column is the text")
    return texts


def _label_by_content(rows: Rows, texts: Sequence[str]) -> tuple[str, ...]:
    rest = [name for name in rows.columns if name not in texts]
    answers = tuple(name for name in rest if not _is_text(rows.sample[name]) and not _is_running(rows.sample[name]))
    if len(answers) != 1:
        raise _ambiguous(rows, "which column is the label")
    return answers


def _is_text(cells: Sequence[Cell]) -> bool:
    texts = [cell for cell in cells if isinstance(cell, str) and cell]
    words = sum(len(cell.split(None, 100)) for cell in texts)
    return bool(texts) and words > 2 * len(texts) and 2 * len(set(texts)) > len(texts)


def _is_running(cells: Sequence[Cell]) -> bool:
    """Whether a column only numbers the rows."""
    values = [cell for cell in cells if isinstance(cell, str)]
    whole = all(value.isdigit() for value in values)
    return whole and len(values) > 2 and len(set(values)) == len(values)


def _ambiguous(rows: Rows, what: str) -> DataError:
    return DataError(
        f"{rows.place}: cannot tell {what}. Name the columns with --text and --label. "
        f"{'It has no header; its columns, by number' if rows.headerless else 'Its columns'}, with an example each:\n"
        f"{rows.listing()}"
    )
