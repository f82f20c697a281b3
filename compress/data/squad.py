"""Read questions on texts, in the json of SQuAD 1.1 and 2.0 (and of MLQA, XQuAD, TyDi's gold passages and many more),
or in tables, as the hub has the same sets: columns question, context, answers.text and answers.answer_start (lists).

    {"data": [{"title": ..., "paragraphs": [{"context": ..., "qas": [
        {"id": ..., "question": ..., "is_impossible": false, "answers": [{"text": ..., "answer_start": 159}]}]}]}]}

Stated rules. A question that is marked as impossible has no answer, whatever else it lists; so has one without answers
in a file where others have some. A file where none has an answer, and none is marked, has no labels. An answer that
does not stand where it says is looked for in its context, nearest first; a question whose answers are all not there is
left out, and a note says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from compress.data.task import Examples
from compress.data.text_files import head, parse_json, whole
from compress.errors import DataError

if TYPE_CHECKING:
    from compress.data.readers import RawSplit

FEW_ARTICLES = 20
"""The least number of articles of which whole ones are held out; of fewer, single paragraphs are."""

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
class _Place:
    """Hold a value of the file, and how to say which: `data[3].paragraphs[0].qas[2].question`."""

    value: Any
    path: str

    def get(self, key: str, kind: type) -> _Place:
        if not isinstance(self.value, Mapping) or not isinstance(self.value.get(key), kind):
            raise DataError(
                f"{self.path}: expected an object with {key!r} ({kind.__name__}), as in the json of SQuAD; "
                f"found {str(self.value)[:80]}"
            )
        return _Place(self.value[key], f"{self.path}.{key}")

    def each(self, key: str) -> Iterator[_Place]:
        found = self.get(key, list)
        return (_Place(value, f"{found.path}[{n}]") for n, value in enumerate(found.value))


def is_squad(path: Path) -> bool:
    """Tell whether a file looks like the json of SQuAD, from its beginning."""
    if path.suffix.lower() != ".json":
        return False
    beginning = head(path)
    return beginning.lstrip().startswith("{") and '"paragraphs"' in beginning


class _Asked(NamedTuple):
    """Hold a question; answers: what the source states, with where it says that they begin in the context."""

    name: str | None
    question: str
    context: str
    answers: Sequence[tuple[str, int]]
    impossible: bool
    article: object
    paragraph: object


def read(path: Path) -> Examples | None:
    """Read the questions of a file; None where it has no answers to learn from or to be scored by. Raises DataError."""
    text = whole(path, "Leave articles out.")
    return _examples(_of_json(_Place(parse_json(text, str(path)), str(path))), str(path), path.name)


def _of_json(data: _Place) -> Iterator[_Asked]:
    for number, article in enumerate(data.each("data")):
        for at, paragraph in enumerate(article.each("paragraphs")):
            context = paragraph.get("context", str).value
            for asked in paragraph.each("qas"):
                answers = [
                    (answer.get("text", str).value, answer.get("answer_start", int).value)
                    for answer in (asked.each("answers") if "answers" in asked.value else ())
                ]
                impossible, name = asked.value.get("is_impossible") is True, asked.value.get("id")
                question = asked.get("question", str).value
                yield _Asked(name and str(name), question, context, answers, impossible, number, (number, at))


ASKED = ("question", "context", "answers.text", "answers.answer_start")


def is_table(split: RawSplit) -> bool:
    """Tell whether a table holds questions with answers that stand in their contexts."""
    return set(ASKED) <= set(split.columns)


def read_table(split: RawSplit) -> Examples | None:
    """Read the questions of a table, as `read` does. Rows of one `title`, or one context, are held out together."""
    return _examples(_of_table(split), split.place, split.name)


def _of_table(split: RawSplit) -> Iterator[_Asked]:
    others = [name for name in ("id", "title", "is_impossible") if name in split.columns]
    at = split.first
    for batch in split.read([*ASKED, *others]):
        for row in batch.to_pylist():
            question, context, texts, starts = (row[name] for name in ASKED)
            texts, starts = texts or [], starts or []
            whole_numbers = all(start is not None and start.removeprefix("-").isdigit() for start in starts)
            if not question or not context or None in texts or len(texts) != len(starts) or not whole_numbers:
                raise DataError(
                    f"{split.place}, row {at}: expected a question, a context, and as many answers.text as "
                    f"answers.answer_start; found {str(row)[:200]}. Mend the row, or take it out."
                )
            answers = list(zip(texts, map(int, starts), strict=True))
            impossible, article = row.get("is_impossible") == "true", row.get("title") or context
            yield _Asked(row.get("id"), question, context, answers, impossible, article, context)
            at += 1


def _examples(asked: Iterable[_Asked], place: str, name: str) -> Examples | None:
    rows: list[dict[str, Any]] = []
    articles: list[object] = []
    paragraphs: list[object] = []
    marked, lost = False, 0
    for each in asked:
        marked |= each.impossible
        found = [] if each.impossible else _find_answers(each)
        if each.answers and not each.impossible and not found:
            lost += 1
            continue
        row = {"id": each.name or str(len(rows)), "question": each.question, "context": each.context}
        rows.append({**row, "answers": [text for text, _ in found], "starts": [start for _, start in found]})
        articles.append(each.article)
        paragraphs.append(each.paragraph)
    if not rows:
        raise DataError(f"{place}: no question in it whose answer its text holds.")
    if not marked and not any(row["answers"] for row in rows):
        return None
    notes = (f"{name}: {lost} questions are left out: their answers are not in their texts",) if lost else ()
    groups = articles if len(set(articles)) >= FEW_ARTICLES else paragraphs
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    return Examples(pa.Table.from_pylist(rows, schema=_SCHEMA), [numbers[group] for group in groups], notes)


def _find_answers(asked: _Asked) -> list[tuple[str, int]]:
    """Return the different answers that stand in the context, with where they do."""
    found: list[tuple[str, int]] = []
    for text, start in asked.answers:
        plain = text.strip()
        at = _nearest(asked.context, plain, start + len(text) - len(text.lstrip())) if plain else -1
        if at >= 0 and (plain, at) not in found:
            found.append((plain, at))
    return found


def _nearest(context: str, text: str, start: int) -> int:
    """Find where `text` begins in the context, the nearest place to `start`; -1 where it is not in it."""
    if start >= 0 and context.startswith(text, start):
        return start
    before, after = context.rfind(text, 0, max(0, start) + len(text)), context.find(text, max(0, start))
    places = [place for place in (before, after) if place >= 0]
    return min(places, key=lambda place: abs(place - start), default=-1)
