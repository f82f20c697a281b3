"""Turn the labels that a source spells into what a model is trained on: class ids, numbers, or a 0/1 vector.

Stated rules. Several label columns, lists, or strings with `|` are multilabel; strings with commas are when their
parts are fewer than their wholes ("a,b", "a", "b": two classes, not three). Numbers are regression as soon as one of
them has a fraction, else classes. Words are classes. Classes that the source declares keep its order; others are
sorted, numbers by value. An empty cell or `nan` is a missing label, except in multilabel strings: no class applies.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
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
    """Strip a column name of case, spaces, dashes and underscores: how names are compared."""
    return re.sub(r"[\s_\-]+", "", name.lower())


def is_known(name: str) -> bool:
    """Tell whether a column of this name is often a text or a label."""
    return plain(name) in _KNOWN


def number(cell: str) -> float | None:
    """Read the number a cell spells, NaN and the infinities included; None where it spells none."""
    try:
        return float(cell) if "_" not in cell else None
    except ValueError:
        return None


MANY_CLASSES: Final = 20
"""More classes than this must recur: at least two rows each on average, or the column is no label."""
MOST_CLASSES: Final = 10_000
MOST_FLAGS: Final = 2**28
"""Rows times classes of a multilabel split, which has a number for each: one gigabyte."""
LARGEST: Final = float(np.finfo(np.float32).max)
LARGEST_EXACT: Final = 2.0**53
"""Whole numbers beyond are not told apart as floats, and stay as they are spelled."""

ADDED: Final = "Mend these labels, or give the training split rows of theirs."
"""The remedy for labels that the training split lacks."""
_BLANK: Final = pa.array(["", "nan", "-1", "-1.0"])
_TRUE: Final = pa.array(["1", "1.0", "true"])
_FLAGS: Final = pa.array(["0", "0.0", "false", *_TRUE.to_pylist()])


def at(numbers: Sequence[int], total: int | None = None) -> str:
    """Say where rows are, `rows 3, 7, 12`, the first five of them named."""
    count = len(numbers) if total is None else total
    more = f" and {count - 5} more" if count > 5 else ""
    return f"row{'s' if count > 1 else ''} {', '.join(map(str, numbers[:5]))}{more}"


@dataclass(frozen=True)
class LabelColumn:
    """Hold the labels of a split as its source spells them: trimmed strings or lists of them, null where it has none.

    first  the number of the first row, as messages count
    """

    place: str
    cells: pa.ChunkedArray
    first: int

    @property
    def of_lists(self) -> bool:
        return pa.types.is_list(self.cells.type)

    def at(self, mask: pa.ChunkedArray | NDArray[np.bool_]) -> str:
        """Say where the rows in the mask are."""
        rows = np.flatnonzero(np.asarray(mask)) + self.first
        return at(rows[:5].tolist(), len(rows))

    def parts(self, separator: str | None) -> pa.ChunkedArray:
        """Return the labels of each row as a list; `separator` is what divides them in strings."""
        return pc.split_pattern(pc.fill_null(self.cells, ""), separator) if separator else self.cells

    def refuse_missing(self) -> None:
        """Raise DataError where a row has no label."""
        if count := self.cells.null_count:
            raise DataError(
                f"{self.place}: {count} of {len(self.cells)} rows have no label ({self.at(pc.is_null(self.cells))}). "
                "Label these rows or take them out."
            )

    def refuse_many(self, values: Sequence[str], most: int) -> None:
        """Raise DataError for more classes than labels have: hardly any recurs, or memory does not hold them."""
        if len(values) > most:
            raise DataError(
                f"{self.place}: the label column has {len(values)} different values in {len(self.cells)} rows, "
                f"such as {values[0][:60]!r}: it looks like text or an identifier. Name another column with --label."
            )


def label_column(split: RawSplit, names: Sequence[str], columns: Sequence[pa.ChunkedArray]) -> LabelColumn:
    """Take one column of a split, or several of 0 and 1 as lists of the names of those that are 1.

    Rows whose flags are all blank have no label. DataError for any other flag than 0 and 1.
    """
    if len(names) == 1 and pa.types.is_list(columns[0].type):
        return LabelColumn(split.place, columns[0], split.first)
    plain = [pc.utf8_trim_whitespace(column) for column in columns]
    if len(names) == 1:
        blank = pc.is_in(pc.utf8_lower(plain[0]), value_set=_BLANK.slice(0, 2))
        return LabelColumn(split.place, pc.if_else(blank, None, plain[0]), split.first)
    plain = [pc.fill_null(pc.utf8_lower(column), "") for column in plain]
    blank = np.all([np.asarray(pc.is_in(column, value_set=_BLANK)) for column in plain], axis=0)
    flags = np.stack([np.asarray(pc.is_in(column, value_set=_TRUE)) for column in plain], axis=1)
    offsets = pa.array(np.concatenate([[0], np.cumsum(flags.sum(axis=1))]), pa.int32())
    values = pa.array(names, pa.string()).take(pa.array(np.nonzero(flags)[1]))
    cells = pa.chunked_array([pa.ListArray.from_arrays(offsets, values, mask=pa.array(blank))])
    labels = LabelColumn(split.place, cells, split.first)
    for name, column in zip(names, plain, strict=True):
        strange = ~np.asarray(pc.is_in(column, value_set=_FLAGS)) & ~blank
        if strange.any():
            value = column[int(strange.argmax())].as_py()
            where = f"{split.place}, {labels.at(strange)}"
            raise DataError(f"{where}: {value!r} in {name!r}; one of several label columns holds 0 or 1.")
    return labels


@dataclass(frozen=True)
class Coding:
    """Describe how the labels of a task are spelled: `separator` splits multilabel strings, None for lists."""

    kind: Kind
    names: tuple[str, ...]
    separator: str | None = None

    @property
    def numeric(self) -> bool:
        return bool(self.names) and all(number(name) is not None for name in self.names)


def learn(labels: LabelColumn, kind: Kind | None, declared: Sequence[str] | None) -> Coding:
    """Learn the coding that the training labels call for. DataError for labels that are missing, or are no task."""
    if labels.of_lists or declared:
        only: Kind = "multilabel" if labels.of_lists else "classification"
        if kind not in {None, only}:
            raise DataError(f"{labels.place}: its label column makes the task {only}, but {kind} was asked for.")
        names = tuple(declared) if declared else _distinct(labels.parts(None))
        if labels.of_lists:
            labels.refuse_many(names, min(MOST_CLASSES, MOST_FLAGS // max(1, len(labels.cells))))
        return Coding(only, names)
    values = pc.unique(labels.cells.drop_null()).to_pylist()
    separator = None
    if kind in {None, "multilabel"}:
        parts = {part.strip() for value in values for part in value.split(",")}
        if any("|" in value for value in values):
            separator = "|"
        elif kind or (len(parts) < len(values) and all(number(value) is None for value in values)):
            separator = ","
    if separator:
        names = _distinct(labels.parts(separator))
        labels.refuse_many(names, min(MOST_CLASSES, MOST_FLAGS // max(1, len(labels.cells))))
        return Coding("multilabel", names, separator)
    kind = kind or _number_or_class(labels, values)
    labels.refuse_missing()
    if kind == "regression":
        return Coding(kind, ())
    labels.refuse_many(values, min(MOST_CLASSES, max(MANY_CLASSES, len(labels.cells) // 2)))
    return Coding(kind, _in_order({_class_name(value) for value in values}))


def _class_name(value: str) -> str:
    """Name a class: a whole number without its decimals, so that 1 and 1.0 are one class."""
    found = number(value)
    exact = found is not None and found.is_integer() and abs(found) <= LARGEST_EXACT
    return str(int(found)) if found is not None and exact else value


def _distinct(lists: pa.ChunkedArray) -> tuple[str, ...]:
    flat = pc.utf8_trim_whitespace(pc.list_flatten(lists))
    return _in_order(part for part in pc.unique(flat).to_pylist() if part)


def _in_order(values: Iterable[str]) -> tuple[str, ...]:
    values = set(values)
    numbers = {value: number(value) for value in values}
    if any(found is None for found in numbers.values()):
        return tuple(sorted(values))
    return tuple(sorted(values, key=lambda value: (numbers[value] or 0.0, value)))


def _number_or_class(labels: LabelColumn, values: Sequence[str]) -> Kind:
    numbers = [found for value in values if (found := number(value)) is not None]
    if numbers and len(numbers) < len(values):
        words = [value for value in values if number(value) is None]
        raise DataError(
            f"{labels.place}: labels are numbers in some rows and words in others "
            f"({labels.at(pc.is_in(labels.cells, value_set=pa.array(words)))}: {words[0]!r}). "
            "Write them one way, or ask for the kind classification if each is a class."
        )
    return "regression" if any(not found.is_integer() for found in numbers) else "classification"


def is_labelled(labels: LabelColumn, coding: Coding) -> bool:
    """Tell whether any row has a label. Benchmarks blank those of a test split with -1, which then is no class."""
    cells = labels.cells
    if not labels.of_lists and "-1" not in coding.names:
        cells = pc.if_else(pc.is_in(cells, value_set=_BLANK), None, cells)
    return bool(cells.null_count < len(cells))


def encode(labels: LabelColumn, coding: Coding) -> NDArray[np.int64] | NDArray[np.float32]:
    """Encode the labels of a split: (rows,) class ids, (rows,) numbers, or (rows, classes) of 0 and 1.

    DataError for a label that is missing, that is no number, or that is none of the classes.
    """
    if coding.kind == "multilabel":
        return _vectors(labels, coding)
    labels.refuse_missing()
    encoded = labels.cells.combine_chunks().dictionary_encode()
    values, codes = encoded.dictionary.to_pylist(), encoded.indices.to_numpy()
    if coding.kind == "regression":
        numbers = [number(value) for value in values]
        for value, found in zip(values, numbers, strict=True):
            if found is None or not abs(found) <= LARGEST:  # nor NaN
                raise DataError(
                    f"{labels.place}, {labels.at(pc.equal(labels.cells, value))}: {value[:60]!r} is no number that a "
                    "model can learn; a regression needs one in every row, below 3.4e38. Mend these rows, or take them "
                    "out; if these are classes, leave --kind out."
                )
        return np.asarray(numbers, np.float32)[codes]
    ids = {name: n for n, name in enumerate(coding.names)}
    spelled = [value if value in ids else _class_name(value) for value in values]
    if unknown := [value for value, name in zip(values, spelled, strict=True) if name not in ids]:
        where = labels.at(pc.is_in(labels.cells, value_set=pa.array(unknown)))
        shown = ", ".join(repr(value[:60]) for value in sorted(unknown)[:5])
        if coding.numeric != any(number(value) is not None for value in unknown):
            hint = f" Its classes are {', '.join(coding.names[:10])}: write the labels of every split the same way."
        else:
            hint = did_you_mean(unknown[0], coding.names)
        raise DataError(f"{labels.place}, {where}: label {shown} is no class of the training split.{hint} {ADDED}")
    return np.asarray([ids[name] for name in spelled], np.int64)[codes]


def _vectors(labels: LabelColumn, coding: Coding) -> NDArray[np.float32]:
    if labels.of_lists:
        labels.refuse_missing()
    lists = labels.parts(coding.separator)
    rows = pc.list_parent_indices(lists).to_numpy()
    flat = pc.fill_null(pc.utf8_trim_whitespace(pc.list_flatten(lists)), "")
    keep = np.asarray(pc.not_equal(flat, ""))
    ids = pc.index_in(flat, value_set=pa.array(coding.names, pa.string()))
    strange = keep & np.asarray(pc.is_null(ids))
    if strange.any():
        mask = np.zeros(len(lists), bool)
        mask[rows[strange]] = True
        value = flat[int(strange.argmax())].as_py()
        raise DataError(
            f"{labels.place}, {labels.at(mask)}: label {value!r} is no class of the training split."
            f"{did_you_mean(value, coding.names)} {ADDED}"
        )
    vectors = np.zeros((len(lists), len(coding.names)), np.float32)
    vectors[rows[keep], pc.fill_null(ids, 0).to_numpy()[keep]] = 1.0
    return vectors


class ChosenColumns(NamedTuple):
    """Name a task's columns: one or two of text; that of the label, or several of 0 and 1; guesses that were taken."""

    text: tuple[str, ...]
    label: tuple[str, ...]
    notes: tuple[str, ...]


