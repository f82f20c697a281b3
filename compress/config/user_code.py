"""Import the user's own functions that a recipe names, and their own kinds of task:
last, and only from where the user allows it.

A recipe that names `module.function` is a program, and so is a kind of task that is a
user's module. None of it runs until everything else about a command has been checked,
and then only modules under the folder, or of the installed package, that the user
named. This module imports neither torch nor transformers.
"""

import ast
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

from pydantic import BaseModel

from compress import io, kinds
from compress.config.reference import Call, Function, describe_unknown
from compress.config.term import Term
from compress.errors import RecipeError, did_you_mean

Settings = TypeVar("Settings", bound=BaseModel)


def check(settings: BaseModel, allowed: str | Path | None) -> None:
    """Raise RecipeError if a recipe names the user's own code without permission;
    nothing is imported."""
    if allowed is not None:
        _find_root(allowed)
    elif lines := dict(_find_unresolved(settings)):
        raise RecipeError(
            [
                f"{_name(settings)}: {where}: no "
                f"{'loss' if isinstance(line, Term) else 'function'} "
                f"{describe_unknown(line.name)}"
                for where, line in lines.items()
            ]
        )


def load(settings: Settings, allowed: str | Path | None) -> Settings:
    """Import the user's own functions that a recipe, or a space, names; return it with
    the functions in its lines.

    allowed   a folder whose modules may run, or the name of an installed package; None:
              nothing may run

    Raises RecipeError with every problem: code that is not allowed, does not exist, or
    fails when it is imported."""
    check(settings, allowed)
    lines = dict(_find_unresolved(settings))
    if allowed is None or not lines:
        return settings
    root = _open_root(allowed)
    functions = dict[str, Function]()
    problems = list[str]()
    for where, line in lines.items():
        try:
            functions[line.name] = _import(line.name, root)
        except RecipeError as error:
            problems += [
                f"{_name(settings)}: {where}: {problem}" for problem in error.problems
            ]
    if problems:
        raise RecipeError(problems)
    resolved: Settings = _with_functions(settings, functions)
    return resolved


@contextmanager
def allow_kinds(allowed: str | Path) -> Iterator[None]:
    """Let kinds of task be imported from this folder, or installed package, when they
    are first needed."""
    load = partial(_import_module, root=_open_root(allowed))
    before = kinds.IMPORT_OWN.set(load)
    try:
        yield
    finally:
        kinds.IMPORT_OWN.reset(before)


def load_kind(kind: str | None, allowed: str | Path | None) -> None:
    """Import the module of a kind of task that is the user's own. Raises a
    CompressError as `load` does."""
    if kind is not None and allowed is not None:
        with allow_kinds(allowed):
            kinds.find(kind)


def digests(settings: BaseModel, kind: str | None = None) -> dict[str, str] | None:
    """Return a digest of the file of each of the user's functions in a recipe, and of
    their kind of task, with the files that it imports from the same place; or None if
    there are none."""
    lines: dict[str, Function] = {
        line.name: line.code
        for _, line in _find_lines(settings)
        if line.code is not None
    }
    if kind is not None and kinds.is_own(kind):
        lines[kind] = kinds.find(kind)
    return {
        name: io.hash_files(_list_sources(code)) for name, code in sorted(lines.items())
    } or None


def _list_sources(code: Function) -> list[Path]:
    """List the file of a function, and those under the same folder or package that it
    imports, directly or through others."""
    found = list[Path]()
    waiting = [(file, code.__module__) for file in io.source_files(code)]
    while waiting:
        file, module = waiting.pop()
        if file in found:
            continue
        found.append(file)
        if file.stem == "__init__":
            module += ".__init__"
        root = file.parents[module.count(".")]
        tree = ast.parse(file.read_bytes())
        installed = root.name in ("site-packages", "dist-packages")
        for name in _list_imports(tree, module):
            if installed and name.partition(".")[0] != module.partition(".")[0]:
                continue  # another package
            place = root.joinpath(*name.split("."))
            for other in (place.with_suffix(".py"), place / "__init__.py"):
                if other.is_file():
                    waiting.append((other, name))
    return sorted(found)


