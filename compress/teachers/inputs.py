"""Load the inputs of a run, resolve its recipe by them, and open the run."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

from rich.console import Console

from compress.config import user_code
from compress.config.choices import CandidateRecipes
from compress.config.options import DataOptions
from compress.config.recipe import Recipe
from compress.console import print_note, warn
from compress.data.collate import Collate
from compress.data.corpus import Corpus, load_corpus
from compress.data.lengths import RowLengths
from compress.data.task import TaskData
from compress.exporters.manifest import kind_of_bundle
from compress.jobs.checks import (
    check_kind,
    check_lengths,
    check_scores,
    describe_cuts,
    describe_unread,
    join_processes,
    load_functions,
    measure_lengths,
)
from compress.jobs.job import Job
from compress.jobs.loading import TaskLoader
from compress.jobs.pace import limit_time
from compress.jobs.phase import Phase
from compress.jobs.request import DistillRequest
from compress.jobs.stages import StageModels
from compress.models import checkpoints
from compress.models import precision as precisions
from compress.models import teacher as teachers
from compress.models.padding import pads_left
from compress.models.teacher import Teacher
from compress.teachers.labelling import label_texts
from compress.teachers.opening import choose_recipe, open_teacher
from compress.teachers.source import TeacherSource
from compress.training.context import TrainingContext, use_bf16
from compress.training.finetune import with_pretrained_head
from compress.training.processes import check_same, node_first
from compress.training.run import Run
from compress.training.sharding import Sharding


@dataclass(frozen=True)
class Inputs:
    """The loaded inputs of a run. digests: of teacher, start, data and corpus, as the
    run records them."""

    source: TeacherSource
    teacher: Teacher
    data: TaskData
    corpus: Corpus | None
    digests: dict[str, str]

    def take_scores(self, recipe: Recipe) -> "Inputs":
        """Return the inputs; if the data hold a teacher's scores, these become the
        teacher."""
        source, teacher = self.source.take_scores(self.data, self.teacher, recipe)
        return replace(self, source=source, teacher=teacher)

    def compare(self, max_length: int) -> "Inputs":
        """Return the inputs with the teacher's similarities for texts without gold
        ones. max_length: the tokens of a text that are read when students are
        scored."""
        data = self.source.compare(self.data, self.teacher, max_length)
        return replace(self, data=data)


def load_inputs(
    source: TeacherSource,
    tasks: TaskLoader,
    *,
    corpus: str | None = None,
    columns: DataOptions = DataOptions(),
    bf16: bool = False,
) -> Inputs:
    """Load data, text and teacher. The first process of a node fetches. Raises
    TeacherError, DataError."""
    allow_pickle = source.allow_pickle
    with node_first():
        folder = checkpoints.resolve(source.start, allow_pickle=allow_pickle)
        columns = replace(columns, kind=columns.kind or kind_of_bundle(folder))
        task_data = tasks.load(columns, unlabelled=source.unlabelled)
        start = teachers.load(
            source.start, folder, task_data.task, allow_pickle=allow_pickle
        )
        texts = load_corpus(corpus) if corpus else None
    task_data, teacher, digests = source.teach(task_data, start, bf16=bf16)
    digests["data"] = task_data.fingerprint
    if texts is not None:
        digests["corpus"] = texts.fingerprint
    return Inputs(source, teacher, task_data, texts, digests)


def resolve(recipe: Recipe, inputs: Inputs, lengths: RowLengths) -> Recipe:
    """Return the recipe as it will run: with the stages that read more rows than the
    task's, and with the lengths that the rows need.

    Raises RecipeError, TeacherError or DataError if teacher or data do not serve it.
    """
    check_kind(recipe, inputs.data.task.kind)
    check_scores(recipe, inputs.data)
    extended = inputs.source.extend(recipe, inputs.data, inputs.corpus)
    resolved = extended.with_length(lengths.fitting)
    check_lengths(resolved, inputs.teacher, tuned=inputs.source.tuned)
    return resolved


def make_context(
    inputs: Inputs,
    recipe: Recipe,
    run: Run,
    *,
    number_format: str,
    console: Console,
    sharding: Sharding | None = None,
) -> TrainingContext:
    """Make what the stages share, after the run has confirmed its inputs."""
    check_same(inputs.digests)
    run.confirm(**inputs.digests)
    for note in inputs.data.notes:
        print_note(console, note)
    teacher = inputs.teacher
    context = TrainingContext(
        inputs.data,
        inputs.corpus,
        teacher.tokenizer,
        Collate(teacher.tokenizer, left=pads_left(teacher.model)),
        use_bf16(number_format, recipe, teacher, console),
        console,
        base_teacher=teacher,
        masked_lm=lambda: with_pretrained_head(
            teacher, "masked_lm", recipe.teacher_lm, context, run
        ),
        sharding=sharding,
    )
    return context


@contextmanager
def open_job(
    request: DistillRequest,
    *,
    trial: bool = False,
) -> Iterator[tuple[Job, list[Phase[Job]]]]:
    """Load the inputs of a distillation, resolve its recipe, and open its run; yield
    the job, before anything is trained, and the phases that make its teacher.

    trial  make up answers that would take long to ask for

    Raises a CompressError for anything wrong with the request.
    """
    options = request.options
    console = request.console
    sharding = Sharding.take_request()
    state = join_processes()
    request.check_launch()
    chosen = request.recipe
    tasks = TaskLoader(request.data, options.seed)
    request = label_texts(request, tasks, trial=trial)
    if request.data != tasks.source:
        tasks = TaskLoader(request.data, options.seed)
    if isinstance(chosen, CandidateRecipes):
        chosen = choose_recipe(chosen, request, tasks)
    chosen = load_functions(chosen, state.num_processes, options.allow_code)
    user_code.load_kind(request.columns.kind, options.allow_code)
    kind = request.columns.kind or chosen.only_kind
    request = replace(request, columns=replace(request.columns, kind=kind))
    source = open_teacher(request, chosen)
    given = source.resolve(chosen)
    number_format = precisions.choose(options.precision)
    inputs = load_inputs(
        source.for_trial() if trial else source,
        tasks,
        corpus=request.corpus,
        columns=request.columns,
        bf16=number_format == "bf16",
    ).take_scores(given)
    lengths = measure_lengths(inputs.data, inputs.teacher, options.seed)
    recipe = resolve(given, inputs, lengths)
    inputs = inputs.compare(recipe.stages[-1].length)
    if sharding is not None:
        sharding.check(recipe)
    sharded = sharding is not None
    run = request.open_run(recipe, state, number_format, sharded=sharded)
    with closing(run):
        context = make_context(
            inputs,
            recipe,
            run,
            number_format=number_format,
            console=console,
            sharding=sharding,
        )
        if inputs.source.note:
            print_note(console, inputs.source.note)
        effort = request.length.effort
        unread = describe_unread(recipe, request.corpus, effort)
        untrained = inputs.source.untrained(inputs.teacher, recipe)
        stages = (*untrained, *recipe.training)
        context = limit_time(
            context, stages, run, minutes=request.length.minutes, began=request.began
        )
        models = StageModels(recipe, inputs.teacher, None, context, run)
        notes = [*models.check(), *describe_cuts(recipe, lengths), *unread]
        if sharding is not None and not untrained:
            notes.append(
                "--use_fsdp only splits a teacher that is fine-tuned, and none is"
            )
        if run.note:
            notes.append(run.note)
        for note in notes:
            warn(console, note)
        yield Job(models, tuple(notes)), inputs.source.phases(options)
