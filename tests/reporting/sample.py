"""An invented report: no number here was measured."""

import math
from dataclasses import replace
from typing import Any

from compress.records.class_scores import ClassScore
from compress.records.latency import Latency, Setting
from compress.records.run_report import Report, ReportRow


def latency(p50: float, *, noisy: bool = False) -> dict[str, Latency]:
    """Two settings, the second a third as slow."""
    return {
        str(at): Latency("file", at, 20, p50 * f * 0.95, p50 * f, p50 * f * 1.1, p50 * f * 1.2, 40, 9, 90, noisy, "")
        for at, f in ((Setting(1, 1, 128), 1.0), (Setting(1, 1, 32), 0.3))
    }


def curve(points: int) -> list[dict[str, float]]:
    """A loss of two parts that span three decades, and five evaluations."""
    found = []
    for step in range(1, points + 1):
        large, small = 2 * math.exp(-3 * step / points), 0.01 * math.exp(-step / points)
        found.append({"step": step, "loss": large + small, "part.large": large, "part.small": small, "epoch": 0.1})
    every = max(1, points // 5)
    found += [
        {"step": step, "eval_accuracy": 0.8 + 0.1 * step / points, "eval_agreement": 0.95, "eval_f1": 0.8}
        for step in range(every, points + 1, every)
    ]
    return found


ROWS = (
    ReportRow("majority", "baseline", {"accuracy": 0.5, "f1": 0.0}),
    ReportRow("bag of words", "baseline", {"accuracy": 0.8, "f1": 0.79}, train_seconds=0.8),
    ReportRow(
        "teacher", "teacher", {"accuracy": 0.9, "f1": 0.91}, None, 20_000_000, 21e6, 90.0, latency(15.0), 400.0, 252.0
    ),
    ReportRow(
        "student fp32", "student", {"accuracy": 0.882, "f1": 0.88}, 0.962, 14_000_000, 9.5e6, 57.0, latency(6.0), 300.0,
        514.0, 433.0,
    ),
    ReportRow(
        "student int8", "student", {"accuracy": 0.873, "f1": 0.87}, 0.955, 14_000_000, 9.5e6, 14.4, latency(3.0), 180.0,
        514.0, 433.0,
    ),
)  # fmt: skip


def report(**changes: Any) -> Report:
    whole = Report(
        title="a run", recipe="tinybert", teacher="minilm", data="sst2", kind="classification", metric="accuracy",
        labels=2, split="validation", split_rows=872, rows=ROWS,
        command="compress distill --teacher minilm --recipe tinybert --data sst2 --out runs/sst2",
        date="2026-11-21T00:41:12+00:00", seconds=812.4, stage_seconds={"teacher": 252.0, "distill": 514.0}, seed=42,
        curves={"distill": curve(300)}, versions={"torch": "2.13.0"}, machine={"processor": "invented, 2 cores"},
        notes=("The rows are invented.",),
    )  # fmt: skip
    return replace(whole, **changes)


def with_classes(whole: Report, recall: float = 0.0) -> Report:
    """Add two classes to the report; `recall`: of the rare one's nine rows, by the int8 student."""
    rare = {ROWS[2].name: 6 / 9, ROWS[3].name: 6 / 9, ROWS[4].name: recall}

    def classes(share: float) -> tuple[ClassScore, ...]:
        return ClassScore("often", 0.9, 0.9, 0.9, 100), ClassScore("rare", share, share, share, 9)

    rows = (replace(row, classes=classes(rare[row.name])) if row.name in rare else row for row in whole.rows)
    return replace(whole, rows=tuple(rows))


def regression() -> Report:
    """A student slower, larger and worse than a bag of words, and a metric that is not finite."""
    rows = (
        ReportRow("mean", "baseline", {"pearson": 0.0, "mse": 2.3}),
        ReportRow("bag of words", "baseline", {"pearson": 0.72, "mse": 1.2}),
        ReportRow("teacher", "teacher", {"pearson": 0.86, "mse": 0.6}, None, 20_000_000, None, 90.0, latency(3.0)),
        ReportRow("student", "student", {"pearson": 0.7, "mse": math.nan}, 0.8, 30_000_000, None, 120.0, latency(90.0)),
    )
    return report(kind="regression", metric="pearson", labels=0, rows=rows, curves={}, stage_seconds={})
