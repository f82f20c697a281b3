"""The straight line of a search: teacher, data and a space in; a measured front, and its best student shipped, out."""

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from accelerate import PartialState
from rich.console import Console

from compress.benchmark.devices import Device, open_device
from compress.commands import preflight
from compress.commands.distill import check_lengths, check_recipe, on_cpu
from compress.commands.ship import BUDGETED_LIMIT, ship
from compress.config import user_code
from compress.config.recipe import Recipe, Stage
from compress.console import print_note
from compress.data.objects import data_path, teacher_path
from compress.data.task import Kind
from compress.errors import RecipeError, SearchError
from compress.evaluation.evaluator import Evaluator
from compress.exporters.artifact import Bundle, check_place
from compress.exporters.onnx import makes_segments
from compress.io import load_json
from compress.latency.costs import LatencyTable
from compress.models import heads
from compress.models import precision as precisions
from compress.models.teacher import Teacher
from compress.nas import costs as clocks
from compress.nas import record, schedule, space_file, train_supernet
from compress.nas.budget import Budget
from compress.nas.config import NAME, Columns, SearchConfig
from compress.nas.context import SearchContext, kept
from compress.nas.costs import CostModel
from compress.nas.evaluators import ScratchEvaluator, SupernetEvaluator
from compress.nas.finalists import begun, clock, finish, shipped, shorten, shortlist, winner
from compress.nas.schedule import TimeBudget
from compress.nas.space import Shapes
from compress.nas.space_file import Space
from compress.nas.study import close_storage, close_study, make_sampler, open_storage, open_study, run_trials
from compress.nas.worker import join, write_inputs
from compress.provenance import command_line, redact
from compress.records.search_report import SearchReport, TrialRecord
from compress.slicing.plan import SlicePlan
from compress.stages import StageModels
from compress.training.context import opened, tutored
from compress.training.run import Run
from compress.training.stage import TrainingContext

if TYPE_CHECKING:
    import optuna

    from compress.data.objects import DataLike, TeacherLike

TRIALS = {"supernet": 200, "plain": 24}
"""Shapes scored where neither their number nor a time is stated."""
FINALISTS, WINNERS = 8, 1
LEAST_TRIALS = 8
"""Of students that are each trained, where a time is stated: so many are to fit."""
STUDY = "study.db"
"""The file of the study in the search's folder."""
SHOWN = 30.0
"""Seconds between two looks at the front while trials run."""


