"""Render the pages of a run, a comparison and a search: prepare what they show for the
templates."""

import base64
import hashlib
import re
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from compress.exporters.manifest import BUNDLE_FILES
from compress.records.certificate import Sensitivity, VariantResult
from compress.records.pretraining import Pretraining
from compress.records.run_report import Report, finite
from compress.records.search_report import (
    LatencyPrediction,
    ObjectiveName,
    SearchReport,
)
from compress.reporting import charts, remarks, tables
from compress.reporting import format as units
from compress.reporting.charts import (
    MAIN,
    WHOLE_COLUMN,
    Bar,
    Figure,
    bar_figure,
    draw_figure,
)
from compress.reporting.compare import Comparison, Limits, Pick, View
from compress.reporting.format import MISSING, capitalise
from compress.reporting.scaling import growth
from compress.reporting.scatter import (
    WITH_FACTS,
    Scatter,
    choice_scatter,
    run_scatter,
    trial_scatter,
)
from compress.reporting.tables import Cell, ResultTable
from compress.reporting.walk import path_figures, path_table, path_text

FOLDER = Path(__file__).parent / "templates"
HEAT_LEVELS = 8
FLOAT32_BYTES = 4
KEY_RANK = 3
"""Highest rank of the columns that are a page's key figures."""
CHART_AXES: tuple[ObjectiveName, ...] = ("latency", "file_mb", "parameters")


@cache
def _environment() -> Environment:
    """Return the templates of the pages, each compiled once."""
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["units"] = units
    environment.filters["headings"] = list_headings
    return environment


def list_headings(body: str) -> list[tuple[str, Markup]]:
    """List (identifier, words) of the sections of a page."""
    found = re.findall(r'<h2 id="([^"]+)">(.*?)</h2>', body)
    return [(key, Markup(words)) for key, words in found]


def render(template: str, script: str = "", **values: Any) -> str:
    """Render a template with these values, all text escaped, and one inline script,
    which the page's policy allows.

    A missing value raises, as it is a bug of this package.
    """
    code = (FOLDER / script).read_text(encoding="utf-8") if script else ""
    digest = (
        "sha256-" + base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        if code
        else ""
    )
    return (
        _environment()
        .get_template(template)
        .render(script=Markup(code), script_hash=digest, **values)
    )


def key_figures(table: ResultTable) -> list[tuple[str, str, str]]:
    """List (heading, value, comparison with the teacher) for the student's most
    important columns."""
    roles = [line.role for line in table.rows]
    if "student" not in roles:
        return []
    student = len(roles) - 1 - roles[::-1].index("student")
    figures = []
    for one in sorted(table.on_page, key=lambda one: one.rank):
        cell = one.cells[student]
        teacher = (
            one.cells[roles.index("teacher")] if "teacher" in roles else Cell(MISSING)
        )
        if one.rank > KEY_RANK or cell.missing:
            continue
        comparison = f"{cell.detail} of the teacher’s {teacher.text}"
        if not cell.detail.endswith("%"):
            notes = (cell.detail, "" if teacher.missing else f"teacher {teacher.text}")
            comparison = ", ".join(filter(None, notes))
        figures.append((one.alone or one.heading, cell.text, comparison))
    return figures


