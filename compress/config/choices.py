"""Choose a recipe for `--recipe auto`: the first fitting line of a table. Imports
neither torch nor transformers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from compress.config.loader import explain, folder, load_yaml, locate
from compress.config.recipe import Recipe
from compress.config.stages import Effort, Frozen
from compress.errors import RecipeError

AUTO_RECIPE = "auto"


class Choice(Frozen):
    """A recipe, and the conditions under which to choose it.

    kinds, families   kinds of task, and model types of the teacher; left out: any
    prompted          whether the teacher is a prompted language model
    scored            whether the data bring a teacher's scores, or the teacher is
                      vectors alone; left out: either
    reranker          whether the teacher is a cross-encoder; left out: either
    set               overrides of its numbers; a user's own target replaces those of
                      `target`
    because           the reason, shown to the user
    """

    recipe: str
    because: str
    kinds: tuple[str, ...] | None = None
    families: tuple[str, ...] | None = None
    prompted: bool = False
    scored: bool | None = None
    reranker: bool | None = None
    set: tuple[str, ...] = ()

    def fits(
        self,
        kind: str,
        family: str,
        *,
        prompted: bool,
        scored: bool,
        reranker: bool,
    ) -> bool:
        """Return True if all conditions hold."""
        fits = (self.kinds is None or kind in self.kinds) and (
            self.families is None or family in self.families
        )
        fits = fits and self.prompted == prompted and self.scored in (None, scored)
        return fits and self.reranker in (None, reranker)

    def without_target(self) -> "Choice":
        """Return the choice for a user who gives the target."""
        own = [line for line in self.set if not line.startswith("target.")]
        if len(own) == len(self.set):
            return self
        return self.model_copy(update={"set": tuple(own), "because": OWN_TARGET})


OWN_TARGET = "the teacher keeps its most important parts, as the target asks"
"""The reason for a recipe that prunes, if the user gives the target."""


class Choices(Frozen):
    """The table of a file whose only key is `choices`."""

    choices: tuple[Choice, ...] = Field(min_length=1)

    @staticmethod
    def load(name: str | Path) -> "Choices":
        """Load `auto`, or a .yaml file of choices. Raises RecipeError."""
        path = table_path(name)
        try:
            return Choices.model_validate(load_yaml(path))
        except ValidationError as error:
            raise RecipeError(
                explain(path.name, error, lambda _: Choice.model_fields)
            ) from error

    def plain(self) -> dict[str, Any]:
        """Return the mapping of YAML, defaults included."""
        return self.model_dump(mode="json")


def table_path(name: str | Path) -> Path:
    """Return the path of `auto`, or of a .yaml file of choices. Raises RecipeError if
    it does not exist."""
    return (
        folder() / "choices" / "auto.yaml" if name == AUTO_RECIPE else locate(str(name))
    )


@dataclass(frozen=True)
class CandidateRecipes:
    """The recipes to choose from, until teacher and task are known."""

    options: tuple[tuple[Choice, Recipe], ...]

    @staticmethod
    def load(
        name: str | Path,
        overrides: Sequence[str] = (),
        *,
        paper: bool = False,
    ) -> "CandidateRecipes":
        """Load `auto`, or a file of choices. Recipes to which `overrides` do not apply
        are left out.

        Raises RecipeError, with the problems of the last and most general recipe, if
        none is left.
        """
        options = list[tuple[Choice, Recipe]]()
        problems: Sequence[str] = ()
        has_target = any(line.startswith("target.") for line in overrides)
        for given in Choices.load(name).choices:
            choice = given.without_target() if has_target else given
            own = choice.set
            try:
                options.append(
                    (
                        choice,
                        Recipe.load(choice.recipe, [*own, *overrides], paper=paper),
                    )
                )
            except RecipeError as error:
                problems = error.problems
        if not options:
            raise RecipeError(
                [f"--recipe {name}: no recipe takes these settings", *problems]
            )
        return CandidateRecipes(tuple(options))

    def with_effort(self, effort: Effort) -> "CandidateRecipes":
        """Return the candidates with their open-ended stages at this effort."""
        return replace(
            self,
            options=tuple(
                (choice, recipe.with_effort(effort)) for choice, recipe in self.options
            ),
        )

    def decide(
        self,
        *,
        kind: str,
        family: str,
        prompted: bool,
        scored: bool = False,
        reranker: bool = False,
        knows: bool = False,
    ) -> tuple[Recipe, str]:
        """Return the first recipe that fits, and the reason. Raises RecipeError if none
        does.

        knows: the teacher reads facts, which some recipes need.
        """
        for choice, recipe in self.options:
            if recipe.needs_knowledge and not knows:
                continue
            if choice.fits(
                kind, family, prompted=prompted, scored=scored, reranker=reranker
            ):
                return recipe, choice.because
        tried = ", ".join(dict.fromkeys(recipe.name for _, recipe in self.options))
        case = (
            "prompted teacher" if prompted else f"{family} teacher and a task of {kind}"
        )
        raise RecipeError(
            [
                f"--recipe auto: none of {tried} fits a {case}: name a recipe "
                "(`compress recipes`)"
            ]
        )


def is_table(name: Any) -> bool:
    """Return True for `auto`, and for a file that holds choices instead of a recipe."""
    if name == AUTO_RECIPE:
        return True
    path = Path(str(name))
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        return False
    tree = load_yaml(path)
    return isinstance(tree, dict) and "choices" in tree
