"""The pages of a run, a choice and a search: what they show is worked out here, the templates only lay it out."""

import base64
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from compress.exporters.artifact import FILES
from compress.records.latency import Setting
from compress.records.run_report import Point, Report, finite
from compress.records.search_report import Objective, SearchReport
from compress.reporting import cells, charts, compare, evidence, pictures, remarks, search_tables
from compress.reporting import format as units
from compress.reporting import search_remarks as words
from compress.reporting.candidates import Place
from compress.reporting.charts import MAIN, SIDE, WHOLE, Bar, Figure, Line, draw_figure
from compress.reporting.compare import Choice, Limits, Pick, View
from compress.reporting.growth import growth
from compress.reporting.pictures import CROWD, CandidatePlot, TrialPlot
from compress.reporting.remarks import capitalised

FOLDER = Path(__file__).parent / "templates"
COSTS: tuple[Objective, ...] = ("latency", "file_mb", "parameters")


def render(template: str, script: str = "", **shown: Any) -> str:
    """Render a template with these values, all text escaped; its one script is inside, and named by its hash.

    A value that is lacking is an error of ours.
    """
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["groups"] = cells.groups
    code = (FOLDER / script).read_text(encoding="utf-8") if script else ""
    digest = "sha256-" + base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    return environment.get_template(template).render(
        script=Markup(code),  # ours, and named by its hash in the page's policy
        script_hash=digest if code else "",
        **shown,
    )


@dataclass(frozen=True)
class Stage:
    """One stage of the training: its name, facts in words, and its pictures."""

    name: str
    facts: str
    figures: tuple[Figure, ...]


def render_html(report: Report) -> str:
    """Render the report as one page of HTML: styles and pictures inside, no script, no request, all text escaped."""
    crowded = len(pictures.placeable(report)) > CROWD
    names = {file: f"student {precision}" for precision, file in FILES.items()}
    return render(
        "page.html.j2",
        title=report.title,
        context=f"{report.recipe} from {report.teacher} on {report.data}, {report.date[:10]}",
        report=report,
        headline=remarks.headline(report),
        remarks=remarks.remarks(report),
        key_figures=cells.key_figures(report),
        columns=cells.columns(report),
        small_tables=cells.small_tables(report),
        by_class=cells.by_class(report),
        trade_off=_trade_off(report, WHOLE if crowded else MAIN),
        bars=_bars(report),
        crowded=crowded,  # too many models for bars beside the picture: they go below it
        stages=[
            _stage(report, index, name)
            for index, name in enumerate(dict.fromkeys([*report.curves, *report.stage_seconds]))
        ],
        proofs=evidence.proofs([(names.get(one.artefact, one.artefact), one) for one in report.certificates]),
        races=evidence.races(report.tuning, "race"),
        heats=[("", evidence.heat(report.sensitivity))] if report.sensitivity else [],
        provenance=_provenance(report),
    )


def _trade_off(report: Report, width: float) -> Figure | None:
    if not pictures.placeable(report):
        return None
    caption = (
        f"One forward: {report.settings[0]}. Left is faster, up is better; a thin line reaches to the 95th percentile. "
        "The vertical scale shows only the range of these scores."
    )
    heading = f"{capitalised(units.metric(report.metric))} against latency"
    return draw_figure(heading, partial(pictures.trade_off, report), "trade-off", width, caption=caption)


def _bars(report: Report) -> list[Figure]:
    measures = (
        ("File size", "MB", [row.file_mb for row in report.rows]),
        ("Median latency", "ms", [cells.median(report.latency(row)) for row in report.rows]),
        ("Peak memory", "MB", [row.peak_rss_mb for row in report.rows]),
    )
    found = []
    for index, (name, unit, values) in enumerate(measures):
        known = zip(report.rows, map(finite, values), strict=True)
        items = [Bar(row.name, value, row.role) for row, value in known if value is not None]
        if items:
            found.append(draw_figure(name, partial(charts.bars, items, name, unit), f"bars-{index}", SIDE))
    return found


