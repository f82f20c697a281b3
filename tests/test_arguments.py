"""Arguments are converted where their meaning is clear, and refused by name where it is not."""

import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import typer
from datasets import Dataset

import compress
from compress.arguments import (
    BundleLike,
    DataLike,
    FileName,
    ModelLike,
    NameLike,
    PathName,
    check_arguments,
    find_problems,
    read_texts,
)
from compress.errors import ArgumentError, CompressError
from compress.exporters.artifact import Bundle
from compress.values import Range
from tests import tiny

if TYPE_CHECKING:
    from decimal import Decimal

KINDS: Mapping[str, Any] = {
    "flag": bool,
    "whole": int,
    "number": float,
    "text": str,
    "limited": Annotated[int, Range(1, 9)],
    "option": Annotated[float | None, typer.Option(min=0.5, max=2)],
    "choice": Literal["auto", "static", "qat"] | None,
    "path": PathName,
    "file": FileName | None,
    "name": NameLike,
    "bundle": BundleLike,
    "model": ModelLike,
    "data": DataLike | None,
    "texts": Sequence[str],
    "numbers": tuple[int, ...],
    "pair": tuple[float, float],
    "table": Mapping[str, int],
    "either": Literal["auto"] | float,
    "plain": Path | None,
}


def take(kind: str, value: Any) -> Any:
    """Return what a function gets for an argument of this kind."""

    def function(argument: Any) -> Any:
        return argument

    function.__annotations__ = {"argument": KINDS[kind]}
    return check_arguments(function)(value)


class Own:
    def __fspath__(self) -> str:
        return "own"


HOME = str(Path.home())


@pytest.mark.parametrize(
    ("kind", "value", "meant"),
    [
        ("flag", np.bool_(False), False),
        ("whole", np.uint8(3), 3),
        ("whole", np.array(3), 3),
        ("number", 2, 2),
        ("number", np.float32(0.5), 0.5),
        ("number", np.int64(-2), -2),
        ("text", np.str_("a"), "a"),
        ("limited", 9, 9),
        ("option", 0.5, 0.5),
        ("option", None, None),
        ("choice", "qat", "qat"),
        ("choice", None, None),
        ("path", "a/b", Path("a/b")),
        ("path", Own(), Path("own")),
        ("path", "~/a", Path(HOME, "a")),
        ("path", Path("~/a"), Path(HOME, "a")),
        ("path", "folder/", Path("folder")),
        ("file", "a.json", Path("a.json")),
        ("file", None, None),
        ("name", "owner/name", "owner/name"),
        ("name", Path("a/b"), "a/b"),
        ("name", "~", HOME),
        ("data", "train=a.tsv,test=b.tsv", "train=a.tsv,test=b.tsv"),
        ("data", Path("rows.csv"), "rows.csv"),
        ("texts", ["a", "b"], ["a", "b"]),
        ("texts", ("a",), ("a",)),
        ("texts", "one", ["one"]),
        ("texts", {"a": 1, "b": 2}.keys(), ["a", "b"]),
        ("texts", pd.Series(["a", "b"]), ["a", "b"]),
        ("texts", (each for each in "ab"), ["a", "b"]),
        ("numbers", [1, np.int8(2)], (1, 2)),
        ("numbers", range(3), (0, 1, 2)),
        ("numbers", np.arange(2), (0, 1)),
        ("numbers", 4, (4,)),
        ("pair", [1, 2.5], (1, 2.5)),
        ("table", {"a": np.int64(1)}, {"a": 1}),
        ("either", "auto", "auto"),
        ("either", 3, 3),
        ("plain", "a", Path("a")),
    ],
)
def test_what_is_meant_is_taken(kind: str, value: Any, meant: Any) -> None:
    taken = take(kind, value)
    assert taken == meant
    assert type(taken) is type(meant)
    if isinstance(meant, list | tuple):
        assert [type(each) for each in taken] == [type(each) for each in meant]


NUMBERS_ONLY = ("1", b"1", [1], {"a": 1}, object(), float("nan"), True, None, 1j)


