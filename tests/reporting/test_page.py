"""The page of a run: self-contained, escaped, one point per measured row, and whole whatever is missing."""

import math
import re
import shutil
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest

from benchmarks.chromium import NEEDED, open_tab
from compress.records.certificate import Sensitivity
from compress.records.latency import Setting
from compress.records.run_report import Report, ReportRow
from compress.reporting import charts
from compress.reporting.charts import Axis, Bar, label
from compress.reporting.html import render_run
from compress.reporting.remarks import run_headline
from compress.reporting.scatter import run_scatter
from tests.reporting.bundles import proved
from tests.reporting.pages import HOSTILE, Elements, boxes, check_escaped, check_whole
from tests.reporting.sample import ROWS, curve, latency, regression, report, with_classes


def points(page: str) -> int:
    return len(re.findall(r'class="point ', page))


def crowd(count: int) -> Report:
    """Students that all but coincide."""
    students = [
        ReportRow(f"student {n}", "student", {"accuracy": 0.88 + 0.001 * (n % 3)}, latency=latency(5 + 0.1 * n))
        for n in range(count)
    ]
    return report(rows=(*ROWS[:3], *students))


REPORTS = {
    "whole": report(),
    "classes": with_classes(report()),
    "regression": regression(),
    "no curves": report(curves={}, stage_seconds={}),
    "no latency": report(rows=tuple(replace(row, latency=None) for row in ROWS)),
    "scores only": report(rows=tuple(ReportRow(row.name, row.role, row.score) for row in ROWS), curves={}),
    "only a student": report(rows=ROWS[4:]),
    "no student": report(rows=ROWS[:3]),
    "no rows": report(rows=(), notes=(), versions={}, machine={}, seed=None, seconds=None),
    "nothing finite": report(
        rows=(
            ReportRow("teacher", "teacher", {"accuracy": math.nan}, math.nan, None, math.inf, math.nan, latency(1.0)),
        ),
        curves={"distill": [{"step": 1, "loss": math.nan}, {"step": 2, "loss": math.inf}]},
    ),
    "one point": report(curves={"distill": [{"step": 3, "loss": 0.5, "eval_accuracy": 0.7}]}),
    "flat": report(curves={"distill": [{"step": n, "loss": 0.0, "eval_accuracy": 0.5} for n in range(3)]}, rows=()),
    "negative": report(curves={"distill": [{"step": n, "loss": -1.0 * n} for n in range(3)]}),
    "crowd": crowd(12),
    "many parts": report(curves={"distill": [{"step": n, **{f"p{k}": k + n for k in range(12)}} for n in range(90)]}),
}


@pytest.mark.parametrize("name", REPORTS)
def test_any_report_makes_a_whole_page(name: str) -> None:
    page = render_run(REPORTS[name])
    check_whole(page)
    assert "<script" not in page


def test_hostile_text_stays_text() -> None:
    times = {HOSTILE: latency(3.0)["1 thread, batch 1, 128 tokens"]}
    rows = (*ROWS[:4], replace(ROWS[4], name=HOSTILE), replace(ROWS[4], name=HOSTILE + "2", latency=times))
    hostile = report(
        title=HOSTILE, recipe=HOSTILE, teacher=HOSTILE, data=HOSTILE, split=HOSTILE, command=HOSTILE, date=HOSTILE,
        noise=HOSTILE, rows=rows, notes=(HOSTILE,), versions={HOSTILE: HOSTILE}, machine={HOSTILE: HOSTILE},
        stage_seconds={HOSTILE: 3.0}, curves={HOSTILE: [{"step": 1, HOSTILE: 0.5, "eval_accuracy": 0.5}]},
    )  # fmt: skip
    check_escaped(render_run(hostile), 10)


def test_a_row_with_score_and_latency_is_a_point_in_both_widths() -> None:
    assert points(render_run(report())) == 2 * 3
    assert points(render_run(crowd(4))) == 2 * 5
    assert points(render_run(REPORTS["no latency"])) == 0
    without_score = replace(ROWS[4], score={"accuracy": None})
    assert points(render_run(report(rows=(*ROWS[:4], without_score)))) == 2 * 2


