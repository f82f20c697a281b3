"""What shapes take on a device: a few measured once and kept, the rest predicted from them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from compress import io
from compress.benchmark.devices import Device
from compress.data.cache import cached, home, is_whole
from compress.data.task import Kind
from compress.exporters.artifact import Precision
from compress.latency.measure import choose_spread, measure, sample
from compress.latency.predictor import Estimate, Predictor
from compress.records.latency import Setting, identity
from compress.slicing.sizes import Sizes

MEASURED = "measured.json"
SAMPLES = 14
"""Shapes that a predictor is fitted to: their measuring takes about 20 s on one core."""
WORTH_KEEPING = 0.1
"""Mean error of a predictor, above which the next run measures again."""


@dataclass(frozen=True)
class Clock:
    """A device at one setting. kind: of the models' head; segments: whether their tokenizer makes token types."""

    device: Device
    setting: Setting
    precision: Precision
    kind: Kind | None
    segments: bool
    say: Callable[[str], None]

    @property
    def about(self) -> str:
        return f"{self.device.name}, {self.setting}, {self.precision}"

    def predictor(self, configs: Mapping[str, Any]) -> Predictor:
        """Predict shapes such as these from some that are measured now, or were before on this device at this setting.

        What was measured is kept under $COMPRESS_HOME/latency.
        """
        whole = max(configs.values(), key=lambda config: tuple(Sizes.of(config).plain().values()))
        told: list[Any] = [
            identity(self.device.name, self.device.facts()),
            str(self.setting),
            self.precision,
            self.kind,
        ]
        told += [self.segments, whole.model_type, Sizes.of(whole).plain(), len(configs)]
        entry = home() / "latency" / io.of_value(told)[:24]
        if is_whole(entry):
            return Predictor.from_json(entry / MEASURED)
        names = choose_spread(configs, SAMPLES, self.setting, self.kind)
        samples = sample(
            {name: configs[name] for name in names}, self.device, self.setting,
            precision=self.precision, kind=self.kind, segments=self.segments, say=self.say,
        )  # fmt: skip
        found = Predictor.fit(samples, self.setting, self.precision, kind=self.kind, device=self.device)
        self.say(found.about())
        if found.errors.mean > WORTH_KEEPING:
            self.say("such a predictor is not kept: measure while the machine does nothing else")
            return found
        cached(entry, lambda folder: found.save(folder / MEASURED))
        return found

    def predicted(self, configs: Mapping[str, Any]) -> dict[str, Estimate]:
        """What each takes."""
        predictor = self.predictor(configs)
        return {name: predictor.predict(config) for name, config in configs.items()}

    def measured(self, configs: Mapping[str, Any]) -> dict[str, float]:
        """What the file of each takes, in ms, with random weights; all of them in turns."""
        found = measure(
            configs, self.device, self.setting, precision=self.precision, kind=self.kind, segments=self.segments
        )
        for name, each in found.items():
            if each.noisy:
                self.say(f"{name}: {each.noise}; measure while the machine does nothing else")
        return {name: each.p50_ms for name, each in found.items()}
