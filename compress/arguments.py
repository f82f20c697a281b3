"""Check the arguments of public functions by their annotations, so that each is taken as meant or refused.

    @check_arguments
    def quantize(bundle: BundleLike, *, method: Literal["auto", "static"] = "auto", max_drop: Share = 0.005): ...

What is given is converted where its meaning is clear: scalars of numpy to Python's, any object for a path to `Path`,
`~` to the home folder, one value to a list of one where several are expected. Anything else raises an ArgumentError,
which names the parameter, what was expected and what was found. Annotations that are imported for type checks alone
take anything. Only the standard library is imported: `predict` begins here.
"""

import builtins
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, is_dataclass, replace
from functools import cache, wraps
from inspect import Parameter, signature, unwrap
from math import inf, isfinite
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    Protocol,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from compress.errors import ArgumentError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Called = TypeVar("Called", bound=Callable[..., Any])
MOST_SHOWN = 60
"""Characters of a value that a message repeats."""
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half a character of UTF-16, which no text in Unicode holds."""


def check_arguments(function: Called) -> Called:
    """Check what a function, or the constructor of a class, is called with, by its annotations."""
    if isinstance(function, type):
        # a class is wrapped in place, for it must stay a class
        function.__init__ = _checked(function.__init__, function.__name__)  # type: ignore[misc]
        return function
    return _checked(function, function.__qualname__)


def _checked(function: Any, label: str) -> Any:
    bind = signature(function).bind

    @cache
    def checks() -> Mapping[str, Check]:  # at the first call: what the annotations name may be defined later
        return _read_signature(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = bind(*args, **kwargs)
        except TypeError as error:
            raise _explain_call(error, function, kwargs).of(label) from None
        given = bound.arguments
        if not given.keys() - {"self", "cls"}:
            return function(*args)
        try:
            for name, check in checks().items():
                if name in given:
                    given[name] = check.take(given[name], name)
        except ArgumentError as error:
            raise error.of(label) from None
        return function(*bound.args, **bound.kwargs)

    return call


def find_problems(function: Callable[..., Any], values: Mapping[str, Any]) -> list[ArgumentError]:
    """Return the problem of each value that a checked function, or class, would refuse by this name."""
    checked: Any = vars(function)["__init__"] if isinstance(function, type) else function
    problems = []
    for name, check in _read_signature(unwrap(checked)).items():
        try:
            if name in values:
                check.take(values[name], name)
        except ArgumentError as error:
            problems.append(error)
    return problems


def _explain_call(error: TypeError, function: Any, given: Mapping[str, Any]) -> ArgumentError:
    """Describe a call whose arguments are unknown, missing, too many or given twice."""
    parameters = [name for name in signature(function).parameters if name not in ("self", "cls")]
    if unknown := [name for name in given if name not in parameters]:
        near = _near(unknown[0], parameters)
        return ArgumentError(unknown[0], f"one of {', '.join(parameters)}", "another name", remedy=near)
    missing = [name for name in parameters if f"missing a required argument: '{name}'" in str(error)]
    if missing:
        return ArgumentError(missing[0], "a value, as it has no default", "none")
    return ArgumentError("arguments", f"each of {', '.join(parameters)} at most once", str(error))


@dataclass(frozen=True)
class Check:
    """Check a value, and convert it to what the function reads. This one takes anything.

    expected   what is taken, as a phrase for messages
    """

    expected: str = "anything"

    def fits(self, value: Any) -> bool:
        """Return True if the value is of this kind, though it may still be out of range."""
        return True

    def take(self, value: Any, name: str) -> Any:
        """Return the value as it is meant. Raises ArgumentError."""
        if not self.fits(value):
            raise self.refuse(value, name)
        return value

    def within(self, limits: "Range") -> "Check":
        """Return the check with these limits, which only numbers have."""
        return self

    def suggest(self, value: Any) -> str:
        """Return a sentence that says how to write what was probably meant; '' if that is not known."""
        return ""

    def refuse(self, value: Any, name: str) -> ArgumentError:
        """Return the error for a value that is not taken."""
        return ArgumentError(name, self.expected, show(value), remedy=self.suggest(value))


@dataclass(frozen=True)
class Range:
    """The limits of a number in an annotation, as Annotated[float, Range(0, 1)]. Both ends are included."""

    least: float = -inf
    most: float = inf

    def __str__(self) -> str:
        if self.least == -inf and self.most == inf:
            return ""
        if self.most == inf:
            return f" of at least {self.least:,.12g}"
        return f" from {self.least:,.12g} to {self.most:,.12g}"


FLOAT_MOST = sys.float_info.max
"""The largest number that a float holds; whole numbers are limited to 64 bits, as in torch and numpy."""


@dataclass(frozen=True)
class _Nothing(Check):
    expected: str = "None"

    def fits(self, value: Any) -> bool:
        return value is None


@dataclass(frozen=True)
class _Flag(Check):
    expected: str = "True or False"

    def fits(self, value: Any) -> bool:
        return isinstance(_plain(value), bool)

    def take(self, value: Any, name: str) -> Any:
        return bool(super().take(value, name))


@dataclass(frozen=True)
class Number(Check):
    """A number of Python or numpy within limits; True and False are none.

    kind       what is expected before its limits
    infinite   infinity is a number too
    """

    expected: str = "a number"
    kind: str = "a number"
    limits: Range = Range(-FLOAT_MOST, FLOAT_MOST)
    infinite: bool = False

    def fits(self, value: Any) -> bool:
        number = _plain(value)
        return isinstance(number, Real) and not isinstance(number, bool)

    def take(self, value: Any, name: str) -> Any:
        number = _plain(super().take(value, name))
        number = int(number) if isinstance(number, Integral) else float(number)
        infinite = isinstance(number, float) and not isfinite(number)
        if not self.limits.least <= number <= self.limits.most or (infinite and not self.infinite):
            raise self.refuse(value, name)
        return number

    def within(self, limits: Range) -> Check:
        both = Range(max(limits.least, self.limits.least), min(limits.most, self.limits.most))
        return replace(self, expected=f"{self.kind}{limits}", limits=both)


@dataclass(frozen=True)
class _Whole(Number):
    expected: str = "a whole number"
    kind: str = "a whole number"
    limits: Range = Range(-(2**63), 2**63 - 1)

    def fits(self, value: Any) -> bool:
        return super().fits(value) and isinstance(_plain(value), Integral)


@dataclass(frozen=True)
class _Text(Check):
    expected: str = "a text"

    def fits(self, value: Any) -> bool:
        return isinstance(value, str)

    def take(self, value: Any, name: str) -> Any:
        return check_unicode(str(super().take(value, name)), name)


@dataclass(frozen=True)
class _Choice(Check):
    choices: tuple[Any, ...] = ()

    def fits(self, value: Any) -> bool:
        return isinstance(value, str)

    def take(self, value: Any, name: str) -> Any:
        if not self.fits(value) or value not in self.choices:
            raise self.refuse(value, name)
        return str(value)

    def suggest(self, value: Any) -> str:
        return _near(value, self.choices) if isinstance(value, str) else ""


@dataclass(frozen=True)
class _Either(Check):
    """One of several kinds; the first that fits decides."""

    kinds: tuple[Check, ...] = ()

    def fits(self, value: Any) -> bool:
        return any(kind.fits(value) for kind in self.kinds)

    def take(self, value: Any, name: str) -> Any:
        for kind in self.kinds:
            if kind.fits(value):
                return kind.take(value, name)
        raise self.refuse(value, name)

    def within(self, limits: Range) -> Check:
        return _either([kind.within(limits) for kind in self.kinds])

    def suggest(self, value: Any) -> str:
        return next(filter(None, (kind.suggest(value) for kind in self.kinds)), "")


@dataclass(frozen=True)
class _Several(Check):
    """A list, or another sequence, of items; one item stands for a list of one.

    make   makes the container that is annotated
    """

    item: Check = Check()
    make: Callable[[Iterable[Any]], Any] = list

    def fits(self, value: Any) -> bool:
        return self.item.fits(value) or is_sequence(value)

    def take(self, value: Any, name: str) -> Any:
        super().take(value, name)
        if not is_sequence(value):
            return self.make([self.item.take(value, name)])
        items = [self.item.take(each, f"{name}[{at}]") for at, each in enumerate(as_list(value))]
        return tuple(items) if isinstance(value, tuple) else self.make(items)


@dataclass(frozen=True)
class _Row(Check):
    """A tuple or a list with an item of its own kind at each place."""

    items: tuple[Check, ...] = ()

    def fits(self, value: Any) -> bool:
        return isinstance(value, tuple | list) and len(value) == len(self.items)

    def take(self, value: Any, name: str) -> Any:
        pairs = enumerate(zip(self.items, super().take(value, name), strict=True))
        return tuple(item.take(each, f"{name}[{at}]") for at, (item, each) in pairs)


@dataclass(frozen=True)
class _Table(Check):
    expected: str = "a mapping of names to values"
    value: Check = Check()

    def fits(self, value: Any) -> bool:
        return isinstance(value, Mapping)

    def take(self, value: Any, name: str) -> Any:
        if unnamed := [key for key in super().take(value, name) if not isinstance(key, str)]:
            raise ArgumentError(name, self.expected, f"the name {show(unnamed[0])}")
        return {key: self.value.take(each, f"{name}[{key!r}]") for key, each in value.items()}


@dataclass(frozen=True)
class _Function(Check):
    expected: str = "a function"

    def fits(self, value: Any) -> bool:
        return callable(value)


@dataclass(frozen=True)
class _Instance(Check):
    kind: type = object

    def fits(self, value: Any) -> bool:
        return isinstance(value, self.kind)

    def suggest(self, value: Any) -> str:
        if not isinstance(value, Mapping) or not is_dataclass(self.kind):
            return ""
        settings = ", ".join(f"{key}={show(each)}" for key, each in list(value.items())[:3])
        return f"Give {self.kind.__name__}({settings})"


class OnDisk(Protocol):
    """Describe a `Bundle`: what has a path can be given in the place of its path."""

    @property
    def path(self) -> Path: ...

    @property
    def manifest(self) -> Any: ...


def _is_on_disk(value: Any) -> bool:
    return hasattr(value, "manifest") and isinstance(getattr(value, "path", None), Path)


def name_of(thing: str | os.PathLike[str] | OnDisk) -> str:
    """Return a name, a path, or the path of a Bundle, as a text."""
    return os.fspath(thing) if isinstance(thing, str | os.PathLike) else str(thing.path)


def optional_name(thing: str | os.PathLike[str] | None) -> str | None:
    """Return a name or a path as a text; None stays None."""
    return None if thing is None else os.fspath(thing)


@dataclass(frozen=True)
class Place(Check):
    """A path: a text, or an object for a path. It may begin with `~`.

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
        return isinstance(value, str) or (self.bundle and _is_on_disk(value))

    def take(self, value: Any, name: str) -> Any:
        given = super().take(value, name)
        path = str(given.path) if self.bundle and _is_on_disk(given) else os.fspath(given)
        if not path:
            raise ArgumentError(name, self.expected, "an empty text")
        if "\0" in path:
            raise ArgumentError(name, self.expected, f"a zero byte in {show(path)}")
        try:
            os.fsencode(path)
        except UnicodeEncodeError:
            raise ArgumentError(name, self.expected, f"half a character in {show(path)}") from None
        self._look(path, name)
        if self.is_file and path.endswith(("/", os.sep)):
            raise ArgumentError(name, self.expected, f"{show(path)}, which ends as a folder does")
        return self.make(self._expand(path, name))

    def _look(self, path: str, name: str) -> None:
        """Raise ArgumentError for a path that is too long, or a circle of links; `train=a.tsv,test=b.tsv` is none."""
        if "=" in path:
            return
        try:
            os.lstat(path)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return
        except OSError as error:
            raise ArgumentError(name, self.expected, f"{show(path)}: {error.strerror}") from None

    def _expand(self, path: str, name: str) -> str:
        if not path.startswith("~") or os.path.lexists(path):
            return path
        expanded = str(Path(path).expanduser()) if path[:2] in ("~", "~/") else os.path.expanduser(path)  # noqa: PTH111
        if expanded == path:
            raise ArgumentError(name, self.expected, f"{show(path)}, and there is no such user")
        return expanded


