"""Find the kinds of task by name: each is a module of `compress.tasks`, or one of the
user's own, by its dotted path.

Only the standard library is imported, and a kind's module when it is asked for. A
user's module is not imported here: the user has imported it, or a command does where
that is allowed (`config.user_code`).
"""

import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Annotated, Any

from compress.errors import DataError, did_you_mean
from compress.values import TextCheck, choice

IMPORT_OWN: ContextVar[Callable[[str], ModuleType] | None] = ContextVar(
    "import_own", default=None
)
"""The function of a running command that imports a user's module; None if user code may
not run."""


def names() -> tuple[str, ...]:
    """List the kinds of task, in alphabetical order."""
    folders = import_module("compress.tasks").__path__
    return tuple(sorted(module.name for module in iter_modules(folders)))


def is_own(kind: str) -> bool:
    """Check whether a name is the dotted path of a module, `my_package.my_kind`."""
    parts = kind.split(".")
    return len(parts) > 1 and all(map(str.isidentifier, parts))


def is_kind(name: str) -> bool:
    """Check whether a name is one of our kinds, or may be one of the user's."""
    return name in names() or is_own(name)


def find(kind: str) -> Any:
    """Return the class of a kind of task, a subclass of `data.task.Task`. Raises
    DataError if there is no such kind, or if it is the user's own and may not run."""
    if kind in names():
        module = import_module(f"compress.tasks.{kind}")
    elif is_own(kind):
        module = _find_own(kind)
    else:
        raise DataError(f"no kind of task {kind!r}.{did_you_mean(kind, names())}")
    for each in vars(module).values():
        if isinstance(each, type) and getattr(each, "kind", None) == kind:
            return each
    raise DataError(
        f"the kind of task {kind!r}: its module has no class of this kind; expected a "
        "subclass of compress.data.task.Task with `kind = __name__`"
    )


def check_metric(metric: str | None, kind: str | None) -> None:
    """Raise DataError for a metric that does not score this kind of task, or any of
    ours if the kind is not named. A user's own kind checks it later."""
    if metric is None or (kind is not None and is_own(kind)):
        return
    if kind is not None:
        find(kind).choose_metric(metric)
        return
    known = [each for name in names() for each in find(name).metrics]
    if metric not in known:
        raise DataError(f"no metric {metric!r}.{did_you_mean(metric, known)}")


def _find_own(kind: str) -> ModuleType:
    """Return the user's module if it is imported, or may be."""
    if kind in sys.modules:
        return sys.modules[kind]
    if (load := IMPORT_OWN.get()) is not None:
        return load(kind)
    raise DataError(
        f"the kind of task {kind!r} is code of your own, which runs only if you name "
        "the folder that holds its package: --allow-code FOLDER; in Python import "
        f"{kind} first, or RunOptions(allow_code=FOLDER). Kinds that need no code: "
        f"{', '.join(names())}"
    )


@dataclass(frozen=True, eq=False, repr=False)
class KindCheck(TextCheck):
    """The name of a kind of task."""

    expected: str = "a kind of task"

    def take(self, value: Any, name: str) -> Any:
        if self.fits(value) and is_own(value):
            return value
        return choice(names()).take(value, name)


Kind = Annotated[str, KindCheck()]
"""A kind of task, by name."""
