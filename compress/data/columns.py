"""Which columns are the text and which is the label.

Stated rules. A named column is taken or refused. Else a known name decides (`names.py`): a pair before a single text,
`label` before other label names. Else the contents decide, and a note says so: a text has more than two words on
average and values that hardly recur; the label is the only other column that is no running number. Whatever stays
ambiguous is an error that lists the columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from compress.data.names import LABELS, PAIRS, SINGLES, plain
from compress.data.rows import Cell, Rows
from compress.errors import DataError, did_you_mean


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
