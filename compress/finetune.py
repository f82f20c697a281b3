"""A teacher with a head for the task: its own, or one fine-tuned here once and kept for every later run."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from accelerate import PartialState
from transformers import PreTrainedModel, set_seed

from compress import digest
from compress.data.cache import cached, home, is_whole
from compress.processes import from_first
from compress.recipe import Stage
from compress.run import Run
from compress.stages import Material, run_stage
from compress.teachers import Teacher, load


def with_head(teacher: Teacher, stage: Stage, material: Material, run: Run) -> Teacher:
    """`teacher` itself when it was trained for this task, else its fine-tuned self.

    The result is kept under $COMPRESS_HOME/teachers by what it depends on: the checkpoint, the data, the stage's
    numbers, seed and precision.
    """
    if teacher.trained:
        return teacher
    data = material.data

    def fresh() -> PreTrainedModel:
        """With a new head, drawn from the run's seed."""
        return load(teacher.name, teacher.folder, data.task, allow_pickle=teacher.pickled).model

    said = (f"{teacher.name} has no head for {data.name}: fine-tuning it first", f"fine-tuned on {data.name}")
    kept = trained_once(teacher, data.name, data.fingerprint, stage, material, run=run, fresh=fresh, said=said)
    return replace(load(teacher.name, kept, data.task), tokenizer=teacher.tokenizer)


def trained_once(
    teacher: Teacher,
    on: str,
    fingerprint: str,
    stage: Stage,
    material: Material,
    *,
    run: Run,
    fresh: Callable[[], PreTrainedModel],
    said: tuple[str, str],
) -> Path:
    """The folder of what `stage` makes of `fresh()` on data of this name and fingerprint: trained now, or kept before.

    `said`: what to tell where it is trained, and what it is called where it was kept.
    """
    numbers = stage.model_dump(exclude_defaults=True)
    key = digest.of_value([teacher.digest, fingerprint, numbers, run.seed, material.bf16])
    name = "".join(c if c.isalnum() else "-" for c in f"{teacher.name}-{on}"[-60:]).strip("-")
    kept = home() / "teachers" / f"{name}-{key[:12]}"
    console = material.console
    if from_first(lambda: is_whole(kept)):
        console.print(f"{teacher.name}, {said[1]}: kept from an earlier run in {kept}")
    else:
        console.print(said[0])
        if not run.done(stage.name, console):
            set_seed(run.seed)
            run_stage(stage, fresh().requires_grad_(True), None, material, run)
        if run.main:
            cached(kept, lambda folder: shutil.copytree(run.result(stage.name), folder, dirs_exist_ok=True))
    PartialState().wait_for_everyone()  # until the first process has kept it
    return kept
