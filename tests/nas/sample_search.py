"""An invented search: no number here was measured."""

import math
import random
from typing import Any

from compress.records.search_report import (
    Anchor,
    ChoiceImportance,
    LatencyPrediction,
    Rung,
    SearchReport,
    Timing,
    TrialOutcome,
    TrialRecord,
)

AT = "1 thread, batch 1, 128 tokens"
REASONS = {"pruned": "below the median of rung 0", "too slow": "predicted 6.1 ms", "failed": "out of memory"}


def shape(rng: random.Random) -> dict[str, int | float | str]:
    return {
        "layers": rng.randint(2, 6),
        "hidden": 32 * rng.randint(4, 12),
        "heads": rng.choice([4, 6, 8, 12]),
        "ffn": 64 * rng.randint(4, 24),
        "precision": rng.choice(["int8", "int8", "w8"]),
    }


def point(number: int, state: TrialOutcome = "complete", *, seed: int = 0) -> TrialRecord:
    """A shape whose score saturates with its size, and whose time grows with it."""
    rng = random.Random(1000 * seed + number)
    choice = shape(rng)
    layers, hidden, ffn = int(choice["layers"]), int(choice["hidden"]), int(choice["ffn"])
    body = layers * (4 * hidden * hidden + 2 * hidden * ffn)
    score = 0.91 - 0.9 * (body / 1000) ** -0.36 + rng.gauss(0, 0.003)
    ms = 0.25 + body / 2.1e6 + 0.02 * layers
    known = state in ("complete", "pruned")
    return TrialRecord(
        number=number,
        choice=choice,
        state=state,
        scores={"subnet": score} if known else {},
        parameters=body + 30522 * hidden,
        body_parameters=body,
        flops_per_token=2.0 * body,
        file_mb=(body + 30522 * hidden) / 1e6 * 1.05,
        predicted_ms=ms,
        predicted_error_ms=0.03 * ms,
        reason=REASONS.get(state, ""),
        started=3.1 * number,
        seconds=2.9 if known else 0.1,
    )


def trained(one: TrialRecord, gain: float, **changes: Any) -> TrialRecord:
    from dataclasses import replace

    assert one.score is not None and one.predicted_ms is not None
    scores = {**one.scores, "short": one.score + gain}
    return replace(one, scores=scores, measured={AT: one.predicted_ms * (1 + 0.02 * math.sin(one.number))}, **changes)


def points(count: int, *, finalists: int = 8, seed: int = 0) -> tuple[TrialRecord, ...]:
    """The first is within budget; about a sixth were rejected, and the best have been trained."""
    states: tuple[TrialOutcome, ...] = ("complete",) * 14 + ("too slow", "too slow", "pruned", "duplicate", "failed")
    found = [point(n, states[(n * 7) % len(states)], seed=seed) for n in range(count)]
    within = [one for one in found if one.state == "complete" and (one.predicted_ms or 9) <= 4.0]
    for place, one in enumerate(sorted(within, key=lambda one: -(one.score or 0))[:finalists]):
        found[one.number] = trained(one, 0.012 - 0.0006 * place)
    return tuple(found)


def ladder() -> tuple[Rung, ...]:
    """Scores that follow a power law in size and data, four sizes at six times."""
    rng = random.Random(1)
    found = []
    for body in (300_000, 900_000, 2_700_000, 8_000_000):
        for examples in (2_000, 5_000, 12_000, 30_000, 67_000, 134_000):
            error = 0.07 + 1.9 * body**-0.25 + 6.0 * examples**-0.55
            found.append(Rung("supernet", body, examples, 6.0 * body * examples * 20, 1 - error + rng.gauss(0, 0.003)))
    return tuple(found)


def search(count: int = 120, **changes: Any) -> SearchReport:
    from dataclasses import replace

    taken = points(count)
    timings = tuple(
        Timing(
            f"{one.choice['layers']} layers of {one.choice['hidden']}",
            measured_ms=(one.predicted_ms or 1) * (1 + 0.02 * math.sin(3 * one.number)),
            predicted_ms=one.predicted_ms or 1,
            error_ms=one.predicted_error_ms,
            flops_ms=(one.predicted_ms or 1) * (1 + 0.11 * math.cos(one.number)),
            finalist=one.measured is not None,
            noisy=one.number == 5,
        )
        for one in taken[:16] + tuple(one for one in taken[16:] if one.measured)
    )
    whole = SearchReport(
        title="a search",
        study="runs/sst2-4ms",
        teacher="minilm",
        data="sst2",
        metric="accuracy",
        teacher_score=0.905,
        teacher_ms=11.4,
        teacher_parameters=22_000_000,
        teacher_mb=23.0,
        device="local",
        setting=AT,
        budgets={"latency": 4.0},
        objectives=("score", "latency"),
        points=taken,
        command="compress search --teacher minilm --data sst2 --max-latency-ms 4 --device local --out runs/sst2-4ms",
        date="2026-11-28T10:20:00+00:00",
        prediction=LatencyPrediction(
            "8 terms, non-negative least squares, 16 shapes in 3 rounds", 0.021, 0.083, timings
        ),
        importances=(
            ChoiceImportance("score", "PED-ANOVA", 88, {"layers": 0.2, "hidden": 0.5, "ffn": 0.25, "heads": 0.05}),
            ChoiceImportance("latency", "PED-ANOVA", 88, {"layers": 0.3, "hidden": 0.4, "ffn": 0.29, "heads": 0.01}),
        ),
        costs={"measuring": 61.0, "supernet": 1500.0, "trials": 372.0, "short distillations": 640.0, "final": 900.0},
        ladder=ladder(),
        anchors=(Anchor("tinybert 4x312", 0.87, 3.3, 14_500_000, 14.6), Anchor("bag of words", 0.81)),
        split="validation",
        split_rows=872,
        train_rows=67_349,
        sampler="TPE",
        seed=0,
        versions={"optuna": "5.0.0", "onnxruntime": "1.31.1"},
        machine={"processor": "invented, 2 cores"},
        notes=("The points are invented.",),
    )
    whole = replace(whole, **changes)
    if "front" not in changes:
        whole = replace(whole, front=whole.compute_front())
    if "winner" not in changes and (best := whole.best_within()):
        gained = {"final": (best.score or 0) + 0.006, "shipped": (best.score or 0) + 0.005}
        shipped = replace(best, scores={**best.scores, **gained}, bundle="runs/sst2-4ms/student")
        taken = tuple(shipped if one is best else one for one in whole.points)
        whole = replace(whole, points=taken, winner=best.number)
    return whole
