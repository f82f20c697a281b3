"""Shapes are timed through the files that ship, in turns; the best pass counts, once another race confirms it."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray

from compress.benchmark.devices import open_device
from compress.errors import SearchError
from compress.latency.measure import MORE, RACED_TOGETHER, SWEEPS, choose_spread, exported, race, sample
from compress.records.latency import DeviceError, Latency, Setting, Sustained
from tests import tiny

SETTING = Setting(seq=16)


@dataclass
class Scripted:
    """A device on which every file takes what it is said to, times what disturbs the pass."""

    takes: Mapping[str, float]
    disturbed: Sequence[float] = ()
    raced: list[list[str]] = field(default_factory=list)
    passes: int = 0
    name: str = "scripted"

    def facts(self) -> dict[str, str]:
        return {"cpu": "none"}

    def race(self, files: Mapping[str, Path], settings: Sequence[Setting], *, rounds: int, runs: int) -> list[Latency]:
        assert all(path.is_file() for path in files.values())
        self.raced.append(list(files))
        factors = [self._factor(), self._factor()]
        return [self._latency(name, settings[0], factors) for name in files]

    def _factor(self) -> float:
        self.passes += 1
        return self.disturbed[self.passes - 1] if self.passes <= len(self.disturbed) else 1.0

    def _latency(self, name: str, setting: Setting, factors: Sequence[float]) -> Latency:
        one, two = (self.takes[name] * factor for factor in factors)
        least = min(one, two)
        lows = (one / 1.25, two / 1.25)
        return Latency(name, setting, 10, least, least, least, least, 1.0, 1.0, None, False, "", (one, two), lows)

    def sustain(self, files: Mapping[str, Path], setting: Setting, *, seconds: float) -> list[Sustained]:
        raise DeviceError("not asked")

    def logits(self, file: Path, rows: Sequence[Any]) -> list[NDArray[np.float32]]:
        raise DeviceError("not asked")


@contextmanager
def files(tmp_path: Path, count: int) -> Iterator[dict[str, Path]]:
    made = {str(size): tmp_path / f"{size}.onnx" for size in range(1, count + 1)}
    for name, path in made.items():
        path.write_bytes(b"." * int(name))
    yield made


def test_disturbed_passes_do_not_count(tmp_path: Path) -> None:
    with files(tmp_path, 3) as made:
        device = Scripted({"1": 1.0, "2": 2.0, "3": 3.0}, disturbed=[1.6, 1.0, 1.3, 1.0, 1.7, 1.2])
        found = race(made, device, SETTING)
    assert {name: each.p50_ms for name, each in found.items()} == pytest.approx({"1": 1.0, "2": 2.0, "3": 3.0})
    assert not any(each.noisy for each in found.values())
    assert len(device.raced) == SWEEPS
    assert sorted(found["2"].passes) == pytest.approx([2.0, 2.0, 2.4, 2.6, 3.2, 3.4])


def test_the_fastest_runs_count_on_a_busy_machine(tmp_path: Path) -> None:
    """Medians far above what the fastest runs took, each time by another factor."""

    class Busy(Scripted):
        def _latency(self, name: str, setting: Setting, factors: Sequence[float]) -> Latency:
            each = super()._latency(name, setting, factors)
            return replace(each, lows=(self.takes[name], self.takes[name] * 1.01))

    with files(tmp_path, 2) as made:
        found = race(made, Busy({"1": 1.0, "2": 2.0}, disturbed=[1.6, 1.3, 1.9, 1.1, 1.4, 1.7]), SETTING)
    assert {name: each.p50_ms for name, each in found.items()} == pytest.approx({"1": 1.1 / 1.01, "2": 2.2 / 1.01})
    assert not any(each.noisy for each in found.values())


def test_unconfirmed_files_race_again(tmp_path: Path) -> None:
    names = [str(size) for size in range(1, RACED_TOGETHER + 2)]
    with files(tmp_path, len(names)) as made:
        device = Scripted(dict.fromkeys(names, 1.0), disturbed=[*[1.5] * 4 * (SWEEPS - 1), 1.0, 1.0])
        found = race(made, device, SETTING)
    assert [each.p50_ms for each in found.values()] == pytest.approx([1.0] * len(names))
    assert not any(each.noisy for each in found.values())
    assert {len(each) for each in device.raced} == {RACED_TOGETHER}
    assert len(device.raced) > 2 * SWEEPS


def test_never_confirmed_files_are_noisy(tmp_path: Path) -> None:
    with files(tmp_path, 2) as made:
        growing = [1.0 + 0.1 * number for number in range(2 * (SWEEPS + MORE))]
        device = Scripted({"1": 1.0, "2": 2.0}, disturbed=growing)
        found = race(made, device, SETTING)
    assert all(each.noisy for each in found.values())
    assert found["1"].noise == "the fastest runs took 0.80 ms in one of 8 races, 0.96 ms in the next best"
    assert found["1"].p50_ms == pytest.approx(1.0)
    assert len(device.raced) == SWEEPS + MORE


def test_a_file_races_beside_few_others(tmp_path: Path) -> None:
    names = [str(size) for size in range(1, 21)]
    with files(tmp_path, len(names)) as made:
        device = Scripted(dict.fromkeys(names, 1.0))
        race(made, device, SETTING)
    assert max(map(len, device.raced)) <= RACED_TOGETHER
    assert {name for each in device.raced for name in each} == set(names)


@pytest.mark.parametrize(
    ("precision", "operator"),
    [
        ("int8", "MatMulInteger"), ("fp32", "MatMul"), ("w8", "MatMulNBits"), ("q4", "MatMulNBits"), ("fp16", "Cast"),
    ],
)  # fmt: skip
def test_files_are_quantised_like_those_that_ship(precision: Any, operator: str, exported_once: None) -> None:
    state = torch.random.get_rng_state()
    with exported({"a": tiny.config("bert", hidden=64)}, SETTING, precision=precision) as made:
        nodes = [node.op_type for node in onnx.load_model(made["a"]).graph.node]
        assert list(made["a"].parent.iterdir()) == [made["a"]]
    assert operator in nodes
    assert not made["a"].parent.exists()
    assert torch.equal(torch.random.get_rng_state(), state)


def test_shared_weights_are_shared_in_the_file() -> None:
    config = tiny.config("bert", hidden=64, layers=4)
    shared = tiny.config("bert", hidden=64, layers=4)
    shared.shared_layers = {"attention": 1, "ffn": 1}
    with exported({"own": config, "shared": shared}, SETTING, precision="fp32") as made:
        own, one = (made[name].stat().st_size for name in ("own", "shared"))
    assert one < own - 2 * 4 * 12 * 64 * 64 / 4


def test_shapes_are_measured_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    said: list[str] = []
    shapes = {"small": tiny.config("bert", layers=1), "large": tiny.config("bert", layers=4, hidden=256)}
    with open_device("local", say=said.append) as device:
        found = sample(shapes, device, SETTING, rounds=2, runs=2, say=said.append)
    small, large = found
    assert 0 < small.ms < large.ms
    assert large.file_mb is not None and small.file_mb is not None and large.file_mb > small.file_mb > 0
    assert large.terms.counts["layers"] == 4
    assert "exporting 2 shapes with random weights" in said
    assert list(tmp_path.iterdir()) == []


def test_failures_leave_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    device = Scripted({})
    with pytest.raises(SearchError, match=r"a: 65 tokens to measure at; this shape has 64 positions"):
        sample({"a": tiny.config("bert")}, device, Setting(seq=65))
    with pytest.raises(SearchError, match="a: transformers cannot build a bert with these settings"):
        sample({"a": tiny.config("bert", hidden=33)}, device, SETTING)
    with pytest.raises(SearchError, match=r"int9: no such precision. Did you mean 'int8'"):
        sample({"a": tiny.config("bert")}, device, SETTING, precision="int9")  # type: ignore[arg-type]
    with pytest.raises(SearchError, match="no shapes to measure"):
        sample({}, device, SETTING)
    assert list(tmp_path.iterdir()) == []


def test_chosen_shapes_include_extremes_and_all_kinds() -> None:
    acts = ("gelu", "relu")
    space = {
        f"{layers}x{hidden} {act}": tiny.config("bert", layers=layers, hidden=hidden, hidden_act=act)
        for layers in range(1, 9)
        for hidden in (32, 64, 96, 128)
        for act in acts
    }
    chosen = choose_spread(space, 10, SETTING)
    assert len(set(chosen)) == 10
    assert {"1x32 gelu", "8x128 gelu"} & set(chosen)
    assert {"1x32", "8x128", "8x32", "1x128"} <= {name.split(" ")[0] for name in chosen}
    assert all(sum(act in name for name in chosen) >= 3 for act in acts)
    backwards = dict(reversed(list(space.items())))
    assert choose_spread(backwards, 10, SETTING) == chosen
    assert set(choose_spread(space, 1000, SETTING)) == set(space)
    with pytest.raises(SearchError, match="expected at least 2"):
        choose_spread(space, 1, SETTING)
