"""Check recipe, files, folders and numbers of a command in its first second, before
torch is imported.

Only settings are read; nothing is fetched, and none of the user's code is run.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pydantic import BaseModel
from rich.console import Console

from compress import kinds
from compress.arguments import (
    NameLike,
    PathName,
    name_of,
    optional_name,
)
from compress.config import user_code
from compress.config.choices import CandidateRecipes, is_table
from compress.config.options import (
    CheckpointOptions,
    ColumnOptions,
    DataOptions,
    DeviceOptions,
    LengthOptions,
    MeasureOptions,
    RunOptions,
    StudyOptions,
)
from compress.config.recipe import Recipe
from compress.data import sources
from compress.data.objects import data_path, teacher_path
from compress.data.table_files import SUFFIXES, is_table_file
from compress.errors import (
    BundleError,
    CompressError,
    DataError,
    PruneError,
    RecipeError,
    RunError,
    SearchError,
    TeacherError,
    did_you_mean,
)
from compress.exporters.artifact import Bundle
from compress.exporters.checkpoint import resolve_run
from compress.exporters.manifest import find_bundle
from compress.jobs.request import (
    DistillRequest,
    ForecastArguments,
    ForecastPretrainingArguments,
    PretrainRequest,
    PruneArguments,
)
from compress.jobs.sizes import check_sizes
from compress.jobs.target import list_pruning, set_target
from compress.machine import count_processes, process_rank
from compress.models import checkpoints
from compress.nas.config import Space
from compress.outputs import check_new_file, check_new_folder, check_output_folder
from compress.prompting import vectors
from compress.prompting.http_model import Endpoint, names_endpoint
from compress.prompting.prompt import Prompt, load_prompt
from compress.provenance import find_missing, install_command
from compress.training.run import Run, is_finished


def load_recipe(
    recipe: NameLike | Recipe,
    overrides: Sequence[str] | None = None,
    length: LengthOptions = LengthOptions(),
) -> Recipe:
    """Load a recipe by name or path, with these changes. For a Recipe object, only
    `length.effort` may change.

    Raises RecipeError.
    """
    if not isinstance(recipe, Recipe):
        recipe = Recipe.load(name_of(recipe), overrides or (), paper=length.paper)
    elif overrides or length.paper:
        changes = [*(overrides or ()), *(["paper"] if length.paper else [])]
        raise RecipeError(
            [
                f"overrides ({', '.join(changes)}): only apply to a recipe's name or "
                "file, not to a Recipe"
            ]
        )
    return recipe if length.effort is None else recipe.with_effort(length.effort)


def load_choices(
    recipe: NameLike | Recipe | CandidateRecipes,
    overrides: Sequence[str] | None = None,
    length: LengthOptions = LengthOptions(),
) -> Recipe | CandidateRecipes:
    """Load a recipe as `load_recipe` does; for `auto`, or a file of choices, load all
    candidates.

    Raises RecipeError for a recipe that does not end in a model for a task.
    """
    if isinstance(recipe, CandidateRecipes):
        return recipe
    if isinstance(recipe, Recipe) or not is_table(recipe):
        found = load_recipe(recipe, overrides, length)
        check_task(found)
        return found
    candidates = CandidateRecipes.load(
        name_of(recipe), overrides or (), paper=length.paper
    )
    for _, each in candidates.options:
        check_task(each)
    return (
        candidates if length.effort is None else candidates.with_effort(length.effort)
    )


def check(
    settings: BaseModel | CandidateRecipes,
    *,
    teacher: str,
    out: PathName,
    data: str | None = None,
    corpus: str | None = None,
    answers: bool = False,
    columns: DataOptions = DataOptions(),
    options: RunOptions = RunOptions(),
) -> None:
    """Raise a CompressError for anything wrong with these that can be found without
    importing torch.

    settings   a recipe, several to choose from, or a space
    columns    the columns, the kind and the metric of the data, as far as they are
               given
    answers    whether `teacher` may be the file of an endpoint or of vectors
    """
    check_tracker(options.track)
    for each in (
        [recipe for _, recipe in settings.options]
        if isinstance(settings, CandidateRecipes)
        else [settings]
    ):
        user_code.check(each, options.allow_code)
    if columns.kind is not None and options.allow_code is None:
        kinds.find(columns.kind)  # which refuses one of the user's own
    kinds.check_metric(columns.metric, columns.kind)
    if answers and teacher.endswith((".yaml", ".yml", *vectors.VECTOR_FILES)):
        if not Path(teacher).is_file():
            raise TeacherError(f"{teacher}: no such endpoint file, or file of vectors")
    else:
        checkpoints.check(teacher, allow_pickle=options.allow_pickle)
    check_files(data=data, columns=columns, corpus=corpus)
    # the other processes of a launch see the run that the first one has created
    if process_rank() == 0:
        Run.check(Path(out), resume=options.resume)


def distill_request(arguments: ForecastArguments, out: PathName) -> DistillRequest:
    """Check the keywords of `compress.distill`. Raises a CompressError for anything
    wrong with them that can be found without importing torch."""
    options = arguments.options
    length = arguments.length
    overrides = [*(options.overrides or ()), *arguments.goal.overrides]
    request = DistillRequest(
        teacher=teacher_path(arguments.teacher),
        data=data_path(arguments.data),
        out=Path(out),
        recipe=load_choices(arguments.recipe, overrides, length),
        corpus=optional_name(arguments.corpus),
        prompt=Prompt.from_argument(arguments.prompt),
        knowledge=optional_name(arguments.knowledge),
        columns=arguments.columns,
        vocabulary=arguments.vocabulary,
        length=length,
        options=options,
        console=arguments.console or Console(quiet=True),
    )
    check(
        request.recipe,
        teacher=request.teacher,
        out=request.out,
        data=request.data,
        corpus=request.corpus,
        answers=True,
        columns=request.columns,
        options=options,
    )
    check_knowledge(request)
    # a student of a prompted teacher or of vectors begins as another checkpoint
    other = request.prompt is not None or vectors.gives_vectors(request.teacher)
    if isinstance(request.recipe, Recipe) and not other:
        check_sizes(request.recipe, request.teacher)
    return request


def prune_request(arguments: PruneArguments) -> DistillRequest:
    """Check the keywords of `compress.prune`, as `distill_request` does; its target is
    not set yet."""
    request = distill_request(
        ForecastArguments(
            teacher=arguments.model,
            data=arguments.data,
            recipe=arguments.recipe,
            goal=arguments.target.goal,
            columns=arguments.columns,
            vocabulary=arguments.vocabulary,
            length=arguments.length,
            options=arguments.options,
            console=arguments.console,
        ),
        arguments.out,
    )
    recipe = request.recipe
    if not isinstance(recipe, Recipe):
        raise PruneError(
            "--recipe: a file of choices, or auto, chooses between recipes that do not "
            f"prune; expected one of {', '.join(list_pruning())}, or a .yaml"
        )
    # a step's own options are only known once its paper, and so torch, is imported
    if recipe.pruning or all(stage.step is None for stage in recipe.training):
        aimed = set_target(
            recipe,
            arguments.target.values,
            arguments.setting.values,
            arguments.options.overrides,
        )
        check_sizes(aimed, request.teacher)
        if aimed.target.needs_device:
            _check_device(DeviceOptions(device=aimed.target.device))
    return request


def check_knowledge(request: DistillRequest) -> None:
    """Raise RecipeError for a recipe that needs knowledge and gets none, or for a
    teacher that cannot read it, and DataError for a missing table."""
    recipe = request.recipe
    path = request.knowledge
    if path is None:
        if isinstance(recipe, Recipe) and recipe.needs_knowledge:
            raise RecipeError(
                [
                    f"{recipe.name}: its teacher reads facts with each text: give "
                    "--knowledge, a table with the columns head, relation and tail"
                ]
            )
        return
    if request.prompt is not None or vectors.gives_vectors(request.teacher):
        raise RecipeError(
            [
                f"--knowledge {path}: only a checkpoint reads facts, not a prompted "
                "model or vectors: leave it out"
            ]
        )
    table = Path(path)
    if not table.is_file() or not is_table_file(table):
        raise DataError(
            f"--knowledge {path}: expected a file of triples, {', '.join(SUFFIXES)}."
        )


def pretrain_request(
    arguments: ForecastPretrainingArguments,
    out: PathName,
) -> PretrainRequest:
    """Check the keywords of `compress.pretrain`. Raises a CompressError for anything
    wrong with them that can be found without importing torch."""
    options = arguments.options
    length = arguments.length
    data = arguments.data
    name = teacher_path(arguments.teacher)
    text = optional_name(arguments.corpus)
    source = None if data is None else data_path(data)
    recipe = load_recipe(arguments.recipe, options.overrides, length)
    recipe = without_task(recipe, text, source)
    check(recipe, teacher=name, out=out, data=source, corpus=text, options=options)
    check_sizes(recipe, name)
    return PretrainRequest(
        teacher=name,
        data=source,
        out=Path(out),
        recipe=recipe,
        corpus=text,
        length=length,
        options=options,
        console=arguments.console or Console(quiet=True),
    )


def check_search(space: Space, study: StudyOptions, device: MeasureOptions) -> None:
    """Raise SearchError for a database that cannot be reached, or a file if the space
    varies the precision, DeviceError for a device that does not exist, and BundleError
    for an anchor that lacks the measured file."""
    _check_device(device)
    if device.file is not None and "precision" in space.axes:
        raise SearchError(
            f"--file {device.file}: {space.name} varies the precision: leave it out, "
            f"or give --set axes.precision=[{device.file}]"
        )
    anchors = study.anchor or []
    for anchor in anchors:
        Bundle.load(anchor).check_has(device.file or "int8")
        if anchors.count(anchor) > 1:
            raise BundleError(f"--anchor {anchor}: is given twice")
    if study.storage is not None and "://" in study.storage:
        from compress.nas.storage import close_storage, open_storage  # optuna

        close_storage(open_storage(study.storage))


def _check_device(device: DeviceOptions) -> None:
    if device.device != "local":
        from compress.benchmark.devices import check_device  # onnxruntime

        check_device(device)


def check_files(
    *,
    data: str | None,
    bundle: str | Path | None = None,
    model: str | None = None,
    columns: ColumnOptions = ColumnOptions(),
    corpus: str | None = None,
    options: CheckpointOptions = CheckpointOptions(),
) -> None:
    """Raise a CompressError for a bundle, a model (a bundle, a run or a checkpoint) or
    texts that are missing, or lack a named column, before torch is imported."""
    if bundle is not None:
        Bundle.load(bundle)
    if model is not None and find_bundle(Path(model)) is None:
        checkpoints.check(resolve_run(model), allow_pickle=options.allow_pickle)
    if data is not None:
        sources.check(data, columns.text, columns.label)
    if corpus is not None:
        sources.check_corpus(corpus)


def check_trimming(
    data: object, corpus: object, out: Path, columns: ColumnOptions
) -> None:
    """Raise CompressError if `compress.trim` gets no texts, ArgumentError for columns
    without data, BundleError or OutputError for a folder that it cannot write."""
    if data is None and corpus is None:
        raise CompressError(
            "trim: no texts; give --data, whose training texts show which tokens are "
            "used, or --corpus"
        )
    if data is None:
        columns.refuse()
    check_new_folder(out)


def check_labelling(
    teacher: str,
    prompt: str,
    data: str,
    out: Path,
    columns: ColumnOptions,
    *,
    allow_pickle: bool = False,
) -> None:
    """Raise a CompressError for a language model, prompt, text or file to write that is
    wrong, before torch is imported."""
    if out.parent.is_dir():
        check_new_file(out, "out", "labelled.jsonl")
    else:
        check_output_folder(out.parent, "out")
    load_prompt(prompt)
    if names_endpoint(teacher):
        Endpoint.load(teacher)
    else:
        checkpoints.check(teacher, allow_pickle=allow_pickle)
    if data != "pydoc" and not sources.local(data).exists():
        sources.check(data)
    sources.check_columns(data, columns.text, columns.label)


TRACKERS: Final = ("tensorboard", "mlflow", "wandb", "trackio")
"""The trackers of a run; each but the first is installed by the extra of its name."""


def check_tracker(name: str | None) -> None:
    """Raise CompressError for a tracker that is unknown, not installed, or too old;
    None means no tracker."""
    if name is None:
        return
    if name not in TRACKERS:
        raise CompressError(
            f"--track {name}: no such tracker.{did_you_mean(name, TRACKERS)}"
        )
    if name != "tensorboard" and (absent := find_missing(name)):
        raise CompressError(
            f"--track {name}: {absent}; this tracker needs it: {install_command(name)}"
        )


def check_task(recipe: Recipe) -> None:
    """Raise RecipeError for a recipe that does not end in a model for a task."""
    if recipe.stages[-1].head != "task":
        raise RecipeError(
            [
                f"{recipe.name}: ends in a {recipe.stages[-1].head} head, not a task: "
                "`compress pretrain` runs it"
            ]
        )


def without_task(recipe: Recipe, corpus: str | None, data: str | None) -> Recipe:
    """Return the recipe with only the stages before the first one with a task's head.
    Raises RecipeError if there are none, or if one lacks its text or labels."""
    until = next(
        (at for at, stage in enumerate(recipe.stages) if stage.head == "task"),
        len(recipe.stages),
    )
    stages = recipe.stages[:until]
    if not stages:
        raise RecipeError(
            [
                f"{recipe.name}: begins with a task; `compress distill` runs it. "
                "Recipes for `compress pretrain` begin with stages on text, such as "
                "distilbert-general and tinybert-general"
            ]
        )
    for stage in stages:
        if stage.data == "text" and corpus is None and data is None:
            raise RecipeError(
                [
                    f"{recipe.name}: stage {stage.name} learns from text: give "
                    "--corpus (pydoc is embedded)"
                ]
            )
        if stage.data == "task" and data is None:
            raise RecipeError(
                [
                    f"{recipe.name}: stage {stage.name} learns from labelled examples: "
                    "give --data"
                ]
            )
    return recipe.model_copy(update={"stages": stages})


RUNS_FOLDER = Path("runs")
"""The parent of run folders that are chosen automatically."""


def choose_out(recipe: str, data: str, *, resume: bool = False) -> Path:
    """Choose a folder for a run: runs/RECIPE-DATA-N, where N is the highest existing
    number plus 1.

    recipe, data  names or paths, of which the last part is used
    resume        choose the newest unfinished run, or else the newest, instead of a new
                  one

    Raises RunError if there is no run to resume, and if several processes would each
    choose."""
    if count_processes() > 1:
        raise RunError(
            "--out: required with several processes: each would choose its own folder"
        )
    source = re.sub(r"^\w+=", "", data.partition(",")[0])
    name = "-".join(
        re.sub(r"[^\w.]+", "-", Path(each).stem).strip("-") or "run"
        for each in (recipe, source)
    )
    numbered = {}
    for path in RUNS_FOLDER.glob(f"{name}-*"):
        if (number := path.name.removeprefix(f"{name}-")).isdecimal():
            numbered[int(number)] = path
    if not resume:
        return RUNS_FOLDER / f"{name}-{max(numbered, default=0) + 1}"
    if not numbered:
        raise RunError(f"{RUNS_FOLDER / name}-*: no run to --resume; give --out")
    return numbered[
        max(numbered, key=lambda number: (not is_finished(numbered[number]), number))
    ]
