"""Put results into words: a headline for each page, and remarks on what its figures do
not support."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from compress.evaluation.statistics import wilson_interval
from compress.kinds import find
from compress.records.class_scores import ClassChange, describe_changes, select_fallen
from compress.records.latency import NOISE_FACTOR, Latency
from compress.records.run_report import Report, ReportRow, finite
from compress.records.search_report import (
    Anchor,
    ObjectiveName,
    SearchReport,
    TrialRecord,
)
from compress.reporting import format as units
from compress.reporting.compare import OWN, ComparedModel, Comparison, Limits, Pick
from compress.reporting.format import GAP, capitalise, join_names

MACRO = 0.05
"""The most by which macro F1 may fall further than the score before a remark is
made."""
LITTLE = 0.95
"""Share of its teacher's score below which a student counts as having lost much."""
FARTHER = 1.2
"""Ratio of a student's error to its teacher's above which a remark is made
(regression)."""
BARELY = 0.1
"""Share of a baseline's errors that a teacher must avoid to count as clearly better."""
COST_NAMES: Mapping[ObjectiveName, tuple[str, str]] = {
    "latency": ("latency", "ms"),
    "file_mb": ("file size", "MB"),
    "parameters": ("parameters", ""),
    "flops_per_token": ("FLOPs / token", ""),
}
"""A cost's name, and its unit."""


def over_teacher(report: Report, row: ReportRow, what: str) -> float | None:
    """Divide a student's value by the first teacher's: `score`, `p50_ms`, or a field of
    its row.

    Returns None for other rows, and if a value is missing.
    """
    if report.teacher_row is None or row.role != "student":
        return None
    values = []
    for one in (row, report.teacher_row):
        latency = report.latency(one)
        p50_ms = latency.p50_ms if latency else None
        known = {"score": report.score(one), "p50_ms": p50_ms}
        values.append(finite(known[what] if what in known else getattr(one, what)))
    own, teachers = values
    return (
        None
        if own is None or teachers is None or teachers <= 0 or own < 0
        else own / teachers
    )


def run_headline(report: Report) -> str:
    """Say what the shipped student keeps of the teacher, and what it costs compared to
    it."""
    row = report.shipped
    metric = units.metric(report.metric)
    if row is None:
        return "No student was measured."
    own = report.score(row)
    name = capitalise(row.name)
    teacher = report.teacher_row
    if own is None:
        return f"{name} has no valid {metric}."
    if teacher is None:
        return (
            f"{name} reaches {metric} {units.score(own)}; no teacher was measured "
            "for comparison."
        )
    teachers = report.score(teacher)
    kept = over_teacher(report, row, "score")
    if kept is None or teachers is None:
        text = (
            f"{name} reaches {metric} {units.score(own)} against the teacher’s "
            f"{units.score(teachers)}"
        )
    elif own < teachers:
        text = (
            f"{name} keeps {100 * kept:.{1 if kept < 0.9995 else 2}f}{GAP}% of the "
            f"teacher’s {metric}"
        )
    else:
        shown = (
            units.score(own)
            if own == teachers
            else f"{units.score(own)} against {units.score(teachers)}"
        )
        text = (
            f"{name} {'matches' if own == teachers else 'exceeds'} the teacher’s "
            f"{metric} ({shown})"
        )
    gains = []
    losses = [f"finds {describe_changes(hurt)}"] if (hurt := report.fallen(row)) else []
    if time := over_teacher(report, row, "p50_ms"):  # 5 % either way is the same
        if time > 1.05:
            losses.append(f"takes {units.times(time)} as long")
        else:
            gains.append(
                f"{units.times(1 / time)} the speed"
                if time < 0.95
                else "the same speed"
            )
    if size := over_teacher(report, row, "file_mb"):
        if size > 1.05:
            losses.append(f"is {units.times(size)} as large")
        else:
            gains.append(
                f"{units.percent(size)} of the size" if size < 0.95 else "the same size"
            )
    text += f" at {' and '.join(gains)}" if gains else ""
    return text + (f", but {' and '.join(losses)}." if losses else ".")


