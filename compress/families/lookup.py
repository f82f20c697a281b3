"""Find a family by its name, which is the name of its file."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules

from compress.families.family import Family

FAMILIES_PACKAGE = "compress.families"


@cache
def find(model_type: str) -> Family:
    """Return the facts of a family by transformers' name for it; of one without a file,
    those of any other model.

    The file of `deberta-v2` is `deberta_v2.py`.
    """
    name = f"{FAMILIES_PACKAGE}.{model_type.replace('-', '_')}"
    if (
        model_type.isascii()
        and model_type.replace("-", "_").isidentifier()
        and find_spec(name) is not None
    ):
        family = _read(name)
        if family is not None and family.name == model_type:
            return family
    return Family(model_type)


def known() -> list[Family]:
    """List the families that have a file, by name."""
    found = (
        _read(f"{FAMILIES_PACKAGE}.{module.name}")
        for module in iter_modules(import_module(FAMILIES_PACKAGE).__path__)
    )
    return sorted(
        (family for family in found if family is not None),
        key=lambda family: family.name,
    )


def names(fact: str) -> str:
    """Join the names of the families that have a fact, for a message."""
    return ", ".join(family.name for family in known() if getattr(family, fact))


def _read(module: str) -> Family | None:
    """Return what a module defines as FAMILY; None if it is no family's."""
    family: Family | None = getattr(import_module(module), "FAMILY", None)
    return family
