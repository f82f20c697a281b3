"""Check arguments: recognise kinds of values, convert them to what functions read, and
refuse the rest.

Only the standard library is imported, and classes get no more than they need, for
`predict` begins here.
"""

import os
import re
import sys
from collections.abc import (
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    Sequence,
    Set,
)
from dataclasses import dataclass, is_dataclass, replace
from math import inf
from numbers import Integral, Real
from pathlib import Path
from types import NoneType
from typing import Any, Protocol

from compress.errors import ArgumentError, did_you_mean

CHARACTERS_REPEATED = 60
"""Maximum characters of a value that a message repeats."""
MOST_PATH = 200
"""Maximum characters of a path that a message repeats."""
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
"""A lone surrogate of UTF-16, which no text in Unicode holds."""


@dataclass(frozen=True, eq=False, repr=False)
class ArgumentCheck:
    """Check a value, and convert it to what the function reads. This one takes
    anything.

    expected   what is taken, as a phrase for messages
    """

    expected: str = "anything"

    def fits(self, value: Any) -> bool:
        """Return True if the value is of this kind, though it may still be out of
        range."""
        return True

    def take(self, value: Any, name: str) -> Any:
        """Return the value as it is meant. Raises ArgumentError."""
        if not self.fits(value):
            raise self.refuse(value, name)
        return value

    def within(self, limits: "Range") -> "ArgumentCheck":
        """Return the check with these limits, which only numbers have."""
        return self

    def suggest(self, value: Any) -> str:
        """Return a sentence that says how to write what was probably meant; '' if that
        is not known."""
        return ""

    def refuse(self, value: Any, name: str) -> ArgumentError:
        """Return the error for a value that is refused."""
        return ArgumentError(
            name, self.expected, show(value), remedy=self.suggest(value)
        )


@dataclass(frozen=True)
class Range:
    """The limits of a number in an annotation, as Annotated[float, Range(0, 1)]. Both
    ends are included."""

    least: float = -inf
    most: float = inf

    def __str__(self) -> str:
        if self.least == -inf and self.most == inf:
            return ""
        if self.most == inf:
            return f" of at least {self.least:,.12g}"
        return f" from {self.least:,.12g} to {self.most:,.12g}"


FLOAT_MOST = sys.float_info.max
"""The largest number that a float holds; whole numbers are limited to 64 bits, as in
torch and numpy."""


@dataclass(frozen=True, eq=False, repr=False)
class NothingCheck(ArgumentCheck):
    expected: str = "None"

    def fits(self, value: Any) -> bool:
        return value is None


@dataclass(frozen=True, eq=False, repr=False)
class FlagCheck(ArgumentCheck):
    expected: str = "True or False"

    def fits(self, value: Any) -> bool:
        return isinstance(plain_number(value), bool)

    def take(self, value: Any, name: str) -> Any:
        return bool(super().take(value, name))


@dataclass(frozen=True, eq=False, repr=False)
class NumberCheck(ArgumentCheck):
    """A number of Python or numpy within limits; True and False are refused.

    kind       what is expected before its limits
    infinite   infinity is a number too
    """

    expected: str = "a number"
    kind: str = "a number"
    limits: Range = Range(-FLOAT_MOST, FLOAT_MOST)
    infinite: bool = False

    def fits(self, value: Any) -> bool:
        number = plain_number(value)
        return isinstance(number, Real) and not isinstance(number, bool)

    def take(self, value: Any, name: str) -> Any:
        number = plain_number(super().take(value, name))
        number = int(number) if isinstance(number, Integral) else float(number)
        allowed = (
            self.infinite
            if number in (inf, -inf)
            else self.limits.least <= number <= self.limits.most
        )
        if not allowed:  # nor for nan
            raise self.refuse(value, name)
        return number

    def within(self, limits: Range) -> ArgumentCheck:
        both = Range(
            max(limits.least, self.limits.least), min(limits.most, self.limits.most)
        )
        return replace(self, expected=f"{self.kind}{limits}", limits=both)