def heat_map(
    products: Sequence[Sensitivity],
) -> tuple[list[str], list[tuple[str, list[Cell | None]]]]:
    """Lay out the share of the error by layer and product, in the order of the graph:
    headings, and (name, cells).

    A cell's tone shows its strength, its detail is the tooltip; it is None if a layer
    has no such product. Products outside of layers have one cell, and come last.
    """
    strongest = max(
        (one.share for one in products if units.is_known(one.share)), default=0.0
    )
    rows: dict[str, dict[str, Cell]] = {}
    for one in products:
        strength = (
            one.share / strongest
            if strongest > 0 and units.is_known(one.share)
            else 0.0
        )
        hint = (
            f"{one.layer}: {units.share(one.share)} of the error; error alone "
            f"{units.small(one.error)}; {one.product}"
        )
        tone = (
            f"h{round(HEAT_LEVELS * max(0.0, strength))}{' kept' if one.kept else ''}"
        )
        match = re.fullmatch(r"(layer \d+),? (.+)", one.layer)
        name, part = match.groups() if match else (one.layer, "")
        rows.setdefault(name, {})[part] = Cell(units.share(one.share), hint, tone)
    headings = list(
        dict.fromkeys(part for row in rows.values() for part in row if part)
    )
    order = sorted(rows.items(), key=lambda item: "" in item[1])
    return headings, [
        (name, [row[""]] if "" in row else [row.get(part) for part in headings])
        for name, row in order
    ]


def render_run(report: Report) -> str:
    """Render the report of a run as one self-contained page: no script, no request, all
    text escaped."""
    scatter = run_scatter(report)
    table = tables.run_table(report)
    crowded = scatter is not None and len(scatter.points) > WITH_FACTS
    names = {file: f"student {precision}" for precision, file in BUNDLE_FILES.items()}
    times = [
        (row.name, time)
        for at in report.settings[1:]  # the first one is in the comparison
        for row in report.rows
        if (time := report.latency(row, at))
    ]
    figure = None
    heading = f"{capitalise(units.metric(report.metric))} against latency"
    medians = {
        row.name: time.p50_ms for row in report.rows if (time := report.latency(row))
    }
    measures = (
        ("File size", "MB", [row.file_mb for row in report.rows]),
        ("Median latency", "ms", [medians.get(row.name) for row in report.rows]),
        ("Peak memory", "MB", [row.peak_rss_mb for row in report.rows]),
    )
    bars = [
        bar_figure(
            [
                Bar(row.name, value, row.role)
                for row, value in zip(report.rows, values, strict=True)
                if value
            ],
            name,
            unit,
            f"bars-{index}",
        )
        for index, (name, unit, values) in enumerate(measures)
    ]
    stages = []
    for index, name in enumerate(
        dict.fromkeys([*report.curves, *report.stage_seconds])
    ):
        steps = [
            step
            for point in report.curves.get(name, ())
            if (step := finite(point.get("step"))) is not None
        ]
        facts = [f"{max(steps):,.0f} steps"] if steps else []
        if name in report.stage_seconds:
            facts.append(units.duration(report.stage_seconds[name]))
        stages.append(
            (name, ", ".join(facts), charts.stage_figures(report, name, str(index)))
        )
    if scatter:
        caption = (
            f"One forward: {report.settings[0]}. Left is faster, up is better; a thin "
            "line reaches to the 95th percentile. The vertical scale shows only the "
            "range of these scores."
        )
        figure = draw_figure(
            heading,
            scatter.draw,
            "trade-off",
            WHOLE_COLUMN if crowded else MAIN,
            caption=caption,
        )
    return render(
        "run.html.j2",
        title=report.title,
        context=report.date[:10],
        report=report,
        headline=remarks.run_headline(report),
        remarks=remarks.run_remarks(report),
        key_figures=key_figures(table),
        comparison=table,
        scores=tables.score_tables(report),
        times=tables.latency_tables(times),
        by_class=tables.class_table(report),
        trade_off=figure,
        bars=[figure for figure in bars if figure],
        # too many models for bars beside the picture: they go below it
        crowded=crowded,
        stages=stages,
        proofs=tables.certificate_table(
            [
                (names.get(one.artefact, one.artefact), one)
                for one in report.certificates
            ]
        ),
        races=_lay_out_races(report.tuning, "race"),
        path=report.path and (path_text(report.path), path_table(report.path)),
        steps=path_figures(report.path) if report.path else [],
        heats=[("", *heat_map(report.sensitivity))] if report.sensitivity else [],
    )


