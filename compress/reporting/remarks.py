"""The result in words: computed from the rows, and as plain about a loss as about a gain."""

from dataclasses import dataclass

from compress.evaluation.statistics import wilson
from compress.records.certificate import Certificate
from compress.records.class_scores import ClassChange, changes, describe, fallen
from compress.records.run_report import Report, Row, finite
from compress.reporting import format as units

# More students than these are left to the table.
MOST_OTHERS = 3
MACRO = 0.05
"""By so much more than the score macro F1 may fall without a word."""
BARELY = 0.1
"""A teacher has learned little that makes less than this share of a baseline's errors good."""


@dataclass(frozen=True)
class Comparison:
    """A row against the teacher: each field the row's value over the teacher’s, None where one of them is missing.

    `speed` is the other way round, the teacher’s median latency over the row's, so that more is better.
    """

    score: float | None
    speed: float | None
    size: float | None
    parameters: float | None
    flops: float | None
    memory: float | None


def compare_rows(report: Report, row: Row) -> Comparison | None:
    """The row against the first teacher; None for the teacher itself, a baseline, or where no teacher was measured."""
    teacher = next(iter(report.of_role("teacher")), None)
    if teacher is None or row.role != "student":
        return None
    own, theirs = report.latency(row), report.latency(teacher)
    return Comparison(
        score=_ratio(report.score(row), report.score(teacher)),
        speed=_ratio(theirs["p50_ms"], own["p50_ms"]) if own and theirs else None,
        size=_ratio(row.file_mb, teacher.file_mb),
        parameters=_ratio(row.parameters, teacher.parameters),
        flops=_ratio(row.flops_per_token, teacher.flops_per_token),
        memory=_ratio(row.peak_rss_mb, teacher.peak_rss_mb),
    )


def shipped(report: Report) -> Row | None:
    """The row the headline speaks of: the last student."""
    return next(reversed(report.of_role("student")), None)


def headline(report: Report) -> str:
    """One sentence: what the shipped student keeps of the teacher, and what it costs beside it."""
    student = shipped(report)
    if student is None:
        return "No student was measured."
    return _sentence(report, student)


def remarks(report: Report) -> tuple[str, ...]:
    """Say what keeps the headline honest: other students, lost classes, baselines, noise, and the sample's size."""
    others = report.of_role("student")[:-1]
    said = [_sentence(report, row) for row in others] if len(others) <= MOST_OTHERS else []
    said += [_macro(report, row) for row in report.of_role("student")]
    said += [_beside_fp32(proof) for proof in report.certificates]
    said += [_unbeaten(report, row) for row in (*report.of_role("teacher"), shipped(report)) if row is not None]
    said += [_barely(report, row) for row in report.of_role("teacher")]
    if any((found := report.latency(row)) and found["noisy"] for row in report.rows):
        said.append("Some of the timing was disturbed: take the speeds as approximate.")
    said.append(_busy(report))
    said.append(_uncertainty(report))
    return tuple(sentence for sentence in said if sentence)


def warnings(report: Report) -> tuple[str, ...]:
    """Say which classes a student has lost, or where macro F1 falls far more than the score does."""
    said = [
        f"{capitalised(row.name)} finds {describe(hurt)}, beside the teacher."
        for row in report.of_role("student")
        if (hurt := fallen_classes(report, row))
    ]
    said += [_macro(report, row) for row in report.of_role("student")]
    said += [_beside_fp32(proof) for proof in report.certificates]
    return tuple(sentence for sentence in said if sentence)


def fallen_classes(report: Report, row: Row) -> tuple[ClassChange, ...]:
    """Choose the classes of which a student finds nothing, or far less than the first teacher."""
    teacher = next(iter(report.of_role("teacher")), None)
    return fallen(changes(teacher.classes, row.classes)) if teacher and row.role == "student" else ()


def capitalised(name: str) -> str:
    return name[:1].upper() + name[1:]


def _ratio(value: float | None, reference: float | None) -> float | None:
    value, reference = finite(value), finite(reference)
    if value is None or reference is None or reference <= 0 or value < 0:
        return None
    return value / reference


def _sentence(report: Report, row: Row) -> str:
    comparison, own = compare_rows(report, row), report.score(row)
    metric = units.metric(report.metric)
    if own is None:
        return f"{capitalised(row.name)} has no valid {metric}."
    if comparison is None:
        return f"{capitalised(row.name)} reaches {metric} {units.score(own)}; no teacher was measured beside it."
    gains, losses = _costs(comparison)
    if hurt := fallen_classes(report, row):
        losses.insert(0, f"finds {describe(hurt)}")
    sentence = f"{capitalised(row.name)} {_quality(report, own, comparison.score)}"
    sentence += f" at {' and '.join(gains)}" if gains else ""
    sentence += f", but {' and '.join(losses)}" if losses else ""
    return sentence + "."


