"""Collect the arguments of `distill`, so that they are passed on as one."""

from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from compress.config import user_code
from compress.config.choices import CandidateRecipes
from compress.config.options import DataOptions, LengthOptions, RunOptions
from compress.config.recipe import Recipe
from compress.prompting.prompt import Prompt
from compress.provenance import command_line


@dataclass(frozen=True)
class DistillRequest:
    """The arguments of `compress.distill`, with names and paths for objects. See
    there."""

    teacher: str
    data: str
    out: Path
    recipe: Recipe | CandidateRecipes
    corpus: str | None
    prompt: Prompt | None
    columns: DataOptions
    length: LengthOptions
    options: RunOptions
    console: Console

    def identify(
        self, recipe: Recipe, *, number_format: str, processes: int
    ) -> dict[str, Any]:
        """Return what identifies its run, besides the recipe that it chose."""
        return {
            "teacher": self.teacher,
            "prompt": self.prompt and self.prompt.model_dump(mode="json"),
            "data": self.data,
            "corpus": self.corpus,
            "seed": self.options.seed,
            "precision": number_format,
            "columns": list(astuple(self.columns)),
            "code": user_code.digests(recipe, self.columns.kind),
            "command": command_line(),
            "processes": processes,
        }