@dataclass(frozen=True)
class Like(Check):
    """An object with these attributes, such as a model of a library that is not imported here."""

    attributes: tuple[str, ...] = ()

    def fits(self, value: Any) -> bool:
        return not isinstance(value, type) and all(hasattr(value, name) for name in self.attributes)


@dataclass(frozen=True)
class _Data(Check):
    """A data set by its name or path, a table, or a table for each split."""

    expected: str = "a folder, a file, a hub id, a DataFrame or Dataset, or {'train': ..., 'test': ...} of these"

    def fits(self, value: Any) -> bool:
        if isinstance(value, Mapping):
            return bool(value) and all(hasattr(table, "to_parquet") for table in value.values())
        return hasattr(value, "to_parquet") or NAME.fits(value)

    def take(self, value: Any, name: str) -> Any:
        super().take(value, name)
        return NAME.take(value, name) if NAME.fits(value) else value


@dataclass(frozen=True)
class _Teacher(Check):
    """A model by its name or path, or as objects."""

    expected: str = "an alias, a folder, a hub id, a Bundle, or a model with its tokenizer, (model, tokenizer)"

    def fits(self, value: Any) -> bool:
        pair = isinstance(value, tuple) and len(value) == 2 and all(hasattr(part, "save_pretrained") for part in value)
        return pair or MODEL.fits(value)

    def take(self, value: Any, name: str) -> Any:
        super().take(value, name)
        return MODEL.take(value, name) if MODEL.fits(value) else value