def _list_imports(tree: ast.Module, module: str) -> Iterator[str]:
    """Yield the modules that a module may import, by their whole names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: -node.level] if node.level else []
            name = ".".join([*parents, *filter(None, [node.module])])
            yield name
            yield from (f"{name}.{each.name}".lstrip(".") for each in node.names)


def _import(address: str, root: Path) -> Function:
    module, _, name = address.rpartition(".")
    function = getattr(_import_module(module, root), name, None)
    if not callable(function):
        known = [
            each
            for each, value in vars(sys.modules[module]).items()
            if callable(value) and each[0] != "_"
        ]
        raise RecipeError(
            [
                f"{address!r}: {module} has no function "
                f"{name!r}.{did_you_mean(name, known)}"
            ]
        )
    return cast("Function", function)


def _import_module(module: str, root: Path) -> ModuleType:
    _check_place(module, root)
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        # a module may raise anything, and must not end the process
        problem = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise RecipeError(
            [f"importing {module} failed: {problem}{_describe_line(error, root)}"]
        ) from error


def _open_root(allowed: str | Path) -> Path:
    """Return the folder whose modules may run, from which Python then imports them."""
    root = _find_root(allowed)
    if Path(allowed).expanduser().is_dir() and str(root) not in sys.path:
        sys.path.append(str(root))  # at the end, where it shadows nothing
    return root


def _check_place(module: str, root: Path) -> None:
    """Raise RecipeError unless this module would be imported from under `root`. Nothing
    runs to find that out."""
    top = module.partition(".")[0]
    importlib.invalidate_caches()
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # an imported module without a __spec__
        spec = None
    if spec is None:
        known = [
            each.stem
            for each in root.iterdir()
            if each.suffix == ".py" or each.is_dir()
        ]
        raise RecipeError(
            [
                f"{module!r}: there is no module {top!r} in "
                f"{root}.{did_you_mean(top, known)}"
            ]
        )
    places = (
        [spec.origin]
        if spec.has_location and spec.origin
        else list(spec.submodule_search_locations or [])
    )
    if not places or not all(
        Path(place).parent.resolve().is_relative_to(root) for place in places
    ):
        where = places[0] if places else "Python itself"
        raise RecipeError(
            [
                f"{module!r}: is not in {root}, which --allow-code names, but in "
                f"{where}: rename your module; an installed package is allowed by its "
                f"own name, as in --allow-code {top}"
            ]
        )


def _find_root(allowed: str | Path) -> Path:
    """Return the folder whose modules may run. Raises RecipeError if it does not
    exist."""
    folder = Path(allowed).expanduser()
    if folder.is_dir():
        return folder.resolve()
    package = str(allowed)
    if package.isidentifier() and package not in sys.stdlib_module_names:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            return Path(next(iter(spec.submodule_search_locations))).resolve()
    raise RecipeError(
        [
            f"--allow-code {allowed}: there is no such folder; expected the folder of "
            "your modules"
        ]
    )


def _describe_line(error: BaseException, root: Path) -> str:
    """Describe where in the user's code an error was raised."""
    if isinstance(error, SyntaxError):
        return f" ({error.filename}, line {error.lineno})"
    frames = [
        each
        for each in traceback.extract_tb(error.__traceback__)
        if Path(each.filename).is_relative_to(root)
    ]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def _find_unresolved(settings: object) -> Iterator[tuple[str, Call | Term]]:
    """Yield the lines that name user code that has not been imported."""
    return ((where, line) for where, line in _find_lines(settings) if line.unresolved)


def _find_lines(value: object, where: str = "") -> Iterator[tuple[str, Call | Term]]:
    """Yield every line that names a function, with its place."""
    if isinstance(value, Call | Term):
        yield where, value
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _find_lines(getattr(value, name), f"{where}.{name}".lstrip("."))
    elif isinstance(value, tuple):
        for at, each in enumerate(value):
            yield from _find_lines(each, f"{where}[{at}]")


def _with_functions(value: Any, functions: dict[str, Function]) -> Any:
    """Return the settings with the functions that their lines name."""
    if isinstance(value, Call | Term):
        return replace(value, code=functions.get(value.name, value.code))
    if isinstance(value, tuple):
        return tuple(_with_functions(each, functions) for each in value)
    if isinstance(value, BaseModel):
        inner = {name: getattr(value, name) for name in type(value).model_fields}
        changed = {
            name: _with_functions(each, functions)
            for name, each in inner.items()
            if any(_find_unresolved(each))
        }
        return value.model_copy(update=changed)
    return value


def _name(settings: BaseModel) -> str:
    return str(getattr(settings, "name", type(settings).__name__))