def _quality(report: Report, own: float, kept: float | None) -> str:
    metric = units.metric(report.metric)
    theirs = report.score(report.of_role("teacher")[0])
    if theirs is None:
        return f"reaches {metric} {units.score(own)} (the teacher has no valid score)"
    if kept is None:
        return f"reaches {metric} {units.score(own)} against the teacher’s {units.score(theirs)}"
    if own == theirs:
        return f"matches the teacher’s {metric} ({units.score(own)})"
    if own > theirs:
        return f"exceeds the teacher’s {metric} ({units.score(own)} against {units.score(theirs)})"
    digits = 1 if kept < 0.9995 else 2
    return f"keeps {100 * kept:.{digits}f}{units.GAP}% of the teacher’s {metric}"


def _costs(comparison: Comparison) -> tuple[list[str], list[str]]:
    """Speed and size that are no worse than the teacher’s (5 % either way is the same), and those that are."""
    gains, losses = [], []
    if comparison.speed is not None:
        if comparison.speed > 1.05:
            gains.append(f"{units.times(comparison.speed)} the speed")
        elif comparison.speed >= 0.95:
            gains.append("the same speed")
        else:
            losses.append(f"takes {units.times(1 / comparison.speed)} as long")
    if comparison.size is not None:
        if comparison.size < 0.95:
            gains.append(f"{units.percent(comparison.size)} of the size")
        elif comparison.size <= 1.05:
            gains.append("the same size")
        else:
            losses.append(f"is {units.times(comparison.size)} as large")
    return gains, losses


def _unbeaten(report: Report, row: Row) -> str:
    own = report.score(row)
    scored = [(report.score(baseline), baseline.name) for baseline in report.of_role("baseline")]
    level = [(score, name) for score, name in scored if own is not None and score is not None and score >= own]
    if own is None or not level:
        return ""
    score, name = max(level)
    return (
        f"{capitalised(row.name)} is no better than the baseline {name} "
        f"({units.score(own)} against {units.score(score)})."
    )


def _macro(report: Report, row: Row) -> str:
    teacher = next(iter(report.of_role("teacher")), None)
    if teacher is None:
        return ""
    pairs = ((report.score(teacher), report.score(row)), (report.macro_f1(teacher), report.macro_f1(row)))
    (before, after), (macro_before, macro_after) = pairs
    if before is None or after is None or macro_before is None or macro_after is None:
        return ""
    if (macro_before - macro_after) - max(0.0, before - after) <= MACRO:
        return ""
    return (
        f"{capitalised(row.name)} loses on rare classes what {units.metric(report.metric)} does not show: macro F1 "
        f"falls from {units.score(macro_before)} to {units.score(macro_after)}."
    )


def _beside_fp32(proof: Certificate) -> str:
    hurt = fallen(proof.classes)
    return f"{proof.artefact} finds {describe(hurt)}, beside its fp32 file on {proof.split}." if hurt else ""


def _barely(report: Report, teacher: Row) -> str:
    own = report.score(teacher)
    best = max((score for row in report.of_role("baseline") if (score := report.score(row)) is not None), default=None)
    if own is None or best is None or report.metric == "mse" or not best < own < best + BARELY * (1 - best):
        return ""
    return (
        f"The teacher is barely above a baseline ({units.score(own)} against {units.score(best)}): there is little "
        "that a student can learn from it."
    )


def _busy(report: Report) -> str:
    told = {one["busy"] for row in report.rows for one in (row.latency or {}).values() if one.get("busy")}
    return f"The machine was not quiet while it was timed: {max(told)}. Alone it is faster." if told else ""


def _uncertainty(report: Report) -> str:
    student = shipped(report)
    return uncertainty(report.metric, report.score(student) if student else None, report.split_rows)


def uncertainty(metric: str, score: float | None, rows: int | None) -> str:
    """Say which interval the number of rows leaves around an accuracy; '' for another metric."""
    if metric != "accuracy" or not rows or rows < 1 or score is None or not 0 <= score <= 1:
        return ""
    low, high = wilson(score, rows)
    return (
        f"{rows:,} rows leave an accuracy of {units.score(score)} uncertain: "
        f"95{units.GAP}% interval {units.score(low)} to {units.score(high)}."
    )
