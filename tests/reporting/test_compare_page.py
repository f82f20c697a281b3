"""The comparison page: self-contained, escaped, one script that its policy names, and whole whatever is missing."""

import math
import re
import shutil
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from compress.reporting import format as units
from compress.reporting.compare import Comparison, Limits, compare, pick
from compress.reporting.html import heat_map, render_comparison, render_run
from compress.reporting.scatter import choice_scatter
from tests.reporting.bundles import bench, bundle, certificate, proved, student
from tests.reporting.pages import HOSTILE, boxes, check_escaped, check_whole, headings, in_browser, stairs, text
from tests.reporting.sample import ROWS, report

LOAD = {"setting": {"threads": 1, "batch": 1, "seq": 128}, "minutes": [3.0, 3.5, 4.0]}


FREE = Limits()


def page(comparison: Comparison, limits: Limits = FREE) -> str:
    return render_comparison(comparison, limits, pick(comparison, limits))


def sustained(temperatures: list[float | None]) -> list[dict[str, Any]]:
    return [{"name": "whole:int8", **LOAD, "temperatures": temperatures}]


@pytest.fixture(scope="module")
def comparisons(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Comparison]:
    folder = tmp_path_factory.mktemp("comparisons")

    def one(name: str, *args: Any, **options: Any) -> Comparison:
        return compare([bundle(folder / name, *args, **options)])

    runs = [bundle(folder / "whole", proved())]
    hot, cold = sustained([30.0, 35.0, 40.0]), sustained([None] * 3)
    results = [
        bench(folder / "local.json", {"whole:int8": 3.0, "whole:fp32": 6.0}, runs=runs),
        bench(folder / "browser.json", {"whole:int8": 9.0}, runs=runs, device="browser", sustained=hot),
        bench(folder / "cold.json", {}, runs=runs, device="ssh:pi", sustained=cold),
    ]
    nothing = report(rows=(), curves={}, versions={}, machine={}, data="", split="", split_rows=0)
    undefined = replace(ROWS[4], score={"accuracy": math.nan}, file_mb=math.inf)
    untimed = tuple(replace(row, latency=None) for row in ROWS)
    thirty = [bundle(folder / f"n{n}", student(0.88 + 0.001 * (n % 4), 3 + 0.2 * n)) for n in range(15)]
    return {
        "whole": compare([*runs, *results]),
        "no report": one("bare", None),
        "nothing measured": one("nothing", nothing),
        "nothing finite": one("unreal", report(rows=(ROWS[2], undefined))),
        "no candidates": one("empty", report(), sizes={}),
        "one candidate": one("one", student(0.9, 3.0), sizes={"int8": 14.0}),
        "no latency": one("untimed", report(rows=untimed)),
        "six": compare(thirty[:3]),
        "thirty": compare(thirty),
        "all equal": compare([bundle(folder / f"e{n}", student(0.5, 1.0)) for n in range(3)]),
    }


@pytest.fixture(scope="module")
def pages(comparisons: dict[str, Comparison]) -> dict[str, str]:
    return {name: page(comparison) for name, comparison in comparisons.items()}


