"""Read tagged words in columns, as CoNLL 2002 and 2003 have them: a word per line, its
tag last, and a blank line between sentences.

    EU      NNP  B-NP  B-ORG
    rejects VBZ  B-VP  O

or in tables, as on the hub: a column with lists of words and one with lists of tags,
found by name.

Rules. Columns are separated by tabs, or by spaces in lines without a tab; the
first is the word, the last the tag, others are ignored. A first column that numbers the
words of every sentence is left out. Lines of -DOCSTART- are ignored, and so are
comments at the start of a sentence that do not end in a tag (`# ...`, `#begin ...`,
`#name=...`).

Tags in IOB1, IOB2, BIOES, BILOU or BMES are rewritten in IOB2. Their prefix may be in
lower case, be followed by `_`, `:` or `/`, or come last (PER-B), but in all tags alike.
Words outside entities are tagged O or, if no tag is O, one of OUTSIDES. A tag in none
of these forms is refused if other tags are in one. If no tag has a prefix (NOUN), all
are kept, except OUTSIDES. Tagging schemes: Tjong Kim Sang & De Meulder 2003.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from compress.data.task import Examples
from compress.data.text_files import head, lines, reading, refuse_large
from compress.errors import DataError

if TYPE_CHECKING:
    from compress.data.tables import Table

WORD_COLUMNS = ("tokens", "words")
TAG_COLUMNS = ("ner_tags", "tags", "labels", "ner", "pos_tags", "upos", "chunk_tags")
"""The usual names of the lists of a table, preferred ones first."""
DOCSTART = "-DOCSTART-"
OUTSIDE = "O"
OUTSIDES = ("0", "o", "_", "-", "other", "outside", "out", "none", "null", "nil")
"""Other spellings of the tag O, in lower case."""
_COMMENT = re.compile(r"#+|#(begin|end)|#\w+=.*")
"""The first column of a comment; another word with #, such as #nlp, is a word."""
_ENTITY_BEGINS = "BSU"
_ENDS = "ESLU"
_FORMS = (
    re.compile(r"(?P<prefix>[BIESLUM])-(?P<label>.+)"),
    re.compile(r"(?P<prefix>[BIESLUM])[_:/](?P<label>.+)"),
    re.compile(r"(?P<prefix>[biesulm])[-_:/](?P<label>.+)"),
    re.compile(r"(?P<label>.+)[-_:/](?P<prefix>[BIESLUM])"),
)
"""How tags of entities are written, the usual form first."""


class TagError(DataError):
    """A tag does not fit the others. The message lacks the place: callers find
    `tag`."""

    def __init__(self, tag: str, message: str) -> None:
        super().__init__(message)
        self.tag = tag


def is_conll(path: Path) -> bool:
    """Check whether the first lines are tagged words: several columns each, the last of
    them tags of entities."""
    tags = set[str]()
    words = list[str]()
    # str.splitlines would also split at marks that belong to a word, such as U+0085
    first = list(StringIO(head(path), newline=None))
    for line in first[:-1] if len(first) > 1 and first[-1][-1] != "\n" else first:
        columns = _columns(line)
        if not columns or columns[0] == DOCSTART or _is_comment(columns):
            continue
        if len(columns) < 2 or not columns[-1]:
            return False
        words.append(columns[0])
        tags.add(columns[-1])
    form = _find_form(tags)
    if form is None or any(" " in tag for tag in tags):
        return False
    rest = {tag for tag in tags if not form.fullmatch(tag)} - {OUTSIDE}
    usual = form is _FORMS[0] or not any(" " in word for word in words)
    return usual and len(rest) <= 1 and all(tag.lower() in OUTSIDES for tag in rest)


def is_tag(cell: str) -> bool:
    """Check whether a cell is a tag of an entity, or O."""
    return cell == OUTSIDE or has_prefix(cell)


def has_prefix(tag: str) -> bool:
    """Check whether a tag has a prefix for the part of an entity: `B-person`."""
    return len(tag) > 2 and tag[0] in "BIESLU" and tag[1] == "-"


def _find_form(tags: Iterable[str]) -> re.Pattern[str] | None:
    """Return the form in which these tags mark entities: the first form in which an
    entity begins or continues."""
    for form in _FORMS:
        found = [match for tag in tags if (match := form.fullmatch(tag))]
        prefixes = {match["prefix"].upper() for match in found}
        both = {match["label"] for match in found if match["prefix"].upper() in "BSU"}
        if prefixes & {"B", "I"} and (form is _FORMS[0] or both):
            return form
    return None


