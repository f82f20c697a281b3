"""Read JSON objects of sentence-transformers key by key, so that none is skipped.
Imports no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from compress.errors import TeacherError, did_you_mean

_MISSING: Final = object()


class JsonKeys:
    """Take the keys of a JSON object of sentence-transformers one by one; `finish`
    refuses keys that were not taken."""

    def __init__(self, path: Path, content: Mapping[str, Any]) -> None:
        self.path = path
        self.left = dict(content)
        self.taken = list[str]()

    def take(
        self,
        name: str,
        kinds: type | tuple[type, ...],
        default: Any = _MISSING,
        *,
        expected: str = "",
    ) -> Any:
        """Take the value of a key, which may be null if the default is None. Raises
        TeacherError if the value has another type, or if it is missing and there is no
        default."""
        self.taken.append(name)
        if name not in self.left:
            if default is _MISSING:
                raise TeacherError(
                    f"{self.path}: has no {name!r}, which is required. Save the model "
                    "again, or add the key"
                )
            return default
        value = self.left.pop(name)
        allowed = kinds if isinstance(kinds, tuple) else (kinds,)
        if default is None:
            allowed = (*allowed, type(None))
        is_bool = isinstance(value, bool) and bool not in allowed
        if is_bool or not isinstance(value, allowed):
            named = expected or " or ".join(
                "null" if kind is type(None) else kind.__name__ for kind in allowed
            )
            raise TeacherError(f"{self.path}: {name!r} is {value!r}; expected {named}")
        return value

    def take_width(self, name: str, default: Any = _MISSING) -> Any:
        """Take a whole number above 0, or the default."""
        value = self.take(name, int, default, expected="a whole number above 0")
        if value is not default and value < 1:
            raise TeacherError(
                f"{self.path}: {name!r} is {value}; expected a whole number above 0"
            )
        return value

    def refuse(self, name: str, kept: Any, why: str) -> None:
        """Take a key that must have its default. Raises TeacherError for any other
        value."""
        self.taken.append(name)
        value = self.left.pop(name, kept)
        if value != kept:
            raise TeacherError(
                f"{self.path}: {name!r} is {value!r}, which is not supported: {why}"
            )

    def finish(self) -> None:
        """Raise TeacherError for keys that were not taken."""
        if not self.left:
            return
        unknown = min(self.left)
        raise TeacherError(
            f"{self.path}: {unknown!r}: is not a key of sentence-transformers "
            f"6.2.{did_you_mean(unknown, self.taken)} Remove it, if the vectors do not "
            "depend on it"
        )
