"""The pictures of training: parts of the loss, and the student's score, over the steps of a stage."""

import math
from collections.abc import Sequence

from markupsafe import Markup

from compress.records.run_report import Point, Report, series
from compress.reporting import charts
from compress.reporting import format as units
from compress.reporting.charts import Axis, Box, grid, padded, titles

Line = list[tuple[float, float]]

COLOURS = 8
MOST_POINTS = 400
SMOOTHED_FROM = 60
# What a trainer logs beside the loss and its parts.
ASIDE = frozenset({"epoch", "grad_norm", "learning_rate", "total_flos", "num_input_tokens_seen"})


def losses(points: Sequence[Point], key: str, width: float, name: str) -> Markup:
    """Every part of the loss over the steps of a stage; log scale where the values span more than a factor of 20."""
    found = loss_lines(points)
    values = [value for line in found.values() for _, value in line]
    plot = Box(52, 14, width - 14, 246)
    x, y = _step_axis(found, plot), _value_axis(values, plot)
    marks = [*grid(x, y, plot), *titles(plot, "step", "")]
    thin: list[Markup] = []
    bold: list[Markup] = []
    for index, line in enumerate(found.values()):
        style, drawn = line_style(index, list(found)), thinned(line)
        even = smoothed(drawn)
        if even is not drawn:
            thin.append(charts.path([(x.at(step), y.at(value)) for step, value in drawn], f"raw {style}"))
        bold.append(charts.path([(x.at(step), y.at(value)) for step, value in even], f"curve {style}"))
    ends = ", ".join(f"{part} from {line[0][1]:.3g} to {line[-1][1]:.3g}" for part, line in found.items())
    return charts.canvas(key, (width, 290), (f"Loss in stage {name}", ends), [*marks, *thin, *bold])


def progress(report: Report, points: Sequence[Point], key: str, width: float) -> Markup:
    """The model's score and agreement over the steps of a stage; the teacher's score where it is of the same split."""
    found, teacher = score_lines(points, report.metric), teacher_line(report)
    values = [value for line in found.values() for _, value in line] + ([teacher] if teacher is not None else [])
    plot = Box(52, 14, width - 14, 246)
    x, y = _step_axis(found, plot), padded(min(values), max(values), plot)
    marks = [*grid(x, y, plot), *titles(plot, "step", "")]
    if teacher is not None:
        marks.append(charts.draw_line((plot.left, y.at(teacher)), (plot.right, y.at(teacher)), "reference"))
    marks += knotted(found, x, y)
    ends = ", ".join(f"{part} from {line[0][1]:.3f} to {line[-1][1]:.3f}" for part, line in found.items())
    return charts.canvas(key, (width, 290), (f"{units.metric(report.metric)} during training", ends), marks)


def knotted(lines: dict[str, Line], x: Axis, y: Axis) -> list[Markup]:
    """The lines, with a dot at each value where they are few."""
    marks = []
    for index, line in enumerate(lines.values()):
        style, at = line_style(index, list(lines)), [(x.at(step), y.at(value)) for step, value in thinned(line)]
        marks.append(charts.path(at, f"curve {style}"))
        marks += [charts.path([one], f"knot {style}") for one in at if len(at) <= 40]
    return marks


def teacher_line(report: Report) -> float | None:
    """The teacher's score where it can stand beside the curves, which are always of the validation split."""
    teacher = next(iter(report.of_role("teacher")), None)
    return report.score(teacher) if teacher and report.split == "validation" else None


def loss_lines(points: Sequence[Point]) -> dict[str, Line]:
    """The parts of the loss among the names of a curve, the total first, unless it is its one part over again."""
    found = {name: line for name, line in series(points) if name == "eval_loss" or _is_loss(name)}
    parts = [line for name, line in found.items() if name not in ("loss", "eval_loss")]
    if len(parts) == 1 and "loss" in found and _same(found["loss"], parts[0]):
        del found["loss"]
    return dict(sorted(found.items(), key=lambda item: item[0] != "loss"))


def score_lines(points: Sequence[Point], metric: str) -> dict[str, Line]:
    """The evaluation of the report's metric, and the agreement with the teacher."""
    found = dict(series(points))
    names = {f"eval_{metric}": units.metric(metric), "eval_agreement": "agreement"}
    return {shown: found[name] for name, shown in names.items() if name in found}


def legend(lines: dict[str, Line]) -> tuple[tuple[str, str, str], ...]:
    """(class of the line, name, value at its end as drawn)."""
    names = list(lines)
    ends = [smoothed(thinned(line))[-1][1] for line in lines.values()]
    return tuple((line_style(index, names), name, units.three_digits(ends[index])) for index, name in enumerate(names))


def reading(lines: dict[str, Line]) -> str:
    """How the picture of these losses is to be read, in words."""
    longest = max(len(line) for line in lines.values())
    said = []
    if longest >= SMOOTHED_FROM:
        said.append("Strong lines are running means, faint ones the values as logged.")
    if longest > MOST_POINTS:
        said.append(f"Of {longest:,} logged values, neighbours are averaged.")
    if _spans_decades([value for line in lines.values() for _, value in line]):
        said.append("The vertical scale is logarithmic.")
    return " ".join(said)


def line_style(index: int, names: Sequence[str]) -> str:
    """The class of a line's colour: ink for the total, else one of eight; dashed from the ninth on."""
    if names[index] == "loss":
        return "total"
    place = index - ("loss" in names)
    return f"s{place % COLOURS}" + (" dashed" if place >= COLOURS else "")


def thinned(line: Line) -> Line:
    """At most MOST_POINTS points: means over equal runs of neighbours."""
    run = -(-len(line) // MOST_POINTS)
    return [_mean(line[start : start + run]) for start in range(0, len(line), run)] if run > 1 else line


def smoothed(line: Line) -> Line:
    """The running mean over a twentieth of the line, centred; a line of few points is returned as it is."""
    if len(line) < SMOOTHED_FROM:
        return line
    half = max(1, len(line) // 40)
    values = [value for _, value in line]
    windows = [values[max(0, index - half) : index + half + 1] for index in range(len(line))]
    return [(step, sum(window) / len(window)) for (step, _), window in zip(line, windows, strict=True)]


def _is_loss(name: str) -> bool:
    return name not in ASIDE and not name.startswith(("eval_", "train_"))


def _same(one: Line, other: Line) -> bool:
    """Equal but for the rounding of a mean."""
    return len(one) == len(other) and all(
        a == b and math.isclose(x, y, rel_tol=1e-4) for (a, x), (b, y) in zip(one, other, strict=True)
    )


def _mean(points: Line) -> tuple[float, float]:
    return sum(step for step, _ in points) / len(points), sum(value for _, value in points) / len(points)


def _value_axis(values: Sequence[float], plot: Box) -> Axis:
    low, high = min(values), max(values)
    if _spans_decades(values):
        return Axis(low / 1.15, high * 1.15, plot.bottom, plot.top, log=True)
    if low >= 0:
        return Axis(0, (high or 1.0) * 1.06, plot.bottom, plot.top)
    return padded(low, high, plot)


def _spans_decades(values: Sequence[float]) -> bool:
    return 0 < 20 * min(values) < max(values)


def _step_axis(lines: dict[str, Line], plot: Box) -> Axis:
    steps = [step for line in lines.values() for step, _ in line]
    return Axis(min(0.0, *steps), max(*steps, 1.0), plot.left, plot.right)
