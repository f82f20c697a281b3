"""Check a command in its first second: recipe, files, places and numbers, before torch is imported.

Commands call this before they import what trains, library functions before they do anything. Nothing is opened but
settings, nothing is fetched, and no code of the user's runs.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel

from compress.config import user_code
from compress.config.choices import CandidateRecipes, is_table
from compress.config.limits import check_minutes, check_seed, check_tracker
from compress.config.options import LengthOptions, RunOptions
from compress.config.recipe import Recipe
from compress.data import sources
from compress.errors import RecipeError, RunError, TeacherError
from compress.models import checkpoints
from compress.prompting import vectors
from compress.training.run import Run, is_finished


def load_recipe(
    recipe: str | Path | Recipe, overrides: Sequence[str] | None = None, length: LengthOptions = LengthOptions()
) -> Recipe:
    """Return the recipe of a name or a file, as these options change it. Raises RecipeError.

    A Recipe keeps its numbers; only `effort` reaches it. Raises CompressError for a limit of minutes that is none.
    """
    check_minutes(length.minutes)
    if not isinstance(recipe, Recipe):
        recipe = Recipe.load(recipe, overrides or (), paper=length.paper)
    elif overrides or length.paper:
        given = [*(overrides or ()), *(["paper"] if length.paper else [])]
        raise RecipeError([f"overrides ({', '.join(given)}): are for a recipe's name or file, not for a Recipe"])
    return recipe if length.effort is None else recipe.with_effort(length.effort)


def load_choices(
    recipe: str | Path | Recipe | CandidateRecipes,
    overrides: Sequence[str] | None = None,
    length: LengthOptions = LengthOptions(),
) -> Recipe | CandidateRecipes:
    """Return the recipe as `load_recipe` does; of `auto`, or of a file of choices, those that may be taken.

    Raises RecipeError for one that does not end in a model for a task.
    """
    if isinstance(recipe, CandidateRecipes):
        return recipe
    if isinstance(recipe, Recipe) or not is_table(recipe):
        found = load_recipe(recipe, overrides, length)
        check_task(found)
        return found
    check_minutes(length.minutes)
    candidates = CandidateRecipes.load(recipe, overrides or (), paper=length.paper)
    for _, each in candidates.options:
        check_task(each)
    return candidates if length.effort is None else candidates.with_effort(length.effort)


def check(
    settings: BaseModel | CandidateRecipes,
    *,
    teacher: str,
    out: str | Path,
    data: str | None = None,
    corpus: str | None = None,
    prompted: bool = False,
    options: RunOptions = RunOptions(),
) -> None:
    """Raise a CompressError for whatever is wrong with these as far as it shows before torch is imported.

    settings   a recipe, several to choose from, or a space
    prompted   `teacher` is a language model, and may be an endpoint's file; or it gives vectors alone
    """
    check_seed(options.seed)
    check_tracker(options.track)
    for each in [recipe for _, recipe in settings.options] if isinstance(settings, CandidateRecipes) else [settings]:
        user_code.check(each, options.allow_code)
    if prompted and teacher.endswith((".yaml", ".yml", *vectors.FILES)):
        if not Path(teacher).is_file():
            raise TeacherError(f"{teacher}: no such endpoint file, or file of vectors")
    else:
        checkpoints.check(teacher, allow_pickle=options.allow_pickle)
    if data is not None:
        sources.check(data)
    if corpus is not None:
        sources.check_corpus(corpus)
    if os.environ.get("RANK", "0") == "0":  # other processes of a launch find the run that the first one has begun
        Run.check(Path(out), resume=options.resume)


def check_task(recipe: Recipe) -> None:
    """Raise RecipeError for a recipe that does not end in a model for a task."""
    if recipe.stages[-1].head != "task":
        raise RecipeError(
            [f"{recipe.name}: ends in a {recipe.stages[-1].head} head, not a task: `compress pretrain` runs it"]
        )


def without_task(recipe: Recipe, corpus: str | None, data: str | None) -> Recipe:
    """Return the recipe with the stages before the first with a task's head. Raises RecipeError where there is none, or
    where one lacks its text or labels."""
    until = next((at for at, stage in enumerate(recipe.stages) if stage.head == "task"), len(recipe.stages))
    stages = recipe.stages[:until]
    if not stages:
        raise RecipeError(
            [f"{recipe.name}: begins with a task; `compress distill` runs it. Recipes for `compress pretrain` begin "
             "with stages on text, as distilbert-general and tinybert-general do"]
        )  # fmt: skip
    for stage in stages:
        if stage.data == "text" and corpus is None and data is None:
            raise RecipeError(
                [f"{recipe.name}: stage {stage.name} learns from text: give --corpus (pydoc is embedded)"]
            )
        if stage.data == "task" and data is None:
            raise RecipeError([f"{recipe.name}: stage {stage.name} learns from labelled examples: give --data"])
    return recipe.model_copy(update={"stages": stages})


RUNS = Path("runs")
"""Where runs go that are given no folder."""


def choose_out(recipe: str, data: str, *, resume: bool = False) -> Path:
    """Choose the folder of a run that is given none: runs/RECIPE-DATA-N, N one more than any there has.

    recipe, data  names or paths, of which the last part is taken
    resume        take the newest there that is not finished, or else the newest, instead of a new one

    Raises RunError where there is none to resume, and where several processes would have to choose the same.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise RunError("--out: is needed where several processes run: each would choose a folder of its own")
    source = re.sub(r"^\w+=", "", data.partition(",")[0])
    name = "-".join(re.sub(r"[^\w.]+", "-", Path(each).stem).strip("-") or "run" for each in (recipe, source))
    numbered = {}
    for path in RUNS.glob(f"{name}-*"):
        if (number := path.name.removeprefix(f"{name}-")).isdecimal():
            numbered[int(number)] = path
    if not resume:
        return RUNS / f"{name}-{max(numbered, default=0) + 1}"
    if not numbered:
        raise RunError(f"{RUNS / name}-*: there is no run that --resume could continue; name it by --out")
    return numbered[max(numbered, key=lambda number: (not is_finished(numbered[number]), number))]
