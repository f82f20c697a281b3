"""The page to choose by: self-contained, escaped, one script that its policy names, and whole whatever is missing."""

import math
import re
import shutil
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from compress.reporting import compare
from compress.reporting import format as units
from compress.reporting.compare import Comparison, Limits
from compress.reporting.html import heat_map, render_choice, render_html
from compress.reporting.scatter import choice_scatter
from tests.reporting.pages import HOSTILE, boxes, check_escaped, check_whole, headings, in_browser, stairs, text
from tests.reporting.sample import ROWS, report
from tests.reporting.shelf import bench, bundle, certificate, proved, student

FREE = Limits()
LOAD = {"setting": {"threads": 1, "batch": 1, "seq": 128}, "minutes": [3.0, 3.5, 4.0]}


def page(choice: Comparison, limits: Limits = FREE) -> str:
    return render_choice(choice, limits, compare.pick(choice, limits))


def many(folder: Path, count: int) -> Comparison:
    """Bundles of two files each, all but coinciding."""
    paths = [bundle(folder / f"student-{n}", student(0.88 + 0.001 * (n % 4), 3 + 0.2 * n)) for n in range(count)]
    return compare.compare(paths)


def sustained(**changes: Any) -> list[dict[str, Any]]:
    return [{"name": "whole:int8", **LOAD, "temperatures": [30.0, 35.0, 40.0], **changes}]


@pytest.fixture
def choices(tmp_path: Path) -> dict[str, Comparison]:
    whole = bundle(tmp_path / "whole", proved())
    local = bench(tmp_path / "local.json", {"whole:int8": 3.0, "whole:fp32": 6.0})
    browser = bench(tmp_path / "browser.json", {"whole:int8": 9.0}, device="browser", sustained=sustained())
    cold = bench(tmp_path / "cold.json", {}, device="ssh:pi", sustained=sustained(temperatures=[None] * 3))
    nothing = report(rows=(), curves={}, versions={}, machine={}, data="", split="", split_rows=0)
    undefined = replace(ROWS[4], score={"accuracy": math.nan}, file_mb=math.inf)
    return {
        "whole": compare.compare([whole, local, browser, cold]),
        "no report": compare.compare([bundle(tmp_path / "bare", None)]),
        "nothing measured": compare.compare([bundle(tmp_path / "nothing", nothing)]),
        "nothing finite": compare.compare([bundle(tmp_path / "unreal", report(rows=(ROWS[2], undefined)))]),
        "no candidates": compare.compare([bundle(tmp_path / "empty", report(), sizes={})]),
        "one candidate": compare.compare([bundle(tmp_path / "one", student(0.9, 3.0), sizes={"int8": 14.0})]),
        "no latency": compare.compare(
            [bundle(tmp_path / "untimed", report(rows=tuple(replace(row, latency=None) for row in ROWS)))]
        ),
        "thirty": many(tmp_path / "thirty", 15),
        "all equal": compare.compare([bundle(tmp_path / f"e{n}", student(0.5, 1.0)) for n in range(3)]),
    }


NAMES = (
    "whole", "no report", "nothing measured", "nothing finite", "no candidates", "one candidate", "no latency",
    "thirty", "all equal",
)  # fmt: skip