def search(
    *,
    teacher: "TeacherLike",
    data: "DataLike",
    out: str | Path,
    space: str | space_file.Space = "width-depth",
    overrides: Sequence[str] = (),
    max_latency_ms: float | None = None,
    speedup: float | None = None,
    max_params: float | None = None,
    max_file_mb: float | None = None,
    min_score: float | None = None,
    objectives: Sequence[str] = ("score", "latency"),
    device: str = "local",
    open_as: Callable[[str], Any] = open_device,
    threads: int = 1,
    batch: int = 1,
    seq: int | None = None,
    file: Literal["int8", "fp32"] = "int8",
    max_drop: float = BUDGETED_LIMIT,
    shapes: int = 16,
    rounds: int = 4,
    runs: int = 10,
    anchors: Sequence[str] = (),
    sampler: str = "tpe",
    trials: int | None = None,
    minutes: float | None = None,
    finalists: int = FINALISTS,
    winners: int = WINNERS,
    storage: str | None = None,
    name: str | None = None,
    text: Sequence[str] | None = None,
    label: str | None = None,
    kind: Kind | None = None,
    metric: str | None = None,
    seed: int = 0,
    precision: precisions.Precision = "auto",
    resume: bool = False,
    gate: Literal["refuse", "warn"] = "refuse",
    allow_pickle: bool = False,
    allow_code: str | Path | None = None,
    console: Console | None = None,
) -> SearchReport:
    """Find the students of `teacher` that are best on `data` under a budget; the best one is distilled and shipped.

    teacher, data, text, label, kind, metric, gate, precision, allow_code    as for `compress.distill`
    space       name (recipes/spaces), path of a .yaml, or a Space; `overrides` are `supernet.epochs=2`-like settings
    max_latency_ms, speedup, max_params, max_file_mb, min_score    see `budget.Budget`
    objectives  what the front is over: the score, and latency, parameters, flops_per_token, file_mb
    device      where latency is measured, at threads, batch and seq (left out: 128, or the texts' own limit), of the
                file of precision `file`; open_as opens it
    max_drop    of the score, in its own unit, that the shipped int8 file may lose
    shapes, rounds, runs    of the measurement that the latency of all shapes is predicted from
    anchors     bundles of the same task to compare with
    trials      shapes that are scored; minutes: for all of it, in shares (`pace.SUPERNET`, `pace.PLAIN`)
    finalists, winners    how many are trained for a short while, and how many fully
    storage     of the study: the path of an SQLite file, or a database's URL that workers reach
    name        of the study, the folder's by default
    out         the search's folder; `resume` continues one that was interrupted, in whatever phase

    Raises a CompressError that says what to do for anything wrong with these; what was found until then is kept.
    """
    console = console or Console(quiet=True)
    teacher, data = teacher_path(teacher), data_path(data)
    chosen = space if isinstance(space, Space) else space_file.load(space, overrides)
    preflight.check(
        chosen, teacher=teacher, out=out, data=data, seed=seed, resume=resume, allow_pickle=allow_pickle,
        allow_code=allow_code,
    )  # fmt: skip
    if PartialState(cpu=on_cpu()).num_processes > 1:
        raise SearchError("a search is one process: start more with `compress search --storage URL --worker`")
    asked = SearchConfig.of(
        teacher=teacher, data=data, space=chosen, columns=Columns(text=text, label=label, kind=kind, metric=metric),
        budget=Budget(max_latency_ms=max_latency_ms, speedup=speedup, max_params=max_params, max_file_mb=max_file_mb,
                      min_score=min_score),
        objectives=objectives, device=device, threads=threads, batch=batch,
        seq=min(128, chosen.final[-1].max_length) if seq is None else seq, precision=file,
        training=precisions.choose(precision), max_drop=max_drop, shapes=shapes, rounds=rounds, runs=runs,
        anchors=anchors, seed=seed,
    )  # fmt: skip
    _check_counts(trials=trials, minutes=minutes, finalists=finalists, winners=winners)
    _check_study(storage, sampler)
    asked = asked.with_code(allow_code)
    run = Run.open(Path(out), asked, _identity(asked, sampler, storage), resume=resume, name=NAME)
    with closing(run), open_as(asked.device) as place:
        ledger = TimeBudget(run.path, parts(chosen), None if minutes is None else 60 * minutes)
        desk = prepared(asked, run, ledger, place, strict=gate == "refuse", allow_pickle=allow_pickle, console=console)
        with begin_study(desk, storage or run.path / STUDY, name or run.path.resolve().name, sampler) as study:
            desk = desk.judged_by(judge(desk))
            write_inputs(study, desk)
            limit = TRIALS[chosen.mode] if trials is None and minutes is None else trials
            found = tried(desk, study, trials=limit)
            return finished(desk, study, found, place, finalists=finalists, winners=winners)


def prepared(
    asked: SearchConfig,
    run: Run,
    ledger: TimeBudget,
    place: Device | None,
    *,
    strict: bool,
    allow_pickle: bool,
    console: Console,
) -> SearchContext:
    """Teacher, data and measured shapes, of now or of an earlier session: all that a judge is made of.

    place: the device, which may be left out once shapes were measured. Raises SearchError where no shape keeps the
    budget.
    """
    with ledger.part("preparation"):
        recipe = _recipe(asked.space)
        room = opened(
            asked.teacher, asked.data, recipe, run,
            **asked.columns.model_dump(), number_format=asked.training, allow_pickle=allow_pickle, console=console,
        )  # fmt: skip
        shapes = Shapes.of(asked.space, room.given.model.config)
        for line in shapes.dropped:
            print_note(console, line)
        _check_stages(asked.space, recipe, room.given, room.material, run)
        tutor, seen = tutored(room, recipe, run, strict=strict)
    task = room.material.data.task
    known = LatencyTable.load(run.path / "clocks", asked.precisions)
    if known is None:
        if place is None:
            raise SearchError(f"{run.path}: has not measured its shapes yet; continue it with --resume")
        with ledger.part("measuring"):
            say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
            segments = makes_segments(tutor.tokenizer)
            known = clocks.measure(asked, shapes, place, kind=task.kind, segments=segments, say=say)
            known.save(run.path / "clocks")
    costs = CostModel(asked, shapes, known, task.kind)
    exam = Evaluator.of(task, room.material.data.validation, tutor.tokenizer, asked.max_length)
    among = tuple(clocks.within(costs, train_supernet.DRAWN))
    return SearchContext(asked, run, room.given, tutor, seen, room.material, exam, costs, among, ledger, ship)


