"""Say which versions made a result, and how to install a package that is missing."""

import shlex
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires, version

DISTRIBUTION = "compress-kit"
"""The name of this package on package indexes, where `compress` belongs to somebody else."""


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the version of each of `packages` that is installed; `compress` is this one."""
    from compress import __version__

    found = {}
    for name in packages:
        try:
            found[name] = __version__ if name == "compress" else version(name)
        except PackageNotFoundError:
            continue
    return found


def install_command(extra: str) -> str:
    """Return the pip command that installs what the extra `extra` of our own metadata lists."""
    from packaging.requirements import Requirement

    listed = [Requirement(line) for line in requires(DISTRIBUTION) or ()]
    wanted = [str(each).partition(";")[0].strip() for each in listed if f'extra == "{extra}"' in str(each.marker)]
    assert wanted, f"pyproject.toml has no extra {extra}"
    return shlex.join(["pip", "install", *wanted])
