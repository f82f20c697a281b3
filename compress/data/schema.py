"""Choose the columns of a table that are a task's texts and labels, as requested, by
their names, or by their contents.

What the labels are is decided in `labels`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from compress.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from compress.data.tables import CellValue, Table

Names = tuple[str, ...]

PAIR_COLUMNS: Final = (
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
    "text",
    "sentence",
    "review",
    "utterance",
    "content",
    "comment",
    "commenttext",
    "tweet",
    "message",
    "document",
    "passage",
    "query",
    "question",
    "description",
    "body",
    "input",
    "title",
)
LABELS: Final = (
    "label",
    "labels",
    "goldlabel",
    "class",
    "intent",
    "category",
    "score",
    "quality",
    "isduplicate",
    "target",
    "sentiment",
    "emotion",
    "rating",
    "stars",
    "similarity",
    "similarityscore",
    "relatednessscore",
    "topic",
)
ANNOTATIONS: Final = (
    "entities",
    "ner",
    "spans",
    "annotations",
    "annotation",
    "nertags",
    "relations",
)
CHATS: Final = (
    "messages",
    "conversations",
    "conversation",
    "dialog",
    "dialogue",
    "turns",
    "chat",
)
"""Names of columns of lists of objects that annotation tools and language models
write."""
_KNOWN: Final = frozenset(
    (*SINGLES, *LABELS, *(name for pair in PAIR_COLUMNS for name in pair))
)


def plain(name: str) -> str:
    """Normalise a column name for comparison: without case, spaces, dashes and
    underscores."""
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


def split_names(label: str | None) -> Names:
    """Split the names of columns at commas; return () for None."""
    return () if label is None else tuple(map(str.strip, label.split(",")))


def list_requested(text: Sequence[str] | None, label: str | None) -> list[str]:
    """List the columns of text and of labels that are named."""
    return [*(text or ()), *([label] if label else [])]


class ChosenColumns(NamedTuple):
    """Name the columns of a task: one or two of text, and one of labels or several of 0
    and 1. Guesses become notes."""

    text: Names
    label: Names
    notes: tuple[str, ...]


def choose(
    split: Table, text: Sequence[str] | None, label: str | None
) -> ChosenColumns:
    """Choose the text and label columns of the training split, as requested or
    detected. DataError if ambiguous."""
    labels: Names = ()
    _refuse_nested(split, text, label)
    if label is not None:  # one column, or several joined by commas
        labels = (label,) if label in split.columns else split_names(label)
        refuse_unknown(split, labels)
    texts, notes = choose_text(split, text, labels, by_content=False)
    if not labels:
        usual = [
            column
            for name in LABELS
            for column in split.columns
            if plain(column) == name and column not in texts
        ]
        if len(usual) > 1 and plain(usual[0]) not in LABELS[:3]:
            raise _ambiguous(
                split, f"which of {', '.join(map(repr, usual))} is the label"
            )
        labels = tuple(usual[:1])
    if not texts:
        texts, notes = choose_text(split, None, labels)
    if not labels:
        if set(split.columns) <= set(texts):
            raise DataError(
                f"{split.place}: has texts, but no labels. Add a column of labels, "
                "have a language model write one (compress label), or learn vectors "
                "from the texts alone with --kind embedding."
            )
        rest = [
            name
            for name in split.columns
            if name not in texts and not _is_text(split.sample[name])
        ]
        labels = _prefer_top_level(
            [name for name in rest if not _is_row_number(split.sample[name])]
        )
        # a constant column is not a label, such as CoLA's mark of sentences that
        # linguists reject
        if len(labels) > 1:
            labels = tuple(
                name
                for name in labels
                if len({str(cell) for cell in split.sample[name] if cell}) > 1
            )
        named = ", ".join(map(repr, labels))
        if len(labels) > 1 and all(_has_flags(split.sample[name]) for name in labels):
            notes = (
                *notes,
                f"took {named} as labels, of which a text may have several, because "
                "all are 0 or 1",
            )
        elif len(labels) == 1:
            if split.headerless and _may_be_title(split.sample[labels[0]]):
                raise _ambiguous(split, "whether its first row is a header")
            notes = (*notes, f"took {named} as the label, by its contents")
        else:
            raise _ambiguous(
                split,
                f"which of {named} is the label"
                if labels
                else "which column is the label",
            )
    if shared := set(texts) & set(labels):
        raise DataError(
            f"{split.place}: column {shared.pop()!r} cannot be both text and label."
        )
    return ChosenColumns(texts, labels, notes)


def choose_text(
    split: Table,
    text: Sequence[str] | None,
    labels: Sequence[str] = (),
    *,
    by_content: bool = True,
) -> tuple[Names, Names]:
    """Choose the text columns, as requested, by their names, or else by their contents;
    and return notes of guesses.

    DataError if that is ambiguous; without `by_content` the result is empty then.
    """
    if text is not None:
        if not 1 <= len(text) <= 2 or len(set(text)) < len(text):
            raise DataError(
                f"{split.place}: expected one or two different text columns, not "
                f"{', '.join(text) or 'none'}."
            )
        refuse_unknown(split, text)
        for name in text:
            if split.has_lists(name):
                raise DataError(
                    f"{split.place}: column {name!r} contains lists, not text."
                )
        return tuple(text), ()
    columns = {
        plain(name): name
        for name in split.columns
        if name not in labels and not split.has_lists(name)
    }
    for first, second in PAIR_COLUMNS:
        if first in columns and second in columns:
            return (columns[first], columns[second]), ()
    singles = [columns[name] for name in SINGLES if name in columns]
    texts = [
        name
        for name in split.columns
        if name not in labels and _is_text(split.sample[name])
    ]
    if singles:
        others = [*dict.fromkeys([*singles, *texts])][1:]
        note = f"took {singles[0]!r} as the text, not {', '.join(map(repr, others))}"
        return (singles[0],), (note,) if others else ()
    if not by_content:
        return (), ()
    chosen = _prefer_top_level(texts)
    if not 1 <= len(chosen) <= 2:
        raise _ambiguous(split, "which column is the text")
    return chosen, (
        f"took {' and '.join(map(repr, chosen))} as the text, by the contents",
    )


def has_label(split: Table, label: str | None = None) -> bool:
    """Check whether the split has the columns that `label` names, or one with the usual
    name of a label."""
    if label is not None:
        return label in split.columns or {
            part.strip() for part in label.split(",")
        } <= set(split.columns)
    return any(plain(name) in LABELS for name in split.columns)


def refuse_unknown(split: Table, columns: Sequence[str]) -> None:
    """Raise DataError for a column that the split does not have, or that cannot be
    read."""
    for column in columns:
        if column in split.columns:
            continue
        if column in split.nested:
            raise _nested_column(split, column)
        if split.headerless:
            hint = f" It has no header, so its columns are numbers:\n{split.examples()}"
        else:
            hint = did_you_mean(column, split.columns)
        raise DataError(f"{split.place}: no column {column!r}.{hint}")


def _refuse_nested(split: Table, text: Sequence[str] | None, label: str | None) -> None:
    """Raise DataError for a column that cannot be read and is named like the label or
    the text that was not named."""
    for name in split.nested:
        usual_label = label is None and plain(name) in (*LABELS, *ANNOTATIONS)
        if usual_label or (text is None and plain(name) in (*SINGLES, *CHATS)):
            raise _nested_column(split, name)


def _nested_column(split: Table, name: str) -> DataError:
    example = split.nested[name]
    return DataError(
        f"{split.place}: column {name!r} cannot be read: "
        f"{example if len(example) <= 80 else example[:77] + '...'}. Expected a text, "
        "or a label or a list of labels, in each row. Write spans of entities as a "
        "list of words and a list of their tags (tokens, ner_tags), and the turns of a "
        "chat as one text; or name other columns with --text and --label."
    )


def _prefer_top_level(names: Sequence[str]) -> Names:
    """Leave out the fields of objects, such as `meta.source`, if there are other
    columns."""
    return tuple(name for name in names if "." not in name) or tuple(names)


def _is_text(cells: Sequence[CellValue]) -> bool:
    texts = [cell for cell in cells if isinstance(cell, str) and cell]
    words = sum(len(cell.split(None, 100)) for cell in texts)
    return bool(texts) and words > 2 * len(texts) and 2 * len(set(texts)) > len(texts)


def _has_flags(cells: Sequence[CellValue]) -> bool:
    flags = {cell.strip().lower() for cell in cells if isinstance(cell, str)}
    return bool(flags) and flags <= {"0", "0.0", "false", "1", "1.0", "true"}


def _may_be_title(cells: Sequence[CellValue]) -> bool:
    """Check whether the first of these labels is a word that no other row has."""
    first, *others = cells
    rare = isinstance(first, str) and number(first) is None and first not in others
    return rare and len(others) > 2


def _is_row_number(cells: Sequence[CellValue]) -> bool:
    values = [cell for cell in cells if isinstance(cell, str)]
    return (
        len(values) > 2
        and len(set(values)) == len(values)
        and all(value.isdigit() for value in values)
    )


def _ambiguous(split: Table, what: str) -> DataError:
    listed = "Its columns"
    if split.headerless:
        listed = "It has no header; its columns, by number"
    return DataError(
        f"{split.place}: cannot tell {what}. Name the columns with --text and --label; "
        f"several label columns of 0 and 1 as --label a,b. {listed}, "
        f"with an example each:\n{split.examples()}"
    )
