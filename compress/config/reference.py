"""Resolve the functions that a recipe names by address, with options: `{by: bert.mask,
rate: 0.15}`.

`paper.function` is a function or class of `compress/papers/paper.py`. `module.function`
is the user's own code, which runs only with permission (`user_code`). Options are
keyword-only parameters, or the fields of an `OptionGroup` that such a parameter takes.
This module imports neither torch nor transformers.
"""

import ast
import inspect
import keyword
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

from compress.errors import ObjectiveError, did_you_mean
from compress.values import plain_number

Function = Callable[..., Any]


class OptionGroup:
    """Base class of frozen, keyword-only dataclasses that group options of a function.
    In a recipe, their fields are options like any other."""


@dataclass(frozen=True)
class Call:
    """A function by its address, and its options. code: the user's own function, once
    it has been imported."""

    by: str
    options: Mapping[str, Any] = field(default_factory=dict)
    code: Function | None = field(default=None, compare=False, repr=False)

    @property
    def function(self) -> Function:
        """Return the function or class to call. Raises ObjectiveError if it does not
        exist."""
        return self.code or find(self.by)

    @property
    def unresolved(self) -> bool:
        """Return True if this is the user's own function and has not been imported
        yet."""
        return self.code is None and is_user_code(self.by)

    @property
    def name(self) -> str:
        return self.by

    def plain(self) -> dict[str, Any]:
        """Return the line as it stands in YAML."""
        return {"by": self.by, **self.options}

    def __call__(self, *args: Any, **given: Any) -> Any:
        """Call the function with these options, each in its option group if it has
        one."""
        options = dict(self.options)
        for parameter, group in option_groups(self.function).items():
            names = inspect.signature(group).parameters.keys() & options.keys()
            given[parameter] = group(**{name: options.pop(name) for name in names})
        return self.function(*args, **options, **given)


def parse(line: object) -> Call:
    """Parse `bert.mask` or `{by: bert.mask, rate: 0.15}`. Raises ValueError."""
    if isinstance(line, Call):
        return line
    if isinstance(line, str):
        return Call(check_address(line))
    if not isinstance(line, Mapping) or not isinstance(line.get("by"), str):
        raise ValueError(
            "expected `paper.function` or `{by: paper.function, option: value}`, found "
            f"{line!r}"
        )
    return Call(
        check_address(line["by"]),
        {str(key): value for key, value in line.items() if key != "by"},
    )


def check_address(name: str) -> str:
    """Return `name`. Raises ValueError unless it reads as `paper.function` or
    `module.function`."""
    parts = name.split(".")
    words = all(part.isidentifier() and not keyword.iskeyword(part) for part in parts)
    if not words or len(parts) < 2 or any(part.startswith("__") for part in parts):
        raise ValueError(
            f"{name!r} names no function: expected `paper.function`, or "
            "`module.function` of your own"
        )
    return name


def papers() -> list[str]:
    """List the paper modules, whose functions a recipe may name."""
    import compress.papers

    return [
        module.name
        for module in iter_modules(compress.papers.__path__)
        if module.name != "reading"
    ]


def is_user_code(name: str) -> bool:
    """Return True if an address points to the user's own code, not to a paper."""
    return name.rpartition(".")[0] not in papers()


def find(name: str, *, called: str = "function", mark: str | None = None) -> Any:
    """Import what `paper.function` names; nothing but papers is ever imported. Raises
    ObjectiveError.

    called   the word for it in error messages
    mark     the attribute that a function must have to count, such as `reading` for
             losses
    """
    paper, _, function = name.rpartition(".")
    if is_user_code(name):
        raise ObjectiveError(f"no {called} {describe_unknown(name)}")

    def is_nameable(value: Any) -> bool:
        if mark is not None:
            return hasattr(value, mark)
        # not what a paper imports from libraries
        ours = str(getattr(value, "__module__", "")).startswith("compress.")
        return ours and (inspect.isfunction(value) or inspect.isclass(value))

    members = vars(import_module(f"compress.papers.{paper}"))
    if function not in members or not is_nameable(members[function]):
        known = [
            f"{paper}.{name}" for name, value in members.items() if is_nameable(value)
        ]
        raise ObjectiveError(f"no {called} {name!r}.{did_you_mean(name, known)}")
    return members[function]