def run_warnings(report: Report, *, shipped: bool = True) -> list[str]:
    """Name teachers and students that baselines match, a student that has lost much and
    what would help, classes that a student has lost, and students whose macro F1 falls
    far more than their score.

    shipped  whether to name the lost classes of the shipped student, which the headline
             names as well
    """
    students = report.of_role("student")
    teacher = report.teacher_row
    warnings = _remark_baselines(report) or _remark_loss(report)
    for row in students if shipped else students[:-1]:
        name = capitalise(row.name)
        warnings += _remark_classes(name, report.fallen(row), "the teacher")
    before, macro_before = (
        (report.score(teacher), report.macro_f1(teacher)) if teacher else (None, None)
    )
    for row in students:
        after = report.score(row)
        macro_after = report.macro_f1(row)
        if (
            before is None
            or after is None
            or macro_before is None
            or macro_after is None
        ):
            continue
        if (macro_before - macro_after) - max(0.0, before - after) > MACRO:
            warnings.append(
                f"{capitalise(row.name)} loses on {_kind_of_fall(teacher, row)}, which "
                f"{units.metric(report.metric)} does not show: macro F1 falls from "
                f"{units.score(macro_before)} to {units.score(macro_after)}."
            )
    if report.shipped is not None:
        warnings += _remark_error(report, report.shipped)
    for proof in report.certificates:
        warnings += _remark_classes(
            proof.artefact,
            select_fallen(proof.classes),
            f"its fp32 file on {proof.split}",
        )
    return warnings


def _kind_of_fall(teacher: ReportRow | None, row: ReportRow) -> str:
    """Return `rare classes` if the class whose F1 falls most has less than half as many
    rows as a class has on average, else `single classes`."""
    before = {each.label: each.f1 for each in (teacher.classes if teacher else ())}
    worst = max(row.classes, key=lambda each: before.get(each.label, 0.0) - each.f1)
    average = sum(each.support for each in row.classes) / len(row.classes)
    return "rare classes" if worst.support < average / 2 else "single classes"


def _remark_error(report: Report, row: ReportRow) -> list[str]:
    """Say that a student's numbers are much farther from the labels than its teacher's,
    which a correlation does not show."""
    teacher = report.teacher_row
    own = report.rmse(row)
    teachers = report.rmse(teacher) if teacher else None
    if own is None or teachers is None or own <= FARTHER * teachers:
        return []
    return [
        f"{capitalise(row.name)} is off by {units.three_digits(own)}, the teacher by "
        f"{units.three_digits(teachers)} (root mean squared error), which "
        f"{units.metric(report.metric)} does not show."
    ]


def _remark_classes(
    name: str,
    hurt: Sequence[ClassChange],
    reference: str,
) -> list[str]:
    """Name the classes of which a model finds less than another one."""
    return (
        [f"{name} finds {describe_changes(hurt)}, compared to {reference}."]
        if hurt
        else []
    )


def run_remarks(report: Report) -> list[str]:
    """List the caveats of a run's headline: lost classes, baselines, noise, and the
    size of the sample."""
    student = report.shipped
    remarks = run_warnings(report, shipped=False)
    noise = _describe_noise(
        (row.name, one) for row in report.rows for one in (row.latency or {}).values()
    )
    if noise:
        remarks.append(f"Take the times as approximate: {'; '.join(noise)}.")
    if report.metric not in find(report.kind).shares:
        return remarks
    return remarks + _remark_interval(
        report.metric,
        report.score(student) if student else None,
        report.split_rows,
    )


