"""Find recipes, read their YAML, and change it by `--set`. Imports neither torch nor transformers."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from compress.errors import RecipeError, did_you_mean

MOST_BYTES: Final = 64 * 1024
"""The largest settings file that is read; ours have 3 kB."""
MOST_DEPTH: Final = 100
MOST_VALUES: Final = 20_000
"""The most values of a settings file, those that aliases repeat included."""


def folder() -> Path:
    """Find the recipes: inside the installed package, or beside it in a checkout."""
    here = Path(__file__).resolve().parents[1]
    return here / "recipes" if (here / "recipes").is_dir() else here.parent / "recipes"


def names() -> list[str]:
    return sorted(path.stem for path in folder().glob("*.yaml"))


def locate(name: str) -> Path:
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
        if not path.is_file():
            raise RecipeError([f"{name}: no such recipe file"])
        return path
    if name not in names():
        hint = did_you_mean(name, names())
        raise RecipeError([f"no recipe {name!r}.{hint} `compress recipes` lists them; a .yaml file also works"])
    return folder() / f"{name}.yaml"


class _StrictLoader(yaml.SafeLoader):
    """safe_load, but a key given twice is an error, not silently the last, and 5e-5 is a number, not text."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Refuse what is nested deeper than any settings are, before the rest of it is read."""
        self.depth += 1
        if self.depth > MOST_DEPTH:
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, f"nested more than {MOST_DEPTH} deep", mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def get_single_node(self) -> yaml.Node | None:
        """Refuse a document whose aliases would make much of little: each alias counts as all that it repeats."""
        node = super().get_single_node()
        if node is not None and _values(node, {}) > MOST_VALUES:
            raise yaml.constructor.ConstructorError(
                None, None, f"holds more than {MOST_VALUES:,} values with its aliases", node.start_mark
            )
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        known = set[str]()
        for key, _ in node.value:
            name = repr(self.construct_object(key, deep=True))
            if name in known:
                raise yaml.constructor.ConstructorError(None, None, f"{name} is given twice", key.start_mark)
            known.add(name)
        return super().construct_mapping(node, deep)


def _values(node: yaml.Node, known: dict[int, int]) -> int:
    """Count the values of a document, those behind an alias each time that it is used."""
    if id(node) in known:
        return known[id(node)]
    known[id(node)] = MOST_VALUES + 1  # until it is counted: one that holds itself has no end
    inner = [each for pair in node.value for each in pair] if isinstance(node, yaml.MappingNode) else node.value
    count = 1 + (sum(_values(each, known) for each in inner) if isinstance(node, yaml.CollectionNode) else 0)
    known[id(node)] = min(count, MOST_VALUES + 1)
    return known[id(node)]


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?([0-9]+\.?|[0-9]*\.[0-9]+)[eE][-+]?[0-9]+$"), list("-+.0123456789")
)


def load_yaml(path: Path) -> Any:
    """Read a settings file. Raises RecipeError, with the line, for what is no YAML, too large or too deep."""
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise RecipeError([f"{path.name}: is larger than {MOST_BYTES:,} bytes; expected settings, as in our recipes"])
    return parse_yaml(content, path.name)


def parse_yaml(text: str | bytes, where: str) -> Any:
    """Read YAML of plain data. Raises RecipeError for what is none; `where` says in which file or option."""
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        said = " ".join(f"{error.context or ''} {error.problem or ''} {error.note or ''}".split())
        raise RecipeError(
            [f"{where}: not readable as YAML: {at}{said}. Expected plain settings, as in our recipes"]
        ) from error
    except Exception as error:  # what PyYAML's converters raise: ValueError for a date or number, KeyError, ...
        raise RecipeError([f"{where}: not readable as YAML: {' '.join(str(error).split())}"]) from error


def _read(path: Path) -> dict[str, Any]:
    tree = load_yaml(path)
    if not isinstance(tree, dict):
        raise RecipeError([f"{path.name}: expected a mapping with student and stages, found {type(tree).__name__}"])
    return tree


def resolve_extends(path: Path) -> dict[str, Any]:
    """Resolve one level of `extends:`; mappings are merged, everything else is replaced."""
    tree = _read(path)
    parent = tree.pop("extends", None)
    if parent is None:
        return tree
    if not isinstance(parent, str) or not re.fullmatch(r"\w[\w.-]*", parent):
        raise RecipeError(
            [f"{path.name}: extends: {parent!r}: expected the name of one of our recipes, or of a file beside this one "
             "without its .yaml"]
        )  # fmt: skip
    beside = path.with_name(f"{parent}.yaml")
    base = _read(beside if beside.is_file() else locate(parent))
    if "extends" in base:
        raise RecipeError([f"{path.name}: extends {parent!r}, which itself extends another; one level only"])
    for key, value in tree.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        base[key] = base[key] | value if both else value
    return base | {"name": tree.get("name", path.stem)}


def override(tree: dict[str, Any], line: str, kinds: Sequence[str]) -> None:
    """`stages.0.lr=3e-5` -> tree["stages"][0]["lr"] = "3e-5". Stages may be named: `stages.prediction.lr=...`.

    `epochs` take the place of the `steps` that there are.
    """
    path, sign, text = line.partition("=")
    if not sign or not path:
        raise RecipeError([f"--set {line}: expected PATH=VALUE, as in --set stages.0.lr=3e-5"])
    *way, last = path.split(".")
    at: Any = tree
    for number, key in enumerate([*way, last]):
        if isinstance(at, list):
            found = [i for i, item in enumerate(at) if isinstance(item, dict) and key in map(item.get, kinds)]
            if not re.fullmatch(r"-?[0-9]+", key) and not found:
                raise RecipeError([f"--set {line}: no stage {key!r}; use its name or its number from 0"])
            place: Any = found[0] if found else int(key)
            if not -len(at) <= place < len(at):
                raise RecipeError([f"--set {line}: there are only {len(at)} entries, numbered from 0"])
        elif isinstance(at, dict):
            place = key
        else:
            raise RecipeError([f"--set {line}: {'.'.join(path.split('.')[:number])} has no settings below it"])
        if number == len(way):
            at[place] = parse_yaml(text, f"--set {line}")
            if place == "epochs":
                at.pop("steps", None)
        else:
            at = at.setdefault(place, {}) if isinstance(at, dict) else at[place]


def explain(file: str, error: Any, known: Mapping[str, Any], *, show: bool = True) -> str:
    """Describe an error of pydantic in one sentence: where, what, and the nearest of the `known` settings.

    Without `show` it does not repeat what was given.
    """
    where = "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in error["loc"]).lstrip(".")
    if error["type"] == "extra_forbidden":
        return f"{file}: {where}: no such setting.{did_you_mean(str(error['loc'][-1]), known)}"
    if error["type"] == "missing":
        return f"{file}: {where}: is missing"
    given = error.get("input")
    shown = f", found {given!r}" if show and isinstance(given, str | int | float) else ""
    return f"{file}: {where + ': ' if where else ''}{error['msg'].removeprefix('Value error, ')}{shown}"
