"""Parse the lines of an objective into terms."""

from typing import Any

import numpy as np
import pytest

from compress.config.term import Term, parse
from compress.errors import ArgumentError
from compress.papers import tinybert


def test_a_line_with_only_a_loss() -> None:
    term = parse({"loss": "tinybert.hidden"})
    assert term == Term("tinybert.hidden", weight=1.0, layers="uniform", project=False, only=(), options={})


def test_settings_and_options() -> None:
    line = {
        "loss": "hinton.soft_targets",
        "weight": 2,
        "layers": [[0, 3], [-1, 11]],
        "project": "shared",
        "only": ["classification", "multilabel"],
        "temperature": 4.0,
        "heads": 12,
    }
    term = parse(line)
    assert term.layers == ((0, 3), (-1, 11))
    assert (term.weight, term.project, term.only) == (2.0, "shared", ("classification", "multilabel"))
    assert term.options == {"temperature": 4.0, "heads": 12}
    assert term.plain() == line


def test_plain_omits_defaults() -> None:
    assert parse({"loss": "a.b", "weight": 1.0, "layers": "uniform", "only": []}).plain() == {"loss": "a.b"}
    assert parse({"loss": "a.b", "only": "regression"}).plain() == {"loss": "a.b", "only": ["regression"]}


WRONG = [
    ({"loss": 3}, "loss: "),
    ({"loss": "a.b", "layers": "unifrom"}, "found 'unifrom'. Did you mean 'uniform'?"),
    ({"loss": "a.b", "layers": "zebra"}, "layers: expected uniform, last, first, top, skip or spread"),
    ({"loss": "a.b", "layers": [0, 1]}, "layers[0]: "),
    ({"loss": "a.b", "layers": [[0, 1], [2]]}, "layers[1]: "),
    ({"loss": "a.b", "layers": [[0, 1.5]]}, "layers[0][1]: "),
    ({"loss": "a.b", "only": "clasification"}, "found 'clasification'. Did you mean 'classification'?"),
    ({"loss": "a.b", "only": 5}, "only: "),
    *(
        ({"loss": "a.b", "weight": weight}, "weight: expected a number from 0 to 1,000,000; found ")
        for weight in ("much", True, float("nan"), float("inf"), -1, 10**400, None)
    ),
    ({"loss": "a..b"}, "found 'a..b'"),
    ({"loss": "hidden"}, "found 'hidden'"),
    ({"loss": "a.b; import os"}, "loss: "),
    ({"loss": "unittest.__main__.main"}, "loss: "),
    ({"loss": "a.b", "reads": 3}, "reads: "),
    ({"loss": "a.b", "project": 1}, "project: "),
]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tinybert.hidden", "expected a mapping with `loss: paper.function`, found 'tinybert.hidden'"),
        ({"weight": 1.0}, "expected a mapping with `loss: paper.function`"),
        *WRONG,
    ],
)
def test_an_invalid_line_has_one_problem(line: object, message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse(line)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("line", "message"), WRONG)
def test_python_is_as_strict_as_yaml(line: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        Term(**line)
    assert message in str(refused.value)


def test_all_problems_of_a_line_at_once() -> None:
    with pytest.raises(ValueError) as error:
        parse({"loss": "a.b", "weight": -1, "layers": "lasst", "only": ["nothing"]})
    assert [line.partition(":")[0] for line in str(error.value).split("\n")] == ["weight", "layers", "only[0]"]


def test_numbers_of_numpy_are_numbers() -> None:
    term = Term("a.b", weight=np.float32(0.5), layers=[[np.int64(0), 3]], only="regression")  # type: ignore[arg-type]
    assert term == Term("a.b", weight=0.5, layers=((0, 3),), only=("regression",))
    assert [type(value) for value in (term.weight, term.layers, term.only)] == [float, tuple, tuple]


def test_terms_for_some_kinds_of_task() -> None:
    term = Term("a.b", only=("regression",))
    assert [term.serves(kind) for kind in ("regression", "classification", None)] == [True, False, True]
    assert Term("a.b").serves("classification")


def test_the_name_of_a_function() -> None:
    assert Term(tinybert.hidden).name == "tinybert.hidden"
