"""The record of one run, in plain values that JSON can hold; `table()` and `html()` only show it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NotRequired

from typing_extensions import TypedDict

from compress.data.task import Kind
from compress.errors import BundleError
from compress.evaluation.metrics import ClassScore, macro_f1
from compress.exporters.artifact import Bundle
from compress.records.certificate import Certificate, Sensitivity, Tried

if TYPE_CHECKING:
    from rich.table import Table

# The TypedDict that pydantic can read on Python 3.11; it comes with pydantic.


Point = Mapping[str, float | None]


class Latency(TypedDict):
    """Time of one forward in milliseconds: `threads` threads, `batch` rows of `seq` tokens.

    noisy, other_load, busy: as in `bench.protocol.Latency`; older reports have not the last two.
    """

    threads: int
    batch: int
    seq: int
    min_ms: float
    p50_ms: float
    p95_ms: float
    noisy: bool
    other_load: NotRequired[float | None]
    busy: NotRequired[str]


@dataclass(frozen=True)
class Row:
    """One line of the comparison. None (or a missing or NaN score): not measured, or without meaning here.

    score            metric name -> value; the report's own metric decides
    agreement        with the teacher, over the same rows: share, or Pearson's r
    flops_per_token  of the encoder, in one forward
    latency          setting (`str` of a bench.protocol.Setting: `1 thread, batch 1, 128 tokens`) -> times
    file_mb, peak_rss_mb   10^6 bytes
    train_seconds    all that was spent to make this row, its stages together
    classes          of each class apart: a label, or a type of entity
    sha256           of the file that was scored and timed; None where there was none, and in older reports
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

    def __post_init__(self) -> None:
        times = [found[key] for found in (self.latency or {}).values() for key in ("min_ms", "p50_ms", "p95_ms")]
        assert all(math.isfinite(time) and time > 0 for time in times), f"{self.name}: a time that no clock shows"


@dataclass(frozen=True)
class Report:
    """Teacher beside students beside baselines, on one split, with all that is needed to judge and repeat it.

    rows     in the order they were derived; the last student is what ships, and the headline speaks of it
    labels   how many classes the task has; 0 for regression
    curves   stage -> points {"step": n, name: value}: `loss`, its parts by name, and on the validation split
             `eval_<metric>`, `eval_agreement`, `eval_loss`; a trainer's learning rate, epoch and such are not drawn
    noise    the verdict on the timing: None where it was quiet, else what disturbed it
    machine  what is known of the hardware, name -> value; versions: library -> version
    seconds  the whole run's wall time; stage_seconds: of each stage
    date     ISO 8601
    certificates, sensitivity, tuning    what was proved of the files, see `compress.records.certificate`
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
    rows: tuple[Row, ...]
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
    tuning: tuple[Tried, ...] = ()

    def score(self, row: Row) -> float | None:
        """The row's value of the report's metric; None where there is no finite one."""
        return finite(row.score.get(self.metric))

    def macro_f1(self, row: Row) -> float | None:
        """Average the F1 of the row's classes; None where the report's metric is that already, or there are none."""
        same = self.metric == "f1_macro" or (self.metric == "f1" and self.kind == "classification" and self.labels > 2)
        return None if same else macro_f1(row.classes)

    def of_role(self, role: Literal["baseline", "teacher", "student"]) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.role == role)

    @property
    def settings(self) -> tuple[str, ...]:
        """Every latency setting once, the one that most rows have first: that one is compared where room is short."""
        names = [name for row in self.rows for name in row.latency or {}]
        return tuple(sorted(dict.fromkeys(names), key=lambda name: -names.count(name)))

    def latency(self, row: Row, setting: str | None = None) -> Latency | None:
        """The row's times at a setting, by default at the first of `settings`; None where not measured."""
        chosen = setting or next(iter(self.settings), None)
        return (row.latency or {}).get(chosen) if chosen else None

    def to_json(self) -> str:
        """Indented JSON; what is not a finite number becomes null."""
        from pydantic import TypeAdapter

        return TypeAdapter(Report).dump_json(self, indent=2).decode() + "\n"

    @staticmethod
    def from_json(text: str | bytes | Path) -> Report:
        """The report that `to_json` wrote, from its text or file. Raises BundleError naming each field in error."""
        from pydantic import TypeAdapter, ValidationError

        source = text if isinstance(text, Path) else "report"
        content = text.read_bytes() if isinstance(text, Path) else text
        try:
            return TypeAdapter(Report).validate_json(content)
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, one['loc'])) or 'JSON'}: {one['msg']}" for one in error.errors())
            raise BundleError(f"{source}: not a report of this tool ({problems}); measure the bundle again.") from error

    def table(self, width: int = 100) -> Table:
        """Rows side by side, at most `width` columns wide: the least telling measures go first, and it says which."""
        from compress.reporting.tables import table

        return table(self, width)

    def html(self) -> str:
        """One self-contained page: no request leaves it, no script runs in it."""
        from compress.reporting.html import html

        return html(self)


def finite(value: float | None) -> float | None:
    """The value, or None where it is none: a NaN or an infinity is shown, compared and drawn as not measured."""
    return value if value is not None and math.isfinite(value) else None


def series(points: Sequence[Point]) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """Name -> (step, value) of every finite value, names in order of appearance."""
    names = dict.fromkeys(name for point in points for name in point if name != "step")
    for name in names:
        pairs = ((finite(point.get("step")), finite(point.get(name))) for point in points)
        found = [(step, value) for step, value in pairs if step is not None and value is not None]
        if found:
            yield name, found


NAME = "report.json"


def keep(
    bundle: Bundle,
    *,
    certificates: Sequence[Certificate] = (),
    sensitivity: Sequence[Sensitivity] = (),
    tuning: Sequence[Tried] = (),
) -> Bundle:
    """The bundle with this evidence in its report.

    A certificate takes the place of an older one of the same file on the same device and runtime; a race takes the
    place of an older one on the same device; sensitivities, of all older ones. What is not given stays. A bundle
    without a report, as one exported from a checkpoint, gets one that holds nothing else. Raises BundleError for a
    figure that is not finite: JSON has no words for it.
    """
    given: tuple[Certificate | Sensitivity | Tried, ...] = (*certificates, *sensitivity, *tuning)
    for each in given:
        for name, value in asdict(each).items():
            if isinstance(value, float) and not isfinite(value):
                raise BundleError(f"{bundle.path}: {type(each).__name__.lower()}: {name} is {value}; nothing was kept")
    report = report_of(bundle)
    proved = {(each.artefact, each.device, each.runtime): each for each in (*report.certificates, *certificates)}
    raced = {each.device for each in tuning}
    report = replace(
        report,
        certificates=tuple(proved.values()),
        sensitivity=tuple(sensitivity) or report.sensitivity,
        tuning=(*(each for each in report.tuning if each.device not in raced), *tuning),
    )
    return bundle.attach(NAME, report.to_json())


def report_of(bundle: Bundle) -> Report:
    """The report in the bundle, or an empty one that says what the bundle is."""
    if (bundle.path / NAME).is_file():
        return Report.from_json(bundle.path / NAME)
    task = bundle.task
    return Report(
        title=bundle.path.name,
        recipe="",
        teacher="",
        data="",
        kind=task.kind,
        metric=task.metric,
        labels=len(task.labels),
        split="",
        split_rows=0,
        rows=(),
        command="",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=dict(bundle.manifest.versions),
    )