@dataclass(frozen=True, eq=False, repr=False)
class PercentCheck(ArgumentCheck):
    """A share: 0.985, or the same in percent as a text, "98.5%"."""

    expected: str = "a share above 0 % and up to 100 %, as 98.5% or 0.985"

    def fits(self, value: Any) -> bool:
        return self._read(value) is not None

    def take(self, value: Any, name: str) -> Any:
        share = self._read(value)
        if share is None or not 0 < share <= 1:
            raise self.refuse(value, name)
        return share

    def _read(self, value: Any) -> float | None:
        """Return the number that is meant, or None if the value is not a number."""
        if isinstance(value, str):
            digits = value.strip()
            unit = 100 if digits.endswith("%") else 1
            try:
                return float(digits.removesuffix("%")) / unit
            except ValueError:
                return None
        return float(plain_number(value)) if NumberCheck().fits(value) else None

    def suggest(self, value: Any) -> str:
        share = self._read(value)
        is_percent = "%" not in str(value) and share is not None and 1 < share <= 100
        return f"Did you mean {value}%?" if is_percent else ""


@dataclass(frozen=True, eq=False, repr=False)
class WholeCheck(NumberCheck):
    expected: str = "a whole number"
    kind: str = "a whole number"
    limits: Range = Range(-(2**63), 2**63 - 1)

    def fits(self, value: Any) -> bool:
        return super().fits(value) and isinstance(plain_number(value), Integral)


@dataclass(frozen=True, eq=False, repr=False)
class TextCheck(ArgumentCheck):
    expected: str = "a text"

    def fits(self, value: Any) -> bool:
        return isinstance(value, str)

    def take(self, value: Any, name: str) -> Any:
        return check_unicode(str(super().take(value, name)), name)


@dataclass(frozen=True, eq=False, repr=False)
class ChoiceCheck(TextCheck):
    choices: tuple[Any, ...] = ()

    def take(self, value: Any, name: str) -> Any:
        if not self.fits(value) or value not in self.choices:
            raise self.refuse(value, name)
        return str(value)

    def suggest(self, value: Any) -> str:
        return nearest(value, self.choices) if isinstance(value, str) else ""


@dataclass(frozen=True, eq=False, repr=False)
class EitherCheck(ArgumentCheck):
    """One of several kinds; the first that fits decides."""

    kinds: tuple[ArgumentCheck, ...] = ()

    def fits(self, value: Any) -> bool:
        return any(kind.fits(value) for kind in self.kinds)

    def take(self, value: Any, name: str) -> Any:
        for kind in self.kinds:
            if kind.fits(value):
                return kind.take(value, name)
        raise self.refuse(value, name)

    def within(self, limits: Range) -> ArgumentCheck:
        return either([kind.within(limits) for kind in self.kinds])

    def suggest(self, value: Any) -> str:
        return next(filter(None, (kind.suggest(value) for kind in self.kinds)), "")


def either(kinds: Iterable[ArgumentCheck]) -> ArgumentCheck:
    """Make the check of one of several kinds, with all choices in one list; it takes
    anything if one of them does."""
    flat = list[ArgumentCheck]()
    choices = list[Any]()
    for kind in kinds:
        parts = kind.kinds if isinstance(kind, EitherCheck) else (kind,)
        flat += [part for part in parts if not isinstance(part, ChoiceCheck)]
        choices += [
            choice
            for part in parts
            if isinstance(part, ChoiceCheck)
            for choice in part.choices
        ]
    if any(type(kind) is ArgumentCheck for kind in flat):
        return ArgumentCheck()
    if choices:
        flat.insert(0, choice(tuple(choices)))
    flat.sort(key=lambda kind: isinstance(kind, NothingCheck))
    if len(flat) == 1:
        return flat[0]
    return EitherCheck(join([kind.expected for kind in flat]), kinds=tuple(flat))


def choice(choices: tuple[Any, ...]) -> ArgumentCheck:
    """Make the check of one of several words."""
    return ChoiceCheck(join([str(choice) for choice in choices]), choices=choices)


def join(phrases: Sequence[str]) -> str:
    """Write phrases as "a, b or c"."""
    return " or ".join(filter(None, [", ".join(phrases[:-1]), phrases[-1]]))


@dataclass(frozen=True, eq=False, repr=False)
class SequenceCheck(ArgumentCheck):
    """A list, or another sequence, of items; a single item counts as a list of one.

    make   makes the container that is annotated
    """

    item: ArgumentCheck = ArgumentCheck()
    make: Callable[[Iterable[Any]], Any] = list

    def fits(self, value: Any) -> bool:
        return self.item.fits(value) or is_sequence(value)

    def take(self, value: Any, name: str) -> Any:
        super().take(value, name)
        if not is_sequence(value):
            return self.make([self.item.take(value, name)])
        items = [
            self.item.take(each, f"{name}[{at}]")
            for at, each in enumerate(as_list(value))
        ]
        return tuple(items) if isinstance(value, tuple) else self.make(items)