NAME = Place("a name or a path", make=str)
MODEL = Place("an alias, a folder, a hub id or a Bundle", make=str, bundle=True)
PathName = Annotated[str | os.PathLike[str], Place()]
"""A path of a file or a folder."""
FileName = Annotated[str | os.PathLike[str], Place("the path of a file", is_file=True)]
Name = Annotated[str | os.PathLike[str], NAME]
"""The name of something, or its path."""
BundleLike = Annotated[str | os.PathLike[str] | OnDisk, Place("the folder of a bundle, or a Bundle", bundle=True)]
ModelLike = Annotated[str | os.PathLike[str] | OnDisk, MODEL]
"""The name or path of a model, or a Bundle."""
Share = Annotated[float, Range(0, 1)]
Count = Annotated[int, Range(1)]
Threads = Annotated[int, Range(1, 1024)]
Batch = Annotated[int, Range(1, 100_000)]
Tokens = Annotated[int, Range(1, 1_000_000)]
MOST_SEED = 2**32 - 1
"""The largest seed that numpy's generators accept."""
SEEDS = Range(0, MOST_SEED)
Seed = Annotated[int, SEEDS]
MINUTES = Range(0.1, 366 * 24 * 60)
"""A limit of time, from six seconds to a year."""


class TableLike(Protocol):
    """Describe a pandas DataFrame, or a datasets.Dataset."""

    to_parquet: Any