def _remark_baselines(report: Report) -> list[str]:
    """Say that teacher or shipped student is hardly better than the best baseline, and
    what helps a teacher."""
    baselines = [
        (score, row.name)
        for row in report.of_role("baseline")
        if (score := report.score(row)) is not None
    ]
    if not baselines:
        return []
    best, name = max(baselines)
    remarks = []
    teacher = report.teacher_row
    if teacher and (own := report.score(teacher)) is not None:
        little = own < best + BARELY * (1 - best)
        better = "barely better than" if little else ""
        remarks = _remark_baseline("The teacher", own, name, best, better)
    if remarks:
        remarks.append(
            "More labelled rows, or another teacher, will help more than another "
            "student."
        )
    student = report.shipped
    if student and (own := report.score(student)) is not None:
        remarks += _remark_baseline(capitalise(student.name), own, name, best)
    return remarks


def _remark_loss(report: Report) -> list[str]:
    """Say what helps a shipped student that keeps little of its teacher's score."""
    row = report.shipped
    if row is None:
        return []
    kept = over_teacher(report, row, "score")
    if kept is None or kept >= LITTLE:
        return []
    task = find(report.kind)
    asked = re.search(r"--recipe[ =](?!auto(\s|$))", report.command)
    is_choice_of_auto = report.recipe.startswith("prune") or task.vectors
    remedy = (
        "--recipe auto, which prunes the teacher where it can,"
        if asked and not is_choice_of_auto
        else "a larger student"
    )
    texts = ", and similar texts without labels (--corpus) help single-text tasks"
    ends = texts if task.takes_texts and "--corpus" not in report.command else ""
    return [
        f"{capitalise(row.name)} keeps {100 * kept:.1f}{GAP}% of the teacher’s "
        f"{units.metric(report.metric)}: {remedy} is likely to keep more, --effort "
        f"best trains longer{ends}."
    ]


def _remark_baseline(
    name: str,
    own: float,
    baseline: str,
    best: float,
    better: str = "",
) -> list[str]:
    """Say that a model is no better than the best baseline, or (`better`) by how
    little; nothing for a good one."""
    how = "no better than" if own <= best else better
    if not how:
        return []
    return [
        f"{name} is {how} the baseline {baseline} ({units.score(own)} against "
        f"{units.score(best)})."
    ]


def _describe_noise(times: Iterable[tuple[str, Latency]]) -> list[str]:
    """Say which files' times are noisy, and what else ran on the machine."""
    times = list(times)
    notes = []
    if noisy := dict.fromkeys(name for name, one in times if one.noisy):
        names = join_names(list(noisy))
        notes.append(f"{names} changed between the two passes (noisy, ~)")
    if busy := max((one.busy for _, one in times), default=""):
        notes.append(busy)
    return notes


def _remark_interval(
    metric: str,
    score: float | None,
    rows: int | None,
    more: str = "",
) -> list[str]:
    """State the confidence interval of an accuracy on so few rows; nothing for another
    metric."""
    if metric != "accuracy" or not rows or score is None or not 0 <= score <= 1:
        return []
    low, high = map(units.score, wilson_interval(score, rows))
    return [
        f"{rows:,} rows leave an accuracy of {units.score(score)} uncertain: 95{GAP}% "
        f"interval {low} to {high}{more}."
    ]


