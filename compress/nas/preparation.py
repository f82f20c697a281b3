"""Check the arguments of a search, load its inputs, and open its job."""

from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from transformers import PreTrainedModel

from compress.arguments import (
    DataLike,
    NameLike,
    PathName,
    Share,
    TeacherLike,
    check_arguments,
)
from compress.benchmark.device import Device
from compress.config import user_code
from compress.config.options import (
    DataOptions,
    MeasureOptions,
    RunOptions,
    StudyOptions,
)
from compress.config.recipe import Recipe
from compress.console import print_note
from compress.data import load_task
from compress.data.cache import is_whole
from compress.errors import RecipeError, SearchError
from compress.exporters.manifest import kind_of_bundle
from compress.jobs.checks import (
    check_kind,
    check_lengths,
    check_recipe,
    join_processes,
    measure_lengths,
)
from compress.jobs.job import Job
from compress.jobs.loading import TaskLoader
from compress.jobs.shipping import BUDGETED_LIMIT
from compress.jobs.stages import StageModels
from compress.latency.features import Terms
from compress.latency.model import LatencyTable
from compress.models import checkpoints
from compress.models import precision as precisions
from compress.models import teacher as teachers
from compress.nas.config import Budget, SearchConfig, Space
from compress.nas.context import SearchContext, load_student_state
from compress.nas.costs import LATENCIES, SHAPES_DRAWN, CostModel
from compress.nas.space import ShapeChoice, Shapes
from compress.nas.study import close_study, join_study
from compress.nas.time_budget import PLAIN_PARTS, SUPERNET, Parts, TimeBudget
from compress.nas.trial import count_scored
from compress.provenance import command_line, redact
from compress.records.forecast import PhaseEstimate
from compress.records.search_report import SearchReport, TrialRecord
from compress.slicing.plan import SlicePlan
from compress.teachers.checkpoint import CheckpointTeacher
from compress.teachers.inputs import load_inputs, make_context
from compress.training.run import Run

if TYPE_CHECKING:
    import optuna

STUDY = "study.db"
"""The database of the study in the search's folder."""


@check_arguments
@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """The keyword arguments of `compress.search`, which documents them, and of its
    forecast."""

    teacher: TeacherLike
    data: DataLike
    out: PathName
    space: NameLike | Space = "width-depth"
    budget: Budget = Budget()
    device: MeasureOptions = MeasureOptions()
    study: StudyOptions = StudyOptions()
    max_drop: Share = BUDGETED_LIMIT
    columns: DataOptions = DataOptions()
    options: RunOptions = RunOptions()
    console: Console | None = None

    @property
    def screen(self) -> Console:
        """The console to print to; without one, nothing is printed."""
        return self.console or Console(quiet=True)

    def make_config(self, teacher: str, data: str, space: Space) -> SearchConfig:
        """Check the request, and return the settings of a search with this teacher,
        data and space. Raises a CompressError."""
        device = self.device
        study = self.study
        options = self.options
        user_code.load_kind(self.columns.kind, options.allow_code)
        if any(stage.max_length == "auto" for stage in space.stages.values()):
            space = space.with_length(self._fitting_length(teacher, data))
        if join_processes().num_processes > 1:
            raise SearchError(
                "a search runs in one process; start more with `compress search "
                "--storage URL --worker`"
            )
        seq = min(128, space.final[-1].length) if device.seq is None else device.seq
        objectives = ["score", *(study.objective or ["latency"])]
        config = SearchConfig.parse(
            teacher=teacher,
            data=data,
            space=space,
            columns=self.columns,
            budget=self.budget,
            objectives=tuple(dict.fromkeys(objectives)),
            device=device.device,
            threads=device.threads,
            batch=device.batch,
            seq=seq,
            precision=device.file or "int8",
            shapes=device.shapes,
            rounds=device.rounds,
            runs=device.runs,
            training=precisions.choose(options.precision),
            max_drop=self.max_drop,
            anchors=study.anchor or (),
            seed=options.seed,
        )
        return config.with_code(options.allow_code)

    def _fitting_length(self, teacher: str, data: str) -> int:
        allow_pickle = self.options.allow_pickle
        seed = self.options.seed
        folder = checkpoints.resolve(teacher, allow_pickle=allow_pickle)
        kind = self.columns.kind or kind_of_bundle(folder)
        columns = replace(self.columns, kind=kind)
        loaded = load_task(data, **asdict(columns), seed=seed)
        model = teachers.load(teacher, folder, loaded.task, allow_pickle=allow_pickle)
        return measure_lengths(loaded, model, seed).fitting

    def identify(self, config: SearchConfig) -> dict[str, Any]:
        """Return what identifies the run, in addition to the settings of the search."""
        storage = self.study.storage
        return {
            "teacher": config.teacher,
            "data": config.data,
            "seed": config.seed,
            "precision": config.training,
            "columns": list(astuple(config.columns)),
            "sampler": self.study.sampler,
            "storage": None if storage is None else redact(storage),
            "study": self.study.name,
            "code": user_code.digests(config.space, config.columns.kind),
            "command": command_line(),
        }


