"""A teacher with a head for the task: its own, or one fine-tuned here once and kept for every later run."""

import shutil
from dataclasses import replace

from accelerate import PartialState
from transformers import set_seed

from compress import digest
from compress.data.cache import home
from compress.files import filled
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
    numbers = stage.model_dump(exclude_defaults=True)
    key = digest.of_value([teacher.digest, data.fingerprint, numbers, run.seed, material.bf16])
    name = "".join(c if c.isalnum() else "-" for c in f"{teacher.name}-{data.name}"[-60:]).strip("-")
    kept = home() / "teachers" / f"{name}-{key[:12]}"
    if not kept.is_dir():
        material.console.print(f"{teacher.name} has no head for {data.name}: fine-tuning it first")
        if not run.result(stage.name).is_dir():
            set_seed(run.seed)
            # a new head, drawn from the run's seed
            fresh = load(teacher.name, teacher.folder, data.task, allow_pickle=teacher.pickled)
            run_stage(stage, fresh.model.requires_grad_(True), None, material, run)
        if run.main:
            with filled(kept) as folder:
                shutil.copytree(run.result(stage.name), folder, dirs_exist_ok=True)
    else:
        material.console.print(f"{teacher.name}, fine-tuned on {data.name}: kept from an earlier run in {kept}")
    PartialState().wait_for_everyone()  # until the first process has kept it
    tuned = load(teacher.name, kept, data.task)
    return replace(tuned, tokenizer=teacher.tokenizer)