def choice_headline(comparison: Comparison, limits: Limits, chosen: Pick) -> str:
    """Say which file was picked for what, and which one scores best if these rows
    cannot tell it from the pick."""
    metric = units.metric(comparison.task.metric)
    view = comparison.view
    one = chosen.candidate
    costs = [(limits.budget_ms, "ms"), (limits.max_mb, "MB")]
    within = " and ".join(
        f"{value:g}{GAP}{unit}" for value, unit in costs if value is not None
    )
    least = (
        f"with {metric} of at least {units.score(limits.min_score)}"
        if limits.min_score is not None
        else ""
    )
    within = f"Within {within}" if within else ""
    request = " and ".join(filter(None, (within, least)))
    if one is None:  # how near they come to limits that none keeps
        scored = [
            each for each in comparison.candidates if comparison.score(each) is not None
        ]
        times = [took for each in scored if (took := each.median_ms(view)) is not None]
        sizes = [each.size_mb for each in scored if each.size_mb is not None]
        if not scored:
            return "No candidate has a score."
        known = map(comparison.score, scored)
        best = max(score for score in known if score is not None)
        fastest = "none was timed"
        if times:
            fastest = f"the fastest takes {units.measure(min(times), 'ms')}"
        ends = [f"the best score is {units.score(best)}", fastest]
        if sizes:
            ends.append(f"the smallest has {units.measure(min(sizes), 'MB')}")
        request = units.capitalise(request)
        return f"{request}, no file qualifies: {', '.join(ends)}."
    how = f"{request}, {one.name} scores best" if request else f"{one.name} scores best"
    if limits.cheapest:
        how = (
            f"{one.name} is the "
            f"{'smallest' if one.median_ms(view) is None else 'fastest'} {least}"
        )
    if chosen.best and comparison.basis:
        how = (
            f"{request + ', ' if request else ''}{one.name} costs the least of the "
            f"files that {comparison.basis.rows:,} rows cannot tell from the best"
        )
    text = f"{how}: {_describe_costs(comparison, one)}"
    if chosen.best:
        text += f"; {chosen.best.name} has {_describe_costs(comparison, chosen.best)}"
    return text + "."


def _describe_costs(comparison: Comparison, one: ComparedModel) -> str:
    """State a file's score, its time and its size."""
    known = [(one.median_ms(comparison.view), "ms"), (one.size_mb, "MB")]
    at = " and ".join(
        units.measure(value, unit) for value, unit in known if value is not None
    )
    metric = units.metric(comparison.task.metric)
    return f"{metric} {units.score(comparison.score(one))}{f' at {at}' if at else ''}"


def choice_remarks(comparison: Comparison, chosen: Pick) -> list[str]:
    """List the caveats of a pick: ties, certificates, lost classes, baselines, times,
    and what was left out."""
    one = chosen.candidate
    metric = units.metric(comparison.task.metric)
    basis = comparison.basis
    remarks: list[str] = []
    if one and basis and chosen.level:
        others = join_names(
            [
                f"{each.name} ({units.score(comparison.score(each))})"
                for each in chosen.level
            ]
        )
        score = f"{metric} {units.score(comparison.score(chosen.best or one))}"
        remarks.append(
            f"{basis.rows:,} rows cannot tell {score} from that of {others} (95{GAP}%, "
            "as independent answers)."
        )
    elif (
        one
        and basis
        and comparison.task.metric not in comparison.task.shares
        and len(comparison.candidates) > 1
    ):
        remarks.append(
            f"The margin of error of {metric} on {basis.rows:,} rows is not known: "
            "small differences may be noise."
        )
    if one and one.certified is False:
        remarks.append(f"{one.name} is not certified: {one.reason}.")
    for each in filter(None, (one, chosen.best)):
        remarks += _remark_classes(each.name, each.fallen, "the model it was made from")
    if one and comparison.baselines and (own := comparison.score(one)) is not None:
        remarks += _remark_baseline(
            one.name, own, *max(comparison.baselines, key=lambda each: each[1])
        )
    if disturbed := _describe_disturbance(comparison):
        remarks.append(f"Take the times as approximate: {'; '.join(disturbed)}.")
    if left_out := _describe_left_out(comparison):
        remarks.append(f"Not compared: {'; '.join(left_out)}.")
    return remarks


