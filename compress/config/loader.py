"""Find recipes, read their YAML, apply `--set`, and explain errors. Imports neither
torch nor transformers."""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import ValidationError

from compress.errors import RecipeError, did_you_mean

MOST_RECIPE_BYTES: Final = 64 * 1024
"""The largest settings file that is accepted; ours have 3 kB."""
MOST_DEPTH: Final = 100
MOST_VALUES: Final = 20_000
"""The maximum number of values that a settings file may hold, counting those that
aliases repeat."""


def folder() -> Path:
    """Return the folder of the recipes: inside the installed package, or next to it in
    a checkout."""
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
        raise RecipeError(
            [
                f"no recipe {name!r}.{hint} `compress recipes` lists them; a .yaml "
                "file also works"
            ]
        )
    return folder() / f"{name}.yaml"


class _StrictLoader(yaml.SafeLoader):
    """Load safely, but refuse duplicate keys instead of taking the last, and read 5e-5
    as a number, not as text."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Refuse deeper nesting than any settings need, before reading the rest."""
        self.depth += 1
        if self.depth > MOST_DEPTH:
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(
                None, None, f"nested more than {MOST_DEPTH} deep", mark
            )
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def get_single_node(self) -> yaml.Node | None:
        """Refuse a document that its aliases expand to a huge one: each alias counts as
        everything it repeats."""
        node = super().get_single_node()
        if node is not None and _count_values(node, {}) > MOST_VALUES:
            raise yaml.constructor.ConstructorError(
                None,
                None,
                f"holds more than {MOST_VALUES:,} values once its aliases are expanded",
                node.start_mark,
            )
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Refuse duplicate keys as they were written: a key may replace one that `<<`
        merges later."""
        node = super().compose_mapping_node(anchor)
        seen = set[str]()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            name = repr(self.construct_object(key, deep=True))
            if name in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{name} is given twice", key.start_mark
                )
            seen.add(name)
        return node


def _count_values(node: yaml.Node, counts: dict[int, int]) -> int:
    """Count the values of a document, those behind an alias once for every use."""
    if id(node) in counts:
        return counts[id(node)]
    # until it is counted: a node that contains itself has no end
    counts[id(node)] = MOST_VALUES + 1
    inner = (
        [child for pair in node.value for child in pair]
        if isinstance(node, yaml.MappingNode)
        else node.value
    )
    count = 1 + (
        sum(_count_values(child, counts) for child in inner)
        if isinstance(node, yaml.CollectionNode)
        else 0
    )
    counts[id(node)] = min(count, MOST_VALUES + 1)
    return counts[id(node)]


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?([0-9]+\.?|[0-9]*\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def load_yaml(path: Path) -> Any:
    """Read a settings file. Raises RecipeError, with the line, if it is not valid YAML,
    too large or too deep."""
    with path.open("rb") as file:
        content = file.read(MOST_RECIPE_BYTES + 1)
    if len(content) > MOST_RECIPE_BYTES:
        raise RecipeError(
            [
                f"{path.name}: is larger than {MOST_RECIPE_BYTES:,} bytes; expected "
                "settings, as in our recipes"
            ]
        )
    return parse_yaml(content, path.name)


def parse_yaml(text: str | bytes, where: str) -> Any:
    """Parse YAML of plain data from the file or option `where`. Raises RecipeError if
    it is not valid."""
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        reason = " ".join(
            f"{error.context or ''} {error.problem or ''} {error.note or ''}".split()
        )
        raise RecipeError(
            [
                f"{where}: not readable as YAML: {at}{reason}. Expected plain "
                "settings, as in our recipes"
            ]
        ) from error
    except Exception as error:
        # from PyYAML's converters: ValueError for a date or number, KeyError, ...
        raise RecipeError(
            [f"{where}: not readable as YAML: {' '.join(str(error).split())}"]
        ) from error


def _read(path: Path, parts: str) -> dict[str, Any]:
    tree = load_yaml(path)
    if not isinstance(tree, dict):
        raise RecipeError(
            [
                f"{path.name}: expected a mapping with {parts}, found "
                f"{type(tree).__name__}"
            ]
        )
    return tree


def resolve_extends(
    path: Path,
    *,
    find: Callable[[str], Path] = locate,
    parts: str = "student and stages",
) -> dict[str, Any]:
    """Read a file and resolve one level of its `extends:`; mappings are merged,
    everything else is replaced.

    find   returns the file of the parent's name, if none is next to this one
    parts  what such a file contains, for errors

    Raises RecipeError.
    """
    tree = _read(path, parts)
    parent = tree.pop("extends", None)
    if parent is None:
        return tree
    if not isinstance(parent, str) or not re.fullmatch(r"\w[\w.-]*", parent):
        raise RecipeError(
            [
                f"{path.name}: extends: {parent!r}: expected the name of one of our "
                "recipes, or of a file next to this one, without .yaml"
            ]
        )
    beside = path.with_name(f"{parent}.yaml")
    base = _read(beside if beside.is_file() else find(parent), parts)
    if "extends" in base:
        raise RecipeError(
            [
                f"{path.name}: extends {parent!r}, which itself extends another; only "
                "one level is allowed"
            ]
        )
    for key, value in tree.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        base[key] = base[key] | value if both else value
    return base | {"name": tree.get("name", path.stem)}


def override(tree: dict[str, Any], line: str, kinds: Sequence[str]) -> None:
    """Set one value in place: `stages.0.lr=3e-5`, or by the name of a stage,
    `stages.prediction.lr=3e-5`.

    Setting `epochs` removes `steps`. `kinds` are the keys that hold a stage's name.
    Raises RecipeError.
    """
    path, sign, text = line.partition("=")
    if not sign or not path:
        raise RecipeError(
            [f"--set {line}: expected PATH=VALUE, as in --set stages.0.lr=3e-5"]
        )
    *way, last = path.split(".")
    at: Any = tree
    for number, key in enumerate([*way, last]):
        if isinstance(at, list):
            found = [
                i
                for i, item in enumerate(at)
                if isinstance(item, dict) and key in map(item.get, kinds)
            ]
            if not re.fullmatch(r"-?[0-9]+", key) and not found:
                raise RecipeError(
                    [
                        f"--set {line}: no stage {key!r}; use its name or its number "
                        "from 0"
                    ]
                )
            place: Any = found[0] if found else int(key)
            if not -len(at) <= place < len(at):
                raise RecipeError(
                    [f"--set {line}: there are only {len(at)} entries, numbered from 0"]
                )
        elif isinstance(at, dict):
            place = key
        else:
            raise RecipeError(
                [
                    f"--set {line}: {'.'.join(path.split('.')[:number])} has no "
                    "settings below it"
                ]
            )
        if number == len(way):
            at[place] = parse_yaml(text, f"--set {line}")
            if place == "epochs":
                at.pop("steps", None)
        else:
            at = at.setdefault(place, {}) if isinstance(at, dict) else at[place]


def explain(
    file: str,
    error: ValidationError,
    settings_at: Callable[[Sequence[Any]], Iterable[str]],
    *,
    tags: Sequence[str] = (),
    show: bool = True,
) -> list[str]:
    """Describe the problems that pydantic found, one sentence each: where, what, and
    the nearest setting.

    settings_at   returns the names of the settings that are allowed at a location
    tags          parts of locations that name a branch of a union, not a setting
    show          repeat the wrong value; False where it may be a secret
    """
    problems = []
    for each in error.errors():
        # its items are invalid
        if (
            each["type"] == "too_short"
            and len(each["input"]) >= each["ctx"]["min_length"]
        ):
            continue
        path = [at for at in each["loc"] if at not in tags]
        where = "".join(
            f"[{at}]" if isinstance(at, int) else f".{at}" for at in path
        ).lstrip(".")
        place = f"{file}: {where}: " if where else f"{file}: "
        if each["type"] == "extra_forbidden":
            problems.append(
                f"{place}no such "
                f"setting.{did_you_mean(str(path[-1]), settings_at(each['loc']))}"
            )
            continue
        given = each["input"]
        found = (
            f", found {given!r}"
            if show and isinstance(given, str | int | float)
            else ""
        )
        # raised by our validators, which say themselves what they found
        if each["type"] == "value_error":
            found = ""
        message = (
            "is missing"
            if each["type"] == "missing"
            else each["msg"].removeprefix("Value error, ") + found
        )
        problems += [f"{place}{line}" for line in message.split("\n")]
    return problems


def dump_yaml(tree: Any) -> str:
    """Write plain data as YAML, in its own order."""
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)


def plain_tree(value: Any) -> Any:
    """Convert tuples to lists, at any depth."""
    if isinstance(value, dict):
        return {key: plain_tree(item) for key, item in value.items()}
    return (
        [plain_tree(item) for item in value]
        if isinstance(value, list | tuple)
        else value
    )
