"""Forecast a search: the smallest and the largest shape are measured, trained and
scored."""

import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

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
from compress.benchmark.devices import open_chosen
from compress.commands.distill import StageModels, compare_texts, load_inputs
from compress.commands.forecast import ROWS, SCORED, Trials, forecast_stages
from compress.commands.search import (
    STUDY,
    TRIALS,
    check_stages,
    make_config,
    make_recipe,
    parts,
)
from compress.commands.ship import BUDGETED_LIMIT
from compress.config.options import (
    DataOptions,
    MeasureOptions,
    RunOptions,
    StudyOptions,
)
from compress.config.stages import StudentSpec
from compress.data.cache import is_whole
from compress.errors import SearchError
from compress.evaluation.evaluator import Evaluator
from compress.exporters.onnx import makes_segments
from compress.latency.features import Terms
from compress.latency.measure import MORE, SWEEPS, choose_spread, exported
from compress.latency.model import LatencyTable
from compress.models.checkpoints import save_tokenizer
from compress.models.loader import load_result
from compress.nas.config import Budget, SearchConfig, Space, describe_choice
from compress.nas.context import SupernetEvaluator, load_student_state
from compress.nas.costs import DRAWN, CostModel
from compress.nas.space import Choice, Shapes
from compress.nas.study import close_study, join_study
from compress.nas.supernet import Ladder, Supernet, draw_from, put_in_order, with_looks
from compress.nas.trial import count_scored
from compress.pruning.budget import device_messages
from compress.records.forecast import Forecast, Phase, time_call
from compress.training.run import Run
from compress.training.trainer import peak_rss_mb

TIMED = 0.25
"""The same for the timing of files, between the seconds of the cheapest shape's and of
the dearest's."""