def choose(split: RawSplit, text: Sequence[str] | None, label: str | None) -> ChosenColumns:
    """Choose the text and label columns of the training split, as asked or detected. DataError when in doubt."""
    labels: tuple[str, ...] = ()
    if label is not None:  # one column, or several joined by commas
        labels = (label,) if label in split.columns else tuple(part.strip() for part in label.split(","))
        refuse_unknown(split, labels)
    texts, notes = choose_text(split, text, labels, by_content=False)
    if not labels:
        known = [name for each in LABELS for name in split.columns if plain(name) == each and name not in texts]
        if len(known) > 1 and plain(known[0]) not in LABELS[:3]:
            raise _ambiguous(split, f"which of {', '.join(map(repr, known))} is the label")
        labels = tuple(known[:1])
    if not texts:
        texts, notes = choose_text(split, None, labels)
    if not labels:
        rest = [name for name in split.columns if name not in texts and not _is_text(split.sample[name])]
        labels = _own([name for name in rest if not _numbers_rows(split.sample[name])])
        if len(labels) > 1:  # one of them may say nothing: CoLA's mark of what linguists reject
            labels = tuple(name for name in labels if len({str(cell) for cell in split.sample[name] if cell}) > 1)
        if len(labels) != 1:
            between = f"which of {', '.join(map(repr, labels))} is the label" if labels else "which column is the label"
            raise _ambiguous(split, between)
        notes = (*notes, f"took {labels[0]!r} for the label, from the contents")
    shared = set(texts) & set(labels)
    if shared:
        raise DataError(f"{split.place}: column {shared.pop()!r} cannot be both text and label.")
    return ChosenColumns(texts, labels, notes)


