"""Texts to be labelled, from wherever they lie.

Stated rules. A .txt file whose columns are not named holds one text a line. A source with a column of a label's name
(or `label`) is a task: its training rows are read, and their labels only score the teacher. Any other table gives its
text columns. What is no table is a corpus: one text a document.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset

from compress.data import load_task, paths, schema, sources
from compress.data.corpus import load_corpus
from compress.data.objects import DataLike, data_path
from compress.data.paths import SUFFIXES
from compress.data.task import Task, TaskData
from compress.data.text_files import lines
from compress.errors import DataError


@dataclass(frozen=True)
class Texts:
    """rows: columns `text`, and `text_pair` for pairs. `labelled`: where there are labels, the task they belong to."""

    name: str
    rows: Dataset
    labelled: TaskData | None
    notes: tuple[str, ...] = ()

    @property
    def pair(self) -> bool:
        return "text_pair" in self.rows.column_names

    def task(self, labels: Sequence[str]) -> Task:
        """The task of giving them `labels`, where they bring none of their own."""
        if self.labelled is not None:
            return self.labelled.task
        return Task("classification", tuple(self.rows.column_names), "label", tuple(labels), "accuracy")


def load_texts(
    source: DataLike, *, text: Sequence[str] | None = None, label: str | None = None, seed: int = 0
) -> Texts:
    """Load texts. Raises DataError for a source without text, and for one whose text column cannot be told."""
    source = data_path(source)
    path = paths.local(source)
    if path.suffix.lower() == ".txt" and path.is_file() and text is None and label is None:
        return _lines(path)
    if _is_corpus(source, path):
        corpus = load_corpus(source)
        return Texts(corpus.name, _rows([[each for each in corpus.documents() if each.strip()]]), None)
    found = sources.find(source, named=[*(text or ()), *(part.strip() for part in (label or "").split(",") if part)])
    if label is not None or schema.has_label(found.train):
        data = load_task(source, text=text, label=label, seed=seed)
        return Texts(data.name, data.train, data, data.notes)
    chosen, notes = schema.choose_text(found.train, text)
    read = [[] for _ in chosen]  # type: list[list[str]]
    for batch in found.train.read(chosen):
        for values, column in zip(read, batch.columns[1:], strict=True):
            values += [value or "" for value in column.to_pylist()]
    return Texts(found.name, _rows(read), None, (*found.notes, *notes))


def _lines(path: Path) -> Texts:
    texts = [line.strip() for line in lines(path) if line.strip()]
    if not texts:
        raise DataError(f"{path}: there is no text in it.")
    return Texts(path.name, _rows([texts]), None)


def _is_corpus(source: str, path: Path) -> bool:
    if source == "pydoc":
        return True
    if path.is_dir():
        return not any("train" in entry.name and entry.suffix.lower() in SUFFIXES for entry in path.iterdir())
    return path.is_file() and path.suffix.lower() not in SUFFIXES


def _rows(texts: Sequence[list[str]]) -> Dataset:
    return Dataset.from_dict(dict(zip(("text", "text_pair"), texts, strict=False)))
