"""Find a format by its name, which is the name of its file."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import Any

from compress.errors import ExportError, did_you_mean
from compress.exporters.formats.format import Format

PACKAGE = "compress.exporters.formats"


def find(name: str) -> Format:
    """Return the format of this name. Raises ExportError if there is none."""
    module = f"{PACKAGE}.{name}"
    if name.isidentifier() and find_spec(module) is not None:
        found: Format | None = getattr(import_module(module), "FORMAT", None)
        if found is not None:
            return found
    raise ExportError(f"--for {name}: no such format.{did_you_mean(name, names())}")


@cache
def known() -> tuple[Format, ...]:
    """List the formats by name: ONNX first, then the base install's, then others."""
    modules = (
        import_module(f"{PACKAGE}.{module.name}")
        for module in iter_modules(import_module(PACKAGE).__path__)
    )
    found = [module.FORMAT for module in modules if hasattr(module, "FORMAT")]
    return tuple(sorted(found, key=_place))


def load(address: str) -> Any:
    """Import the function at an address in a format, such as its `writer`."""
    module, _, function = address.rpartition(".")
    return getattr(import_module(module), function)


def _place(each: Format) -> tuple[bool, bool, str]:
    return bool(each.library), each.extra is not None, each.name


def names() -> list[str]:
    """List the names of the formats, in the order of `known`."""
    return [each.name for each in known()]
