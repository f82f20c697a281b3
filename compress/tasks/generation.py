"""Answer a text, or a pair of texts, with a text: a summary, a translation, an answer
from memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compress.data.task import Examples, Task, UnsavedTask
from compress.errors import StudentError

if TYPE_CHECKING:
    from compress.data.load import DataRequest
    from compress.data.tables import Table

ANSWER = "answer"


class Generation(Task):
    """Write the answer. Only models that write have the head for it: `compress
    pretrain` trains them, as by the recipe `t5`, and scores the loss of held-out
    answers.
    """

    kind = "generation"
    metrics = ("negative loss",)
    writes = True
    takes_texts = False
    shows = False

    @classmethod
    def read_tables(cls, request: DataRequest) -> UnsavedTask | None:
        """Read tables with texts and a column `answer`, as `compress label` writes
        them."""
        from compress.data import load

        if request.names_columns or not _is_table(request.opened.train):
            load.refuse_tables(
                request, f"a column of texts, and one of texts called {ANSWER}"
            )
            return None
        annotated = load.read_annotated_tables(request.opened, _read)
        tables, notes = load.collect(annotated, "texts", request.seed)
        text = _text_columns(request.opened.train)
        task = cls(cls.kind, text, ANSWER, (), cls.choose_metric(request.metric))
        return load.unsaved(annotated.name, task, tables, notes)

    @classmethod
    def auto_class(cls) -> Any:
        raise StudentError(
            f"the column {ANSWER!r} has texts, which no classifier can answer with. To "
            "learn to write them: compress pretrain --recipe t5. If they are names of "
            "classes: --label answer"
        )

    def describe_answer(self) -> str:
        return "answers with a text."


def _is_table(split: Table) -> bool:
    """Check whether a table has texts and answers, most of them different, and no usual
    column of labels."""
    from compress.data import schema

    if ANSWER not in split.columns or schema.has_label(split):
        return False
    answers = [cell for cell in split.sample[ANSWER] if isinstance(cell, str) and cell]
    several = 2 * len(set(answers)) > len(answers) > 0
    return several and any(schema.number(answer) is None for answer in answers)


def _text_columns(split: Table) -> tuple[str, ...]:
    from compress.data import schema

    columns, _ = schema.choose_text(split, None, (ANSWER,))
    return columns


def _read(split: Table) -> Examples | None:
    """Read texts and answers; rows of the same texts are held out together. Return None
    if there are no answers."""
    import pyarrow as pa

    names = _text_columns(split)
    numbers = dict[tuple[str, ...], int]()
    rows = []
    groups = []
    left_out = 0
    for _, found in split.cells((*names, ANSWER)):
        row = [(cell or "").strip() for cell in found]
        if not all(row):
            left_out += 1
            continue
        rows.append(row)
        groups.append(numbers.setdefault(tuple(row[:-1]), len(numbers)))
    if not rows:
        return None
    columns = ("text", "text_pair")[: len(names)]
    cells = zip(*rows, strict=True)
    table = pa.table(dict(zip((*columns, "label"), cells, strict=True)))
    notes = list[str]()
    if left_out:
        notes.append(f"{split.name}: left out {left_out:,} rows without text or answer")
    return Examples(table, groups, tuple(notes))
