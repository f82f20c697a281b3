"""Find the matrix products that an int8 file must leave in float32 to keep its score, and what they cost.

int8 gives all activations of a tensor one scale, and a few large values in a feed-forward layer's inner activations
coarsen the rest: the products that read them lose most, the first layer's more than all others together (docs/LOG.md).
So where the score falls on real rows, every product is tried, and those stay in float32 that hurt most per millisecond.
"""

import math
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import onnx

from compress.benchmark.devices import Device
from compress.exporters.rewrite.graph import Product, layer
from compress.progress import show_progress
from compress.quantization.certify import QuantizationEvaluator, ScoreDrop
from compress.records.certificate import Sensitivity
from compress.records.latency import Setting


class Make(Protocol):
    """Writes the int8 file `target` with the products `keep` left in float32."""

    def __call__(self, target: Path, /, *, keep: Sequence[str] = ()) -> None: ...


class Part(Protocol):
    """A part of the graph that can be left more exact, by the name of its node: a `Product`, or any operator."""

    @property
    def name(self) -> str: ...


Costs = Callable[[], Mapping[str, float]]
"""Product -> what leaving it in float32 costs, in milliseconds, or in proportion to them; all above 0."""

WORTH = 0.05
"""The share of the mean squared error of the logits that a product must carry to be left in float32 for the answers'
sake; for the score's sake less will do."""
HEAD = 0.01
"""The cost of a head's layer beside one of the same size that reads every token: it reads one row."""


@dataclass(frozen=True)
class FloatCost:
    """The cost of the products in float32 beside the same file with all of them in int8.

    ms          p50 of one forward at `setting` on the device; mb: 10^6 bytes of the file
    max_drop    the lowest limit, in the score's own unit, at which none would have stayed in float32
    """

    ms: float
    mb: float
    setting: str
    max_drop: float


@dataclass(frozen=True)
class Mixed:
    """The choice of what stays in float32 of `products`, what that comes to, whether it is near enough, every product's
    sensitivity (none where all-int8 was near enough), how all-int8 does, and what float32 costs, where that was
    measured."""

    keep: tuple[str, ...]
    outcome: ScoreDrop
    near: bool
    products: int
    whole: ScoreDrop
    sensitivity: tuple[Sensitivity, ...] = ()
    cost: FloatCost | None = None

    def price(self) -> str:
        """Say in a sentence what stays in float32, and what that costs; '' where nothing does."""
        if not self.keep:
            return ""
        kept = f"{len(self.keep)} of {self.products} matrix products of the int8 file stay in float32"
        if self.cost is None:
            return f"{kept}."
        points = math.ceil(1000 * self.cost.max_drop - 1e-6) / 10
        return (
            f"{kept}: {self.cost.ms:+.1f} ms ({self.cost.setting}), {self.cost.mb:+.1f} MB; --max-drop {points:g} "
            "would make all of them int8."
        )


