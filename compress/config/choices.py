"""Choose the recipe of `--recipe auto`: the first line of a table that fits. Imports neither torch nor transformers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from compress.config.loader import explain, folder, load_yaml, locate
from compress.config.recipe import Frozen, Recipe
from compress.errors import RecipeError

AUTO = "auto"


class Choice(Frozen):
    """Take this recipe where all that is said holds.

    kinds, families   of the task, and of the teacher's transformers config; left out: any
    prompted          whether a prompted language model is the teacher
    set               changes of its numbers, but for those of a `target` where one is given
    because           the reason, told to the user
    """

    recipe: str
    because: str
    kinds: tuple[str, ...] | None = None
    families: tuple[str, ...] | None = None
    prompted: bool = False
    set: tuple[str, ...] = ()

    def fits(self, kind: str, family: str, prompted: bool) -> bool:
        known = (self.kinds is None or kind in self.kinds) and (self.families is None or family in self.families)
        return known and self.prompted == prompted


class Choices(Frozen):
    """The table, read from a file whose one key is `choices`."""

    choices: tuple[Choice, ...] = Field(min_length=1)

    @staticmethod
    def load(name: str | Path) -> "Choices":
        """Read `auto`, or a .yaml file of choices. Raises RecipeError."""
        path = table_path(name)
        try:
            return Choices.model_validate(load_yaml(path))
        except ValidationError as error:
            raise RecipeError([explain(path.name, each, Choice.model_fields) for each in error.errors()]) from error

    def plain(self) -> dict[str, Any]:
        """Return the mapping of YAML, defaults included."""
        return self.model_dump(mode="json")


def table_path(name: str | Path) -> Path:
    """Find the file of `auto`, or a .yaml file of choices. Raises RecipeError where there is none."""
    return folder() / "choices" / "auto.yaml" if name == AUTO else locate(str(name))


@dataclass(frozen=True)
class CandidateRecipes:
    """Hold the recipes that may be taken, each with the reason, until teacher and task are known."""

    options: tuple[tuple[Choice, Recipe], ...]

    @staticmethod
    def load(name: str | Path, overrides: Sequence[str] = (), *, paper: bool = False) -> "CandidateRecipes":
        """Read `auto`, or a file of choices; lines whose recipe does not have what `overrides` change are left out.

        Raises RecipeError, where no line is left that of the first.
        """
        options, refused = list[tuple[Choice, Recipe]](), list[RecipeError]()
        aimed = any(line.startswith("target.") for line in overrides)
        for choice in Choices.load(name).choices:
            own = [line for line in choice.set if not (aimed and line.startswith("target."))]
            try:
                options.append((choice, Recipe.load(choice.recipe, [*own, *overrides], paper=paper)))
            except RecipeError as error:
                refused.append(error)
        if not options:
            raise refused[0]
        return CandidateRecipes(tuple(options))

    def with_effort(self, effort: Literal["quick", "normal", "best"]) -> "CandidateRecipes":
        """Return the same with open-ended stages at this effort."""
        return replace(self, options=tuple((choice, recipe.with_effort(effort)) for choice, recipe in self.options))

    def decide(self, *, kind: str, family: str, prompted: bool) -> tuple[Recipe, str]:
        """Return the first recipe that fits, and why it was taken. Raises RecipeError where none does."""
        for choice, recipe in self.options:
            if choice.fits(kind, family, prompted):
                return recipe, choice.because
        tried = ", ".join(recipe.name for _, recipe in self.options)
        asked = "prompted teacher" if prompted else f"{family} teacher and a task of {kind}"
        raise RecipeError([f"--recipe auto: none of {tried} fits a {asked}: name a recipe (`compress recipes`)"])


def is_table(name: Any) -> bool:
    """Return True for `auto`, and for a file of choices instead of a recipe."""
    if name == AUTO:
        return True
    path = Path(str(name))
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        return False
    tree = load_yaml(path)
    return isinstance(tree, dict) and "choices" in tree
