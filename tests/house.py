"""Measure the structure of `compress/`: its size, density, decisions, switches, names and import circles.

`python -m tests.house` prints the figures; with `--list`, the places behind them.
"""

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KINDS = frozenset(
    ("classification", "multilabel", "regression", "qa", "tagging", "embedding", "ranking", "causal", "seq2seq")
)
FAMILIES = frozenset(
    (
        *("bert", "roberta", "xlm-roberta", "distilbert", "electra", "ernie", "deberta", "deberta-v2", "albert"),
        *("mobilebert", "ib-bert", "t5", "gpt2", "modernbert", "llama", "mistral", "qwen2", "qwen3", "xlnet", "xlm"),
        *("mpnet", "camembert", "static-embedding"),
    )
)
COUNTED = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)


@dataclass
class Module:
    """One file of the package."""

    name: str
    place: str
    text: str
    tree: ast.Module = field(init=False)

    def __post_init__(self) -> None:
        self.tree = ast.parse(self.text)

    def at(self, node: ast.AST) -> str:
        return f"{self.place}:{getattr(node, 'lineno', 0)}"

    @cached_property
    def token_lines(self) -> list[int]:
        """Return the line of each token, without comments and docstrings."""
        prose: set[int] = set()
        for node in self.nodes:
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                prose |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return [token.start[0] for token in tokens if token.type in COUNTED and token.start[0] not in prose]

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))


@dataclass(frozen=True)
class House:
    """All files of a package, and what is counted in them; each list holds a place for each."""

    modules: tuple[Module, ...]

    @classmethod
    def read(cls, root: Path = ROOT) -> "House":
        modules = []
        for path in sorted((root / "compress").rglob("*.py")):
            place = path.relative_to(root)
            name = ".".join(place.with_suffix("").parts).removesuffix(".__init__")
            modules.append(Module(name, place.as_posix(), path.read_text(encoding="utf-8")))
        return cls(tuple(modules))

    def nodes(self) -> Iterator[tuple[Module, ast.AST]]:
        for module in self.modules:
            for node in module.nodes:
                yield module, node

    @property
    def tokens(self) -> int:
        return sum(len(module.token_lines) for module in self.modules)

    @property
    def lines_of_code(self) -> int:
        return sum(len(set(module.token_lines)) for module in self.modules)

    @property
    def decisions(self) -> int:
        return sum(_count_decisions(node) for _, node in self.nodes())

    def packed(self) -> list[str]:
        """List the assignments of several values to several names."""
        return [
            module.at(node)
            for module, node in self.nodes()
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Tuple)
            and isinstance(node.value, ast.Tuple | ast.GeneratorExp)
        ]

    def skipped(self) -> list[str]:
        """List the files for each statement that the formatter leaves alone."""
        return [module.place for module in self.modules for _ in range(module.text.count("fmt: skip"))]

    def kinds(self) -> list[str]:
        """List the comparisons with a kind of task outside its home."""
        return [
            module.at(node.pattern if isinstance(node, ast.match_case) else node)
            for module, node in self.nodes()
            if not module.place.startswith("compress/tasks/")
            and _texts(node) & KINDS
            and (isinstance(node, ast.match_case) or "kind" in ast.unparse(node))
        ]

    def families(self) -> list[str]:
        """List the comparisons with a family of models, or a list of families, outside its home."""
        return [
            module.at(node)
            for module, node in self.nodes()
            if not module.place.startswith(("compress/families/", "compress/papers/"))
            and isinstance(node, ast.Compare)
            and (_texts(node) & FAMILIES or _compares_list(node))
        ]

    def crowded(self, most: int = 10) -> list[str]:
        """List the functions with more parameters."""
        return [
            f"{module.at(node)} {node.name}"
            for module, node in self.nodes()
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs) > most
        ]

    def names(self) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
        """Return the types and the constants of modules that are defined in several places."""
        types = defaultdict[str, list[str]](list)
        constants = defaultdict[str, list[str]](list)
        for module, node in self.nodes():
            if isinstance(node, ast.ClassDef):
                types[node.name].append(module.at(node))
        for module in self.modules:
            for name, place in _assigned(module):
                if name.isupper():
                    constants[name].append(place)
                elif name[:1].isupper():
                    types[name].append(place)
        return _several(types), _several(constants)

    def circles(self) -> list[list[str]]:
        """List the groups of modules that import each other, inside functions and for type checks too."""
        imports = {module.name: _imports(module, {each.name for each in self.modules}) for module in self.modules}
        reached = {name: _reach(name, imports) for name in imports}
        groups = {
            frozenset((name, *(other for other in reached[name] if name in reached[other])))
            for name in imports
            if name in reached[name]
        }
        return sorted(sorted(group) for group in groups)


