"""What the page of a search says: shapes, the answer, what keeps it honest, and what became of the trials."""

import re
import shlex
from collections.abc import Mapping

from compress.records.search_report import STAGES, Anchor, Objective, SearchReport, TrialRecord
from compress.reporting import format as units
from compress.reporting.remarks import capitalised, uncertainty

OBJECTIVES: Mapping[Objective, tuple[str, str]] = {
    "latency": ("latency", "ms"),
    "file_mb": ("file size", "MB"),
    "parameters": ("parameters", ""),
    "flops_per_token": ("FLOPs / token", ""),
}
"""A cost's name, and its unit."""
MOST_REASONS = 8


def shape(choice: Mapping[str, int | float | str]) -> str:
    """A choice as a reader takes it in: `4 × 256, 8 heads, ffn 1024, int8`."""
    rest = dict(choice)
    depth = [str(rest.pop(name)) for name in ("layers", "hidden") if name in rest]
    if len(depth) == 1:
        depth = [f"{depth[0]} layers" if "layers" in choice else f"hidden {depth[0]}"]
    words = [" × ".join(depth)] if depth else []
    if "heads" in rest:
        words.append(f"{rest.pop('heads')} heads")
    precision = [str(rest.pop("precision"))] if "precision" in rest else []
    words += [f"{name.removeprefix('config.').replace('_', ' ')} {_value(value)}" for name, value in rest.items()]
    return ", ".join([*words, *precision]) or "as it is"


def short(choice: Mapping[str, int | float | str]) -> str:
    """The same where there is room for a few letters: `4×256`."""
    if "layers" in choice and "hidden" in choice:
        return f"{choice['layers']}×{choice['hidden']}"
    return shape(choice).split(",")[0]


def named(choice: Mapping[str, int | float | str]) -> str:
    """The same within a sentence: `4 layers × 384`."""
    if "layers" in choice and "hidden" in choice:
        return f"{choice['layers']} layer{'' if choice['layers'] == 1 else 's'} × {choice['hidden']}".replace(
            " ", units.GAP
        )
    return shape(choice)


def command(found: SearchReport, number: int) -> tuple[str, str]:
    """What gets a trial's bundle: the words before the number, and after it."""
    return f"compress search show {shlex.quote(found.study)} ", f" --bundle student-{number}"


def cost(objective: Objective, value: float | None) -> str:
    """A cost with its unit: `3.41 ms`, `14.5 M`."""
    unit = OBJECTIVES[objective][1]
    return units.measure(value, unit) if unit else units.magnitude(value)


def budgets(found: SearchReport) -> str:
    """All budgets in words, or ''."""
    least = found.budgets.get("score")
    told = [] if least is None else [f"{units.metric(found.metric)} at least {units.score(least)}"]
    return " and ".join([*(f"at most {limit}" for limit in _limits(found)), *told])


def answer(found: SearchReport) -> TrialRecord | None:
    """What the page speaks of: the student that ships, or else the best within the budgets."""
    return found.best_within() if found.winner is None else found.point(found.winner)


def headline(found: SearchReport) -> str:
    """One sentence: which student under which budget, its score and its time beside the teacher's."""
    point, within = answer(found), budgets(found)
    if point is None:
        return _nothing(found, within)
    sentence = f"{capitalised(_within(found))}, a student" if within else "A student"
    sentence += f" of {named(point.choice)} reaches {_quality(found, point)}"
    ms = found.ms(point)
    if ms is None:
        return sentence + "."
    sentence += f" in {units.measure(ms, 'ms')}"
    sentence += " as predicted" if found.measured_ms(point) is None else ""
    speed = faster(found, point)
    return sentence + (f": {units.times(speed)} the speed." if speed else ".")


def remarks(found: SearchReport) -> list[str]:
    """What keeps the headline honest."""
    point = answer(found)
    if point is None:
        return []
    said: list[str] = []
    if over := found.exceeded(point):
        names = " and ".join(OBJECTIVES[name][0] if name != "score" else found.metric for name in over)
        said.append(f"What ships is not within the budget: {names} is over it, or not known.")
    if point.stage == "subnet":
        said.append("Its score is from before any training of its own.")
    if found.measured_ms(point) is None and point.predicted_ms is not None:
        said.append("Its latency is predicted, not measured.")
    if found.teacher_score is None:
        said.append("No score of the teacher is on record.")
    return [*said, *_uncertainty(found, point)]