DataLike = Annotated[str | os.PathLike[str] | TableLike | Mapping[str, TableLike], _Data()]
TeacherLike = Annotated[
    Union[str, os.PathLike[str], OnDisk, "tuple[PreTrainedModel, PreTrainedTokenizerBase]"],
    _Teacher(),
]


class _AnyName(type):
    """Let an unknown name have any attribute and any parameters."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __getitem__(cls, _: Any) -> Any:
        return cls


class _Unknown(metaclass=_AnyName):
    """Stand for a name in an annotation that is only imported for type checks."""


class _Names(dict[str, Any]):
    """Look names of annotations up in a module; those that are missing are unknown."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, _Unknown)


def _read_signature(function: Any) -> dict[str, Check]:
    """Make the check of each annotated parameter."""
    scope = _Names(function.__globals__)
    hints = {name: hint for name, hint in function.__annotations__.items() if name != "return"}

    def hinted() -> None: ...

    hinted.__annotations__ = hints
    resolved = get_type_hints(hinted, globalns=function.__globals__, localns=scope, include_extras=True)
    found = {}
    for name, parameter in signature(function).parameters.items():
        if name in resolved and parameter.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            found[name] = read_annotation(resolved[name])
    return found


def read_annotation(annotation: Any) -> Check:
    """Make the check of an annotation; what is none of Python's types and none of ours takes anything."""
    if annotation in _SIMPLE:
        return _SIMPLE[annotation]
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _read_metadata(inner[0], inner[1:])
    if origin in _GENERIC:
        return _GENERIC[origin](inner)
    plain = isinstance(annotation, type) and annotation is not _Unknown and not getattr(annotation, "_is_protocol", 0)
    return _Instance(annotation.__name__, kind=annotation) if plain else Check()