@pytest.mark.parametrize(
    ("kind", "value", "name"),
    [
        *(("flag", value, "argument") for value in (0, 1, "yes", None, "True", np.int64(1))),
        *(("whole", value, "argument") for value in (*NUMBERS_ONLY, 1.0, np.float64(2), 2**63)),
        *(("number", value, "argument") for value in (*NUMBERS_ONLY, float("inf"), 10**400, np.array([1.0]))),
        *(("text", value, "argument") for value in (None, 3, b"a", ["a"], Path("a"), "\ud83d", "a\udc80")),
        *(("limited", value, "argument") for value in (0, 10, -1)),
        *(("option", value, "argument") for value in (0.4, 2.1, "1", True)),
        *(("choice", value, "argument") for value in ("Auto", "statc", "", 1, True, ["auto"])),
        *(
            ("path", value, "argument")
            for value in ("", None, 3, b"a", "a\0b", "\ud800", "x" * 300, ["a"], "~nobody-x/a")
        ),
        *(("file", value, "argument") for value in ("a/", "a.json/", "", 3)),
        *(("name", value, "argument") for value in ("", None, 3, b"a", "a\0b", ["a"])),
        *(("bundle", value, "argument") for value in ("", None, 3, {"path": "a"}, object(), Bundle)),
        *(("data", value, "argument") for value in (3, [], ["a"], {}, {"train": "a"}, b"a", {"a", "b"}, "\ud800")),
        *(("texts", value, "argument") for value in (None, b"ab", {"a": 1}, {"a"}, pd.DataFrame({"a": ["b"]}), 3)),
        ("texts", ["a", None], "argument[1]"),
        ("texts", pd.Series(["a", None]), "argument[1]"),
        ("numbers", [1, 2.5], "argument[1]"),
        ("numbers", "12", "argument"),
        ("pair", [1, 2, 3], "argument"),
        ("pair", [1, "2"], "argument[1]"),
        ("table", {1: 2}, "argument"),
        ("table", {"a": "b"}, "argument['a']"),
        ("either", "never", "argument"),
        ("either", True, "argument"),
    ],
)
def test_what_is_not_meant_is_refused(kind: str, value: Any, name: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        take(kind, value)
    error = refused.value
    assert isinstance(error, CompressError)
    assert error.name == name
    assert error.where.endswith("function")
    assert f"{name}: expected {error.expected}; found {error.found}" in str(error)
    assert len(str(error)) < 400


def test_a_near_choice_and_an_object_are_suggested() -> None:
    with pytest.raises(ArgumentError) as refused:
        take("choice", "statc")
    assert refused.value.remedy == "Did you mean 'static'?"
    with pytest.raises(ArgumentError) as refused:
        compress.forecast(teacher="x", data="y", options={"seed": 3})  # type: ignore[arg-type]
    assert refused.value.remedy == "Give RunOptions(seed=3)"


def test_a_bundle_stands_for_its_path(tmp_path: Path) -> None:
    bundle = tiny.bundle(tmp_path / "bundle")
    assert take("bundle", bundle) == bundle.path
    assert take("model", bundle) == str(bundle.path)
    assert Bundle.load(bundle).path == bundle.path
    with pytest.raises(ArgumentError):
        take("path", bundle)


def test_calls_that_do_not_fit_are_explained() -> None:
    for arguments, name, remedy in (
        ({"techer": "x"}, "techer", "Did you mean 'teacher'?"),
        ({"teacher": "minilm", "data": "intents"}, "out", ""),
    ):
        with pytest.raises(ArgumentError) as refused:
            compress.distill(**arguments)  # type: ignore[call-overload]
        assert (refused.value.name, refused.value.remedy, refused.value.where) == (name, remedy, "distill")
    with pytest.raises(ArgumentError, match="too many positional"):
        compress.push("a", "b", "c")  # type: ignore[call-arg]


def test_a_function_keeps_its_signature_and_a_class_stays_a_class() -> None:
    assert [*inspect.signature(compress.push).parameters] == ["bundle", "repo", "private", "dry_run"]
    assert compress.push.__doc__
    assert isinstance(compress.RunOptions, type)
    assert compress.RunOptions(seed=np.int64(3)) == compress.RunOptions(seed=3)


def test_annotations_that_are_not_imported_take_anything() -> None:
    @check_arguments
    def function(amount: "Decimal | None", rows: "Iterable[Decimal]" = (), *, count: int = 1) -> Any:
        return amount, rows, count

    assert function("anything", "rows", count=2) == ("anything", "rows", 2)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError):
        function(None, count="2")  # type: ignore[arg-type]


def test_all_problems_of_several_values() -> None:
    @check_arguments
    @dataclass(frozen=True)
    class Settings:
        count: int
        share: Annotated[float, Range(0, 1)] = 0.5
        name: str = ""

    problems = find_problems(Settings, {"count": "3", "share": 2, "name": "x", "other": 1})
    assert [each.name for each in problems] == ["count", "share"]


