"""Predict the latency of unmeasured shapes from measured ones, as a sum of costs of
terms.

    ms(shape) = sum over terms of  cost(term) x amount(term, shape)          costs >= 0

Costs are fitted to measured shapes by non-negative least squares on relative errors
(Lawson & Hanson 1974), one fit for each device, setting and precision. The error is
measured too, by predicting every shape from the others. `latency.features` counts the
terms, `latency.measure` measures shapes; LatencyTable keeps the measurements in a
folder.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

import numpy as np
import torch
from transformers import CONFIG_MAPPING

from compress import io
from compress.arrays import Doubles
from compress.benchmark.device import Device
from compress.data.cache import home, is_whole, load_or_create
from compress.errors import SearchError, did_you_mean
from compress.exporters.manifest import Precision
from compress.io import write_json
from compress.kinds import Kind
from compress.latency.features import Terms
from compress.latency.measure import Configs, Sample, choose_spread, sample
from compress.models import heads
from compress.models.flops import count_parameters, count_tables, count_vectors
from compress.models.sharing import share, share_again
from compress.progress import Say
from compress.records import search_report
from compress.records.json_text import load_record
from compress.records.latency import FEWEST_SHAPES, Setting, describe_device
from compress.slicing.shape import Shape
from compress.slicing.sizes import Sizes


@dataclass(frozen=True)
class Estimate:
    """A predicted latency and its standard deviation."""

    ms: float
    error_ms: float


def keep_within(
    costs: Mapping[str, Mapping[str, float]], limits: Mapping[Any, float]
) -> tuple[list[str], str]:
    """Return the names of the shapes whose costs keep all limits, and the shape closest
    to keeping them."""
    excess = {
        name: max((cost[each] / limits[each] for each in limits), default=0.0)
        for name, cost in costs.items()
    }
    return [name for name, most in excess.items() if most <= 1], min(
        excess, key=lambda name: (excess[name], name)
    )


@dataclass(frozen=True)
class Errors:
    """Relative errors of predictions of shapes that were left out of the fit.

    deviation   the root mean square, without taking off a mean
    """

    mean: float
    worst: float
    deviation: float

    @staticmethod
    def from_predictions(predicted: Doubles, measured: Doubles) -> "Errors":
        """Compare predictions with measurements."""
        off = np.abs(predicted / measured - 1)
        deviation = np.sqrt(np.square(off).mean())
        return Errors(float(off.mean()), float(off.max()), float(deviation))


@dataclass(frozen=True)
class LatencyModel:
    """Predicts latencies from shapes measured on one device, at one setting, in one
    precision.

    samples     all measured shapes; noisy ones are kept but not fitted to
    kind        kind of the models' head, which decides what the last layer computes
                (None: no head)
    device      `local`, `ssh:pi`; machine: the device's description of itself
    """

    samples: tuple[Sample, ...]
    setting: Setting
    precision: Precision
    kind: Kind | None = "classification"
    device: str = "local"
    machine: Mapping[str, str] = field(default_factory=dict)
    format: Literal[1] = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        if len(self.fitted) < FEWEST_SHAPES:
            noises = [
                f"{each.name}: {each.noise}" for each in self.samples if each.noisy
            ]
            why = ""
            advice = "Measure more shapes"
            if noises:
                why = (
                    f" ({len(noises)} of the {len(self.samples)} measured were noisy: "
                    f"{noises[0]})"
                )
                advice = "Measure while the machine does nothing else"
            raise SearchError(
                f"latency: {len(self.fitted)} shapes to fit to{why}; expected at least "
                f"{FEWEST_SHAPES}, better 10 to 24. {advice}."
            )
        if wrong := [each.name for each in self.fitted if not 0 < each.ms < math.inf]:
            raise SearchError(
                f"latency: {wrong[0]}: expected a finite latency above 0; measure it "
                "again"
            )

    @staticmethod
    def fit(
        samples: Sequence[Sample],
        setting: Setting,
        precision: Precision,
        *,
        kind: Kind | None = "classification",
        device: Device | None = None,
    ) -> "LatencyModel":
        """Fit to samples measured on this device. Raises SearchError if fewer than
        FEWEST_SHAPES are quiet."""
        name, facts = ("local", {}) if device is None else (device.name, device.facts())
        return LatencyModel(tuple(samples), setting, precision, kind, name, facts)

    @cached_property
    def fitted(self) -> tuple[Sample, ...]:
        """The samples that are not noisy."""
        return tuple(each for each in self.samples if not each.noisy)

    @cached_property
    def costs(self) -> dict[str, float]:
        """The fitted cost of each term, in ms per unit."""
        return dict(
            zip(
                self._columns, map(float, _fit(self._amounts, self._taken)), strict=True
            )
        )

    @cached_property
    def errors(self) -> Errors:
        """Leave-one-out errors: each measured shape is predicted from all others."""
        predicted_S = self._left_out
        known = np.isfinite(predicted_S)
        return Errors.from_predictions(predicted_S[known], self._taken[known])

    @cached_property
    def flops_errors(self) -> Errors:
        """Leave-one-out errors of a linear function of FLOPs alone."""
        return Errors.from_predictions(self._by_flops, self._taken)

    def predict(self, config: Any) -> Estimate:
        """Predict the latency of a transformers config: see `predict_terms`."""
        return self.predict_terms(Terms.from_config(config, self.setting, self.kind))

    def predict_terms(self, terms: Terms) -> Estimate:
        """Predict the latency of these terms, with its standard deviation.

        The deviation combines the leave-one-out error with how much this prediction
        changes when any one shape is left out (the jackknife): it grows with the
        distance from measured shapes. Raises SearchError for a shape with a term that
        no measured shape has.
        """
        if unknown := sorted(
            name
            for name, amount in terms.counts.items()
            if amount and name not in self.costs
        ):
            raise SearchError(
                f"latency: no measured shape has {unknown[0]!r}; measure some that do."
                + did_you_mean(unknown[0], self.costs)
            )
        amounts_N = np.array([terms.counts.get(name, 0.0) for name in self._columns])
        ms = float(amounts_N @ np.array(list(self.costs.values())))
        others_S = self._without_each @ amounts_N
        jackknife = math.sqrt(
            (len(others_S) - 1)
            / len(others_S)
            * float(np.square(others_S - others_S.mean()).sum())
        )
        return Estimate(ms, math.hypot(ms * self.errors.deviation, jackknife))

    def record(self) -> search_report.LatencyPrediction:
        """Create the record for a search report: every measured shape beside its
        leave-one-out prediction."""
        left_out = zip(
            self.fitted, self._left_out.tolist(), self._by_flops.tolist(), strict=True
        )
        others = {each.name: (ms, flops_ms) for each, ms, flops_ms in left_out}
        timings = []
        for each in self.samples:
            if each.noisy and not each.terms.counts.keys() <= self.costs.keys():
                continue
            found = self.predict_terms(each.terms)
            ms, flops_ms = others.get(each.name, (found.ms, None))
            if math.isfinite(ms):
                timings.append(
                    search_report.Timing(
                        each.name,
                        each.ms,
                        ms,
                        found.error_ms,
                        flops_ms,
                        noisy=each.noisy,
                    )
                )
        return search_report.LatencyPrediction(
            self.about(), self.errors.mean, self.flops_errors.mean, tuple(timings)
        )

    def about(self) -> str:
        """Describe the fit, as `14 shapes on local, int8, 1 thread, ...: each predicted
        from the others to 1.4%`."""
        return (
            f"{len(self.fitted)} shapes on {self.device}, {self.precision}, "
            f"{self.setting}: each predicted from the others to {self.errors.mean:.1%} "
            f"on average, {self.errors.worst:.1%} at worst; from FLOPs alone "
            f"{self.flops_errors.mean:.1%} and {self.flops_errors.worst:.1%}"
        )

    @cached_property
    def _columns(self) -> tuple[str, ...]:
        """The terms that occur in any of the S fitted shapes."""
        return tuple(
            sorted(
                {
                    name
                    for each in self.fitted
                    for name, amount in each.terms.counts.items()
                    if amount
                }
            )
        )

    @cached_property
    def _amounts(self) -> Doubles:
        """The amounts of N terms in S shapes, (S, N)."""
        return np.array(
            [
                [each.terms.counts.get(name, 0.0) for name in self._columns]
                for each in self.fitted
            ]
        )

    @cached_property
    def _taken(self) -> Doubles:
        """The measured latencies, (S,) in ms."""
        return np.array([each.ms for each in self.fitted])

    @cached_property
    def _without_each(self) -> Doubles:
        """The costs fitted with each of the shapes left out, (S, N)."""
        return _leaving_one_out(self._amounts, self._taken)

    @cached_property
    def _left_out(self) -> Doubles:
        """Leave-one-out predictions, (S,) in ms; NaN for the only shape with some
        term."""
        predicted_S = (self._without_each * self._amounts).sum(1)
        alone_N = (self._amounts > 0).sum(0) == 1
        return np.where((self._amounts[:, alone_N] > 0).any(1), np.nan, predicted_S)

    @cached_property
    def _by_flops(self) -> Doubles:
        line_S2 = np.array([[1.0, each.terms.flops] for each in self.fitted])
        return np.asarray((_leaving_one_out(line_S2, self._taken) * line_S2).sum(1))


def _leaving_one_out(amounts_SN: Doubles, ms_S: Doubles) -> Doubles:
    rest = [np.arange(len(ms_S)) != each for each in range(len(ms_S))]
    return np.array([_fit(amounts_SN[others], ms_S[others]) for others in rest])


def _fit(amounts_SN: Doubles, ms_S: Doubles) -> Doubles:
    """Find the costs c >= 0 with the least sum of ((amounts c - ms) / ms)^2."""
    from scipy.optimize import nnls

    largest_N = amounts_SN.max(0)
    scale_N = np.where(largest_N > 0, largest_N, 1.0)
    costs_N, _ = nnls(
        amounts_SN / scale_N / ms_S[:, None],
        np.ones(len(ms_S)),
        maxiter=100 * amounts_SN.shape[1],
    )
    return np.asarray(costs_N / scale_N)


SAMPLES = 14
"""Shapes that a latency model is fitted to: measuring them takes about 20 s on one
core."""
WORTH_KEEPING = 0.1
"""The largest mean error with which a latency model is cached."""


@dataclass(frozen=True)
class ShapeTimer:
    """Measures and predicts shapes on a device at one setting.

    kind: the kind of the models' head; segments: whether their tokenizer makes token
    types.
    """

    device: Device
    setting: Setting
    precision: Precision
    kind: Kind | None
    segments: bool
    say: Say

    @property
    def about(self) -> str:
        return f"{self.device.name}, {self.setting}, {self.precision}"

    def predict(self, configs: Configs) -> dict[str, Estimate]:
        """Predict the latency of each config from some that are measured.

        Measurements of this device at this setting are cached under
        $COMPRESS_HOME/latency.
        """
        whole = max(
            configs.values(),
            key=lambda config: tuple(Sizes.from_config(config).plain().values()),
        )
        device = describe_device(self.device.name, self.device.facts())
        key: list[Any] = [device, str(self.setting), self.precision, self.kind]
        key += [
            self.segments,
            whole.model_type,
            Sizes.from_config(whole).plain(),
            # such as the activation
            sorted(Terms.from_config(whole, self.setting, self.kind).counts),
            len(configs),
        ]
        entry = home() / "latency" / io.hash_value(key)[:24]
        file = entry / "measured.json"
        if is_whole(entry):
            model = load_record(LatencyModel, file, f"Remove {entry} and try again")
        else:
            names = choose_spread(configs, SAMPLES, self.setting, self.kind)
            samples = self._sample({name: configs[name] for name in names}, self.say)
            model = LatencyModel.fit(
                samples,
                self.setting,
                self.precision,
                kind=self.kind,
                device=self.device,
            )
            self.say(model.about())
            if model.errors.mean > WORTH_KEEPING:
                self.say(
                    "this latency model is too inaccurate to cache: measure while the "
                    "machine is idle"
                )
            else:
                load_or_create(
                    entry, lambda folder: write_json(folder / file.name, asdict(model))
                )
        return {name: model.predict(config) for name, config in configs.items()}

    def measure(self, configs: Configs) -> dict[str, float]:
        """Measure the file of each config, with random weights, in ms; all of them take
        turns."""
        samples = self._sample(configs, lambda _: None)
        for each in samples:
            if each.noisy:
                self.say(
                    f"{each.name}: {each.noise}; measure while the machine is idle"
                )
        return {each.name: each.ms for each in samples}

    def _sample(self, configs: Configs, say: Say) -> tuple[Sample, ...]:
        return sample(
            configs,
            self.device,
            self.setting,
            precision=self.precision,
            kind=self.kind,
            segments=self.segments,
            say=say,
        )


MATRICES: Final[Mapping[Precision, float]] = MappingProxyType(
    {
        "fp32": 4.0,
        "fp16": 2.0,
        "w8": 1.0 + 4 / 128,
        "int8": 1.0,
        "q4": 0.5 + 4.5 / 32,
    }
)
"""Bytes of a number in a matrix or table, with its share of the block's scale; other
numbers take four, fp16 two."""

NODES_MB = 0.025
"""Megabytes of the graph per layer: 0.01 to 0.035 in the files of 40 shapes (BERT, 2 to
6 layers of 128 to 512)."""


@dataclass(frozen=True)
class ModelCost:
    """The costs of a shape with its head, by the names of objectives.

    body_parameters: without the tables of words, positions and segments; each tied or
    shared weight counts once. file_mb: 10^6 bytes, estimated to a few percent.
    """

    parameters: int
    body_parameters: int
    flops_per_token: float
    file_mb: float


def model_cost(
    config: Any,
    precision: Precision = "int8",
    *,
    kind: Kind | None = "classification",
    seq: int = 128,
    shared: Mapping[str, int] | None = None,
) -> ModelCost:
    """Compute the costs of a transformers config without its weights, in milliseconds.
    Cached.

    shared: the number of different attention blocks, or FFNs, in its layers
    (`sharing.share`). flops_per_token: in `seq` tokens, exact for `counted` families.
    Raises StudentError for layers that cannot be shared like this.
    """
    key = json.dumps(config.to_dict(), sort_keys=True, default=str)
    total, tables, vectors = _count_parameters(
        config.model_type, key, kind, tuple(sorted((shared or {}).items()))
    )
    size = (total - vectors) * MATRICES[precision] + vectors * (
        2 if precision == "fp16" else 4
    )
    return ModelCost(
        parameters=total,
        body_parameters=total - tables,
        flops_per_token=Terms.from_config(config, Setting(seq=seq), kind).flops / seq,
        file_mb=size / 1e6 + NODES_MB * Shape.from_config(config).layers,
    )


@lru_cache(maxsize=4096)
def _count_parameters(
    family: str, text: str, kind: Kind | None, shared: tuple[tuple[str, int], ...]
) -> tuple[int, int, int]:
    """Count all parameters, those in tables, and those in vectors."""
    config = CONFIG_MAPPING[family].from_dict(json.loads(text))
    with torch.device("meta"):
        model = heads.create(config, "task" if kind else "encoder", kind)
        share_again(model)
        if shared:
            share(model, **dict(shared))
    return count_parameters(model), count_tables(model), count_vectors(model)


@dataclass(frozen=True)
class LatencyTable:
    """Measurements of one device. models: by precision; others: the teacher's files and
    the anchors, by name."""

    models: Mapping[Precision, LatencyModel]
    others: Mapping[str, Sample]

    def save(self, file: Path) -> None:
        """Write the samples; loading them repeats the fits."""
        write_json(file, asdict(self))

    @staticmethod
    def load(file: Path) -> "LatencyTable | None":
        """Load what `save` wrote, if it did. Raises DamagedError."""
        remedy = (
            f"Remove {file} and repeat the command with --resume: the shapes are "
            "measured again"
        )
        return load_record(LatencyTable, file, remedy) if file.is_file() else None

    def teacher(self, precision: Precision) -> Sample | None:
        return self.others.get(f"teacher {precision}")
