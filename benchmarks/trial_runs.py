"""Run the stages of a recipe for benchmarks/recipes_for_real.py, once for the same code and settings."""

import json
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.common import COMMIT, ROOT
from benchmarks.trial_scores import Scored, score_majority, score_task, score_text
from compress.config.options import DataOptions, LengthOptions, RunOptions
from compress.config.recipe import Recipe
from compress.config.stages import Stage
from compress.data.cache import home
from compress.data.corpus import load_corpus
from compress.data.objects import data_path
from compress.io import hash_value, write_json
from compress.jobs.phase import run_phases
from compress.jobs.request import DistillRequest
from compress.prompting.prompt import Prompt
from compress.teachers.inputs import open_job
from compress.training.stage import Trained

KINDS: Mapping[str, Any] = {"vectors": "embedding", "answers": "embedding", "ranking": "ranking"}
CODE = subprocess.run(
    ["git", "-C", str(ROOT), "rev-parse", "HEAD:compress", *(
        f"HEAD:benchmarks/{name}.py" for name in ("trial_data", "trial_runs", "trial_scores")
    )],
    capture_output=True, text=True, check=False,
).stdout  # fmt: skip
"""What a run depends on, besides its settings: the code."""


@dataclass(frozen=True)
class Trial:
    """What the runs of a seed have in common: splits with a name for them, a teacher, and how they are scored.

    data, prompt, int8, measure: see benchmarks.recipes_for_real.Proof
    """

    data: str
    splits: Any
    drawn: tuple[Any, ...]
    teacher: str
    seed: int
    prompt: Prompt | None
    int8: bool
    measure: str


def run(recipe: Recipe, trial: Trial, corpus: str | None, *, untrained: bool = False) -> dict[str, Scored]:
    """Return what a recipe's stages were scored with, by side; from the cache if the same code has run them before."""
    text = load_corpus(corpus).fingerprint if corpus else None
    facts = [recipe.plain(), trial.drawn, trial.teacher, text, trial.seed, untrained, trial.int8, str(trial.prompt)]
    if recipe.stages[-1].head != "task":
        facts.append(trial.measure)
    file = home() / "recipes-for-real" / "runs" / f"{hash_value([CODE, *facts])[:24]}.json"
    if not file.exists():
        found = train(recipe, trial, corpus, untrained=untrained)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {side: [each, wrong.tolist()] for side, (each, wrong) in found.items()})
    kept = json.loads(file.read_text(encoding="utf-8"))
    return {side: (each, np.array(wrong)) for side, (each, wrong) in kept.items()}


def train(recipe: Recipe, trial: Trial, corpus: str | None, *, untrained: bool) -> dict[str, Scored]:
    """Run the recipe's stages, and score what they make."""
    stages, last = recipe.stages, recipe.stages[-1]
    began = time.perf_counter()
    if last.head != "task":  # what follows is not run
        after = Stage.model_validate({"finetune": "task-after-it", "lr": "auto", "max_length": 64})
        recipe = recipe.model_copy(update={"stages": (*stages, after)})
    with tempfile.TemporaryDirectory() as folder:
        request = DistillRequest(
            teacher=trial.teacher,
            data=data_path(trial.splits),
            out=Path(folder) / "run",
            recipe=recipe,
            corpus=corpus,
            prompt=trial.prompt,
            columns=DataOptions(kind=KINDS.get(trial.data)),
            length=LengthOptions(),
            options=RunOptions(seed=trial.seed, gate="warn", allow_code=str(ROOT / "benchmarks")),
            console=Console(),
        )
        with open_job(request) as (job, teacher_phases):
            models = job.models
            if last.head != "task":
                measured = score_text(models, models.recipe.stages[: len(stages)], trial.measure, untrained=untrained)
                sides = {"recipe": measured}
            elif untrained:
                sides = {"recipe": score_majority(job)}
            else:
                taught = run_phases(teacher_phases, job)
                sides = score_task(taught, int8=trial.int8)
            trained = {
                stage.name: Trained.read(models.run.result(stage.name))
                for stage in models.recipe.training
                if models.run.result(stage.name).is_dir()
            }
    found = sides["recipe"][0]
    found["steps_of"] = {stage: each.steps for stage, each in trained.items()}
    found["steps"] = sum(found["steps_of"].values())
    found["seconds"] = round(sum(each.seconds for each in trained.values()), 1)
    found["validated"] = [each.score for each in trained.values()][-1:]
    found["commit"] = COMMIT["commit"]
    found["minutes"] = round((time.perf_counter() - began) / 60, 1)
    return {side: (_plain(each), wrong) for side, (each, wrong) in sides.items()}


def _plain(found: dict[str, Any]) -> dict[str, Any]:
    """Return figures as JSON holds them."""
    return {
        key: value.tolist() if isinstance(value, np.ndarray | np.generic) else value for key, value in found.items()
    }
