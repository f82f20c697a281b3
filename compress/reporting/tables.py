"""Make the tables of results, which templates lay out on pages, and
`reporting.terminal` in a terminal."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, TypeVar

from compress.kinds import find
from compress.records.bench_result import RacedFormat
from compress.records.certificate import Certificate, VariantResult
from compress.records.language_scores import LanguageScore, LanguageScores
from compress.records.latency import Latency, Setting
from compress.records.run_report import Report, ReportRow
from compress.records.search_report import Anchor, SearchReport, TrialRecord
from compress.reporting import format as units
from compress.reporting.compare import (
    ComparedModel,
    Comparison,
    MeasuredDevice,
    Pick,
    View,
)
from compress.reporting.format import MISSING, capitalise
from compress.reporting.remarks import (
    answer,
    list_anchors,
    over_teacher,
    shape,
    speed_of,
)

MOST_REASONS = 8
RACE_COLUMNS = {
    "min ms": ("min_ms", 4),
    "p50": ("p50_ms", 0),
    "p95": ("p95_ms", 2),
    "p99": ("p99_ms", 6),
    "ratio": ("ratio", 1),
    "init ms": ("init_ms", 7),
    "first": ("first_ms", 5),
    "peak MB": ("peak_rss_mb", 3),
}
"""Heading -> (field of a latency, or `ratio` to the first file; rank)."""
PAGES_ONLY = 99
"""Rank of columns that only pages show."""

T = TypeVar("T")


@dataclass(frozen=True)
class Cell:
    """One measure of one row; `detail` is in small print, `tone` a class such as
    `bad`."""

    text: str
    detail: str = ""
    tone: str = ""

    @property
    def missing(self) -> bool:
        """Return True if there is nothing to show."""
        return self.text == MISSING


@dataclass(frozen=True)
class Column:
    """One measure of every row, in their order; `group` is the heading over the
    headings of a page.

    rank   a narrow terminal drops the columns of the highest rank first; PAGES_ONLY:
           shown on pages alone; page: False for terminals alone
    alone  the heading if there is no room for groups; '' if it is the same
    """

    heading: str
    cells: tuple[Cell, ...]
    group: str = ""
    rank: int = PAGES_ONLY
    alone: str = ""
    page: bool = True


@dataclass(frozen=True)
class Line:
    """A row of a table: its name, the class of its colour, and the number that labels
    it in pictures."""

    name: str
    role: str = "plain"
    number: int | None = None


@dataclass(frozen=True)
class ResultTable:
    """Rows under columns; `caption`: for a terminal, what a page says around the
    table."""

    rows: tuple[Line, ...]
    columns: tuple[Column, ...]
    title: str = ""
    caption: tuple[str, ...] = ()

    @staticmethod
    def build(
        rows: Iterable[Line],
        columns: Iterable[Column],
        title: str = "",
        caption: Iterable[str] = (),
    ) -> "ResultTable":
        """Leave out the columns that are empty in every row."""
        shown = tuple(
            column
            for column in columns
            if not all(cell.missing for cell in column.cells)
        )
        return ResultTable(tuple(rows), shown, title, tuple(caption))

    @property
    def on_page(self) -> tuple[Column, ...]:
        """List the columns that a page shows."""
        return tuple(column for column in self.columns if column.page)

    @property
    def groups(self) -> list[tuple[str, int]]:
        """List the group headings, each with the number of columns it spans."""
        names = [column.group for column in self.on_page]
        return [(name, names.count(name)) for name in dict.fromkeys(names)]


def column(
    rows: Iterable[T],
    group: str,
    heading: str,
    cell: Callable[[T], Cell | str],
    rank: int = PAGES_ONLY,
    **more: Any,
) -> Column:
    """Fill a column: `cell` maps a row to its cell, or to the text of it."""
    cells = (cell(row) for row in rows)
    return Column(
        heading,
        tuple(one if isinstance(one, Cell) else Cell(one) for one in cells),
        group,
        rank,
        **more,
    )


def run_table(report: Report) -> ResultTable:
    """Compare the rows of a run with the teacher: quality, size, speed and training."""
    of = partial(column, report.rows)

    def part(what: str, form: Callable[[float | None], str], row: ReportRow) -> Cell:
        ratio = over_teacher(report, row, what)
        return Cell(
            form(getattr(row, what)), "" if ratio is None else units.percent(ratio)
        )

    def kept(row: ReportRow) -> str:
        return units.share(over_teacher(report, row, "score"))

    def score(row: ReportRow) -> Cell:
        return Cell(
            units.score(report.score(row)),
            "" if kept(row) == MISSING else f"{kept(row)} kept",
        )

    def agreement(row: ReportRow) -> str:
        return (
            units.score(row.agreement)
            if find(report.kind).scaled
            else units.share(row.agreement)
        )

    def median(row: ReportRow) -> Cell:
        time = report.latency(row)
        notes = []
        if ratio := over_teacher(report, row, "p50_ms"):
            notes.append(
                f"{units.times(1 / ratio)} faster"
                if ratio <= 1
                else f"{units.times(ratio)} slower"
            )
        notes += (
            ["noisy"] * time.noisy + ["busy machine"] * bool(time.busy) if time else []
        )
        return Cell(_ms(time), ", ".join(notes))

    columns = [
        of("Quality", units.metric(report.metric), score, 0),
        of("Quality", "kept", kept, 5, page=False),
        of("Quality", "macro F1", lambda row: units.score(report.macro_f1(row)), 4),
        of("Quality", "RMSE", lambda row: units.three_digits(report.rmse(row)), 4),
        of("Quality", "agreement", agreement, 2),
        of("Model", "parameters", partial(part, "parameters", units.magnitude), 4),
        of(
            "Model",
            "FLOPs / token",
            partial(part, "flops_per_token", units.magnitude),
            8,
        ),
        of("Model", "file, MB", partial(part, "file_mb", units.three_digits), 3),
        of("Inference", "p50, ms", median, 1),
        of("Inference", "p95, ms", lambda row: _ms(report.latency(row), "p95_ms"), 4),
        of(
            "Inference",
            "peak, MB",
            partial(part, "peak_rss_mb", units.three_digits),
            7,
        ),
        of("Training", "time", lambda row: units.duration(row.train_seconds), 6),
        of(
            "Training",
            "samples / s",
            lambda row: units.three_digits(row.samples_per_second),
            9,
        ),
    ]
    caption = [
        f"{units.metric(report.metric)} on {report.split}, {report.split_rows:,} "
        f"{report.unit}"
    ]
    if report.settings:
        caption.append(f"latency of one forward: {report.settings[0]}")
    noisy = any((one := report.latency(row)) and one.noisy for row in report.rows)
    if noisy or report.noise:
        busy = "other work ran while timing: see the page"
        caption.append(f"~ approximate, {busy}" if noisy else busy)
    return ResultTable.build(
        (Line(row.name, row.role) for row in report.rows),
        columns,
        report.title,
        caption,
    )


def _ms(time: Latency | None, key: str = "p50_ms") -> str:
    """Format a time, with `~` before a noisy one."""
    return (
        MISSING
        if time is None
        else f"{'~' if time.noisy else ''}{units.three_digits(getattr(time, key))}"
    )


def class_table(report: Report) -> ResultTable:
    """Compare recall, precision and F1 of every class; classes that a student lost come
    first."""
    rows = [row for row in report.rows if row.classes]
    scores = {row.name: {one.label: one for one in row.classes} for row in rows}
    hurt = {row.name: {one.label for one in report.fallen(row)} for row in rows}
    first = set().union(*hurt.values())
    counts = {one.label: one.support for row in rows for one in row.classes}
    labels = sorted(counts, key=lambda label: label not in first)

    def cell(row: ReportRow, measure: str, label: str) -> Cell:
        value = getattr(scores[row.name].get(label), measure, None)
        return Cell(
            units.score(value),
            tone="bad" if measure == "recall" and label in hurt[row.name] else "",
        )

    columns = [column(labels, "", "support", lambda label: f"{counts[label]:,}")]
    for measure in ("recall", "precision", "f1"):
        for row in rows:
            heading = row.name.removeprefix("student ")
            if row.role == "teacher":
                heading = "teacher"
            name = units.metric(measure)
            columns.append(
                column(
                    labels,
                    name,
                    heading,
                    partial(cell, row, measure),
                    alone=f"{name}, {heading}",
                )
            )
    return ResultTable.build(map(Line, labels), columns)


def score_tables(report: Report) -> list[ResultTable]:
    """List the metrics that `run_table` leaves out, and the forms of a student's
    vectors."""
    metrics = list(dict.fromkeys(name for row in report.rows for name in row.score))
    metrics = [name for name in metrics if name != report.metric]
    forms = report.vectors
    sizes = (
        column(forms, "", "bytes", lambda form: f"{form.bytes:,}"),
        column(
            forms, "", units.metric(report.metric), lambda form: units.score(form.score)
        ),
    )

    def score(name: str, row: ReportRow) -> str:
        return units.score(row.score.get(name))

    scores = tuple(
        column(report.rows, "", units.metric(name), partial(score, name))
        for name in metrics
    )
    found = []
    if metrics:
        lines = tuple(Line(row.name) for row in report.rows)
        found.append(ResultTable(lines, scores, "Other scores"))
    if forms:
        lines = tuple(Line(form.name) for form in forms)
        found.append(ResultTable(lines, sizes, "Smaller vectors"))
    return found


def latency_tables(
    times: Iterable[tuple[str, Latency]],
    formats: Mapping[str, RacedFormat] | None = None,
) -> list[ResultTable]:
    """Lay out (name of the file, its times): a table per setting, a line per file; the
    ratio is to the first one.

    formats  facts about the exported files, by the names in `times`
    """
    by_setting: dict[Setting, list[tuple[str, Latency]]] = {}
    for name, one in times:
        by_setting.setdefault(one.setting, []).append((name, one))

    def figure(key: str, first: Latency, one: Latency) -> str:
        return (
            f"{one.p50_ms / first.p50_ms:.2f}"
            if key == "ratio"
            else units.three_digits(getattr(one, key))
        )

    result = []
    for setting, named in by_setting.items():
        timed = [one for _, one in named]
        notes = []
        if pinned := {one.affinity for one in timed if one.affinity}:
            notes.append(f"kept on CPUs {', '.join(sorted(pinned))}")
        if noisy := [f"{name}: {one.noise}" for name, one in named if one.noisy]:
            notes.append(
                "noisy: the two passes disagree, measure again before quoting it "
                f"({'; '.join(noisy)})"
            )
        if busy := dict.fromkeys(one.busy for one in timed if one.busy):
            notes.append(
                f"busy: {', '.join(busy)}: on an idle machine these files are faster"
            )
        columns = [
            column(timed, "", heading, partial(figure, key, timed[0]), rank)
            for heading, (key, rank) in RACE_COLUMNS.items()
        ]
        if formats:
            known = [formats[one.name] for one in timed]
            if any(one.format == "openvino" for one in known):
                notes.append(
                    "openvino computes in bfloat16 where the processor has it; its "
                    "difference is measured in float32"
                )
            columns[:0] = [
                column(known, "", "file MB", lambda one: f"{one.bytes / 1e6:.2f}", 2)
            ]
            columns.append(
                column(
                    known,
                    "",
                    "differs by",
                    lambda one: units.difference(one.difference, one.logit),
                    1,
                )
            )
        lines = (
            Line(name + " (noisy)" * one.noisy + " (busy)" * bool(one.busy))
            for name, one in named
        )
        result.append(ResultTable.build(lines, columns, str(setting), notes))
    return result


def format_certified(certified: bool | None, reason: str) -> Cell:
    """Show whether a file is certified, and why or why not."""
    if certified is None:
        return Cell(MISSING)
    return Cell("yes", reason) if certified else Cell("no", reason, "bad")


def choice_table(comparison: Comparison, chosen: Pick) -> ResultTable:
    """Compare the teachers and every candidate: score, certificate, size, and times on
    each device."""
    rows = (*comparison.teachers, *comparison.candidates)
    view = comparison.view
    of = partial(column, rows)
    front = comparison.front(lambda one: one.median_ms(view))

    def score(one: ComparedModel) -> Cell:
        own = comparison.score(one)
        other = next(iter(one.scores.items()), None) if own is None else None
        return Cell(
            units.score(own),
            f"{units.score(other[1])} on other rows: {other[0]}" if other else "",
        )

    def time(at: View, one: ComparedModel) -> Cell:
        if (latency := one.latency(at)) is None:
            return Cell(MISSING)
        marks = ", noisy" * latency.noisy + ", busy" * bool(latency.busy)
        return Cell(
            _ms(latency), f"p95{units.GAP}{units.three_digits(latency.p95_ms)}{marks}"
        )

    def peak(one: ComparedModel) -> str:
        latency = one.latency(view)
        return units.three_digits(latency.peak_rss_mb if latency else None)

    columns = [
        of("Quality", units.metric(comparison.task.metric), score, 0),
        of("Quality", "macro F1", lambda one: units.score(comparison.macro_f1(one))),
        of("Quality", "vs its fp32", lambda one: units.change(comparison.drop(one)), 5),
        of(
            "Quality",
            "certified",
            lambda one: format_certified(one.certified, one.reason),
            3,
        ),
        of("Model", "parameters", lambda one: units.magnitude(one.parameters), 6),
        of("Model", "file, MB", lambda one: units.three_digits(one.size_mb), 2),
    ]
    views = comparison.commonest()
    same = len({each.setting for each in views}) == 1
    for at in views:
        batch = f", batch {at.setting.batch}" if at.setting.batch > 1 else ""
        threads = f", {at.setting.threads} threads" if at.setting.threads > 1 else ""
        setting = f"{at.setting.seq} tokens{batch}{threads}"
        group, where_at = (
            (f"p50 at {setting}", "") if same else ("p50", f" at {setting}")
        )
        place = at.device if len(at.device) <= 14 else at.device.split(",")[0][:14]
        alone = f"p50 ms, {place}{where_at}"
        rank = 1 if at == view else 4
        columns.append(
            of(
                group,
                f"{at.device}, ms{where_at}",
                partial(time, at),
                rank,
                alone=alone,
            )
        )
    columns.append(of("Memory", "peak, MB", peak))
    columns.append(
        of("", "on front", lambda one: "●" if one in front else MISSING, 1, page=False)
    )
    caption = [where(comparison)]
    if view:
        caption += [
            f"latency of one forward: {view.name}",
            "on front: no faster file scores as high",
        ]
    lines = [Line(one.name, "teacher") for one in comparison.teachers]
    for number, one in enumerate(comparison.candidates, 1):
        picked = one is chosen.candidate
        lines.append(Line(one.name, "student" if picked else "plain", number))
    return ResultTable.build(lines, columns, "Which model to ship", caption)


def where(comparison: Comparison) -> str:
    """Count the files and bundles, and name the rows that they are scored on."""
    files = len(comparison.candidates)
    bundles = len(comparison.bundles)
    counted = (
        f"{files} file{'s' * (files != 1)} of {bundles} bundle{'s' * (bundles != 1)}"
    )
    metric = units.metric(comparison.task.metric)
    return f"{counted}, {metric} on {comparison.basis}" if comparison.basis else counted


def device_tables(
    comparison: Comparison,
) -> list[tuple[MeasuredDevice, list[ResultTable]]]:
    """List each device with the times of every file at every setting."""
    result = []
    for device in comparison.devices:
        views = [
            View(device.name, setting) for setting in comparison.settings(device.name)
        ]
        models = (*comparison.teachers, *comparison.candidates)
        times = [
            (one.name, time)
            for view in views
            for one in models
            if (time := one.latency(view))
        ]
        if times:
            result.append((device, latency_tables(times)))
    return result


def certificate_table(certificates: Sequence[tuple[str, Certificate]]) -> ResultTable:
    """Lay out (name of the file, its certificate)."""

    def device(one: Certificate) -> Cell:
        name, _, more = one.device.partition(", ")
        return Cell(name, "; ".join(part for part in (more, one.runtime) if part))

    def made(one: Certificate) -> Cell:
        name, _, rest = one.method.partition(", ")
        kept = (
            f"{len(one.kept)} product{'s' * (len(one.kept) != 1)} left in float32"
            if one.kept
            else ""
        )
        return Cell(name, "; ".join(filter(None, (rest, kept))))

    def after(one: Certificate) -> Cell:
        return Cell(
            units.score(one.after),
            f"{units.change(one.drop)}; {units.change(one.max_drop)} allowed",
        )

    def without_vnni(one: Certificate) -> Cell:
        found = one.saturation
        if found is None:
            return Cell(MISSING)
        change = units.change(found.before - found.after)
        return Cell(change, f"{len(found.shares)} products saturate")

    of = partial(column, [one for _, one in certificates])
    columns = [
        of(
            "Verdict",
            "certified",
            lambda one: format_certified(one.certified, one.reason),
        ),
        of(
            "Score",
            "fp32",
            lambda one: Cell(units.score(one.before), units.metric(one.metric)),
        ),
        of("Score", "this file", after),
        of("Answers", "agreement", lambda one: units.share(one.agreement)),
        of(
            "Answers",
            "logits differ by",
            lambda one: units.small(one.max_logit_difference),
        ),
        of("Answers", "x86 without VNNI", without_vnni),
        of("Measured", "on", lambda one: Cell(one.data, one.place)),
        of("Measured", "device", device),
        of("Measured", "made by", made),
    ]
    return ResultTable.build((Line(name) for name, _ in certificates), columns)


def race_table(tried: Sequence[VariantResult]) -> ResultTable:
    """Lay out the variants of one race, in their order."""
    of = partial(column, tried)

    def time(setting: str, one: VariantResult) -> Cell:
        if setting not in one.p50_ms:
            return Cell(MISSING)
        ratio = f"{one.ratio[setting]:.2f}×" if setting in one.ratio else ""
        return Cell(
            f"{'~' if one.noisy else ''}{units.three_digits(one.p50_ms[setting])}",
            ratio,
        )

    def result(one: VariantResult) -> Cell:
        return (
            Cell("chosen" if one.chosen else "passed", one.reason)
            if one.passed
            else Cell("failed", one.reason, "bad")
        )

    def fused(one: VariantResult) -> Cell:
        names = ", ".join(f"{count} {name}" for name, count in one.fused.items())
        return Cell(str(sum(one.fused.values())) if names else MISSING, names)

    settings = list(dict.fromkeys(setting for one in tried for setting in one.p50_ms))
    columns = [
        of("Verdict", "result", result, 1),
        *(
            of("p50, ms", name, partial(time, setting), 2)
            for setting, name in zip(
                settings,
                units.drop_shared_parts(settings),
                strict=True,
            )
        ),
        of("Graph", "fused", fused),
        of("Graph", "file, MB", lambda one: units.three_digits(one.file_mb)),
        of("Parity", "logits differ by", lambda one: units.small(one.difference)),
        of("Parity", "agreement", lambda one: units.share(one.agreement)),
    ]
    return ResultTable.build(
        (Line(one.variant, "student" if one.chosen else "baseline") for one in tried),
        columns,
    )


STANDING = {
    "subnet": "scored",
    "short": "trained briefly",
    "final": "trained",
    "shipped": "shipped",
}
TRIAL_HEADINGS = (
    "shape",
    "became",
    "score",
    "predicted, ms",
    "measured, ms",
    "file, MB",
    "parameters",
)
"""Headings of the columns of a trial, after its number."""


@dataclass(frozen=True)
class TrialRow:
    """A trial: its values for the script (score and costs), its cells under
    TRIAL_HEADINGS, and its class: on the front, or else within the budgets."""

    number: int
    values: str
    cells: tuple[str, ...]
    style: str


def trial_row(found: SearchReport, point: TrialRecord, front: set[int]) -> TrialRow:
    """Lay out a trial in full; `front`: the numbers of the trials on the front."""
    values = (
        point.score,
        *(found.value(point, cost) for cost in ("latency", "file_mb", "parameters")),
    )
    became = (
        STANDING.get(point.stage or "", "")
        if point.state == "complete"
        else point.state
    )
    scores = map(units.score, point.known_scores.values())
    cells = (
        shape(point.choice),
        ": ".join(filter(None, (became, point.reason))),
        " → ".join(scores) or MISSING,
        format_predicted(point),
        units.three_digits(found.measured_ms(point)),
        units.three_digits(point.file_mb),
        units.magnitude(point.parameters),
    )
    shown = " ".join("-" if value is None else f"{value:.6g}" for value in values)
    style = "within" if found.feasible(point) else ""
    if point.number in front:
        style = "front"
    return TrialRow(point.number, shown, cells, style)


def format_predicted(point: TrialRecord) -> str:
    """Format a predicted time with its deviation, in ms: `3.41 ± 0.10`."""
    if point.predicted_ms is None:
        return MISSING
    shown = units.three_digits(point.predicted_ms)
    decimals = len(shown.partition(".")[2])
    return (
        f"{shown} ± {point.predicted_error_ms:.{decimals}f}"
        if point.predicted_error_ms
        else shown
    )


def front_table(found: SearchReport) -> ResultTable:
    """Lay out the teacher, the anchors, and the front from the best score down; the
    answer is highlighted."""
    chosen = answer(found)
    front = [found.point(number) for number in found.front or found.compute_front()]
    if chosen and chosen not in front:
        front.append(chosen)
    rows: list[Anchor | TrialRecord] = [
        *list_anchors(found),
        *sorted(front, key=lambda one: -(one.score or 0.0)),
    ]

    def kept(one: Anchor | TrialRecord) -> str:
        teachers = found.teacher_score
        return units.share(
            one.score / teachers
            if teachers and teachers > 0 and one.score is not None
            else None
        )

    def of_trial(
        form: Callable[[TrialRecord], str],
    ) -> Callable[[Anchor | TrialRecord], str]:
        return lambda one: form(one) if isinstance(one, TrialRecord) else MISSING

    def measured(one: Anchor | TrialRecord) -> str:
        return units.three_digits(
            found.measured_ms(one) if isinstance(one, TrialRecord) else one.ms
        )

    def speed(one: Anchor | TrialRecord) -> str:
        value = speed_of(found, one)
        return (
            f"{'~' if measured(one) == MISSING else ''}{units.times(value)}"
            if value
            else MISSING
        )

    def before(one: TrialRecord) -> str:
        return units.score(one.first if one.stage != "subnet" else None)

    of = partial(column, rows)
    columns = [
        of(
            "Quality", units.metric(found.metric), lambda one: units.score(one.score), 0
        ),
        of("Quality", "of the teacher’s", kept, 7),
        of(
            "Quality",
            "stage",
            of_trial(lambda one: one.stage or MISSING),
            6,
            page=False,
        ),
        of("Quality", "before training", of_trial(before)),
        of("Latency", "predicted, ms", of_trial(format_predicted), 5),
        of("Latency", "measured, ms", measured, 1),
        of("Latency", "speed", speed, 3),
        of("Model", "file, MB", lambda one: units.three_digits(one.file_mb), 2),
        of("Model", "parameters", lambda one: units.magnitude(one.parameters), 4),
    ]
    lines = [
        Line(shape(one.choice), "student" if one is chosen else "plain", one.number)
        if isinstance(one, TrialRecord)
        else Line(one.name, "baseline" if index else "teacher")
        for index, one in enumerate(rows)
    ]
    return ResultTable.build(lines, columns)


def search_facts(found: SearchReport) -> list[tuple[str, str]]:
    """Count the trials of a search, and list what it took."""
    total = sum(found.costs.values())
    scored = sum(point.first is not None for point in found.points)
    numbers = [("Trials", f"{len(found.points):,}"), ("Scored", f"{scored:,}")]
    numbers += [
        (capitalise(state), f"{count:,}")
        for state, count in found.counts().items()
        if state != "complete"
    ]
    if trials := found.costs.get("trials"):
        numbers.append(("Shapes a minute", units.three_digits(60 * scored / trials)))
    if total:
        numbers.append(("Altogether", units.duration(total)))
    chosen = answer(found)
    if chosen and chosen.score is not None and found.teacher_score is not None:
        numbers.append(
            ("Score given up", units.three_digits(found.teacher_score - chosen.score))
        )
    return numbers


def tabulate_rejected(found: SearchReport) -> list[ResultTable]:
    """Count the trials that were not completed by state and reason; reasons that differ
    only in numbers are one."""
    groups: dict[tuple[str, str], list[str]] = {}
    for point in found.points:
        if point.state != "complete":
            groups.setdefault(
                (point.state, re.sub(r"\d+(\.\d+)?", "#", point.reason)), []
            ).append(point.reason)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    rows = [
        (state, f"{len(reasons):,}", reasons[0] or MISSING)
        for (state, _), reasons in ordered
    ]
    if more := sum(len(reasons) for _, reasons in ordered[MOST_REASONS:]):
        rows[MOST_REASONS:] = [
            ("other", f"{more:,}", f"{len(ordered) - MOST_REASONS} more reasons")
        ]
    columns = (
        column(rows, "", "trials", itemgetter(1)),
        column(rows, "", "reason (of one)", itemgetter(2)),
    )
    title = "Trials not completed, and why"
    return (
        [ResultTable(tuple(Line(state) for state, _, _ in rows), columns, title)]
        if rows
        else []
    )


def perplexity_table(scores: LanguageScores) -> ResultTable:
    """Compare language models on the same documents, the student last."""
    models = scores.models

    def role(at: int) -> str:
        return "student" if at == len(models) - 1 else "teacher" if at == 0 else "plain"

    def perplexity(model: LanguageScore) -> Cell:
        value, error = scores.perplexity(model)
        return Cell(units.three_digits(value), f"± {units.three_digits(error)}")

    def nats(model: LanguageScore) -> Cell:
        mean, error = scores.mean(model.nats)
        return Cell(units.score(mean), f"± {units.score(error)}")

    def size(model: LanguageScore) -> str:
        return units.magnitude(model.parameters)

    return ResultTable.build(
        [Line(model.name, role(at)) for at, model in enumerate(models)],
        [
            column(models, "", "Perplexity", perplexity, rank=1),
            column(models, "", "Nats per token", nats, rank=2),
            column(models, "", "Parameters", size, rank=3),
        ],
    )
