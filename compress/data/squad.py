"""Read questions on texts, in the json of SQuAD 1.1 and 2.0 (and of MLQA, XQuAD, TyDi's
gold passages and many more), or in tables, as on the hub: columns question, context,
answers.text and answers.answer_start (lists).

    {"data": [{"title": ..., "paragraphs": [{"context": ..., "qas": [
        {"id": ..., "question": ..., "is_impossible": false,
         "answers": [{"text": ..., "answer_start": 159}]}]}]}]}

Rules. A question marked as impossible has no answer, whatever else it lists; nor
has a question without answers, or with empty ones, in a file where others have some. A
file in which none has an answer, and none is marked, is unlabelled. An answer that is
not at its stated position is searched in its context, the nearest match counts; a
question none of whose answers is found is left out, with a note."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from compress.data.task import Examples
from compress.data.text_files import head, parse_json, whole
from compress.errors import DataError

if TYPE_CHECKING:
    from compress.data.tables import Table

FEW_ARTICLES = 20
"""The number of articles from which whole ones are held out; of fewer, single
paragraphs are."""

_SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "question": pa.string(),
        "context": pa.string(),
        "answers": pa.list_(pa.string()),
        "starts": pa.list_(pa.int32()),
    }
)


@dataclass(frozen=True)
class _AnswerPlace:
    """Hold a value of the file, and its path for messages:
    `data[3].paragraphs[0].qas[2].question`."""

    value: Any
    path: str

    def get(self, key: str, kind: type) -> _AnswerPlace:
        if not isinstance(self.value, Mapping) or not isinstance(
            self.value.get(key), kind
        ):
            raise DataError(
                f"{self.path}: expected an object with {key!r} ({kind.__name__}), as "
                f"in the json of SQuAD; found {str(self.value)[:80]}"
            )
        return _AnswerPlace(self.value[key], f"{self.path}.{key}")

    def items(self, key: str) -> Iterator[_AnswerPlace]:
        values = self.get(key, list)
        return (
            _AnswerPlace(value, f"{values.path}[{n}]")
            for n, value in enumerate(values.value)
        )


def is_squad(path: Path) -> bool:
    """Check whether a file begins like the json of SQuAD."""
    if path.suffix.lower() != ".json":
        return False
    beginning = head(path)
    return beginning.lstrip().startswith("{") and '"paragraphs"' in beginning


class _Question(NamedTuple):
    """Hold a question; answers: the stated texts, with their stated positions in the
    context; impossible: the value of is_impossible."""

    id: object
    question: str
    context: str
    answers: Sequence[tuple[str, int]]
    impossible: object
    article: object
    paragraph: object


def read(path: Path) -> Examples | None:
    """Read the questions of a file; None if it is unlabelled. Raises DataError."""
    text = whole(path, "Remove some articles.")
    return _examples(
        _read_json(_AnswerPlace(parse_json(text, str(path)), str(path))),
        str(path),
        path.name,
    )


def _read_json(data: _AnswerPlace) -> Iterator[_Question]:
    for number, article in enumerate(data.items("data")):
        for at, paragraph in enumerate(article.items("paragraphs")):
            context = paragraph.get("context", str).value
            for qa in paragraph.items("qas"):
                answers = [
                    (
                        answer.get("text", str).value,
                        answer.get("answer_start", int).value,
                    )
                    for answer in (qa.items("answers") if "answers" in qa.value else ())
                ]
                question = qa.get("question", str).value
                yield _Question(
                    qa.value.get("id"),
                    question,
                    context,
                    answers,
                    qa.value.get("is_impossible"),
                    number,
                    (number, at),
                )


COLUMNS = ("question", "context", "answers.text", "answers.answer_start")


def is_table(split: Table) -> bool:
    """Check whether a table has the columns of questions and answers."""
    return set(COLUMNS) <= set(split.columns)


def read_table(split: Table) -> Examples | None:
    """Read the questions of a table, as `read` does. Rows of one `title`, or one
    context, are held out together."""
    return _examples(_read_rows(split), split.place, split.name)


def _read_rows(split: Table) -> Iterator[_Question]:
    others = [
        name for name in ("id", "title", "is_impossible") if name in split.columns
    ]
    names = (*COLUMNS, *others)
    for place, cells in split.cells(names):
        row = dict(zip(names, cells, strict=True))
        question, context, texts, starts = cells[: len(COLUMNS)]
        texts = _items(texts)
        starts = _items(starts)
        whole_numbers = all(str(start).removeprefix("-").isdigit() for start in starts)
        if (
            not question
            or not context
            or None in texts
            or len(texts) != len(starts)
            or not whole_numbers
        ):
            raise DataError(
                f"{place}: expected a question, a context, and as "
                "many answers.text as answers.answer_start; found "
                f"{str(row)[:200]}. Correct or remove the row."
            )
        answers = list(zip(texts, map(int, starts), strict=True))
        marked = row.get("is_impossible")
        article = row.get("title") or context
        yield _Question(
            row.get("id"), question, context, answers, marked, article, context
        )


def _items(cell: Any) -> list[Any]:
    """Return the items of a cell; a single answer may stand outside of a list."""
    return cell if isinstance(cell, list) else list(filter(None, [cell]))


def _examples(questions: Iterable[_Question], place: str, name: str) -> Examples | None:
    rows: list[dict[str, Any]] = []
    articles: list[object] = []
    paragraphs: list[object] = []
    any_marked = False
    lost = 0
    for each in questions:
        impossible = str(each.impossible).lower() in ("true", "1", "1.0")
        any_marked |= impossible
        stated = [] if impossible else [one for one in each.answers if one[0].strip()]
        answers = _find_answers(each.context, stated)
        if stated and not answers:
            lost += 1
            continue
        rows.append(
            {
                "id": str(each.id or len(rows)),
                "question": each.question,
                "context": each.context,
                "answers": [text for text, _ in answers],
                "starts": [start for _, start in answers],
            }
        )
        articles.append(each.article)
        paragraphs.append(each.paragraph)
    if not rows:
        raise DataError(f"{place}: has no question whose answer is in its context.")
    if not any_marked and not any(row["answers"] for row in rows):
        return None
    notes = (
        (f"{name}: left out {lost} questions, whose answers are not in their contexts",)
        if lost
        else ()
    )
    groups = articles if len(set(articles)) >= FEW_ARTICLES else paragraphs
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    return Examples(
        pa.Table.from_pylist(rows, schema=_SCHEMA),
        [numbers[group] for group in groups],
        notes,
    )


def _find_answers(
    context: str, stated: Sequence[tuple[str, int]]
) -> list[tuple[str, int]]:
    """Return the distinct answers that are in the context, with their positions."""
    found: list[tuple[str, int]] = []
    for text, start in stated:
        plain = text.strip()
        at = _nearest(context, plain, start + len(text) - len(text.lstrip()))
        if at >= 0 and (plain, at) not in found:
            found.append((plain, at))
    return found


def _nearest(context: str, text: str, start: int) -> int:
    """Return the position of `text` in the context that is nearest to `start`; -1 if
    there is none."""
    if start >= 0 and context.startswith(text, start):
        return start
    before = context.rfind(text, 0, max(0, start) + len(text))
    after = context.find(text, max(0, start))
    return min(
        (at for at in (before, after) if at >= 0),
        key=lambda at: abs(at - start),
        default=-1,
    )


def count_unanswerable(tables: Mapping[Any, pa.Table], notes: list[str]) -> bool | None:
    """Return whether some training questions have no answer (None if all lack one), and
    note evaluation questions without an answer if every training question has one."""
    none = {
        role: pc.sum(pc.equal(pc.list_value_length(table["answers"]), 0)).as_py()
        for role, table in tables.items()
    }
    if none["train"] == len(tables["train"]):
        return None
    for role, count in none.items():
        if count and not none["train"]:
            notes.append(
                f"{role}: {count} of {len(tables[role])} questions have no answer, but "
                "every training question has one, so each of them will count as wrong"
            )
    return bool(none["train"])
