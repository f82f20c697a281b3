"""A model finds what each term costs, says how sure it is, and is honest where it cannot know."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from compress.errors import SearchError
from compress.latency.features import Terms
from compress.latency.measure import Sample, choose_spread
from compress.latency.model import Errors, LatencyModel
from compress.records.latency import FEWEST_SHAPES, Setting
from tests import tiny

SETTING = Setting(seq=32)
COSTS = {
    "fixed": 0.05,
    "projections": 2e-8,
    "feed_forward": 3e-8,
    "softmax": 4e-7,
    "activation gelu": 3e-7,
    "activation relu": 1e-7,
}
SPACE = {
    f"{layers}x{heads * size}/{heads}/{ffn}": {"layers": layers, "hidden": heads * size, "heads": heads, "ffn": ffn}
    for layers in range(1, 7)
    for heads in (2, 4, 6)
    for size in (16, 32)
    for ffn in (64, 256)
}


def config(name: str, **changes: Any) -> Any:
    sizes = SPACE[name]
    found = tiny.config("bert", layers=sizes["layers"], hidden=sizes["hidden"], heads=sizes["heads"], **changes)
    found.intermediate_size = sizes["ffn"]
    return found


def truth(terms: Terms) -> float:
    return sum(COSTS.get(name, 0.0) * amount for name, amount in terms.counts.items())


def samples(count: int, noise: float = 0.0, seed: int = 0, **changes: Any) -> tuple[Sample, ...]:
    draw = np.random.default_rng(seed)
    names = choose_spread({name: config(name) for name in SPACE}, count, SETTING)
    terms = [Terms.from_config(config(name, **changes), SETTING) for name in names]
    return tuple(
        Sample(name, each, truth(each) * (1 + noise * draw.standard_normal()))
        for name, each in zip(names, terms, strict=True)
    )


def held_out(model: LatencyModel) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Relative errors, and errors in the deviations that were predicted, of all shapes that were not measured."""
    rest = sorted(SPACE.keys() - {each.name for each in model.samples})
    pairs = [(model.predict(config(name)), truth(Terms.from_config(config(name), SETTING))) for name in rest]
    off = np.array([each.ms - true for each, true in pairs])
    return off / np.array([true for _, true in pairs]), off / np.array([each.error_ms + 1e-15 for each, _ in pairs])


def test_true_costs_are_recovered() -> None:
    model = LatencyModel.fit(samples(16), SETTING, "int8")
    relative, _ = held_out(model)
    assert np.abs(relative).max() < 1e-6
    assert model.errors.mean < 1e-6
    assert all(cost >= 0 for cost in model.costs.values())


def test_predicted_errors_match_those_of_unmeasured_shapes() -> None:
    """Over many noisy measurings: the deviations it gives cover what they should, and it beats FLOPs."""
    relative, deviations, told, flops = [], [], [], []
    for seed in range(12):
        model = LatencyModel.fit(samples(16, noise=0.02, seed=seed), SETTING, "int8")
        one, two = held_out(model)
        relative.append(np.abs(one).mean())
        deviations.append(two)
        told.append(model.errors.mean)
        flops.append(model.flops_errors.mean)
    assert np.mean(relative) < 0.03
    assert 0.5 < np.mean(told) / np.mean(relative) < 3
    assert (np.abs(np.concatenate(deviations)) < 2).mean() > 0.9
    assert np.mean(flops) > 2 * np.mean(told)


def test_deviations_grow_with_the_distance_from_measured_shapes() -> None:
    near = [name for name, sizes in SPACE.items() if sizes["layers"] <= 2 and sizes["hidden"] <= 128]
    draw = np.random.default_rng(0)
    terms = [Terms.from_config(config(name), SETTING) for name in near]
    measured = [
        Sample(name, each, truth(each) * (1 + 0.03 * draw.standard_normal()))
        for name, each in zip(near, terms, strict=True)
    ]
    model = LatencyModel.fit(measured, SETTING, "int8")
    inside, outside = (model.predict(config(name)) for name in (near[3], "6x192/6/256"))
    assert outside.error_ms / outside.ms > 1.2 * inside.error_ms / inside.ms


def test_leave_one_out_equals_a_fit_to_the_others() -> None:
    measured = samples(10, noise=0.05)
    model = LatencyModel.fit(measured, SETTING, "int8")
    by_hand = [
        LatencyModel.fit([each for each in measured if each != one], SETTING, "int8").predict_terms(one.terms).ms
        for one in measured
    ]
    told = [each.predicted_ms for each in model.record().timings]
    assert told == pytest.approx(by_hand)
    off = np.array(by_hand) / np.array([each.ms for each in measured]) - 1
    assert model.errors.mean == pytest.approx(np.abs(off).mean())
    assert model.errors.worst == pytest.approx(np.abs(off).max())


def test_an_unmeasured_term_is_refused() -> None:
    model = LatencyModel.fit(samples(10), SETTING, "int8")
    with pytest.raises(SearchError, match="no measured shape has 'activation relu'; measure some that do"):
        model.predict(config("2x64/2/64", hidden_act="relu"))
    both = LatencyModel.fit((*samples(10), *samples(10, hidden_act="relu")), SETTING, "int8")
    relu = Terms.from_config(config("2x64/2/64", hidden_act="relu"), SETTING)
    assert both.predict_terms(relu).ms == pytest.approx(truth(relu), rel=1e-5)


def test_the_only_shape_with_a_term_does_not_count_in_the_error() -> None:
    lone = samples(3, hidden_act="relu")[-1]
    model = LatencyModel.fit((*samples(12, noise=0.01), lone), SETTING, "int8")
    assert model.errors.worst < 0.2
    assert lone.name not in [each.name for each in model.record().timings if each.measured_ms == lone.ms]


def test_noisy_shapes_are_kept_but_not_fitted_to() -> None:
    good = samples(12)
    wrong = replace(good[3], ms=9 * good[3].ms, noisy=True, noise="the machine was disturbed")
    model = LatencyModel.fit((*good[:3], wrong, *good[4:]), SETTING, "int8")
    assert len(model.samples) == 12
    assert wrong not in model.fitted
    assert model.predict_terms(wrong.terms).ms == pytest.approx(good[3].ms, rel=1e-5)
    assert [each.name for each in model.record().timings if each.noisy] == [wrong.name]


def test_too_few_shapes_are_refused_with_the_reason() -> None:
    with pytest.raises(SearchError, match=rf"{FEWEST_SHAPES - 1} shapes to fit to; expected at least {FEWEST_SHAPES}"):
        LatencyModel.fit(samples(FEWEST_SHAPES - 1), SETTING, "int8")
    noisy = [replace(each, noisy=True, noise="x1.4") for each in samples(8)]
    with pytest.raises(
        SearchError, match=r"8 of the 8 measured were noisy: .*x1.4.*Measure while the machine does not"
    ):
        LatencyModel.fit(noisy, SETTING, "int8")
    broken = [replace(each, ms=math.nan) for each in samples(8)]
    with pytest.raises(SearchError, match="expected a finite latency above 0"):
        LatencyModel.fit(broken, SETTING, "int8")


def test_errors_of_a_known_case() -> None:
    found = Errors.from_predictions(np.array([1.1, 1.8, 3.0]), np.array([1.0, 2.0, 3.0]))
    assert found.mean == pytest.approx(0.2 / 3)
    assert found.worst == pytest.approx(0.1)
    assert found.deviation == pytest.approx(math.sqrt(0.02 / 3))