@dataclass(frozen=True)
class SearchProgress:
    """Hold the finished work of a search: measured shapes, the supernet, and how many
    students are in each state."""

    latencies: LatencyTable | None = None
    supernet: Path | None = None
    scored: int = 0
    short: int = 0
    shipped: int = 0

    @staticmethod
    def read(path: Path, config: SearchConfig, study: StudyOptions) -> "SearchProgress":
        """Read the progress of the search in a folder, without writing to it."""
        run = Run(path, config.seed, main=False)
        scored = 0
        stage = config.space.supernet
        net = None
        if stage is not None and is_whole(run.result(stage.name)):
            net = run.result(stage.name)
        with suppress(SearchError):  # no trial was started yet
            joined = join_study(
                study.storage or path / STUDY, study.name or path.resolve().name
            )
            scored = count_scored(joined.get_trials(deepcopy=False))
            close_study(joined)
        states = [
            load_student_state(path, int(each.name))
            for each in path.glob("students/[0-9]*")
        ]
        return SearchProgress(
            LatencyTable.load(path / LATENCIES),
            net,
            scored,
            sum("short" in each.scores for each in states),
            sum("shipped" in each.scores for each in states),
        )


@dataclass(frozen=True)
class SearchJob:
    """A search, what it works on, and what its phases have made so far.

    teacher      the job of the phases that make the teacher, whose recipe has all
                 stages of the space
    device       None if shapes were measured before
    points       the finalists
    done         what an earlier session has done; per_file: least and most seconds of a
                 file to measure; net: the barely trained supernet; stages: estimates of
                 the stages of a finalist; unreachable: budgets that no shape keeps.
                 Only a forecast sets these
    """

    search: SearchConfig
    options: StudyOptions
    teacher: Job
    shapes: Shapes
    time_budget: TimeBudget
    device: Device | None
    found: SearchContext | None = None
    study: "optuna.Study | None" = None
    report: SearchReport | None = None
    points: tuple[TrialRecord, ...] = ()
    teacher_ms: float = 0.0
    done: SearchProgress = field(default_factory=SearchProgress)
    per_file: tuple[float, float] = (0.0, 0.0)
    net: PreTrainedModel | None = None
    stages: tuple[PhaseEstimate, ...] = ()
    unreachable: tuple[str, ...] = ()

    @property
    def context(self) -> SearchContext:
        """The context that students share, once shapes are measured."""
        assert self.found is not None, "shapes are measured first"
        return self.found

    @cached_property
    def drawn(self) -> list[ShapeChoice]:
        """Choices of the space, those with the fewest operations first."""
        setting = self.search.setting
        kind = self.teacher.models.context.kind

        def operations(choice: ShapeChoice) -> float:
            config = self.shapes.config(choice)
            return Terms.from_config(config, setting, kind).flops

        return sorted(self.shapes.drawn(SHAPES_DRAWN, self.search.seed), key=operations)

    @property
    def unmeasured(self) -> CostModel:
        """The costs of shapes without their latencies."""
        kind = self.teacher.models.context.data.task.kind
        return CostModel(self.search, self.shapes, LatencyTable({}, {}), kind)


def open_search(
    config: SearchConfig,
    options: StudyOptions,
    run: Run,
    time_budget: TimeBudget,
    device: Device | None,
    *,
    allow_pickle: bool = False,
    console: Console,
) -> SearchJob:
    """Load teacher and data, and check the stages of the space."""
    recipe = make_recipe(config.space)
    source = CheckpointTeacher(config.teacher, config.teacher, allow_pickle)
    tasks = TaskLoader(config.data, run.seed)
    inputs = load_inputs(source, tasks, columns=config.columns).compare(
        config.max_length
    )
    context = make_context(
        inputs, recipe, run, number_format=config.training, console=console
    )
    models = StageModels(recipe, inputs.teacher, None, context, run)
    shapes = Shapes.from_space(config.space, inputs.teacher.model.config)
    for line in shapes.dropped:
        print_note(console, line)
    check_stages(config.space, models)
    return SearchJob(config, options, Job(models), shapes, time_budget, device)


def make_recipe(space: Space) -> Recipe:
    """Return all stages of a space as one recipe, to check them."""
    stages = [stage for where, stage in space.stages.items() if where != "teacher"]
    return space.recipe(
        space.name, stages, None if space.mode == "supernet" else space.student
    )


def parts(space: Space) -> Parts:
    """Return the shares of a time limit for the parts of a search."""
    return SUPERNET if space.mode == "supernet" else PLAIN_PARTS


def check_stages(space: Space, models: StageModels) -> None:
    """Check the stages of a space like those of a recipe; errors name them as the space
    does.

    See `jobs.checks.check_recipe` and `StageModels.check`.
    """
    if space.mode == "supernet":
        SlicePlan.from_model(models.base_teacher.model)
    places = [where for where in space.stages if where != "teacher"]
    try:
        check_recipe(models.recipe, 1)
        check_lengths(models.recipe, models.base_teacher)
        check_kind(models.recipe, models.context.data.task.kind)
        models.check()
    except RecipeError as error:
        problems = error.problems
        for at, where in enumerate(places):
            dotted = where.replace("[", ".").rstrip("]")
            problems = [
                each.replace(f"stages[{at}]", where).replace(f"stages.{at}", dotted)
                for each in problems
            ]
        raise RecipeError(problems) from error