def standard_tags(tags: Iterable[str]) -> dict[str, str]:
    """Map tags to the usual form, `B-PER` and O, by the rules at the top of this file;
    other tags are unchanged.

    Raises TagError for a tag that does not fit the others.
    """
    distinct = sorted(set(tags))
    if {"B", "I"} <= {*distinct} <= {*"BIOESLUM"}:
        raise TagError(
            "B",
            "the tag 'B' does not say which kind of entity begins. Name the kind in "
            "every tag: write B-TERM and I-TERM, for example.",
        )
    form = _find_form(distinct)
    mapped = {}
    for tag in distinct:
        match = form.fullmatch(tag) if form else None
        prefix = match["prefix"].upper() if match else ""
        mapped[tag] = (
            f"{'I' if prefix == 'M' else prefix}-{match['label']}" if match else tag
        )
    plain = [
        tag
        for tag in distinct
        if mapped[tag] == tag and tag != OUTSIDE and not has_prefix(tag)
    ]
    known = ("0", "o") if OUTSIDE in distinct else OUTSIDES
    outside = [tag for tag in plain if tag.lower() in known]
    if len(outside) > 1 and OUTSIDE not in distinct:
        message = (
            f"the tags {' and '.join(map(repr, outside))} may both mean {OUTSIDE}. "
            f"Write {OUTSIDE} for one."
        )
        raise TagError(outside[0], message)
    mapped |= dict.fromkeys(outside, OUTSIDE)
    if form and (odd := [tag for tag in plain if mapped[tag] == tag]):
        example = next(tag for tag in distinct if form.fullmatch(tag))
        raise TagError(
            odd[0],
            f"the tag {odd[0]!r} is neither {OUTSIDE} nor written like {example!r}; "
            "expected all tags in one form. Correct the tags, or write O for words "
            "that are in no entity.",
        )
    return mapped


def standard_labels(names: Sequence[str], place: str) -> tuple[str, ...]:
    """Return the labels of a model for tagging in the usual form. DataError for labels
    without names, or that clash."""
    if len(names) > 1 and all(re.fullmatch(r"LABEL_\d+", name) for name in names):
        raise DataError(
            f"{place}: its labels have no names ({names[0]}, {names[1]}, ...), so it "
            "is unknown which words are in no entity. Name them in id2label, such as "
            "O, B-PER and I-PER."
        )
    try:
        mapped = standard_tags(names)
    except TagError as error:
        raise DataError(f"{place}: {error}") from None
    found = tuple(mapped[name] for name in names)
    if len(set(found)) < len(found):
        twice = next(name for name in found if found.count(name) > 1)
        raise DataError(
            f"{place}: two of its labels mean {twice!r}. Rename one in id2label."
        )
    return found


def read(path: Path) -> Examples:
    """Read the words and tags of the sentences of a file. Raises DataError."""
    with reading(path):
        refuse_large(path, "Remove some sentences.")
    sentences = list(_sentences(path))
    if not sentences:
        raise DataError(f"{path}: has no words; expected a word and its tag per line.")
    word = int(_has_numbers(sentences, path))
    words = [[row.columns[word] for row in rows] for rows in sentences]
    tags = [[row.columns[-1] for row in rows] for rows in sentences]
    _refuse_reversed(words, tags, path)
    try:
        return _examples(words, tags, path.name)
    except TagError as error:
        line = next(
            row.number
            for rows in sentences
            for row in rows
            if row.columns[-1] == error.tag
        )
        raise DataError(f"{path}, line {line}: {error}") from None


def table_columns(
    split: Table, text: Sequence[str] | None, label: str | None
) -> tuple[str, str] | None:
    """Return the columns of lists of words and of lists of tags, as requested or by
    their usual names, if any."""
    lists = [name for name in split.columns if split.has_lists(name)]
    words = next((name for name in text or WORD_COLUMNS if name in lists), None)
    tags = next(
        (name for name in ([label] if label else TAG_COLUMNS) if name in lists), None
    )
    return (words, tags) if words and tags else None


def read_table(split: Table, columns: tuple[str, str]) -> Examples:
    """Read the sentences of a table, see `table_columns`; rows without words are left
    out. Raises DataError."""
    sentences = list[list[str]]()
    tagged = list[list[str]]()
    places = list[str]()
    for place, cells in split.cells(columns):
        words, tags = (cell or [] for cell in cells)
        if len(words) != len(tags) or None in (*words, *tags):
            raise DataError(
                f"{place}: {len(words)} {columns[0]} but {len(tags)} {columns[1]}; "
                "expected a tag for each word. Correct or remove the row."
            )
        if words:
            sentences.append(words)
            tagged.append(tags)
            places.append(place)
    if columns[1] not in split.classes and all(
        tag.isdigit() for tags in tagged for tag in tags
    ):
        raise DataError(
            f"{split.place}: the tags in {columns[1]!r} are numbers without names. "
            "Write names, such as B-PER and O, or provide a Dataset whose features "
            "name them: Sequence(ClassLabel(names=...))"
        )
    try:
        return _examples(sentences, tagged, split.name)
    except TagError as error:
        place = next(
            place
            for place, tags in zip(places, tagged, strict=True)
            if error.tag in tags
        )
        raise DataError(f"{place}, column {columns[1]!r}: {error}") from None