def _describe_disturbance(comparison: Comparison) -> list[str]:
    """Say which times are noisy, were taken on a busy machine, or come from separate
    races."""
    view = comparison.view
    timed = [
        (one, found) for one in comparison.candidates if (found := one.latency(view))
    ]
    notes = _describe_noise((one.name, found) for one, found in timed)
    if view and view.device == OWN and len({one.bundle for one, _ in timed}) > 1:
        races: dict[str, list[float]] = {}
        for report in (bundle.report for bundle in comparison.bundles if bundle.report):
            for row in report.of_role("teacher"):
                times = (row.latency or {}).values()
                races.setdefault(row.name, []).extend(
                    each.p50_ms for each in times if each.setting == view.setting
                )
        notes.append(
            "files of different runs were not raced together (`compress bench` with "
            "all bundles at once does that)"
        )
        wide = max(
            (times for times in races.values() if times),
            key=lambda times: max(times) / min(times),
            default=[],
        )
        if wide and max(wide) > NOISE_FACTOR * min(wide):
            spread = (
                f"{units.three_digits(min(wide))} to {units.measure(max(wide), 'ms')}"
            )
            notes.append(f"the same teacher took {spread} in these runs")
    return notes


def _describe_left_out(comparison: Comparison) -> list[str]:
    """List the candidates scored on other rows or not at all, those that were not
    timed, and measurements of unknown files."""
    view = comparison.view
    candidates = comparison.candidates
    other = [one for one in candidates if one.scores and comparison.score(one) is None]
    rows = "; ".join(sorted({str(basis) for one in other for basis in one.scores}))
    groups = {
        f"on other rows ({rows})": other,
        "without a score": [one for one in candidates if not one.scores],
    }
    if view:
        untimed = [one for one in candidates if not one.latency(view)]
        groups[f"not timed at {view.name}"] = untimed
    notes = [
        f"{join_names([one.name for one in group])} {why}"
        for why, group in groups.items()
        if group
    ]
    if view is None:
        notes.append(
            "latency, as nothing was timed: pass the result files of `compress "
            "bench` too"
        )
    if comparison.unmatched:
        names = join_names(comparison.unmatched)
        notes.append(f"measurements of files not given here: {names}")
    return notes


def shape(choice: Mapping[str, int | float | str]) -> str:
    """Describe the shape of a trial: `4 × 256, 8 heads, ffn 1024, int8`."""
    rest = dict(choice)
    depth = [str(rest.pop(name)) for name in ("layers", "hidden") if name in rest]
    if len(depth) == 1:
        depth = [f"{depth[0]} layers" if "layers" in choice else f"hidden {depth[0]}"]
    words = [" × ".join(depth)] if depth else []
    if "heads" in rest:
        words.append(f"{rest.pop('heads')} heads")
    precision = [str(rest.pop("precision"))] if "precision" in rest else []
    for name, value in rest.items():
        shown = f"{value:g}" if isinstance(value, float) else value
        words.append(f"{name.removeprefix('config.').replace('_', ' ')} {shown}")
    return ", ".join([*words, *precision]) or "as it is"


def short_shape(choice: Mapping[str, int | float | str]) -> str:
    """Abbreviate the shape of a trial: `4×256`."""
    if "layers" in choice and "hidden" in choice:
        return f"{choice['layers']}×{choice['hidden']}"
    return shape(choice).split(",")[0]


def show_command(found: SearchReport, number: int) -> tuple[str, str]:
    """Return the command that exports a trial's bundle: the words before its number,
    and after it."""
    return (
        f"compress search show {shlex.quote(found.study)} ",
        f" --bundle student-{number}",
    )


def cost_text(objective: ObjectiveName, value: float | None) -> str:
    """Format a cost with its unit: `3.41 ms`, `14.5 M`."""
    unit = COST_NAMES[objective][1]
    return units.measure(value, unit) if unit else units.magnitude(value)


def value_text(
    found: SearchReport,
    objective: ObjectiveName,
    value: float | None,
) -> str:
    """Format a value of an objective with its name: `latency 3.41 ms`, `accuracy
    0.901`."""
    if objective == "score":
        return f"{units.metric(found.metric)} {units.score(value)}"
    return f"{COST_NAMES[objective][0]} {cost_text(objective, value)}"


