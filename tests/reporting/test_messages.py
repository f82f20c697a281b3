"""Headlines, remarks and refusals of reports, in the words of tests/messages/reporting.txt."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from compress.records.class_scores import ClassChange
from compress.records.run_report import Report, ReportRow
from compress.records.search_report import SearchReport
from compress.reporting import format as units
from compress.reporting.compare import Limits, compare, pick
from compress.reporting.remarks import (
    choice_headline,
    choice_remarks,
    run_headline,
    run_remarks,
    run_warnings,
    search_headline,
    search_remarks,
    shape,
)
from tests import messages
from tests.nas.sample_search import AT, search
from tests.reporting.bundles import OTHER, TASK, all_files, bench, bundle, certificate, student
from tests.reporting.sample import ROWS, latency, regression, report, with_classes
from tests.reporting.test_search_page import CASES, bare, only

Calls = dict[str, Callable[[], object]]
TEACHER, INT8 = ROWS[2], ROWS[4]
STUDENTS: dict[str, dict[str, Any]] = {
    "smaller and faster": {},
    "as good": {"score": {"accuracy": 0.9}},
    "better": {"score": {"accuracy": 0.91}},
    "all but as good": {"score": {"accuracy": 0.8999}},
    "slower": {"latency": latency(20.0)},
    "as fast": {"latency": latency(15.1)},
    "slower and larger": {"latency": latency(20.0), "file_mb": 180.0},
    "neither timed nor weighed": {"latency": None, "file_mb": None},
    "score that is no number": {"score": {"accuracy": math.nan}},
    "no score": {"score": {}},
    "much lost": {"score": {"accuracy": 0.8}},
    "little lost": {"score": {"accuracy": 0.86}},
    "busy machine": {"latency": {at: replace(one, busy="others: 1.3 of 2 CPUs") for at, one in latency(3.0).items()}},
    "noisy": {"latency": latency(3.0, noisy=True)},
}
SHAPES: tuple[dict[str, int | float | str], ...] = (
    {"layers": 4, "hidden": 256, "heads": 8, "ffn": 1024, "precision": "int8"}, {"layers": 4},
    {"hidden": 64, "share.ffn": "yes"}, {"config.hidden_act": "relu", "width": 0.5}, {},
)  # fmt: skip
NUMBERS: dict[Callable[[Any], str], tuple[float | None, ...]] = {
    units.score: (0.8944, -0.02, math.nan),
    units.change: (0.004, -0.004, 0.0004, None),
    units.share: (0.9844, -1e-9),
    units.percent: (0.16, 0.004),
    units.magnitude: (22_713_986, 999_950, 12, None),
    units.three_digits: (0.01234, 3.4, 1234.6, 0),
    units.small: (0.0123, 1.23e-6),
    units.duration: (3.42, 59.97, 252, 3599.8, 3725, None),
    units.times: (4.264, 14.2, 0.033),
}


def runs() -> dict[str, Report]:
    def beside_teacher(**changes: Any) -> Report:
        return report(rows=(TEACHER, replace(INT8, **changes)))

    def taught(*scores: float) -> Report:
        first, second = scores
        majority = ReportRow("majority", "baseline", {"accuracy": first})
        return report(rows=(majority, replace(TEACHER, score={"accuracy": second}), INT8))

    lost = beside_teacher(**STUDENTS["much lost"])
    return {name: beside_teacher(**changes) for name, changes in STUDENTS.items()} | {
        "much lost, pruned": replace(lost, recipe="prune-taylor"),
        "much lost, pairs": replace(lost, kind="ranking"),
        "much lost, with a corpus": replace(lost, command="compress distill --corpus wiki.txt"),
        "whole": report(),
        "regression": regression(),
        "lost class": with_classes(report()),
        "kept class": with_classes(report(), recall=6 / 9),
        "teacher of no score": report(rows=(replace(TEACHER, score={"accuracy": 0.0}), INT8)),
        "teacher like a baseline": report(rows=(*ROWS[:2], replace(TEACHER, score={"accuracy": 0.5}), *ROWS[3:])),
        "teacher barely better": taught(0.19, 0.217),
        "teacher clearly better": taught(0.19, 0.5),
        "no teacher": report(rows=(INT8,)),
        "no student": report(rows=ROWS[:3]),
    }


def choices(folder: Path) -> Calls:
    def one(name: str, report: Report | None, **options: Any) -> Path:
        return bundle(folder / name, report, **options)

    def choose(*paths: Path, at: str | None = None, **limits: float) -> list[str]:
        comparison = compare(paths, at)
        chosen = pick(comparison, Limits(**limits))
        headline = choice_headline(comparison, Limits(**limits), chosen)
        return [headline, *choice_remarks(comparison, chosen)]

    def text(name: str, content: str) -> Path:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
        return folder / name

    three = [one("good", student(0.90, 6.0)), one("quick", student(0.888, 2.0)), one("poor", student(0.70, 3.0))]
    noisy = student(0.89, 2.0)
    noisy = replace(noisy, rows=(*noisy.rows[:4], replace(noisy.rows[4], latency=latency(2.0, noisy=True))))
    proofs = (certificate(0.888), certificate(0.868, certified=False, device="browser"))
    refused = student(0.9, 3.0, certificates=proofs)
    slow = student(0.8, 3.0)
    slow = replace(slow, rows=(*slow.rows[:2], replace(slow.rows[2], latency=latency(30.0)), *slow.rows[3:]))
    raced = [one("fast", student(0.9, 3.0)), one("slow", slow)]
    lossy = with_classes(student(0.90, 3.0))
    lossy = replace(lossy, certificates=(certificate(0.9, classes=(ClassChange("only", 1.0, 0.0, 1),)),))
    page = bench(folder / "browser.json", {"good:int8": 40.0}, runs=three, device="browser")
    together = bench(folder / "local.json", all_files(raced), runs=raced)
    strange = bench(folder / "strange.json", {"a:int8": 1.0}, sha256={"a:int8": OTHER})
    started = text("started/run.json", '{"command": "compress distill --data x"}')
    empty = folder / "empty"
    empty.mkdir()
    other_rows = student(0.99, 1.0, split="test", split_rows=1821)
    return {
        "choice": lambda: choose(*three),
        "choice within a time and a size": lambda: choose(*three, budget_ms=4, max_mb=0.02),
        "choice with a score": lambda: choose(*three, min_score=0.85),
        "choice within too little": lambda: choose(*three, budget_ms=1),
        "choice of noisy times": lambda: choose(one("noisy", noisy)),
        "choice of a poor student": lambda: choose(three[2]),
        "choice by F1": lambda: choose(one("f1", report(metric="f1"), task=replace(TASK, metric="f1"))),
        "choice on other rows": lambda: choose(*three, one("other", other_rows)),
        "choice that is not certified": lambda: choose(one("proved", refused), max_mb=0.02),
        "choice without a score": lambda: choose(one("bare", None)),
        "choice of races of their own": lambda: choose(*raced),
        "choice of one race": lambda: choose(*raced, together),
        "choice with lost classes": lambda: choose(one("lossy", lossy), max_mb=0.02),
        "choice in a browser": lambda: choose(*three, page, at="browser"),
        "choice with a file of no bundle": lambda: choose(*three, strange),
        "--at misspelt": lambda: choose(*three, page, at="brwser"),
        "--at of two places": lambda: choose(*three, page, at="browser, 32 tokens"),
        "--min-score as points": lambda: choose(*three, min_score=95),
        "other labels": lambda: choose(three[0], one("labels", None, task=replace(TASK, labels=("no", "yes")))),
        "pairs": lambda: choose(three[0], one("pairs", None, task=replace(TASK, text=("a", "b")))),
        "path that is not there": lambda: choose(three[0], folder / "none"),
        "empty folder": lambda: choose(three[0], empty),
        "run that has not finished": lambda: choose(three[0], started.parent),
        "file that is no result": lambda: choose(three[0], text("text.json", "{")),
        "no bundle": lambda: choose(page),
    }  # fmt: skip


def searches() -> dict[str, SearchReport]:
    whole = search(40, winner=None)
    untrained = next(one for one in whole.points if one.stage == "subnet" and whole.feasible(one))
    slow = replace(untrained, measured={AT: 9.0})
    points = tuple(slow if one.number == slow.number else one for one in whole.points)
    near = bare(0, scores={"subnet": 0.9}, predicted_ms=5.0), bare(1, scores={"subnet": 0.8}, predicted_ms=3.0)
    return {name: make() for name, make in CASES.items()} | {
        "untrained": replace(whole, winner=untrained.number),
        "over the budget": replace(whole, points=points, winner=slow.number),
        "impossible": only(*near, budgets={"latency": 1.0, "score": 0.95}),
        "nothing, without budgets": only(budgets={}),
    }


def test_messages(tmp_path: Path) -> None:
    calls: Calls = {
        f"run: {name}": lambda one=one: [run_headline(one), *dict.fromkeys((*run_warnings(one), *run_remarks(one)))]
        for name, one in runs().items()
    }
    calls |= choices(tmp_path)
    calls |= {
        f"search: {name}": lambda one=one: [search_headline(one), *search_remarks(one)]
        for name, one in searches().items()
    }
    calls["shapes"] = lambda: list(map(shape, SHAPES))
    calls |= {f"units.{write.__name__}": lambda write=write: list(map(write, NUMBERS[write])) for write in NUMBERS}
    messages.check("reporting", calls, {str(tmp_path): "TMP"})