def render_pretraining(made: Pretraining) -> str:
    """Render what a pre-training has made as one self-contained page: no script, no
    request, all text escaped."""
    size = (
        f"{units.magnitude(made.parameters)} parameters, "
        f"{units.measure(FLOAT32_BYTES * made.parameters / 1e6, 'MB')} as float32"
    )
    scores = made.scores
    table = None if scores is None else tables.perplexity_table(scores)
    stages = [
        (
            one.name,
            one.about,
            charts.loss_figures(one.points, one.name, str(index), WHOLE_COLUMN),
        )
        for index, one in enumerate(made.stages)
    ]
    return render(
        "pretraining.html.j2",
        title=f"{made.recipe}: {made.text}",
        context=f"from {made.teacher}, {made.date[:10]}",
        headline=f"The checkpoint has {size}.",
        remarks=[],
        key_figures=[] if table is None else key_figures(table),
        made=made,
        perplexities=table,
        documents=0 if scores is None else len(scores.tokens),
        tokens=0 if scores is None else sum(scores.tokens),
        stages=stages,
    )


def _lay_out_races(
    variants: Sequence[VariantResult],
    key: str,
    bundle: str = "",
) -> list[tuple[str, Figure | None, ResultTable]]:
    """Lay out the race on each device: a heading, bars of the times, and a table. `key`
    is unique on the page."""
    races = []
    for index, device in enumerate(dict.fromkeys(one.device for one in variants)):
        group = [one for one in variants if one.device == device]
        settings = [setting for one in group for setting in one.ratio]
        # the setting that most variants ran at
        setting = max(dict.fromkeys(settings), key=settings.count, default="")
        bars = [
            Bar(
                one.variant,
                ratio,
                "student" if one.chosen else "other",
                f"{ratio:.2f}×{' noisy' * one.noisy}",
            )
            for one in group
            if units.is_known(ratio := one.ratio.get(setting))
        ]
        figure = bar_figure(
            bars,
            f"Time relative to the first variant: {setting}",
            "×",
            f"{key}-{index}",
            width=MAIN,
        )
        races.append(
            (
                ", ".join(filter(None, (bundle, device))),
                figure,
                tables.race_table(group),
            )
        )
    return races


def render_comparison(comparison: Comparison, limits: Limits, chosen: Pick) -> str:
    """Render one self-contained page to choose a model by: no request leaves it, all
    text escaped."""
    views = comparison.views()
    view = comparison.view
    table = tables.choice_table(comparison, chosen)
    settings = sorted(
        {one.setting for one in views}, key=lambda at: (at.threads, at.batch, at.seq)
    )
    devices = list(dict.fromkeys(one.device for one in views))
    proofs = [
        (one.name, proof) for one in comparison.candidates for proof in one.certificates
    ]
    reported = [
        (index, bundle.name, bundle.report)
        for index, bundle in enumerate(comparison.bundles)
        if bundle.report
    ]
    figures = [
        (device, charts.load_figures(device, str(index)))
        for index, device in enumerate(comparison.devices)
    ]
    return render(
        "compare.html.j2",
        "compare.js",
        title="Which model to ship",
        context=tables.where(comparison),
        headline=remarks.choice_headline(comparison, limits, chosen),
        remarks=remarks.choice_remarks(comparison, chosen),
        key_figures=key_figures(table),
        metric=units.metric(comparison.task.metric),
        shown=[
            _draw_candidates(
                comparison,
                limits,
                chosen,
                View(name, at),
                (device, setting),
            )
            for device, name in enumerate(devices)
            for setting, at in enumerate(settings)
        ]
        + [_draw_candidates(comparison, limits, chosen, None, (None, None))],
        devices=list(enumerate(devices)),
        settings=list(enumerate(units.drop_shared_parts([str(at) for at in settings]))),
        device=devices.index(view.device) if view else 0,
        setting=settings.index(view.setting) if view else 0,
        candidates=table,
        times=tables.device_tables(comparison),
        sustained=[(device.name, drawn) for device, drawn in figures if drawn],
        proofs=tables.certificate_table(proofs),
        races=[
            race
            for at, name, report in reported
            for race in _lay_out_races(report.tuning, f"race-{at}", name)
        ],
        heats=[
            (name, *heat_map(report.sensitivity))
            for _, name, report in reported
            if report.sensitivity
        ],
        choice=comparison,
    )


