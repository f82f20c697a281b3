"""The phase that finds sizes for a recipe's budget, and keeps it."""

from dataclasses import dataclass, replace

from compress.config.recipe import Target
from compress.jobs.job import Job
from compress.jobs.phase import Estimated, Phase, estimate_phases, run_phases
from compress.pruning.budget import (
    check_budget,
    refuse_unreachable,
    resolve_budget,
)


class CheckBudget(Phase[Job]):
    """Refuse a budget that no shape of the model keeps, or the whole model, before
    anything is trained."""

    def run(self, job: Job) -> Job:
        models = job.models
        if models.run.main:
            refuse_unreachable(
                models.recipe, models.base_teacher, models.context, models.run
            )
        return job

    def estimate(self, job: Job) -> Estimated[Job]:
        return self.run(job), []


@dataclass(frozen=True)
class KeepBudget(Phase[Job]):
    """Run phases with sizes in place of the recipe's budget, if it has one; again with
    smaller sizes while the shipped file is too slow."""

    phases: tuple[Phase[Job], ...]

    def pending(self, job: Job) -> dict[str, str]:
        found = dict[str, str]()
        for phase in self.phases:
            found |= phase.pending(job)
        return found

    def run(self, job: Job) -> Job:
        models = job.models
        recipe = models.recipe
        context = models.context
        run = models.run
        done = job
        for sized in resolve_budget(recipe, job.teacher, context, run):
            done = run_phases(self.phases, job.with_recipe(sized))
            if done.bundle is not None:
                check_budget(done.bundle, recipe, job.teacher, context, run)
        return done

    def estimate(self, job: Job) -> Estimated[Job]:
        recipe = job.models.recipe
        if not recipe.target.budgets:
            return estimate_phases(self.phases, job)
        layers = job.models.base_teacher.model.config.num_hidden_layers
        whole = Target.model_validate({"layers": layers})
        job = job.with_recipe(recipe.model_copy(update={"target": whole}))
        job, estimates = estimate_phases(self.phases, job)
        raced = {stage.name for stage in recipe.pruning}
        note = "after a race of files, which is not counted"
        return job, [
            replace(each, note=note) if each.name in raced else each
            for each in estimates
        ]
