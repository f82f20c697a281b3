"""A line of a recipe that names a function by its address, with options: `{by: bert.mask, rate: 0.15}`.

`paper.function` is that function, or class, of `compress/papers/paper.py`. `module.function` is your own, which runs
only where you allow it (`user_code`). Options are its keyword-only parameters. This module imports neither torch nor
transformers.
"""

import inspect
import keyword
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

from compress.errors import ObjectiveError, RecipeError, did_you_mean


@dataclass(frozen=True)
class Call:
    """by: the function's address; code: the function itself, where it is the user's own and has been imported."""

    by: str
    options: Mapping[str, Any] = field(default_factory=dict)
    code: Callable[..., Any] | None = field(default=None, compare=False, repr=False)

    @property
    def function(self) -> Callable[..., Any]:
        """Return the function, or class, that is called. Raises ObjectiveError when there is none."""
        return self.code or find(self.by)

    @property
    def absent(self) -> bool:
        """Tell whether this is the user's own function, and has not been imported."""
        return self.code is None and is_own(self.by)

    @property
    def written_in(self) -> list[Path]:
        """List the file of the user's own function, for keys of what it makes; of a paper's the version tells."""
        return [] if self.code is None else source(self.code)

    def plain(self) -> dict[str, Any]:
        """Return the line of YAML."""
        return {"by": self.by, **self.options}

    def __call__(self, *args: Any, **given: Any) -> Any:
        return self.function(*args, **self.options, **given)


def parse(line: object) -> Call:
    """Read `bert.mask` or `{by: bert.mask, rate: 0.15}`. Raises ValueError."""
    if isinstance(line, Call):
        return line
    if isinstance(line, str):
        return Call(address(line))
    if not isinstance(line, Mapping) or not isinstance(line.get("by"), str):
        raise ValueError(f"expected `paper.function` or `{{by: paper.function, option: value}}`, found {line!r}")
    return Call(address(line["by"]), {str(key): value for key, value in line.items() if key != "by"})


def address(name: str) -> str:
    """Return `name`. Raises ValueError where it is no `paper.function` or `module.function` that could be imported."""
    parts = name.split(".")
    words = all(part.isidentifier() and not keyword.iskeyword(part) for part in parts)
    if not words or len(parts) < 2 or any(part.startswith("__") for part in parts):
        raise ValueError(f"{name!r} names no function: expected `paper.function`, or `module.function` of your own")
    return name


def papers() -> list[str]:
    """List the modules of papers, whose functions a recipe may name."""
    import compress.papers

    return [module.name for module in iter_modules(compress.papers.__path__) if module.name != "reading"]


def is_own(name: str) -> bool:
    """Tell whether an address leads to the user's own code, not to a paper."""
    return name.rpartition(".")[0] not in papers()


def find(name: str, *, called: str = "function", mark: str | None = None) -> Any:
    """Return what `paper.function` names; nothing but papers is ever imported. Raises ObjectiveError.

    Errors speak of a `called`; of a paper's functions only those with the attribute `mark` count.
    """
    paper, _, function = name.rpartition(".")
    if is_own(name):
        raise ObjectiveError(f"no {called} {unknown(name)}")
    module = import_module(f"compress.papers.{paper}")
    found = getattr(module, function, None)
    if found is None or not _may_be_named(found, mark):
        known = [f"{paper}.{each}" for each, value in vars(module).items() if _may_be_named(value, mark)]
        raise ObjectiveError(f"no {called} {name!r}.{did_you_mean(name, known)}")
    return found


def unknown(name: str) -> str:
    """Say that an address leads to no paper, and how one's own code is allowed."""
    paper = name.rpartition(".")[0]
    hint = did_you_mean(paper, papers()) if "." not in paper else ""
    return (
        f"{name!r}: no paper {paper!r}.{hint} Your own code runs only where you name its folder: --allow-code FOLDER; "
        "in Python allow_code=FOLDER, or Term(function)"
    )


def source(function: Callable[..., Any]) -> list[Path]:
    """List the file that a function is written in, where there is one."""
    try:
        file = inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:  # an object that is called, or of C
        file = inspect.getsourcefile(type(function)) if type(function).__module__ != "builtins" else None
    return [Path(file)] if file and Path(file).is_file() else []


def options(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return its keyword-only parameters."""
    parameters = inspect.signature(function).parameters.values()
    return {each.name: each for each in parameters if each.kind is each.KEYWORD_ONLY}


def check(call: Call, where: str, *, given: Iterable[str] = ()) -> list[str]:
    """List every problem of a line that shows without running it; `given` are the options that the frame fills in."""
    try:
        function = call.function
        known = {name: each for name, each in options(function).items() if name not in given}
    except ObjectiveError as error:
        return [f"{where}: {error}"]
    except (TypeError, ValueError):  # what inspect says of things that are not called, or are of C
        return [f"{where}: {call.by}: expected a function written in Python"]
    return [f"{where}: {call.by}{problem}" for problem in misfits(call.options, known)]


def misfits(given: Mapping[str, Any], known: Mapping[str, inspect.Parameter], more: Iterable[str] = ()) -> list[str]:
    """List what is wrong with the options of a line: unknown ones, missing ones, values of another type.

    `more` are further settings of such a line, one of which may have been meant.
    """
    problems = [f" has no option {name!r}.{did_you_mean(name, [*known, *more])}" for name in given if name not in known]
    for name, each in known.items():
        if name not in given:
            if each.default is each.empty:
                problems.append(f" needs the option {name!r}")
        elif message := _unfit(given[name], each.annotation):
            problems.append(f": {name}: {message}, found {given[name]!r}")
    return problems


def checked(call: Call, where: str, *, given: Iterable[str] = ()) -> Call:
    """Return `call`. Raises RecipeError with every problem it has."""
    problems = check(call, where, given=given)
    if problems:
        raise RecipeError(problems)
    return call


def _unfit(value: Any, annotation: Any) -> str:
    """Say why `value` is not of this type; nothing where it is, or where the annotation is none that can be checked."""
    if annotation is inspect.Parameter.empty or isinstance(annotation, str):
        return ""
    try:
        TypeAdapter(annotation).validate_python(value)
    except PydanticSchemaGenerationError:
        return ""
    except ValidationError as error:
        return str(error.errors()[0]["msg"])
    return ""


def _may_be_named(value: Any, mark: str | None) -> bool:
    """Tell whether a paper's attribute may be named: a loss where losses are, else any function or class of ours."""
    if mark is not None:
        return hasattr(value, mark)
    ours = str(getattr(value, "__module__", "")).startswith("compress.")  # not what a paper imports from libraries
    return ours and (inspect.isfunction(value) or inspect.isclass(value))