def _stage(report: Report, index: int, name: str) -> Stage:
    points: Sequence[Point] = report.curves.get(name, ())
    losses, scores = charts.loss_lines(points), charts.score_lines(points, report.metric)
    figures = []
    if losses:
        draw = partial(charts.line_chart, losses, f"Loss in stage {name}", ("step", ""), smooth=True)
        key, width, said = f"loss-{index}", MAIN if scores else WHOLE, charts.reading(losses)
        figures.append(draw_figure("Loss", draw, key, width, caption=said, legend=charts.legend(losses)))
    if scores:
        teacher = next(iter(report.of_role("teacher")), None)
        level = report.score(teacher) if teacher and report.split == "validation" else None  # as the curves are
        title = f"{units.metric(report.metric)} during training"
        draw = partial(charts.line_chart, scores, title, ("step", ""), tight=True, level=level)
        width, caption = SIDE if losses else WHOLE, "" if level is None else "Dashed: the teacher."
        legend = charts.legend(scores)
        figures.append(
            draw_figure("Score on validation", draw, f"score-{index}", width, caption=caption, legend=legend)
        )
    steps = max((step for line in (*losses.values(), *scores.values()) for step, _ in line), default=None)
    facts = [f"{steps:,.0f} steps"] if steps is not None else []
    if name in report.stage_seconds:
        facts.append(units.duration(report.stage_seconds[name]))
    return Stage(name, ", ".join(facts), tuple(figures))


def _provenance(report: Report) -> list[tuple[str, str]]:
    """Return (name, value) of all that a repetition needs to know, without the command."""
    task = f"{report.kind}, {report.labels} labels" if report.labels else report.kind
    return [
        ("Recipe", report.recipe),
        ("Teacher", report.teacher),
        ("Data", f"{report.data}; scored on {report.split}, {report.split_rows:,} rows"),
        ("Task", f"{task}, judged by {units.metric(report.metric)}"),
        ("Date", report.date),
        ("Seed", units.MISSING if report.seed is None else str(report.seed)),
        ("Duration", units.duration(report.seconds)),
        ("Timing", report.noise or "quiet: nothing disturbed the measurement" if report.settings else "not measured"),
    ]


@dataclass(frozen=True)
class Shown:
    """One picture of score against a cost, and its points, the cheapest first: (number, name, score, cost, both in
    words, on front).

    key      unique on the page; device, setting: their places in the choice; of size, none
    limit    the cost that was asked for; missing: why there is no picture
    """

    key: str
    heading: str
    figure: Figure | None
    points: tuple[dict[str, Any], ...]
    unit: str
    limit: float | None = None
    device: int | None = None
    setting: int | None = None
    missing: str = ""


def render_choice(choice: Choice, limits: Limits, chosen: Pick) -> str:
    """Render one self-contained page to choose a model by: no request leaves it, all text escaped."""
    views = choice.views()
    settings = sorted({view.setting for view in views}, key=lambda at: (at.threads, at.batch, at.seq))
    devices = list(dict.fromkeys(view.place for view in views))
    reported = [(index, bundle.name, bundle.report) for index, bundle in enumerate(choice.bundles) if bundle.report]
    return render(
        "compare.html.j2",
        "compare.js",
        title="Which model to ship",
        context=compare.where(choice),
        headline=compare.choice_headline(choice, limits, chosen),
        remarks=compare.choice_remarks(choice, chosen),
        key_figures=cells.choice_figures(choice, chosen),
        metric=units.metric(choice.task.metric),
        shown=_choice_pictures(choice, limits, chosen, devices, settings),
        devices=devices,
        settings=units.telling([str(at) for at in settings]),
        device=devices.index(choice.view.place) if choice.view else 0,
        setting=settings.index(choice.view.setting) if choice.view else 0,
        picked=choice.number(chosen.candidate) if chosen.candidate else None,
        sheet=cells.sheet(choice, chosen),
        times=cells.times(choice),
        sustained=[part for index, place in enumerate(choice.places) for part in _sustained(place, index)],
        proofs=evidence.proofs([(one.name, each) for one in choice.candidates for each in one.certificates]),
        races=[
            race for index, name, report in reported for race in evidence.races(report.tuning, f"race-{index}", name)
        ],
        heats=[(name, evidence.heat(report.sensitivity)) for _, name, report in reported if report.sensitivity],
        choice=choice,
    )


def _choice_pictures(
    choice: Choice, limits: Limits, chosen: Pick, devices: Sequence[str], settings: Sequence[Setting]
) -> list[Shown]:
    """Draw the candidates against latency at every setting of every device, and against size."""
    measured, found = choice.views(), []
    for device, place in enumerate(devices):
        for setting, view in enumerate(View(place, at) for at in settings):
            plot = CandidatePlot(choice, view, chosen.candidate) if view in measured else None
            found.append(_choice_picture(plot, view.name, limits.budget_ms, device, setting))
    return [*found, _choice_picture(CandidatePlot(choice, None, chosen.candidate), "File size", limits.max_mb)]


