"""Find the kinds of task by name: each is a module of `compress.tasks`.

Only the standard library is imported, and a kind's module when it is asked for.
"""

from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Annotated, Any

from compress.errors import DataError, did_you_mean
from compress.values import ArgumentCheck, choice


def names() -> tuple[str, ...]:
    """List the kinds of task, in alphabetical order."""
    folders = import_module("compress.tasks").__path__
    return tuple(sorted(module.name for module in iter_modules(folders)))


def find(kind: str) -> Any:
    """Return the class of a kind of task, a subclass of `data.task.Task`. Raises
    DataError if there is no such kind."""
    if kind not in names():
        raise DataError(f"no kind of task {kind!r}.{did_you_mean(kind, names())}")
    module = import_module(f"compress.tasks.{kind}")
    return next(
        each for each in vars(module).values() if getattr(each, "kind", None) == kind
    )


@dataclass(frozen=True, eq=False, repr=False)
class KindCheck(ArgumentCheck):
    """The name of a kind of task."""

    expected: str = "a kind of task"

    def fits(self, value: Any) -> bool:
        return isinstance(value, str)

    def take(self, value: Any, name: str) -> Any:
        return choice(names()).take(value, name)


Kind = Annotated[str, KindCheck()]
"""A kind of task, by name."""
