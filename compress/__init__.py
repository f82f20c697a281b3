"""Take a teacher and a paper's recipe, ship a small, fast, measured student.

    import compress
    bundle = compress.distill(teacher="minilm", recipe="distilbert", data="glue/sst2", out="runs/sst2")
    bundle.predict(["a gorgeous, witty, seductive movie"])

Names are imported when first used, so that `import compress` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from compress.data import Task, TaskData, load_task
    from compress.errors import CompressError
    from compress.export.bundle import Bundle
    from compress.objective import Objective
    from compress.papers.reading import reads
    from compress.pipeline import distill
    from compress.pretraining import pretrain
    from compress.pruning.line import prune
    from compress.recipe import Recipe, StudentSpec
    from compress.report import Report
    from compress.shape import Shape
    from compress.signals import Signals
    from compress.step import Distillation
    from compress.students.build import build
    from compress.term import Term

_HOMES = {
    "Bundle": "compress.export.bundle",
    "CompressError": "compress.errors",
    "Distillation": "compress.step",
    "Objective": "compress.objective",
    "Recipe": "compress.recipe",
    "Report": "compress.report",
    "Shape": "compress.shape",
    "Signals": "compress.signals",
    "StudentSpec": "compress.recipe",
    "Task": "compress.data",
    "TaskData": "compress.data",
    "Term": "compress.term",
    "build": "compress.students",
    "distill": "compress.pipeline",
    "load_task": "compress.data",
    "pretrain": "compress.pretraining",
    "prune": "compress.pruning.line",
    "reads": "compress.papers.reading",
}

__all__ = [
    "Bundle",
    "CompressError",
    "Distillation",
    "Objective",
    "Recipe",
    "Report",
    "Shape",
    "Signals",
    "StudentSpec",
    "Task",
    "TaskData",
    "Term",
    "build",
    "distill",
    "load_task",
    "pretrain",
    "prune",
    "reads",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'compress' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
