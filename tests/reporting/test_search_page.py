"""The page of a search: self-contained, escaped, all trials on it, whole whatever is missing; its script at work."""

import json
import math
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from html import escape, unescape
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from compress.records.search_report import (
    Anchor,
    ChoiceImportance,
    LatencyPrediction,
    Rung,
    SearchReport,
    Timing,
    TrialRecord,
)
from compress.reporting import format as units
from compress.reporting import scaling
from compress.reporting.html import render_search
from compress.reporting.remarks import shape, show_command
from compress.reporting.scaling import growth
from compress.reporting.scatter import trial_scatter
from compress.reporting.tables import tabulate_rejected
from tests.nas.sample_search import search
from tests.reporting.pages import HOSTILE, boxes, check_escaped, check_whole, headings, in_browser, stairs, text

NOTHING: dict[str, Any] = {
    "points": (), "front": (), "winner": None, "prediction": None, "importances": (), "costs": {}, "ladder": (),
    "anchors": (), "versions": {}, "machine": {}, "notes": (), "teacher_score": None, "teacher_ms": None,
}  # fmt: skip


def bare(number: int, **changes: Any) -> TrialRecord:
    return TrialRecord(**{"number": number, "choice": {"layers": 2}, "state": "complete", **changes})


def only(*points: TrialRecord, **changes: Any) -> SearchReport:
    """A search that knows these points and nothing else."""
    return search(**{**NOTHING, "points": points, **changes})


CASES: dict[str, Callable[[], SearchReport]] = {
    "whole": lambda: search(120),
    "nothing": only,
    "nothing complete": lambda: only(*(bare(n, state="failed", reason="x") for n in range(3))),
    "all too slow": lambda: search(budgets={"latency": 0.1}, front=(), winner=None),
    "one point": lambda: only(bare(7, scores={"subnet": 0.8}, predicted_ms=1.0), winner=7),
    "no latency": lambda: only(bare(0, scores={"short": 0.8}, parameters=9), budgets={}),
    "not finite": lambda: only(bare(0, scores={"subnet": math.nan}, predicted_ms=math.inf, parameters=1)),
    "all equal": lambda: only(*(bare(n, scores={"subnet": 0.5}, predicted_ms=1.0, file_mb=1.0) for n in range(30))),
    "zero": lambda: only(
        *(bare(n, scores={"subnet": 0.0}, predicted_ms=1.0 + n) for n in range(3)),
        costs={"trials": 0.0},
        prediction=LatencyPrediction("none", None, None, (Timing("a", 1.0, 1.0),)),
    ),
}


