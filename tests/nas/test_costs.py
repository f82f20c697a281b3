"""What a shape costs before it is trained, and a budget that says no: what nothing can keep is told with what could."""

import re
from typing import Any

import pytest
from transformers import BertConfig

from compress.errors import ArgumentError, DamagedError, SearchError
from compress.latency.features import Terms
from compress.latency.measure import Sample, exported
from compress.latency.model import LatencyModel, LatencyTable, model_cost
from compress.models import heads
from compress.models.flops import count_parameters, flops_per_token
from compress.nas.config import SURE_DEVIATIONS, Budget, SearchConfig, Space, describe_choice
from compress.nas.costs import BAND, CostModel, choose_within_budget
from compress.nas.space import Shapes
from compress.records.latency import Setting
from tests import tiny

BERT = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, vocab_size=99)


def costs(**budget: Any) -> CostModel:
    """Of the space width-depth, on a device that takes 0.2 ms and another for each 500 million operations."""
    space = Space.load("width-depth")
    shapes, setting = Shapes.from_space(space, BERT), Setting()
    samples = []
    for choice in shapes.drawn(12, seed=0):
        terms = Terms.from_config(shapes.config(choice), setting)
        samples.append(Sample(describe_choice(choice), terms, 0.2 + terms.flops / 5e8))
    latencies = LatencyTable(
        {"int8": LatencyModel.fit(samples, setting, "int8")}, {"teacher int8": Sample("teacher", Terms({}, 0.0), 3.0)}
    )
    search = SearchConfig.parse(teacher="t", data="d", space=space, budget=Budget(**budget))
    return CostModel(search, shapes, latencies, "classification")


def test_without_a_budget_all_shapes_are_within() -> None:
    found = choose_within_budget(costs(), 1000)
    assert len(found) == 400
    assert (found[0]["layers"], found[0]["hidden"], found[0]["ffn"]) == (2, 96, 192)


def test_three_in_four_use_most_of_the_budget() -> None:
    given = costs(max_latency_ms=2.0)
    found = choose_within_budget(given, 40)
    estimates = [given.latency(choice) for choice in found]
    assert len({describe_choice(choice) for choice in found}) == 40
    assert all(one.ms + SURE_DEVIATIONS * one.error_ms <= 2.0 for one in estimates)
    assert sum(one.ms >= BAND * 2.0 for one in estimates) == 30
    assert found[0]["layers"] == 2


def test_a_speedup_is_over_the_teachers_own_file() -> None:
    assert costs(speedup=2.0).limits() == {"latency": 1.5}


def test_parameters_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.nas.costs.PRICED_BY_PARTS", 60)
    given = costs(max_params=1e6)
    found = choose_within_budget(given, 20)
    assert found
    assert all(given.facts(choice)["parameters"] <= 1e6 for choice in found)


def test_an_impossible_budget_names_the_closest_shape_and_a_possible_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.nas.costs.PRICED_BY_PARTS", 20)
    with pytest.raises(SearchError, match=r"impossible budget: of 400 shapes the closest is layers 2") as error:
        choose_within_budget(costs(max_latency_ms=0.1), 20)
    (least,) = re.findall(r"--max-latency-ms of at least ([\d.]+),", str(error.value))
    assert choose_within_budget(costs(max_latency_ms=float(least)), 1)
    with pytest.raises(SearchError, match=r"has .* parameters; allowed are 1,000. Ask for --max-params of"):
        choose_within_budget(costs(max_params=1e3), 20)


def test_measurements_survive_their_files(tmp_path: Any) -> None:
    latencies = costs().latencies
    file = tmp_path / "latency.json"
    assert LatencyTable.load(file) is None
    latencies.save(file)
    again = LatencyTable.load(file)
    assert again == latencies
    assert again.models["int8"].costs == latencies.models["int8"].costs
    file.write_text(file.read_text().replace('"ms": 3.0', '"ms": "fast"'))
    with pytest.raises(DamagedError):
        LatencyTable.load(file)


def test_a_speedup_is_a_latency_once_the_teacher_is_measured() -> None:
    assert Budget(speedup=2.0).limits(8.0) == {"latency": 4.0}
    assert Budget(speedup=2.0, max_latency_ms=3.0).limits(8.0) == {"latency": 3.0}
    assert Budget(max_latency_ms=3.0, min_score=0.8).limits(None) == {"latency": 3.0, "score": 0.8}
    with pytest.raises(SearchError, match="the teacher has no latency to compare with"):
        Budget(speedup=2.0).limits(None)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_latency_ms": 0.0}, "--max-latency-ms 0: expected a number above 0"),
        ({"max_file_mb": -1.0}, "--max-file-mb -1"),
        ({"min_score": 90.0}, "--min-score 90: no metric is above 1"),
        ({"speedup": 1.0}, "--speedup 1: the teacher itself has 1"),
    ],
)
def test_impossible_limits_are_refused(given: dict[str, float], said: str) -> None:
    with pytest.raises(SearchError, match=said):
        Budget(**given)


def test_a_limit_that_is_no_number_is_refused() -> None:
    with pytest.raises(ArgumentError, match="max_latency_ms: expected a number; found nan"):
        Budget(max_latency_ms=float("nan"))


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
def test_file_sizes_are_estimated(precision: Any, exported_once: None) -> None:
    config = tiny.config("bert", layers=3, hidden=256, vocab_size=4000)
    with exported({"a": config}, Setting(seq=16), precision=precision) as files:
        size = files["a"].stat().st_size / 1e6
    assert model_cost(config, precision).file_mb == pytest.approx(size, rel=0.04)