TEXTS = ["wake me up", "", "naïve 🌍"]
COLUMNS = {
    "list": TEXTS,
    "tuple": tuple(TEXTS),
    "values": dict(enumerate(TEXTS)).values(),
    "numpy": np.array(TEXTS),
    "objects": np.array(TEXTS, dtype=object),
    "pandas": pd.Series(TEXTS),
    "pandas objects": pd.Series(TEXTS, dtype=object),
    "categories": pd.Series(TEXTS, dtype="category"),
    "index": pd.Index(TEXTS),
    "pyarrow": pa.array(TEXTS),
    "chunked": pa.chunked_array([TEXTS[:1], TEXTS[1:]]),
    "datasets": Dataset.from_dict({"text": TEXTS})["text"],
}


@pytest.mark.parametrize("form", COLUMNS)
def test_any_column_of_texts_is_read(form: str) -> None:
    found = read_texts(COLUMNS[form])
    assert found == TEXTS
    assert {type(each) for each in found} == {str}


def test_an_iterator_is_read_as_it_comes() -> None:
    def stream() -> Iterator[Any]:
        yield "a"
        yield None

    found = read_texts(stream())
    assert isinstance(found, Iterator)
    assert next(found) == "a"
    with pytest.raises(ArgumentError) as refused:
        next(found)
    assert refused.value.name == "texts[1]"


@pytest.mark.parametrize("pairs", [[("a", "b")], [["a", "b"]], np.array([["a", "b"]]), pa.array([["a", "b"]])])
def test_pairs_of_texts(pairs: Any) -> None:
    assert read_texts(pairs, ("question", "context")) == [("a", "b")]


@pytest.mark.parametrize(
    ("texts", "columns", "name"),
    [
        ("wake me up", 1, "texts"),
        (b"wake", 1, "texts"),
        (None, 1, "texts"),
        (float("nan"), 1, "texts"),
        (3, 1, "texts"),
        ({"text": "a"}, 1, "texts"),
        ({"a", "b"}, 1, "texts"),
        (pd.DataFrame({"text": TEXTS}), 1, "texts"),
        (Dataset.from_dict({"text": TEXTS}), 1, "texts"),
        (pa.table({"text": TEXTS}), 1, "texts"),
        (np.array("a"), 1, "texts"),
        (["a", None], 1, "texts[1]"),
        (["a", b"b"], 1, "texts[1]"),
        (["a", 3], 1, "texts[1]"),
        ([("a", "b")], 1, "texts[0]"),
        (pd.Series(["a", None]), 1, "texts[1]"),
        (pd.Series([1.5, 2.5]), 1, "texts[0]"),
        (pa.array(["a", None]), 1, "texts[1]"),
        (["a", "\ud83d"], 1, "texts[1]"),
        ("ab", 2, "texts"),
        (["ab"], 2, "texts[0]"),
        ([("a", "b", "c")], 2, "texts[0]"),
        ([("a", None)], 2, "texts[0]"),
        ([("a", "\udfff")], 2, "texts[0]"),
        ([{"question": "a", "context": "b"}], 2, "texts[0]"),
    ],
)
def test_what_is_no_list_of_texts_is_refused(texts: Any, columns: int, name: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        list(read_texts(texts, ("one", "two")[:columns]))
    assert refused.value.name == name


def test_a_bundle_answers_columns_and_refuses_the_rest(tmp_path: Path) -> None:
    bundle = tiny.bundle(tmp_path / "bundle")
    answers = bundle.predict(TEXTS)
    assert bundle.predict(pd.DataFrame({"text": TEXTS})["text"]) == answers  # type: ignore[call-overload]
    assert list(bundle.predict(iter(TEXTS))) == answers
    for texts in ("wake me up", {"a": 1}, pd.DataFrame({"text": TEXTS}), None, float("nan"), [None]):
        for ask in (bundle.predict, bundle.open().predict):
            with pytest.raises(ArgumentError) as refused:
                ask(texts)
            assert refused.value.name.startswith("texts")
    for door in (bundle.predict, bundle.embed, bundle.complete):
        with pytest.raises(ArgumentError) as refused:
            door("wake me up")  # type: ignore[operator]
        assert (refused.value.name, refused.value.remedy) == ("texts", "Give [text] for one text")


def test_the_check_imports_the_standard_library_alone() -> None:
    ours = {name for name in sys.modules if name.startswith("compress.")}
    assert {"compress.arguments", "compress.values"} <= ours
    for module in ("arguments", "values"):
        source = Path(compress.__file__).with_name(f"{module}.py").read_text(encoding="utf-8")
        imported = {
            line.split()[1].partition(".")[0] for line in source.splitlines() if line.startswith(("from ", "import "))
        }
        assert imported - {"compress"} <= set(sys.stdlib_module_names)
