"""The phase that runs the stages of a recipe."""

import time
from dataclasses import replace

from compress.config.stages import Prune, Stage
from compress.data.cache import is_whole
from compress.jobs.job import Job
from compress.jobs.phase import Estimated, Phase
from compress.jobs.trials import SHORT, Trials
from compress.models.teacher import Teacher
from compress.records.forecast import PhaseEstimate
from compress.training.augment import trains_language_model
from compress.training.finetune import cache_folder, load_with_head


class RunStages(Phase[Job]):
    """Run the stages of the recipe that are not done."""

    def pending(self, job: Job) -> dict[str, str]:
        return {
            stage.name: f"{stage.kind} ({stage.name})"
            for stage in job.models.recipe.stages
        }

    def run(self, job: Job) -> Job:
        student = job.models.run_stages(
            job.models.recipe.stages, teacher_logits=job.teacher_logits
        )
        return replace(job, student=student)

    def estimate(self, job: Job) -> Estimated[Job]:
        models = job.models
        trials = job.trials
        student = job.student
        recipe = models.recipe
        estimates = list[PhaseEstimate]()
        if trains_language_model(recipe):
            estimates += _estimate_language_model(
                recipe.teacher_lm, models.base_teacher, trials
            )
            brief = recipe.teacher_lm.model_copy(update={"steps": SHORT, "evaluate": 0})
            recipe = recipe.model_copy(update={"teacher_lm": brief})
            models = replace(models, recipe=recipe)
        for stage in recipe.stages:
            if isinstance(stage, Prune):
                began = time.perf_counter()
                student = models.prune(stage, student)
                seconds = time.perf_counter() - began
                estimates.append(PhaseEstimate(stage.name, seconds=(seconds, seconds)))
                continue
            # a language model that is trained for a trial must not be cached
            with trials.scratch_cache():
                teacher = models.teacher(stage)
            units = models.choose_units(stage, teacher)
            student = models.student(stage, student, teacher, units)
            found, student = trials.try_stage(
                stage, student, teacher, models.origin(stage, student, units)
            )
            estimates.append(found)
        return replace(job, student=student), estimates


def _estimate_language_model(
    stage: Stage, teacher: Teacher, trials: Trials
) -> list[PhaseEstimate]:
    """Estimate the training of a language model of the teacher, if the checkpoint has
    none."""
    context = trials.context
    found = load_with_head(
        teacher.name,
        teacher.folder,
        "masked_lm",
        kind=context.kind,
        allow_pickle=teacher.pickled,
    )
    if found.trained:
        return []
    text = context.text
    key = f"lm-{text.name}", text.fingerprint
    if is_whole(cache_folder(teacher, key, stage, context, trials.run)):
        return [PhaseEstimate(stage.name, cached=True)]
    return [trials.try_stage(stage, found.model.requires_grad_(True), None)[0]]
