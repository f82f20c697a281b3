"""Whole searches from the command line: their results, interruptions, workers, and refusals."""

import errno
import io
import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import yaml
from rich.console import Console
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from compress.errors import SearchError
from compress.exporters.artifact import Bundle
from compress.jobs import trials
from compress.latency.model import LatencyTable
from compress.nas import record, worker
from compress.nas.config import SearchConfig
from compress.nas.finalists import shortlist
from compress.nas.study import close_study, join_study, open_study
from compress.records.search_report import SearchReport, load_report
from compress.reporting.format import magnitude
from tests import children, command, tiny, unshipped
from tests.damage import damaged
from tests.nas.shelved import PLAIN, Searched, export_once, weighing

pytestmark = pytest.mark.usefixtures("hastened")

BUDGET = ("--max-params", "15000")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Searched:
    return Searched.fill(tmp_path_factory.mktemp("shelf"))


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory, exports: Path) -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPRESS_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setattr("compress.benchmark.devices.open_device", weighing)
        export_once(patch, exports)
        unshipped.hasten(patch)
        yield patch


@pytest.fixture(autouse=True)
def _quickly(patched: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fine-tuned teachers are kept from test to test."""
    monkeypatch.setenv("COMPRESS_HOME", os.environ["COMPRESS_HOME"])


@pytest.fixture(scope="module")
def searched(shelf: Searched, patched: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a search of all of its space, 18 shapes, some of them outside the budget."""
    home = tmp_path_factory.mktemp("home of all")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPRESS_HOME", str(home))
        out = tmp_path_factory.mktemp("searched") / "study"
        told = command.run(*shelf.words(out, *BUDGET, "--set", "short.evaluate=1", trials="40"))
    assert told.code == 0, told.err
    assert "the space has no more than these 18 shapes" in told.out
    return out


@pytest.fixture(scope="module")
def found(searched: Path) -> SearchReport:
    return load_report(searched)


def test_every_shape_is_evaluated_once(found: SearchReport) -> None:
    keys = [tuple(sorted(point.choice.items())) for point in found.points if point.state != "duplicate"]
    assert len(keys) == len(set(keys)) == 18
    assert found.counts()["too slow"] > 0, "some have too many parameters"
    assert all(point.parameters is None or point.parameters > 15000 for point in found.points if not point.scores)
    assert found.front
    assert all((found.point(number).parameters or 0) <= 15000 for number in found.front)
    assert (found.budgets, found.objectives) == ({"parameters": 15000}, ("score", "latency"))


def test_the_report_is_complete(found: SearchReport) -> None:
    assert found.prediction is not None
    assert len(found.prediction.timings) == 5
    assert {*found.costs} >= {"measuring", "supernet", "trials", "short distillations", "final", "timing finalists"}
    climbed = [rung for rung in found.ladder if rung.what == "supernet"]
    assert len({rung.body_parameters for rung in climbed}) == 4
    assert len({rung.examples for rung in climbed}) >= 4
    assert {rung.what for rung in found.ladder} == {"supernet", "short", "final"}
    assert all(rung.flops > 0 and rung.examples > 0 for rung in found.ladder)
    assert (found.split, found.split_rows, found.train_rows) == ("validation", 40, 96)
    assert [anchor.name.rpartition(" ")[2] for anchor in found.anchors] == ["fp32"]
    assert found.teacher_ms is not None


@pytest.mark.gpu
def test_finalists_are_trained_and_measured_and_the_winner_ships(found: SearchReport) -> None:
    trained = [point for point in found.points if "short" in point.scores]
    assert len(trained) == 2
    assert all(found.measured_ms(point) for point in trained)
    assert found.winner is not None
    winner = found.point(found.winner)
    assert {*winner.scores} == {"subnet", "short", "final", "shipped"}
    loaded = load_plain(Path(str(winner.bundle)))
    config = loaded.config
    assert (config.num_hidden_layers, config.hidden_size) == (winner.choice["layers"], winner.choice["hidden"])
    assert sum(each.numel() for each in loaded.parameters()) == winner.parameters


def load_plain(folder: Path) -> Any:
    """Load a bundle with plain transformers, and check that it computes the same as the bundle's fp32 file."""
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        said = model(**tokenizer(["a good film"], return_tensors="pt")).logits
    other: Any
    (other,) = Bundle.load(folder).predict(["a good film"], precision="fp32")
    assert said.softmax(-1).max().item() == pytest.approx(max(other.scores.values()), abs=1e-4)
    return model


def test_search_yaml_is_complete(searched: Path) -> None:
    text = (searched / "search.yaml").read_text()
    again = SearchConfig.load(searched)
    assert again.to_yaml() == text
    assert again.budget.max_params == 15000
    assert yaml.safe_load(text)["space"]["supernet"]["schedule"] == "linear", "defaults too"


def test_the_page_and_the_front_are_shown(searched: Path, found: SearchReport) -> None:
    assert (searched / "search.html").read_text().startswith("<!doctype html>")
    told = command.run("search", "show", str(searched))
    assert told.code == 0
    rows = [line.split()[0] for line in told.out.splitlines() if line.split() and line.split()[0].isdigit()]
    assert {*map(str, found.front), str(found.winner)} <= {*rows}
    assert f"{found.teacher_score:.3f}" in told.out, "the teacher is in the table"
    pasted = rf"compress search show {re.escape(found.study)} \d+ --bundle student-\d+\n"
    assert re.search(pasted, told.out), "in one line, to be copied"
    assert json.loads(command.run("search", "show", str(searched), "--json").out)["front"] == list(found.front)


def test_the_nearest_is_named_where_no_trial_keeps_the_budgets(copied: Path, found: SearchReport) -> None:
    none = replace(found, budgets={"parameters": 10}, front=())
    with pytest.raises(SearchError, match=r"no trial keeps the budgets; .* or add --trials with --resume"):
        shortlist(none, 2)
    record.write_report(none, copied)
    told = command.run("search", "show", str(copied)).out
    least = min(one.parameters for one in found.points if one.parameters)
    assert "no trial keeps the budgets; the nearest is trial" in told
    assert f"parameters {magnitude(least)}, asked for 10.0" in told


def test_a_family_without_a_plan_has_no_supernet(shelf: Searched, tmp_path: Path) -> None:
    other = tiny.checkpoint(tmp_path / "other", tiny.model("xlnet", labels=2))
    out = tmp_path / "study"
    told = command.run(*shelf.words(out, "--gate", "warn", teacher=other))
    assert command.refused(told, out, "no slice plan for 'xlnet'")
    assert command.run(*shelf.words(out, "--gate", "warn", "--trials", "0")).code == 2, "the folder is as good as new"
    assert not {one.name for one in out.iterdir()} - {".lock", "run.json", "search.yaml", "costs.json"}


@pytest.fixture
def copied(searched: Path, tmp_path: Path) -> Path:
    """A copy of the search that a test may change."""
    return Path(shutil.copytree(searched, tmp_path / "study"))


@pytest.mark.slow
def test_any_trial_becomes_a_bundle_whose_card_names_its_training(
    copied: Path, found: SearchReport, tmp_path: Path
) -> None:
    other = next(point for point in found.points if point.state == "too slow")
    told = command.run("search", "show", str(copied), str(other.number), "--bundle", str(tmp_path / "b"))
    assert told.code == 0, told.err
    assert load_plain(tmp_path / "b").config.hidden_size == other.choice["hidden"]
    card = (tmp_path / "b" / "README.md").read_text()
    assert "Its only training was that of the supernet that contains it, stage `supernet`" in card
    after = load_report(copied)
    assert "shipped" in after.point(other.number).scores
    assert after.costs == found.costs, "what a search cost stays what it was"


@pytest.mark.slow
def test_a_damaged_short_distillation_is_trained_again(searched: Path, found: SearchReport, tmp_path: Path) -> None:
    other = next(point for point in found.points if "short" in point.scores and point.number != found.winner)
    made = []
    for name in ("whole", "damaged"):
        study = Path(shutil.copytree(searched, tmp_path / name))
        file = study / "students" / str(other.number) / "stages" / "short" / "model" / "model.safetensors"
        if name == "damaged":
            damaged(file, "bit")
        words = ("search", "show", str(study), str(other.number), "--train", "--bundle", str(tmp_path / f"{name}-b"))
        told = command.run(*words)
        assert told.code == 0, told.err
        assert (f"warning: {file.parent}" in told.out.replace("\n", "")) == (name == "damaged")
        made.append((tmp_path / f"{name}-b" / "model.safetensors").read_bytes())
        assert {"short", "final", "shipped"} <= {*load_report(study).point(other.number).scores}
    assert made[0] == made[1]
    assert "only training" not in (tmp_path / "whole-b" / "README.md").read_text()
    stages = yaml.safe_load((tmp_path / "whole-b" / "recipe.yaml").read_text())["stages"]
    assert [stage["distill"] for stage in stages] == ["supernet", "short", "final"]


def test_the_winners_bundle_is_copied(searched: Path, found: SearchReport, tmp_path: Path) -> None:
    told = command.run("search", "show", str(searched), str(found.winner), "--bundle", str(tmp_path / "b"))
    assert told.code == 0
    copied, made = (
        folder / "model.safetensors" for folder in (tmp_path / "b", Path(str(found.point(found.winner or 0).bundle)))
    )
    assert copied.read_bytes() == made.read_bytes()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["99", "--bundle", "B"], "no trial 99"),
        (["1"], "give both a trial and --bundle"),
        (["--bundle", "B"], "give both a trial and --bundle"),
    ],
)
def test_impossible_requests_to_show_are_refused(searched: Path, tmp_path: Path, words: list[str], said: str) -> None:
    words = [str(tmp_path / "b") if word == "B" else word for word in words]
    told = command.run("search", "show", str(searched), *words)
    assert (told.code, told.out) == (2, "")
    assert said in told.err


