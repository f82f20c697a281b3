"""A line of a recipe that names a function by its address, with options: `{by: bert.mask, rate: 0.15}`.

`paper.function` is that function, or class, of `compress/papers/paper.py`; a dotted path leads to your own. Options are
its keyword-only parameters. This module imports neither torch nor transformers.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

from compress.errors import ObjectiveError, RecipeError, did_you_mean


@dataclass(frozen=True)
class Call:
    by: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """The line of YAML."""
        return {"by": self.by, **self.options}

    def __call__(self, *args: Any, **given: Any) -> Any:
        return find(self.by)(*args, **self.options, **given)


def parse(line: object) -> Call:
    """`bert.mask` or `{by: bert.mask, rate: 0.15}` -> Call. Raises ValueError."""
    if isinstance(line, Call):
        return line
    if isinstance(line, str):
        return Call(line)
    if not isinstance(line, Mapping) or not isinstance(line.get("by"), str):
        raise ValueError(f"expected `paper.function` or `{{by: paper.function, option: value}}`, found {line!r}")
    return Call(line["by"], {str(key): value for key, value in line.items() if key != "by"})


def find(name: str, *, called: str = "function", mark: str | None = None) -> Any:
    """What `paper.function` or a dotted path names. Raises ObjectiveError when there is no such thing.

    Errors speak of a `called`; of a paper's functions only those with the attribute `mark` count.
    """
    module_name, _, function = name.rpartition(".")
    ours = "." not in module_name
    if ours:
        import compress.papers

        papers = [module.name for module in iter_modules(compress.papers.__path__) if module.name != "reading"]
        if module_name not in papers:
            hint = did_you_mean(module_name, papers)
            raise ObjectiveError(f"no {called} {name!r}: no paper {module_name!r}.{hint} Your own: a dotted path")
    try:
        module = import_module(f"compress.papers.{module_name}" if ours else module_name)
    except ModuleNotFoundError as error:
        raise ObjectiveError(f"no {called} {name!r}: cannot import {module_name!r} ({error})") from error
    found = getattr(module, function, None)
    if found is None or (ours and not _named(found, mark)):
        known = [f"{module_name}.{each}" for each, value in vars(module).items() if _named(value, mark)]
        raise ObjectiveError(f"no {called} {name!r}.{did_you_mean(name, known)}")
    return found


def options(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Its keyword-only parameters."""
    parameters = inspect.signature(function).parameters.values()
    return {each.name: each for each in parameters if each.kind is each.KEYWORD_ONLY}


def check(call: Call, where: str, *, given: Iterable[str] = ()) -> list[str]:
    """Every problem of a line that shows without running it; `given` are the options that the frame fills in."""
    try:
        function = find(call.by)
    except ObjectiveError as error:
        return [f"{where}: {error}"]
    known = {name: each for name, each in options(function).items() if name not in given}
    problems = [
        f"{where}: {call.by} has no option {name!r}.{did_you_mean(name, known)}"
        for name in call.options
        if name not in known
    ]
    for name, each in known.items():
        if name not in call.options:
            if each.default is each.empty:
                problems.append(f"{where}: {call.by} needs the option {name!r}")
        elif message := _unfit(call.options[name], each.annotation):
            problems.append(f"{where}: {call.by}: {name}: {message}, found {call.options[name]!r}")
    return problems


def checked(call: Call, where: str, *, given: Iterable[str] = ()) -> Call:
    """`call` itself. Raises RecipeError."""
    problems = check(call, where, given=given)
    if problems:
        raise RecipeError(problems)
    return call


def _unfit(value: Any, annotation: Any) -> str:
    """Why `value` is not of this type; empty when it is, or when the annotation is not one that can be checked."""
    if annotation is inspect.Parameter.empty or isinstance(annotation, str):
        return ""
    try:
        TypeAdapter(annotation).validate_python(value)
    except PydanticSchemaGenerationError:
        return ""
    except ValidationError as error:
        return str(error.errors()[0]["msg"])
    return ""


def _named(value: Any, mark: str | None) -> bool:
    """Whether a paper's attribute can be asked for: a loss when losses are, else any function or class."""
    if mark is not None:
        return hasattr(value, mark)
    return inspect.isfunction(value) or inspect.isclass(value)