def test_any_choice_makes_a_whole_page(choices: dict[str, Comparison]) -> None:
    assert tuple(choices) == NAMES
    for choice in choices.values():
        check_whole(page(choice))
        assert page(choice).count("<script>") == 1


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    odd = "<script>alert(1)<b>\"'&{{ 7*7 }}" + "y" * 120  # a folder's name has no slash
    told = proved(
        title=HOSTILE, recipe=HOSTILE, teacher=HOSTILE, data=HOSTILE, split=HOSTILE, command=HOSTILE, date=HOSTILE,
        versions={HOSTILE: HOSTILE}, machine={HOSTILE: HOSTILE, "cpu": HOSTILE},
    )  # fmt: skip
    rows = (replace(ROWS[0], name=HOSTILE), replace(ROWS[2], name=HOSTILE), *told.rows[3:])
    proof = certificate(
        0.88, certified=False, method=HOSTILE, reason=HOSTILE, split=HOSTILE, data=HOSTILE, device=HOSTILE,
        runtime=HOSTILE, kept=(HOSTILE,),
    )  # fmt: skip
    tried = tuple(replace(one, variant=HOSTILE, reason=HOSTILE, fused={HOSTILE: 1}) for one in told.tuning)
    found = tuple(replace(one, layer=HOSTILE + str(n), product=HOSTILE) for n, one in enumerate(told.sensitivity))
    told = replace(told, rows=rows, certificates=(proof,), tuning=tried, sensitivity=found)
    path = bundle(tmp_path / odd, told)
    facts = {"device": HOSTILE, "machine": {HOSTILE: HOSTILE, "cpu": HOSTILE}, "command": HOSTILE, "date": HOSTILE}
    runs = [{"name": f"{path}:int8", **LOAD, "temperatures": [None] * 3}]
    results = bench(tmp_path / "b.json", {f"{path}:int8": 3.0, HOSTILE: 1.0}, sustained=runs, **facts)
    for choice in (compare.compare([path, results]), compare.compare([path, results], at=HOSTILE)):
        check_escaped(page(choice), 20)
    check_escaped(render_html(told), 10)


def test_every_candidate_is_a_point_in_both_widths_and_a_row(choices: dict[str, Comparison]) -> None:
    found = page(choices["thirty"])
    rows = re.findall(r'<tr class="\w+" role="row" data-n="(\d+)">', found)
    assert rows == [str(n) for n in range(1, 31)]
    views = found.split('<div class="view ')[1:]
    assert len(views) == 3, "two settings and the size"
    for view in views:
        assert len(re.findall(r'class="point student', view)) == 2 * 30
        assert len(re.findall(r"<li data-n=", view)) == 30


def test_what_is_missing_leaves_no_heading(choices: dict[str, Comparison]) -> None:
    proofs = {"Certificates", "Race of the variants", "Sensitivity by layer"}
    asked = {*proofs, "Without pause", "Latency on every device", "Accuracy against cost"}
    shown = {name: headings(page(choice)) for name, choice in choices.items()}
    assert asked < shown["whole"]
    for name in ("no report", "nothing measured"):
        assert not asked & shown[name], name
    assert shown["thirty"] & asked == {"Latency on every device", "Accuracy against cost"}
    assert shown["no latency"] & asked == {"Accuracy against cost"}
    assert "All candidates" in shown["no report"] and "All candidates" not in shown["no candidates"]


def test_without_a_script_the_ladder_says_what_is_best_within_each_budget(tmp_path: Path) -> None:
    paths = [bundle(tmp_path / name, student(score, p50)) for name, score, p50 in (("a", 0.9, 6.0), ("b", 0.88, 2.0))]
    found = page(compare.compare(paths))
    (view,) = (part for part in found.split('<div class="view ')[1:] if "128 tokens</h3>" in part)
    rungs = re.findall(r"<tr data-n[^>]*><td>([^<]+)</td><th scope=\"row\">([^<]+)</th><td>([^<]+)</td></tr>", view)
    assert [(name, score) for _, name, score in rungs] == [
        ("b int8", "0.880"), ("b fp32", "0.890"), ("a int8", "0.900"), ("a fp32", "0.910"),
    ]  # fmt: skip
    assert [cost.replace(units.GAP, " ") for cost, _, _ in rungs] == ["2.00 ms", "4.00 ms", "6.00 ms", "12.0 ms"]


def test_what_was_not_timed_together_is_said_in_its_place(choices: dict[str, Comparison]) -> None:
    assert "Nothing was timed on browser, 1 thread, batch 1, 32 tokens." in text(page(choices["whole"]))