def _count_decisions(node: ast.AST) -> int:
    match node:
        case ast.If() | ast.IfExp() | ast.For() | ast.While() | ast.ExceptHandler() | ast.match_case():
            return 1
        case ast.BoolOp():
            return len(node.values) - 1
        case ast.comprehension():
            return len(node.ifs)
    return 0


def _texts(node: ast.AST) -> set[str]:
    """Return the texts that a comparison, or a case of a match, compares with."""
    if isinstance(node, ast.match_case):
        compared: ast.AST = node.pattern
    elif isinstance(node, ast.Compare):
        compared = node
    else:
        return set()
    return {each.value for each in ast.walk(compared) if isinstance(each, ast.Constant) and isinstance(each.value, str)}


def _compares_list(node: ast.Compare) -> bool:
    names = [each for each in ast.walk(node) if isinstance(each, ast.Name) and each.id.lstrip("_").isupper()]
    return bool(names) and re.search("model_type|family", ast.unparse(node)) is not None


def _assigned(module: Module) -> Iterator[tuple[str, str]]:
    for statement in module.tree.body:
        targets: list[ast.expr] = []
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(each, ast.Name) and not each.id.startswith("__"):
                    yield each.id, module.at(statement)


def _several(places: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def _imports(module: Module, known: set[str]) -> set[str]:
    found: set[str] = set()
    for node in module.nodes:
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names if each.name in known}
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").startswith("compress"):
            for each in node.names:
                whole = f"{node.module}.{each.name}"
                if whole in known:
                    found.add(whole)
                elif node.module != "compress":
                    found.add(str(node.module))
    return found - {module.name}


def _reach(name: str, imports: dict[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = list(imports[name])
    while waiting:
        other = waiting.pop()
        if other in imports and other not in reached:
            reached.add(other)
            waiting += imports[other]
    return reached


def measure(house: House) -> dict[str, float]:
    """Return every figure that has a ceiling."""
    types, constants = house.names()
    circles = house.circles()
    kinds = house.kinds()
    families = house.families()
    return {
        "tokens": house.tokens,
        "tokens a line": round(house.tokens / house.lines_of_code, 2),
        "packed assignments": len(house.packed()),
        "decisions per 1,000 lines": round(1000 * house.decisions / house.lines_of_code),
        "fmt: skip": len(house.skipped()),
        "comparisons with a kind": len(kinds),
        "files that compare a kind": len({place.partition(":")[0] for place in kinds}),
        "comparisons with a family": len(families),
        "files that compare a family": len({place.partition(":")[0] for place in families}),
        "types of several meanings": len(types),
        "constants of several meanings": len(constants),
        "circles": len(circles),
        "files in circles": sum(map(len, circles)),
        "functions of more than 10 parameters": len(house.crowded()),
    }


def main() -> None:
    house = House.read()
    for name, value in measure(house).items():
        print(f"{name:40} {value:,}")
    if "--list" not in sys.argv:
        return
    types, constants = house.names()
    listed = {
        "kind": house.kinds(),
        "family": house.families(),
        "packed": house.packed(),
        "parameters": house.crowded(),
        "circle": [" ".join(circle) for circle in house.circles()],
        "type": [f"{name}: {', '.join(places)}" for name, places in types.items()],
        "constant": [f"{name}: {', '.join(places)}" for name, places in constants.items()],
    }
    for name, places in listed.items():
        for place in places:
            print(f"{name}: {place}")


if __name__ == "__main__":
    main()
