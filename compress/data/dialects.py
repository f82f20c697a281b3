"""Split the lines of csv, tsv and txt files into cells: detect delimiter, quotation
mark and escapes by the rules below.

Rules for csv. A first line `sep=;` names the delimiter. Otherwise, the delimiter
is whichever of comma, semicolon, tab and `|` splits every row into as many cells as the
first. If several do, those that are always followed by a space, or always between two
digits, are left out; if several remain, the file is refused. Cells are quoted as in RFC
4180. If that does not fit the first rows, these variants are tried: spaces after each
delimiter, marks escaped by a backslash, the apostrophe as quotation mark; the only one
that fits is taken. Spaces that follow every delimiter belong to it. A mark in the
middle of a cell is text if the cell can be read in no other way. Any other row that
differs is refused with its line number.

Lines of a tsv file are split at tabs, and so are those of a txt file if at least half
of the first have one; they are split, too, if all start with fastText's `__label__`, or
if each ends in a recurring value after its only semicolon; else each is a text. See
`delimited` for their quoting.
"""

from __future__ import annotations

import csv
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Final, NamedTuple

from compress.data.tables import take_first_rows
from compress.data.text_files import (
    LONGEST_LINE,
    Position,
    check_line,
    first_bytes,
    lines,
)
from compress.errors import DataError

NumberedLine = tuple[int, str]

FASTTEXT: Final = "__label__"
SHOWN_LINES: Final = 100
"""Lines from which the delimiter of a txt file is detected."""
RECURRING_ROWS: Final = 20
DELIMITERS: Final = ",;\t|"
UNCLOSED: Final = "unexpected end of data"
"""The message of csv.reader for a quoted cell that is never closed."""
DELIMITER_NAMES: Final = {
    ",": "commas",
    ";": "semicolons",
    "\t": "tabs",
    "|": "vertical bars",
    "": "nothing",
}

CellCheck = Callable[[str, int], None]

_STATED = re.compile(r"sep=([^\"\r\n])\r?\n?", re.IGNORECASE)
_ESCAPED = re.compile(r'(?<!\\)((?:\\\\)*)\\"')
"""A quotation mark after an odd number of backslashes."""


class TextLine(NamedTuple):
    """Hold the cells of a row, the number of its first line, and the error if it cannot
    be read."""

    number: int
    cells: Sequence[str]
    error: str = ""