def test_another_folder_is_not_shown(tmp_path: Path) -> None:
    assert "has no search.json" in command.run("search", "show", str(tmp_path)).err
    told = command.run("search", "show", str(tmp_path), "1", "--bundle", str(tmp_path / "b"))
    assert "has no search.json" in told.err


def interrupting(monkeypatch: pytest.MonkeyPatch, name: str, after: int) -> Callable[[], None]:
    """A function that is interrupted when it has been called so often; how to mend it."""
    import importlib

    module, _, function = name.rpartition(":")
    owner: Any = importlib.import_module(module)
    *way, function = function.split(".")
    for part in way:
        owner = getattr(owner, part)
    whole, calls = getattr(owner, function), [0]

    def called(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] > after:
            raise KeyboardInterrupt
        return whole(*args, **kwargs)

    monkeypatch.setattr(owner, function, called)
    return lambda: monkeypatch.setattr(owner, function, whole)


def waits_in_its_supernet() -> None:
    """In the middle of training it, to be killed; students are measured by the sizes of their files."""
    from compress.benchmark import devices

    devices.open_device = weighing  # type: ignore[assignment]
    children.Waits("supernet", 9)()


PHASES = (
    ("compress.nas.costs:sample", 0),
    ("compress.nas.supernet:run_stage", 0),
    ("compress.training.stage:_save_result", 0),
    ("compress.nas.context:SupernetEvaluator.score", 2),
    ("compress.nas.context:SupernetEvaluator.score", 2),
    ("compress.nas.finalists:train_student", 1),
    ("compress.nas.finalists:Ship.run", 0),
)
"""Measuring, before the supernet, at its end, trials, the second short distillation, shipping."""


