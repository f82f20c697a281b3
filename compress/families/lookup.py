"""Find a family by its name, which is the name of its file."""

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from compress.families.family import Family

FAMILIES_PACKAGE = "compress.families"


@cache
def find(model_type: str) -> Family:
    """Return the facts of a family by its name in transformers; the defaults if it has
    no file.

    The file of `deberta-v2` is `deberta_v2.py`.
    """
    module = model_type.replace("-", "_")
    family = _read(module) if module in _modules() else None
    if family is not None and family.name == model_type:
        return family
    return Family(model_type)


def known() -> list[Family]:
    """List the families that have a file, by name."""
    found = [_read(module) for module in _modules()]
    families = [family for family in found if family is not None]
    return sorted(families, key=lambda family: family.name)


def names(fact: str) -> str:
    """Join the names of the families that have a fact, for a message."""
    return ", ".join(family.name for family in known() if getattr(family, fact))


def _modules() -> list[str]:
    folders = import_module(FAMILIES_PACKAGE).__path__
    return [module.name for module in iter_modules(folders)]


def _read(module: str) -> Family | None:
    """Return the FAMILY that a module defines, or None if it defines none."""
    found = import_module(f"{FAMILIES_PACKAGE}.{module}")
    family: Family | None = getattr(found, "FAMILY", None)
    return family
