"""What is chosen among several bundles: what is read, what is compared, what is refused, and which one is picked."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from compress.errors import CompressError
from compress.evaluation.statistics import differ_significantly
from compress.exporters.artifact import FILES, Precision
from compress.records.class_scores import ClassChange
from compress.reporting import compare, tables, terminal
from compress.reporting.compare import OWN, Comparison, Limits, Pick, View
from compress.reporting.format import GAP
from compress.reporting.remarks import choice_headline, choice_remarks
from tests.command import run
from tests.reporting.sample import ROWS, latency, report, with_classes
from tests.reporting.shelf import (
    LATER,
    OTHER,
    TASK,
    bench,
    bundle,
    certificate,
    digest,
    proved,
    rewrite_manifest,
    student,
)

FREE = Limits()
PROVED: tuple[tuple[Precision, float], ...] = (("fp32", 0.886), ("int8", 0.88))
LOAD = {"name": "good:int8", "setting": {}, "minutes": [1.0, 2.0], "temperatures": [30.0, None]}


def told(choice: Comparison, limits: Limits = FREE) -> tuple[str, str]:
    """(headline, remarks) with plain spaces."""
    chosen = compare.pick(choice, limits)
    words = choice_headline(choice, limits, chosen), " ".join(choice_remarks(choice, chosen))
    return words[0].replace(GAP, " "), words[1].replace(GAP, " ")


def picked(choice: Comparison, **limits: float) -> str | None:
    found = compare.pick(choice, Limits(**limits)).candidate
    return found.name if found else None


def timed(choice: Comparison) -> list[compare.ComparedModel]:
    return [one for one in choice.candidates if one.latency(choice.view)]


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    """`good` scores best and is slow; `quick` is nearly as good; `poor` is slower and worse than `quick`."""
    return [
        bundle(tmp_path / "good", student(0.90, 6.0)),
        bundle(tmp_path / "quick", student(0.888, 2.0)),
        bundle(tmp_path / "poor", student(0.70, 3.0)),
    ]


def test_runs_and_bundles_are_named_by_their_folders_and_each_is_there_once(tmp_path: Path) -> None:
    one = bundle(tmp_path / "a" / "run", student(0.9, 3.0))
    two = bundle(tmp_path / "b" / "run", student(0.8, 3.0))
    alone = bundle(tmp_path / "shipped", student(0.7, 3.0), inner=False)
    choice = compare.compare([one, one / "bundle", two, alone])
    assert [each.name for each in choice.bundles] == ["a/run", "b/run", "shipped"]
    assert compare.compare([one, alone]).candidates[0].name == "run fp32"


def test_the_best_score_is_first_and_scores_sizes_and_times_are_the_reports(three: list[Path]) -> None:
    choice = compare.compare(three)
    first = choice.candidates[0]
    assert (first.name, choice.score(first), first.size_mb) == ("good fp32", pytest.approx(0.91), 0.057)
    assert choice.view is not None and choice.view.device == OWN
    assert first.median_ms(choice.view) == 12.0
    assert choice.drop(choice.candidates[1]) == pytest.approx(0.01)
    assert choice.drop(first) is None
    assert [one.name for one in choice.teachers] == ["teacher"]
    assert choice.baselines == (("majority", 0.5), ("bag of words", 0.8))


def test_the_front_is_what_nothing_beats_for_less(three: list[Path]) -> None:
    choice = compare.compare(three)
    by_time = choice.front(lambda one: one.median_ms(choice.view))
    assert [one.name for one in by_time] == ["quick int8", "quick fp32", "good int8", "good fp32"]
    by_size = choice.front(lambda one: one.size_mb)
    assert [one.name for one in by_size] == ["good int8", "good fp32"]
    assert choice.front(lambda one: None) == []


def test_the_front_keeps_equals(tmp_path: Path) -> None:
    paths = [bundle(tmp_path / name, student(0.9, 3.0)) for name in ("a", "b")]
    choice = compare.compare(paths)
    front = choice.front(lambda one: one.median_ms(choice.view))
    assert [one.name for one in front] == ["a int8", "b int8", "a fp32", "b fp32"]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, "good fp32"),
        ({"budget_ms": 12.0}, "good fp32"),
        ({"budget_ms": 11.9}, "good int8"),
        ({"budget_ms": 4.0}, "quick fp32"),
        ({"budget_ms": 2.0}, "quick int8"),
        ({"budget_ms": 1.9}, None),
        ({"max_mb": 0.02}, "good int8"),
        ({"max_mb": 0.02, "budget_ms": 5.0}, "quick int8"),
        ({"min_score": 0.7}, "quick int8"),
        ({"min_score": 0.895}, "quick fp32"),
        ({"min_score": 0.95}, None),
    ],
)
def test_the_pick_is_the_best_score_within_a_budget_or_the_fastest_with_a_score(
    three: list[Path], limits: dict[str, float], expected: str | None
) -> None:
    assert picked(compare.compare(three), **limits) == expected


def test_of_equal_scores_the_faster_is_picked_then_the_smaller(tmp_path: Path) -> None:
    paths = [bundle(tmp_path / "slow", student(0.9, 5.0)), bundle(tmp_path / "fast", student(0.9, 3.0))]
    assert picked(compare.compare(paths)) == "fast fp32"
    untimed = [
        bundle(tmp_path / f"u{mb}", report(rows=(replace(ROWS[4], latency=None),)), sizes={"int8": mb})
        for mb in (9.0, 3.0)
    ]
    assert picked(compare.compare(untimed)) == "u3.0 int8"


def test_the_headline_says_what_was_picked_why_and_what_cannot_be_told_from_it(three: list[Path]) -> None:
    choice = compare.compare(three)
    said, remarks = told(choice)
    assert said == (
        "good fp32 scores best: accuracy 0.910 at 12.0 ms and 0.0570 MB; on 872 rows quick int8 cannot be told from "
        "it, and takes 2.00 ms for 0.0144 MB."
    )
    assert "872 rows cannot tell accuracy 0.910 from that of good int8 (0.900), quick fp32 (0.898) and " in remarks
    assert "Within 4 ms and 0.02 MB, quick int8" in told(choice, Limits(budget_ms=4, max_mb=0.02))[0]
    assert "quick int8 is the fastest with accuracy" in told(choice, Limits(min_score=0.85))[0]
    assert told(choice, Limits(budget_ms=1))[0] == (
        "Within 1 ms, there is nothing: the best score is 0.910, the fastest takes 2.00 ms, the smallest has 0.0144 MB."
    )


def test_noisy_times_make_nothing_faster(tmp_path: Path) -> None:
    told_of = student(0.89, 2.0)
    noisy = (*told_of.rows[:4], replace(told_of.rows[4], latency=latency(2.0, noisy=True)))
    choice = compare.compare([bundle(tmp_path / "a", replace(told_of, rows=noisy))])
    assert compare.pick(choice, FREE).thrifty is None


def test_the_pick_that_no_baseline_should_reach(tmp_path: Path) -> None:
    _, remarks = told(compare.compare([bundle(tmp_path / "poor", student(0.70, 3.0))]))
    assert "poor fp32 is no better than the baseline bag of words (0.710 against 0.800)." in remarks


def test_two_shares_are_apart_as_newcombe_has_it() -> None:
    # Newcombe 1998, Table II, method 10: 56/70 and 48/80 have the interval 0.0524 to 0.3339.
    assert differ_significantly("accuracy", 56 / 70, 48 / 70, 70) is False
    assert differ_significantly("accuracy", 0.9, 0.8, 872) is True
    assert differ_significantly("accuracy", 0.9, 0.89, 872) is False
    assert differ_significantly("accuracy", 0.9, 0.89, 100_000) is True
    assert differ_significantly("f1", 0.9, 0.2, 872) is None
    assert differ_significantly("f1", 0.9, 0.9, 872) is False


def test_a_metric_without_an_interval_is_said_to_have_none(tmp_path: Path) -> None:
    task = replace(TASK, metric="f1")
    _, remarks = told(compare.compare([bundle(tmp_path / "a", report(metric="f1"), task=task)]))
    assert "How far apart two values of F1 must be on 872 rows is not known from them alone." in remarks


def test_a_least_score_that_none_can_have_is_refused(three: list[Path]) -> None:
    found = run("report", str(three[0]), "--min-score", "95")
    assert (found.code, found.out) == (2, "")
    assert "0.95" in found.err
    for words in (("--budget-ms", "-1"), ("--max-mb", "-1")):
        assert run("report", str(three[0]), *words).code == 2


def test_a_pick_that_has_lost_a_class_is_said_to(tmp_path: Path) -> None:
    lossy = with_classes(student(0.90, 3.0))
    choice = compare.compare([bundle(tmp_path / "a", lossy)])
    fp32, int8 = (next(one for one in choice.candidates if one.precision == which) for which in ("fp32", "int8"))
    assert ([one.label for one in int8.fallen], fp32.fallen) == (["rare"], ())
    plain = terminal.choice_values(choice, Limits(max_mb=0.02), compare.pick(choice, Limits(max_mb=0.02)))
    assert "rare" in " ".join(plain["remarks"])
    (found,) = (one for one in plain["candidates"] if one["name"] == "a int8")
    assert found["macro_f1"] == pytest.approx(0.45)
    assert [(one["label"], one["support"]) for one in found["classes"]] == [("often", 100), ("rare", 9)]
    assert [one["label"] for one in found["fallen"]] == ["rare"]
    certified = replace(lossy, certificates=(certificate(0.9, classes=(ClassChange("only", 1.0, 0.0, 1),)),))
    again = compare.compare([bundle(tmp_path / "b", certified)])
    int8 = next(one for one in again.candidates if one.precision == "int8")
    assert {one.label for one in int8.fallen} == {"rare", "only"}


def test_bundles_of_different_tasks_are_refused(tmp_path: Path) -> None:
    one = bundle(tmp_path / "a", student(0.9, 3.0))
    for index, change in enumerate(({"labels": ("no", "yes")}, {"metric": "f1"}, {"text": ("a", "b")})):
        other = bundle(tmp_path / f"other{index}", student(0.9, 3.0), task=replace(TASK, **change))
        with pytest.raises(
            CompressError, match=r"do not do the same task.*a: classification \(negative, positive\) by"
        ):
            compare.compare([one, other])


def test_scores_of_other_rows_are_shown_and_not_compared(tmp_path: Path, three: list[Path]) -> None:
    other = bundle(tmp_path / "other", student(0.99, 1.0, split="test", split_rows=1821))
    choice = compare.compare([*three, other])
    assert choice.basis is not None and (choice.basis.split, choice.basis.rows) == ("validation", 872)
    assert picked(choice) == "good fp32"
    assert "other int8 and other fp32 on other rows (sst2, test split, 1,821 rows)" in told(choice)[1]


def test_what_a_report_says_is_of_the_file_whose_digest_it_names_whatever_the_dates(tmp_path: Path) -> None:
    proof = certificate(0.888, rows=500, split="test", date="2026-12-31T00:00:00+00:00")
    choice = compare.compare([bundle(tmp_path / "a", student(0.90, 3.0, certificates=(proof,)))])
    int8 = next(one for one in choice.candidates if one.precision == "int8")
    assert choice.basis is not None and choice.basis.split == "validation"
    assert (choice.score(int8), int8.median_ms(choice.view), int8.certified) == (0.9, 3.0, True)


def test_a_file_made_anew_has_its_certificates_score_and_none_of_the_old_files_times(tmp_path: Path) -> None:
    told = student(0.80, 3.0, certificates=(certificate(0.888), certificate(0.1, sha256=OTHER, device="browser")))
    told = replace(told, rows=(*told.rows[:4], replace(told.rows[4], sha256=OTHER)))
    choice = compare.compare([bundle(tmp_path / "a", told)])
    int8 = next(one for one in choice.candidates if one.precision == "int8")
    assert (choice.score(int8), int8.times, int8.certified) == (0.888, {}, True)
    assert [one.device for one in int8.certificates] == ["local"], "the other is of another file"


def test_a_result_is_of_the_file_whose_digest_it_names(tmp_path: Path, three: list[Path]) -> None:
    digests = {"a:int8": digest(three[0], "int8"), "quick:int8": OTHER, "b:int8": digest(three[1], "fp32")}
    result = bench(tmp_path / "b.json", dict.fromkeys(digests, 5.0), sha256=digests)
    choice = compare.compare([*three, result], at="local")
    assert {one.name for one in timed(choice)} == {"good int8", "quick fp32"}  # type: ignore[arg-type]
    assert [one.rpartition(": ")[2] for one in choice.unmatched] == ["quick:int8"]


def test_a_file_is_as_good_as_on_the_device_where_it_does_worst(tmp_path: Path) -> None:
    proofs = (certificate(0.888), certificate(0.868, certified=False, device="browser"))
    choice = compare.compare([bundle(tmp_path / "a", student(0.90, 3.0, certificates=proofs))])
    int8 = next(one for one in choice.candidates if one.precision == "int8")
    assert choice.score(int8) == 0.868
    assert int8.certified is False
    said, remarks = told(choice, Limits(max_mb=0.02))
    assert "a int8 scores best" in said
    assert "a int8 is not certified: the drop of 0.020 is more than 0.005." in remarks


def test_an_fp32_file_with_a_certificate_of_its_own_is_not_what_the_others_began_from(tmp_path: Path) -> None:
    # a trimmed bundle: both files were compared with the bundle it was trimmed from
    proofs = tuple(
        certificate(after, before=0.89, artefact=FILES[which], exact_sha256=OTHER) for which, after in PROVED
    )
    choice = compare.compare([bundle(tmp_path / "a", report(rows=ROWS[:3], certificates=proofs))])
    assert {one.precision: choice.score(one) for one in choice.candidates} == {"fp32": 0.886, "int8": 0.88}
    assert choice.drop(choice.candidates[1]) == pytest.approx(0.006)


def test_a_bundle_that_was_only_certified_is_compared_by_its_certificates(tmp_path: Path) -> None:
    empty = report(rows=(), recipe="", teacher="", data="", split="", split_rows=0, curves={})
    choice = compare.compare([bundle(tmp_path / "a", replace(empty, certificates=(certificate(0.885),)))])
    assert [(one.name, choice.score(one)) for one in choice.candidates] == [("a fp32", 0.89), ("a int8", 0.885)]
    assert "nothing was timed" in told(choice)[1]


def test_bundles_without_any_report_have_sizes_and_no_pick(tmp_path: Path) -> None:
    choice = compare.compare([bundle(tmp_path / "a", None)])
    assert picked(choice) is None
    said, remarks = told(choice)
    assert said == "No candidate has a score."
    assert "a int8 and a fp32 without a score" in remarks


def test_of_two_results_of_a_device_the_later_counts_and_processors_are_kept_apart(
    tmp_path: Path, three: list[Path]
) -> None:
    new = bench(tmp_path / "new.json", {"good:int8": 5.0})
    old = bench(tmp_path / "old.json", {"good:int8": 9.0, "quick:int8": 9.0}, date="2026-11-21T00:00:00+00:00")
    other = bench(tmp_path / "other.json", {"good:int8": 1.0}, machine={"cpu": "another"})
    choice = compare.compare([*three, new, old], at="local")
    times = {one.name: one.median_ms(choice.view) for one in choice.candidates}
    assert (times["good int8"], times["quick int8"]) == (5.0, 9.0)
    apart_now = compare.compare([*three, new, old, other])
    assert [device.name for device in apart_now.devices] == ["local, invented", "local, another", OWN]


def test_latency_is_read_where_most_candidates_were_timed_or_where_it_is_asked(
    tmp_path: Path, three: list[Path]
) -> None:
    results = [
        bench(tmp_path / "b.json", {"good:int8": 40.0}, device="browser"),
        bench(
            tmp_path / "l.json",
            {f"{name}:{file}": 3.0 for name in ("good", "quick", "poor") for file in ("int8", "fp32")},
        ),
    ]
    assert compare.compare([*three, *results]).view == View("local", compare.compare(three).view.setting)  # type: ignore[union-attr]
    assert compare.compare([*three, *results], at="Browser").view.device == "browser"  # type: ignore[union-attr]
    assert compare.compare([*three, *results], at="32 tokens").view.setting.seq == 32  # type: ignore[union-attr]
    with pytest.raises(
        CompressError, match=r"--at brwser: brwser: no latency was measured there. Did you mean 'browser'"
    ):
        compare.compare([*three, *results], at="brwser")
    with pytest.raises(CompressError, match="but not together"):
        compare.compare([*three, *results], at="browser, 32 tokens")


def test_own_races_are_said_not_to_be_one_and_the_teacher_shows_how_far_apart(tmp_path: Path) -> None:
    slow = student(0.8, 3.0)
    rows = (*slow.rows[:2], replace(slow.rows[2], latency=student(0.8, 30.0).rows[4].latency), *slow.rows[3:])
    paths = [bundle(tmp_path / "a", student(0.9, 3.0)), bundle(tmp_path / "b", replace(slow, rows=rows))]
    remarks = told(compare.compare(paths))[1]
    assert "not raced together" in remarks and "the same teacher took 15.0 to 30.0 ms in them" in remarks
    one_race = bench(tmp_path / "l.json", {f"{name}:{file}": 3.0 for name in "ab" for file in ("int8", "fp32")})
    assert "raced" not in told(compare.compare([*paths, one_race]))[1]


def test_noise_and_what_was_not_timed_are_said(tmp_path: Path, three: list[Path]) -> None:
    path = bench(tmp_path / "b.json", {"good:int8": 5.0, "quick:int8": 2.0})
    results = json.loads(path.read_text())
    results["latencies"][0]["noisy"] = True
    results["latencies"][1] |= {"other_load": 1.3, "busy": "other processes kept 1.3 of 2 CPUs busy"}
    path.write_text(json.dumps(results))
    choice = compare.compare([*three, path], at="local")
    remarks = told(choice)[1]
    assert "good int8 changed between the two passes (noisy, ~)" in remarks
    assert "1.3 of 2 CPUs busy" in remarks
    plain = terminal.choice_values(choice, FREE, compare.pick(choice, FREE))
    loads = {one["name"]: [each["other_load"] for each in one["latency"]] for one in plain["candidates"]}
    assert 1.3 in loads["quick int8"]
    assert "good fp32, quick fp32, poor fp32 and 1 more not timed at local, 1 thread, batch 1, 128 tokens" in remarks


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"latencies": [{"name": "a"}]}, "latencies.0.setting"),
        (
            {"sustained": [{"name": "a:int8", "setting": {}, "minutes": [1.0, -1.0], "temperatures": [1, 2]}]},
            "sustained.0",
        ),
        ({"sustained": [{"name": "a:int8", "setting": {}, "minutes": [1.0], "temperatures": []}]}, "sustained.0"),
        ({"sustained": [{"name": "a:int8", "setting": {"seq": 0}, "minutes": [], "temperatures": []}]}, "seq is 0"),
    ],
)
def test_a_result_file_is_read_strictly(
    tmp_path: Path, three: list[Path], change: dict[str, object], said: str
) -> None:
    path = bench(tmp_path / "b.json", {"good:int8": 5.0}, **change)
    with pytest.raises(CompressError, match=f"(?s)b.json.*{said}"):
        compare.compare([*three, path])


@pytest.mark.parametrize("time", ["NaN", "-1.0"])
def test_times_that_no_clock_shows_are_refused(tmp_path: Path, three: list[Path], time: str) -> None:
    path = bench(tmp_path / "b.json", {"good:int8": 5.0})
    path.write_text(path.read_text().replace('"p50_ms": 5.0', f'"p50_ms": {time}'))
    with pytest.raises(CompressError, match=r"b.json: latencies.0.p50_ms: .* is not a time"):
        compare.compare([*three, path])


def test_what_is_no_input_is_refused(tmp_path: Path, three: list[Path]) -> None:
    (tmp_path / "empty").mkdir()
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    (unfinished / "run.json").write_text('{"command": "compress distill --data x"}')
    (tmp_path / "text.json").write_text("{")
    for path, said in (
        (tmp_path / "none", "not there"),
        (tmp_path / "empty", "no bundle in it"),
        (unfinished, "The run has not finished. Continue with: compress distill --data x --out .* --resume"),
        (tmp_path / "text.json", "not a result"),
    ):
        with pytest.raises(CompressError, match=said):
            compare.compare([*three, path])
    with pytest.raises(CompressError, match="no run and no bundle was given"):
        compare.compare([bench(tmp_path / "b.json", {"a:int8": 1.0})])
    broken = bundle(tmp_path / "broken", student(0.9, 1.0))
    (broken / "bundle" / "report.json").write_text('{"title": 3}')
    rewrite_manifest(broken)
    with pytest.raises(CompressError, match=r"broken.*report.json: not a report"):
        compare.compare([broken])


def test_json_has_every_figure_and_no_nan(three: list[Path], tmp_path: Path) -> None:
    choice = compare.compare([*three, bundle(tmp_path / "bare", None)])
    chosen = compare.pick(choice, Limits(max_mb=0.02))
    text = json.dumps(terminal.choice_values(choice, Limits(max_mb=0.02), chosen), allow_nan=False)
    plain = json.loads(text)
    assert plain["pick"] == "good int8"
    assert plain["rows"] == {"data": "sst2", "split": "validation", "rows": 872}
    assert plain["view"] == {"device": OWN, "threads": 1, "batch": 1, "seq": 128}
    by_name = {one["name"]: one for one in plain["candidates"]}
    assert len(by_name) == 8
    assert by_name["quick int8"]["front"] is True and by_name["poor int8"]["front"] is False
    assert {each["seq"] for each in by_name["good int8"]["latency"]} == {128, 32}
    assert by_name["bare int8"]["score"] is None


def test_the_command_prints_a_table_the_pick_and_writes_a_page(three: list[Path], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    found = run("report", *map(str, three), "--budget-ms", "4", "--html", str(page))
    assert found.code == 0
    text = " ".join(found.out.replace(GAP, " ").split())
    assert "Within 4 ms, quick fp32 scores best: accuracy 0.898 at 4.00 ms" in text
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    quiet = run("report", *map(str, three), "--json", "--html", str(page))
    assert json.loads(quiet.out)["pick"] == "good fp32"
    assert json.loads(quiet.out)["schema"] == "compress.report/1"
    assert "page:" in quiet.err


@pytest.mark.parametrize("there", [True, False])
def test_the_page_is_opened_where_there_is_a_browser(
    three: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: bool(opened.append(address)) or there)
    found = run("report", str(three[0]), "--open", "--html", str(tmp_path / "page.html"))
    assert opened == [(tmp_path / "page.html").as_uri()]
    assert ("open the page yourself" in found.out) is not there
    monkeypatch.setattr("tempfile.mkdtemp", lambda prefix: str(tmp_path))
    assert run("report", str(three[0]), "--open").code == 0
    assert opened[1:] == [(tmp_path / "choice.html").as_uri()]


def test_the_command_refuses_and_leaves_nothing(three: list[Path], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    found = run("report", str(three[0]), str(tmp_path / "none"), "--html", str(page))
    assert (found.code, found.out) == (2, "")
    assert "not there" in found.err
    assert run("report", str(three[0]), "--html", str(tmp_path / "no" / "page.html")).code == 2
    assert [path for path in tmp_path.rglob("*") if "partial" in path.name or path.suffix == ".html"] == []


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_fits_and_says_what_is_left_out(three: list[Path], tmp_path: Path, width: int) -> None:
    import io

    from rich.console import Console

    long = bundle(tmp_path / ("[red]" + "x" * 100), proved())
    choice = compare.compare([*three, long])
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(terminal.to_terminal(tables.choice_table(choice, Pick(choice.candidates[0])), width, more="--wide"))
    text = console.export_text()
    assert max(len(line) for line in text.splitlines()) <= width
    assert "[red]" in text
    assert ("more columns: --wide" in " ".join(text.split())) is (width <= 80)
    assert LATER not in text
