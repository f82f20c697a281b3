"""The page: what it shows is worked out here, the template only lays it out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from compress.exporters.artifact import FILES
from compress.records.run_report import Report, Row, finite
from compress.reporting import cells, charts, evidence, remarks, training_charts
from compress.reporting import format as units
from compress.reporting.cells import groups
from compress.reporting.charts import MAIN, SIDE, WHOLE, Figure, drawn

FOLDER = Path(__file__).parent / "templates"


def render(template: str | Path, **shown: Any) -> str:
    """The template of this folder by its name, or of another by its path, with these values.

    One of another folder may extend and include those here. A value that is lacking is an error of ours.
    """
    path = FOLDER / template
    environment = Environment(
        loader=FileSystemLoader((path.parent, FOLDER)),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["groups"] = groups
    return environment.get_template(path.name).render(**shown)


@dataclass(frozen=True)
class Stage:
    """One stage of the training: its name, facts in words, and its pictures."""

    name: str
    facts: str
    figures: tuple[Figure, ...]


def render_html(report: Report) -> str:
    """The report as one page of HTML: styles and pictures inside, no script, no request, all text escaped."""
    return render(
        "page.html.j2",
        title=report.title,
        context=f"{report.recipe} from {report.teacher} on {report.data}, {report.date[:10]}",
        script_hash="",
        report=report,
        headline=remarks.headline(report),
        remarks=remarks.remarks(report),
        key_figures=cells.key_figures(report),
        columns=cells.columns(report),
        small_tables=cells.small_tables(report),
        by_class=cells.by_class(report),
        trade_off=_trade_off(report),
        bars=_bars(report),
        crowded=_crowded(report),
        stages=_stages(report),
        proofs=evidence.proofs([(_named(one.artefact), one) for one in report.certificates]),
        races=evidence.races(report.tuning, "race"),
        heats=[("", evidence.heat(report.sensitivity))] if report.sensitivity else [],
        provenance=_provenance(report),
    )


def _named(artefact: str) -> str:
    """A file as the rows call it: `student int8`."""
    return next((f"student {precision}" for precision, file in FILES.items() if file == artefact), artefact)


def _trade_off(report: Report) -> Figure | None:
    if not charts.placeable(report):
        return None
    room = WHOLE if _crowded(report) else MAIN
    wide, narrow = drawn(lambda key, width: charts.trade_off(report, key, width), "trade-off", room)
    caption = (
        f"One forward: {report.settings[0]}. Left is faster, up is better; a thin line reaches to the 95th percentile. "
        "The vertical scale shows only the range of these scores."
    )
    return Figure(f"{remarks.capitalised(units.metric(report.metric))} against latency", wide, narrow, caption)


def _crowded(report: Report) -> bool:
    """Too many models for bars beside the picture: they go below it."""
    return len(charts.placeable(report)) > charts.CROWD


def _bars(report: Report) -> list[Figure]:
    measures: Sequence[tuple[str, str, Callable[[Row], float | None]]] = (
        ("File size", "MB", lambda row: row.file_mb),
        ("Median latency", "ms", lambda row: cells.median(report.latency(row))),
        ("Peak memory", "MB", lambda row: row.peak_rss_mb),
    )
    found = []
    for index, (name, unit, value) in enumerate(measures):
        items = [
            charts.Bar(row.name, number, row.role) for row in report.rows if (number := finite(value(row))) is not None
        ]
        if items:
            found.append(Figure(name, *drawn(_bar_drawing(items, name, unit), f"bars-{index}", SIDE)))
    return found


def _bar_drawing(items: list[charts.Bar], name: str, unit: str) -> Callable[[str, float], Markup]:
    return lambda key, width: charts.bars(items, key, width, (name, unit))


def _stages(report: Report) -> list[Stage]:
    names = dict.fromkeys([*report.curves, *report.stage_seconds])
    return [_stage(report, index, name) for index, name in enumerate(names)]


def _stage(report: Report, index: int, name: str) -> Stage:
    points = report.curves.get(name, ())
    losses, scores = training_charts.loss_lines(points), training_charts.score_lines(points, report.metric)
    figures = []
    if losses:
        pictures = drawn(
            lambda key, width: training_charts.losses(points, key, width, name),
            f"loss-{index}",
            MAIN if scores else WHOLE,
        )
        figures.append(Figure("Loss", *pictures, training_charts.reading(losses), training_charts.legend(losses)))
    if scores:
        pictures = drawn(
            lambda key, width: training_charts.progress(report, points, key, width),
            f"score-{index}",
            SIDE if losses else WHOLE,
        )
        dashed = "Dashed: the teacher." if training_charts.teacher_line(report) is not None else ""
        figures.append(Figure("Score on validation", *pictures, dashed, training_charts.legend(scores)))
    steps = max((step for line in (*losses.values(), *scores.values()) for step, _ in line), default=None)
    facts = [f"{steps:,.0f} steps"] if steps is not None else []
    if name in report.stage_seconds:
        facts.append(units.duration(report.stage_seconds[name]))
    return Stage(name, ", ".join(facts), tuple(figures))


def _provenance(report: Report) -> list[tuple[str, str]]:
    """(name, value) of all that a repetition needs to know, without the command."""
    task = f"{report.kind}, {report.labels} labels" if report.labels else report.kind
    found = [
        ("Recipe", report.recipe),
        ("Teacher", report.teacher),
        ("Data", f"{report.data}; scored on {report.split}, {report.split_rows:,} rows"),
        ("Task", f"{task}, judged by {units.metric(report.metric)}"),
        ("Date", report.date),
        ("Seed", units.MISSING if report.seed is None else str(report.seed)),
        ("Duration", units.duration(report.seconds)),
        ("Timing", report.noise or "quiet: nothing disturbed the measurement" if report.settings else "not measured"),
    ]
    return found