def _draw_candidates(
    comparison: Comparison,
    limits: Limits,
    chosen: Pick,
    view: View | None,
    at: tuple[int | None, int | None],
) -> dict[str, Any]:
    """Draw the candidates against latency at a view, or (None) against size.

    Returns the picture and its points, the cheapest first, or the reason why there is
    none; and its position in the controls.
    """
    unit, heading = ("ms", view.name) if view else ("MB", "File size")
    key = f"at-{at[0]}-{at[1]}" if view else "at-size"
    limit = limits.budget_ms if view else limits.max_mb
    bare = {
        "key": key,
        "heading": heading,
        "unit": unit,
        "limit": limit,
        "device": at[0],
        "setting": at[1],
    }
    scatter = choice_scatter(comparison, view, chosen.candidate)
    if scatter is None:
        timed = not view or view in comparison.views()
        why = (
            f"{heading}: no candidate has both a score on the rows compared and this "
            "cost."
        )
        return bare | {
            "figure": None,
            "missing": why if timed else f"Nothing was timed on {heading}.",
        }
    points = tuple(
        point
        for point in sorted(
            scatter.points, key=lambda point: (point.cost, -point.score)
        )
        if point.number
    )
    notes = [f"One forward on {view.name}." if view else "The ONNX file alone."]
    notes.append(
        "Up and left is better; the stairs join files that no cheaper file beats."
    )
    if view and not scatter.crowded(narrow=False):
        notes.append("Thin lines reach to the 95th percentile.")
    if scatter.crowded(narrow=True):
        notes.append("Numbers refer to the table below.")
    if off := [
        f"{point.what} {units.score(point.score)}"
        for point in scatter.points
        if point.score < scatter.lowest
    ]:
        notes.append(f"Below this scale: {units.join_names(off, 4)}.")
    figure = draw_figure(
        " against ".join(reversed(scatter.axes)),
        scatter.draw,
        key,
        MAIN,
        caption=" ".join(notes),
    )
    return bare | {"figure": figure, "points": points}


def render_search(report: SearchReport) -> str:
    """Render one self-contained page of a search: no request leaves it, all text
    escaped."""
    answer = remarks.answer(report) or report.nearest()
    front = set(report.front)
    table = tables.front_table(report)
    prediction = report.prediction
    views = [
        (cost, _draw_trials(report, cost, scatter))
        for cost in CHART_AXES
        if (scatter := trial_scatter(report, cost))
    ]
    importances = [
        bar_figure(
            [
                Bar(
                    name.removeprefix("config."),
                    100 * part,
                    "student",
                    units.share(part),
                )
                for name, part in sorted(one.shares.items(), key=lambda item: -item[1])
            ],
            capitalise(
                units.metric(report.metric)
                if one.target == "score"
                else remarks.COST_NAMES[one.target][0]
            ),
            "%",
            f"importance-{index}",
            caption=f"{one.evaluator} over {one.trials:,} complete trials.",
        )
        for index, one in enumerate(report.importances)
    ]
    spent = [
        Bar(name, time, "student", units.duration(time))
        for name, time in report.costs.items()
        if time >= 0
    ]
    costs = [
        _draw_progress(report),
        bar_figure(spent, "Where the time went", "%", "costs"),
    ]
    return render(
        "search.html.j2",
        "search.js",
        title=report.title,
        context=f"{len(report.points):,} trials; {report.teacher} on {report.data}; "
        f"{report.device}, {report.setting}; " + report.date[:10],
        headline=remarks.search_headline(report),
        remarks=remarks.search_remarks(report),
        key_figures=key_figures(table),
        found=report,
        metric=units.metric(report.metric),
        views=views,
        axes=[(cost, figure.heading) for cost, figure in views],
        chosen=tables.trial_row(report, answer, front) if answer else None,
        command=remarks.show_command(report, answer.number) if answer else ("", ""),
        headings=tables.TRIAL_HEADINGS,
        front=table,
        growth=growth(report),
        facts=tables.search_facts(report),
        rejected=tables.tabulate_rejected(report),
        trials=[tables.trial_row(report, one, front) for one in report.points],
        objectives=[
            report.metric if one == "score" else remarks.COST_NAMES[one][0]
            for one in report.objectives
        ],
        budgets=remarks.budgets_text(report),
        predictions=_draw_predictions(prediction) if prediction else [],
        importances=list(filter(None, importances)),
        costs=list(filter(None, costs)),
    )