@dataclass(frozen=True)
class Dialect:
    """Describe how the rows of a file are written.

    delimiter  one character; "" for lines that are one cell each; FASTTEXT
    mark       the quotation mark; "" if marks are text
    spaces     spaces after a delimiter belong to it
    backslash  a backslash before a mark makes it text
    skipped    lines before the first row
    """

    delimiter: str
    mark: str = ""
    spaces: bool = False
    backslash: bool = False
    skipped: int = 0

    def __str__(self) -> str:
        between = f"{self.delimiter}{' ' if self.spaces else ''}"
        quoting = f"quoted by {self.mark}" if self.mark else "without quoting"
        escaped = ", with marks escaped by a backslash" if self.backslash else ""
        return f"separated by {between!r}, {quoting}{escaped}"

    @property
    def is_plain(self) -> bool:
        """Check for the dialect of RFC 4180, with any ASCII delimiter, or for cells
        without quoting."""
        usual = len(self.delimiter) == 1 and self.delimiter.isascii()
        escapes = self.spaces or self.backslash or self.mark not in ('"', "")
        return usual and not escapes

    def split(
        self, numbered: Iterable[NumberedLine], check: CellCheck, place: str
    ) -> Iterator[TextLine]:
        """Yield the rows of numbered lines, without the blank ones of a file with
        delimiters.

        check   is called on lines that are not ASCII, and raises DataError for a line
                that is not text
        """
        return (
            self._split_quoted(numbered, check, place)
            if self.mark
            else self._split_lines(numbered, check)
        )

    def _split_lines(
        self, numbered: Iterable[NumberedLine], check: CellCheck
    ) -> Iterator[TextLine]:
        for number, line in numbered:
            text = line.rstrip("\r\n")
            if not text and self.delimiter:
                continue
            if "\0" in line or not line.isascii():
                try:
                    check(line, number)
                except DataError as error:
                    yield TextLine(number, (), str(error))
                    continue
            yield TextLine(number, self._split_line(text))

    def _split_line(self, text: str) -> list[str]:
        """Split a line into its cells; for fastText, into the text and its labels
        joined by `|`."""
        if self.delimiter != FASTTEXT:
            return text.split(self.delimiter) if self.delimiter else [text]
        words = text.split(" ")
        count = next(
            (at for at, word in enumerate(words) if not word.startswith(FASTTEXT)),
            len(words),
        )
        return [
            " ".join(words[count:]),
            "|".join(word.removeprefix(FASTTEXT) for word in words[:count]),
        ]

    def _split_quoted(
        self, numbered: Iterable[NumberedLine], check: CellCheck, place: str
    ) -> Iterator[TextLine]:
        # a global limit, so it is only ever raised
        csv.field_size_limit(max(csv.field_size_limit(), LONGEST_LINE))
        feed = _Feed(numbered, check, escaped=self.backslash)
        reader = csv.reader(
            feed,
            delimiter=self.delimiter,
            quotechar=self.mark,
            skipinitialspace=self.spaces,
            strict=True,
        )
        while True:
            feed.taken.clear()
            error = ""
            try:
                cells = next(reader)
            except StopIteration:
                return
            except DataError as problem:
                yield TextLine(feed.number, (), str(problem))
                continue
            except csv.Error as problem:
                cells = (
                    self._keep_stray_marks(feed.text) if len(feed.taken) == 1 else []
                )
                error = (
                    ""
                    if cells
                    else (
                        f"{problem}: close the quotation mark, or double the marks "
                        "inside a quoted cell"
                    )
                )
                if error:
                    feed.return_all_but_first()
            else:
                if "".join(cells).count(self.mark) > 1 and self._has_marks_outside(
                    feed.text
                ):
                    error = (
                        "has quotation marks in several cells that are not quoted: "
                        "quote these cells, and double the marks inside"
                    )
            if self.mark == "'" and ('""' in feed.text or "\\'" in feed.text):
                error = (
                    "has \"\" or \\' among cells quoted by ', which may be read in two "
                    'ways: quote the cells by "'
                )
            if error:
                yield TextLine(
                    feed.number, (), f"{place}, line {feed.number}: {error} ({self})."
                )
            elif cells:
                yield TextLine(feed.number, cells)

    def _keep_stray_marks(self, text: str) -> list[str]:
        """Read a row whose quoted cells contain marks that are not doubled; [] if it
        can be read in more than one way.

        Such a mark is text if it touches no delimiter and its cell contains one, so
        that without quotation marks it would be several cells.
        """
        cells = []
        for quoted, content in self._list_pieces(text):
            undoubled = quoted and self.mark in content.replace(2 * self.mark, "")
            if undoubled and self.delimiter not in content:
                return []
            cells.append(
                content.replace(2 * self.mark, self.mark) if quoted else content
            )
        return [] if self._has_marks_outside(text) else cells

    def _has_marks_outside(self, text: str) -> bool:
        """Check whether several unquoted cells have marks, which may belong to one
        quoted cell."""
        return (
            sum(
                self.mark in content
                for quoted, content in self._list_pieces(text)
                if not quoted
            )
            > 1
        )

    def _list_pieces(self, text: str) -> list[tuple[bool, str]]:
        """Divide a row into its cells, as they are written, and whether each is quoted;
        [] if that fails."""
        mark = re.escape(self.mark)
        between = re.escape(self.delimiter)
        stray = f"(?<!{between}){mark}(?=[^{between}{mark}])"
        quoted = f"{mark}((?:[^{mark}]|{mark}{mark}|{stray})*+){mark}"
        plain = f"([^{mark}{between}][^{between}]*|)"
        pattern = re.compile(
            f"{' *' if self.spaces else ''}(?:{quoted}|{plain})({between}|\\Z)"
        )
        pieces: list[tuple[bool, str]] = []
        at = 0
        while match := pattern.match(text, at):
            pieces.append(
                (True, match[1]) if match[1] is not None else (False, match[2])
            )
            at = match.end()
            if not match[3]:
                return pieces
        return []