def judge(desk: SearchContext) -> SupernetEvaluator | ScratchEvaluator:
    """The supernet, trained now or in an earlier session; or what trains each choice."""
    among = desk.among
    if desk.search.space.mode == "supernet":
        with desk.ledger.part("supernet"):
            net = train_supernet.trained(
                desk.costs, among, tutor=desk.tutor, material=desk.material, run=desk.run, ledger=desk.ledger
            )
        return SupernetEvaluator.of(desk.costs, net, desk.exam, desk.material)
    largest = max(among, key=lambda choice: desk.costs.whole(choice).flops_per_token)

    def train(stage: Stage, scratch: Run) -> None:
        recipe = desk.search.space.recipe("timing", [stage], desk.costs.shapes.spec(largest))
        StageModels(recipe, desk.given, desk.tutor, desk.material, scratch).run_stages(recipe.stages)

    with desk.ledger.part("trials"):
        short = desk.search.space.short
        (stage,) = desk.ledger.fit("trials", [short], desk.material.data, train, share=1 / LEAST_TRIALS)
    return ScratchEvaluator(
        desk.costs, desk.given, desk.tutor, desk.material, desk.exam, desk.run.path / "trials", stage
    )  # fmt: skip


@contextmanager
def begin_study(desk: SearchContext, storage: str | Path, name: str, sampler: str) -> "Iterator[optuna.Study]":
    """The study of this search, begun or continued, and closed at the end."""
    study = open_study(
        storage, name, desk.search.identity(),
        objectives=desk.search.objectives, limits={str(limited): most for limited, most in desk.costs.limits().items()},
        sampler=sampler, seed=desk.search.seed, say=desk.say,
        owner=f"{platform.node()}:{desk.run.path.resolve()}",  # which this process has locked
    )  # fmt: skip
    try:
        yield study
    finally:
        close_study(study)


def tried(desk: SearchContext, study: "optuna.Study", *, trials: int | None) -> SearchReport:
    """The trials; the record and its page now and then, and at their end."""
    looked = [time.monotonic()]
    anchors = record.anchored(desk)

    def look(now: "optuna.Study") -> None:
        if time.monotonic() - looked[-1] > SHOWN:
            record.keep(record.found(desk, now, anchors=anchors), desk.run.path)
            desk.material.console.print(record.front_table(now))
            looked[:] = [time.monotonic()]

    try:
        with desk.ledger.part("trials"):
            run_trials(
                study, desk.judge,
                trials=trials, seconds=desk.ledger.left("trials"), say=desk.say, watch=look,
            )  # fmt: skip
    finally:  # an interruption, or a space without a shape that fits, leaves what was found
        found = record.found(desk, study, anchors=anchors)
        record.keep(found, desk.run.path)
    return found


def finished(
    desk: SearchContext, study: "optuna.Study", found: SearchReport, place: Device, *, finalists: int, winners: int
) -> SearchReport:
    """The best trained for a short while, measured, and the winners of these distilled fully, shipped and measured."""

    def kept(teacher_ms: float | None, **more: Any) -> SearchReport:
        now = record.found(desk, study, teacher_ms=teacher_ms, anchors=found.anchors, **more)
        record.keep(now, desk.run.path)
        return now

    points, notes = shortlist(found, max(finalists, winners)), list[str]()
    if desk.search.space.mode == "supernet":
        with desk.ledger.part("short distillations"):
            shorten(desk, points)
    with desk.ledger.part("timing finalists"):
        teacher_ms = clock(desk, points, place)
    now = kept(teacher_ms)
    for at in range(min(winners, len(points))):
        best = now.point(desk.decided(at, partial(winner, now, points)))
        if over := now.exceeded(best):
            notes.append(f"Measured, no finalist keeps the budget: trial {best.number} is over in {', '.join(over)}.")
            desk.say(notes[-1])
        with desk.ledger.part("final"):
            finish(desk, best, share=1 / (winners - at))
        now = kept(teacher_ms, notes=notes)
    with desk.ledger.part("timing finalists"):
        teacher_ms = clock(desk, points, place)
    now = kept(teacher_ms, notes=notes, winner=next(iter(desk.winners), None))
    record.show(now, desk.material.console)
    desk.run.finish()
    desk.say(f"page: {desk.run.path / record.PAGE}")
    return now


def _recipe(space: Space) -> Recipe:
    """All stages of a space in one, for what checks recipes."""
    stages = [stage for where, stage in space.stages.items() if where != "teacher"]
    return space.recipe(space.name, stages, None if space.mode == "supernet" else space.student)


def parts(space: Space) -> schedule.Parts:
    """What a stated time is divided into."""
    return schedule.SUPERNET if space.mode == "supernet" else schedule.PLAIN


