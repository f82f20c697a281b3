"""Check the arguments of public functions by their annotations, so that each is either
read as meant or refused.

    @check_arguments
    def quantize(bundle: BundleLike, *, max_drop: Share = 0.005): ...

What is given is converted where its meaning is clear: numpy scalars to Python's,
path-like objects to `Path`, `~` to the home folder, a single value to a list of one
where several are expected. Anything else raises an ArgumentError, which names the
parameter, what was expected and what was found. Annotations that are only imported for
type checks accept anything. Only the standard library is imported: `predict` begins
here."""

import builtins
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from inspect import Parameter, signature, unwrap
from math import inf
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    ParamSpec,
    Protocol,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from compress.errors import ArgumentError
from compress.values import (
    ArgumentCheck,
    FlagCheck,
    FunctionCheck,
    InstanceCheck,
    MappingCheck,
    NothingCheck,
    NumberCheck,
    OnDisk,
    PathCheck,
    PercentCheck,
    Range,
    RowCheck,
    SequenceCheck,
    TextCheck,
    WholeCheck,
    as_list,
    check_path_text,
    check_unicode,
    choice,
    either,
    is_sequence,
    is_table,
    nearest,
    show,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Called = TypeVar("Called", bound=Callable[..., Any])
Keywords = ParamSpec("Keywords")
Request = TypeVar("Request")
InnerTypes = tuple[Any, ...]
"""What an annotation has in brackets."""
Result = TypeVar("Result")


def check_arguments(function: Called) -> Called:
    """Check what a function, or the constructor of a class, is called with, by its
    annotations."""
    if isinstance(function, type):
        # a class is wrapped in place, for it must stay a class
        function.__init__ = _checked(function.__init__, function.__name__)  # type: ignore[misc]
        return function
    return _checked(function, function.__qualname__)


def _checked(function: Any, label: str) -> Any:
    bind = signature(function).bind

    @cache
    # at the first call: what the annotations name may be defined later
    def checks() -> Mapping[str, ArgumentCheck]:
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


def with_keywords_of(
    request: Callable[Keywords, Request],
) -> Callable[[Callable[[Request], Result]], Callable[Keywords, Result]]:
    """Let a function that takes a request be called with the keywords of the class of
    the request, as if they were its own."""

    def expand(function: Callable[[Request], Result]) -> Callable[Keywords, Result]:
        @wraps(function)
        def call(*args: Keywords.args, **kwargs: Keywords.kwargs) -> Result:
            try:
                made = request(*args, **kwargs)
            except ArgumentError as error:
                raise error.of(function.__qualname__) from None
            return function(made)

        own = signature(request)
        result = signature(function).return_annotation
        call.__signature__ = own.replace(return_annotation=result)  # type: ignore[attr-defined]  # unknown to typeshed
        return call

    return expand


def find_problems(
    function: Callable[..., Any],
    values: Mapping[str, Any],
) -> list[ArgumentError]:
    """Return an error for each of these values that a checked function, or class, would
    refuse as the argument of this name."""
    checked: Any = (
        vars(function)["__init__"] if isinstance(function, type) else function
    )
    problems = []
    for name, check in _read_signature(unwrap(checked)).items():
        try:
            if name in values:
                check.take(values[name], name)
        except ArgumentError as error:
            problems.append(error)
    return problems


def _explain_call(
    error: TypeError,
    function: Any,
    given: Mapping[str, Any],
) -> ArgumentError:
    """Describe a call whose arguments are unknown, missing, too many or given twice."""
    parameters = [
        name for name in signature(function).parameters if name not in ("self", "cls")
    ]
    if unknown := [name for name in given if name not in parameters]:
        near = nearest(unknown[0], parameters)
        return ArgumentError(
            unknown[0], f"one of {', '.join(parameters)}", "another name", remedy=near
        )
    missing = [
        name
        for name in parameters
        if f"missing a required argument: '{name}'" in str(error)
    ]
    if missing:
        return ArgumentError(missing[0], "a value, as it has no default", "none")
    return ArgumentError(
        "arguments", f"each of {', '.join(parameters)} at most once", str(error)
    )


def name_of(thing: str | os.PathLike[str] | OnDisk) -> str:
    """Return a name, a path, or the path of a Bundle, as a text."""
    return os.fspath(thing) if isinstance(thing, str | os.PathLike) else str(thing.path)


def optional_name(thing: str | os.PathLike[str] | None) -> str | None:
    """Return a name or a path as a text; None stays None."""
    return None if thing is None else os.fspath(thing)


@dataclass(frozen=True, eq=False, repr=False)
class DataCheck(ArgumentCheck):
    """A data set by its name or path, a table, or a table for each split.
    `data.sources` checks what a text names."""

    expected: str = (
        "a folder, a file, a hub id, a DataFrame or Dataset, or {'train': ..., 'test': "
        "...} of these"
    )

    def fits(self, value: Any) -> bool:
        if isinstance(value, Mapping):
            return bool(value) and all(
                hasattr(table, "to_parquet") for table in value.values()
            )
        return hasattr(value, "to_parquet") or NAME_CHECK.fits(value)

    def take(self, value: Any, name: str) -> Any:
        super().take(value, name)
        return (
            check_path_text(os.fspath(value), name) if NAME_CHECK.fits(value) else value
        )


@dataclass(frozen=True, eq=False, repr=False)
class TeacherLikeCheck(ArgumentCheck):
    """A model by its name or path, or as objects."""

    expected: str = (
        "an alias, a folder, a hub id, a Bundle, or a model with its tokenizer, "
        "(model, tokenizer)"
    )

    def fits(self, value: Any) -> bool:
        pair = (
            isinstance(value, tuple)
            and len(value) == 2
            and all(hasattr(part, "save_pretrained") for part in value)
            and [hasattr(part, "config") for part in value] == [True, False]
        )
        return pair or MODEL_CHECK.fits(value)

    def take(self, value: Any, name: str) -> Any:
        super().take(value, name)
        return MODEL_CHECK.take(value, name) if MODEL_CHECK.fits(value) else value


NAME_CHECK = PathCheck("a name or a path", make=str)
MODEL_CHECK = PathCheck(
    "an alias, a folder, a hub id or a Bundle", make=str, bundle=True
)
PathName = Annotated[str | os.PathLike[str], PathCheck()]
"""A path of a file or a folder."""
FileName = Annotated[
    str | os.PathLike[str], PathCheck("the path of a file", is_file=True)
]
"""A path of a file, which cannot end in a slash."""
NameLike = Annotated[str | os.PathLike[str], NAME_CHECK]
"""The name of something, or its path."""
BundleLike = Annotated[
    str | os.PathLike[str] | OnDisk,
    PathCheck("the folder of a bundle, or a Bundle", bundle=True),
]
"""The folder of a bundle or a run, or a Bundle."""
BUNDLES = SequenceCheck(
    "a list of bundles",
    item=PathCheck("the folder of a bundle, or a Bundle", str, bundle=True),
)
"""Several bundles by their paths, for parameters annotated as texts."""
ModelLike = Annotated[str | os.PathLike[str] | OnDisk, MODEL_CHECK]
"""The name or path of a model, or a Bundle."""
Share = Annotated[float, Range(0, 1)]
Count = Annotated[int, Range(1)]
ThreadCount = Annotated[int, Range(1, 1024)]
TokenCount = Annotated[int, Range(1, 1_000_000)]
MOST_SEED = 2**32 - 1
"""The largest seed that numpy's generators accept."""
SEEDS = Range(0, MOST_SEED)
SeedNumber = Annotated[int, SEEDS]
PERCENT = PercentCheck()
"""A share, also as a text in percent, for parameters annotated as texts."""
MINUTES = Range(0.1, 366 * 24 * 60)
"""A time limit in minutes, from six seconds to a year."""


class TableLike(Protocol):
    """Describe a pandas DataFrame, or a datasets.Dataset."""

    to_parquet: Any


DataLike = Annotated[
    str | os.PathLike[str] | TableLike | Mapping[str, TableLike], DataCheck()
]
TeacherLike = Annotated[
    Union[
        str, os.PathLike[str], OnDisk, "tuple[PreTrainedModel, PreTrainedTokenizerBase]"
    ],
    TeacherLikeCheck(),
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


def _read_signature(function: Any) -> dict[str, ArgumentCheck]:
    """Make the check of each annotated parameter."""
    scope = _Names(function.__globals__)
    hints = {
        name: hint
        for name, hint in function.__annotations__.items()
        if name != "return"
    }

    def hinted() -> None: ...

    hinted.__annotations__ = hints
    resolved = get_type_hints(
        hinted, globalns=function.__globals__, localns=scope, include_extras=True
    )
    found = {}
    for name, parameter in signature(function).parameters.items():
        if name in resolved and parameter.kind not in (
            Parameter.VAR_POSITIONAL,
            Parameter.VAR_KEYWORD,
        ):
            found[name] = read_annotation(resolved[name])
    return found


def read_annotation(annotation: Any) -> ArgumentCheck:
    """Make the check of an annotation; a type that is neither Python's nor ours accepts
    anything."""
    if annotation in _SIMPLE:
        return _SIMPLE[annotation]
    origin = get_origin(annotation)
    inner = get_args(annotation)
    if origin is Annotated:
        return _read_metadata(inner[0], inner[1:])
    if origin in _GENERIC:
        return _GENERIC[origin](inner)
    plain = (
        isinstance(annotation, type)
        and annotation is not _Unknown
        and not getattr(annotation, "_is_protocol", 0)
    )
    return (
        InstanceCheck(annotation.__name__, kind=annotation)
        if plain
        else ArgumentCheck()
    )


def _read_metadata(annotation: Any, metadata: Sequence[Any]) -> ArgumentCheck:
    """Read what is annotated: a check of our own, or the limits of a number, as Typer's
    options have them too."""
    check = read_annotation(annotation)
    optional = any(
        isinstance(kind, NothingCheck) for kind in getattr(check, "kinds", (check,))
    )
    for each in metadata:
        if isinstance(each, ArgumentCheck):
            check = either([each, NothingCheck()]) if optional else each
        elif isinstance(each, Range):
            check = check.within(each)
        elif (least := getattr(each, "min", None)) is not None or getattr(
            each, "max", None
        ) is not None:
            most = getattr(each, "max", None)
            check = check.within(
                Range(-inf if least is None else least, inf if most is None else most)
            )
    return check


def _several(
    inner: InnerTypes,
    make: Callable[[Iterable[Any]], Any] = list,
) -> ArgumentCheck:
    item = read_annotation(inner[0]) if inner else ArgumentCheck()
    if type(item) is ArgumentCheck:
        return item
    return SequenceCheck(f"a list, each item {item.expected}", item=item, make=make)


def _tuple(inner: InnerTypes) -> ArgumentCheck:
    if len(inner) == 2 and inner[1] is Ellipsis:
        return _several(inner[:1], tuple)
    items = tuple(read_annotation(each) for each in inner)
    return RowCheck(f"({', '.join(item.expected for item in items)})", items=items)


def _table(inner: InnerTypes) -> ArgumentCheck:
    return MappingCheck(value=read_annotation(inner[1]))


def _union(inner: InnerTypes) -> ArgumentCheck:
    return either([read_annotation(each) for each in inner])


_SIMPLE: Mapping[Any, ArgumentCheck] = {
    Any: ArgumentCheck(),
    object: ArgumentCheck(),
    None: NothingCheck(),
    NoneType: NothingCheck(),
    bool: FlagCheck(),
    int: WholeCheck(),
    float: NumberCheck(),
    str: TextCheck(),
    Path: PathCheck(),
}
_GENERIC: Mapping[Any, Callable[[InnerTypes], ArgumentCheck]] = {
    Literal: choice,
    Union: _union,
    UnionType: _union,
    list: _several,
    Sequence: _several,
    Iterable: _several,
    tuple: _tuple,
    dict: _table,
    Mapping: _table,
    Callable: lambda _: FunctionCheck(),
}


def read_texts(
    texts: Any,
    columns: Sequence[str] = ("text",),
    *,
    name: str = "texts",
    where: str = "",
) -> Any:
    """Return texts, or pairs of texts, as a list; an iterator becomes one that checks
    each text when it is read.

    columns   what one row holds: one text, or two

    A list, tuple, column of a table (of pandas, pyarrow, datasets, polars), array, or
    iterator is taken. Raises ArgumentError for a single text, a table, a mapping or a
    set, and for items that are not texts, such as missing values.
    """
    expected = f"a list of {'pairs of ' if len(columns) == 2 else ''}texts"
    if isinstance(texts, str):
        raise ArgumentError(
            name,
            expected,
            f"the text {show(texts)}",
            remedy="Give [text] for one text",
            where=where,
        )
    if not is_sequence(texts):
        remedy = (
            "Give one of its columns, such as table['text']" if is_table(texts) else ""
        )
        raise ArgumentError(name, expected, show(texts), remedy=remedy, where=where)
    if isinstance(texts, Iterator):
        return (
            _read_text(each, columns, f"{name}[{at}]", where)
            for at, each in enumerate(texts)
        )
    return [
        _read_text(each, columns, f"{name}[{at}]", where)
        for at, each in enumerate(as_list(texts))
    ]


@dataclass(frozen=True, eq=False, repr=False)
class TextsCheck(ArgumentCheck):
    """Texts, as `read_texts` takes them."""

    def take(self, value: Any, name: str) -> Any:
        return read_texts(value, name=name)


TextsLike = Annotated[Iterable[str], TextsCheck()]
"""A list, column or iterator of texts; not a single text."""


def _read_text(value: Any, columns: Sequence[str], name: str, where: str) -> Any:
    """Return one text, or a pair of texts. Raises ArgumentError."""
    if len(columns) == 1:
        if not isinstance(value, str):
            raise ArgumentError(
                name, f"one text ({columns[0]})", show(value), where=where
            )
        return check_unicode(str(value), name, where)
    if (
        not isinstance(value, tuple | list)
        or len(value) != 2
        or not all(isinstance(part, str) for part in value)
    ):
        remedy = (
            "On the command line, --pair is the second"
            if isinstance(value, str)
            else ""
        )
        expected = f"a pair of texts ({' and '.join(columns)})"
        raise ArgumentError(name, expected, show(value), remedy=remedy, where=where)
    return tuple(check_unicode(str(part), name, where) for part in value)
