"""The data that a bundle was made from, read again: for whatever judges, trims or trains it further."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from compress.data import load_task
from compress.data.objects import DataLike
from compress.data.task import Task, TaskData
from compress.errors import BundleError
from compress.evaluation.evaluator import Exam
from compress.exporters.artifact import Bundle

if TYPE_CHECKING:
    from datasets import Dataset


def data_of(
    bundle: Bundle, data: DataLike, *, text: Sequence[str] | None = None, label: str | None = None, seed: int = 0
) -> TaskData:
    """`data`, named as for `distill`, read as the bundle's task. Raises BundleError where it holds another."""
    mine = bundle.task
    found = load_task(data, text=text, label=label, kind=mine.kind, metric=mine.metric, seed=seed)
    if _does(found.task) != _does(mine):
        raise BundleError(
            f"{found.name}: {_described(found.task)}; {bundle.path} does {_described(mine)}. Give the data that the "
            "bundle was made from"
        )
    return found


def exam_of(bundle: Bundle, split: "Dataset") -> Exam:
    """A split as the bundle's tokenizer encodes it."""
    from transformers import AutoTokenizer

    return Exam.of(bundle.task, split, AutoTokenizer.from_pretrained(bundle.path), bundle.manifest.max_length)


def _does(task: Task) -> tuple[str, tuple[str, ...], int]:
    return task.kind, task.labels, len(task.text)


def _described(task: Task) -> str:
    labels = task.labels
    of = f" of {len(labels)} labels ({', '.join(labels[:4])}{', ...' if len(labels) > 4 else ''})" if labels else ""
    return f"{task.kind}{of} over {'pairs of texts' if task.pair else 'single texts'}"