def choose_text(
    split: RawSplit, text: Sequence[str] | None, labels: Sequence[str] = (), *, by_content: bool = True
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Choose the text columns, as asked, by their names, or else by their contents, and tell guesses as notes.

    DataError when that cannot be told; without `by_content` there are none then.
    """
    if text is not None:
        if not 1 <= len(text) <= 2 or len(set(text)) < len(text):
            raise DataError(
                f"{split.place}: one or two different text columns make a task, not {', '.join(text) or 'none'}."
            )
        refuse_unknown(split, text)
        for name in text:
            if split.has_lists(name):
                raise DataError(f"{split.place}: column {name!r} holds lists, not text.")
        return tuple(text), ()
    found = {plain(name): name for name in split.columns if name not in labels and not split.has_lists(name)}
    for first, second in PAIRS:
        if first in found and second in found:
            return (found[first], found[second]), ()
    singles = [found[name] for name in SINGLES if name in found]
    if singles:
        others = ", ".join(map(repr, singles[1:]))
        return (singles[0],), (f"took {singles[0]!r} for the text, not {others}",) if others else ()
    if not by_content:
        return (), ()
    texts = _own([name for name in split.columns if name not in labels and _is_text(split.sample[name])])
    if not 1 <= len(texts) <= 2:
        raise _ambiguous(split, "which column is the text")
    return texts, (f"took {' and '.join(map(repr, texts))} for the text, from the contents",)


def has_label(split: RawSplit, label: str | None = None) -> bool:
    """Tell whether there are the columns that `label` names, or, where it is None, one with a label's name."""
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


def _own(names: Sequence[str]) -> tuple[str, ...]:
    """Leave the fields of objects, `meta.source`, out where there are other columns."""
    return tuple(name for name in names if "." not in name) or tuple(names)


def _is_text(cells: Sequence[Cell]) -> bool:
    texts = [cell for cell in cells if isinstance(cell, str) and cell]
    words = sum(len(cell.split(None, 100)) for cell in texts)
    return bool(texts) and words > 2 * len(texts) and 2 * len(set(texts)) > len(texts)


def _numbers_rows(cells: Sequence[Cell]) -> bool:
    """Tell whether a column only numbers the rows."""
    values = [cell for cell in cells if isinstance(cell, str)]
    whole = all(value.isdigit() for value in values)
    return whole and len(values) > 2 and len(set(values)) == len(values)


def _ambiguous(split: RawSplit, what: str) -> DataError:
    return DataError(
        f"{split.place}: cannot tell {what}. Name the columns with --text and --label. "
        f"{'It has no header; its columns, by number' if split.headerless else 'Its columns'}, with an example each:\n"
        f"{split.examples()}"
    )