def _read_metadata(annotation: Any, metadata: Sequence[Any]) -> Check:
    """Read what is annotated: a check of our own, or the limits of a number, as Typer's options have them too."""
    check = read_annotation(annotation)
    optional = isinstance(check, _Nothing) or _Nothing() in getattr(check, "kinds", ())
    for each in metadata:
        if isinstance(each, Check):
            check = _either([each, _Nothing()]) if optional else each
        elif isinstance(each, Range):
            check = check.within(each)
        elif (least := getattr(each, "min", None)) is not None or getattr(each, "max", None) is not None:
            most = getattr(each, "max", None)
            check = check.within(Range(-inf if least is None else least, inf if most is None else most))
    return check


def _either(kinds: Iterable[Check]) -> Check:
    """Join kinds to one, the choices among them to one list; anything is taken if one takes anything."""
    flat, choices = list[Check](), list[Any]()
    for kind in kinds:
        parts = kind.kinds if isinstance(kind, _Either) else (kind,)
        flat += [part for part in parts if not isinstance(part, _Choice)]
        choices += [choice for part in parts if isinstance(part, _Choice) for choice in part.choices]
    if any(type(kind) is Check for kind in flat):
        return Check()
    if choices:
        flat.insert(0, _choice(tuple(choices)))
    flat.sort(key=lambda kind: isinstance(kind, _Nothing))
    if len(flat) == 1:
        return flat[0]
    return _Either(_join([kind.expected for kind in flat]), kinds=tuple(flat))


def _choice(choices: tuple[Any, ...]) -> Check:
    return _Choice(_join([str(choice) for choice in choices]), choices=choices)


def _join(phrases: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(phrases[:-1]), phrases[-1]]))


def _several(inner: tuple[Any, ...], make: Callable[[Iterable[Any]], Any] = list) -> Check:
    item = read_annotation(inner[0]) if inner else Check()
    if type(item) is Check:
        return item
    return _Several(f"a list, each item {item.expected}", item=item, make=make)


def _tuple(inner: tuple[Any, ...]) -> Check:
    if len(inner) == 2 and inner[1] is Ellipsis:
        return _several(inner[:1], tuple)
    items = tuple(read_annotation(each) for each in inner)
    return _Row(f"({', '.join(item.expected for item in items)})", items=items)


def _table(inner: tuple[Any, ...]) -> Check:
    return _Table(value=read_annotation(inner[1]))


def _union(inner: tuple[Any, ...]) -> Check:
    return _either([read_annotation(each) for each in inner])


_SIMPLE: Mapping[Any, Check] = {
    Any: Check(),
    object: Check(),
    None: _Nothing(),
    NoneType: _Nothing(),
    bool: _Flag(),
    int: _Whole(),
    float: Number(),
    str: _Text(),
    Path: Place(),
}
_GENERIC: Mapping[Any, Callable[[tuple[Any, ...]], Check]] = {
    Literal: _choice,
    Union: _union,
    UnionType: _union,
    list: _several,
    Sequence: _several,
    Iterable: _several,
    tuple: _tuple,
    dict: _table,
    Mapping: _table,
    Callable: lambda _: _Function(),
}


