"""Write records as JSON, read them back, and say what is wrong in a file."""

from pathlib import Path
from typing import Any, TypeVar

from compress.errors import CompressError, DamagedError

T = TypeVar("T")


def to_json(record: Any, *, compact: bool = False) -> str:
    """Write a record (a dataclass) as indented JSON; numbers that are not finite become
    null.

    compact  leaves out the fields that have their default
    """
    from pydantic import TypeAdapter

    return (
        TypeAdapter(type(record))
        .dump_json(record, indent=1, exclude_defaults=compact)
        .decode()
        + "\n"
    )


def from_json(
    kind: type[T],
    source: str | bytes | Path,
    error: type[CompressError],
    expected: str,
    remedy: str,
) -> T:
    """Read a record from its text or file. Raises `error` naming each field in error,
    what was expected, and the remedy."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_json(
            source.read_bytes() if isinstance(source, Path) else source
        )
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as absent:
        raise error(
            f"{absent.filename}: no such file; expected a {expected}"
        ) from absent
    except (ValidationError, CompressError) as wrong:
        # of a field, or of a record that its own checks refuse
        problems = str(wrong)
        if isinstance(wrong, ValidationError):
            problems = "; ".join(
                f"{'.'.join(map(str, one['loc'])) or 'JSON'}: {one['msg']}"
                for one in wrong.errors()
            )
        name = source if isinstance(source, Path) else expected.split(maxsplit=1)[0]
        raise error(f"{name}: not a {expected} ({problems}); {remedy}.") from wrong


def load_record(kind: type[T], path: Path, remedy: str) -> T:
    """Load a record from a file of ours. Raises DamagedError, with `remedy`, if it
    cannot be read."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_json(path.read_bytes())
    except ValidationError:
        raise DamagedError(path, ["it cannot be read"], remedy) from None
