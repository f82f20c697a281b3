"""Load data: a task's labelled splits, tokenised rows and their batches."""

from typing import TYPE_CHECKING

from compress.data.task import Task, TaskData
from compress.kinds import Kind

if TYPE_CHECKING:
    from compress.data.load import load_task

__all__ = ["Kind", "Task", "TaskData", "load_task"]


def __getattr__(name: str) -> object:
    if name != "load_task":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # pyarrow and datasets: not for commands that only need the types
    from compress.data.load import load_task

    return load_task
