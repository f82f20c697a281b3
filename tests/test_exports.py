"""The public names of `compress`, and the cost of importing it."""

import inspect
import pkgutil
import subprocess
import sys
from importlib.metadata import version

import pytest

import compress

PUBLIC = [
    "Budget", "Bundle", "CheckpointOptions", "ColumnOptions", "CompressError", "DataOptions", "DeviceOptions",
    "DeviceSettingOptions", "Distillation", "GoalOptions", "Int8Options", "LengthOptions", "MeasureOptions",
    "Objective", "PruneOptions", "Recipe", "Report", "RunOptions", "SettingOptions", "Shape", "Signals", "StudentSpec",
    "StudyOptions", "Task", "TaskData", "Term", "bench", "build", "demo", "distill", "doctor",
    "export", "forecast", "forecast_labelling", "forecast_pretraining", "forecast_quantization", "forecast_search",
    "forecast_trimming", "gate", "inspect", "label", "load_task", "pretrain", "prune", "push", "quantize",
    "reads", "search", "trim",
]  # fmt: skip


def test_public_names() -> None:
    assert compress.__all__ == PUBLIC
    assert dir(compress) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_name_is_documented(name: str) -> None:
    thing = getattr(compress, name)
    assert thing.__name__ == name
    doc = vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__  # not a base class's
    assert doc
    assert not doc.startswith(f"{name}("), "a dataclass without a docstring of its own shows its signature"
    assert thing.__module__.startswith("compress."), "a name of ours, not one that was imported"


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'compress' has no attribute 'Destillation'"):
        _ = compress.Destillation  # type: ignore[attr-defined]


def test_version() -> None:
    assert compress.__version__ == version("compress-kit")


def test_importing_compress_imports_no_dependency() -> None:
    code = (
        "import sys; before = set(sys.modules); import compress; "
        "new = {name.partition('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names); "
        "sys.exit(str(new) if new != {'compress'} else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_module_shadows_a_public_name() -> None:
    """Python sets an imported module as an attribute of its package: `compress.search` would become a module."""
    assert {module.name for module in pkgutil.iter_modules(compress.__path__)} & set(PUBLIC) == set()
