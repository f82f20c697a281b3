"""Where recipes lie, how their YAML is read, and how `--set` changes it. Imports neither torch nor transformers."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from compress.errors import RecipeError, did_you_mean


def folder() -> Path:
    """Where the recipes lie: inside the installed package, or beside it in a checkout."""
    here = Path(__file__).resolve().parent
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

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?([0-9]+\.?|[0-9]*\.[0-9]+)[eE][-+]?[0-9]+$"), list("-+.0123456789")
)


def parsed(text: str | bytes, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise RecipeError([f"{where}: not readable as YAML: {' '.join(str(error).split())}"]) from error


def _read(path: Path) -> dict[str, Any]:
    tree = parsed(path.read_bytes(), path.name)
    if not isinstance(tree, dict):
        raise RecipeError([f"{path.name}: expected a mapping with student and stages, found {type(tree).__name__}"])
    return tree


def extended(path: Path) -> dict[str, Any]:
    """One level of `extends:`; mappings are merged, everything else is replaced."""
    tree = _read(path)
    parent = tree.pop("extends", None)
    if parent is None:
        return tree
    beside = path.with_name(f"{parent}.yaml")
    base = _read(beside if beside.is_file() else locate(str(parent)))
    if "extends" in base:
        raise RecipeError([f"{path.name}: extends {parent!r}, which itself extends another; one level only"])
    for key, value in tree.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        base[key] = base[key] | value if both else value
    return base | {"name": tree.get("name", path.stem)}


def override(tree: dict[str, Any], line: str, kinds: Sequence[str]) -> None:
    """`stages.0.lr=3e-5` -> tree["stages"][0]["lr"] = "3e-5". Stages may be named: `stages.prediction.lr=...`."""
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
            at[place] = parsed(text, f"--set {line}")
        else:
            at = at.setdefault(place, {}) if isinstance(at, dict) else at[place]