@pytest.fixture(autouse=True, scope="module")
def few_resamples() -> Iterator[None]:
    """Bands of curves need fewer resamples to be drawn than to be true."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaling, "FIT_RESAMPLES", 20)
        yield


@cache
def page_of(name: str) -> str:
    return render_search(CASES[name]())


@pytest.mark.parametrize("name", CASES)
def test_any_search_makes_a_whole_page(name: str) -> None:
    page = page_of(name)
    check_whole(page)
    assert page.count("<script>") == 1


def test_hostile_text_stays_text() -> None:
    whole = search(60)
    points = tuple(
        replace(one, choice={**one.choice, HOSTILE: HOSTILE}, reason=HOSTILE, bundle=HOSTILE) for one in whole.points
    )
    assert whole.prediction is not None
    timings = tuple(replace(one, name=HOSTILE) for one in whole.prediction.timings)
    told = replace(
        whole, title=HOSTILE, study=HOSTILE, teacher=HOSTILE, data=HOSTILE, metric=HOSTILE, device=HOSTILE,
        setting=HOSTILE, command=HOSTILE, date=HOSTILE, split=HOSTILE, sampler=HOSTILE, points=points,
        prediction=LatencyPrediction(HOSTILE, 0.1, 0.2, timings), costs={HOSTILE: 1.0},
        anchors=(Anchor(HOSTILE, 0.8, 1.0),),
        importances=(ChoiceImportance("score", HOSTILE, 1, {HOSTILE: 1.0}),), versions={HOSTILE: HOSTILE},
        ladder=tuple(replace(one, what=HOSTILE) for one in whole.ladder), machine={HOSTILE: HOSTILE}, notes=(HOSTILE,),
    )  # fmt: skip
    check_escaped(render_search(told), 100)


def test_every_trial_is_listed_and_every_scored_one_drawn() -> None:
    whole = search(300)
    page = render_search(whole)
    listed = re.findall(r'<tr data-n="(\d+)" data-v="([^"]+)"', page)
    assert [int(number) for number, _ in listed] == [point.number for point in whole.points]
    values = dict(listed)["0"].split()
    expected = [whole.points[0].score, whole.ms(whole.points[0]), whole.points[0].file_mb, whole.points[0].parameters]
    assert [float(value) for value in values] == pytest.approx(expected, rel=1e-5)
    against = trial_scatter(whole, "latency")
    drawn = str(against.draw("key", 690))
    crowd = sum(len(re.findall("M", path)) for path in re.findall(r'<path d="([^"]+)" class="crowd"', drawn))
    points = len(re.findall(r'class="point (?:front|behind)', drawn))
    scored = sum(point.score is not None for point in whole.points)
    assert scored - 5 <= crowd + points <= scored, "those on one pixel are one"


def test_the_answer_is_said_with_its_numbers_and_its_command() -> None:
    whole = CASES["whole"]()
    assert whole.winner is not None
    winner = whole.point(whole.winner)
    shown = text(page_of("whole"))
    assert f"at most 4.00 ms, a student of {winner.choice['layers']}×{winner.choice['hidden']} reaches" in shown
    for said in (
        f"{units.score(winner.score)} against the teacher’s 0.905",
        f"compress search show runs/sst2-4ms {winner.number} --bundle student-{winner.number}",
        "bag of words 0.810", "budget 4.00 ms", "this predictor 2.1 %", "FLOPs alone 8.3 %", "supernet 25 min 0 s",
        "below the median of rung 0", "PED-ANOVA over 88 complete trials.", "invented, 2 cores", "onnxruntime 1.31.1",
        "The points are invented.", "872 rows", "Altogether 57 min 53 s", whole.command,
    ):  # fmt: skip
        assert said in shown, said


def test_the_first_trial_has_the_number_zero_in_every_table() -> None:
    page = render_search(only(bare(0, scores={"subnet": 0.8}, predicted_ms=1.0), winner=0, front=(0,)))
    assert '<span class="number-of">0</span>' in page and '<span class="of-number">0</span>' in page


def test_without_an_answer_the_page_says_what_comes_closest() -> None:
    assert "nearest is trial" in text(page_of("all too slow"))
    assert "Trial 0 failed: x." in text(page_of("nothing complete"))


def test_what_is_missing_leaves_no_heading() -> None:
    shown = {name: headings(page_of(name)) for name in CASES}
    always = {"What the search cost", "How it was measured"}
    asked = {
        "Accuracy against cost", "The front", "How small can it go, and what would more data buy?",
        "Predicted against measured latency", "What decides", "All trials", "Notes",
    }  # fmt: skip
    assert shown["whole"] == always | asked
    assert shown["nothing"] - always <= {"How small can it go, and what would more data buy?"}
    assert "Accuracy against cost" not in shown["nothing complete"]
    assert "The front" not in shown["all too slow"]


@pytest.mark.parametrize("width", [342, 690])
@pytest.mark.parametrize("count", [10, 60, 300])
def test_names_in_the_picture_do_not_overlap(width: float, count: int) -> None:
    placed = boxes(str(trial_scatter(search(count), "latency").draw("key", width)))
    assert max((one.overlap(other) for one, other in combinations(placed, 2)), default=0.0) < 20, "at most they graze"
    assert all(box.left >= 0 and box.right <= width for box in placed)


def test_the_stairs_of_the_front_never_fall_to_the_right() -> None:
    stairs(str(trial_scatter(search(300), "file_mb").draw("key", 690)))


def test_two_thousand_trials_are_a_small_page() -> None:
    whole = search(2000)
    began = time.process_time()
    page = render_search(whole)
    assert len(page.encode()) < 1_000_000
    assert time.process_time() - began < 8


def test_growth_answers_for_half_and_twice_and_says_what_was_not_measured() -> None:
    told = growth(search(120))
    assert told.expected is not None
    cells = zip(*([cell.text for cell in column.cells] for column in told.expected.columns), strict=True)
    rows = dict(zip((line.name for line in told.expected.rows), cells, strict=True))
    assert list(rows) == ["here", "half the size", "twice the size", "half the data", "twice the data"]
    assert all(re.fullmatch(r"0\.\d{3} \[0\.\d{3}, 0\.\d{3}\]", cells[0]) for cells in rows.values())
    assert rows["twice the data"][1].startswith("+") and rows["half the size"][1].startswith("−")
    assert rows["twice the data"][2] == "beyond the measured range" and rows["half the data"][2] == ""
    assert [figure.heading for figure in told.figures] == [
        f"Accuracy against {of}" for of in ("size", "data", "compute")
    ]
    about = told.about.replace(units.GAP, " ")
    assert about.endswith("Here: 8.00 M parameters without embeddings, 134 k examples seen in training.")
    assert any("each seen 2.0 times" in one for one in told.answers)


def test_growth_without_a_ladder_is_of_the_trials_and_of_flat_scores_nothing() -> None:
    told = growth(search(200, ladder=()))
    assert [figure.heading for figure in told.figures] == ["Accuracy against size"]
    assert told.about.startswith("Scores of the trials")
    flat = tuple(Rung("supernet", 10**n, 10**m, 10.0 ** (n + m), 0.8) for n in range(4, 8) for m in range(2, 6))
    none = growth(only(ladder=flat))
    assert none.figures == () and none.expected is None
    assert any("does not fall" in one for one in none.warnings)


def test_reasons_that_differ_in_numbers_are_one() -> None:
    points = tuple(bare(n, state="too slow", reason=f"predicted {n}.5 ms") for n in range(5))
    rest = tuple(bare(10 + n, state="failed", reason=chr(97 + n)) for n in range(12))
    (found,) = tabulate_rejected(only(*points, *rest))
    cells = ([cell.text for cell in column.cells] for column in found.columns)
    told = list(zip((row.name for row in found.rows), zip(*cells, strict=True), strict=True))
    assert told[0] == ("too slow", ("5", "predicted 0.5 ms"))
    assert len(told) == 9 and told[-1] == ("other", ("5", "5 more reasons"))


DRIVER = """
const found = {}, inner = document.querySelector("iframe").contentWindow, page = inner.document;
const told = () => ({
  number: page.querySelector(".of-number").textContent,
  shape: page.querySelector(".told dd").textContent,
  command: page.querySelector("#chosen code").textContent,
});
const events = (svg, name, x, y) => {
  const at = new inner.DOMPoint(x, y).matrixTransform(svg.getScreenCTM());
  svg.dispatchEvent(new inner.PointerEvent(name, { clientX: at.x, clientY: at.y, bubbles: true }));
};
found.first = told();
found.hidden = [page.querySelector(".budget-box").hidden, page.querySelector(".copy").hidden];
const slider = page.getElementById("budget");
slider.value = "0";
slider.dispatchEvent(new inner.Event("input"));
found.cheapest = told();
found.said = page.querySelector("output").textContent;
const svg = [...page.querySelectorAll("svg.picture")].find((one) => one.getBoundingClientRect().width > 0);
events(svg, "pointermove", AIM_X, AIM_Y);
found.hovered = told();
events(svg, "pointerleave", 0, 0);
found.left = told();
events(svg, "click", AIM_X, AIM_Y);
events(svg, "pointerleave", 0, 0);
found.clicked = told();
page.querySelector('#trials tr[data-n="3"]').click();
found.listed = told();
page.getElementById("axis-file_mb").click();
const views = [...page.querySelectorAll(".view")].filter((view) => view.offsetParent !== null);
found.views = views.map((view) => view.className);
slider.value = "0";
slider.dispatchEvent(new inner.Event("input"));
found.smallest = told();
document.querySelector("pre").textContent = JSON.stringify(found);
"""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium, which runs the page's script")
def test_in_a_browser_pointing_tapping_and_the_budget_tell_a_trial(tmp_path: Path) -> None:
    whole = search(80)
    assert whole.winner is not None
    aim = next(one for one in whole.points if one.stage == "subnet" and one.number not in whole.front)
    drawn = str(trial_scatter(whole, "latency").draw("key", 690))
    scales = re.search(r'data-x="([^"]+)" data-y="([^"]+)"', drawn)
    assert scales is not None
    x, y = (_pixel(scale, value) for scale, value in zip(scales.groups(), (whole.ms(aim), aim.score), strict=True))
    driver = DRIVER.replace("AIM_X", str(x)).replace("AIM_Y", str(y))
    wrapper = f'<pre></pre><iframe style="width:1280px;height:3000px" srcdoc="{escape(render_search(whole))}"></iframe>'
    file = tmp_path / "wrapper.html"
    file.write_text(f"{wrapper}<script>addEventListener('load', () => {{ {driver} }});</script>", encoding="utf-8")
    shown = in_browser(file)
    found = json.loads(unescape(re.findall(r"<pre>(.*?)</pre>", shown, flags=re.S)[0]))
    assert found["hidden"] == [False, False]
    assert found["first"] == _expected(whole, whole.winner)
    assert found["cheapest"] == _expected(whole, whole.compute_front(("score", "latency"))[0])
    assert found["said"].startswith("Up to ")
    assert found["hovered"] == found["clicked"] == _expected(whole, aim.number)
    assert found["left"] == found["cheapest"], "what was pinned is told again"
    assert found["listed"] == _expected(whole, 3)
    assert found["views"] == ["view by-file_mb"]
    assert found["smallest"] == _expected(whole, whole.compute_front(("score", "file_mb"))[0])


def _expected(whole: SearchReport, number: int) -> dict[str, str]:
    before, after = show_command(whole, number)
    return {"number": str(number), "shape": shape(whole.point(number).choice), "command": f"{before}{number}{after}"}


def _pixel(scale: str, value: float | None) -> float:
    assert value is not None
    low, high, start, end, log = map(float, scale.split())
    if log:
        low, high, value = math.log(low), math.log(high), math.log(value)
    return start + (value - low) / (high - low) * (end - start)