def _choice_picture(
    plot: CandidatePlot | None,
    heading: str,
    limit: float | None,
    device: int | None = None,
    setting: int | None = None,
) -> Shown:
    key = "at-size" if device is None else f"at-{device}-{setting}"
    if plot is None:
        missing = f"Nothing was timed on {heading}."
        return Shown(key, heading, None, (), "ms", device=device, setting=setting, missing=missing)
    candidates = [(one, at) for one, at in plot.placed if one.role != "teacher"]
    points = tuple(
        {
            "number": plot.choice.number(one),
            "name": one.name,
            "score": score,
            "cost": cost,
            "shown_score": units.score(score),
            "shown_cost": units.measure(cost, plot.unit),
            "front": one in plot.front,
        }
        for one, (cost, score) in sorted(candidates, key=lambda each: (each[1][0], -each[1][1]))
    )
    if not points:
        missing = f"{heading}: no candidate has both a score on the rows compared and this cost."
        return Shown(key, heading, None, (), plot.unit, limit, device, setting, missing)
    name = f"{units.metric(plot.choice.task.metric)} against {plot.axis}"
    figure = draw_figure(name, plot.draw, key, MAIN, caption=_choice_caption(plot))
    return Shown(key, heading, figure, points, plot.unit, limit, device, setting)


def _choice_caption(plot: CandidatePlot) -> str:
    said = [f"One forward on {plot.view.name}." if plot.view else "The ONNX file alone."]
    said.append("Up and left is better; the stairs join those that nothing beats for less.")
    if plot.view and not plot.crowded(narrow=False):
        said.append("Thin lines reach to the 95th percentile.")
    if plot.crowded(narrow=True):
        said.append("Numbers are those of the table below.")
    if off := [(one, score) for one, (_, score) in plot.placed if score < plot.lowest]:
        scores = ", ".join(f"{one.name} {units.score(score)}" for one, score in off[:4])
        said.append(f"Below this scale: {scores}{f' and {len(off) - 4} more' if len(off) > 4 else ''}.")
    return " ".join(said)


def _sustained(place: Place, index: int) -> list[tuple[str, list[Figure]]]:
    """Draw medians by the minute of a device, and temperatures where it shows any."""
    runs = {name: run for name, run in place.sustained if run.minutes}
    if not runs:
        return []
    times: dict[str, Line] = {name: [(at + 1.0, ms) for at, ms in enumerate(run.minutes)] for name, run in runs.items()}
    degrees: dict[str, Line] = {
        name: [(at + 1.0, value) for at, value in enumerate(run.temperatures) if value is not None]
        for name, run in runs.items()
    }
    warm = {name: line for name, line in degrees.items() if line}
    kinds = [("Median latency", "ms", f"load-{index}", times, MAIN if warm else WHOLE)]
    kinds += [("Temperature", "°C", f"warmth-{index}", warm, SIDE)] if warm else []
    figures = []
    for name, unit, key, lines, width in kinds:
        draw = partial(charts.line_chart, lines, name, ("minute", unit), tight=unit != "ms")
        legend = charts.legend(lines, f" {unit}")
        figures.append(draw_figure(f"{name} by the minute", draw, key, width, legend=legend))
    return [(place.name, figures)]


@dataclass(frozen=True)
class CostView:
    """The trials' scores against one cost."""

    cost: Objective
    name: str
    figure: Figure


def render_search(report: SearchReport) -> str:
    """Render one self-contained page of a search: no request leaves it, all text escaped."""
    answer = words.answer(report) or report.nearest()
    front = set(report.front)
    return render(
        "search.html.j2",
        "search.js",
        title=report.title,
        context=f"{len(report.points):,} trials; {report.teacher} on {report.data}; {report.device}, {report.setting}; "
        + report.date[:10],
        headline=words.headline(report),
        remarks=words.remarks(report),
        key_figures=words.key_figures(report),
        found=report,
        metric=units.metric(report.metric),
        views=_cost_views(report),
        chosen=search_tables.trial_row(report, answer, front) if answer else None,
        command=words.command(report, answer.number) if answer else ("", ""),
        headings=search_tables.HEADINGS,
        front=search_tables.front(report),
        accuracy=_accuracy(report),
        timings=_predictions(report),
        importances=_importances(report),
        growth=growth(report),
        progress=_trials_over_time(report),
        costs=_time_spent(report),
        facts=search_tables.facts(report),
        rejected=search_tables.rejected(report),
        trials=[search_tables.trial_row(report, one, front) for one in report.points],
        provenance=_search_provenance(report),
    )


