"""The list of recipes: what each trains on, and what it makes."""

import pytest

from compress.config import catalog
from compress.config.recipe import Recipe


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
        ("prune-taylor", "pruning", "the teacher, pruned"),
        ("prune-cofi", "pruning", "as the teacher"),
        ("minillm", "writing", "half the layers"),
        ("gkd", "writing", "half the layers"),
        ("t5-spans", "pretraining", "12 x 768"),
    ],
)
def test_purpose_and_student(name: str, purpose: str, student: str) -> None:
    recipe = Recipe.load(name)
    assert (catalog.purpose(recipe), catalog.student(recipe)) == (purpose, student)
    assert catalog.plain(recipe)["choose"] == recipe.choose
