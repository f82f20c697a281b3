"""`--keep`: a path of ever smaller students, and the smallest that keeps the share of the score."""

import time
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

import compress
from compress.commands.distill import list_phases
from compress.config.recipe import Recipe, Target
from compress.config.stages import Prune
from compress.errors import PruneError
from compress.jobs import far_end as far_end_module
from compress.jobs import measure as measuring
from compress.jobs import path as walking
from compress.jobs.job import Job
from compress.jobs.path import PATH_FILE, read_path
from compress.jobs.shipping import BUDGETED_LIMIT, INT8_LIMIT
from compress.jobs.stages import StageModels
from compress.latency.model import Estimate
from compress.pruning import budget
from compress.pruning import path as cuts
from compress.records.latency import Setting
from compress.records.path import KeptScore, PathStudent, WalkedPath
from compress.records.run_report import Report
from compress.reporting.html import render_run
from compress.slicing.sizes import Sizes
from compress.training.schedule import TimeLimit
from tests import command, learning, pruning_given, tiny
from tests.latencies import steady
from tests.tasks.cases import CASES, TOY

pytestmark = pytest.mark.usefixtures("hastened")

RECIPE = pruning_given.RECIPE.replace("steps: 3", "steps: 4").replace("lr: 0.001", "lr: 0.01")


class Timer:
    """Latencies as the number of multiply-adds."""

    about = "a fake, int8"

    def predict(self, configs: Mapping[str, Any]) -> dict[str, Estimate]:
        return {name: Estimate(ms, 0.0) for name, ms in self.measure(configs).items()}

    def measure(self, configs: Mapping[str, Any]) -> dict[str, float]:
        sizes = {name: Sizes.from_config(config) for name, config in configs.items()}
        work = {name: each.layers * each.hidden * (2 * each.hidden + each.ffn) for name, each in sizes.items()}
        return {name: max(each, 100) / 16384 for name, each in work.items()}


@contextmanager
def timed(*_: object):
    yield Timer()


@contextmanager
def raced(bundle: compress.Bundle, recipe: Recipe, *_: object):
    """The shipped file takes a quarter of the teacher's time."""
    assert recipe.target.keep is not None
    times = {budget.SHIPPED_SHAPE: 0.25, budget.WHOLE_SHAPE: 1.0}
    yield lambda: {name: steady(name, Setting(), ms) for name, ms in times.items()}