def test_any_comparison_makes_a_whole_page(pages: dict[str, str]) -> None:
    for content in pages.values():
        check_whole(content)
        assert content.count("<script>") == 1


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    odd = "<script>alert(1)<b>\"'&{{ 7*7 }}" + "y" * 120  # a folder's name has no slash
    whole = proved(
        title=HOSTILE, recipe=HOSTILE, teacher=HOSTILE, data=HOSTILE, split=HOSTILE, command=HOSTILE, date=HOSTILE,
        versions={HOSTILE: HOSTILE}, machine={HOSTILE: HOSTILE, "cpu": HOSTILE},
    )  # fmt: skip
    proof = certificate(
        0.88, certified=False, method=HOSTILE, reason=HOSTILE, split=HOSTILE, data=HOSTILE, device=HOSTILE,
        runtime=HOSTILE, kept=(HOSTILE,),
    )  # fmt: skip
    hostile = replace(
        whole, certificates=(proof,),
        rows=(replace(ROWS[0], name=HOSTILE), replace(ROWS[2], name=HOSTILE), *whole.rows[3:]),
        tuning=tuple(replace(one, variant=HOSTILE, reason=HOSTILE, fused={HOSTILE: 1}) for one in whole.tuning),
        sensitivity=tuple(
            replace(one, layer=HOSTILE + str(n), product=HOSTILE) for n, one in enumerate(whole.sensitivity)
        ),
    )  # fmt: skip
    run = bundle(tmp_path / odd, hostile)
    facts = {"device": HOSTILE, "machine": {HOSTILE: HOSTILE, "cpu": HOSTILE}, "command": HOSTILE, "date": HOSTILE}
    runs = [{"name": f"{odd}:int8", **LOAD, "temperatures": [None] * 3}]
    times = {f"{odd}:int8": 3.0, HOSTILE: 1.0}
    result = bench(tmp_path / "b.json", times, runs=[run], sustained=runs, **facts)
    for at in (None, HOSTILE):
        check_escaped(page(compare([run, result], at=at)), 20)
    check_escaped(render_run(hostile), 10)


def test_every_candidate_is_a_point_in_both_widths_and_a_row(pages: dict[str, str]) -> None:
    rows = re.findall(r'<tr class="\w+" role="row" data-n="(\d+)">', pages["thirty"])
    assert rows == [str(n) for n in range(1, 31)]
    views = pages["thirty"].split('<div class="view ')[1:]
    assert len(views) == 3, "two settings and the size"
    for view in views:
        assert len(re.findall(r'class="point student', view)) == 2 * 30
        assert len(re.findall(r"<li data-n=", view)) == 30


def test_a_section_without_content_has_no_heading(pages: dict[str, str]) -> None:
    optional = {
        "Certificates", "Race of the variants", "Sensitivity by layer", "Without pause", "Latency on every device",
        "Accuracy against cost",
    }  # fmt: skip
    shown = {name: headings(content) & optional for name, content in pages.items()}
    assert shown["whole"] == optional
    assert shown["no report"] == shown["nothing measured"] == set()
    assert shown["thirty"] == {"Latency on every device", "Accuracy against cost"}
    assert shown["no latency"] == {"Accuracy against cost"}
    assert "All candidates" in headings(pages["no report"])
    assert "All candidates" not in headings(pages["no candidates"])


def test_without_a_script_a_table_lists_the_best_within_each_budget(tmp_path: Path) -> None:
    paths = [bundle(tmp_path / name, student(score, p50)) for name, score, p50 in (("a", 0.9, 6.0), ("b", 0.88, 2.0))]
    content = page(compare(paths))
    (view,) = (part for part in content.split('<div class="view ')[1:] if "128 tokens</h3>" in part)
    rungs = re.findall(r"<tr data-n[^>]*><td>([^<]+)</td><th scope=\"row\">([^<]+)</th><td>([^<]+)</td></tr>", view)
    assert [(cost.replace(units.GAP, " "), *rung) for cost, *rung in rungs] == [
        ("2.00 ms", "b int8", "0.880"), ("4.00 ms", "b fp32", "0.890"), ("6.00 ms", "a int8", "0.900"),
        ("12.0 ms", "a fp32", "0.910"),
    ]  # fmt: skip


def test_the_page_has_the_figures_of_the_pick_and_of_every_proof(comparisons: dict[str, Comparison]) -> None:
    shown = text(page(comparisons["whole"], Limits(max_mb=0.02)))
    for words in (
        "Within 0.02 MB, whole int8 scores best: accuracy 0.880 at 3.00 ms and 0.0144 MB.",
        "certified yes the drop is within 0.005",
        "static int8", "onnxruntime 1.31.1", "98.0 %", "0.0200",
        "merged, int8 chosen", "bad, int8 failed logits differ by 9", "0.50×", "4 Gelu", "1.0·10⁻⁷",
        "layer 0 50.0 % ● −1.0 %", "pooler 0.0 %",
        "2.70 3.00 3.60 3.90", "40.0 9.00 90.0",
        "whole int8 4.00 ms", "whole int8 40.0 °C",
        "compress bench a b", "2026-11-22T00:00:00+00:00", "invented",
        "Nothing was timed on browser, 1 thread, batch 1, 32 tokens.",
    ):  # fmt: skip
        assert words in shown, words


