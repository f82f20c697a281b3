"""The record: JSON there and back, what counts as measured, numbers and sentences."""

import json
import math
import re
from dataclasses import replace

import pytest

from compress.errors import BundleError
from compress.evaluation.statistics import wilson_interval
from compress.records.latency import Setting
from compress.records.run_report import Report, ReportRow
from compress.reporting import format as units
from compress.reporting.remarks import run_headline, run_remarks, run_warnings
from tests.reporting.sample import ROWS, latency, regression, report, with_classes


def with_student(**changes: object) -> Report:
    """The teacher beside one student."""
    return report(rows=(ROWS[2], replace(ROWS[4], **changes)))


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
    with pytest.raises(AssertionError, match="clock"):
        ReportRow("student", "student", {}, latency=latency(math.nan))


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (units.score(0.8944), "0.894"),
        (units.score(-0.02), "−0.020"),
        (units.score(math.nan), "—"),
        (units.share(0.9844), "98.4 %"),
        (units.percent(0.16), "16 %"),
        (units.percent(0.004), "0.4 %"),
        (units.magnitude(22_713_986), "22.7 M"),
        (units.magnitude(999_950), "1.00 M"),
        (units.magnitude(12), "12.0"),
        (units.three_digits(0.01234), "0.0123"),
        (units.three_digits(3.4), "3.40"),
        (units.three_digits(1234.6), "1235"),
        (units.three_digits(0), "0"),
        (units.duration(3.42), "3.4 s"),
        (units.duration(59.97), "1 min 0 s"),
        (units.duration(252), "4 min 12 s"),
        (units.duration(3599.8), "1 h 0 min"),
        (units.duration(3725), "1 h 2 min"),
        (units.duration(None), "—"),
        (units.times(4.264), "4.3×"),
        (units.times(14.2), "14×"),
        (units.times(0.033), "0.033×"),
    ],
)
def test_numbers_as_people_read_them(written: str, expected: str) -> None:
    assert written.replace(units.GAP, " ") == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "Student int8 keeps 97.0 % of the teacher’s accuracy at 5.0× the speed and 16 % of the size."),
        ({"score": {"accuracy": 0.9}}, "Student int8 matches the teacher’s accuracy (0.900) at 5.0× the speed and"),
        ({"score": {"accuracy": 0.91}}, "Student int8 exceeds the teacher’s accuracy (0.910 against 0.900) at 5.0× "),
        ({"score": {"accuracy": 0.8999}}, "Student int8 keeps 99.99 % of the teacher’s accuracy at "),
        ({"latency": latency(20.0)}, "accuracy at 16 % of the size, but takes 1.3× as long."),
        ({"latency": latency(15.1)}, "accuracy at the same speed and 16 % of the size."),
        ({"latency": latency(20.0), "file_mb": 180.0}, "accuracy, but takes 1.3× as long and is 2.0× as large."),
        ({"latency": None, "file_mb": None}, "Student int8 keeps 97.0 % of the teacher’s accuracy."),
        ({"score": {"accuracy": math.nan}}, "Student int8 has no valid accuracy."),
        ({"score": {}}, "Student int8 has no valid accuracy."),
    ],
)
def test_headline_says_gains_and_losses(changes: dict[str, object], expected: str) -> None:
    assert expected in run_headline(with_student(**changes)).replace(units.GAP, " ")


def test_headline_without_a_ratio() -> None:
    teacher = replace(ROWS[2], score={"accuracy": 0.0})
    assert "reaches accuracy 0.873 against the teacher’s 0.000" in run_headline(report(rows=(teacher, ROWS[4])))
    assert "no teacher was measured" in run_headline(report(rows=(ROWS[4],)))
    assert run_headline(report(rows=ROWS[:3])) == "No student was measured."


def test_remarks_name_the_sample_and_a_baseline_that_does_as_well() -> None:
    (remark,) = run_remarks(report())
    assert remark.replace(units.GAP, " ").startswith(
        "872 rows leave an accuracy of 0.873 uncertain: 95 % interval 0.849"
    )
    assert "Student is no better than the baseline bag of words (0.700 against 0.720)." in run_remarks(regression())


def test_a_teacher_that_a_baseline_matches_is_warned_of_with_what_helps() -> None:
    assert run_warnings(report()) == []
    weak = report(rows=(*ROWS[:2], replace(ROWS[2], score={"accuracy": 0.5}), *ROWS[3:]))
    first, help_ = run_warnings(weak)[:2]
    assert re.fullmatch(r"The teacher is no better than the baseline .* \(0\.500 against 0\.\d+\)\.", first)
    assert "labelled rows" in help_


def test_a_student_that_lost_much_is_warned_of_with_what_helps() -> None:
    lossy = with_student(score={"accuracy": 0.8})
    assert run_warnings(lossy) == [
        f"Student int8 keeps 88.9{units.GAP}% of the teacher’s accuracy: --recipe auto, which prunes the teacher where "
        "it can, is likely to keep more, --effort best trains longer, and similar texts without labels (--corpus) help "
        "tasks of single texts."
    ]
    assert "a larger student is likely" in run_warnings(replace(lossy, recipe="prune-taylor"))[0]
    for change in ({"kind": "ranking"}, {"command": "compress distill --corpus wiki.txt"}):
        (warning,) = run_warnings(replace(lossy, **change))
        assert warning.endswith("is likely to keep more, --effort best trains longer.")
    assert run_warnings(with_student(score={"accuracy": 0.86})) == []


def test_a_lost_class_is_in_the_headline_the_warnings_and_the_remarks() -> None:
    lossy = with_classes(report())
    assert "rare" in run_headline(lossy) and "support 9" in run_headline(lossy)
    assert [one.label for one in lossy.fallen(lossy.rows[-1])] == ["rare"]
    assert lossy.fallen(lossy.rows[-2]) == lossy.fallen(lossy.rows[2]) == ()
    warnings = run_warnings(lossy)
    assert len(warnings) == 2 and "rare" in warnings[0] and "macro F1" in warnings[1]
    assert warnings[1] in run_remarks(lossy)
    kept = with_classes(report(), recall=6 / 9)
    assert run_warnings(kept) == [] and "rare" not in run_headline(kept)
    assert run_warnings(report()) == []


def test_macro_f1_is_of_the_classes() -> None:
    lossy = with_classes(report())
    assert lossy.macro_f1(lossy.rows[-1]) == pytest.approx(0.45)
    assert lossy.macro_f1(lossy.rows[0]) is None
    assert replace(lossy, metric="f1", labels=6).macro_f1(lossy.rows[-1]) is None, "the metric is that already"


@pytest.mark.parametrize(("score", "barely"), [(0.217, True), (0.5, False)])
def test_a_teacher_barely_above_a_baseline_is_remarked_on(score: float, barely: bool) -> None:
    rows = (ReportRow("majority", "baseline", {"accuracy": 0.19}), replace(ROWS[2], score={"accuracy": score}), ROWS[4])
    assert ("barely" in " ".join(run_remarks(report(rows=rows)))) is barely


def test_a_busy_machine_is_remarked_on() -> None:
    busy = {at: replace(one, other_load=1.3, busy="others: 1.3 of 2 CPUs") for at, one in latency(3.0).items()}
    assert "1.3 of 2 CPUs" in " ".join(run_remarks(with_student(latency=busy)))


def test_wilson_interval() -> None:
    # Newcombe 1998, Table I: 81 of 263.
    assert wilson_interval(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson_interval(1.0, 10)[1] == pytest.approx(1.0)