@dataclass(frozen=True, eq=False, repr=False)
class RowCheck(ArgumentCheck):
    """A tuple or a list with an item of its own kind at each place."""

    items: tuple[ArgumentCheck, ...] = ()

    def fits(self, value: Any) -> bool:
        return isinstance(value, tuple | list) and len(value) == len(self.items)

    def take(self, value: Any, name: str) -> Any:
        pairs = enumerate(zip(self.items, super().take(value, name), strict=True))
        return tuple(item.take(each, f"{name}[{at}]") for at, (item, each) in pairs)


@dataclass(frozen=True, eq=False, repr=False)
class MappingCheck(ArgumentCheck):
    expected: str = "a mapping of names to values"
    value: ArgumentCheck = ArgumentCheck()

    def fits(self, value: Any) -> bool:
        return isinstance(value, Mapping)

    def take(self, value: Any, name: str) -> Any:
        if unnamed := [
            key for key in super().take(value, name) if not isinstance(key, str)
        ]:
            raise ArgumentError(name, self.expected, f"the name {show(unnamed[0])}")
        return {
            key: self.value.take(each, f"{name}[{key!r}]")
            for key, each in value.items()
        }


@dataclass(frozen=True, eq=False, repr=False)
class FunctionCheck(ArgumentCheck):
    expected: str = "a function"

    def fits(self, value: Any) -> bool:
        return callable(value)


@dataclass(frozen=True, eq=False, repr=False)
class InstanceCheck(ArgumentCheck):
    kind: type = object

    def fits(self, value: Any) -> bool:
        return isinstance(value, self.kind)

    def suggest(self, value: Any) -> str:
        if not isinstance(value, Mapping) or not is_dataclass(self.kind):
            return ""
        settings = ", ".join(
            f"{key}={show(each)}" for key, each in list(value.items())[:3]
        )
        return f"Give {self.kind.__name__}({settings})"


class OnDisk(Protocol):
    """Describe a `Bundle`: what has a path can be given in the place of its path."""

    @property
    def path(self) -> Path: ...

    @property
    def manifest(self) -> Any: ...


def is_on_disk(value: Any) -> bool:
    """Return True for a Bundle, which has a path and a manifest."""
    return hasattr(value, "manifest") and isinstance(getattr(value, "path", None), Path)


def check_path_text(path: str, name: str) -> str:
    """Return a path. Raises ArgumentError for one with a lone surrogate, which no file
    system can store."""
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        raise ArgumentError(
            name, "a name or a path", f"a lone surrogate in {show(path, MOST_PATH)}"
        ) from None
    return path


@dataclass(frozen=True, eq=False, repr=False)
class PathCheck(ArgumentCheck):
    """A path: a text or a path-like object. It may begin with `~`.

    make      what the function reads: a Path, or a text where it may also be a name
    bundle    a Bundle stands for its path
    is_file   the path of a file, which cannot end in a slash
    """

    expected: str = "a path"
    make: Callable[[str], Any] = Path
    bundle: bool = False
    is_file: bool = False

    def fits(self, value: Any) -> bool:
        if isinstance(value, os.PathLike):
            return isinstance(os.fspath(value), str)
        return isinstance(value, str) or (self.bundle and is_on_disk(value))

    def take(self, value: Any, name: str) -> Any:
        given = super().take(value, name)
        path = (
            str(given.path) if self.bundle and is_on_disk(given) else os.fspath(given)
        )
        if not path.strip():
            raise ArgumentError(
                name, self.expected, "white space" if path else "an empty text"
            )
        if "\0" in path:
            raise ArgumentError(
                name, self.expected, f"a zero byte in {show(path, MOST_PATH)}"
            )
        check_path_text(path, name)
        self._look(path, name)
        if self.is_file and path.endswith(("/", os.sep)):
            raise ArgumentError(
                name,
                self.expected,
                f"{show(path, MOST_PATH)}, which ends as a folder does",
            )
        return self.make(self._expand(path, name))

    def _look(self, path: str, name: str) -> None:
        """Raise ArgumentError for a path that is too long, or a circle of links;
        `train=a.tsv,test=b.tsv` is not a path."""
        if "=" in path:
            return
        try:
            Path(path).stat()
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return
        except OSError as error:
            raise ArgumentError(
                name, self.expected, f"{show(path, MOST_PATH)}: {error.strerror}"
            ) from None

    def _expand(self, path: str, name: str) -> str:
        if not path.startswith("~") or os.path.lexists(path):
            return path
        expanded = os.path.expanduser(path)  # noqa: PTH111  # which does not raise for an unknown user
        if expanded == path:
            raise ArgumentError(
                name,
                self.expected,
                f"{show(path, MOST_PATH)}, and there is no such user",
            )
        return expanded


