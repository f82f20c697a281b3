"""Find the matrix products that must stay in float32 for an int8 file to keep its
score, and what they cost.

int8 gives all activations of a tensor one scale, so that a few large values in a
feed-forward layer make it coarse for the rest: the products that read them lose most,
the first layer's more than all others together (docs/LOG.md). If the score drops on
real rows, every product is tried, and those with the most error per millisecond stay in
float32.
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

from compress.benchmark.device import Device
from compress.exporters.rewrite.graph import Product, layer
from compress.progress import Say, show_progress
from compress.quantization.certify import FloatCost, QuantizationEvaluator, ScoreDrop
from compress.records.certificate import Sensitivity
from compress.records.latency import Setting


class Make(Protocol):
    """Writes the int8 file `target` with the products `keep` in float32."""

    def __call__(self, target: Path, /, *, keep: Sequence[str] = ()) -> None: ...


class GraphPart(Protocol):
    """A part of the graph that can stay more precise, by name: a `Product`, or a block
    of operators."""

    @property
    def name(self) -> str: ...


ProductNames = tuple[str, ...]
Costs = Callable[[], Mapping[str, float]]
"""Product -> the cost of float32 in milliseconds, or in proportion to them; all above
0."""

WORTH = 0.05
"""The share of the mean squared error of the logits that a product must carry to stay
in float32 to keep the answers; to keep the score, less is enough."""
HEAD_COST = 0.01
"""The cost of a head's layer, which reads one row, relative to a layer of the same size
that reads every token."""


@dataclass(frozen=True)
class Mixed:
    """The choice of products in float32.

    keep, products  the chosen ones, and the number of all
    outcome, near   the comparison of this file with fp32, and whether it is near enough
    whole           the comparison of the all-int8 file
    sensitivity     of every product; empty if all-int8 is near enough
    cost            of float32, if it was measured
    """

    keep: ProductNames
    outcome: ScoreDrop
    near: bool
    products: int
    whole: ScoreDrop
    sensitivity: tuple[Sensitivity, ...] = ()
    cost: FloatCost | None = None

    def price(self) -> str:
        """Describe the products in float32 and their cost in a sentence; '' if there
        are none."""
        if not self.keep:
            return ""
        summary = (
            f"{len(self.keep)} of {self.products} matrix products of the int8 file "
            "stay in float32"
        )
        if self.cost is None:
            return f"{summary}."
        points = math.ceil(1000 * self.cost.max_drop - 1e-6) / 10
        return (
            f"{summary}: {self.cost.ms:+.1f} ms ({self.cost.setting}), "
            f"{self.cost.mb:+.1f} MB; --max-drop {points:g} would make all of them "
            "int8."
        )


def mix(
    make: Make,
    products: Sequence[GraphPart],
    evaluator: QuantizationEvaluator,
    *,
    limit: float,
    costs: Costs,
    worth: float = WORTH,
    whatever_it_takes: bool = True,
    say: Say = lambda _: None,
) -> Mixed:
    """Choose the cheapest products in float32 that bring int8 near enough to fp32 (see
    `ScoreDrop.near`).

    None if all-int8 is near enough. Otherwise as many as necessary of those that carry
    at least `worth` of the error, most error per cost first, without those that turn
    out to be unnecessary. If these do not bring the score within `limit`, and
    `whatever_it_takes`, the others follow in the same order; if nothing does, the
    smallest drop wins.
    """
    with tempfile.TemporaryDirectory() as scratch:
        trials = _Trials(make, evaluator, Path(scratch) / "trial.onnx")
        whole = trials.outcome(())
        if whole.near(limit):
            return Mixed((), whole, True, len(products), whole)
        say(
            f"all-int8 loses {100 * whole.drop:.2f} points and changes "
            f"{1 - whole.agreement:.2%} of the answers; trying each of its "
            f"{len(products)} products"
        )
        names = [product.name for product in products]
        whole_error = trials.error(())
        sensitivity = list[Sensitivity]()
        for name in show_progress(
            names, "trying each part in higher precision", len(names), "parts"
        ):
            alone = trials.error([other for other in names if other != name])
            share = 1 - trials.error([name]) / whole_error
            sensitivity.append(Sensitivity(name, layer(name), alone, share, kept=False))
        price = costs()
        order = sorted(
            (each for each in sensitivity if each.share > 0),
            key=lambda each: each.share / price[each.product],
            reverse=True,
        )
        worthy = tuple(each.product for each in order if each.share >= worth)
        others = (
            tuple(each.product for each in order if each.share < worth)
            if whatever_it_takes
            else ()
        )
        keep = _choose(trials, worthy, others, limit)
        outcome = trials.outcome(keep)
        say(
            f"{len(keep)} products stay in float32: {100 * outcome.drop:.2f} points, "
            f"{1 - outcome.agreement:.2%}"
        )
        marked = tuple(replace(each, kept=each.product in keep) for each in sensitivity)
        return Mixed(keep, outcome, outcome.near(limit), len(products), whole, marked)


def estimate_costs(
    products: Sequence[Product], graph: onnx.GraphProto
) -> dict[str, float]:
    """Estimate the costs as multiplications per token, which are proportional to
    milliseconds on most machines."""
    sizes = {tensor.name: math.prod(tensor.dims) for tensor in graph.initializer}
    return {
        each.name: sizes[each.weight] * (HEAD_COST if each.gemm else 1.0)
        for each in products
    }


class _Trials:
    """Makes and evaluates one file after another, and caches the outcomes."""

    def __init__(
        self, make: Make, evaluator: QuantizationEvaluator, file: Path
    ) -> None:
        self.make = make
        self.evaluator = evaluator
        self.file = file
        self.known: dict[ProductNames, ScoreDrop] = {}

    def outcome(self, keep: ProductNames) -> ScoreDrop:
        if keep not in self.known:
            self.make(self.file, keep=keep)
            self.known[keep] = self.evaluator.outcome(self.file)
        return self.known[keep]

    def error(self, keep: Sequence[str]) -> float:
        self.make(self.file, keep=keep)
        return self.evaluator.error(self.file)


def _choose(
    trials: _Trials, worthy: ProductNames, others: ProductNames, limit: float
) -> ProductNames:
    near = partial(ScoreDrop.near, limit=limit)
    keeps_score = partial(ScoreDrop.keeps_score, limit=limit)
    if (keep := _fewest(trials, (), worthy, near)) is not None:
        return _drop_unneeded(trials, keep, near)
    if keeps_score(trials.outcome(worthy)):
        return worthy
    if (keep := _fewest(trials, worthy, others, keeps_score)) is not None:
        return _drop_unneeded(trials, keep, keeps_score)
    return min(trials.known, key=lambda keep: (trials.known[keep].drop, len(keep)))


def _fewest(
    trials: _Trials,
    before: ProductNames,
    order: ProductNames,
    enough: Callable[[ScoreDrop], bool],
) -> ProductNames | None:
    """Add to `before` the shortest sufficient prefix of `order`; None if all of it is
    insufficient. By bisection: more products are assumed to be sufficient if fewer
    are."""
    if not order or not enough(trials.outcome(before + order)):
        return None
    counts = range(1, len(order))
    count = 1 + bisect_left(
        counts, True, key=lambda count: enough(trials.outcome(before + order[:count]))
    )
    return before + order[:count]


def _drop_unneeded(
    trials: _Trials, keep: ProductNames, enough: Callable[[ScoreDrop], bool]
) -> ProductNames:
    """Drop the unnecessary products from `keep`, beginning with the last."""
    for name in reversed(keep):
        fewer = tuple(each for each in keep if each != name)
        if enough(trials.outcome(fewer)):
            keep = fewer
    return keep


SENSITIVITY_TOKENS = 64
SENSITIVITY_ROUNDS = 4
SENSITIVITY_RUNS = 8
LEAST_COST = 1e-3
"""The lowest cost of a product, as a share of the file's latency; less cannot be
measured."""


def race_products(
    make: Make,
    products: Sequence[Product],
    graph: onnx.GraphProto,
    device: Device,
    *,
    max_length: int,
) -> dict[str, float]:
    """Measure the cost of float32 for each product in milliseconds, with one row of
    SENSITIVITY_TOKENS tokens on one thread.

    Products of the same shape are put in float32 together, and share the difference
    from all-int8.
    """
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    groups: dict[str, list[str]] = {"int8": []}
    for each in products:
        shape = "x".join(map(str, shapes[each.weight])) + (" head" if each.gemm else "")
        groups.setdefault(shape, []).append(each.name)
    p50, _, _ = _race(groups, make, device, max_length)
    return {
        name: max((p50[shape] - p50["int8"]) / len(names), LEAST_COST * p50["int8"])
        for shape, names in groups.items()
        for name in names
    }


def price_float(mixed: Mixed, make: Make, device: Device, *, max_length: int) -> Mixed:
    """Measure the cost of the products in float32, if there are any, with one row of
    SENSITIVITY_TOKENS tokens on one thread."""
    if not mixed.keep:
        return mixed
    p50, megabytes, setting = _race(
        {"kept": mixed.keep, "whole": ()}, make, device, max_length
    )
    ms = p50["kept"] - p50["whole"]
    mb = megabytes["kept"] - megabytes["whole"]
    return replace(mixed, cost=FloatCost(ms, mb, str(setting), mixed.whole.least_limit))


def _race(
    variants: Mapping[str, Sequence[str]], make: Make, device: Device, max_length: int
) -> tuple[dict[str, float], dict[str, float], Setting]:
    """Race files that differ in the products in float32; return p50 in ms and 10^6
    bytes by name, and the setting."""
    setting = Setting(1, 1, min(SENSITIVITY_TOKENS, max_length))
    with tempfile.TemporaryDirectory() as scratch:
        files = {
            name: Path(scratch) / f"{number}.onnx"
            for number, name in enumerate(variants)
        }
        for name, file in files.items():
            make(file, keep=variants[name])
        times = device.race(
            files, [setting], rounds=SENSITIVITY_ROUNDS, runs=SENSITIVITY_RUNS
        )
        megabytes = {name: file.stat().st_size / 1e6 for name, file in files.items()}
    return {time.name: time.p50_ms for time in times}, megabytes, setting