def _examples(words: list[list[str]], tags: list[list[str]], name: str) -> Examples:
    import pyarrow as pa  # not needed by bundles, which use `entities`

    written = {tag for sentence in tags for tag in sentence}
    mapped = standard_tags(written)
    notes = []
    if outside := [
        tag for tag, standard in mapped.items() if standard == OUTSIDE != tag
    ]:
        notes.append(
            f"{name}: {', '.join(outside)} is read as O, for words in no entity"
        )
    standard = [[mapped[tag] for tag in sentence] for sentence in tags]
    if any(map(has_prefix, mapped.values())):
        standard = [iob2(sentence) for sentence in standard]
        if standard != [
            [OUTSIDE if tag in outside else tag for tag in sentence]
            for sentence in tags
        ]:
            notes.append(f"{name}: its tags are rewritten in IOB2")
    return Examples(
        pa.table({"words": words, "tags": standard}),
        list(range(len(words))),
        tuple(notes),
    )


def labels(tags: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """List the classes of training tags: O, then B- and I- of each label; or the tags,
    if they are not of entities."""
    distinct = {tag for sentence in tags for tag in sentence}
    if not all(map(is_tag, distinct)):
        return tuple(sorted(distinct))
    names = sorted({tag[2:] for tag in distinct if tag != OUTSIDE})
    return (OUTSIDE, *(f"{prefix}-{name}" for name in names for prefix in "BI"))


class _TaggedWord(NamedTuple):
    """Hold the columns of a line and its number."""

    number: int
    columns: Sequence[str]


def _sentences(path: Path) -> Iterator[list[_TaggedWord]]:
    rows: list[_TaggedWord] = []
    for number, line in enumerate(lines(path, newline=""), start=1):
        columns = _columns(line)
        if not columns or columns[0] == DOCSTART:
            if rows:
                yield rows
            rows = []
        elif not rows and _is_comment(columns):
            continue
        elif len(columns) < 2 or not columns[0] or not columns[-1]:
            raise DataError(
                f"{path}, line {number}: {line.strip()[:60]!r}; expected a word and, "
                "last on its line, its tag, separated by a tab or spaces."
            )
        else:
            rows.append(_TaggedWord(number, columns))
    if rows:
        yield rows


def _has_numbers(sentences: Sequence[Sequence[_TaggedWord]], path: Path) -> bool:
    """Check whether the first column numbers the words of every sentence. DataError for
    two columns of tags then."""
    if max(map(len, sentences)) == 1:
        return False
    for rows in sentences:
        for at, row in enumerate(rows):
            if len(row.columns) < 3 or row.columns[0] not in (str(at), str(at + 1)):
                return False
    if len(sentences[0][0].columns) > 3:
        raise DataError(
            f"{path}: numbers its words and has {len(sentences[0][0].columns)} "
            "columns, as in GermEval and CoNLL-U, so it is unknown which column has "
            "the tags. Keep the words and one column of tags."
        )
    return True


def _refuse_reversed(
    words: Sequence[Sequence[str]], tags: Sequence[Sequence[str]], path: Path
) -> None:
    """Raise DataError if the tags come before the words."""
    first = {word for sentence in words for word in sentence}
    if any(map(has_prefix, first)) and all(map(is_tag, first)):
        raise DataError(
            f"{path}: its first column has tags; expected the word first and the tag "
            "last on each line."
        )
    last = {tag for sentence in tags for tag in sentence}
    if last == {"_"}:
        raise DataError(
            f"{path}: its last column is _ in every line; expected the tags there."
        )


def _columns(line: str) -> list[str]:
    """Split a line into its columns; a blank line has none."""
    if not line.strip():
        return []
    return (
        [cell.strip(" ") for cell in line.rstrip("\r\n").split("\t")]
        if "\t" in line
        else re.split(" +", line.strip(" \r\n"))
    )


def _is_comment(columns: Sequence[str]) -> bool:
    return bool(_COMMENT.fullmatch(columns[0])) and not is_tag(columns[-1])


class Entity(NamedTuple):
    """Mark the words `first` to `last` (exclusive) as one `label`."""

    label: str
    first: int
    last: int


def entities(tags: Sequence[str]) -> list[Entity]:
    """Find the entities of a sentence tagged in IOB1, IOB2, IOE, BIOES or BILOU; tags
    without prefix mark one word.

    As in conlleval, an I- tag begins an entity if none is open, or one with another
    label: after O, or after B-y.
    """
    found: list[Entity] = []
    open_label = None
    first = 0
    for at, tag in enumerate(tags):
        prefix, label = (
            (tag[0], tag[2:])
            if has_prefix(tag)
            else ("S", None if tag == OUTSIDE else tag)
        )
        if open_label is not None and (prefix in _ENTITY_BEGINS or label != open_label):
            found.append(Entity(open_label, first, at))
            open_label = None
        if label is None:
            continue
        if open_label is None:
            open_label = label
            first = at
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