def shorten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cuts, "open_timer", timed)
    patch.setattr(walking, "far_recipe", lambda _: None)
    patch.setattr(measuring, "open_race", raced)
    patch.setattr(walking, "STEPS", {"brief": 3, "long": 4})
    patch.setattr(walking, "MOST_RUNGS", 4)
    patch.setattr(cuts, "CUT_ROWS", 16)
    patch.setattr(cuts, "SHAPES_COMPARED", 4)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A teacher without a head, which learns the task first."""
    folder = tmp_path_factory.mktemp("given")
    return pruning_given.given(folder) | {
        "model": tiny.checkpoint(folder / "start", tiny.bert(layers=4, **learning.NO_DROPOUT).bert),
        "recipe": tiny.recipe(folder / "own", RECIPE),
    }


def keep(given: Mapping[str, Any], out: Path, share: str | float = 0.7, **changes: Any) -> WalkedPath:
    bundle = tiny.call(compress.prune, **{**given, **changes}, keep=share, out=out)
    assert bundle.path == out / "bundle"
    return read_path(out / PATH_FILE)


@pytest.fixture(scope="module")
def walked(given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    folder = tmp_path_factory.mktemp("walked")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPRESS_HOME", str(folder / "home"))
        shorten(patch)
        keep(given, folder / "run")
    return folder / "run"


def test_the_path_leads_to_ever_smaller_students(walked: Path) -> None:
    path = read_path(walked / PATH_FILE)
    assert (path.keep, path.least, path.where, path.whole) == (0.7, "latency", "a fake, int8", 1.0)
    costs = [1.0, *(rung.cost for rung in path.rungs)]
    steps = [before / after for before, after in pairwise(costs)]
    assert steps[0] >= cuts.FIRST_CUT
    assert all(step >= cuts.CUT for step in steps[1:])
    for before, after in pairwise(path.rungs):
        assert Sizes(**after.sizes).within(Sizes(**before.sizes))
        assert after.parameters < before.parameters
        assert after.file_mb < before.file_mb
    assert path.stopped


def test_the_student_that_ships_is_the_one_of_the_path(walked: Path) -> None:
    path = read_path(walked / PATH_FILE)
    rung = path.student
    assert rung is not None
    assert set(rung.looks) >= {"brief", "finished"}
    shipped = load_file(walked / "bundle" / "model.safetensors")
    trained = load_file(walked / "stages" / f"recover-{rung.name}" / "model" / "model.safetensors")
    assert all((shipped[name] == tensor).all() for name, tensor in trained.items())
    config = compress.Bundle.load(walked / "bundle").manifest
    assert config.model_type == "bert"


def test_the_recipe_of_the_bundle_says_how_it_was_made(walked: Path, tmp_path: Path) -> None:
    """It can be run again, without a search."""
    recipe = Recipe.load(walked / "bundle" / "recipe.yaml")
    path = read_path(walked / PATH_FILE)
    rungs = [rung.name for rung in path.rungs]
    until = rungs[: rungs.index(path.chosen) + 1]
    assert [stage.name for stage in recipe.stages if isinstance(stage, Prune)] == until
    assert recipe.stages[-1].name == f"recover-{path.chosen}"
    assert not recipe.target.budgets
    last = recipe.pruning[-1]
    assert last.to is not None
    sizes = dict(path.rung(path.chosen).sizes)
    del sizes["head_size"]
    assert last.to.sizes == sizes
    copy = tmp_path / "again.yaml"
    copy.write_text(yaml.safe_dump(recipe.plain()), encoding="utf-8")
    assert Recipe.load(copy).plain() == recipe.plain() | {"name": recipe.name}


def test_the_recipe_of_the_bundle_makes_the_same_student(walked: Path, given: dict[str, Any], tmp_path: Path) -> None:
    again = {**given, "recipe": str(walked / "bundle" / "recipe.yaml")}
    tiny.call(compress.prune, **again, out=tmp_path / "run")
    ours, theirs = (load_file(run / "bundle" / "model.safetensors") for run in (tmp_path / "run", walked))
    assert all((ours[name] == tensor).all() for name, tensor in theirs.items())


def test_the_report_shows_the_path(walked: Path) -> None:
    report = Report.from_json(walked / "bundle" / "report.json")
    assert report.path is not None
    assert report.path.tested is not None
    assert (report.path.measured, report.path.whole_measured) == (0.25, 1.0)
    bare = replace(report.path, tested=None, measured=None, whole_measured=None)
    assert bare == read_path(walked / PATH_FILE)
    page = render_run(report)
    assert "The path to this student" in page
    assert "4.0 times as fast" in page
    assert page.count('class="gain"') >= 2 * len(report.path.rungs)
    assert all(rung.name in page for rung in report.path.rungs)
    assert "path-0-wide" in page


class Killed(BaseException):
    pass


@pytest.mark.parametrize("stage", ["cut-1", "brief-cut-2", "cut-3", "long", "recover", "ship"])
def test_a_killed_run_goes_on_to_the_same_student(
    stage: str, given: dict[str, Any], walked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill_at(models: StageModels, stages: Any, **more: Any) -> Any:
        if any(each.name.startswith(stage) for each in stages):
            raise Killed
        return run_stages(models, stages, **more)

    run_stages = StageModels.run_stages
    with monkeypatch.context() as patch:
        if stage == "ship":
            patch.setattr("compress.jobs.shipping.Bundle", SimpleNamespace(write=None, load=None))
        else:
            patch.setattr(StageModels, "run_stages", kill_at)
        with pytest.raises((Killed, TypeError)):
            keep(given, tmp_path / "run")
    assert keep(given, tmp_path / "run", resume=True) == read_path(walked / PATH_FILE)
    ours, theirs = (load_file(run / "bundle" / "model.safetensors") for run in (tmp_path / "run", walked))
    assert all((ours[name] == tensor).all() for name, tensor in theirs.items())


def far_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try the static student too, for a few steps."""

    def recipe(job: Job) -> Recipe:
        found = far_end_module.far_recipe(job)
        assert found is not None, "one word decides"
        few = {"steps": 60, "augment": None, "lr": 0.05, "batch": 16, "evaluate": 1}
        return found.model_copy(update={"stages": (found.training[0].model_copy(update=few),)})

    monkeypatch.setattr(walking, "far_recipe", recipe)
    monkeypatch.setattr(far_end_module, "open_timer", timed)


