"""Choose a recipe by the table of `--recipe auto`."""

import json
from pathlib import Path

import pytest
from rich.console import Console

import compress
from compress.commands import preflight
from compress.config.choices import CandidateRecipes, table_path
from compress.config.options import LengthOptions, RunOptions
from compress.config.recipe import Recipe
from compress.errors import RecipeError
from tests import command, tiny
from tests.unshipped import Trained


@pytest.mark.parametrize(
    ("family", "prompted", "overrides", "name"),
    [
        ("bert", False, [], "prune-taylor"),
        ("bert", False, ["stages.triple.lr=1e-4"], "distilbert"),
        ("modernbert", False, [], "prune-taylor"),
        ("albert", False, [], "distilbert"),
        ("", True, [], "prompted"),
    ],
)
def test_the_first_fitting_line(family: str, prompted: bool, overrides: list[str], name: str) -> None:
    recipe, because = CandidateRecipes.load("auto", overrides).decide(kind="qa", family=family, prompted=prompted)
    assert recipe.name == name
    assert because


@pytest.mark.parametrize(
    ("kind", "family", "scored", "name", "sizes"),
    [
        ("ranking", "bert", False, "prune-taylor", {"layers": 0.5, "ffn": 0.33}),
        ("ranking", "bert", True, "margin-mse", {}),
        ("ranking", "xlnet", False, "margin-mse", {}),
        ("embedding", "bert", False, "prune-taylor", {"layers": 0.67, "ffn": 0.67}),
        ("embedding", "bert", True, "leaf", {}),
        ("embedding", "xlnet", False, "leaf", {}),
    ],
)
def test_passages(kind: str, family: str, scored: bool, name: str, sizes: dict[str, float]) -> None:
    table = CandidateRecipes.load("auto")
    recipe, because = table.decide(kind=kind, family=family, prompted=False, scored=scored)
    assert (recipe.name, recipe.target.sizes) == (name, sizes)
    assert because


def test_a_target_of_the_user() -> None:
    default, _ = CandidateRecipes.load("auto").decide(kind="tagging", family="bert", prompted=False)
    assert default.target.sizes == {"layers": 0.67, "ffn": 0.5}
    changed, reason = CandidateRecipes.load("auto", ["target.speedup=3"]).decide(
        kind="tagging", family="bert", prompted=False
    )
    assert (changed.target.budgets, changed.target.sizes) == ({"speedup": 3}, {})
    assert "two thirds" not in reason


def test_an_unknown_stage() -> None:
    with pytest.raises(RecipeError, match="no stage 'tripel'"):
        CandidateRecipes.load("auto", ["stages.tripel.lr=1"])


def test_a_table_of_the_user(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("choices: [{recipe: hinton, kinds: [qa], because: I said so}]", encoding="utf-8")
    found = preflight.load_choices(mine, length=LengthOptions(effort="best"))
    assert isinstance(found, CandidateRecipes)
    recipe, because = found.decide(kind="qa", family="bert", prompted=False)
    assert (recipe.name, because, recipe.training[0].effort) == ("hinton", "I said so", "best")
    with pytest.raises(RecipeError, match="none of hinton fits a bert teacher and a task of tagging"):
        found.decide(kind="tagging", family="bert", prompted=False)
    mine.write_text("choices: [{recipe: hinton, because: no, familys: [bert]}]", encoding="utf-8")
    with pytest.raises(RecipeError, match="Did you mean 'families'"):
        preflight.load_choices(mine)


def test_a_run_prints_its_recipe_and_the_reason(tmp_path: Path, home: Path, unmeasured: None) -> None:
    mine = tmp_path / "mine.yaml"
    quick = "[stages.0.steps=2, stages.0.max_length=32]"
    mine.write_text(f"choices: [{{recipe: hinton, set: {quick}, because: it is quick}}]", encoding="utf-8")
    printed = tmp_path / "printed.txt"
    with printed.open("w", encoding="utf-8") as file, pytest.raises(Trained):
        compress.distill(
            teacher=tiny.checkpoint(tmp_path / "teacher", tiny.bert()), recipe=mine,
            data=tiny.reviews(tmp_path / "data"),
            out=tmp_path / "run", options=RunOptions(gate="warn"), console=Console(file=file, width=200),
        )  # fmt: skip
    assert "recipe hinton: it is quick" in printed.read_text(encoding="utf-8")
    assert Recipe.load(tmp_path / "run" / "recipe.yaml").name == "hinton"


def test_the_command_shows_the_table() -> None:
    shown = command.run("recipes", "auto")
    assert shown.out.strip() == table_path("auto").read_text(encoding="utf-8").strip()
    (first, *_) = json.loads(command.run("recipes", "auto", "--json").out)["choices"]
    assert first["recipe"] == "prompted"