@dataclass(frozen=True, eq=False, repr=False)
class RowsCheck(ArgumentCheck):
    """A Dataset, or mappings, one for each row; rows of an iterator are checked as they
    are read."""

    def fits(self, value: Any) -> bool:
        return is_sequence(value) or (
            hasattr(value, "column_names") and hasattr(value, "features")
        )

    def take(self, value: Any, name: str) -> Any:
        if not is_sequence(super().take(value, name)):
            return value
        rows = (self._take_row(row, f"{name}[{at}]") for at, row in enumerate(value))
        return rows if isinstance(value, Iterator) else list(rows)

    def _take_row(self, row: Any, name: str) -> Any:
        if not isinstance(row, Mapping):
            raise ArgumentError(name, "a mapping of names to values", show(row))
        return row


@dataclass(frozen=True, eq=False, repr=False)
class LikeCheck(ArgumentCheck):
    """An object with these attributes, such as a model of a library that is not
    imported here."""

    attributes: tuple[str, ...] = ()

    def fits(self, value: Any) -> bool:
        return not isinstance(value, type) and all(
            hasattr(value, name) for name in self.attributes
        )


def check_unicode(text: str, name: str, where: str = "") -> str:
    """Return the text. Raises ArgumentError for one with a lone surrogate, which no
    tokenizer and no file accepts."""
    lone = None if text.isascii() else LONE_SURROGATE.search(text)
    if lone is not None:
        found = f"a lone surrogate (\\u{ord(lone[0]):04x}) at {lone.start()}"
        raise ArgumentError(name, "a text in Unicode", found, where=where)
    return text


def is_table(value: Any) -> bool:
    """Return True for a DataFrame, Dataset or other table, whose items are names of
    columns or rows."""
    return not isinstance(value, type) and (
        hasattr(value, "columns") or hasattr(value, "column_names")
    )


def is_sequence(value: Any) -> bool:
    """Return True for what has items in an order: not for texts, mappings, sets and
    tables."""
    if isinstance(value, KeysView | ItemsView):
        return True
    if isinstance(
        value, str | bytes | bytearray | memoryview | Mapping | Set
    ) or is_table(value):
        return False
    return isinstance(value, Iterable) and getattr(value, "ndim", 1) > 0


def as_list(values: Any) -> list[Any]:
    """Return the items of a sequence, or of a column or array of pandas, numpy, pyarrow
    or polars, as Python's own."""
    for method in ("tolist", "to_pylist", "to_list"):
        if hasattr(values, method):
            return list(getattr(values, method)())
    return list(values)


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return "Did you mean 'x'?" if a choice is close, else '': the message lists them
    all."""
    hint = did_you_mean(word, choices).strip()
    return hint if hint.startswith("Did you mean") else ""


def show(value: Any, most: int = CHARACTERS_REPEATED) -> str:
    """Write a value for a message: short ones as they are, others by their kind."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if (
        isinstance(value, str | int | float | bytes | NoneType)
        or getattr(value, "ndim", None) == 0
    ):
        text = (
            ascii(value)
            if isinstance(value, str) and not value.isprintable()
            else repr(value)
        )
        return text if len(text) <= most else f"{text[: most - 3]}..."
    kind = value.__name__ if isinstance(value, type) else type(value).__name__
    article = "an" if kind[0].lower() in "aeiou" else "a"
    return f"the class {kind}" if isinstance(value, type) else f"{article} {kind}"


def plain_number(value: Any) -> Any:
    """Return Python's own value for a scalar of numpy or torch."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    return value