@check_arguments
def forecast_search(
    *,
    teacher: TeacherLike,
    data: DataLike,
    out: PathName,
    space: NameLike | Space = "width-depth",
    budget: Budget = Budget(),
    device: MeasureOptions = MeasureOptions(),
    study: StudyOptions = StudyOptions(),
    max_drop: Share = BUDGETED_LIMIT,
    columns: DataOptions = DataOptions(),
    options: RunOptions = RunOptions(),
    console: Console | None = None,
) -> Forecast:
    """Forecast what `compress.search` would take with the same arguments, on this
    machine and its device.

    The shapes with the fewest and the most operations are exported, timed and scored
    like a trial; stages are tried as in `forecast`. A pruned trial ends after its first
    rung: the minimum assumes this for all trials, the maximum for none. With
    `options.resume`, what the search in `out` has done takes no time. A budget that the
    smallest shape exceeds is reported as out of reach. Raises a CompressError for
    anything that `search` would refuse before training.
    """
    console = console or Console(quiet=True)
    config = make_config(
        teacher,
        data,
        out,
        space,
        budget,
        device=device,
        study=study,
        max_drop=max_drop,
        columns=columns,
        options=options,
    )
    space, recipe = config.space, make_recipe(config.space)
    done = (
        SearchProgress.read(Path(out), config, study)
        if options.resume
        else SearchProgress()
    )
    scratch, opening = (
        TemporaryDirectory(),
        open_chosen(device, say=device_messages(device.device, console)),
    )
    with (
        scratch as folder,
        opening as target,
        closing(Run.open(Path(folder) / "run", config, {"seed": config.seed})) as run,
    ):
        base_teacher, context = load_inputs(
            config.teacher,
            config.data,
            recipe,
            run,
            columns=config.columns,
            number_format=config.training,
            allow_pickle=options.allow_pickle,
            console=console,
        )
        context = compare_texts(base_teacher, context, config.max_length)
        shapes, kind = (
            Shapes.from_space(space, base_teacher.model.config),
            context.data.task.kind,
        )
        check_stages(space, recipe, base_teacher, context, run)
        context = replace(context, console=Console(quiet=True))
        trials = Trials(context, run, Path(folder) / "home")
        costs = CostModel(config, shapes, LatencyTable({}, {}), kind)
        drawn = sorted(
            shapes.drawn(DRAWN, config.seed),
            key=lambda choice: (
                Terms.from_config(shapes.config(choice), config.setting, kind).flops
            ),
        )
        ends, middle, subnet = (
            (drawn[0], drawn[-1]),
            drawn[len(drawn) // 2],
            Path(folder) / "subnet",
        )
        with console.status("trying each phase"):
            phase, task_teacher = trials.try_teacher(recipe.teacher, base_teacher)
            measured, per_file, unreachable = _measure(
                costs, drawn, target, makes_segments(task_teacher.tokenizer)
            )
            phases = [
                phase,
                Phase("measuring", cached=True) if done.latencies else measured,
            ]
            models = StageModels(recipe, base_teacher, task_teacher, context, run)
            if space.mode == "supernet":
                supernet_phases, net = _try_supernet(
                    costs, drawn, models, trials, done.supernet
                )
                phases += supernet_phases
                trial = _try_scoring(costs, ends, net, models)
                Supernet(net).extract(shapes.sizes(middle)).save_pretrained(subnet)
                save_tokenizer(subnet, context.tokenizer)
                spec, stages = (
                    StudentSpec.model_validate({"init": str(subnet)}),
                    [space.short, *space.final],
                )
            else:
                trial = _try_students(
                    [shapes.spec(each) for each in ends], space, models, trials
                )
                spec, stages = shapes.spec(middle), list(space.final)
            phases.append(forecast_trials(trial, study, space, done.scored))
            recipe = space.recipe("finalist", stages, spec)
            tried = forecast_stages(
                replace(models, recipe=recipe), recipe.stages, trials
            )
        if space.mode == "supernet":
            phases.append(
                _repeat(
                    tried.pop(0),
                    max(0, study.finalists - done.short),
                    "short distillations",
                )
            )
        least, most = (2 * (1 + study.finalists) * each for each in per_file)
        phases.append(Phase("timing finalists", seconds=(least, most), likely=TIMED))
        left = max(0, study.winners - done.shipped)
        phases += [_repeat(each, left, f"final: {each.name}") for each in tried]
        phases.append(trials.try_shipping(task_teacher, config.max_length, left))
    title = (
        f"{space.name}: {base_teacher.name} on {context.data.name}, {shapes.size():,} "
        "shapes"
    )
    return Forecast(title, tuple(phases), peak_rss_mb(), study.minutes, unreachable)


def forecast_trials(
    trial: tuple[float, float], study: StudyOptions, space: Space, scored: int
) -> Phase:
    """Forecast the trials by the minimum and maximum seconds of one; with only a time
    limit, by their share of it."""
    if study.trials is None and study.minutes is not None:
        share = 60 * study.minutes * parts(space)["trials"]
        return Phase(
            "trials",
            seconds=(share, share),
            note=f"{share / trial[1]:,.0f} shapes or more",
        )
    left = max(0, (study.trials or TRIALS[space.mode]) - scored)
    note = f"{left:,} shapes, {scored:,} are scored" if scored else f"{left:,} shapes"
    return Phase("trials", seconds=(left * trial[0], left * trial[1]), note=note)


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
        run, scored = Run(path, config.seed, main=False), 0
        stage = config.space.supernet
        net = (
            run.result(stage.name)
            if stage is not None and is_whole(run.result(stage.name))
            else None
        )
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
        short, shipped = (
            sum(name in each.scores for each in states) for name in ("short", "shipped")
        )
        return SearchProgress(
            LatencyTable.load(path / "latency", config.precisions),
            net,
            scored,
            short,
            shipped,
        )


def _measure(
    costs: CostModel, drawn: Sequence[Choice], device: Device, segments: bool
) -> tuple[Phase, tuple[float, float], tuple[str, ...]]:
    """Export and race the first and the last of these shapes, and the teacher.

    Return the forecast for all shapes to measure, minimum and maximum seconds per file,
    and the budgets that the first shape, with the fewest operations, exceeds.
    """
    search, shapes = costs.search, costs.shapes
    configs = {
        "smallest": shapes.config(drawn[0]),
        "largest": shapes.config(drawn[-1]),
        "teacher": shapes.teacher,
    }
    began = time.perf_counter()
    with exported(
        configs,
        search.setting,
        precision=search.precision,
        kind=costs.kind,
        segments=segments,
    ) as files:
        exporting = (time.perf_counter() - began) / len(files)
        times = device.race(
            files, [search.setting], rounds=search.rounds, runs=search.runs
        )
    racing = (time.perf_counter() - began) / len(files) - exporting
    per_file = (exporting + SWEEPS * racing, exporting + (SWEEPS + MORE) * racing)
    bare = {
        describe_choice({**each, "precision": ""}): shapes.config(each)
        for each in drawn
    }
    chosen = choose_spread(bare, search.shapes, search.setting, costs.kind)
    count = len(search.precisions) * (len(chosen) + 1) + 1 + len(search.anchors)
    least, most = (count * each for each in per_file)
    phase = Phase(
        "measuring", seconds=(least, most), note=f"{count} files", likely=TIMED
    )
    fastest = {each.name: min(each.lows or (each.p50_ms,)) for each in times}
    cheapest = [costs.cost(each) for each in drawn]
    reached = {
        "--max-latency-ms": fastest["smallest"],
        "--max-params": min(each.parameters for each in cheapest),
        "--max-file-mb": min(each.file_mb for each in cheapest),
    }
    exceeded = [
        f"{option} {limit:g}: the smallest shape of the space has {least:,.4g}"
        for option, least in reached.items()
        if (limit := getattr(search.budget, option[2:].replace("-", "_"))) is not None
        and least > limit
    ]
    if (limit := search.budget.speedup) is not None and (
        most := fastest["teacher"] / fastest["smallest"]
    ) < limit:
        exceeded.append(
            f"--speedup {limit:g}: the smallest shape of the space is {most:.1f} times "
            "as fast as the teacher"
        )
    return phase, per_file, tuple(exceeded)


def _try_supernet(
    costs: CostModel,
    drawn: Sequence[Choice],
    models: StageModels,
    trials: Trials,
    trained: Path | None,
) -> tuple[list[Phase], PreTrainedModel]:
    """Try the training of the supernet; return its forecast, and the barely trained
    supernet."""
    space, context, teacher = costs.search.space, models.context, models.task_teacher
    assert space.supernet is not None and teacher is not None, (
        "a supernet space has a supernet stage and a teacher"
    )
    if trained is not None:
        return [Phase("supernet", cached=True)], load_result(
            trained, space.supernet.head, context.kind
        )
    few = min(ROWS, space.rows)
    brief = replace(
        costs,
        search=costs.search.model_copy(
            update={"space": space.model_copy(update={"rows": few})}
        ),
    )
    stage, began = draw_from(space.supernet, drawn, costs), time.perf_counter()
    net, origin_D = put_in_order(brief, stage, teacher, context, models.run.seed)
    seconds = (time.perf_counter() - began) * space.rows / few
    stage = with_looks(stage, len(context.data.train))
    phase, net = trials.try_stage(
        stage, net, teacher, origin_D, Ladder.from_choices(costs, drawn).score_rungs
    )
    ordering = Phase(
        "importance", seconds=(seconds, seconds), note=f"{space.rows:,} rows"
    )
    return [ordering, replace(phase, name="supernet")], net


def _try_scoring(
    costs: CostModel, ends: Sequence[Choice], net: PreTrainedModel, models: StageModels
) -> tuple[float, float]:
    """Score these subnets on few rows; return the mean seconds of the first rung, and
    of all rungs, for all rows."""
    context, task = models.context, models.context.data.task
    rows = Evaluator.from_split(
        task, context.data.validation, context.tokenizer, costs.search.max_length
    )
    few = rows.subsample(SCORED)
    student_evaluator = SupernetEvaluator.from_model(costs, net, few, context)
    seconds = [
        [
            time_call(partial(student_evaluator.score, each, rung))
            for rung in range(student_evaluator.rungs)
        ]
        for each in ends
    ]
    scale = len(rows) / len(few)
    return scale * fmean(rungs[0] for rungs in seconds), scale * fmean(
        map(sum, seconds)
    )


def _try_students(
    ends: Sequence[StudentSpec], space: Space, models: StageModels, trials: Trials
) -> tuple[float, float]:
    """Train these students for a few steps; return the seconds of the first student's
    first rung, and of all rungs of the last."""
    seconds = list[float]()
    for at, spec in enumerate(ends):
        stage = space.short.model_copy(update={"name": f"{space.short.name}-{at}"})
        recipe = space.recipe("trial", [stage], spec)
        (phase,) = forecast_stages(
            replace(models, recipe=recipe), recipe.stages, trials
        )
        seconds.append(phase.seconds[1])
    scoring = len(models.context.data.validation) * trials.seconds_per_scored_row
    return space.rungs[0] * seconds[0] + scoring, seconds[-1] + len(
        space.rungs
    ) * scoring


def _repeat(phase: Phase, times: int, name: str) -> Phase:
    """Return the forecast of a phase that runs several times."""
    least, most = (times * each for each in phase.seconds)
    steps = times * phase.steps[0], times * phase.steps[1]
    return replace(
        phase,
        name=name,
        steps=steps,
        seconds=(least, most),
        disk_mb=times * phase.disk_mb,
        cached=not times,
    )
