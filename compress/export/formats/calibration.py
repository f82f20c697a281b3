"""Rows that static int8 is calibrated on."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from compress.errors import BundleError
from compress.export.bundle import Bundle

if TYPE_CHECKING:
    from datasets import Dataset

ROWS = 256
"""Spread evenly over the training split: ranges of a few hundred texts are those of thousands."""


def calibration_rows(
    bundle: Bundle, data: str, *, text: Sequence[str] | None = None, label: str | None = None
) -> "Dataset":
    """Encoded examples of the training split, at most ROWS. Raises BundleError for data of another task."""
    from transformers import AutoTokenizer

    from compress.data import load_task
    from compress.exam import Exam

    task = bundle.task
    found = load_task(data, text=text, label=label, kind=task.kind, metric=task.metric)
    if found.task.labels != task.labels:
        raise BundleError(f"{data}: labels {', '.join(found.task.labels)}; {bundle.path} has {', '.join(task.labels)}")
    tokenizer = AutoTokenizer.from_pretrained(bundle.path)
    return Exam.of(task, found.train, tokenizer, bundle.manifest.max_length).spread(ROWS).rows
