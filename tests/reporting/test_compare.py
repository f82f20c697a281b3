"""Comparing bundles: what is read, what is compared, what is refused, and which file is picked."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from compress.errors import CompressError
from compress.evaluation.statistics import differ_significantly
from compress.exporters import manifest as manifests
from compress.exporters.manifest import BUNDLE_FILES, Manifest
from compress.records.class_scores import ClassChange
from compress.records.run_report import Report
from compress.reporting import tables, terminal
from compress.reporting.compare import OWN, ComparedModel, Comparison, Limits, Pick, View, compare, pick
from compress.reporting.format import GAP
from compress.reporting.remarks import choice_headline, choice_remarks
from tests.command import run
from tests.reporting.bundles import LATER, OTHER, all_files, bench, bundle, certificate, digest, proved, student
from tests.reporting.sample import ROWS, latency, report, with_classes

FREE = Limits()


def picked(comparison: Comparison, **limits: float) -> str | None:
    candidate = pick(comparison, Limits(**limits)).candidate
    return candidate.name if candidate else None


def compare_one(folder: Path, report: Report | None, **options: Any) -> Comparison:
    return compare([bundle(folder, report, **options)])


def by_name(comparison: Comparison) -> dict[str, ComparedModel]:
    return {one.name: one for one in comparison.candidates}


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """`good` scores best and is slow; `quick` is nearly as good; `poor` is slower and worse than `quick`."""
    folder = tmp_path_factory.mktemp("three")
    return [
        bundle(folder / "good", student(0.90, 6.0)),
        bundle(folder / "quick", student(0.888, 2.0)),
        bundle(folder / "poor", student(0.70, 3.0)),
    ]


@pytest.fixture(scope="module")
def choice(three: list[Path]) -> Comparison:
    return compare(three)


def test_bundles_are_named_by_their_folders_and_listed_once(tmp_path: Path) -> None:
    one = bundle(tmp_path / "a" / "run", student(0.9, 3.0))
    two = bundle(tmp_path / "b" / "run", student(0.8, 3.0))
    alone = bundle(tmp_path / "shipped", student(0.7, 3.0), inner=False)
    comparison = compare([one, one / "bundle", two, alone])
    assert [each.name for each in comparison.bundles] == ["a/run", "b/run", "shipped"]
    assert compare([one, alone]).candidates[0].name == "run fp32"


def test_candidates_have_the_figures_of_their_reports(choice: Comparison) -> None:
    first = choice.candidates[0]
    assert (first.name, choice.score(first), first.size_mb) == ("good fp32", pytest.approx(0.91), 0.057)
    assert choice.view is not None and choice.view.device == OWN
    assert first.median_ms(choice.view) == 12.0
    assert choice.drop(choice.candidates[1]) == pytest.approx(0.01)
    assert choice.drop(first) is None
    assert [one.name for one in choice.teachers] == ["teacher"]
    assert choice.baselines == (("majority", 0.5), ("bag of words", 0.8))


def test_the_front_is_what_nothing_beats_for_less(choice: Comparison, tmp_path: Path) -> None:
    by_time = choice.front(lambda one: one.median_ms(choice.view))
    assert [one.name for one in by_time] == ["quick int8", "quick fp32", "good int8", "good fp32"]
    assert [one.name for one in choice.front(lambda one: one.size_mb)] == ["good int8", "good fp32"]
    assert choice.front(lambda one: None) == []
    equal = compare([bundle(tmp_path / name, student(0.9, 3.0)) for name in ("a", "b")])
    front = equal.front(lambda one: one.median_ms(equal.view))
    assert [one.name for one in front] == ["a int8", "b int8", "a fp32", "b fp32"]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, "quick int8"),  # of 872 rows, 0.91 cannot be told from 0.888
        ({"budget_ms": 11.9}, "quick int8"),
        ({"budget_ms": 2.0}, "quick int8"),
        ({"max_mb": 0.02}, "quick int8"),
        ({"budget_ms": 1.9}, None),
        ({"max_mb": 0.02, "budget_ms": 5.0}, "quick int8"),
        ({"min_score": 0.7}, "quick int8"),
        ({"min_score": 0.895}, "quick fp32"),
        ({"min_score": 0.95}, None),
    ],
)
def test_the_pick_is_the_cheapest_of_the_best_or_with_a_score(
    choice: Comparison, limits: dict[str, float], expected: str | None
) -> None:
    assert picked(choice, **limits) == expected


def test_of_equal_scores_the_faster_is_picked_then_the_smaller(tmp_path: Path) -> None:
    paths = [bundle(tmp_path / "slow", student(0.9, 5.0)), bundle(tmp_path / "fast", student(0.9, 3.0))]
    assert picked(compare(paths)) == "fast int8"
    untimed = report(rows=(replace(ROWS[4], latency=None),))
    assert picked(compare([bundle(tmp_path / f"u{mb}", untimed, sizes={"int8": mb}) for mb in (9, 3)])) == "u3 int8"


def test_a_noisy_file_is_not_called_faster(tmp_path: Path) -> None:
    quiet = student(0.89, 2.0)
    rows = (*quiet.rows[:4], replace(quiet.rows[4], latency=latency(2.0, noisy=True)))
    assert picked(compare_one(tmp_path / "a", replace(quiet, rows=rows))) == "a fp32"


def test_noisy_times_and_uncertified_files_do_not_decide_who_is_fastest(tmp_path: Path) -> None:
    sound = student(0.89, 2.0)
    rows = (*sound.rows[:4], replace(sound.rows[4], latency=latency(1.0, noisy=True)))
    assert picked(compare_one(tmp_path / "noisy", replace(sound, rows=rows)), min_score=0.8) == "noisy fp32"
    unproved = replace(sound, certificates=(certificate(0.87, certified=False),))
    assert picked(compare_one(tmp_path / "unproved", unproved), min_score=0.8) == "unproved fp32"
    assert picked(compare_one(tmp_path / "sound", sound), min_score=0.8) == "sound int8"


def test_engines_and_cores_are_devices_of_their_own(three: list[Path], tmp_path: Path) -> None:
    phone = {"device": "browser", "runs": three}
    both, one = {"good:int8": 8.0, "quick:int8": 4.0}, {"good:int8": 2.0}
    engines = {name: {"cpu": "a", "runtime": f"onnxruntime-web 1.30.0, {name}"} for name in ("WebAssembly", "WebGPU")}
    paths = [bench(tmp_path / "wasm.json", both, machine=engines["WebAssembly"], **phone)]
    paths.append(bench(tmp_path / "gpu.json", one, machine=engines["WebGPU"], date="2026-12-01T00:00:00", **phone))
    slow = bench(tmp_path / "cores.json", one, machine=engines["WebGPU"], **phone)
    told = json.loads(slow.read_text())
    told["latencies"][0]["affinity"] = "0-3"
    slow.write_text(json.dumps(told))
    comparison = compare([*three, *paths], at="browser, WebAssembly")
    assert [device.name for device in comparison.devices[:2]] == ["browser, WebAssembly", "browser, WebGPU"]
    named = by_name(comparison)
    assert [named[f"{name} int8"].median_ms(comparison.view) for name in ("good", "quick")] == [8.0, 4.0]
    cores = compare([*three, paths[1], slow]).devices[:2]
    assert [device.name for device in cores] == ["browser, CPUs 0-3", "browser, any CPU"]


def test_the_best_of_negative_scores_is_the_highest(tmp_path: Path) -> None:
    comparison = compare_one(tmp_path / "a", student(-0.02, 2.0))
    limits = Limits(min_score=0.9)
    assert choice_headline(comparison, limits, pick(comparison, limits)).startswith(
        "With accuracy of at least 0.900, no file qualifies: the best score is \u22120.010"
    )


def test_a_file_that_lost_classes_takes_no_others_place(tmp_path: Path) -> None:
    comparison = compare_one(tmp_path / "a", student(0.9, 3.0))
    cheap = next(one for one in comparison.candidates if one.name == "a int8")
    assert pick(comparison, FREE).candidate is cheap
    lossy = compare_one(tmp_path / "b", with_classes(student(0.9, 3.0)))
    assert picked(lossy) == "b fp32"


def test_newcombes_interval_tells_two_shares_apart() -> None:
    # Newcombe 1998, Table II, method 10: 56/70 and 48/80 have the interval 0.0524 to 0.3339.
    assert differ_significantly(56 / 70, 48 / 70, 70) is False
    assert differ_significantly(0.9, 0.8, 872) is True
    assert differ_significantly(0.9, 0.89, 872) is False
    assert differ_significantly(0.9, 0.89, 100_000) is True
    assert differ_significantly(0.9, 0.2, 0) is None
    assert differ_significantly(0.9, 0.9, 872) is False


def test_lost_classes_are_named_and_listed_in_json(tmp_path: Path) -> None:
    lossy = with_classes(student(0.90, 3.0))
    comparison = compare_one(tmp_path / "a", lossy)
    models = by_name(comparison)
    assert ([one.label for one in models["a int8"].fallen], models["a fp32"].fallen) == (["rare"], ())
    limits = Limits(max_mb=0.02)
    values = terminal.choice_values(comparison, limits, pick(comparison, limits))
    assert "rare" in " ".join(values["remarks"])
    (int8,) = (one for one in values["candidates"] if one["name"] == "a int8")
    assert int8["macro_f1"] == pytest.approx(0.45)
    assert [(one["label"], one["support"]) for one in int8["classes"]] == [("often", 100), ("rare", 9)]
    assert [one["label"] for one in int8["fallen"]] == ["rare"]
    proof = certificate(0.9, classes=(ClassChange("only", 1.0, 0.0, 1),))
    certified = compare_one(tmp_path / "b", replace(lossy, certificates=(proof,)))
    assert {one.label for one in by_name(certified)["b int8"].fallen} == {"rare", "only"}


def test_scores_of_other_rows_are_shown_and_not_compared(tmp_path: Path, three: list[Path]) -> None:
    other = bundle(tmp_path / "other", student(0.99, 1.0, split="test", split_rows=1821))
    comparison = compare([*three, other])
    assert comparison.basis is not None and (comparison.basis.split, comparison.basis.rows) == ("validation", 872)
    assert picked(comparison) == "quick int8"


def test_evidence_counts_for_the_file_whose_digest_it_names(tmp_path: Path) -> None:
    proof = certificate(0.888, rows=500, split="test", date="2026-12-31T00:00:00+00:00")
    comparison = compare_one(tmp_path / "a", student(0.90, 3.0, certificates=(proof,)))
    int8 = by_name(comparison)["a int8"]
    assert comparison.basis is not None and comparison.basis.split == "validation"
    assert (comparison.score(int8), int8.median_ms(comparison.view), int8.certified) == (0.9, 3.0, True)
    changed = student(0.80, 3.0, certificates=(certificate(0.888), certificate(0.1, sha256=OTHER, device="browser")))
    changed = replace(changed, rows=(*changed.rows[:4], replace(changed.rows[4], sha256=OTHER)))
    comparison = compare_one(tmp_path / "b", changed)
    int8 = by_name(comparison)["b int8"]
    assert (comparison.score(int8), int8.times, int8.certified) == (0.888, {}, True)
    assert [one.device for one in int8.certificates] == ["local"], "the other is of another file"


def test_a_result_counts_for_the_file_whose_digest_it_names(tmp_path: Path, three: list[Path]) -> None:
    digests = {"a:int8": digest(three[0], "int8"), "quick:int8": OTHER, "b:int8": digest(three[1], "fp32")}
    result = bench(tmp_path / "b.json", dict.fromkeys(digests, 5.0), sha256=digests)
    comparison = compare([*three, result], at="local")
    assert {one.name for one in comparison.candidates if one.latency(comparison.view)} == {"good int8", "quick fp32"}
    assert [one.rpartition(": ")[2] for one in comparison.unmatched] == ["quick:int8"]


def test_the_device_with_the_lowest_score_counts(tmp_path: Path) -> None:
    proofs = (certificate(0.888), certificate(0.868, certified=False, device="browser"))
    comparison = compare_one(tmp_path / "a", student(0.90, 3.0, certificates=proofs))
    int8 = by_name(comparison)["a int8"]
    assert (comparison.score(int8), int8.certified) == (0.868, False)


def test_certificates_alone_give_scores(tmp_path: Path) -> None:
    empty = report(rows=(), recipe="", teacher="", data="", split="", split_rows=0, curves={})
    comparison = compare_one(tmp_path / "a", replace(empty, certificates=(certificate(0.885),)))
    assert [(one.name, comparison.score(one)) for one in comparison.candidates] == [("a fp32", 0.89), ("a int8", 0.885)]
    # a trimmed bundle: both files were compared with the bundle it was trimmed from
    proofs = tuple(
        certificate(after, artefact=BUNDLE_FILES[which], exact_sha256=OTHER)  # type: ignore[index]
        for which, after in (("fp32", 0.886), ("int8", 0.88))
    )
    comparison = compare_one(tmp_path / "b", report(rows=ROWS[:3], certificates=proofs))
    assert {one.precision: comparison.score(one) for one in comparison.candidates} == {"fp32": 0.886, "int8": 0.88}
    assert comparison.drop(comparison.candidates[1]) == pytest.approx(0.006)


def test_the_later_result_counts_and_processors_stay_apart(tmp_path: Path, three: list[Path]) -> None:
    new = bench(tmp_path / "new.json", {"good:int8": 5.0}, runs=three)
    early = "2026-11-21T00:00:00+00:00"
    old = bench(tmp_path / "old.json", {"good:int8": 9.0, "quick:int8": 9.0}, runs=three, date=early)
    other = bench(tmp_path / "other.json", {"good:int8": 1.0}, runs=three, machine={"cpu": "another"})
    comparison = compare([*three, new, old], at="local")
    times = {name: one.median_ms(comparison.view) for name, one in by_name(comparison).items()}
    assert (times["good int8"], times["quick int8"]) == (5.0, 9.0)
    devices = compare([*three, new, old, other]).devices
    assert [device.name for device in devices] == ["local, invented", "local, another", OWN]


def test_latency_is_read_at_the_commonest_view_or_the_requested_one(
    tmp_path: Path, three: list[Path], choice: Comparison
) -> None:
    paths = [
        *three,
        bench(tmp_path / "b.json", {"good:int8": 40.0}, runs=three, device="browser"),
        bench(tmp_path / "l.json", all_files(three), runs=three),
    ]

    def view(at: str | None = None) -> View:
        found = compare(paths, at=at).view
        assert found is not None
        return found

    assert choice.view is not None
    assert view() == View("local", choice.view.setting)
    assert view("Browser").device == "browser"
    assert view("32 tokens").setting.seq == 32


def test_noise_and_missing_times_are_remarked_on(tmp_path: Path, three: list[Path]) -> None:
    path = bench(tmp_path / "b.json", {"good:int8": 5.0, "quick:int8": 2.0}, runs=three)
    results = json.loads(path.read_text())
    results["latencies"][0]["noisy"] = True
    results["latencies"][1] |= {"other_load": 1.3, "busy": "other processes kept 1.3 of 2 CPUs busy"}
    path.write_text(json.dumps(results))
    comparison = compare([*three, path], at="local")
    remarks = " ".join(choice_remarks(comparison, pick(comparison, FREE)))
    assert "good int8 changed" in remarks and "1.3 of 2 CPUs busy" in remarks and "not timed at local" in remarks
    values = terminal.choice_values(comparison, FREE, pick(comparison, FREE))
    loads = {one["name"]: [each["other_load"] for each in one["latency"]] for one in values["candidates"]}
    assert 1.3 in loads["quick int8"]


LOAD = {"name": "a:int8", "setting": {}, "minutes": [1.0], "temperatures": [None]}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"latencies": [{"name": "a"}]}, "latencies.0.setting"),
        ({"sustained": [{**LOAD, "minutes": [1.0, -1.0], "temperatures": [1, 2]}]}, "sustained.0"),
        ({"sustained": [{**LOAD, "temperatures": []}]}, "sustained.0"),
        ({"sustained": [{**LOAD, "setting": {"seq": 0}}]}, "seq is 0"),
    ],
)
def test_a_result_file_is_read_strictly(tmp_path: Path, three: list[Path], change: dict[str, Any], field: str) -> None:
    path = bench(tmp_path / "b.json", {"good:int8": 5.0}, runs=three, **change)
    with pytest.raises(CompressError, match=f"(?s)b.json.*{field}"):
        compare([three[0], path])


@pytest.mark.parametrize("time", ["NaN", "-1.0"])
def test_impossible_times_are_refused(tmp_path: Path, three: list[Path], time: str) -> None:
    path = bench(tmp_path / "b.json", {"good:int8": 5.0}, runs=three)
    path.write_text(path.read_text().replace('"p50_ms": 5.0', f'"p50_ms": {time}'))
    with pytest.raises(CompressError, match=r"b.json: latencies.0.p50_ms: .* is not a time"):
        compare([three[0], path])


def test_a_report_is_read_strictly(tmp_path: Path) -> None:
    broken = bundle(tmp_path / "broken", student(0.9, 1.0)) / "bundle"
    (broken / "report.json").write_text('{"title": 3}')
    replace(Manifest.read(broken), files=manifests.stamp_files(broken)).write(broken)
    with pytest.raises(CompressError, match=r"broken.*report.json: not a report"):
        compare([broken])


def test_json_has_every_figure_and_no_nan(three: list[Path], tmp_path: Path) -> None:
    comparison, limits = compare([*three, bundle(tmp_path / "bare", None)]), Limits(max_mb=0.02)
    values = terminal.choice_values(comparison, limits, pick(comparison, limits))
    values = json.loads(json.dumps(values, allow_nan=False))
    assert values["pick"] == "quick int8"
    assert values["rows"] == {"data": "sst2", "split": "validation", "rows": 872}
    assert values["view"] == {"device": OWN, "threads": 1, "batch": 1, "seq": 128}
    candidates = {one["name"]: one for one in values["candidates"]}
    assert len(candidates) == 8
    assert candidates["quick int8"]["front"] is True and candidates["poor int8"]["front"] is False
    assert {each["seq"] for each in candidates["good int8"]["latency"]} == {128, 32}
    assert candidates["bare int8"]["score"] is None


def test_the_command_prints_a_table_and_the_pick_and_writes_a_page(three: list[Path], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = run("report", *map(str, three), "--budget-ms", "4", "--html", str(page))
    assert done.code == 0
    text = " ".join(done.out.replace(GAP, " ").split())
    assert "Within 4 ms, quick int8 costs the least of the files that 872 rows cannot tell from the best" in text
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    done = run("report", *map(str, three), "--json", "--html", str(page))
    values = json.loads(done.out)
    assert (values["pick"], values["schema"]) == ("quick int8", "compress.report/1")
    assert "page:" in done.err


@pytest.mark.parametrize("there", [True, False])
def test_the_page_is_opened_where_there_is_a_browser(
    three: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: bool(opened.append(address)) or there)
    done = run("report", str(three[0]), "--open", "--html", str(tmp_path / "page.html"))
    assert opened == [(tmp_path / "page.html").as_uri()]
    assert ("open the page yourself" in done.out) is not there
    monkeypatch.setattr("tempfile.mkdtemp", lambda prefix: str(tmp_path))
    assert run("report", str(three[0]), "--open").code == 0
    assert opened[1:] == [(tmp_path / "choice.html").as_uri()]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("{tmp}/none", "--html", "{tmp}/page.html"), "not there"),
        (("--html", "{tmp}/no/page.html"), ""),
        (("--min-score", "95"), "0.95"),
        (("--budget-ms", "-1"), ""),
        (("--max-mb", "-1"), ""),
    ],
)
def test_the_command_refuses_and_writes_nothing(
    three: list[Path], tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    done = run("report", str(three[0]), *(word.format(tmp=tmp_path) for word in words))
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_fits_and_says_what_is_left_out(three: list[Path], tmp_path: Path, width: int) -> None:
    long = bundle(tmp_path / ("[red]" + "x" * 100), proved())
    comparison = compare([*three, long])
    table = tables.choice_table(comparison, Pick(comparison.candidates[0]))
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(terminal.to_terminal(table, width, more="--wide"))
    text = console.export_text()
    assert max(len(line) for line in text.splitlines()) <= width
    assert "[red]" in text
    assert ("more columns: --wide" in " ".join(text.split())) is (width <= 80)
    assert LATER not in text
