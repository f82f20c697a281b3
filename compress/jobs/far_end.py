"""The far end of a path: a static student, a hundred times as fast as its teacher,
which reads words without their order."""

from typing import Any

from compress.config.recipe import Recipe
from compress.jobs.job import Job
from compress.models import student as students
from compress.pruning.budget import WHOLE_SHAPE, open_timer
from compress.pruning.path import COUNTED, count_cost
from compress.records.path import PathStudent
from compress.slicing.shape import Shape
from compress.training.unlabelled import add_texts

FAR_END = "static"
"""The recipe of the student, and its name on the path."""
NEAR = 0.08
"""How far a bag of words may fall below the required share of the teacher's score: a
static student, which learns from the teacher, keeps up to this much more."""


def far_recipe(job: Job) -> Recipe | None:
    """Return the recipe of the static student for the job's rows, or None if it does
    not serve the task, or if a bag of words shows that it would keep too little."""
    models = job.models
    context = models.context
    data = context.data
    keep = models.recipe.target.keep
    assert keep is not None and job.check is not None, "the teacher was checked first"
    recipe = Recipe.load(FAR_END)
    serves = any(term.serves(context.kind) for term in recipe.training[0].objective)
    if data.task.tokenwise or not serves:
        return None
    metric = data.task.metric
    others = data.task.baselines(data, data.validation).values()
    best = max(scores[metric] for scores in others)
    if best < (keep - NEAR) * job.check.scores[metric]:
        return None
    last = models.recipe.training[-1]
    recipe = add_texts(_fit_width(recipe, job), data, context.corpus)
    return recipe.with_effort(last.effort).with_length(last.length)


def _fit_width(recipe: Recipe, job: Job) -> Recipe:
    """Return the recipe with vectors that are no wider than the teacher."""
    width = Shape.from_config(job.teacher.model.config).hidden
    own = recipe.student.hidden or width
    student = recipe.student.model_copy(update={"hidden": min(own, width)})
    return recipe.model_copy(update={"student": student})


def describe_far_end(job: Job, recipe: Recipe) -> PathStudent:
    """Return the static student as a place on the path, its cost measured or counted as
    for other shapes."""
    models = job.models
    config = students.plan_config(recipe.student, job.teacher.model.config)
    own = models.recipe.model_copy(update={"stages": recipe.stages})
    found = count_cost(config, own, models.context)
    count = COUNTED.get(models.recipe.target.least)
    cost = _measure(job, config) if count is None else count(found)
    sizes = {"layers": 0, "hidden": config.hidden_size}
    return PathStudent(FAR_END, sizes, found.parameters, cost, found.file_mb)


def _measure(job: Job, config: Any) -> float:
    """Measure the milliseconds of its file, in one race with the teacher's."""
    models = job.models
    shapes = {WHOLE_SHAPE: job.teacher.model.config, FAR_END: config}
    with open_timer(models.recipe, models.context) as timer:
        return timer.measure(shapes)[FAR_END]
