"""A budget says no before anything is trained, and why; one that nothing can keep says what could be kept."""

from typing import Any

import pytest

from compress.errors import SearchError
from compress.latency.costs import model_cost
from compress.latency.measure import exported
from compress.latency.model import Estimate
from compress.models import heads
from compress.models.flops import count_parameters, flops_per_token
from compress.nas.budget import SURE, Budget, Priced, check_possible
from compress.records.latency import Setting
from tests import tiny

FACTS = {"parameters": 5e6, "file_mb": 6.0, "flops_per_token": 1e7}


def test_a_latency_must_be_kept_by_two_deviations() -> None:
    budget = Budget(max_latency_ms=4.0)
    assert budget.fits(Estimate(3.8, 0.1), FACTS) is None
    assert budget.fits(Estimate(3.8, 0.11), FACTS) == "latency 4.02 ms (3.8 + 0.22), limit 4"
    assert Estimate(3.8, 0.11).ms + SURE * 0.11 > 4


def test_every_limit_is_held_and_named() -> None:
    budget = Budget(max_latency_ms=1.0, max_params=1e6, max_file_mb=2.0)
    why = budget.fits(Estimate(3.0, 0.0), FACTS)
    assert why is not None
    assert [part.split(" ")[0] for part in why.split("; ")] == ["latency", "parameters", "file_mb"]
    assert budget.excess(Estimate(3.0, 0.0), FACTS) == pytest.approx(5.0)
    assert Budget().fits(None, {}) is None


def test_a_band_keeps_out_what_leaves_the_budget_unused() -> None:
    budget = Budget(max_latency_ms=4.0).banded()
    assert budget.min_latency_ms == pytest.approx(3.2)
    assert "below the 3.2 ms it may use" in str(budget.fits(Estimate(3.1, 0.0), FACTS))
    assert budget.fits(Estimate(3.3, 0.0), FACTS) is None
    assert Budget(max_params=3.0).banded() == Budget(max_params=3.0)
    assert "fewer than 6,000,000" in str(Budget(min_params=6e6).fits(None, FACTS))


def test_a_speedup_is_a_latency_once_the_teacher_is_measured() -> None:
    assert Budget(speedup=2.0).with_teacher(8.0).limits() == {"latency": 4.0}
    assert Budget(speedup=2.0, max_latency_ms=3.0).with_teacher(8.0).limits() == {"latency": 3.0}
    assert Budget(max_latency_ms=3.0, min_score=0.8).with_teacher(None).limits() == {"latency": 3.0, "score": 0.8}
    with pytest.raises(SearchError, match="the teacher has no latency to compare with"):
        Budget(speedup=2.0).with_teacher(None)
    with pytest.raises(SearchError, match="contradictory bounds: --min-latency-ms 5 is not below --max-latency-ms 4"):
        Budget(speedup=2.0, min_latency_ms=5.0).with_teacher(8.0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_latency_ms": 2.0, "min_latency_ms": 3.0}, "--min-latency-ms 3 is not below --max-latency-ms 2"),
        ({"max_params": 1e6, "min_params": 1e6}, "--min-params 1e\\+06 is not below --max-params 1e\\+06"),
        ({"max_latency_ms": 0.0}, "--max-latency-ms 0: expected a number above 0"),
        ({"max_file_mb": -1.0}, "--max-file-mb -1"),
        ({"max_latency_ms": float("nan")}, "--max-latency-ms nan"),
        ({"min_score": 90.0}, "--min-score 90: no metric is above 1"),
        ({"speedup": 1.0}, "--speedup 1: the teacher itself has 1"),
    ],
)
def test_contradictions_are_refused(given: dict[str, float], said: str) -> None:
    with pytest.raises(SearchError, match=said):
        Budget(**given)


def test_an_impossible_budget_names_the_closest_shape_and_what_to_ask_for() -> None:
    shapes = {
        name: Priced(name, Estimate(ms, 0.01), {**FACTS, "parameters": count})
        for name, ms, count in (("1x128", 0.31, 4.4e6), ("2x128", 0.5, 4.8e6), ("6x512", 9.0, 3e7))
    }
    check_possible(Budget(max_latency_ms=0.4), shapes)
    with pytest.raises(SearchError) as told:
        check_possible(Budget(max_latency_ms=0.1), shapes, fixed_ms=0.06)
    assert str(told.value) == (
        "impossible budget: of 3 shapes the closest is 1x128: takes 0.31 +- 0.01 ms, of which 0.06 ms are fixed for "
        "any shape, where 0.1 ms are allowed. Ask for --max-latency-ms of at least 0.33, fewer tokens, or let the "
        "space have fewer layers or narrower ones"
    )
    check_possible(Budget(max_latency_ms=0.33), shapes)
    with pytest.raises(
        SearchError, match=r"has 4.4e\+06 parameters, where 1e\+06 are allowed. Ask for --max-params of"
    ):
        check_possible(Budget(max_params=1e6), shapes)
    with pytest.raises(
        SearchError, match=r"none is within all limits; 1x128 keeps every upper one, but: latency 0\.31 ms"
    ):
        check_possible(Budget(max_latency_ms=0.45, min_latency_ms=0.4), shapes)
    with pytest.raises(SearchError, match="the space is empty"):
        check_possible(Budget(), {})


def test_a_limit_on_what_is_not_known_is_an_error() -> None:
    with pytest.raises(SearchError, match="that of a shape is not known"):
        Budget(max_latency_ms=1.0).fits(None, FACTS)


@pytest.mark.parametrize("family", ["bert", "distilbert", "albert", "mobilebert", "deberta-v2", "electra"])
def test_parameters_are_those_of_the_model(family: str) -> None:
    config = tiny.config(family, layers=3)
    found = model_cost(config)
    model = heads.create(config, "task", "classification")
    assert found.parameters == count_parameters(model)
    assert 0 < found.body_parameters < found.parameters


def test_flops_are_those_of_the_model() -> None:
    config = tiny.config("bert")
    model = heads.create(config, "task", "classification")
    assert model_cost(config, seq=16).flops_per_token == pytest.approx(flops_per_token(model, 16))


def test_shared_layers_count_once() -> None:
    config = tiny.config("bert", layers=4)
    own, one = model_cost(config), model_cost(config, shared={"attention": 1, "ffn": 1})
    assert one.parameters < own.parameters
    assert one.parameters - model_cost(tiny.config("bert", layers=1)).parameters == 0
    assert not hasattr(config, "shared_layers")


@pytest.mark.parametrize("precision", ["int8", "fp32", "fp16", "w8", "q4"])
def test_the_size_of_the_file_is_foreseen(precision: Any) -> None:
    config = tiny.config("bert", layers=3, hidden=256, vocab_size=4000)
    with exported({"a": config}, Setting(seq=16), precision=precision) as files:
        size = files["a"].stat().st_size / 1e6
    assert model_cost(config, precision).file_mb == pytest.approx(size, rel=0.04)
    assert set(model_cost(config).plain()) == {"parameters", "flops_per_token", "file_mb"}