@pytest.mark.parametrize("width", [342, 690])
@pytest.mark.parametrize(("name", "count"), [("one candidate", 2), ("six", 7), ("thirty", 31)])
def test_names_in_a_picture_do_not_overlap(
    comparisons: dict[str, Comparison], name: str, count: int, width: float
) -> None:
    scatter = choice_scatter(comparisons[name], comparisons[name].view, None)
    assert scatter is not None
    placed = boxes(str(scatter.draw("key", width)))
    assert len(placed) == count
    assert max((one.overlap(other) for one, other in combinations(placed, 2)), default=0.0) < 20, "at most they graze"
    assert all(box.left >= 0 and box.right <= width for box in placed)


def test_the_front_is_drawn_as_stairs_that_never_fall_to_the_right(comparisons: dict[str, Comparison]) -> None:
    thirty = comparisons["thirty"]
    scatter = choice_scatter(thirty, thirty.view, None)
    assert scatter is not None
    drawn = str(scatter.draw("key", 690))
    assert len(stairs(drawn)) == 2 * len(thirty.front(lambda one: one.median_ms(thirty.view)))


def test_a_score_far_below_is_off_the_scale_and_named(tmp_path: Path) -> None:
    paths = [bundle(tmp_path / f"s{n}", student(0.88 + 0.005 * n, 3.0 + n)) for n in range(4)]
    comparison = compare([*paths, bundle(tmp_path / "hopeless", student(0.55, 4.0))])
    scatter = choice_scatter(comparison, comparison.view, None)
    assert scatter is not None
    below = {point.what for point in scatter.points if point.score < scatter.lowest}
    assert below == {"hopeless int8", "hopeless fp32"}
    assert "Below this scale: hopeless fp32 0.560 and hopeless int8 0.550." in text(page(comparison))


def test_heat_is_stronger_where_more_of_the_error_is() -> None:
    parts, rows = heat_map(proved().sensitivity)
    assert parts == ["output", "intermediate"]
    assert [(name, [cell and cell.tone for cell in cells]) for name, cells in rows] == [
        ("layer 0", ["h8 kept", "h0"]),
        ("layer 1", ["h2", None]),
        ("pooler", ["h0"]),
    ]
    assert heat_map(()) == ([], [])


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium, which runs the page's script")
def test_in_a_browser_the_script_runs_under_its_policy(tmp_path: Path) -> None:
    paths = [bundle(tmp_path / name, student(score, p50)) for name, score, p50 in (("a", 0.9, 6.0), ("b", 0.88, 2.0))]
    file = tmp_path / "page.html"
    file.write_text(page(compare(paths), Limits(budget_ms=5.0)), encoding="utf-8")
    shown = in_browser(file)
    (view,) = (part for part in shown.split('<div class="view ')[1:] if "128 tokens</h3>" in part)
    assert "Within 4.00 ms: b fp32, accuracy 0.890 at 4.00 ms" in text(view)
    assert 'class="budget-box" hidden' not in view
    over = re.findall(r'<tr class="\w+ over" role="row" data-n="(\d)"', shown)
    assert over == ["1", "2"]


def test_the_script_reads_numbers_in_full(tmp_path: Path) -> None:
    comparison = compare([bundle(tmp_path / "a", student(0.87654321, 3.123456))])
    assert ("3.123456", "0.87654321") in re.findall(r'data-cost="([^"]+)" data-score="([^"]+)"', page(comparison))
