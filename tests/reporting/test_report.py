"""The record: JSON there and back, what counts as measured, numbers and sentences."""

import json
import math
from dataclasses import replace

import pytest

from compress.errors import BundleError
from compress.evaluation.statistics import wilson_interval
from compress.records.latency import Setting
from compress.records.run_report import Report, ReportRow
from compress.reporting.remarks import run_remarks
from tests.reporting.sample import ROWS, latency, report, with_classes


@pytest.mark.parametrize("whole", [report(), with_classes(report())])
def test_json_round_trip(whole: Report) -> None:
    assert Report.from_json(whole.to_json()) == whole


def test_json_writes_null_for_what_is_not_finite() -> None:
    before = report(
        rows=(ReportRow("student", "student", {"accuracy": math.nan, "f1": 0.5}, agreement=math.inf),),
        curves={"distill": [{"step": 1, "loss": math.nan}]},
    )
    text = before.to_json()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    after = Report.from_json(text)
    assert after.rows[0].score == {"accuracy": None, "f1": 0.5}
    assert after.rows[0].agreement is None
    assert after.curves["distill"][0]["loss"] is None


def test_json_errors_name_the_field() -> None:
    broken = json.loads(report().to_json()) | {"split_rows": "many"}
    del broken["title"]
    with pytest.raises(BundleError, match=r"title: .*split_rows: "):
        Report.from_json(json.dumps(broken))
    with pytest.raises(BundleError, match="not a report"):
        Report.from_json("{")


def test_the_setting_of_most_rows_comes_first() -> None:
    long, short = str(Setting(1, 1, 128)), str(Setting(1, 1, 32))
    only_short = {short: latency(5.0)[short]}
    assert report().settings == (long, short)
    whole = report(rows=(*ROWS[:3], replace(ROWS[3], latency=only_short), replace(ROWS[4], latency=only_short)))
    assert whole.settings == (short, long)
    found = whole.latency(whole.rows[2])
    assert found is not None and found.setting.seq == 32
    assert whole.latency(whole.rows[3], long) is None
    assert report(rows=ROWS[:2]).settings == ()


def test_impossible_times_are_refused() -> None:
    with pytest.raises(AssertionError, match="not finite and above 0"):
        ReportRow("student", "student", {}, latency=latency(math.nan))


def test_only_a_student_loses_classes() -> None:
    lossy = with_classes(report())
    assert [one.label for one in lossy.fallen(lossy.rows[-1])] == ["rare"]
    assert lossy.fallen(lossy.rows[-2]) == lossy.fallen(lossy.rows[2]) == ()


def test_macro_f1_is_of_the_classes() -> None:
    lossy = with_classes(report())
    assert lossy.macro_f1(lossy.rows[-1]) == pytest.approx(0.45)
    assert lossy.macro_f1(lossy.rows[0]) is None
    assert replace(lossy, metric="f1", labels=6).macro_f1(lossy.rows[-1]) is None, "the metric is that already"


def test_wilson_interval() -> None:
    # Newcombe 1998, Table I: 81 of 263.
    assert wilson_interval(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson_interval(1.0, 10)[1] == pytest.approx(1.0)


def test_words_are_no_independent_rows() -> None:
    found = replace(report(), kind="tagging", metric="accuracy", split_rows=60)
    assert not any("uncertain" in remark for remark in run_remarks(found))