def test_bars_are_as_long_as_the_values() -> None:
    drawn = str(charts.draw_bars([Bar("a", 90.0, "teacher"), Bar("b", 22.5, "student")], "File size", "MB", "key", 360))
    assert re.findall(r'width="([\d.]+)" height="8.0" rx="2" class="bar', drawn) == ["360.0", "90.0"]


def test_a_baseline_is_a_line_or_named_off_the_scale() -> None:
    drawn = str(run_scatter(report()).draw("key", 690))
    assert drawn.count('class="reference"') == 1
    assert "bag of words 0.800" in drawn and "↓ majority 0.500, off this scale" in drawn


def test_a_better_and_faster_row_is_higher_and_further_left() -> None:
    rows = (ROWS[2], replace(ROWS[4], score={"accuracy": 0.95}))
    drawn = str(run_scatter(report(rows=rows)).draw("key", 690))
    teacher = re.search(r'<path d="M([\d.]+),([\d.]+) l7,7 [^>]*class="point teacher"', drawn)
    student = re.search(r'<circle cx="([\d.]+)" cy="([\d.]+)" r="6" class="point student"', drawn)
    assert teacher and student
    assert float(student[1]) < float(teacher[1]) and float(student[2]) < float(teacher[2])


@pytest.mark.parametrize("width", [342, 690])
@pytest.mark.parametrize("students", [1, 2, 3, 6, 9])
def test_names_in_the_picture_do_not_overlap(width: float, students: int) -> None:
    placed = boxes(str(run_scatter(crowd(students)).draw("key", width)))
    assert len(placed) == students + 1
    assert all(one.overlap(other) < 1 for one, other in combinations(placed, 2))
    assert all(box.left >= 0 and box.right <= width for box in placed)


def test_every_part_of_the_loss_is_drawn_and_named() -> None:
    page = render_run(report())
    for name in ("loss", "part.large", "part.small", "accuracy", "agreement"):
        assert re.search(rf"</svg>{re.escape(name)} <span", page)
    # two widths and a swatch for each of the three losses and the two scores
    assert len(re.findall(r'class="curve ', page)) == 5 * 3


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        (curve(10), ["loss", "part.large", "part.small"]),
        ([{"step": 1, "learning_rate": 1.0, "grad_norm": 2.0, "train_runtime": 3.0, "eval_f1": 0.1}], []),
        ([{"step": 1, "loss": 0.5, "hinton.soft_targets": 0.5000001}], ["hinton.soft_targets"]),  # the same twice
        ([{"step": 1, "loss": 0.5, "hinton.soft_targets": 1.0}], ["loss", "hinton.soft_targets"]),
    ],
)
def test_loss_lines_are_the_total_and_its_parts(points: list[dict[str, float]], expected: list[str]) -> None:
    assert list(charts.loss_lines(points)) == expected


def test_gaps_are_left_out_of_a_curve() -> None:
    lines = charts.loss_lines([{"step": 1, "loss": 1.0}, {"step": 2, "loss": None}, {"step": 3, "loss": 2.0}])
    assert lines == {"loss": [(1, 1.0), (3, 2.0)]}


def test_thinning_keeps_the_mean() -> None:
    line = [(float(step), step % 7 + 0.5) for step in range(5000)]
    thin = charts.thin_out(line)
    assert len(thin) <= charts.MOST_POINTS
    weights = [min(13, 5000 - 13 * index) for index in range(len(thin))]
    mean = sum(value * weight for (_, value), weight in zip(thin, weights, strict=True)) / 5000
    assert mean == pytest.approx(sum(value for _, value in line) / 5000)


def test_smoothing_is_a_centred_mean_and_leaves_short_lines() -> None:
    straight = [(float(step), 2.0 * step) for step in range(100)]
    middle = [value for _, value in charts.smooth_out(straight)[10:90]]
    assert middle == pytest.approx([value for _, value in straight[10:90]])
    assert charts.smooth_out(straight[:20]) == straight[:20]