def budgets_text(found: SearchReport) -> str:
    """List all budgets: `at most 4.00 ms and accuracy at least 0.900`; '' if there are
    none."""
    texts = []
    for name, limit in found.budgets.items():
        if name == "score":
            metric = units.metric(found.metric)
            texts.append(f"{metric} at least {units.score(limit)}")
            continue
        cost, unit = COST_NAMES[name]
        named = "" if unit else f" {cost}"
        texts.append(f"at most {cost_text(name, limit)}{named}")
    return " and ".join(texts)


def answer(found: SearchReport) -> TrialRecord | None:
    """Choose the student that a search's page is about: the one that ships, or else the
    best within the budgets."""
    return found.best_within() if found.winner is None else found.point(found.winner)


def list_anchors(found: SearchReport) -> list[Anchor]:
    """List what to compare with: the teacher first, then the anchors."""
    teacher = Anchor(
        found.teacher,
        found.teacher_score,
        found.teacher_ms,
        found.teacher_parameters,
        found.teacher_mb,
    )
    return [teacher, *found.anchors]


def speed_of(found: SearchReport, point: TrialRecord | Anchor) -> float | None:
    """Compute the speed of a point relative to the teacher's, from measured times where
    available."""
    ms = point.ms if isinstance(point, Anchor) else found.ms(point)
    return found.teacher_ms / ms if found.teacher_ms and ms else None


def search_headline(found: SearchReport) -> str:
    """State the student found under the budgets, with its score and time compared to
    the teacher's."""
    point = answer(found)
    if point is None:
        return f"{capitalise(unmet(found))}."
    student = f"With {budgets_text(found)}, a student" if found.budgets else "A student"
    text = (
        f"{student} of {short_shape(point.choice)} reaches "
        f"{value_text(found, 'score', point.score)}"
    )
    if found.teacher_score is not None:
        text += f" against the teacher’s {units.score(found.teacher_score)}"
    if (ms := found.ms(point)) is not None:
        predicted = " as predicted" if found.measured_ms(point) is None else ""
        text += f" in {units.measure(ms, 'ms')}{predicted}"
    speed = speed_of(found, point)
    return text + (f": {units.times(speed)} the speed." if speed else ".")


def search_remarks(found: SearchReport) -> list[str]:
    """List the caveats of a search's headline."""
    point = answer(found)
    if point is None:
        return []
    doubts = [
        f"{value_text(found, name, found.value(point, name))} is over the budget"
        for name in found.exceeded(point)
    ]
    if point.stage == "subnet":
        doubts.append("its score is from before any training of its own")
    if found.measured_ms(point) is None and point.predicted_ms is not None:
        doubts.append("its latency is predicted, not measured")
    if found.teacher_score is None:
        doubts.append("no score of the teacher is on record")
    scored = sum(one.score is not None for one in found.points)
    lucky = (
        f"; the best of {scored:,} shapes was chosen on these same rows, so its score "
        "may be a little high"
    )
    remarks = [f"Not proved yet: {'; '.join(doubts)}."] if doubts else []
    return remarks + _remark_interval(
        found.metric, point.score, found.split_rows, lucky
    )


def unmet(found: SearchReport) -> str:
    """Say that no trial keeps the budgets, and which is nearest."""
    failed = [point for point in found.points if point.state == "failed"]
    near = replace(
        found,
        points=tuple(p for p in found.points if p.state != "failed"),
        front=(),
        winner=None,
    ).nearest()
    if near is None:
        return (
            f"trial {failed[0].number} failed: {failed[0].reason}"
            if failed
            else "no trial was completed"
        )
    over = [
        f"{value_text(found, name, found.value(near, name))}, asked for "
        + (
            units.score(found.budgets[name])
            if name == "score"
            else cost_text(name, found.budgets[name])
        )
        for name in found.exceeded(near)
    ]
    why = "; ".join(over) or near.reason
    return (
        f"no trial keeps the budgets; the nearest is trial {near.number} "
        f"({shape(near.choice)}): {why}"
    )