def read_signal(loss: str) -> str | None:
    """Return the signal that a paper's loss compares with the teacher's, as its source
    declares it with `reads`, without importing it and torch; or None if there is
    none."""
    paper, _, function = loss.rpartition(".")
    spec = None if is_user_code(loss) else find_spec(f"compress.papers.{paper}")
    if spec is None or spec.origin is None:
        return None
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.FunctionDef) or node.name != function:
            continue
        for mark in node.decorator_list:
            match mark:
                case ast.Call(
                    func=ast.Name(id="reads"),
                    args=[ast.Constant(value=str(signal))],
                    keywords=keywords,
                ) if all(each.arg != "against" for each in keywords):
                    return signal
    return None


def describe_unknown(name: str) -> str:
    """Describe an address that belongs to no paper, and how to allow the user's own
    code."""
    paper = name.rpartition(".")[0]
    hint = did_you_mean(paper, papers()) if "." not in paper else ""
    return (
        f"{name!r}: no paper {paper!r}.{hint} Your own code runs only where you name "
        "its folder: --allow-code FOLDER; in Python allow_code=FOLDER, or "
        "Term(function)"
    )


def options(function: Function) -> dict[str, inspect.Parameter]:
    """Return the keyword-only parameters of a function, with each option group replaced
    by its fields."""
    parameters = inspect.signature(function).parameters.values()
    found = {each.name: each for each in parameters if each.kind is each.KEYWORD_ONLY}
    for name, group in option_groups(function).items():
        del found[name]
        found |= options(group)
    return found


def option_groups(function: Function) -> dict[str, type[OptionGroup]]:
    """Return the option groups that a function takes, by the names of the
    parameters."""
    parameters = inspect.signature(function).parameters.values()
    return {
        each.name: each.annotation
        for each in parameters
        if inspect.isclass(each.annotation) and issubclass(each.annotation, OptionGroup)
    }


def check(call: Call, where: str, *, given: Iterable[str] = ()) -> list[str]:
    """List every problem of a call that can be found without running it.

    where   the place of the call in the recipe, for the messages
    given   options that the caller fills in
    """
    try:
        function = call.function
        known = {
            name: each for name, each in options(function).items() if name not in given
        }
    except ObjectiveError as error:
        return [f"{where}: {error}"]
    except (TypeError, ValueError):
        # raised by inspect for what is not callable, or written in C
        return [f"{where}: {call.by}: expected a function written in Python"]
    return [
        f"{where}: {call.by}{problem}" for problem in check_options(call.options, known)
    ]


def check_options(
    given: Mapping[str, Any],
    known: Mapping[str, inspect.Parameter],
    more: Iterable[str] = (),
) -> list[str]:
    """List what is wrong with the options of a line: unknown names, missing ones,
    values of a wrong type.

    more   other settings that such a line may have, offered when a name is misspelt
    """
    problems = [
        f" has no option {name!r}.{did_you_mean(name, [*known, *more])}"
        for name in given
        if name not in known
    ]
    for name, parameter in known.items():
        if name not in given:
            if parameter.default is parameter.empty:
                problems.append(f" needs the option {name!r}")
            continue
        if parameter.annotation is parameter.empty or isinstance(
            parameter.annotation, str
        ):
            continue
        try:
            adapter = TypeAdapter(parameter.annotation)
            value = plain_number(given[name])
            if isinstance(adapter.validate_python(value), int | float):
                # what only reads as a number, such as "0.15", remains a text
                adapter.validate_python(value, strict=True)
        except PydanticSchemaGenerationError:
            # an annotation that pydantic cannot check
            continue
        except ValidationError as error:
            problems.append(
                f": {name}: {error.errors()[0]['msg']}, found {given[name]!r}"
            )
    return problems
