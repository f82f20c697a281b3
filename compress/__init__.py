"""Take a teacher and a paper's recipe, ship a small, fast, measured student.

    import compress
    bundle = compress.distill(
        teacher="minilm", recipe="distilbert", data="glue/sst2", out="runs/sst2"
    )
    bundle.predict(["a gorgeous, witty, seductive movie"])

Names are imported when first used, so that `import compress` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compress.commands.bench import bench
    from compress.commands.demo import demo
    from compress.commands.distill import distill, forecast
    from compress.commands.doctor import doctor
    from compress.commands.export import export
    from compress.commands.gate import gate
    from compress.commands.inspect import inspect
    from compress.commands.label import forecast_labelling, label
    from compress.commands.pretrain import forecast_pretraining, pretrain
    from compress.commands.prune import prune
    from compress.commands.push import push
    from compress.commands.quantize import forecast_quantization, quantize
    from compress.commands.search import forecast_search, search
    from compress.commands.trim import forecast_trimming, trim
    from compress.config.options import (
        CheckpointOptions,
        ColumnOptions,
        DataOptions,
        DeviceOptions,
        DeviceSettingOptions,
        GoalOptions,
        Int8Options,
        LengthOptions,
        MeasureOptions,
        PruneOptions,
        RunOptions,
        SettingOptions,
        StudyOptions,
    )
    from compress.config.recipe import Recipe
    from compress.config.stages import StudentSpec
    from compress.config.term import Term
    from compress.data import Task, TaskData, load_task
    from compress.errors import CompressError
    from compress.exporters.artifact import Bundle
    from compress.models.signals import Signals
    from compress.models.student import build
    from compress.nas.config import Budget
    from compress.records.run_report import Report
    from compress.slicing.shape import Shape
    from compress.training.objective import Objective
    from compress.training.reads import reads
    from compress.training.step import Distillation

__version__ = "0.3.0"
_NAMES = {
    "commands.bench": "bench",
    "commands.demo": "demo",
    "commands.distill": "distill forecast",
    "commands.doctor": "doctor",
    "commands.export": "export",
    "commands.gate": "gate",
    "commands.inspect": "inspect",
    "commands.label": "forecast_labelling label",
    "commands.pretrain": "forecast_pretraining pretrain",
    "commands.prune": "prune",
    "commands.push": "push",
    "commands.quantize": "forecast_quantization quantize",
    "commands.search": "forecast_search search",
    "commands.trim": "forecast_trimming trim",
    "config.options": "CheckpointOptions ColumnOptions DataOptions DeviceOptions "
    "DeviceSettingOptions GoalOptions Int8Options LengthOptions MeasureOptions "
    "PruneOptions RunOptions SettingOptions StudyOptions",
    "config.recipe": "Recipe",
    "config.stages": "StudentSpec",
    "config.term": "Term",
    "data": "Task TaskData load_task",
    "errors": "CompressError",
    "exporters.artifact": "Bundle",
    "models.signals": "Signals",
    "models.student": "build",
    "nas.config": "Budget",
    "records.run_report": "Report",
    "slicing.shape": "Shape",
    "training.objective": "Objective",
    "training.reads": "reads",
    "training.step": "Distillation",
}
"""The public names, by the module that defines them."""
_HOMES = {
    name: f"compress.{module}"
    for module, names in _NAMES.items()
    for name in names.split()
}

__all__ = [
    "Budget",
    "Bundle",
    "CheckpointOptions",
    "ColumnOptions",
    "CompressError",
    "DataOptions",
    "DeviceOptions",
    "DeviceSettingOptions",
    "Distillation",
    "GoalOptions",
    "Int8Options",
    "LengthOptions",
    "MeasureOptions",
    "Objective",
    "PruneOptions",
    "Recipe",
    "Report",
    "RunOptions",
    "SettingOptions",
    "Shape",
    "Signals",
    "StudentSpec",
    "StudyOptions",
    "Task",
    "TaskData",
    "Term",
    "bench",
    "build",
    "demo",
    "distill",
    "doctor",
    "export",
    "forecast",
    "forecast_labelling",
    "forecast_pretraining",
    "forecast_quantization",
    "forecast_search",
    "forecast_trimming",
    "gate",
    "inspect",
    "label",
    "load_task",
    "pretrain",
    "prune",
    "push",
    "quantize",
    "reads",
    "search",
    "trim",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'compress' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
