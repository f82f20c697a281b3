"""Read tagged words in columns, as CoNLL 2002 and 2003 have them: a word per line, its tag last, and a blank line
between sentences.

    EU      NNP  B-NP  B-ORG
    rejects VBZ  B-VP  O

or in tables, as the hub has the same sets: a column of lists of words and one of lists of tags, by name.

Stated rules. Columns are separated by tabs, or by spaces in lines without a tab; the first is the word, the last the
tag, others are ignored. So are lines of -DOCSTART- and comments (`# ...` at the start of a sentence, not ending in a
tag). Tags in IOB1, IOB2, BIOES or BILOU are rewritten in IOB2; if any tag has another form (NOUN), all are kept.
Tagging schemes: Tjong Kim Sang & De Meulder 2003.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from compress.data.task import Examples
from compress.data.text_files import head, lines, reading, refuse_large
from compress.errors import DataError

if TYPE_CHECKING:
    from compress.data.readers import RawSplit

WORDS = ("tokens", "words")
TAGS = ("ner_tags", "tags", "labels", "ner", "pos_tags", "upos", "chunk_tags")
"""The usual names of the lists of a table, preferred ones first."""
DOCUMENT = "-DOCSTART-"
OUTSIDE = "O"
_BEGINS, _ENDS = "BSU", "ESLU"


def is_conll(path: Path) -> bool:
    """Check whether the first lines are tagged words: several columns each, the last of them tags of entities."""
    tags = []
    beginning = head(path)
    first = beginning.splitlines()
    for line in first[:-1] if len(first) > 1 and not beginning.endswith("\n") else first:
        columns = _columns(line)
        if not columns or columns[0] == DOCUMENT or (columns[0].startswith("#") and not is_tag(columns[-1])):
            continue
        if len(columns) < 2 or not is_tag(columns[-1]):
            return False
        tags.append(columns[-1])
    return any(map(has_prefix, tags))


def is_tag(cell: str) -> bool:
    """Check whether a cell is a tag of an entity, or O."""
    return cell == OUTSIDE or has_prefix(cell)


def has_prefix(tag: str) -> bool:
    """Check whether a tag has a prefix for the part of an entity: `B-person`."""
    return len(tag) > 2 and tag[0] in "BIESLU" and tag[1] == "-"


def read(path: Path) -> Examples:
    """Read the words and tags of the sentences of a file. Raises DataError."""
    with reading(path):
        refuse_large(path, "Remove some sentences.")
    sentences = list(_sentences(path))
    if not sentences:
        raise DataError(f"{path}: has no words; expected a word and its tag per line.")
    return _examples([words for words, _ in sentences], [tags for _, tags in sentences], path.name)


def table_columns(split: RawSplit, text: Sequence[str] | None, label: str | None) -> tuple[str, str] | None:
    """Return the columns of lists of words and of lists of tags, as requested or by their usual names, if any."""
    lists = [name for name in split.columns if split.has_lists(name)]
    words = next((name for name in text or WORDS if name in lists), None)
    tags = next((name for name in ([label] if label else TAGS) if name in lists), None)
    return (words, tags) if words and tags else None


def read_table(split: RawSplit, columns: tuple[str, str]) -> Examples:
    """Read the sentences of a table, see `table_columns`; rows without words are left out. Raises DataError."""
    sentences, tagged, at = list[list[str]](), list[list[str]](), split.first
    for batch in split.read(columns):
        for cells in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            words, tags = (cell or [] for cell in cells)
            if len(words) != len(tags) or None in (*words, *tags):
                raise DataError(
                    f"{split.place}, row {at}: {len(words)} {columns[0]} but {len(tags)} {columns[1]}; expected a tag "
                    "for each word. Correct or remove the row."
                )
            if words:
                sentences.append(words)
                tagged.append(tags)
            at += 1
    if columns[1] not in split.classes and all(tag.isdigit() for tags in tagged for tag in tags):
        raise DataError(
            f"{split.place}: the tags in {columns[1]!r} are numbers without names. Write names, such as B-PER and O, "
            "or provide a Dataset whose features name them: Sequence(ClassLabel(names=...))"
        )
    return _examples(sentences, tagged, split.name)


def _examples(words: list[list[str]], tags: list[list[str]], name: str) -> Examples:
    import pyarrow as pa  # not needed by bundles, which use `entities`

    notes = []
    if all(is_tag(tag) for sentence in tags for tag in sentence):
        rewritten = [iob2(sentence) for sentence in tags]
        if rewritten != tags:
            notes.append(f"{name}: its tags are rewritten in IOB2")
        tags = rewritten
    return Examples(pa.table({"words": words, "tags": tags}), list(range(len(words))), tuple(notes))


def labels(tags: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """List the classes of training tags: O, then B- and I- of each label; or the tags, if they are not of entities."""
    distinct = {tag for sentence in tags for tag in sentence}
    if not all(map(is_tag, distinct)):
        return tuple(sorted(distinct))
    names = sorted({tag[2:] for tag in distinct if tag != OUTSIDE})
    return (OUTSIDE, *(f"{prefix}-{name}" for name in names for prefix in "BI"))


def _sentences(path: Path) -> Iterator[tuple[list[str], list[str]]]:
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
                "separated by a tab or spaces."
            )
        else:
            words.append(columns[0])
            tags.append(columns[-1])
    if words:
        yield words, tags


def _columns(line: str) -> list[str]:
    """Split a line into its columns; a blank line has none."""
    if not line.strip():
        return []
    return [cell.strip() for cell in line.rstrip("\r\n").split("\t")] if "\t" in line else line.split()


class Entity(NamedTuple):
    """Mark the words `first` to `last` (exclusive) as one `label`."""

    label: str
    first: int
    last: int


def entities(tags: Sequence[str]) -> list[Entity]:
    """Find the entities of a sentence tagged in IOB1, IOB2, IOE, BIOES or BILOU; tags without prefix mark one word.

    As in conlleval, an I- tag begins an entity if none is open, or one with another label: after O, or after B-y.
    """
    found: list[Entity] = []
    open_label, first = None, 0
    for at, tag in enumerate(tags):
        prefix, label = (tag[0], tag[2:]) if has_prefix(tag) else ("S", None if tag == OUTSIDE else tag)
        if open_label is not None and (prefix in _BEGINS or label != open_label):
            found.append(Entity(open_label, first, at))
            open_label = None
        if label is None:
            continue
        if open_label is None:
            open_label, first = label, at
        if prefix in _ENDS:
            found.append(Entity(open_label, first, at + 1))
            open_label = None
    if open_label is not None:
        found.append(Entity(open_label, first, len(tags)))
    return found


def iob2(tags: Sequence[str]) -> list[str]:
    """Rewrite tags in IOB2: B- on the first word of each entity, I- on the others."""
    written = [OUTSIDE] * len(tags)
    for label, first, last in entities(tags):
        written[first:last] = [f"B-{label}", *[f"I-{label}"] * (last - first - 1)]
    return written