@pytest.mark.parametrize(("losses", "log"), [((3.0, 0.01), True), ((1.0, 0.2), False), ((1.0, 0.0), False)])
def test_the_scale_is_logarithmic_only_where_values_span_decades(losses: tuple[float, ...], log: bool) -> None:
    curves = {"distill": [{"step": n, "loss": loss} for n, loss in enumerate(losses)]}
    (figure,) = charts.stage_figures(report(curves=curves), "distill", "0")
    assert ("logarithmic" in figure.caption) is log


@pytest.mark.parametrize("split", ["validation", "test"])
def test_the_teacher_is_drawn_beside_curves_of_its_own_split_only(split: str) -> None:
    _, scores = charts.stage_figures(report(split=split), "distill", "0")
    assert (scores.caption == "Dashed: the teacher.") is (split == "validation")


def test_tables_have_headers() -> None:
    elements = Elements(render_run(report())).found
    assert sum(tag == "th" and attrs.get("scope") == "row" for tag, attrs in elements) == 5 + 5 + 3
    assert sum(tag == "th" and attrs.get("scope") == "colgroup" for tag, attrs in elements) == 4
    assert sum(tag == "tr" and attrs.get("class") == "student" for tag, attrs in elements) == 2


@pytest.mark.parametrize(("low", "high"), [(0, 16.2), (0.8, 0.915), (0.89, 0.8902), (-2, 3), (0, 1e-6), (0, 123456)])
def test_ticks_are_few_and_their_labels_differ(low: float, high: float) -> None:
    ticks = Axis(low, high, 0, 100).ticks()
    assert 2 <= len(ticks) <= 8
    assert low <= ticks[0] and ticks[-1] <= high + 1e-12
    step = min(after - before for before, after in pairwise(ticks))
    written = [label(tick, step) for tick in ticks]
    assert len(set(written)) == len(ticks)


@pytest.mark.parametrize(("low", "high"), [(0.01, 5), (1e-6, 1e6), (0.11, 0.19), (3.0, 90.0)])
def test_logarithmic_ticks_are_few(low: float, high: float) -> None:
    axis = Axis(low, high, 0, 100, log=True)
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 8
    assert axis.at(math.sqrt(low * high)) == pytest.approx(50)


def test_a_page_has_one_title_a_table_of_contents_and_no_table_twice() -> None:
    page = render_run(proved())
    (title,) = re.findall(r"<h1[^>]*>(.*?)</h1>", page)
    assert title == run_headline(proved())
    contents = re.findall(r'<li><a href="#([^"]+)">([^<]+)</a></li>', page)
    assert contents == re.findall(r'<h2 id="([^"]+)">([^<]+)</h2>', page) and len(contents) > 5
    captions = re.findall(r"<caption>(.*?)</caption>", page)
    assert captions == ["Other scores", str(Setting(1, 1, 32))], (
        "the first setting and the metric are in the comparison"
    )


@pytest.mark.slow
@pytest.mark.skipif(not all(map(shutil.which, NEEDED)), reason=f"needs {' and '.join(NEEDED)}")
def test_no_table_is_cut(tmp_path: Path) -> None:
    layers = [f"layer {n}" for n in range(4)]
    parts = ("attention query", "attention key", "attention value", "attention output", "intermediate", "output")
    heat = tuple(
        Sensitivity(f"/{layer}/{part}", f"{layer} {part}", 0.1, -0.094, kept=False)
        for layer in layers
        for part in parts
    )
    (tmp_path / "page.html").write_text(render_run(proved(sensitivity=heat)), encoding="utf-8")
    with open_tab(tmp_path / "profile", (tmp_path / "page.html").as_uri()) as tab:
        for width in (390, 1280):
            tab.look(tmp_path / f"{width}.png", width=width, height=800)
            assert tab.see("document.documentElement.scrollWidth") <= width
            cut = "[...document.querySelectorAll('.scroll')].filter(each => each.scrollWidth > each.clientWidth)"
            assert tab.see(f"{cut}.map(each => each.getAttribute('aria-label'))") == [], width
