"""Every package imports only packages below it, without cycles, and no function has many parameters."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import compress
from tests.house import House

ROOT = Path(compress.__file__).parent
LAYERS = (
    "errors arrays tensors values arguments io outputs terminal progress console provenance kinds machine",
    "records", "config", "data",
    "families", "slicing", "models", "evaluation", "tasks", "training", "exporters", "benchmark",
    "quantization trimming", "reporting", "latency", "tuning", "pruning", "prompting", "jobs", "teachers", "nas",
    "papers", "commands", "cli", "__main__",
)  # fmt: skip
"""From the bottom up. Packages of one entry do not import each other, except those of the first."""
RANK = {package: height for height, layer in enumerate(LAYERS) for package in layer.split()}
PLUGINS = {"config.reference": "papers"}
"""The only module that imports papers, by name."""


def modules() -> dict[str, Path]:
    """Return every module by its name below `compress`."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").rstrip(".")
        found[name] = path
    return found


MODULES = modules()


@cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """Return the modules of ours that a file imports, and whether only inside a function or for type checks."""
    return list(_imports(ast.parse(path.read_text(encoding="utf-8")), lazy=False))


def _imports(node: ast.AST, *, lazy: bool) -> Iterator[tuple[str, bool]]:
    names = []
    if isinstance(node, ast.Import):
        names = [each.name for each in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module:
        names = [f"{node.module}.{each.name}" for each in node.names]
    for name in names:
        package, _, below = name.partition(".")
        if package == "compress" and below != "__version__":
            while below and below not in MODULES:
                below = below.rpartition(".")[0]
            yield below, lazy
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            hidden = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or (
                isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING"
            )
            yield from _imports(child, lazy=lazy or hidden)


def test_every_package_has_a_layer() -> None:
    assert {name.partition(".")[0] for name in MODULES if name} == set(RANK)


def test_no_import_from_above() -> None:
    upwards = [
        f"{name} imports {target}"
        for name, path in MODULES.items() if name
        for target, _ in imports(path)
        if target and RANK[target.partition(".")[0]] > RANK[name.partition(".")[0]]
        and PLUGINS.get(name) != target
    ]  # fmt: skip
    assert upwards == []


def test_no_import_within_a_layer() -> None:
    beside = [
        f"{name} imports {target}"
        for name, path in MODULES.items() if name
        for target, _ in imports(path)
        if RANK.get(target.partition(".")[0]) == RANK[name.partition(".")[0]] > 0
        and target.partition(".")[0] != name.partition(".")[0]
    ]  # fmt: skip
    assert beside == []


def test_no_import_cycle() -> None:
    """Imports inside functions and for type checks count."""
    assert House.read().circles() == []


def test_one_module_loads_configs_tokenizers_and_models() -> None:
    calls = {
        name
        for name, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "from_pretrained"
    }
    assert calls == {"models.loader"}


MOST_PARAMETERS = 12


def test_no_function_has_more_than_12_parameters() -> None:
    long = {
        f"{name}.{scope}{function.name}"
        for name, path in MODULES.items()
        for scope, function in _functions(ast.parse(path.read_text(encoding="utf-8")))
        if _count(function.args) > MOST_PARAMETERS
    }
    assert not long


def _functions(node: ast.AST, scope: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield scope, child
        inner = isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        yield from _functions(child, f"{scope}{child.name}." if inner else scope)


def _count(arguments: ast.arguments) -> int:
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return sum(each.arg not in ("self", "cls") for each in named) + bool(arguments.vararg) + bool(arguments.kwarg)