class _Feed:
    """Feed numbered lines to csv.reader, and keep the lines of the current row, so that
    they can be read again."""

    def __init__(
        self, numbered: Iterable[NumberedLine], check: CellCheck, *, escaped: bool
    ) -> None:
        self.source = iter(numbered)
        self.check = check
        self.escaped = escaped
        self.returned: deque[NumberedLine] = deque()
        self.taken: list[NumberedLine] = []
        self.size = 0

    def __iter__(self) -> _Feed:
        return self

    def __next__(self) -> str:
        numbered = self.returned.popleft() if self.returned else next(self.source)
        number, line = numbered
        self.size = len(line) + (self.size if self.taken else 0)
        self.taken.append(numbered)
        if self.size > LONGEST_LINE:
            raise csv.Error(f"more than {LONGEST_LINE:,} characters")
        if "\0" in line or not line.isascii():
            self.check(line, number)
        return self._unescape(line) if self.escaped else line

    @property
    def number(self) -> int:
        """Return the number of the first line of the row."""
        return self.taken[0][0]

    @property
    def text(self) -> str:
        """Return the lines of the row as they were fed, without the last line end."""
        text = "".join(line for _, line in self.taken).rstrip("\r\n")
        return self._unescape(text) if self.escaped else text

    def _unescape(self, text: str) -> str:
        """Double the marks that a backslash escapes."""
        return _ESCAPED.sub(r'\1""', text)

    def return_all_but_first(self) -> None:
        self.returned.extendleft(reversed(self.taken[1:]))


def read_lines(
    path: Path, dialect: Dialect, position: Position | None = None
) -> Iterator[TextLine]:
    """Yield the rows of a file. Raises DataError for a file that is not text, or has
    too long a line."""
    start = first_bytes(path)
    place = str(path)
    numbered = enumerate(lines(path, checked=False, position=position), start=1)
    return dialect.split(
        islice(numbered, dialect.skipped, None),
        lambda line, number: check_line(line, place, number, start),
        place,
    )


@dataclass(frozen=True)
class _Beginning:
    """Hold the first lines of a file, and whether there are no more."""

    lines: Sequence[str]
    complete: bool

    def has(self, sign: str) -> bool:
        return any(sign in line for line in self.lines)

    def parse(self, dialect: Dialect) -> list[TextLine]:
        """Split the lines into rows; a last row that continues after these lines is
        left out."""
        numbered = islice(enumerate(self.lines, start=1), dialect.skipped, None)
        rows = dialect.split(numbered, lambda line, number: None, "")
        return list(
            rows
            if self.complete
            else takewhile(lambda row: UNCLOSED not in row.error, rows)
        )

    def fits(self, dialect: Dialect) -> bool:
        """Check whether every row has as many cells as the first, and more than one."""
        widths = {0 if row.error else len(row.cells) for row in self.parse(dialect)}
        return len(widths) == 1 and widths.pop() > 1

    def count_alike(self, dialect: Dialect) -> int:
        """Count the rows that have as many cells as the first, and more than one."""
        widths = [len(row.cells) for row in self.parse(dialect)]
        return sum(width == widths[0] > 1 for width in widths)


