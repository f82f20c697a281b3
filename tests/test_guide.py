"""The list of recipes says, for each, when to choose it, what to bring, and what it takes."""

import pytest

from compress.config import catalog
from compress.config.loader import names
from compress.config.recipe import Recipe


@pytest.mark.parametrize("name", names())
def test_every_recipe_states_when_to_choose_it(name: str) -> None:
    recipe = Recipe.load(name)
    assert recipe.choose
    assert recipe.needs
    assert recipe.cost
    assert recipe.choose[0].islower(), "it ends the sentence: choose it when"


def test_none_says_what_the_one_it_extends_says() -> None:
    said = [recipe.choose for recipe in map(Recipe.load, names())]
    assert sorted({text for text in said if said.count(text) > 1}, key=str) == []


@pytest.mark.parametrize(
    ("name", "purpose", "student"),
    [
        ("hinton", "task", "half the layers"),
        ("tinybert", "task", "bert, 4 x 312"),
        ("minilm", "corpus", "bert, 6 x 384"),
        ("minilm-assistant", "corpus", "bert, half the layers"),
        ("albert", "pretraining", "albert, 12 x 768"),
        ("albert-shared", "task", "albert, 128 wide embedding"),
        ("prompted", "prompted", "the checkpoint minilm"),
        ("leaf", "vectors", "half the layers"),
    ],
)
def test_what_it_trains_on_and_what_comes_of_it(name: str, purpose: str, student: str) -> None:
    recipe = Recipe.load(name)
    assert (catalog.purpose(recipe), catalog.student(recipe)) == (purpose, student)
    assert catalog.plain(recipe)["choose"] == recipe.choose
