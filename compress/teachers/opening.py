"""Choose the source of a teacher's answers by what the user named, and a recipe that
fits it."""

from compress.config.choices import CandidateRecipes
from compress.config.recipe import Recipe
from compress.console import print_note
from compress.jobs.loading import TaskLoader
from compress.jobs.request import DistillRequest
from compress.models import checkpoints
from compress.models.loader import load_config
from compress.models.teacher import is_reranker
from compress.prompting.labels import starting_checkpoint
from compress.prompting.vectors import gives_vectors, open_source
from compress.teachers.checkpoint import CheckpointTeacher
from compress.teachers.cross_encoder import CrossEncoder, is_cross_encoder
from compress.teachers.knowledge import KnowingCheckpoint
from compress.teachers.prompted import PromptedModel
from compress.teachers.source import MINILM, TeacherSource
from compress.teachers.vectors import VectorTeacher
from compress.training.processes import node_first


def open_teacher(request: DistillRequest, recipe: Recipe) -> TeacherSource:
    """Open what the user named as the teacher.

    Raises RecipeError if the recipe needs what this source cannot give, and
    TeacherError or DataError for one that cannot be read.
    """
    name = request.teacher
    prompt = request.prompt
    allow_pickle = request.options.allow_pickle
    if prompt is not None:
        return PromptedModel(name, starting_checkpoint(recipe), allow_pickle, prompt)
    if request.knowledge is not None:
        return KnowingCheckpoint.from_table(
            name, request.knowledge, recipe, allow_pickle=allow_pickle
        )
    if gives_vectors(name):
        start = starting_checkpoint(recipe, default=MINILM)
        return VectorTeacher(name, start, allow_pickle, open_source(name))
    if is_cross_encoder(name, recipe, allow_pickle=allow_pickle):
        start = starting_checkpoint(recipe, default=MINILM)
        return CrossEncoder(name, start, allow_pickle)
    return CheckpointTeacher(name, name, allow_pickle)


def choose_recipe(
    candidates: CandidateRecipes, request: DistillRequest, tasks: TaskLoader
) -> Recipe:
    """Choose the recipe that fits teacher and task; print why.

    For vectors, the family is taken from the checkpoint that students are cut out of.
    """
    options = request.options
    prompted = request.prompt is not None
    vectors = gives_vectors(request.teacher, prompted=prompted)
    family = ""
    reranker = False
    with node_first():
        data = tasks.load(request.columns, unlabelled=prompted)
        if not prompted:
            start = MINILM if vectors else request.teacher
            folder = checkpoints.resolve(start, allow_pickle=options.allow_pickle)
            family = load_config(folder).model_type
            reranker = is_reranker(folder, allow_pickle=options.allow_pickle)
    recipe, reason = candidates.decide(
        kind=data.task.kind,
        family=family,
        prompted=prompted,
        scored=vectors or "teacher" in data.train.column_names,
        reranker=reranker,
        knows=request.knowledge is not None,
    )
    print_note(request.console, f"recipe {recipe.name}: {reason}")
    return recipe
