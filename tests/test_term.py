"""One line of YAML becomes a term, or a message that says what is wrong with it."""

import pytest

from compress.config.term import Term, parse
from compress.errors import RecipeError
from compress.papers import tinybert


def test_a_line_with_nothing_but_a_loss() -> None:
    term = parse({"loss": "tinybert.hidden"}, "here")
    assert term == Term("tinybert.hidden", weight=1.0, layers="uniform", project=False, only=(), options={})


def test_every_setting_and_the_rest_are_options_of_the_loss() -> None:
    line = {
        "loss": "hinton.soft_targets",
        "weight": 2,
        "layers": [[0, 3], [-1, 11]],
        "project": "shared",
        "only": ["classification", "multilabel"],
        "temperature": 4.0,
        "heads": 12,
    }
    term = parse(line, "here")
    assert term.layers == ((0, 3), (-1, 11))
    assert (term.weight, term.project, term.only) == (2.0, "shared", ("classification", "multilabel"))
    assert term.options == {"temperature": 4.0, "heads": 12}
    assert term.plain() == line


def test_plain_leaves_defaults_out() -> None:
    assert parse({"loss": "a.b", "weight": 1.0, "layers": "uniform", "only": []}, "here").plain() == {"loss": "a.b"}
    assert parse({"loss": "a.b", "only": "regression"}, "here").plain() == {"loss": "a.b", "only": ["regression"]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tinybert.hidden", "expected a mapping with `loss: paper.function`, found 'tinybert.hidden'"),
        ({"weight": 1.0}, "expected a mapping with `loss: paper.function`"),
        ({"loss": 3}, "loss must be a name, found 3"),
        ({"loss": "a.b", "layers": "unifrom"}, "no layer map 'unifrom'. Did you mean 'uniform'?"),
        ({"loss": "a.b", "layers": "zebra"}, "no layer map 'zebra'. Known: first, last, skip, spread, top, uniform."),
        ({"loss": "a.b", "layers": [0, 1]}, "layers must be a named map or a list of [student, teacher] pairs"),
        ({"loss": "a.b", "only": "clasification"}, "no task kind 'clasification'. Did you mean 'classification'?"),
        ({"loss": "a.b", "only": 5}, "no task kind '5'. Known: classification, "),
        ({"loss": "a.b", "weight": "much"}, "weight must be a number from 0 to 1,000,000, found 'much'"),
        ({"loss": "a.b", "weight": True}, "weight must be a number from 0 to 1,000,000, found True"),
        ({"loss": "a.b", "weight": float("nan")}, "weight must be a number from 0 to 1,000,000, found nan"),
        ({"loss": "a.b", "weight": -1}, "weight must be a number from 0 to 1,000,000, found -1"),
        ({"loss": "a.b", "weight": 10**400}, "weight must be a number from 0 to 1,000,000"),
        ({"loss": "a..b"}, "loss 'a..b' names no function"),
        ({"loss": "a.b; import os"}, "names no function"),
        ({"loss": "unittest.__main__.main"}, "loss 'unittest.__main__.main' names no function"),
        ({"loss": "a.b", "reads": 3}, "reads must be the name of a signal, found 3"),
        ({"loss": "a.b", "project": 1}, "project must be true, false or a name shared by several terms, found 1"),
    ],
)
def test_what_is_wrong_with_a_line(line: object, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        parse(line, "stages[0].objective[1]")
    assert len(error.value.problems) == 1
    assert error.value.problems[0].startswith("stages[0].objective[1]: ")
    assert message in error.value.problems[0]


def test_only() -> None:
    term = Term("a.b", only=("regression",))
    assert term.serves("regression")
    assert not term.serves("classification")
    assert term.serves(None)
    assert Term("a.b").serves("classification")


def test_a_function_is_called_by_its_address() -> None:
    assert Term(tinybert.hidden).name == "tinybert.hidden"