def mix(
    make: Make,
    products: Sequence[Part],
    evaluator: QuantizationEvaluator,
    *,
    limit: float,
    costs: Costs,
    worth: float = WORTH,
    whatever_it_takes: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> Mixed:
    """Choose the cheapest products to leave in float32 that bring int8 near enough to fp32 (see `ScoreDrop.near`).

    Nothing, where all-int8 is near enough. Otherwise those that carry at least `worth` of the error, most error per
    cost first, as many as it takes, less those that turn out not to be needed. Where these do not bring the score
    itself within `limit`, and `whatever_it_takes`, the others follow in the same order; where nothing does, the least
    drop wins.
    """
    with tempfile.TemporaryDirectory() as scratch:
        trials = _Trials(make, evaluator, Path(scratch) / "trial.onnx")
        whole = trials.outcome(())
        if whole.near(limit):
            return Mixed((), whole, True, len(products), whole)
        say(
            f"all-int8 loses {100 * whole.drop:.2f} points and changes {1 - whole.agreement:.2%} of the answers; "
            f"trying each of its {len(products)} products"
        )
        found = _sensitivities(trials, products)
        price = costs()
        order = sorted(
            (each for each in found if each.share > 0), key=lambda each: each.share / price[each.product], reverse=True
        )
        worthy = tuple(each.product for each in order if each.share >= worth)
        others = tuple(each.product for each in order if each.share < worth) if whatever_it_takes else ()
        keep = _choose(trials, worthy, others, limit)
        outcome = trials.outcome(keep)
        say(f"{len(keep)} products stay in float32: {100 * outcome.drop:.2f} points, {1 - outcome.agreement:.2%}")
        marked = tuple(replace(each, kept=each.product in keep) for each in found)
        return Mixed(keep, outcome, outcome.near(limit), len(products), whole, marked)


def by_size(products: Sequence[Product], graph: onnx.GraphProto) -> dict[str, float]:
    """Count multiplications per token as the cost: right in proportion on most machines, without measuring."""
    shapes = {tensor.name: math.prod(tensor.dims) for tensor in graph.initializer}
    return {each.name: shapes[each.weight] * (HEAD if each.gemm else 1.0) for each in products}


class _Trials:
    """Makes and evaluates files one after another, in one place, and remembers the outcomes."""

    def __init__(self, make: Make, evaluator: QuantizationEvaluator, file: Path) -> None:
        self.make, self.evaluator, self.file = make, evaluator, file
        self.known: dict[tuple[str, ...], ScoreDrop] = {}

    def outcome(self, keep: tuple[str, ...]) -> ScoreDrop:
        if keep not in self.known:
            self.make(self.file, keep=keep)
            self.known[keep] = self.evaluator.outcome(self.file)
        return self.known[keep]

    def error(self, keep: Sequence[str]) -> float:
        self.make(self.file, keep=keep)
        return self.evaluator.error(self.file)


def _sensitivities(trials: _Trials, products: Sequence[Part]) -> list[Sensitivity]:
    names = [product.name for product in products]
    whole = trials.error(())
    found = []
    for name in show_progress(names, "trying each part more exactly", len(names), "parts"):
        alone = trials.error([other for other in names if other != name])
        share = 1 - trials.error([name]) / whole
        found.append(Sensitivity(name, layer(name), alone, share, kept=False))
    return found


def _choose(trials: _Trials, worthy: tuple[str, ...], others: tuple[str, ...], limit: float) -> tuple[str, ...]:
    near, met = partial(ScoreDrop.near, limit=limit), partial(ScoreDrop.keeps_score, limit=limit)
    if (keep := _fewest(trials, (), worthy, near)) is not None:
        return _drop_unneeded(trials, keep, near)
    if met(trials.outcome(worthy)):
        return worthy
    if (keep := _fewest(trials, worthy, others, met)) is not None:
        return _drop_unneeded(trials, keep, met)
    return min(trials.known, key=lambda each: (trials.known[each].drop, len(each)))


def _fewest(
    trials: _Trials, before: tuple[str, ...], order: tuple[str, ...], enough: Callable[[ScoreDrop], bool]
) -> tuple[str, ...] | None:
    """Add to `before` as few of `order`, from its front, as are enough; None where all of them are not. By bisection:
    what is enough with some is taken to be enough with more."""
    if not order or not enough(trials.outcome(before + order)):
        return None
    fewer = range(1, len(order))
    count = 1 + bisect_left(fewer, True, key=lambda some: enough(trials.outcome(before + order[:some])))
    return before + order[:count]


def _drop_unneeded(trials: _Trials, keep: tuple[str, ...], enough: Callable[[ScoreDrop], bool]) -> tuple[str, ...]:
    """Drop from `keep` the products that are not needed, the least worth first."""
    for name in reversed(keep):
        fewer = tuple(each for each in keep if each != name)
        if enough(trials.outcome(fewer)):
            keep = fewer
    return keep


TOKENS = 64
ROUNDS, RUNS = 4, 8
LEAST = 1e-3
"""The least share of the file's latency that a product costs: less is not told from nothing."""


def race_products(
    make: Make, products: Sequence[Product], graph: onnx.GraphProto, device: Device, *, max_length: int
) -> dict[str, float]:
    """Measure how many milliseconds float32 costs each product beside int8: one row of TOKENS tokens, one thread.

    Products of one shape are left in float32 together, against all-int8, and share the difference.
    """
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    alike: dict[str, list[str]] = {}
    for each in products:
        kind = "x".join(map(str, shapes[each.weight])) + (" head" if each.gemm else "")
        alike.setdefault(kind, []).append(each.name)
    with tempfile.TemporaryDirectory() as scratch:
        files = {kind: Path(scratch) / f"{at}.onnx" for at, kind in enumerate(("int8", *alike))}
        for kind, file in files.items():
            make(file, keep=alike.get(kind, ()))
        times = device.race(files, [Setting(1, 1, min(TOKENS, max_length))], rounds=ROUNDS, runs=RUNS)
    p50 = {time.name: time.p50_ms for time in times}
    return {
        name: max((p50[kind] - p50["int8"]) / len(names), LEAST * p50["int8"])
        for kind, names in alike.items()
        for name in names
    }


def price_float(mixed: Mixed, make: Make, device: Device, *, max_length: int) -> Mixed:
    """Race the file with its products in float32 against the same file with all in int8: one row of TOKENS tokens, one
    thread. As it was where nothing stays in float32."""
    if not mixed.keep:
        return mixed
    setting = Setting(1, 1, min(TOKENS, max_length))
    with tempfile.TemporaryDirectory() as scratch:
        kept, whole = (Path(scratch) / name for name in ("kept.onnx", "whole.onnx"))
        make(kept, keep=mixed.keep)
        make(whole)
        times = device.race({"kept": kept, "whole": whole}, [setting], rounds=ROUNDS, runs=RUNS)
        megabytes = (kept.stat().st_size - whole.stat().st_size) / 1e6
    p50 = {time.name: time.p50_ms for time in times}
    cost = FloatCost(p50["kept"] - p50["whole"], megabytes, str(setting), mixed.whole.least_limit)
    return replace(mixed, cost=cost)