def read_texts(texts: Any, columns: Sequence[str] = ("text",), *, name: str = "texts", where: str = "") -> Any:
    """Return texts, or pairs of texts, as a list; for an iterator, as one that checks each text when it is read.

    columns   what one row holds: one text, or two

    A list, tuple, column of a table (of pandas, pyarrow, datasets, polars), array, or iterator is taken. Raises
    ArgumentError for a single text, which is no list of texts, for a table, a mapping or a set, and for items that are
    no text, such as a missing value.
    """
    expected = f"a list of {'pairs of ' if len(columns) == 2 else ''}texts"
    if isinstance(texts, str):
        raise ArgumentError(name, expected, f"the text {show(texts)}", remedy="Give [text] for one text", where=where)
    if not is_sequence(texts):
        remedy = "Give one of its columns, such as table['text']" if is_table(texts) else ""
        raise ArgumentError(name, expected, show(texts), remedy=remedy, where=where)
    if isinstance(texts, Iterator):
        return (_read_text(each, columns, f"{name}[{at}]", where) for at, each in enumerate(texts))
    return [_read_text(each, columns, f"{name}[{at}]", where) for at, each in enumerate(as_list(texts))]


def _read_text(value: Any, columns: Sequence[str], name: str, where: str) -> Any:
    """Return one text, or a pair of texts. Raises ArgumentError."""
    if len(columns) == 1:
        if not isinstance(value, str):
            raise ArgumentError(name, f"one text ({columns[0]})", show(value), where=where)
        return check_unicode(str(value), name, where)
    if not isinstance(value, tuple | list) or len(value) != 2 or not all(isinstance(part, str) for part in value):
        remedy = "On the command line, --pair is the second" if isinstance(value, str) else ""
        expected = f"a pair of texts ({' and '.join(columns)})"
        raise ArgumentError(name, expected, show(value), remedy=remedy, where=where)
    return tuple(check_unicode(str(part), name, where) for part in value)


def check_unicode(text: str, name: str, where: str = "") -> str:
    """Return the text. Raises ArgumentError for one with half a character, which no tokenizer and no file takes."""
    lone = None if text.isascii() else LONE_SURROGATE.search(text)
    if lone is not None:
        found = f"half a character (\\u{ord(lone[0]):04x}) at {lone.start()}"
        raise ArgumentError(name, "a text in Unicode", found, where=where)
    return text


def is_table(value: Any) -> bool:
    """Return True for a DataFrame, Dataset or other table, whose items are names of columns or rows."""
    return not isinstance(value, type) and (hasattr(value, "columns") or hasattr(value, "column_names"))


def is_sequence(value: Any) -> bool:
    """Return True for what has items in an order: not for texts, mappings, sets and tables."""
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping | Set) or is_table(value):
        return False
    return isinstance(value, Iterable) and getattr(value, "ndim", 1) > 0


def as_list(values: Any) -> list[Any]:
    """Return the items of a sequence, or of a column or array of pandas, numpy, pyarrow or polars, as Python's own."""
    for method in ("tolist", "to_pylist", "to_list"):
        if hasattr(values, method):
            return list(getattr(values, method)())
    return list(values)


def _near(word: str, choices: Iterable[str]) -> str:
    """Return "Did you mean 'x'?" if a choice is close, else '': the message lists them all."""
    hint = did_you_mean(word, choices).strip()
    return hint if hint.startswith("Did you mean") else ""


def show(value: Any) -> str:
    """Write a value for a message: short ones as they are, others by their kind."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str | int | float | bytes | NoneType) or getattr(value, "ndim", None) == 0:
        text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
        return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."
    kind = value.__name__ if isinstance(value, type) else type(value).__name__
    article = "an" if kind[0].lower() in "aeiou" else "a"
    return f"the class {kind}" if isinstance(value, type) else f"{article} {kind}"


def _plain(value: Any) -> Any:
    """Return Python's own value for a scalar of numpy or torch."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    return value