def key_figures(found: SearchReport) -> list[tuple[str, str, str]]:
    """(what, value, in smaller letters) of the answer beside the teacher, as far as known."""
    point = answer(found)
    if point is None:
        return []
    teacher = f"teacher {units.score(found.teacher_score)}" if found.teacher_score is not None else found.metric
    told = [(units.metric(found.metric), units.score(point.score), teacher)]
    if (ms := found.ms(point)) is not None:
        how = "measured" if found.measured_ms(point) is not None else f"predicted ± {_error(point)}"
        told.append(("latency", units.measure(ms, "ms"), how))
    if (speed := faster(found, point)) is not None:
        told.append(("speed", units.times(speed), f"teacher {units.measure(found.teacher_ms, 'ms')}"))
    if point.file_mb is not None:
        of = f"{units.percent(point.file_mb / found.teacher_mb)} of the teacher’s" if found.teacher_mb else "file"
        told.append(("size", units.measure(point.file_mb, "MB"), of))
    return told


def known(found: SearchReport) -> list[Anchor]:
    """What to compare with: the teacher first, then the anchors."""
    teacher = Anchor(found.teacher, found.teacher_score, found.teacher_ms, found.teacher_parameters, found.teacher_mb)
    return [teacher, *found.anchors]


def faster(found: SearchReport, point: TrialRecord) -> float | None:
    """How many times the teacher's speed: of measured times where there are any."""
    ms = found.ms(point)
    return found.teacher_ms / ms if found.teacher_ms and ms else None


def predicted(point: TrialRecord) -> str:
    """`3.41 ± 0.10`, in ms."""
    if point.predicted_ms is None:
        return units.MISSING
    error = f" ± {_error(point)}" if point.predicted_error_ms else ""
    return f"{units.three_digits(point.predicted_ms)}{error}"


def scores(point: TrialRecord) -> str:
    """The scores on the way: `0.861 → 0.882`."""
    known = [point.scores.get(stage) for stage in STAGES]
    told = [units.score(value) for value in known if units.known(value)]
    return " → ".join(told) or units.MISSING


def rejected(found: SearchReport) -> list[tuple[str, tuple[str, ...]]]:
    """(what became of trials, (how many, why in most of them)): the reasons with other numbers are one reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for point in found.points:
        if point.state != "complete":
            groups.setdefault((point.state, re.sub(r"\d+(\.\d+)?", "#", point.reason)), []).append(point.reason)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    told: list[tuple[str, tuple[str, ...]]] = [
        (state, (f"{len(reasons):,}", reasons[0] or units.MISSING)) for (state, _), reasons in ordered
    ]
    if more := sum(len(reasons) for _, reasons in ordered[MOST_REASONS:]):
        told[MOST_REASONS:] = [("other", (f"{more:,}", f"{len(ordered) - MOST_REASONS} reasons more"))]
    return told


def _limits(found: SearchReport) -> list[str]:
    """`4.00 ms`, `14.0 M parameters`."""
    limits = [(name, limit) for name, limit in found.budgets.items() if name != "score"]
    return [cost(name, limit) + ("" if OBJECTIVES[name][1] else f" {OBJECTIVES[name][0]}") for name, limit in limits]


def _within(found: SearchReport) -> str:
    """The budgets at the head of a sentence."""
    least = found.budgets.get("score")
    told = f"with {units.metric(found.metric)} at least {units.score(least)}" if least is not None else ""
    limits = " and ".join(_limits(found))
    return ", ".join(filter(None, (f"within {limits}" if limits else "", told)))


def _nothing(found: SearchReport, within: str) -> str:
    nearest = found.nearest() if found.budgets else None
    if nearest is None:
        return "No shape was scored." if not within else f"No shape was found with {within}."
    over = [
        f"{OBJECTIVES[name][0]} {cost(name, found.value(nearest, name))}"
        if name != "score"
        else f"{units.metric(found.metric)} {units.score(nearest.score)}"
        for name in found.exceeded(nearest)
    ]
    closest = f"{shape(nearest.choice)} with {' and '.join(over)}" if over else shape(nearest.choice)
    return f"No shape was found with {within}; the closest is {closest}."


def _quality(found: SearchReport, point: TrialRecord) -> str:
    metric = units.metric(found.metric)
    told = f"{metric} {units.score(point.score)}"
    return told if found.teacher_score is None else f"{told} against the teacher’s {units.score(found.teacher_score)}"


def _uncertainty(found: SearchReport, point: TrialRecord) -> list[str]:
    """What the number of rows, and choosing by them, leave unsure."""
    interval = uncertainty(found.metric, point.score, found.split_rows)
    scored = sum(one.score is not None for one in found.points)
    lucky = f"The best of {scored:,} shapes was chosen by these same rows, so it may be a little lucky."
    return [f"{interval} {lucky}"] if interval else []


def _error(point: TrialRecord) -> str:
    """The predictor's deviation with as many decimals as the prediction shows."""
    assert point.predicted_ms is not None
    decimals = len(units.three_digits(point.predicted_ms).partition(".")[2])
    return f"{point.predicted_error_ms or 0.0:.{decimals}f}"


def _value(value: int | float | str) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
