"""Turn the labels of a source into what a model is trained on: class ids, numbers, or
0/1 vectors.

Rules.

1. Lists of labels and several columns of 0 and 1 are multilabel. If all lists have the
   same number of places, and 0 or 1 in each, the places are the labels. If every list
   has one label, the kind `classification` may be requested.
2. Strings with `|` are lists; strings with commas are if they have fewer distinct parts
   than distinct values ("a,b", "a", "b": two classes, not three).
3. Labels are numbers if the source types them so, or if a text file writes every one as
   a plain number: -12, 0.5, 1e-05. With a fraction they are a regression, else classes.
   Strings of JSON and parquet are names, whatever is in them.
4. Everything else is a name, as it is written: 0110 and 110, 1e3 and 1000, nan and None
   are different classes. So are 1.0 and 1, or 1.10 and 1.1, where a text file has both
   and no more than MANY_CLASSES values; 1.0 alone is the class 1.
5. Numbers with a comma, a space, a percent or currency sign, and lists in another
   notation, are refused unless the kind is requested; as `regression`, 3,5 is three and
   a half.
6. An empty cell is a missing label, as is nan among numbers; in multilabel strings an
   empty cell means no class.

Classes that the source declares keep its order; others are sorted, numbers by value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from compress.arrays import Flags, Floats, Ints, Longs
from compress.data.conll import OUTSIDE, has_prefix
from compress.data.schema import Names, number
from compress.errors import DataError, did_you_mean
from compress.kinds import Kind, find

if TYPE_CHECKING:
    from compress.data.tables import CellKind, Table

MANY_CLASSES: Final = 20
"""More classes than this must have at least two rows each on average, or the column is
not a label."""
MOST_CLASSES: Final = 10_000
MOST_FLAGS: Final = 2**28
"""Rows times classes of a multilabel split, each of which takes four bytes: one
gigabyte."""
LARGEST_FLOAT: Final = float(np.finfo(np.float32).max)
LARGEST_EXACT: Final = 2.0**53
"""Larger whole numbers are not exact as floats, and are kept as strings."""
MISSING_WORDS: Final = frozenset({"nan", "na", "n/a", "none", "null", "-", "?", "#n/a"})
"""Classes by these names are noted, since they may have been meant as missing
labels."""

Labels = Longs | Floats

_BLANK: Final = pa.array(["", "nan", "-1", "-1.0"])
_TRUE: Final = pa.array(["1", "1.0", "true"])
_FLAG_VALUES: Final = pa.array(["0", "0.0", "false", *_TRUE.to_pylist()])
_PLAIN = re.compile(r"[-+]?(0|[1-9]\d*|(?=\.))(\.\d+)?(e[-+]\d+)?")
_WHOLE = re.compile(r"-?(0|[1-9]\d*)(\.0)?")
_QUANTITY = re.compile(r"[-+]?[$€£¥]?\s?\d[\d.,'\s]*[%$€£¥]?")
_DECIMAL_COMMA = re.compile(r"-?\d+(,\d+)?")


def list_rows(numbers: Sequence[int], total: int) -> str:
    """List the first five of `total` rows: `rows 3, 7, 12`."""
    more = f" and {total - 5} more" if total > 5 else ""
    return f"row{'s' if total > 1 else ''} {', '.join(map(str, numbers[:5]))}{more}"


@dataclass(frozen=True)
class LabelColumn:
    """Hold the labels of a split as in its source: trimmed strings or lists of them,
    null for a missing label.

    first  the number of the first row in messages
    typed  whether the source types them as numbers or as text; None if it has no types
    """

    place: str
    cells: pa.ChunkedArray
    first: int
    typed: CellKind | None = None

    @property
    def has_lists(self) -> bool:
        return pa.types.is_list(self.cells.type)

    def list_rows(self, mask: pa.ChunkedArray | Flags) -> str:
        """List the rows in the mask."""
        rows = np.flatnonzero(np.asarray(mask)) + self.first
        return list_rows(rows[:5].tolist(), len(rows))

    def list_rows_of(self, values: Sequence[str]) -> str:
        """List the rows with one of these labels."""
        return self.list_rows(pc.is_in(self.cells, value_set=pa.array(values)))

    def parts(self, separator: str | None) -> pa.ChunkedArray:
        """Return the labels of each row as a list; `separator` splits them if they are
        strings."""
        return (
            pc.split_pattern(pc.fill_null(self.cells, ""), separator)
            if separator
            else self.cells
        )

    def items(self, separator: str | None) -> pa.ChunkedArray:
        """Return the labels of all rows, one after another: numbers as class names, ""
        for a missing one."""
        flat = pc.fill_null(
            pc.utf8_trim_whitespace(pc.list_flatten(self.parts(separator))), ""
        )
        return (
            pc.replace_substring_regex(flat, r"^(-?\d+)\.0$", r"\1")
            if self.typed == "number"
            else flat
        )

    def class_ids(self, coding: Coding) -> Longs:
        """Return the id of each label: (rows,)."""
        labels = _without_nan(self) if coding.numeric else self
        values, codes = labels.encode_values()
        ids = {name: n for n, name in enumerate(coding.names)}
        whole = re.compile(r".*") if labels.typed == "number" else _WHOLE
        names = [
            value if value in ids or not whole.fullmatch(value) else _class_name(value)
            for value in values
        ]
        if unknown := sorted(
            value for value, name in zip(values, names, strict=True) if name not in ids
        ):
            if coding.numeric != any(number(value) is not None for value in unknown):
                hint = (
                    f" Its classes are {', '.join(coding.names[:10])}: write the "
                    "labels of every split the same way."
                )
            else:
                hint = did_you_mean(unknown[0], coding.names)
            mask = pc.is_in(labels.cells, value_set=pa.array(unknown))
            raise _unknown_class(labels, mask, unknown, hint)
        return np.asarray([ids[name] for name in names], np.int64)[codes]

    def numbers(self, coding: Coding) -> Floats:
        """Return each label as a number: (rows,)."""
        labels = _without_nan(self)
        values, codes = labels.encode_values()
        numbers = [
            number(value.replace(",", ".") if coding.decimal_comma else value)
            for value in values
        ]
        for value, parsed in zip(values, numbers, strict=True):
            if parsed is None or not abs(parsed) <= LARGEST_FLOAT:  # or NaN
                raise DataError(
                    f"{labels.place}, {labels.list_rows_of([value])}: {value[:60]!r} "
                    "is not a number below 3.4e38, which a regression needs in every "
                    "row. Correct or remove these rows; if the labels are classes, "
                    "leave out --kind."
                )
        return np.asarray(numbers, np.float32)[codes]

    def flags(self, coding: Coding) -> Floats:
        """Return 1 for each label that a row has, 0 for the others: (rows,
        classes)."""
        if self.has_lists:
            self.refuse_missing()
        lists = self.parts(coding.separator)
        rows = pc.list_parent_indices(lists).to_numpy()
        flat = self.items(coding.separator)
        present = np.asarray(pc.not_equal(flat, ""))
        ids = pc.index_in(flat, value_set=pa.array(coding.names, pa.string()))
        unknown = present & np.asarray(pc.is_null(ids))
        if unknown.any():
            mask = np.zeros(len(lists), bool)
            mask[rows[unknown]] = True
            value = flat[int(unknown.argmax())].as_py()
            hint = did_you_mean(value, coding.names)
            raise _unknown_class(self, mask, [value], hint)
        vectors = np.zeros((len(lists), len(coding.names)), np.float32)
        vectors[rows[present], pc.fill_null(ids, 0).to_numpy()[present]] = 1.0
        return vectors

    def encode_values(self) -> tuple[list[str], Ints]:
        """Return the distinct labels, and for each row the index of its label. Raises
        DataError if a row has none."""
        self.refuse_missing()
        encoded = self.cells.combine_chunks().dictionary_encode()
        return encoded.dictionary.to_pylist(), encoded.indices.to_numpy()

    def refuse_missing(self) -> None:
        """Raise DataError if a row has no label."""
        if count := self.cells.null_count:
            raise DataError(
                f"{self.place}: {count} of {len(self.cells)} rows have no label "
                f"({self.list_rows(pc.is_null(self.cells))}). Label or remove these "
                "rows."
            )

    def refuse_many(self, values: Sequence[str], most: int) -> None:
        """Raise DataError for too many classes."""
        if len(values) > most:
            raise DataError(
                f"{self.place}: the label column has {len(values)} different values in "
                f"{len(self.cells)} rows, such as {values[0][:60]!r}: it looks like "
                "text or an identifier. Name another column with --label, or if the "
                "labels are numbers the kind: --kind regression."
            )

    def refuse_flags(self, names: Sequence[str]) -> None:
        """Raise DataError for more labels than rows of flags have room for, and for the
        tags of words."""
        if OUTSIDE in names and any(map(has_prefix, names)):
            raise DataError(
                f"{self.place}: the labels {', '.join(names[:5])} are tags of words, "
                "not labels of texts; expected a list of words too, of the same "
                "length, such as tokens and ner_tags: split the text into words, one "
                "for each tag"
            )
        self.refuse_many(names, min(MOST_CLASSES, MOST_FLAGS // len(self.cells)))

    def list_lengths(self) -> list[int]:
        """List the different lengths of the lists."""
        lengths = pc.list_value_length(self.cells).drop_null()
        return list(pc.unique(lengths).to_pylist())

    def list_names(self, separator: str | None) -> Names:
        """List the labels in the lists, sorted."""
        return _sort(set(pc.unique(self.items(separator)).to_pylist()) - {""})


def label_column(
    split: Table, names: Sequence[str], columns: Sequence[pa.ChunkedArray]
) -> LabelColumn:
    """Take one label column of a split, or join several columns of 0 and 1 into lists
    of the names of the columns that are 1.

    A row whose flags are all blank has no label. DataError for flags other than 0 and
    1.
    """
    typed = split.kinds.get(names[0]) if len(names) == 1 else None
    if len(names) == 1 and pa.types.is_list(columns[0].type):
        return LabelColumn(split.place, columns[0], split.first, typed)
    if lists := [
        name
        for name, column in zip(names, columns, strict=True)
        if pa.types.is_list(column.type)
    ]:
        raise DataError(
            f"{split.place}: {lists[0]!r} has lists; expected 0 or 1, as it is one of "
            "several label columns."
        )
    trimmed = [pc.utf8_trim_whitespace(column) for column in columns]
    if len(names) == 1:
        cells = pc.if_else(pc.equal(trimmed[0], ""), None, trimmed[0])
        return LabelColumn(split.place, cells, split.first, typed)
    trimmed = [pc.fill_null(pc.utf8_lower(column), "") for column in trimmed]
    blank = np.all([_is_in(column, _BLANK) for column in trimmed], axis=0)
    flags = np.stack([_is_in(column, _TRUE) for column in trimmed], axis=1)
    labels = LabelColumn(split.place, _name_flags(flags, names, blank), split.first)
    for name, column in zip(names, trimmed, strict=True):
        invalid = ~_is_in(column, _FLAG_VALUES) & ~blank
        if invalid.any():
            value = column[int(invalid.argmax())].as_py()
            raise DataError(
                f"{split.place}, {labels.list_rows(invalid)}: {value!r} in {name!r}; "
                "expected 0 or 1, as it is one of several label columns."
            )
    return labels


def _is_in(column: pa.ChunkedArray, values: pa.Array) -> Flags:
    """Check for each cell whether it is one of these values."""
    return np.asarray(pc.is_in(column, value_set=values))


def _name_flags(
    flags_NC: Flags, names: Sequence[str], missing: Flags
) -> pa.ChunkedArray:
    """List the names of the true flags of each row; null for rows without a label."""
    offsets = pa.array(
        np.concatenate([[0], np.cumsum(flags_NC.sum(axis=1))]), pa.int32()
    )
    values = pa.array(names, pa.string()).take(pa.array(np.nonzero(flags_NC)[1]))
    return pa.chunked_array(
        [pa.ListArray.from_arrays(offsets, values, mask=pa.array(missing))]
    )


@dataclass(frozen=True)
class Coding:
    """Describe how the labels of a task are written.

    separator      splits multilabel strings; None for lists
    flags          lists have 0 or 1 for each of `names`
    single         lists have one label each, which is the class
    decimal_comma  a comma precedes the fractions of numbers
    notes          what was guessed
    """

    kind: Kind
    names: Names
    separator: str | None = None
    flags: bool = False
    single: bool = False
    decimal_comma: bool = False
    notes: tuple[str, ...] = ()

    @property
    def numeric(self) -> bool:
        return bool(self.names) and all(number(name) is not None for name in self.names)

    def arrange(self, labels: LabelColumn) -> LabelColumn:
        """Return labels as names or lists of names. DataError for a split that is
        written in another way."""
        if self.single and not labels.has_lists:
            return labels
        if labels.has_lists != (
            self.flags
            or self.single
            or (find(self.kind).many_labels and self.separator is None)
        ):
            raise DataError(
                f"{labels.place}: has "
                f"{'lists of labels' if labels.has_lists else 'labels'}, the training "
                f"split {'labels' if labels.has_lists else 'lists of labels'}. Write "
                "the labels of every split the same way."
            )
        if self.flags:
            labels = _read_flags(labels, self.names)
        return _unwrap(labels, self.kind) if self.single else labels


def learn(
    labels: LabelColumn, kind: Kind | None, declared: Sequence[str] | None
) -> Coding:
    """Determine the coding of the training labels. Raises DataError for missing labels,
    and for labels that fit no kind of task."""
    if labels.has_lists:
        return _learn_lists(labels, kind, declared)
    if declared:
        if kind is not None and not find(kind).one_label:
            raise DataError(
                f"{labels.place}: the kind {kind} was requested, but its label column "
                "makes it classification."
            )
        return Coding(kind or "classification", tuple(declared))
    return _learn_words(_without_nan(labels), kind)


def _learn_lists(
    labels: LabelColumn, kind: Kind | None, declared: Sequence[str] | None
) -> Coding:
    """Determine the coding of lists of labels, or of flags in the order of the
    labels."""
    lengths = labels.list_lengths()
    items = set(pc.unique(labels.items(None)).to_pylist())
    flags = (
        not declared
        and labels.typed == "number"
        and len(lengths) == 1
        and lengths[0] > 1
        and items <= set(_FLAG_VALUES.to_pylist())
    )
    if flags:
        declared = [str(place) for place in range(lengths[0])]
        labels = _read_flags(labels, declared)
    elif labels.typed == "number" and (
        odd := [item for item in items if item and not _is_whole(item)]
    ):
        raise DataError(
            f"{labels.place}: lists of numbers with fractions, such as {odd[0]}, are "
            "not labels; expected names, ids, or 0 and 1 for each label. "
            "Probabilities as labels are not read."
        )
    one = labels.list_lengths() == [1]
    if kind is not None and not find(kind).many_labels:
        inner = _unwrap(labels, kind)
        coding = learn(inner, kind, declared)
        return replace(coding, flags=flags, single=True)
    names = tuple(declared) if declared else labels.list_names(None)
    labels.refuse_flags(names)
    note = (
        "every row has exactly one label; if a text can only have one, ask for the "
        "kind classification"
    )
    return Coding(
        kind or "multilabel", names, flags=flags, notes=(note,) if one else ()
    )


def _read_flags(labels: LabelColumn, names: Sequence[str]) -> LabelColumn:
    """Turn lists of 0 and 1 into lists of the names of the labels that are 1. DataError
    for a list of another length or content."""
    missing = np.asarray(pc.is_null(labels.cells))
    wrong = np.asarray(
        pc.fill_null(pc.list_value_length(labels.cells), len(names))
    ) != len(names)
    flat = pc.fill_null(pc.list_flatten(labels.cells), "")
    valid = _is_in(flat, _FLAG_VALUES)
    if not valid.all() and not wrong.any():
        wrong[np.asarray(pc.list_parent_indices(labels.cells))[~valid]] = True
    if wrong.any():
        raise DataError(
            f"{labels.place}, {labels.list_rows(wrong)}: expected a list of "
            f"{len(names)} numbers, 0 or 1 for each."
        )
    flags = np.zeros((len(missing), len(names)), bool)
    flags[~missing] = _is_in(flat, _TRUE).reshape(-1, len(names))
    return replace(labels, cells=_name_flags(flags, names, missing), typed=None)


def _unwrap(labels: LabelColumn, kind: Kind) -> LabelColumn:
    """Unwrap lists of one label. Raises DataError for other lists."""
    lengths = pc.list_value_length(labels.cells)
    wrong = np.asarray(pc.fill_null(pc.not_equal(lengths, 1), False))
    if wrong.any():
        raise DataError(
            f"{labels.place}, {labels.list_rows(wrong)}: the kind {kind} was "
            "requested, but these rows do not have exactly one label. Ask for the kind "
            "multilabel, or correct them."
        )
    flat = pc.list_flatten(labels.cells).combine_chunks()
    places = np.cumsum(np.asarray(pc.is_valid(labels.cells))) - 1
    taken = pc.take(flat, pa.array(places, mask=np.asarray(pc.is_null(labels.cells))))
    return replace(labels, cells=pa.chunked_array([pc.utf8_trim_whitespace(taken)]))


def _without_nan(labels: LabelColumn) -> LabelColumn:
    """Take nan for a missing label if all other labels are numbers."""
    is_nan = pc.equal(pc.utf8_lower(labels.cells), "nan")
    others = pc.unique(
        labels.cells.filter(pc.invert(pc.fill_null(is_nan, True)))
    ).to_pylist()
    if labels.typed == "text" or not others or not all(map(_PLAIN.fullmatch, others)):
        return labels
    return replace(labels, cells=pc.if_else(is_nan, None, labels.cells))


def _learn_words(labels: LabelColumn, kind: Kind | None) -> Coding:
    """Determine the coding of labels that are strings or numbers."""
    values = pc.unique(labels.cells.drop_null()).to_pylist()
    if kind is None or find(kind).many_labels:
        _refuse_unclear(labels, values, kind)
        separator = "," if kind else None
        quantities = any(map(_QUANTITY.fullmatch, values))
        for mark in "|;,":
            joined = [value for value in values if mark in value]
            parts = {part.strip() for value in values for part in value.split(mark)}
            recur = len(parts) < len(values) and not quantities
            if joined and (recur or mark == "|"):
                separator = mark
                break
        if separator:
            names = labels.list_names(separator)
            labels.refuse_flags(names)
            return Coding(kind or "multilabel", names, separator)
    requested = kind
    notes: tuple[str, ...] = ()
    if kind is None:
        kind, notes = _number_or_class(labels, values)
    labels.refuse_missing()
    if find(kind).scaled:
        return Coding(kind, (), decimal_comma=_has_decimal_commas(values), notes=notes)
    labels.refuse_many(
        values, min(MOST_CLASSES, max(MANY_CLASSES, len(labels.cells) // 2))
    )
    forms = {"." in value for value in values}
    renamed = labels.typed == "number" or (
        len(forms) == 1 and all(map(_WHOLE.fullmatch, values))
    )
    if odd := [value for value in values if value.lower() in MISSING_WORDS]:
        notes = (
            *notes,
            f"{odd[0]!r} is read as a class: leave the cell empty where a label is "
            "missing",
        )
    names = _sort({_class_name(value) if renamed else value for value in values})
    if renamed and requested is None and len(names) > 2:
        notes = (
            *notes,
            f"whole numbers are read as {len(names)} classes; ask for the kind "
            "regression otherwise",
        )
    return Coding(kind, names, notes=notes)


def _refuse_unclear(
    labels: LabelColumn, values: Sequence[str], kind: Kind | None
) -> None:
    """Raise DataError for lists and numbers in a notation that may mean several
    things."""
    enclosed = [
        value for value in values if value[:1] + value[-1:] in {"[]", "()", "{}"}
    ]
    if enclosed and (
        len(enclosed) == len(values)
        or any(re.search(r"[,'\"]", value) for value in enclosed)
    ):
        raise DataError(
            f"{labels.place}, {labels.list_rows_of(enclosed)}: the label "
            f"{enclosed[0][:60]!r} looks like a list. Write every row as a JSON list, "
            "or as names joined by |; or request the kind classification if it is a "
            "name."
        )
    quantities = [
        value
        for value in values
        if _QUANTITY.fullmatch(value) and number(value) is None
    ]
    if kind is None and quantities and all(map(_QUANTITY.fullmatch, values)):
        raise DataError(
            f"{labels.place}, {labels.list_rows_of(quantities)}: the label "
            f"{quantities[0][:60]!r} may be a number, several or a name. Write numbers "
            "as 1234.5, without commas, spaces and signs, and lists as JSON; or "
            "request the kind: regression (decimal commas), multilabel (lists with "
            "commas) or classification (names)."
        )


def _has_decimal_commas(values: Sequence[str]) -> bool:
    """Check whether all numbers have a decimal comma, or none, and no comma can be a
    thousands separator."""
    commas = [value for value in values if "," in value]
    thousands = all(re.fullmatch(r"-?\d{1,3}(,\d{3})+", value) for value in commas)
    return bool(commas) and not thousands and all(map(_DECIMAL_COMMA.fullmatch, values))


def _is_whole(value: str) -> bool:
    parsed = number(value)
    return parsed is not None and parsed.is_integer()


def _class_name(value: str) -> str:
    """Name the class of a number: whole numbers without decimals, so that 1 and 1.0 are
    the same class."""
    parsed = number(value)
    if parsed is None or not parsed.is_integer() or abs(parsed) > LARGEST_EXACT:
        return value
    return str(int(parsed))


def _sort(values: Set[str]) -> Names:
    """Sort class names, by value if all are numbers."""
    numbers = {value: number(value) for value in values}
    if any(parsed is None or math.isnan(parsed) for parsed in numbers.values()):
        return tuple(sorted(values))
    return tuple(sorted(values, key=lambda value: (numbers[value] or 0.0, value)))


def _number_or_class(labels: LabelColumn, values: Sequence[str]) -> tuple[Kind, Names]:
    """Return whether labels are a regression or classes, and notes if they may be the
    other."""
    plain = [value for value in values if _PLAIN.fullmatch(value)]
    if labels.typed == "text":
        note = (
            "the labels are numbers written as text, so they are names; ask for the "
            "kind regression otherwise"
        )
        return "classification", (note,) if plain and len(plain) == len(values) else ()
    words = [
        value
        for value in values
        if (parsed := number(value)) is None or not math.isfinite(parsed)
    ]
    if plain and words:
        raise DataError(
            f"{labels.place}: labels are numbers in some rows and words in others "
            f"({labels.list_rows_of(words)}: {words[0]!r}). Write them the same way, "
            "or request the kind classification if each is a class."
        )
    if labels.typed == "number":
        fractions = plain and not all(map(_is_whole, values))
        return "regression" if fractions else "classification", ()
    if len(plain) < len(values):
        return "classification", ()
    spellings: dict[Decimal, str] = {}
    for value in values:
        spellings.setdefault(Decimal(value), value)
    twice = [value for value in values if spellings[Decimal(value)] != value]
    if any(each != each.to_integral_value() for each in spellings) and not (
        twice and len(values) <= MANY_CLASSES
    ):
        return "regression", ()
    note = ""
    if twice:
        first = spellings[Decimal(twice[0])]
        note = (
            f"{first!r} and {twice[0]!r} are read as two classes, by name; ask for the "
            "kind regression otherwise"
        )
    return "classification", (note,) if note else ()


def is_labelled(labels: LabelColumn, coding: Coding) -> bool:
    """Check whether any row has a label. -1 and nan are not labels unless they are
    classes: benchmarks hide labels that way."""
    cells = labels.cells
    if not labels.has_lists:
        blank = [value for value in _BLANK.to_pylist() if value not in coding.names]
        cells = pc.if_else(
            pc.is_in(pc.utf8_lower(cells), value_set=pa.array(blank)), None, cells
        )
    return bool(cells.null_count < len(cells))


def encode(labels: LabelColumn, coding: Coding) -> Labels:
    """Encode the labels of a split: (rows,) class ids, (rows,) numbers, or (rows,
    classes) of 0 and 1.

    DataError for a label that is missing, not a number, or an unknown class.
    """
    encoded: Labels = find(coding.kind).encode_labels(coding.arrange(labels), coding)
    return encoded


def _unknown_class(
    labels: LabelColumn,
    mask: pa.ChunkedArray | Flags,
    unknown: Sequence[str],
    hint: str,
) -> DataError:
    values = ", ".join(repr(value[:60]) for value in unknown[:5])
    return DataError(
        f"{labels.place}, {labels.list_rows(mask)}: the training split has no class "
        f"{values}.{hint} Correct these labels, or add such rows to the training split."
    )
