"""What is wrong with a command is told before torch is imported, by the command and by the function alike."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from compress.commands import preflight
from compress.config.options import LengthOptions
from compress.config.recipe import Recipe
from compress.errors import CompressError, RecipeError, RunError
from compress.jobs.sizes import check_sizes
from compress.training.run import Run
from tests import tiny
from tests.command import Shelf, accepted

EACH = """
import json, sys
from compress.cli import app
from typer.testing import CliRunner

for words in json.load(sys.stdin):
    ran = CliRunner().invoke(app, words, prog_name="compress")
    heavy = sorted({"torch", "transformers", "datasets", "accelerate"} & set(sys.modules))
    print(json.dumps([ran.exit_code, ran.stdout, ran.stderr, heavy]))
"""
LINES = [
    ("distill", "--set stages.tripel.lr=1", "no stage 'tripel'"),
    ("distill", "--recipe tinybrt", "Did you mean 'tinybert'?"),
    ("distill", "--recipe {broken}", "line 2, column 1"),
    ("distill", "--recipe {own}", "--allow-code"),
    ("distill", "--data ./nowhere", "nowhere"),
    ("distill", "--corpus ./nowhere", "nowhere"),
    ("distill", "--teacher bert-bse", "Did you mean 'bert-base'?"),
    ("distill", "--teacher ./nowhere", "nowhere"),
    ("distill", "--prompt sentimnt", "Did you mean 'sentiment'?"),
    ("distill", "--prompt sentiment --teacher nowhere.yaml", "no such endpoint file"),
    ("distill", "--out {file}", "is a file"),
    ("distill", "--out {foreign}", "not a run of compress"),
    ("distill", "--seed -5", "found -5"),
    ("distill", "--seed 4294967296", "found 4294967296"),
    ("distill", "--allow-code ./nowhere", "there is no such folder"),
    ("pretrain", "--set stages.tripel.lr=1", "no stage 'tripel'"),
    ("pretrain", "--corpus ./nowhere", "nowhere"),
    ("prune", "--set stages.tripel.lr=1", "no stage 'tripel'"),
    ("prune", "--data ./nowhere", "nowhere"),
    ("prune", "--seed -5", "found -5"),
    ("distill", "--text txet", "Did you mean 'text'?"),
    ("distill", "--label labl", "Did you mean 'label'?"),
    ("distill", "--metric acuracy", "Did you mean 'accuracy'?"),
    ("distill", "--kind regresion", "Did you mean 'regression'?"),
    ("distill", "--kind regression --metric f1", "does not score a regression task"),
    ("distill", "--recipe tinybert --set student.layers=4", "a student of at most 2 layers"),
    ("distill", "--recipe distilbert --set student.layers=4", "cannot all come from the teacher's 2"),
    ("distill", "--set stages.0.max_length=9999", "has 64 positions: --set stages.0.max_length=64"),
    ("distill", "--teacher some/teacher", "no such folder. As a model of the hub: the hub cannot be reached"),
    ("distill", "--data {typo}", "no such file or folder. Did you mean"),
    ("prune", "--layers 4", "more than the model's 2"),
    ("prune", "--heads 40", "more than the model's 4"),
    ("prune", "--speedup 1e6", "below 1000"),
    ("prune", "--speedup 1e6 --layers 1", "give one of the two"),
    ("prune", "--layers 0", "above 0"),
    ("prune", "--speedup 2 --device andriod", "no such device"),
    ("prune", "--max-params 15000 --threads 2", "--threads: only for a limit of the latency"),
    ("prune", "--recipe hinton --layers 1", "prune-taylor"),
    ("prune", "--recipe auto --layers 1", "prune-taylor"),
    ("search", "--sampler tpee", "tpe"),
    ("search", "--trials 0", "1"),
    ("search", "--minutes 0.01", "0.1"),
    ("search", "--device andriod", "no such device"),
    ("search", "--storage nosuch://host/name", "is not the address of a storage"),
    ("search", "--file fp32 --set axes.precision=[int8,fp32]", "width-depth varies the precision"),
    ("search", "--file int8 --set axes.precision=[int8,fp32]", "width-depth varies the precision"),
    ("search", "--weights ./supernet", "--weights is for a --worker"),
    ("search", "--anchor ./nowhere", "nowhere"),
    ("search", "--label labl", "Did you mean 'label'?"),
    ("label", "--teacher gpt22", "Did you mean 'gpt2'?"),
    ("label", "--teacher nowhere.yaml", "no such endpoint file"),
    ("label", "--prompt sentimnt", "Did you mean 'sentiment'?"),
    ("label", "--data ./nowhere", "nowhere"),
    ("label", "--text txet", "Did you mean 'text'?"),
    ("label", "--out {file}", "already exists"),
    ("inspect", "thing {data} --text txet", "Did you mean 'text'?"),
    ("inspect", "thing {data} --teacher minilmm", "Did you mean 'minilm'?"),
    ("students", "teacher minilmm", "Did you mean 'minilm'?"),
    ("export", "model ./nowhere", "nowhere"),
    ("export", "--precision int9", "--for text writes"),
    ("export", "--out {foreign}", "is not an export"),
    ("export", "--for coreml", "--for coreml needs packages (coremltools: not installed): pip install"),
    ("quantize", "bundle ./nowhere", "nowhere"),
    ("quantize", "--data ./nowhere", "nowhere"),
    ("quantize", "--label labl", "Did you mean 'label'?"),
    ("quantize", "--out {foreign}", "exists and is not a bundle"),
    ("trim", "model ./nowhere", "nowhere"),
    ("trim", "--data ./nowhere", "nowhere"),
    ("trim", "--corpus ./nowhere", "nowhere"),
    ("trim", "--out {foreign}", "exists"),
    ("search", "--set short.lrr=1", "short.lrr"),
    ("search", "--out {foreign}", "not a run of compress"),
    ("search", "--seed -5", "found -5"),
]


@pytest.fixture(scope="module")
def told(shelf: Shelf, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str, str, list[str]]]:
    """What each of LINES came to, and which heavy libraries had been imported until then; all in one process."""
    folder = tmp_path_factory.mktemp("places")
    places = {"broken": folder / "a.yaml", "own": folder / "b.yaml", "file": folder / "c", "foreign": folder / "d"}
    places["broken"].write_text("stages: [\n")
    places["own"].write_text(tiny.RECIPE.replace("tinybert.hidden", "mine.hidden"))
    places["file"].touch()
    (places["foreign"] / "notes").mkdir(parents=True)
    places |= {"data": Path(shelf.data), "typo": Path(shelf.data).with_name("reviws")}
    bundle = str(tiny.bundle(folder / "bundle").path)
    lines = []
    for command, words, _ in LINES:
        out, data = {"--out": str(folder / "run")}, {"--data": shelf.data}
        default = {
            "distill": {"--teacher": shelf.teacher, "--recipe": shelf.recipe, **data, **out},
            "pretrain": {"--teacher": shelf.teacher, "--recipe": "distilbert-general", **data, **out},
            "prune": {"model": shelf.teacher, **data, **out},
            "search": {"--teacher": shelf.teacher, **data, **out},
            "label": {"--teacher": shelf.teacher, "--prompt": "sentiment", **data, **out},
            "export": {"model": bundle, "--for": "text", **out},
            "quantize": {"bundle": bundle, **data},
            "trim": {"model": bundle, **data, **out},
        }.get(command, {})
        changed = iter(words.format(**places).split())
        default |= dict(zip(changed, changed, strict=True))
        given = [word for pair in default.items() for word in pair]
        lines.append([command, *(word for word in given if word not in ("model", "bundle", "thing", "teacher"))])
    ran = subprocess.run(
        [sys.executable, "-c", EACH], input=json.dumps(lines), capture_output=True, text=True, check=True
    )
    assert not (folder / "run").exists()
    return [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.mark.parametrize("at", range(len(LINES)), ids=lambda at: " ".join(LINES[at][:2]))
def test_errors_come_before_torch_is_imported(told: list[tuple[int, str, str, list[str]]], at: int) -> None:
    code, out, err, heavy = told[at]
    assert (code, out, heavy) == (2, "", [])
    assert err.startswith(("error: ", "Usage: "))
    assert LINES[at][2] in " ".join(err.split())


def test_a_recipe_object_takes_no_overrides(shelf: Shelf) -> None:
    recipe = Recipe.load(Path(shelf.recipe))
    assert preflight.load_recipe(shelf.recipe) == preflight.load_recipe(Path(shelf.recipe)) == recipe
    assert preflight.load_recipe(recipe) is recipe
    with pytest.raises(RecipeError, match=r"stages\.0\.lr=1"):
        preflight.load_recipe(recipe, ["stages.0.lr=1"])


def test_a_locked_run(tmp_path: Path, shelf: Shelf) -> None:
    held = Run.open(tmp_path / "run", Recipe.load(shelf.recipe), {"seed": 0})
    try:
        with pytest.raises(RunError, match="another process"):
            Run.check(tmp_path / "run", resume=True)
    finally:
        held.close()
    assert not Run.check(tmp_path / "run")


@pytest.mark.parametrize("minutes", [0, -1, float("nan"), float("inf"), "5"])
def test_invalid_minutes(minutes: Any) -> None:
    with pytest.raises(CompressError, match="minutes"):
        preflight.load_recipe("distilbert", length=LengthOptions(minutes=minutes))


def test_effort_reaches_every_stage_and_a_recipe_too() -> None:
    named = preflight.load_recipe("tinybert", length=LengthOptions(effort="best"))
    given = preflight.load_recipe(Recipe.load("tinybert"), length=LengthOptions(effort="best"))
    assert named == given
    assert {stage.effort for stage in (named.teacher, *named.training)} == {"best"}


def test_a_recipe_has_no_paper_to_take_numbers_from() -> None:
    with pytest.raises(RecipeError, match="paper"):
        preflight.load_recipe(Recipe.load("tinybert"), length=LengthOptions(paper=True))


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is worked in, with runs of tinybert on films: the first finished, the second and tenth not."""
    monkeypatch.chdir(tmp_path)
    for number, facts in {1: {"finished": "today"}, 2: {}, 10: {}, 11: {"finished": "today"}}.items():
        folder = tmp_path / "runs" / f"tinybert-films-{number}"
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps(facts), encoding="utf-8")
    (tmp_path / "runs" / "tinybert-films-mine").mkdir()
    return tmp_path / "runs"


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(
    ("recipe", "data", "resume", "chosen"),
    [
        ("tinybert", "films", False, "tinybert-films-12"),
        ("tinybert", "films", True, "tinybert-films-10"),
        ("tinybert", "glue/sst2", False, "tinybert-sst2-1"),
        ("my/tinybert.yaml", "../data/films.csv", False, "tinybert-films-12"),
        ("auto", "train=/data/a b.tsv,test=/data/c.tsv", False, "auto-a-b-1"),
        ("auto", "owner/name:part", False, "auto-name-part-1"),
    ],
)
def test_folders_are_chosen_by_names(recipe: str, data: str, resume: bool, chosen: str) -> None:
    assert preflight.choose_out(recipe, data, resume=resume) == Path("runs", chosen)