def test_a_search_interrupted_in_every_phase_continues(
    shelf: Searched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted, and once killed; when its trials are interrupted again, a worker runs the others."""
    out, done = tmp_path / "study", dict[Path, bytes]()
    for at, (name, after) in enumerate(PHASES):
        resumed = ["--resume"] if at and (out / "run.json").is_file() else []
        if name.endswith(":_save_result"):
            kill(shelf.words(out, *resumed), out)
        mend = interrupting(monkeypatch, name, after)
        told = command.run(*shelf.words(out, *resumed))
        mend()
        assert told.code == 130, (name, told.err, told.out)
        assert f"--out {out} " in told.err
        assert told.err.endswith("--resume\n")
        assert {path: path.read_bytes() for path in done} == done, "what was done is not done again"
        done |= {path: path.read_bytes() for path in kept(out)}
        if name.endswith(":_save_result"):
            assert "supernet: 12/12 steps (100%)" in told.out
            assert "supernet: 5/12" not in told.out, "this process had the rest alone"
        if at == 4:
            a_worker_joins_with_the_address_alone(out, shelf, tmp_path, monkeypatch)
    told = command.run(*shelf.words(out, "--resume"))
    assert told.code == 0, told.err
    found = load_report(out)
    assert sum(point.state in ("complete", "pruned") for point in found.points) == 5
    assert found.winner is not None
    assert {rung.examples for rung in found.ladder if rung.what == "supernet"} > {12 * 16}, "of all processes"
    assert {path: path.read_bytes() for path in done} == done
    assert not command.partial(out)
    a_finished_search_races_no_more(out, shelf)
    a_forecast_of_more_trials_names_what_is_done(out, shelf, monkeypatch)


def a_finished_search_races_no_more(out: Path, shelf: Searched) -> None:
    before = load_report(out)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("compress.nas.finalists.sample", lambda *_, **__: pytest.fail("it races again"))
        told = command.run(*shelf.words(out, "--resume"))
    assert told.code == 0, told.err
    assert (load_report(out).winner, load_report(out).front) == (before.winner, before.front)


def a_forecast_of_more_trials_names_what_is_done(out: Path, shelf: Searched, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes no time, and nothing in the folder is touched."""
    monkeypatch.setattr(trials, "LONG", (6, 6))
    monkeypatch.setattr(trials, "ROWS", 3)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    told = command.run(*shelf.words(out, "--plan", "--json", "--resume", trials="8", finalists="3"))
    assert told.code == 0, told.err
    phases = {each["name"]: each for each in json.loads(told.out)["phases"]}
    assert [name for name, each in phases.items() if each["cached"]] == [
        "teacher", "measuring", "supernet", "final: final",
    ]  # fmt: skip
    assert phases["trials"]["note"] == "3 shapes, 5 are scored"
    assert phases["short distillations"]["steps"] == [6, 6]
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def kill(words: list[str], out: Path) -> None:
    """Run the search in a process of its own until it has trained its supernet for a while."""
    at = words.index("--out")
    child = children.start([*words[:at], *words[at + 2 :]], out, waits_in_its_supernet)
    children.wait_for(child, out, "supernet", 9)
    child.kill()
    assert children.finish(child) == -signal.SIGKILL
    assert not (out / "stages" / "supernet" / "model").exists()


def a_worker_joins_with_the_address_alone(
    out: Path, shelf: Searched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = command.run("search", "--storage", str(out / "study.db"), "--worker")
    assert told.code == 0, told.err
    assert "all requested trials are done" in told.out
    moved = (out / "stages" / "supernet").rename(out / "elsewhere")
    told = command.run("search", "--storage", str(out / "study.db"), "--worker")
    assert command.refused(told, tmp_path / "nothing", "mount or copy", "--weights")
    told = command.run("search", "--storage", str(out / "study.db"), "--worker", "--weights", str(moved / "model"))
    assert told.code == 0, told.err
    told = command.run("search", "--storage", str(out / "study.db"), "--worker", "--weights", shelf.shelf.teacher)
    assert "are not the weights of this search" in told.err
    with monkeypatch.context() as patched:
        patched.setattr("compress.nas.worker._identify_rows", lambda *_: "of another copy")
        told = command.run("search", "--storage", str(out / "study.db"), "--worker", "--weights", str(moved / "model"))
    assert "are not those of the search: copy the same files" in told.err
    moved.rename(out / "stages" / "supernet")


def kept(out: Path) -> list[Path]:
    """What a phase leaves once it is over."""
    wanted = (
        "latency.json",
        "stages/supernet/model/model.safetensors",
        "students/*/stages/short/model/model.safetensors",
    )
    return [path for pattern in wanted for path in out.glob(pattern)]


def test_a_worker_needs_a_search_that_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = command.run("search", "--worker")
    assert "needs --storage" in told.err
    monkeypatch.setattr(worker, "POLL_SECONDS", 0.05)
    console = Console(file=io.StringIO(), width=200, record=True)
    with pytest.raises(SearchError, match="no such file"):
        worker.join(str(tmp_path / "study.db"), minutes=0.002, console=console)
    assert console.export_text().count("waiting for the search to start") == 1


def test_a_finished_search_is_the_same_after_a_full_disk_and_with_more_time(
    copied: Path, found: SearchReport, shelf: Searched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "study.db")

    words = shelf.words(copied, *BUDGET, "--set", "short.evaluate=1", "--resume", "--minutes", "60")
    at = words.index("--trials")
    words = [*words[:at], *words[at + 2 :]]
    with monkeypatch.context() as patch:
        patch.setattr("compress.nas.record.write_report", full)
        told = command.run(*words)
    assert told.code == 2
    assert "study.db: No space left on device" in told.err
    assert not command.partial(copied)
    told = command.run(*words)
    assert told.code == 0, told.err
    after = load_report(copied)
    assert [replace(point, bundle=None) for point in after.points] == [
        replace(each, bundle=None) for each in found.points
    ]
    assert (after.front, after.winner) == (found.front, found.winner)
    study = join_study(copied / "study.db")
    assert study.user_attrs["over"], "workers end too"
    close_study(study)


@pytest.mark.slow
def test_students_trained_from_scratch(shelf: Searched, tmp_path: Path) -> None:
    (tmp_path / "plain.yaml").write_text(PLAIN)
    out = tmp_path / "study"
    words = shelf.words(out, "--objective", "parameters", space=str(tmp_path / "plain.yaml"), trials="3", finalists="1")
    told = command.run(*words)
    assert told.code == 0, told.err
    found = load_report(out)
    assert found.objectives == ("score", "parameters")
    assert {one.state for one in found.points} <= {"complete", "pruned", "duplicate"}
    winner = found.point(found.winner or 0)
    assert {*winner.scores} == {"subnet", "final", "shipped"}
    assert load_plain(Path(str(winner.bundle))).config.hidden_act == winner.choice["config.hidden_act"]
    told = command.run("search", "--storage", str(out / "study.db"), "--worker")
    assert told.code == 0, told.err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--max-latency-ms", "0.5"], ["impossible budget", "the closest is", "--max-latency-ms of at least"]),
        (["--shapes", "3"], ["--shapes: Input should be greater than or equal to 5"]),
        (["--set", "axes={layers: [1, 2]}"], ["has only 2 shapes"]),
        (
            ["--set", "supernet.objective=[{loss: hinton.soft_target}]"],
            ["supernet.objective[0]", "Did you mean 'hinton.soft_targets'?"],
        ),
        (["--set", "final.0.max_length=100"], ["has 64 positions"]),
        (["--seq", "100"], ["100 tokens to measure at; this shape has 64 positions"]),
        (["--storage", "postgresql://nobody@localhost:1/none"], ["@localhost:1/none: cannot be"]),
        (["--anchor", "nowhere"], ["nowhere"]),
    ],
)
def test_impossible_searches_are_refused_before_any_training(
    shelf: Searched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], said: list[str]
) -> None:
    def begin(*_: object, **__: object) -> NoReturn:
        pytest.fail("training began")

    monkeypatch.setattr("compress.nas.supernet.run_stage", begin)
    out = tmp_path / "study"
    assert command.refused(command.run(*shelf.words(out, *more)), out, *said)


