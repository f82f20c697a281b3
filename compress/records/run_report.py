"""The record of one run, kept as `report.json`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from compress.arguments import check_arguments
from compress.errors import BundleError
from compress.kinds import Kind, find
from compress.records.certificate import Certificate, Sensitivity, VariantResult
from compress.records.class_scores import (
    ClassChange,
    ClassScore,
    compare_classes,
    macro_f1,
    select_fallen,
)
from compress.records.json_text import from_json, to_json
from compress.records.latency import Latency
from compress.records.path import WalkedPath

REPORT = "report.json"
Point = Mapping[str, float | None]


@dataclass(frozen=True)
class ReportRow:
    """One row of the comparison. None (or a missing or NaN score): not measured, or not
    applicable.

    score            metric -> value; the metric of the report decides
    interval         the 95 % interval of the score by that metric
    agreement        with the teacher on the same rows: share, or Pearson's r
    flops_per_token  of the encoder, in one forward
    latency          setting (`str` of a Setting: `1 thread, batch 1, 128 tokens`) ->
                     times
    file_mb, peak_rss_mb   10^6 bytes
    train_seconds    of all stages that made this row
    classes          scores of each class: a label, or a type of entity
    sha256           of the file that was scored and timed; None without a file
    """

    name: str
    role: Literal["baseline", "teacher", "student"]
    score: Mapping[str, float | None]
    agreement: float | None = None
    parameters: int | None = None
    flops_per_token: float | None = None
    file_mb: float | None = None
    latency: Mapping[str, Latency] | None = None
    peak_rss_mb: float | None = None
    train_seconds: float | None = None
    samples_per_second: float | None = None
    sha256: str | None = None
    classes: tuple[ClassScore, ...] = ()
    interval: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        times = [
            time
            for one in (self.latency or {}).values()
            for time in (one.min_ms, one.p50_ms, one.p95_ms)
        ]
        assert all(math.isfinite(time) and time > 0 for time in times), (
            f"{self.name}: a time that is not finite and above 0"
        )


@dataclass(frozen=True)
class VectorForm:
    """One form in which an index may store the student's vectors: the bytes of a
    vector, and the score with them."""

    name: str
    bytes: int
    score: float


@dataclass(frozen=True)
class Report:
    """Baselines, teachers and students compared on one split, with all that is needed
    to judge and repeat the run.

    rows     in the order in which they were made; the last student ships, and the
             headline is about it
    split_rows    number of scored examples: rows, queries with their passages, or pairs
                  of texts
    labels   number of classes; 0 for regression and ranking
    curves   stage -> points {"step": n, name: value}: `loss`, its parts by name, and on
             the validation split `eval_<metric>`, `eval_agreement`, `eval_loss`;
             learning rate, epoch and the like are not drawn
    noise    what disturbed the timing; None if nothing did
    machine  hardware facts, name -> value; versions: library -> version
    seconds  wall time of the whole run; stage_seconds: of each stage
    date     ISO 8601
    certificates, sensitivity, tuning    evidence for the files, see
                                         `compress.records.certificate`
    vectors  forms of the shipped student's vectors; empty for other tasks than
             embedding
    path     to the student, if a share of the score was asked for
    """

    title: str
    recipe: str
    teacher: str
    data: str
    kind: Kind
    metric: str
    labels: int
    split: str
    split_rows: int
    rows: tuple[ReportRow, ...]
    command: str
    date: str
    seconds: float | None = None
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    seed: int | None = None
    curves: Mapping[str, Sequence[Point]] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, str] = field(default_factory=dict)
    noise: str | None = None
    notes: tuple[str, ...] = ()
    certificates: tuple[Certificate, ...] = ()
    sensitivity: tuple[Sensitivity, ...] = ()
    tuning: tuple[VariantResult, ...] = ()
    vectors: tuple[VectorForm, ...] = ()
    path: WalkedPath | None = None

    @property
    def unit(self) -> str:
        """Return what `split_rows` counts, in the plural."""
        return str(find(self.kind).scored_unit(self.metric))

    @property
    def class_word(self) -> str:
        """Return what `ReportRow.classes` are, in the singular."""
        return str(find(self.kind).class_word)

    @check_arguments
    def score(self, row: ReportRow) -> float | None:
        """Return the score of the row by the metric of the report, or None if it is not
        finite."""
        return finite(row.score.get(self.metric))

    @check_arguments
    def macro_f1(self, row: ReportRow) -> float | None:
        """Average the F1 of the row's classes; None without classes, or where the
        metric of the report is the same."""
        same = find(self.kind).averages_classes(self.metric, self.labels)
        return None if same else macro_f1(row.classes)

    def rmse(self, row: ReportRow) -> float | None:
        """Return the root mean squared error of the row's numbers, or None if it
        predicts none."""
        squared = finite(row.score.get("mse"))
        return None if squared is None else math.sqrt(squared)

    @property
    def teacher_row(self) -> ReportRow | None:
        """The first teacher, which students are compared with."""
        return next(iter(self.of_role("teacher")), None)

    @property
    def shipped(self) -> ReportRow | None:
        """The last student, which ships."""
        return next(reversed(self.of_role("student")), None)

    @check_arguments
    def fallen(self, row: ReportRow) -> tuple[ClassChange, ...]:
        """Select the classes of which a student finds nothing, or far less than the
        first teacher."""
        teacher = self.teacher_row
        return (
            select_fallen(compare_classes(teacher.classes, row.classes))
            if teacher and row.role == "student"
            else ()
        )

    @check_arguments
    def of_role(
        self,
        role: Literal["baseline", "teacher", "student"],
    ) -> tuple[ReportRow, ...]:
        """List the rows with this role."""
        return tuple(row for row in self.rows if row.role == role)

    @property
    def settings(self) -> tuple[str, ...]:
        """List the latency settings, the most frequent first: that one is compared if
        room is short."""
        names = [name for row in self.rows for name in row.latency or {}]
        return tuple(sorted(dict.fromkeys(names), key=lambda name: -names.count(name)))

    @check_arguments
    def latency(self, row: ReportRow, setting: str | None = None) -> Latency | None:
        """Return the times of a row at a setting, by default the first of `settings`;
        None if not measured."""
        chosen = setting or next(iter(self.settings), None)
        return (row.latency or {}).get(chosen) if chosen else None

    def to_json(self) -> str:
        """Write indented JSON; numbers that are not finite become null."""
        return to_json(self)

    @staticmethod
    @check_arguments
    def from_json(source: str | bytes | Path) -> Report:
        """Read what `to_json` wrote, from its text or file. Raises BundleError naming
        each field in error."""
        return from_json(
            Report,
            source,
            BundleError,
            "report of this tool",
            "measure the bundle again",
        )


def finite(value: float | None) -> float | None:
    """Return the value, or None for a NaN or an infinity, which count as not
    measured."""
    return value if value is not None and math.isfinite(value) else None


def series(points: Sequence[Point]) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """Yield (name, [(step, value)]) of the finite values, in the order in which names
    appear."""
    names = dict.fromkeys(name for point in points for name in point if name != "step")
    for name in names:
        pairs = (
            (finite(point.get("step")), finite(point.get(name))) for point in points
        )
        line = [
            (step, value)
            for step, value in pairs
            if step is not None and value is not None
        ]
        if line:
            yield name, line