def detect_csv(path: Path) -> tuple[Dialect, str]:
    """Detect the dialect of a csv file by its first rows, and a note if it is not the
    usual one. Raises DataError."""
    read = lines(path, checked=False)
    first = take_first_rows(read, len)
    begins = _Beginning(first, complete=next(read, None) is None)
    stated = _STATED.fullmatch(first[0]) if first else None
    header = next((line for line in first if line.strip()), "")
    plain = [Dialect(mark, '"') for mark in DELIMITERS if mark in header]
    if stated:
        plain = [Dialect(stated[1], '"', skipped=1)]
    if not plain:
        return Dialect(",", '"'), ""
    fitting = [dialect for dialect in plain if begins.fits(dialect)]
    if fitting:
        chosen = _decide(fitting, begins, path)
        note = (
            ""
            if len(fitting) == 1
            else f"took {DELIMITER_NAMES[chosen.delimiter]} as the delimiter"
        )
        return _with_spaces(chosen, begins), note
    variants = [
        variant for dialect in plain for variant in _list_variants(dialect, begins)
    ]
    unusual = [dialect for dialect in variants if begins.fits(dialect)]
    if len(unusual) > 1:
        raise DataError(
            f"{path}: may be read in several ways: {'; or '.join(map(str, unusual))}. "
            "Write it as in RFC 4180: cells with "
            'commas, quotation marks or line ends between ", and marks inside doubled.'
        )
    if unusual:
        return unusual[0], f"cells are {unusual[0]}"
    return max([*plain, *variants], key=begins.count_alike), ""


def _list_variants(dialect: Dialect, begins: _Beginning) -> Iterator[Dialect]:
    """Yield the unusual dialects that the first lines show a sign of."""
    spaced = begins.has(f'{dialect.delimiter} "')
    escaped = begins.has('\\"')
    if spaced:
        yield replace(dialect, spaces=True)
    if escaped:
        yield replace(dialect, backslash=True)
    if spaced and escaped:
        yield replace(dialect, backslash=True, spaces=True)
    if begins.has(f"{dialect.delimiter}'"):
        yield replace(dialect, mark="'")
    if begins.has(f"{dialect.delimiter} '"):
        yield replace(dialect, mark="'", spaces=True)
    if not begins.has(f"{dialect.delimiter}'") and any(
        line.startswith("'") for line in begins.lines
    ):
        yield replace(dialect, mark="'")


def _with_spaces(dialect: Dialect, begins: _Beginning) -> Dialect:
    """Return the dialect with spaces after its delimiters if every delimiter is
    followed by one."""
    later = [cell for row in begins.parse(dialect) for cell in row.cells[1:]]
    every = bool(later) and all(cell.startswith(" ") for cell in later)
    spaced = replace(dialect, spaces=True)
    return spaced if every and begins.fits(spaced) else dialect


def _decide(fitting: Sequence[Dialect], begins: _Beginning, path: Path) -> Dialect:
    """Choose the only dialect whose delimiter is not punctuation. Raises DataError if
    there is none, or several."""
    strong = [dialect for dialect in fitting if not _is_punctuation(dialect, begins)]
    if len(fitting) == 1 or len(strong) == 1:
        return (strong or fitting)[0]
    found = " and ".join(DELIMITER_NAMES[dialect.delimiter] for dialect in fitting)
    raise DataError(
        f"{path}: {found} both divide every row into the same number of cells. Name "
        f"the delimiter on a separate first line, such as sep={fitting[0].delimiter}"
    )


def _is_punctuation(dialect: Dialect, begins: _Beginning) -> bool:
    """Check whether the delimiter is always followed by a space, or is a comma that is
    always between two digits."""
    pairs = [
        pair
        for row in begins.parse(dialect)
        for pair in zip(row.cells, row.cells[1:], strict=False)
    ]
    if all(after.startswith(" ") for _, after in pairs):
        return True
    digits = all(
        before[-1:].isdigit() and after[:1].isdigit() for before, after in pairs
    )
    return dialect.delimiter == "," and digits


def detect_txt(first: Sequence[str]) -> str:
    """Detect the delimiter of a txt file from its first lines: a tab, a semicolon,
    FASTTEXT, or "" for whole texts."""
    first = [line for line in first if line.strip()]
    if first and 2 * sum("\t" in line for line in first) >= len(first):
        return "\t"
    if first and all(line.startswith(FASTTEXT) for line in first):
        return FASTTEXT
    ends = {line.rpartition(";")[2].strip() for line in first}
    recur = len(first) >= RECURRING_ROWS and 2 * len(ends) <= len(first)
    return ";" if recur and all(line.count(";") == 1 for line in first) else ""


def first_lines(path: Path) -> list[str]:
    """Read the lines from which the delimiter of a txt file is detected."""
    return list(islice(lines(path, checked=False), SHOWN_LINES))