def test_resume_chooses_the_newest_run(runs: Path) -> None:
    for number in (2, 10):
        (runs / f"tinybert-films-{number}" / "run.json").write_text('{"finished": "now"}', encoding="utf-8")
    assert preflight.choose_out("tinybert", "films", resume=True) == Path("runs/tinybert-films-11")
    with pytest.raises(RunError, match="--resume"):
        preflight.choose_out("tinybert", "poems", resume=True)


def test_several_processes_need_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RunError, match="--out"):
        preflight.choose_out("tinybert", "films")


def test_distill_without_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shelf = Shelf.fill(tmp_path / "shelf")
    words = shelf.distill(tmp_path)
    at = words.index("--out")
    words = words[:at] + words[at + 2 :]

    def folders() -> list[str]:
        return sorted(path.name for path in (tmp_path / "runs").iterdir())

    assert accepted(*words)
    first = folders()
    assert len(first) == 1
    assert first[0].endswith("-reviews-1")
    assert accepted(*words, "--resume")
    assert folders() == first


def test_a_config_may_leave_out_what_is_checked(tmp_path: Path, shelf: Shelf) -> None:
    """What the config does not state is checked once the model is loaded."""
    recipe = Recipe.load(shelf.recipe, ["stages.0.max_length=9999"])
    for given in ({"model_type": "bert"}, {"model_type": None, "max_position_embeddings": 8}, {}):
        (tmp_path / "config.json").write_text(json.dumps(given))
        check_sizes(recipe, str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "max_position_embeddings": 8}))
    with pytest.raises(RecipeError, match="has 8 positions"):
        check_sizes(recipe, str(tmp_path))