def _draw_trials(report: SearchReport, cost: ObjectiveName, scatter: Scatter) -> Figure:
    """Draw the trials against a cost, and explain how to read the picture and what it
    leaves out."""
    stairs = (
        "; the stairs join trials that no cheaper one within the budget beats"
        if scatter.front
        else ""
    )
    notes = [f"Up and left is better{stairs}."]
    if cost == "latency":
        notes.append(f"{report.setting}; predicted unless measured.")
    if any(one.stage not in (None, "subnet") for one in report.points):
        notes.append(
            "Filled points were trained after the search; the line under each begins "
            "at its earlier score."
        )
    placed = [score for _, score in scatter.crowd] + [
        point.score for point in scatter.points if not point.square
    ]
    if below := sum(score < scatter.lowest for score in placed):
        notes.append(
            f"Below this scale: {below:,} {'trial' if below == 1 else 'trials'}."
        )
    if unplaced := sum(one.score is not None for one in report.points) - len(placed):
        notes.append(f"Scored, but with this cost unknown: {unplaced:,}.")
    return draw_figure(
        remarks.COST_NAMES[cost][0],
        scatter.draw,
        f"front-{cost}",
        MAIN,
        caption=" ".join(notes),
    )


def _draw_predictions(prediction: LatencyPrediction) -> list[Figure]:
    """Draw predicted against measured latency, and the mean error of the predictor and
    of FLOPs alone."""
    figures = []
    timings = prediction.timings
    if timings:
        notes = ["On the line, both are equal."]
        notes += ["Filled: shapes that were measured only after the search."] * any(
            one.finalist for one in timings
        )
        notes += ["Orange: predicted from FLOPs alone."] * any(
            one.flops_ms is not None for one in timings
        )
        if noisy := sum(one.noisy for one in timings):
            notes.append(f"Noisy measurements: {noisy} of {len(timings)}.")
        draw = partial(charts.draw_predictions, timings)
        # the heading is the section's
        figures.append(draw_figure("", draw, "timings", MAIN, caption=" ".join(notes)))
    errors = [
        ("this predictor", prediction.error, "student"),
        ("FLOPs alone", prediction.flops_error, "other"),
    ]
    bars = [
        Bar(name, 100 * error, style, units.share(error))
        for name, error, style in errors
        if units.is_known(error)
    ]
    accuracy = bar_figure(
        bars,
        "Mean error on unseen shapes",
        "%",
        "prediction-error",
    )
    return [*figures, accuracy] if accuracy else figures


def _draw_progress(report: SearchReport) -> Figure | None:
    """Draw the scores of the trials over time; return None if no trial has a score."""
    if all(one.first is None for one in report.points):
        return None
    caption = (
        "Line: the best within the budgets so far, before training. Dots at the foot: "
        "trials without a score."
    )
    draw = partial(charts.draw_progress, report)
    return draw_figure("Trials over time", draw, "progress", MAIN, caption=caption)