def _check_stages(space: Space, recipe: Recipe, given: Teacher, material: TrainingContext, run: Run) -> None:
    """Raise what would end the recipe, of all the space's stages, in the middle, in the words of the space.

    See `pipeline.check_recipe` and `StageModels.check`.
    """
    if space.mode == "supernet":
        SlicePlan.of(given.model)
    places = {f"stages[{at}]": where for at, where in enumerate(where for where in space.stages if where != "teacher")}
    try:
        check_recipe(recipe, 1)
        check_lengths(recipe, given)
        StageModels(recipe, given, None, material, run).check()
    except RecipeError as error:
        problems = error.problems
        for stage, where in places.items():
            dotted = (stage.replace("[", ".").rstrip("]"), where.replace("[", ".").rstrip("]"))
            problems = [problem.replace(stage, where).replace(*dotted) for problem in problems]
        raise RecipeError(problems) from error


def _identity(asked: SearchConfig, sampler: str, storage: str | None) -> dict[str, Any]:
    return {
        "teacher": asked.teacher, "data": asked.data, "seed": asked.seed, "precision": asked.training,
        "columns": list(asked.columns.model_dump(mode="json").values()), "sampler": sampler,
        "storage": None if storage is None else redact(storage), "code": user_code.digests(asked.space),
        "command": command_line(),
    }  # fmt: skip


def _check_study(storage: str | None, sampler: str) -> None:
    """Raises SearchError for a sampler that is none, StorageError for a database that does not answer."""
    make_sampler(sampler)
    if storage is not None and "://" in storage:
        close_storage(open_storage(storage))


def _check_counts(*, trials: int | None, minutes: float | None, finalists: int, winners: int) -> None:
    for option, value in {"trials": trials, "minutes": minutes, "finalists": finalists, "winners": winners}.items():
        if value is not None and not value > 0:
            raise SearchError(f"--{option} {value:g}: expected a number above 0")


def work(
    storage: str,
    *,
    name: str | None = None,
    weights: Path | None = None,
    minutes: float | None = None,
    allow_code: str | Path | None = None,
    console: Console | None = None,
) -> None:
    """Join the search in this storage and evaluate shapes for it: see `nas.worker.join`."""
    PartialState(cpu=on_cpu())
    join(storage, name=name, weights=weights, minutes=minutes, allow_code=allow_code, console=console)


def show(
    study: Path,
    number: int,
    out: Path,
    *,
    train: bool = False,
    allow_code: str | Path | None = None,
    console: Console | None = None,
) -> Bundle:
    """The student of a trial as a bundle in `out`, measured beside its teacher.

    One that the search has shipped is copied. Any other is what the search made of it, a part of the supernet or the
    student of a short training, which its card says; with `train` it is distilled fully first, by the search's final
    stages. allow_code: the folder of your own functions that its space names. Raises SearchError where there is no such
    trial or its shape could not be judged.
    """
    console = console or Console(quiet=True)
    asked, found = SearchConfig.read(study), record.read(study)
    point = found.point(number)
    if not point.choice or point.state == "failed":
        raise SearchError(
            f"{study}: trial {number} failed ({point.reason}); choose another: compress search show {study}"
        )
    check_place(out)
    known = kept(study, number)
    if known.bundle is None or (train and "final" not in known.scores):
        facts = load_json(study / "run.json", f"Put back a whole copy of it; the trials are still told of: {study}")
        run = Run.open(study, asked, facts, resume=True, name=NAME)
        try:
            asked = asked.with_code(allow_code)
            ledger = TimeBudget(study / "students" / str(number), parts(asked.space), None)  # not the search's own time
            ledger.folder.mkdir(parents=True, exist_ok=True)
            desk = prepared(asked, run, ledger, None, strict=False, allow_pickle=False, console=console)
            desk = desk.judged_by(judge(desk))
            bundle = finish(desk, point) if train else _as_it_is(desk, point)
            record.keep(_with(found, number, study), study)
        finally:
            run.close()
    else:
        bundle = Bundle.load(Path(known.bundle))
    return bundle.copied(out)


def _as_it_is(desk: SearchContext, point: TrialRecord) -> Bundle:
    """Of the training that it had in the search."""
    space, short = desk.search.space, "short" in desk.kept(point.number).scores
    student = heads.load(begun(desk, point), "task", desk.material.kind)
    stages = [stage for stage in (space.supernet, space.short) if stage is not None]
    had = f"a short distillation, stage `{space.short.name}`"
    if space.mode == "supernet" and not short:
        stages, had = stages[:1], f"the supernet's training, stage `{stages[0].name}`, of which it is a part"
    note = f"Its only training was {had}; the search's final distillation was left out."
    return shipped(desk, point, student, stages, began=time.time(), note=note)


def _with(found: SearchReport, number: int, study: Path) -> SearchReport:
    """The record with what is now known of this trial."""
    points = tuple(record.further(study, each) if each.number == number else each for each in found.points)
    now = replace(found, points=points, front=())
    return replace(now, front=now.compute_front())
