"""Parallel text: sentences with their translations, streamed.

Read are a .tsv file with two texts a line and no header; a .jsonl file whose objects have two texts, or two in
"translation" (`{"translation": {"en": ..., "fr": ...}}`); and two files of aligned lines, `name.en` and `name.fr`,
given as `name`. Where one of the two is empty there is no pair.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from compress.data import documents
from compress.data.text import lines, parse_json
from compress.errors import DataError

_CODE = re.compile(r"(?!tsv$)[a-z]{2,3}(_[A-Z]{2})?")
"""A language: en, fra, pt_BR."""


def find(source: Path) -> list[Path]:
    """The one or two files of parallel text that `source` names; none where it is something else."""
    if source.suffix == ".tsv" and source.is_file():
        return [source]
    if source.suffix == ".jsonl" and source.is_file():
        first = next((line for line in lines(source) if line.strip()), "")
        return [source] if _two_texts(first) else []
    if source.exists() or not source.parent.is_dir():
        return []
    sides = [path for path in source.parent.glob(f"{source.name}.*") if _language(path.name, source.name)]
    return sorted(sides) if len(sides) == 2 else []


def read(files: Sequence[Path]) -> Iterator[str]:
    """Each pair as two lines, in the order of the columns or of the languages' names."""
    pairs = _aligned(*files) if len(files) == 2 else _rows(files[0])
    for first, second in pairs:
        sides = " ".join(first.split()), " ".join(second.split())
        if all(sides):
            yield "\n".join(sides)


def _language(name: str, stem: str) -> bool:
    return documents.kind(name) is None and re.fullmatch(_CODE, name.removeprefix(f"{stem}.")) is not None


def _aligned(first: Path, second: Path) -> Iterator[tuple[str, str]]:
    for number, (line, translation) in enumerate(zip_longest(lines(first), lines(second)), start=1):
        if line is None or translation is None:
            shorter = first if line is None else second
            raise DataError(
                f"{shorter}: ends before line {number}, which the other file has. Line n of {first.name} and of "
                f"{second.name} must be translations of each other."
            )
        yield line, translation


def _rows(path: Path) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(lines(path), start=1):
        if line.strip():
            texts = _two_texts(line) if path.suffix == ".jsonl" else line.rstrip("\r\n").split("\t")
            if len(texts) != 2:
                raise DataError(f"{path}, line {number}: expected two texts, found {line[:60].strip()!r}.")
            yield texts[0], texts[1]


def _two_texts(line: str) -> Sequence[str]:
    """The two texts of a JSON line; none where it has not exactly two, or a column `text`."""
    try:
        row: Any = parse_json(line, "")
    except DataError:
        return ()
    row = row.get("translation", row) if isinstance(row, dict) else None
    texts = [text for text in row.values() if isinstance(text, str)] if isinstance(row, dict) else []
    return texts if len(texts) == 2 and "text" not in row else ()
