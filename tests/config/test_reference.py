"""Options of the functions that a recipe names: what is refused before anything runs."""

from typing import Any

import numpy as np
import pytest

from compress.config.reference import check, parse


@pytest.mark.parametrize("rate", [15, -0.15, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["bert.mask", "albert.mask", "distilbert.mask", "electra.mask", "t5.corrupt_spans"])
def test_a_share_of_tokens_is_no_percentage(name: str, rate: float) -> None:
    (problem,) = check(parse({"by": name, "rate": rate}), "stages[0].corrupt")
    assert problem.startswith(f"stages[0].corrupt: {name}: rate: Input should be ")
    assert check(parse({"by": name, "rate": 0.15}), "stages[0].corrupt") == []


@pytest.mark.parametrize(
    ("name", "option", "wrong"),
    [
        ("bert.mask", "masked", 80),
        ("bert.mask", "random", 10),
        ("bert.mask", "max_predictions", 0),
        ("bert.segment_pairs", "short", 10),
        ("albert.mask", "longest", 0),
        ("albert.sentence_order", "short", 10),
        ("electra.mask", "masked", 85),
        ("gkd.divergence", "beta", 1.5),
        ("gkd.OnPolicy", "share", 50),
        ("gkd.OnPolicy", "prompt", 0),
        ("gkd.OnPolicy", "new_tokens", 0),
        ("minillm.PolicyGradient", "mix", 20),
        ("minillm.PolicyGradient", "prompt", 0),
        ("minillm.PolicyGradient", "new_tokens", 0),
        ("movement.movement", "steps", 0),
        ("roberta.static_mask", "copies", 0),
        ("roberta.static_mask", "rate", 15),
    ],
)
def test_numbers_without_a_meaning_are_refused(name: str, option: str, wrong: float) -> None:
    given = ("words", "max_length", "rng")
    (problem,) = check(parse({"by": name, option: wrong}), "here", given=given)
    assert problem.startswith(f"here: {name}: {option}: Input should be ")


@pytest.mark.parametrize(
    ("option", "wrong"),
    [("rate", "0.15"), ("rate", "1e-1"), ("rate", True), ("max_predictions", "20"), ("max_predictions", 20.0)],
)
def test_what_only_reads_as_a_number_is_refused(option: str, wrong: Any) -> None:
    """It would reach the function as it is, hours later."""
    (problem,) = check(parse({"by": "bert.mask", option: wrong}), "here")
    assert problem.startswith(f"here: bert.mask: {option}: Input should be a valid ")
    assert problem.endswith(f"found {wrong!r}")


@pytest.mark.parametrize("wrong", ["no", "false", 0])
def test_only_true_and_false_are_answers(wrong: object) -> None:
    (problem,) = check(parse({"by": "leaf.l2", "squared": wrong}), "here")
    assert problem.startswith("here: leaf.l2: squared: Input should be a valid boolean")


@pytest.mark.parametrize("number", [np.float32(0.25), np.float64(0.25), np.int64(1), 1])
def test_numbers_of_numpy_are_numbers(number: Any) -> None:
    assert check(parse({"by": "bert.mask", "rate": number, "max_predictions": np.int64(20)}), "here") == []
