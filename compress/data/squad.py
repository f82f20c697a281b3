"""Read questions on texts, in the json of SQuAD 1.1 and 2.0 (and of MLQA, XQuAD, TyDi's gold passages and many more).

    {"data": [{"title": ..., "paragraphs": [{"context": ..., "qas": [
        {"id": ..., "question": ..., "is_impossible": false, "answers": [{"text": ..., "answer_start": 159}]}]}]}]}

Stated rules. A question that is marked as impossible has no answer, whatever else it lists; so has one without answers
in a file where others have some. A file where none has an answer, and none is marked, has no labels. An answer that
does not stand where it says is looked for in its context, nearest first; a question whose answers are all not there is
left out, and a note says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from compress.data.task import Examples
from compress.data.text_files import head, parse_json, whole
from compress.errors import DataError

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


def read(path: Path) -> Examples | None:
    """Read the questions of a file; None where it has no answers to learn from or to be scored by. Raises DataError."""
    text = whole(path, "Leave articles out.")
    data = _Place(parse_json(text, str(path)), str(path))
    rows: list[dict[str, Any]] = []
    articles: list[int] = []
    paragraphs: list[int] = []
    marked, lost, paragraph_number = False, 0, 0
    for number, article in enumerate(data.each("data")):
        for paragraph in article.each("paragraphs"):
            context, paragraph_number = paragraph.get("context", str).value, paragraph_number + 1
            for asked in paragraph.each("qas"):
                impossible = asked.value.get("is_impossible") is True if isinstance(asked.value, Mapping) else False
                marked |= impossible
                found, stated = ([], 0) if impossible else _answers(asked, context)
                if stated and not found:
                    lost += 1
                    continue
                question = asked.get("question", str).value
                name = str(asked.value.get("id", len(rows)))
                texts, starts = [text for text, _ in found], [start for _, start in found]
                rows.append({"id": name, "question": question, "context": context, "answers": texts, "starts": starts})
                articles.append(number)
                paragraphs.append(paragraph_number)
    if not rows:
        raise DataError(f"{path}: no question in it whose answer its text holds.")
    if not marked and not any(row["answers"] for row in rows):
        return None
    notes = (f"{path.name}: {lost} questions are left out: their answers are not in their texts",) if lost else ()
    table = pa.Table.from_pylist(rows, schema=_SCHEMA)
    return Examples(table, articles if len(set(articles)) >= FEW_ARTICLES else paragraphs, notes)


def _answers(asked: _Place, context: str) -> tuple[list[tuple[str, int]], int]:
    """Return the different answers with where they stand, and how many the file states."""
    if "answers" not in asked.value:
        return [], 0
    found: list[tuple[str, int]] = []
    stated = list(asked.each("answers"))
    for answer in stated:
        text, start = answer.get("text", str).value, answer.get("answer_start", int).value
        plain = text.strip()
        at = _nearest(context, plain, start + len(text) - len(text.lstrip())) if plain else -1
        if at >= 0 and (plain, at) not in found:
            found.append((plain, at))
    return found, len(stated)


def _nearest(context: str, text: str, start: int) -> int:
    """Find where `text` begins in the context, the nearest place to `start`; -1 where it is not in it."""
    if start >= 0 and context.startswith(text, start):
        return start
    before, after = context.rfind(text, 0, max(0, start) + len(text)), context.find(text, max(0, start))
    places = [place for place in (before, after) if place >= 0]
    return min(places, key=lambda place: abs(place - start), default=-1)