def _cost_views(report: SearchReport) -> list[CostView]:
    """Draw the trials against each cost that any scored one has."""
    views = []
    for cost in COSTS:
        plot, name = TrialPlot(report, cost), words.OBJECTIVES[cost][0]
        if plot.placed:
            figure = draw_figure(name, plot.draw, f"front-{cost}", MAIN, caption=_trials_caption(plot))
            views.append(CostView(cost, name, figure))
    return views


def _trials_caption(plot: TrialPlot) -> str:
    report = plot.report
    stairs = "; the stairs join what nothing within the budget beats for less" if plot.front else ""
    said = [f"Up and left is better{stairs}."]
    if plot.cost == "latency":
        said.append(f"Of {report.setting}, measured where it was, else predicted.")
    if any(one.stage not in (None, "subnet") for one in report.points):
        said.append("Filled points were trained after the search; the line under each begins where it stood before.")
    if below := sum(score < plot.lowest for _, (_, score) in plot.placed):
        said.append(f"Below this scale: {below:,} {'trial' if below == 1 else 'trials'}.")
    if unplaced := sum(one.score is not None and plot.at(one) is None for one in report.points):
        said.append(f"Scored, but not known by this cost: {unplaced:,}.")
    return " ".join(said)


def _accuracy(report: SearchReport) -> Figure | None:
    """Draw how far predictions are off, beside those from FLOPs alone."""
    prediction = report.prediction
    if prediction is None or not units.known(prediction.error):
        return None
    pairs = (("this predictor", prediction.error, "student"), ("FLOPs alone", prediction.flops_error, "other"))
    bars = [Bar(name, 100 * error, style, units.share(error)) for name, error, style in pairs if units.known(error)]
    draw = partial(charts.bars, bars, "Mean error", "%")
    return draw_figure("Mean error on a shape it has not seen", draw, "prediction-error", SIDE)


def _predictions(report: SearchReport) -> Figure | None:
    if report.prediction is None or not report.prediction.timings:
        return None
    shown = report.prediction.timings
    said = ["On the line both are equal."]
    if any(one.finalist for one in shown):
        said.append("Filled: shapes that were measured only after the search.")
    if any(one.flops_ms is not None for one in shown):
        said.append("Orange: what FLOPs alone would have said.")
    if noisy := sum(one.noisy for one in shown):
        said.append(f"Disturbed while measured: {noisy} of {len(shown)}.")
    draw = partial(pictures.predictions, report)
    return draw_figure("Predicted against measured", draw, "timings", MAIN, caption=" ".join(said))


def _importances(report: SearchReport) -> list[Figure]:
    figures = []
    for index, one in enumerate(report.importances):
        ordered = sorted(one.shares.items(), key=lambda item: -item[1])
        bars = [Bar(name.removeprefix("config."), 100 * part, "student", units.share(part)) for name, part in ordered]
        name = units.metric(report.metric) if one.target == "score" else words.OBJECTIVES[one.target][0]
        if bars:
            draw = partial(charts.bars, bars, f"What decides {name}", "%")
            caption = f"{one.evaluator} over {one.trials:,} complete trials."
            figures.append(draw_figure(capitalised(name), draw, f"importance-{index}", SIDE, caption=caption))
    return figures


def _trials_over_time(report: SearchReport) -> Figure | None:
    if not any(one.first is not None for one in report.points):
        return None
    caption = "Line: the best within the budgets so far, before training. Dots at the foot: trials without a score."
    draw = partial(pictures.trials_over_time, report)
    return draw_figure("Trials over time", draw, "progress", MAIN, caption=caption)


def _time_spent(report: SearchReport) -> Figure | None:
    bars = [
        Bar(name, seconds, "student", units.duration(seconds))
        for name, seconds in report.costs.items()
        if math.isfinite(seconds) and seconds >= 0
    ]
    title = "Where the time went"
    return draw_figure(title, partial(charts.bars, bars, title, "%"), "costs", SIDE) if bars else None


def _search_provenance(report: SearchReport) -> list[tuple[str, str]]:
    scored = f"; scored on {report.split}, {report.split_rows:,} rows" if report.split and report.split_rows else ""
    objectives = ", ".join(report.metric if one == "score" else words.OBJECTIVES[one][0] for one in report.objectives)
    told = [
        ("Study", report.study),
        ("Teacher", report.teacher),
        ("Data", report.data + scored),
        ("Objectives", objectives),
        ("Budgets", words.budgets(report) or "none"),
        ("Sampler", report.sampler),
        ("Seed", "" if report.seed is None else str(report.seed)),
        ("Device", f"{report.device}, {report.setting}"),
        ("Latency by", report.prediction.about if report.prediction else ""),
        ("Date", report.date),
    ]
    return [(name, value) for name, value in told if value]
