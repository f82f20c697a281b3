"""Parse the lines of an objective into terms."""

import pytest

from compress.config.term import Term, parse
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


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tinybert.hidden", "expected a mapping with `loss: paper.function`, found 'tinybert.hidden'"),
        ({"weight": 1.0}, "expected a mapping with `loss: paper.function`"),
        ({"loss": 3}, "loss must be"),
        ({"loss": "a.b", "layers": "unifrom"}, "no layer map 'unifrom'. Did you mean 'uniform'?"),
        ({"loss": "a.b", "layers": "zebra"}, "no layer map 'zebra'. Known: first, last, skip, spread, top, uniform."),
        ({"loss": "a.b", "layers": [0, 1]}, "layers must be"),
        ({"loss": "a.b", "only": "clasification"}, "no task kind 'clasification'. Did you mean 'classification'?"),
        ({"loss": "a.b", "only": 5}, "no task kind '5'. Known: classification, "),
        *(
            ({"loss": "a.b", "weight": weight}, f"weight must be a number from 0 to 1,000,000, found {weight!r}")
            for weight in ("much", True, float("nan"), -1, 10**400)
        ),
        ({"loss": "a..b"}, "loss 'a..b' names no function"),
        ({"loss": "a.b; import os"}, "names no function"),
        ({"loss": "unittest.__main__.main"}, "loss 'unittest.__main__.main' names no function"),
        ({"loss": "a.b", "reads": 3}, "reads must be"),
        ({"loss": "a.b", "project": 1}, "project must be"),
    ],
)
def test_an_invalid_line_has_one_problem(line: object, message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse(line)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_terms_for_some_kinds_of_task() -> None:
    term = Term("a.b", only=("regression",))
    assert [term.serves(kind) for kind in ("regression", "classification", None)] == [True, False, True]
    assert Term("a.b").serves("classification")


def test_the_name_of_a_function() -> None:
    assert Term(tinybert.hidden).name == "tinybert.hidden"
