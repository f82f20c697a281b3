"""The user's own functions that a recipe names: imported last, and only from where the user allows it.

A recipe that names `module.function` is a program. Nothing of it runs until everything else about a command has been
checked, and then only modules under the folder, or of the installed package, that the user has named. This module
imports neither torch nor transformers.
"""

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from compress import io
from compress.config import reference as calling
from compress.config.reference import Call
from compress.config.term import Term
from compress.errors import RecipeError, did_you_mean

Settings = TypeVar("Settings", bound=BaseModel)


def check(settings: BaseModel, allowed: str | Path | None) -> None:
    """Raise RecipeError where a recipe names code of the user's that is not allowed; nothing is imported."""
    lines = dict(_own(settings, ""))
    if allowed is not None:
        _root(allowed)
    elif lines:
        raise RecipeError([f"{_name(settings)}: {where}: no {_kind(line)} {calling.unknown(_address(line))}"
                           for where, line in lines.items()])  # fmt: skip


def load(settings: Settings, allowed: str | Path | None) -> Settings:
    """Import the user's own functions that a recipe, or a space, names; return it with them in its lines.

    allowed   a folder whose modules may run, or the name of an installed package; None: no code of the user's may

    Raises RecipeError with every problem: code that is not allowed, not there, or that fails when it is imported.
    """
    check(settings, allowed)
    found, problems = dict[str, Callable[..., Any]](), list[str]()
    for where, line in _own(settings, ""):
        assert allowed is not None, "it was checked"
        root = _root(allowed)
        if Path(allowed).expanduser().is_dir() and str(root) not in sys.path:
            sys.path.append(str(root))  # at the end, where it shadows nothing
        try:
            found[_address(line)] = _import(_address(line), root)
        except RecipeError as error:
            problems += [f"{_name(settings)}: {where}: {problem}" for problem in error.problems]
    if problems:
        raise RecipeError(problems)
    return _with_functions(settings, found) if found else settings


def digests(settings: BaseModel) -> dict[str, str] | None:
    """Return the digest of the file that each own function of a recipe is written in; None where there is none."""
    lines = {_address(line): line.code for _, line in _lines(settings, "") if line.code is not None}
    return {name: io.hash_files(calling.source(code)) for name, code in sorted(lines.items())} or None


def _import(address: str, root: Path) -> Callable[..., Any]:
    module, _, name = address.rpartition(".")
    _check_place(module, root)
    try:
        found = getattr(importlib.import_module(module), name, None)
    except (Exception, SystemExit) as error:  # a module may raise anything, and must not end us with an exit code
        problem = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise RecipeError([f"{address!r}: importing {module} failed: {problem}{_line(error, root)}"]) from error
    if not callable(found):
        known = [each for each, value in vars(sys.modules[module]).items() if callable(value) and each[0] != "_"]
        raise RecipeError([f"{address!r}: {module} has no function {name!r}.{did_you_mean(name, known)}"])
    function: Callable[..., Any] = found
    return function


def _check_place(module: str, root: Path) -> None:
    """Raise RecipeError unless this module would be imported from under `root`; a top module is found without running
    anything."""
    top = module.partition(".")[0]
    importlib.invalidate_caches()
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # a module that is there already and does not say where it came from
        spec = None
    if spec is None:
        known = [each.stem for each in root.iterdir() if each.suffix == ".py" or each.is_dir()]
        raise RecipeError([f"{module!r}: there is no module {top!r} in {root}.{did_you_mean(top, known)}"])
    places = [spec.origin] if spec.has_location and spec.origin else list(spec.submodule_search_locations or [])
    if not places or not all(Path(place).parent.resolve().is_relative_to(root) for place in places):
        where = places[0] if places else "Python itself"
        raise RecipeError(
            [
                f"{module!r}: is not in {root}, which --allow-code names, but in {where}: rename your module; "
                f"an installed package is allowed by its own name, as in --allow-code {top}"
            ]
        )


def _root(allowed: str | Path) -> Path:
    """Return the folder whose modules may run. Raises RecipeError where there is none."""
    folder = Path(allowed).expanduser()
    if folder.is_dir():
        return folder.resolve()
    package = str(allowed)
    if package.isidentifier() and package not in sys.stdlib_module_names:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            return Path(next(iter(spec.submodule_search_locations))).resolve()
    raise RecipeError([f"--allow-code {allowed}: there is no such folder; expected the one that your modules are in"])


def _line(error: BaseException, root: Path) -> str:
    """Say where in the user's code an error came up."""
    if isinstance(error, SyntaxError):
        return f" ({error.filename}, line {error.lineno})"
    frames = [each for each in traceback.extract_tb(error.__traceback__) if Path(each.filename).is_relative_to(root)]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def _own(settings: object, where: str) -> Iterator[tuple[str, Call | Term]]:
    """Yield the lines that name code of the user's which has not been imported."""
    for place, line in _lines(settings, where):
        if line.absent:
            yield place, line


def _lines(value: object, where: str) -> Iterator[tuple[str, Call | Term]]:
    """Yield every line that names a function, with its place."""
    if isinstance(value, Call | Term):
        yield where, value
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _lines(getattr(value, name), f"{where}.{name}".lstrip("."))
    elif isinstance(value, tuple):
        for at, each in enumerate(value):
            yield from _lines(each, f"{where}[{at}]")


def _with_functions(value: Any, code: dict[str, Callable[..., Any]]) -> Any:
    """Return the same settings, their lines with the functions that they name."""
    if isinstance(value, Call | Term):
        return replace(value, code=code.get(_address(value), value.code))
    if isinstance(value, tuple):
        return tuple(_with_functions(each, code) for each in value)
    if isinstance(value, BaseModel):
        inner = {name: getattr(value, name) for name in type(value).model_fields}
        changed = {name: _with_functions(each, code) for name, each in inner.items() if any(_own(each, ""))}
        return value.model_copy(update=changed)
    return value


def _address(line: Call | Term) -> str:
    """Return what a line names; nothing where it holds the function itself."""
    if isinstance(line, Call):
        return line.by
    return line.loss if isinstance(line.loss, str) else ""


def _kind(line: Call | Term) -> str:
    return "loss" if isinstance(line, Term) else "function"


def _name(settings: BaseModel) -> str:
    return str(getattr(settings, "name", type(settings).__name__))
