"""How well do measured shapes predict the latency of others, beside FLOPs alone?

    python -m benchmarks.latency_predictor --out benchmarks/results/latency_predictor_<hardware>_<yyyymm>.json

BERT shapes drawn at random (2 to 6 layers, 128 to 512 wide) are built with random weights, exported and quantised as a
bundle is, and timed in turns: `latency.measure.sample`. Then a model is fitted to 6, 10, 16 and 24 of them,
drawn DRAWS times at random, or chosen far apart as a search chooses them, and asked for all others. Beside it two lines
fitted to the same shapes: through the FLOPs of the model, as others count them, and through those of the exported
graph, whose last layer computes one token. Errors are |predicted - measured| / measured. 4 to 6 minutes on 2 cores
that do nothing else; where other work disturbs all measurements, it says so and ends.
"""

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr
from transformers import BertConfig

from benchmarks.common import make_parser, write_result
from compress.benchmark.devices import open_device
from compress.exporters.manifest import Precision
from compress.latency.features import Terms
from compress.latency.measure import Sample, choose_spread, sample
from compress.latency.model import Errors, LatencyModel
from compress.records.latency import Setting

SHAPES, DRAWS = 48, 100
SIZES = (6, 10, 16, 24)
PACKAGES = ("compress", "onnxruntime", "onnx", "torch", "transformers", "scipy")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="local", help="as for compress bench")
    parser.add_argument("--precision", nargs="+", default=["int8", "fp32"])
    parser.add_argument("--shapes", type=int, default=SHAPES)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if args.shapes <= max(SIZES):
        parser.error(f"--shapes {args.shapes}: the largest sample is {max(SIZES)}, and some must be left to predict")
    shapes = draw_shapes(args.shapes)
    setting = Setting(threads=args.threads, seq=args.seq)
    found: dict[str, Any] = {
        "device": args.device,
        "setting": str(setting),
        "draws": DRAWS,
    }
    for precision in args.precision:
        started = time.perf_counter()
        with open_device(args.device, say=lambda _: None) as device:
            found["machine"] = device.facts()
            samples = sample(shapes, device, setting, precision=precision, say=lambda line: print(line, flush=True))
        seconds = time.perf_counter() - started
        found[precision] = {
            "measured_in_seconds": round(seconds, 1),
            **compare_predictors(samples, shapes, setting, precision),
        }
        print(json.dumps(found[precision]["held_out"], indent=1), flush=True)
    write_result(args.out, found, PACKAGES)


def draw_shapes(count: int) -> dict[str, BertConfig]:
    """Random shapes; heads of 16, 32 or 64."""
    draw = random.Random(0)
    found: dict[str, BertConfig] = {}
    while len(found) < count:
        size, heads, layers = draw.choice((16, 32, 64)), draw.choice((2, 4, 6, 8, 12)), draw.randint(2, 6)
        hidden = size * heads
        if not 128 <= hidden <= 512:
            continue
        ffn = hidden * draw.randint(2, 8) // 2
        found[f"{layers}x{hidden}, {heads} heads, ffn {ffn}"] = BertConfig(
            num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, intermediate_size=ffn
        )
    return found


@dataclass(frozen=True)
class RankedErrors(Errors):
    """Errors of predictions, with Spearman's correlation of predicted and measured latency."""

    rank: float


def compare_predictors(
    samples: Sequence[Sample], shapes: dict[str, BertConfig], setting: Setting, precision: Precision
) -> dict[str, Any]:
    """Errors on held-out shapes for each size of sample, and all that was measured."""
    quiet = {each.name: each for each in samples if not each.noisy}
    whole = LatencyModel.fit(samples, setting, precision)
    draw = random.Random(0)
    held_out = {}
    if len(quiet) <= max(SIZES):
        raise SystemExit(f"{len(samples) - len(quiet)} of {len(samples)} shapes were disturbed; run it again")
    for size in SIZES:
        spread = choose_spread({name: shapes[name] for name in quiet}, size, setting)
        rounds = [measure_errors(quiet, draw.sample(sorted(quiet), size), setting, precision) for _ in range(DRAWS)]
        held_out[size] = {
            "at random": {way: average_errors([each[way] for each in rounds]) for way in rounds[0]},
            "spread": {
                way: round_errors(each) for way, each in measure_errors(quiet, spread, setting, precision).items()
            },
            "within two deviations, spread": round(measure_coverage(quiet, spread, setting, precision), 3),
        }
    return {
        "held_out": held_out,
        "shapes": len(samples),
        "noisy": {each.name: each.noise for each in samples if each.noisy},
        "costs_ms": whole.costs,
        "each_from_all_others": [
            {"shape": each.name, "ms": round(each.measured_ms, 4), "predicted_ms": round(each.predicted_ms, 4)}
            for each in whole.record().timings
        ],
    }


def measure_errors(
    quiet: dict[str, Sample], chosen: Sequence[str], setting: Setting, precision: Precision
) -> dict[str, RankedErrors]:
    """Errors on all that were not chosen."""
    rest = [each for name, each in quiet.items() if name not in set(chosen)]
    measured = np.array([each.ms for each in rest])
    ways = {
        "terms": [quiet[name] for name in chosen],
        "FLOPs of the model": [keep_flops(quiet[name], quiet[name].terms.flops) for name in chosen],
        "FLOPs of the graph": [keep_flops(quiet[name], count_graph_flops(quiet[name])) for name in chosen],
    }
    predicted_of = {
        "terms": [each.terms for each in rest],
        "FLOPs of the model": [keep_flops(each, each.terms.flops).terms for each in rest],
        "FLOPs of the graph": [keep_flops(each, count_graph_flops(each)).terms for each in rest],
    }
    found = {}
    for way, fitted in ways.items():
        model = LatencyModel.fit(fitted, setting, precision)
        costs = model.costs
        predicted = [sum(costs[name] * amount for name, amount in each.counts.items()) for each in predicted_of[way]]
        errors = Errors.from_predictions(np.array(predicted), measured)
        found[way] = RankedErrors(**vars(errors), rank=float(spearmanr(predicted, measured).statistic))
    return found


def keep_flops(one: Sample, flops: float) -> Sample:
    return replace(one, terms=Terms({"fixed": 1.0, "flops": flops}, flops))


def count_graph_flops(one: Sample) -> float:
    return 2 * sum(one.terms.counts[name] for name in ("projections", "feed_forward", "attention"))


def measure_coverage(quiet: dict[str, Sample], chosen: Sequence[str], setting: Setting, precision: Precision) -> float:
    """Return the share of shapes not chosen whose latency is within two of the deviations the model gives."""
    model = LatencyModel.fit([quiet[name] for name in chosen], setting, precision)
    rest = [each for name, each in quiet.items() if name not in set(chosen)]
    estimates = [model.predict_terms(each.terms) for each in rest]
    return float(np.mean([abs(e.ms - one.ms) <= 2 * e.error_ms for e, one in zip(estimates, rest, strict=True)]))


def average_errors(errors: Sequence[RankedErrors]) -> dict[str, float]:
    """Over the draws: the mean of all, the worst of the 90th draw in a hundred."""
    return {
        "mean": round(float(np.mean([each.mean for each in errors])), 4),
        "worst, 9 draws of 10": round(float(np.quantile([each.worst for each in errors], 0.9)), 4),
        "rank": round(float(np.mean([each.rank for each in errors])), 4),
    }


def round_errors(errors: RankedErrors) -> dict[str, float]:
    return {"mean": round(errors.mean, 4), "worst": round(errors.worst, 4), "rank": round(errors.rank, 4)}


if __name__ == "__main__":
    main()
