"""Define the keywords of the training commands, and the request they become once
objects are replaced by names and paths."""

import time
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from compress import io
from compress.arguments import (
    DataLike,
    NameLike,
    PathName,
    Share,
    TeacherLike,
    check_arguments,
)
from compress.config import user_code
from compress.config.choices import AUTO_RECIPE, CandidateRecipes
from compress.config.options import (
    DataOptions,
    GoalOptions,
    LengthOptions,
    PruneOptions,
    RunOptions,
    SettingOptions,
    Vocabulary,
)
from compress.config.recipe import Recipe
from compress.prompting.prompt import Prompt
from compress.provenance import command_line
from compress.training.processes import check_given, check_same
from compress.training.run import Run

if TYPE_CHECKING:
    from accelerate import PartialState


@check_arguments
@dataclass(frozen=True, kw_only=True)
class ForecastArguments:
    """The keywords of `compress.forecast`. See there."""

    teacher: TeacherLike
    data: DataLike
    recipe: NameLike | Recipe | CandidateRecipes = AUTO_RECIPE
    corpus: NameLike | None = None
    prompt: NameLike | Prompt | None = None
    knowledge: NameLike | None = None
    goal: GoalOptions = GoalOptions()
    columns: DataOptions = DataOptions()
    vocabulary: Vocabulary = "auto"
    length: LengthOptions = LengthOptions()
    options: RunOptions = RunOptions()
    console: Console | None = None


@check_arguments
@dataclass(frozen=True, kw_only=True)
class DistillArguments(ForecastArguments):
    """The keywords of `compress.distill`. See there."""

    out: PathName
    max_drop: Share | None = None


@check_arguments
@dataclass(frozen=True, kw_only=True)
class PruneArguments:
    """The keywords of `compress.prune`. See there."""

    model: TeacherLike
    data: DataLike
    out: PathName
    recipe: NameLike | Recipe = "prune-taylor"
    target: PruneOptions = PruneOptions()
    setting: SettingOptions = SettingOptions()
    columns: DataOptions = DataOptions()
    vocabulary: Vocabulary = "auto"
    max_drop: Share | None = None
    length: LengthOptions = LengthOptions()
    options: RunOptions = RunOptions()
    console: Console | None = None


@check_arguments
@dataclass(frozen=True, kw_only=True)
class ForecastPretrainingArguments:
    """The keywords of `compress.forecast_pretraining`. See there."""

    teacher: TeacherLike
    recipe: NameLike | Recipe
    corpus: NameLike | None = None
    data: DataLike | None = None
    length: LengthOptions = LengthOptions()
    options: RunOptions = RunOptions()
    console: Console | None = None


@check_arguments
@dataclass(frozen=True, kw_only=True)
class PretrainArguments(ForecastPretrainingArguments):
    """The keywords of `compress.pretrain`. See there."""

    out: PathName


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """The checked keywords of a training command, with names and paths for objects.

    began  when the command began, by `time.monotonic`
    """

    teacher: str
    data: str | None
    out: Path
    corpus: str | None
    columns: DataOptions = DataOptions()
    length: LengthOptions
    options: RunOptions
    console: Console
    began: float = field(default_factory=time.monotonic)

    def check_launch(self) -> None:
        """Compare what the processes of a launch have been given. Raises RunError."""
        check_given(teacher=self.teacher, data=self.data, corpus=self.corpus)

    def identify(self, recipe: Recipe, *, number_format: str) -> dict[str, Any]:
        """Return what identifies its run, besides the recipe."""
        return {
            "teacher": self.teacher,
            "data": self.data,
            "corpus": self.corpus,
            "seed": self.options.seed,
            "minutes": self.length.minutes,
            "precision": number_format,
            "columns": list(astuple(self.columns)),
            "code": user_code.digests(recipe, self.columns.kind),
            "command": command_line(),
        }

    def open_run(
        self,
        recipe: Recipe,
        state: "PartialState",
        number_format: str,
        *,
        sharded: bool = False,
    ) -> Run:
        """Open the run of a resolved recipe."""
        identity = self.identify(recipe, number_format=number_format)
        if sharded:
            identity["use_fsdp"] = True
        check_same(
            {
                "recipe": io.hash_value(recipe.to_yaml()),
                "seed": str(self.options.seed),
                "precision": number_format,
            }
        )
        return Run.open(
            self.out,
            recipe,
            identity | {"processes": state.num_processes},
            resume=self.options.resume,
            main=state.is_main_process,
            track=self.options.track,
        )


@dataclass(frozen=True, kw_only=True)
class PretrainRequest(TrainRequest):
    """The checked keywords of `compress.pretrain`."""

    recipe: Recipe


@dataclass(frozen=True, kw_only=True)
class DistillRequest(TrainRequest):
    """The checked keywords of `compress.distill`."""

    data: str
    recipe: Recipe | CandidateRecipes
    prompt: Prompt | None
    knowledge: str | None = None
    vocabulary: Vocabulary = "full"

    def identify(self, recipe: Recipe, *, number_format: str) -> dict[str, Any]:
        facts = super().identify(recipe, number_format=number_format)
        prompt = self.prompt and self.prompt.model_dump(mode="json")
        return facts | {"prompt": prompt, "knowledge": self.knowledge}