def test_figures_of_the_pick_and_of_every_proof_are_on_the_page(choices: dict[str, Comparison]) -> None:
    shown = text(page(choices["whole"], Limits(max_mb=0.02)))
    for said in (
        "Within 0.02 MB, whole int8 scores best: accuracy 0.880 at 3.00 ms and 0.0144 MB.",
        "certified yes the drop is within 0.005",
        "static int8", "onnxruntime 1.31.1", "98.0 %", "0.0200",
        "merged, int8 chosen", "bad, int8 failed logits differ by 9", "0.50×", "4 Gelu", "1.0·10⁻⁷",
        "layer 0 50.0 % ● −1.0 %", "pooler 0.0 %",
        "2.70 3.00 3.60 3.90", "40.0 9.00 90.0",
        "whole int8 4.00 ms", "whole int8 40.0 °C",
        "compress bench a b", "2026-11-22T00:00:00+00:00", "invented",
    ):  # fmt: skip
        assert said in shown, said


@pytest.mark.parametrize("width", [342, 690])
@pytest.mark.parametrize("count", [1, 3, 15])
def test_names_in_a_picture_do_not_overlap(tmp_path: Path, width: float, count: int) -> None:
    choice = many(tmp_path, count)
    against = choice_scatter(choice, choice.view, None)
    placed = boxes(str(against.draw("key", width)))
    assert len(placed) == 2 * count + 1
    assert max((one.overlap(other) for one, other in combinations(placed, 2)), default=0.0) < 20, "at most they graze"
    assert all(box.left >= 0 and box.right <= width for box in placed)


def test_the_front_is_drawn_as_stairs_that_never_fall_to_the_right(choices: dict[str, Comparison]) -> None:
    choice = choices["thirty"]
    drawn = str(choice_scatter(choice, choice.view, None).draw("key", 690))
    assert len(stairs(drawn)) == 2 * len(choice.front(lambda one: one.median_ms(choice.view)))


def test_a_score_far_below_is_off_the_scale_and_said(tmp_path: Path) -> None:
    paths = [bundle(tmp_path / f"s{n}", student(0.88 + 0.005 * n, 3.0 + n)) for n in range(4)]
    choice = compare.compare([*paths, bundle(tmp_path / "hopeless", student(0.55, 4.0))])
    against = choice_scatter(choice, choice.view, None)
    below = {point.what for point in against.points if point.score < against.lowest}
    assert below == {"hopeless int8", "hopeless fp32"}
    assert "Below this scale: hopeless fp32 0.560 and hopeless int8 0.550." in text(page(choice))


def test_heat_is_stronger_where_more_of_the_error_is() -> None:
    parts, rows = heat_map(proved().sensitivity)
    assert parts == ["output", "intermediate"]
    assert [(name, [field and field.tone for field in fields]) for name, fields in rows] == [
        ("layer 0", ["h8 kept", "h0"]),
        ("layer 1", ["h2", None]),
        ("pooler", ["h0"]),
    ]
    assert heat_map(()) == ([], [])


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium, which runs the page's script")
def test_in_a_browser_the_script_runs_under_its_policy(tmp_path: Path) -> None:
    paths = [bundle(tmp_path / name, student(score, p50)) for name, score, p50 in (("a", 0.9, 6.0), ("b", 0.88, 2.0))]
    file = tmp_path / "page.html"
    file.write_text(page(compare.compare(paths), Limits(budget_ms=5.0)), encoding="utf-8")
    shown = in_browser(file)
    (view,) = (part for part in shown.split('<div class="view ')[1:] if "128 tokens</h3>" in part)
    assert "Within 4.00 ms: b fp32, accuracy 0.890 at 4.00 ms" in text(view)
    assert 'class="budget-box" hidden' not in view
    over = re.findall(r'<tr class="\w+ over" role="row" data-n="(\d)"', shown)
    assert over == ["1", "2"]


def test_the_data_a_script_reads_are_numbers_in_full(tmp_path: Path) -> None:
    choice = compare.compare([bundle(tmp_path / "a", student(0.87654321, 3.123456))])
    assert ("3.123456", "0.87654321") in re.findall(r'data-cost="([^"]+)" data-score="([^"]+)"', page(choice))
