"""Shapes within a budget, by what some measured ones say."""

from typing import Any

import pytest
from transformers import BertConfig

from compress.errors import SearchError
from compress.latency.costs import LatencyTable
from compress.latency.features import Terms
from compress.latency.measure import Sample
from compress.latency.model import LatencyModel
from compress.nas import space_file
from compress.nas.budget import BAND, SURE, Budget
from compress.nas.config import SearchConfig
from compress.nas.costs import CostModel, choose_within_budget, describe_choice
from compress.nas.space import Shapes
from compress.records.latency import Setting

BERT = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, vocab_size=99)


def costs(**budget: Any) -> CostModel:
    """Of the space width-depth, on a device that takes 0.2 ms and another for each 500 million operations."""
    space = space_file.load("width-depth")
    shapes, setting = Shapes.of(space, BERT), Setting()
    samples = []
    for choice in shapes.drawn(12, seed=0):
        terms = Terms.from_config(shapes.config(choice), setting)
        samples.append(Sample(describe_choice(choice), terms, 0.2 + terms.flops / 5e8))
    latencies = LatencyTable(
        {"int8": LatencyModel.fit(samples, setting, "int8")},
        {"teacher int8": Sample("teacher", Terms({}, 0.0), 3.0)},
    )
    search = SearchConfig.of(teacher="t", data="d", space=space, budget=Budget(**budget))
    return CostModel(search, shapes, latencies, "classification")


def test_without_a_budget_all_of_a_space_is_within_the_smallest_first() -> None:
    found = choose_within_budget(costs(), 1000)
    assert len(found) == 400
    assert (found[0]["layers"], found[0]["hidden"], found[0]["ffn"]) == (2, 96, 192)


def test_most_use_much_of_the_budget_and_some_are_the_rest_of_the_front() -> None:
    given = costs(max_latency_ms=2.0)
    found = choose_within_budget(given, 40)
    estimates = [given.latency(choice) for choice in found]
    assert len({describe_choice(choice) for choice in found}) == 40
    assert all(one.ms + SURE * one.error_ms <= 2.0 for one in estimates)
    assert sum(one.ms >= BAND * 2.0 for one in estimates) == 30
    assert found[0]["layers"] == 2


def test_a_speed_up_is_over_the_teachers_own_file() -> None:
    assert costs(speedup=2.0).limits() == {"latency": 1.5}


def test_parameters_are_counted_where_they_are_limited() -> None:
    given = costs(max_params=1e6)
    found = choose_within_budget(given, 20)
    assert found
    assert all(given.facts(choice)["parameters"] <= 1e6 for choice in found)


def test_an_impossible_budget_names_the_closest() -> None:
    with pytest.raises(SearchError, match=r"impossible budget: of 400 shapes the closest is layers 2, hidden 96"):
        choose_within_budget(costs(max_latency_ms=0.1), 20)


def test_what_was_measured_survives_its_files(tmp_path: Any) -> None:
    latencies = costs().latencies
    assert LatencyTable.load(tmp_path, ("int8",)) is None
    latencies.save(tmp_path)
    assert LatencyTable.load(tmp_path, ("int8",)) == latencies
    assert LatencyTable.from_json(latencies.to_json()).models == latencies.models