def test_an_unknown_initialisation_is_refused_before_any_trial(shelf: Searched, tmp_path: Path) -> None:
    (tmp_path / "plain.yaml").write_text(PLAIN, encoding="utf-8")
    out = tmp_path / "study"
    told = command.run(*shelf.words(out, "--set", "student.init=rando", space=str(tmp_path / "plain.yaml")))
    assert command.refused(told, out, "student.init: 'rando' is neither scratch")
    assert "trial" not in told.out


def test_a_storage_of_another_search_is_refused_unchanged(
    searched: Path, shelf: Searched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "study.db"
    close_study(open_study(file, "study", {"teacher": "another"}, objectives=("score",)))
    before = file.read_bytes()
    out = tmp_path / "study"
    measured = LatencyTable.load(searched / "latency.json")
    monkeypatch.setattr(LatencyTable, "load", staticmethod(lambda *_: measured))
    told = command.run(*shelf.words(out, storage=str(file)))
    assert command.refused(told, out, "belongs to a different search", "teacher: was another")
    assert file.read_bytes() == before


def test_another_search_in_the_same_folder_is_refused(searched: Path, shelf: Searched) -> None:
    told = command.run(*shelf.words(searched, "--max-params", "9000", "--resume"))
    assert (told.code, "the search differs (compare its search.yaml)" in told.err) == (2, True)
    told = command.run(*shelf.words(searched, *BUDGET))
    assert (told.code, "already holds a run; --resume continues it" in told.err) == (2, True)
