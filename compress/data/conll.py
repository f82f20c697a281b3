"""Tagged words in columns, as of CoNLL 2002 and 2003: one word a line, its tag last, a blank line between sentences.

    EU      NNP  B-NP  B-ORG
    rejects VBZ  B-VP  O

Stated rules. Columns are divided by tabs, or by spaces in lines without a tab; the first is the word, the last the tag,
others are passed over. Lines of -DOCSTART- and comments (`# ...` where a sentence begins, ending in no tag) are, too.
Tags in IOB1, IOB2, BIOES or BILOU are rewritten in IOB2; where any tag is of another form (NOUN), all stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from compress.data.tags import OUTSIDE, iob2, prefixed
from compress.data.task import Examples
from compress.data.text_files import head, lines, reading, refuse_large
from compress.errors import DataError

DOCUMENT = "-DOCSTART-"

Tagged = tuple[list[str], list[str]]


def is_conll(path: Path) -> bool:
    """Whether the first lines look like tagged words: several columns each, the last of them tags of entities."""
    tags = []
    beginning = head(path)
    shown = beginning.splitlines()
    for line in shown[:-1] if len(shown) > 1 and not beginning.endswith("\n") else shown:
        columns = _columns(line)
        if not columns or columns[0] == DOCUMENT or (columns[0].startswith("#") and not is_tag(columns[-1])):
            continue
        if len(columns) < 2 or not is_tag(columns[-1]):
            return False
        tags.append(columns[-1])
    return any(map(prefixed, tags))


def is_tag(cell: str) -> bool:
    return cell == OUTSIDE or prefixed(cell)


def read(path: Path) -> Examples:
    """The sentences of a file: words and tags, in IOB2 where they name entities. DataError."""
    with reading(path):
        refuse_large(path, "Leave sentences out.")
    sentences = list(_sentences(path))
    if not sentences:
        raise DataError(f"{path}: no words in it; expected one word and its tag a line.")
    words, tags = [words for words, _ in sentences], [tags for _, tags in sentences]
    notes = []
    if all(is_tag(tag) for each in tags for tag in each):
        rewritten = [iob2(each) for each in tags]
        if rewritten != tags:
            notes.append(f"{path.name}: its tags are rewritten in IOB2")
        tags = rewritten
    return Examples(pa.table({"words": words, "tags": tags}), list(range(len(sentences))), tuple(notes))


def labels(tags: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """The classes of a task, from its training tags: O, then B- and I- of each label; or the tags as they are."""
    found = {tag for each in tags for tag in each}
    if not all(map(is_tag, found)):
        return tuple(sorted(found))
    names = sorted({tag[2:] for tag in found if tag != OUTSIDE})
    return (OUTSIDE, *(f"{prefix}-{name}" for name in names for prefix in "BI"))


def _sentences(path: Path) -> Iterator[Tagged]:
    words: list[str] = []
    tags: list[str] = []
    for number, line in enumerate(lines(path, newline=""), start=1):
        columns = _columns(line)
        if not columns or columns[0] == DOCUMENT:
            if words:
                yield words, tags
            words, tags = [], []
        elif not words and columns[0].startswith("#") and not is_tag(columns[-1]):
            continue
        elif len(columns) < 2 or not columns[0]:
            raise DataError(
                f"{path}, line {number}: {line.strip()[:60]!r}; expected a word and, last in its line, its tag, "
                "divided by a tab or spaces."
            )
        else:
            words.append(columns[0])
            tags.append(columns[-1])
    if words:
        yield words, tags


def _columns(line: str) -> list[str]:
    """Empty for a blank line."""
    if not line.strip():
        return []
    return [cell.strip() for cell in line.rstrip("\r\n").split("\t")] if "\t" in line else line.split()