def test_a_static_student_ships_where_words_alone_keep_the_share(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far_end(monkeypatch)
    path = keep(given, tmp_path / "run", 0.6)
    assert (path.chosen, path.rungs) == ("static", ())
    assert path.student is path.far
    assert path.far is not None
    assert path.far.looks["finished"].keeps
    assert compress.Bundle.load(tmp_path / "run" / "bundle").manifest.model_type == "static-embedding"
    report = Report.from_json(tmp_path / "run" / "bundle" / "report.json")
    assert "words alone" in render_run(report)


def test_a_static_student_that_misses_is_a_place_on_the_path(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far_end(monkeypatch)
    monkeypatch.setattr(walking, "MOST_RUNGS", 1)
    judge = walking.judge_kept
    first = iter([True])

    def miss_first(*given: Any) -> KeptScore:
        kept = judge(*given)
        return replace(kept, chance=0.1) if next(first, False) else kept

    monkeypatch.setattr(walking, "judge_kept", miss_first)
    path = keep(given, tmp_path / "run", 0.6, precision="bf16")  # training casts the weights of its teacher
    assert path.far is not None
    assert path.chosen == path.rungs[0].name
    assert [each.name for each in path.students] == ["cut-1", "static"]


def test_a_static_student_is_not_tried_where_words_say_little(given: dict[str, Any], tmp_path: Path) -> None:
    class Data:
        task = SimpleNamespace(
            tokenwise=False, metric="accuracy", baselines=lambda *_: {"bag of words": {"accuracy": 0.8}}
        )
        validation = None

    models = SimpleNamespace(
        context=SimpleNamespace(data=Data, kind="classification", corpus=None),
        recipe=SimpleNamespace(target=SimpleNamespace(keep=0.98)),
    )
    job: Any = SimpleNamespace(models=models, check=SimpleNamespace(scores={"accuracy": 0.9}))
    assert far_end_module.far_recipe(job) is None
    job.models.context.kind = "tagging"
    job.check.scores["accuracy"] = 0.1
    assert far_end_module.far_recipe(job) is None


@pytest.mark.parametrize("least", ["mb", "params"])
def test_other_costs_open_no_device(
    least: str, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuts, "open_timer", lambda *_: pytest.fail("opened"))
    monkeypatch.setattr(measuring, "open_race", lambda *_: pytest.fail("opened"))
    monkeypatch.setattr(walking, "MOST_RUNGS", 1)
    path = keep(given, tmp_path / "run", least=least)
    rung = path.rungs[0]
    assert rung.cost == {"mb": rung.file_mb, "params": rung.parameters}[least]


def test_a_share_that_guessing_keeps_is_refused(given: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(PruneError, match="gets"):
        keep(given, tmp_path / "run", 0.2)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--keep", "150%"], "150%"),
        (["--keep", "101%"], "101%"),
        (["--keep", "5000%"], "5000%"),
        (["--keep", "98.5"], "98.5%?"),
        (["--keep", "95%", "--layers", "2"], "--layers"),
        (["--keep", "95%", "--speedup", "2"], "--speedup"),
        (["--least", "mb", "--layers", "2"], "--least mb"),
        (["--set", "target.least=mb", "--layers", "2"], "least mb"),
    ],
)
def test_what_contradicts_itself_is_refused(words: list[str], named: str, tmp_path: Path) -> None:
    told = command.run("prune", "minilm", "--data", "intents", *words, "--out", str(tmp_path / "run"))
    assert told.code == 2
    assert named in told.err and "%%" not in told.err
    assert not (tmp_path / "run").exists()


def test_a_recipe_that_does_not_prune_is_refused(tmp_path: Path) -> None:
    words = ["--teacher", "minilm", "--data", "intents", "--recipe", "distilbert", "--keep", "95%"]
    told = command.run("distill", *words, "--out", str(tmp_path / "run"))
    assert told.code == 2
    assert "prune-taylor" in told.err


def look(share: float, error: float = 0.01) -> KeptScore:
    return KeptScore(share, share, share - error, share + error, 0.5, 0.9, 100, 50)


def rung(name: str, **looks: float) -> PathStudent:
    return PathStudent(name, {"layers": 1}, 1, 1.0, 1.0, {training: look(share) for training, share in looks.items()})  # type: ignore[misc]  # the names of trainings


def choose(*rungs: PathStudent, limit: TimeLimit | None = None) -> str | None:
    context = SimpleNamespace(time_limit=limit)
    job: Any = SimpleNamespace(models=SimpleNamespace(context=context))
    walk = walking.Walk(job, None, None)  # type: ignore[arg-type]  # not read
    found = walk._choose(WalkedPath(0.98, "latency", "", 1.0, tuple(rungs)))
    return found and found.name


def test_the_smallest_that_is_likely_to_keep_the_share_is_trained() -> None:
    large, middle, small = (
        rung("large", brief=0.99, long=1.0),
        rung("middle", brief=0.97, long=0.99),
        rung("small", brief=0.9, long=0.95),
    )
    assert choose(large, middle, small) == "middle"
    assert choose(large, rung("middle", brief=0.9, long=0.91), small) == "large"


def test_a_larger_one_follows_one_that_misses() -> None:
    missed = rung("middle", brief=0.97, long=0.99, finished=0.95)
    assert choose(rung("large", brief=0.99, long=1.0), missed, rung("small", brief=0.9)) == "large"
    assert choose(missed) is None, "none is larger"


def finish(student: PathStudent, share: float, chance: float) -> PathStudent:
    return replace(student, looks={**student.looks, "finished": replace(look(share), chance=chance)})


def test_one_that_keeps_the_share_ends_the_search_if_smaller_ones_are_not_likely_to() -> None:
    large, small = rung("large", brief=0.99), rung("small", brief=0.93, long=0.94)
    kept = finish(rung("middle", brief=0.97, long=0.985), 0.99, chance=0.95)
    assert choose(large, kept) is None
    assert choose(large, kept, small) is None


def test_a_smaller_one_follows_one_that_has_gained_more_than_was_expected() -> None:
    small = rung("small", brief=0.95, long=0.97)
    kept = finish(rung("middle", brief=0.97, long=0.98), 1.0, chance=1.0)
    assert choose(rung("large", brief=0.99), kept, small) == "small"
    briefly = finish(rung("middle", brief=0.97), 1.0, chance=1.0)
    assert choose(rung("large", brief=0.99), briefly, small) == "small", "with no longer recovery of its own"
    limit = TimeLimit(time.monotonic() + 60, ("recover",), minutes=6, began=0.0)
    assert choose(rung("large", brief=0.99), kept, small, limit=limit) is None, "its time is over"
    missed = finish(small, 0.97, chance=0.1)
    assert choose(rung("large", brief=0.99), kept, missed) is None
    path = WalkedPath(0.98, "latency", "", 1.0, (rung("large", brief=0.99), kept, missed))
    assert walking._best(path).name == "middle"
    assert walking._best(replace(path, rungs=(kept, finish(small, 0.98, chance=0.91)))).name == "small"


def test_the_path_leaves_time_for_training() -> None:
    """Another cut is begun in the first third of the minutes; a tenth of an hour is over at 80 % of it."""
    now = time.monotonic()
    assert TimeLimit(now + 288, ("recover",), minutes=6, began=now).spent == pytest.approx(0.0, abs=0.01)
    for over, stopped in ((0.3, False), (0.4, True)):
        limit = TimeLimit(now + (1 - over) * 288, ("recover",), minutes=6, began=now - over * 288)
        context = SimpleNamespace(time_limit=limit)
        job: Any = SimpleNamespace(models=SimpleNamespace(context=context))
        path = WalkedPath(0.7, "latency", "", 1.0, (rung("large", brief=0.9),))
        walk = walking.Walk(job, None, None)  # type: ignore[arg-type]  # not read
        assert ("--minutes 6" in walk._why_stopped(path)) is stopped


EVERY_KIND = """
      - {loss: hinton.soft_targets, only: [classification, tagging, qa]}
      - {loss: hinton.soft_labels, only: multilabel}
      - {loss: hinton.matched_logits, only: [regression, ranking]}
      - {loss: leaf.l2, only: embedding}
"""


@pytest.mark.parametrize("kind", sorted({*CASES} - {TOY, "classification"}))
def test_students_of_every_kind_walk(
    kind: str, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a teacher that knows little: what is judged is whether it goes all the way."""
    monkeypatch.setattr(walking, "_check_share", lambda *_: None)
    monkeypatch.setattr(walking, "MOST_RUNGS", 2)
    CASES[kind].write(tmp_path / "data")
    recipe = RECIPE.replace(RECIPE[RECIPE.index("    objective: &both") :], "") + f"    objective:{EVERY_KIND}"
    recipe = recipe.replace("{prune: half", "{prune: all").replace("way: 0.5, ", "")
    path = keep(
        given,
        tmp_path / "run",
        0.9,
        recipe=tiny.recipe(tmp_path / "own", recipe),
        data=str(tmp_path / "data"),
        kind=kind,
    )
    assert path.student is not None
    assert path.student.looks.keys() >= {"brief", "finished"}
    assert compress.Bundle.load(tmp_path / "run" / "bundle").task.kind == kind


@pytest.mark.parametrize(
    ("target", "limit"), [({"keep": 0.9}, BUDGETED_LIMIT), ({"keep": 0.9, "least": "mb"}, INT8_LIMIT)]
)
def test_a_student_for_speed_keeps_fewer_products_in_float(target: dict[str, Any], limit: float) -> None:
    recipe = SimpleNamespace(target=Target.model_validate(target))
    job: Any = SimpleNamespace(models=SimpleNamespace(recipe=recipe))
    request: Any = SimpleNamespace(vocabulary="auto")
    phase: Any = list_phases(job, [], request)[-1]
    assert phase.phases[-1].max_drop == limit
