"""The page to choose a model by: what it shows is worked out here, the template only lays it out."""

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from compress.records.latency import Setting
from compress.reporting import cells, compare, compare_charts, evidence, training_charts
from compress.reporting import format as units
from compress.reporting.candidates import Place
from compress.reporting.charts import MAIN, SIDE, WHOLE, Figure, drawn
from compress.reporting.compare import Choice, Limits, Pick, View
from compress.reporting.compare_charts import Against
from compress.reporting.html import render

SCRIPT = (Path(__file__).parent / "templates" / "compare.js").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Point:
    """A candidate in a picture: its numbers, also in words. `front`: nothing is as good for less."""

    number: int
    name: str
    score: float
    cost: float
    shown_score: str
    shown_cost: str
    front: bool


@dataclass(frozen=True)
class Shown:
    """One picture of score against a cost, and the points on it, the cheapest first.

    key      unique on the page; device, setting: their places in the choice; of size, none
    limit    the cost that was asked for; missing: why there is no picture
    """

    key: str
    heading: str
    caption: str
    figure: Figure | None
    points: tuple[Point, ...]
    unit: str
    limit: float | None = None
    device: int | None = None
    setting: int | None = None
    missing: str = ""


def render_choice(choice: Choice, limits: Limits, chosen: Pick) -> str:
    """One self-contained page: no request leaves it, its one script is inside and named by its hash, text escaped."""
    settings, devices = _settings(choice), _devices(choice)
    return render(
        "compare.html.j2",
        title="Which model to ship",
        context=compare.where(choice),
        headline=compare.choice_headline(choice, limits, chosen),
        remarks=compare.choice_remarks(choice, chosen),
        key_figures=cells.choice_figures(choice, chosen),
        script=Markup(SCRIPT),  # ours, and named by its hash in the page's policy
        script_hash="sha256-" + base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode(),
        metric=units.metric(choice.task.metric),
        shown=_pictures(choice, limits, chosen),
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
            race
            for index, bundle in enumerate(choice.bundles)
            if bundle.report
            for race in evidence.races(bundle.report.tuning, f"race-{index}", bundle.name)
        ],
        heats=[
            (bundle.name, evidence.heat(bundle.report.sensitivity))
            for bundle in choice.bundles
            if bundle.report and bundle.report.sensitivity
        ],
        choice=choice,
    )


def _devices(choice: Choice) -> list[str]:
    return list(dict.fromkeys(view.place for view in choice.views()))


def _settings(choice: Choice) -> list[Setting]:
    return sorted({view.setting for view in choice.views()}, key=lambda at: (at.threads, at.batch, at.seq))


def _pictures(choice: Choice, limits: Limits, chosen: Pick) -> list[Shown]:
    """Against latency at every setting of every device, and against size."""
    measured, found = choice.views(), []
    for device, place in enumerate(_devices(choice)):
        for setting, view in enumerate(View(place, at) for at in _settings(choice)):
            at = {"device": device, "setting": setting}
            if view in measured:
                found.append(_picture(Against(choice, view, chosen.candidate), view.name, limits.budget_ms, **at))
            else:
                missing = f"Nothing was timed on {view.name}."
                found.append(Shown(f"at-{device}-{setting}", view.name, "", None, (), "ms", missing=missing, **at))
    return [*found, _picture(Against(choice, None, chosen.candidate), "File size", limits.max_mb)]


def _picture(
    against: Against, heading: str, limit: float | None, *, device: int | None = None, setting: int | None = None
) -> Shown:
    key = f"at-{device}-{setting}" if against.view else "at-size"
    front = against.front()
    placed = [(one, at) for one in against.choice.candidates if (at := against.placed(one))]
    points = tuple(
        Point(
            number=against.choice.number(one),
            name=one.name,
            score=score,
            cost=cost,
            shown_score=units.score(score),
            shown_cost=units.measure(cost, against.unit),
            front=one in front,
        )
        for one, (cost, score) in sorted(placed, key=lambda each: (each[1][0], -each[1][1]))
    )
    if not points:
        missing = f"{heading}: no candidate has both a score on the rows compared and this cost."
        return Shown(key, heading, "", None, (), against.unit, limit, device, setting, missing)
    pictures = drawn(lambda each, width: compare_charts.pareto(against, each, width), key, MAIN)
    name = f"{units.metric(against.choice.task.metric)} against {against.axis}"
    return Shown(key, heading, _caption(against), Figure(name, *pictures), points, against.unit, limit, device, setting)


def _caption(against: Against) -> str:
    said = [f"One forward on {against.view.name}." if against.view else "The ONNX file alone."]
    said.append("Up and left is better; the stairs join those that nothing beats for less.")
    if against.view and not against.crowded(narrow=False):
        said.append("Thin lines reach to the 95th percentile.")
    if against.crowded(narrow=True):
        said.append("Numbers are those of the table below.")
    if off := against.off():
        scores = ", ".join(f"{one.name} {units.score(against.choice.score(one))}" for one in off[:4])
        said.append(f"Below this scale: {scores}{f' and {len(off) - 4} more' if len(off) > 4 else ''}.")
    return " ".join(said)


def _sustained(place: Place, index: int) -> list[tuple[str, list[Figure]]]:
    """Of a device: medians by the minute, and temperatures where it shows any."""
    runs = {name: run for name, run in place.sustained if run.minutes}
    if not runs:
        return []
    times = {name: [(minute + 1.0, ms) for minute, ms in enumerate(run.minutes)] for name, run in runs.items()}
    warmth = {
        name: [(minute + 1.0, value) for minute, value in enumerate(run.temperatures) if value is not None]
        for name, run in runs.items()
    }
    warm = {name: line for name, line in warmth.items() if line}
    figures = [_load(times, f"load-{index}", MAIN if warm else WHOLE, ("Median latency", "ms"))]
    if warm:
        figures.append(_load(warm, f"warmth-{index}", SIDE, ("Temperature", "°C")))
    return [(place.name, figures)]


def _load(lines: dict[str, training_charts.Line], key: str, width: float, words: tuple[str, str]) -> Figure:
    pictures = drawn(lambda each, room: compare_charts.sustained(lines, each, room, words), key, width)
    ends = tuple((style, name, f"{value} {words[1]}") for style, name, value in training_charts.legend(lines))
    return Figure(f"{words[0]} by the minute", *pictures, legend=ends)
