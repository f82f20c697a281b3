"""Every figure of a measurement in a page comes from a stored result, which names its command."""

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from compress.config.loader import folder

ROOT = folder().parent
pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="the documents are in a checkout only")
NOTEBOOK = "LOG.md"
"""The log of experiments, whose entries name their own commands."""
SETTINGS = {
    "docs/browser.md": ["link"],
    "docs/real-teachers.md": ["recipe"],
    "docs/scale.md": ["text"],
}
"""Tables of digits that are no measurements, by page and first heading: settings, rules, and sums on paper."""
NUMBER = re.compile(r"[~+-]?\d[\d,.]*(e-?\d+)?")


def measured() -> Any:
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    return importlib.import_module("docs.measured")


def pages() -> list[Path]:
    return [page for page in measured().PAGES if page.name != NOTEBOOK] if (ROOT / "docs").is_dir() else []


def is_measured(cell: str) -> bool:
    """Whether a cell is a number, alone or with a unit or further numbers, but for words."""
    bare = cell.strip(" *~")
    return NUMBER.match(bare) is not None and len(re.findall(r"[A-Za-z]{4,}", bare)) < 2


def tables(text: str) -> list[str]:
    return re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_marked_table_is_that_of_its_result(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert measured().fill(text) == text, "write it anew: python -m docs.measured"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_marked_paragraph_says_what_its_result_says(page: Path) -> None:
    parts = measured().MARK.split(page.read_text(encoding="utf-8"))
    for name, below in zip(parts[1::2], parts[2::2], strict=True):
        paragraph = " ".join(below.split("\n\n")[0].split())
        found = measured().figures(name)
        phrases = found if isinstance(found, list) else []
        missing = [phrase for phrase in phrases if isinstance(phrase, str) and phrase not in paragraph]
        assert missing == [], f"{name}: {paragraph}"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_table_of_figures_is_marked(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    exceptions = SETTINGS.get(page.relative_to(ROOT).as_posix(), [])
    unmarked = []
    for table in tables(text):
        rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()]
        figures = [cell for row in rows[2:] for cell in row[1:] if is_measured(cell)]
        marked = re.search(r"<!-- measured: \w+ -->\n\n$", text.partition(table)[0])
        if len(figures) > 1 and not marked and rows[0][0] not in exceptions:
            unmarked.append((rows[0], figures[:5]))
    assert unmarked == []


def test_every_stored_result_names_its_command() -> None:
    for file in sorted(measured().RESULTS.glob("*.json")):
        measured().read(file.stem)  # or an assertion fails there


def test_no_figure_is_computed_for_no_page() -> None:
    """And the marks are lines of their own, with a blank line below, where the page is read for them."""
    texts = [page.read_text(encoding="utf-8") for page in pages()]
    marks = [name for text in texts for name in measured().MARK.findall(text)]
    assert len(marks) == sum(text.count("<!-- measured") for text in texts)
    public = {
        name
        for name, function in vars(measured()).items()
        if inspect.isfunction(function)
        and function.__module__ == "docs.measured"
        and function.__annotations__["return"] in (measured().Rows, measured().Phrases, str)
        and not inspect.signature(function).parameters
    }
    assert public == set(marks)


def test_a_wrong_figure_is_found() -> None:
    page = ROOT / "docs" / "gate.md"
    text = page.read_text(encoding="utf-8")
    assert measured().fill(text.replace("| 8, 48 |", "| 8, 47 |")) == text
