"""The list of recipes: when to choose each, what it needs and what it costs."""

import pytest

from compress.config import catalog
from compress.config.loader import names
from compress.config.recipe import Recipe


@pytest.mark.parametrize("name", names())
def test_every_recipe_has_guidance(name: str) -> None:
    recipe = Recipe.load(name)
    assert recipe.choose
    assert recipe.needs
    assert recipe.cost
    assert recipe.choose[0].islower(), "it ends the sentence: choose it when"


def test_guidance_is_not_inherited() -> None:
    texts = [recipe.choose for recipe in map(Recipe.load, names())]
    assert len(set(texts)) == len(texts)


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
def test_purpose_and_student(name: str, purpose: str, student: str) -> None:
    recipe = Recipe.load(name)
    assert (catalog.purpose(recipe), catalog.student(recipe)) == (purpose, student)
    assert catalog.plain(recipe)["choose"] == recipe.choose
