"""The finalists of a search: distilled briefly, ranked again and timed; the winner is
distilled fully and shipped.

A subnet's score inside the supernet, whose weights are shared, is good enough to choose
some shapes, not to choose one. A short distillation of each decides: "flash
distillation", Zhang et al. 2022, arXiv:2201.08539, Sec. 3.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from compress.benchmark.device import Device
from compress.config.stages import Stage, StudentSpec
from compress.errors import SearchError
from compress.exporters.artifact import Bundle
from compress.exporters.manifest import BUNDLE_FILES, Precision
from compress.exporters.onnx import makes_segments
from compress.io import hash_value, write_json
from compress.jobs.job import Job
from compress.jobs.shipping import Ship
from compress.jobs.stages import StageModels
from compress.latency.measure import sample
from compress.nas.config import describe_choice
from compress.nas.context import (
    ScratchEvaluator,
    SearchContext,
    score_student,
)
from compress.records.json_text import load_record
from compress.records.latency import describe_device
from compress.records.search_report import SearchReport, TrialRecord
from compress.reporting.remarks import unmet
from compress.training.run import Run

KEEP = 0.97
"""Without a budget the winner is the fastest student with this share of its teacher's
score."""
RACE = "race.json"
"""The file of the last race: the hash of what was raced, and the teacher's ms."""
TRAINING = 0.6
"""Share of the final part's time for training; exporting, certifying and measuring take
the rest."""


def shortlist(report: SearchReport, count: int) -> list[TrialRecord]:
    """Choose `count` points: the front, the best first, then the next best that keep
    the budgets.

    Only the trials' own scores count, not later training and measurements, so that a
    resumed search continues with the same points. Raises SearchError, naming the
    nearest, if none keeps the budgets.
    """
    bare = [
        replace(point, scores={"subnet": point.first}, measured=None)
        for point in report.points
    ]
    trials = replace(report, points=tuple(bare), front=(), winner=None)
    front = trials.compute_front()
    feasible = [point for point in trials.points if trials.feasible(point)]
    if not feasible:
        raise SearchError(
            f"{report.study}: {unmet(report)}. Relax the budget in another --out, or "
            "add --trials with --resume"
        )
    feasible.sort(
        key=lambda point: (
            point.number not in front,
            -(point.score or 0.0),
            point.number,
        )
    )
    return [report.point(point.number) for point in feasible[:count]]


def distill_briefly(context: SearchContext, points: Sequence[TrialRecord]) -> None:
    """Distil each point for a short while from its part of the supernet, as far as the
    time allows.

    Points that have been distilled already are skipped.
    """
    if not points:
        return
    left = context.time_budget.left("short distillations")
    began = time.monotonic()
    stages = _fit_stages(
        context,
        "short distillations",
        [context.search.space.short],
        points[0],
        share=1 / len(points),
    )
    for point in points:
        if "short" in context.student_state(point.number).scores:
            continue
        if (
            point is not points[0]
            and left is not None
            and time.monotonic() - began >= left
        ):
            context.say(
                "the time for short distillations is over: skipping trial "
                f"{point.number} and all that follow"
            )
            return
        context.say(
            f"short distillation of trial {point.number}: "
            f"{describe_choice(point.choice)}"
        )
        student = train_student(
            context,
            point,
            stages,
            context.student_checkpoint(point.number, point.choice),
        )
        context.update_student(
            point.number,
            scores={
                "short": score_student(student, context.evaluator, context.training)
            },
        )


def find_checkpoint(context: SearchContext, point: TrialRecord) -> Path:
    """Find the student's checkpoint after its short distillation, or as of its trial if
    it had none.

    A damaged one is trained again.
    """
    short = context.search.space.short
    run = context.student_run(point.number)
    begin = partial(context.student_checkpoint, point.number, point.choice)
    if "short" not in context.student_state(point.number).scores:
        return begin()
    if not run.done(short.name, context.training.console):
        train_student(
            context,
            point,
            _fit_stages(context, "short distillations", [short], point),
            begin(),
        )
    return run.result(short.name)


def train_student(
    context: SearchContext,
    point: TrialRecord,
    stages: Sequence[Stage],
    begin: Path,
    run: Run | None = None,
) -> PreTrainedModel:
    """Train the student by `stages` from the checkpoint in `begin`, in its own folder
    or in `run`."""
    spec = StudentSpec.model_validate({"init": str(begin)})
    recipe = context.search.space.recipe(f"trial {point.number}", stages, spec)
    run = run or context.student_run(point.number)
    models = StageModels.from_teacher(
        recipe, context.task_teacher, context.training, run
    )
    return models.run_stages(recipe.stages, teacher_logits=context.teacher_check.logits)


def time_finalists(
    context: SearchContext, points: Sequence[TrialRecord], device: Device
) -> float:
    """Time the points in one race with the teacher; return the teacher's latency in ms.

    Shipped files are measured as they are, other shapes with random weights. A race
    that a session before this one has finished is not repeated.
    """
    search = context.search
    costs = context.costs
    files = dict[str, Path]()
    configs: dict[str, Any] = {"teacher": costs.shapes.teacher}
    precisions: dict[str, Precision] = {"teacher": search.precision}
    for point in points:
        name = str(point.number)
        precision = costs.precision(point.choice)
        bundle = context.student_state(point.number).bundle
        if bundle is None:
            configs[name] = costs.shapes.config(point.choice)
            precisions[name] = precision
        else:
            files[name] = Bundle.load(bundle).path / BUNDLE_FILES[precision]
    machine = describe_device(device.name, device.facts())
    settings = [str(search.setting), search.rounds, search.runs, machine]
    key = hash_value([precisions, sorted(files), *settings])
    file = context.run.path / RACE
    if file.is_file():
        remedy = (
            f"Remove {file} and repeat the command with --resume: it is raced again"
        )
        known, teacher_ms = load_record(tuple[str, float], file, remedy)
        if known == key:
            return teacher_ms
    samples = sample(
        configs,
        device,
        search.setting,
        precision=precisions,
        kind=costs.kind,
        files=files,
        rounds=search.rounds,
        segments=makes_segments(context.training.tokenizer),
        runs=search.runs,
        say=context.say,
    )
    for each in samples:
        if each.name != "teacher":
            context.update_student(
                int(each.name), measured={str(search.setting): each.ms}
            )
        if each.noisy:
            context.say(f"timing of {each.name}: {each.noise}")
    teacher_ms = next(each.ms for each in samples if each.name == "teacher")
    write_json(file, [key, teacher_ms])
    return teacher_ms


def choose_winner(
    report: SearchReport, points: Sequence[TrialRecord], excluded: Sequence[int] = ()
) -> int:
    """Return the number of the best finalist within its budgets; without budgets, of
    the fastest that keeps KEEP.

    If no finalist keeps the budgets when measured, return the one that exceeds them
    least.
    """
    finalists = [
        report.point(point.number) for point in points if point.number not in excluded
    ]
    if not finalists:
        raise SearchError(
            f"{report.study}: no trial was completed; nothing can be trained further"
        )
    within = [point for point in finalists if report.feasible(point)]
    if not within:
        return min(
            finalists,
            key=lambda point: (len(report.exceeded(point)), report.ms(point) or 0.0),
        ).number
    if not report.budgets and report.teacher_score is not None:
        good = [
            point
            for point in within
            if (point.score or 0.0) >= KEEP * report.teacher_score
        ]
        if good:
            return min(
                good, key=lambda point: (report.ms(point) or 0.0, point.number)
            ).number
    return max(
        within,
        key=lambda point: (
            point.score or 0.0,
            -(report.ms(point) or 0.0),
            -point.number,
        ),
    ).number


def distill_winner(
    context: SearchContext, point: TrialRecord, *, share: float = 1.0
) -> Bundle:
    """Distil the student by the final stages, ship it as a bundle in its folder, and
    score the shipped file.

    share: of the final part's time.
    """
    state = context.student_state(point.number)
    space = context.search.space
    if state.bundle is not None and {"final", "shipped"} <= state.scores.keys():
        return Bundle.load(state.bundle)
    began = time.time()
    stages = _fit_stages(context, "final", space.final, point, share=TRAINING * share)
    student = train_student(context, point, stages, find_checkpoint(context, point))
    context.update_student(
        point.number,
        scores={"final": score_student(student, context.evaluator, context.training)},
    )
    if isinstance(context.student_evaluator, ScratchEvaluator):
        earlier = list(context.student_evaluator.legs)
    else:
        assert space.supernet is not None, "a space of a supernet has its stage"
        earlier = [space.supernet, *([space.short] if "short" in state.scores else [])]
    return ship_student(context, point, student, [*earlier, *stages], began=began)


def ship_student(
    context: SearchContext,
    point: TrialRecord,
    student: PreTrainedModel,
    stages: Sequence[Stage],
    *,
    began: float,
    note: str = "",
) -> Bundle:
    """Ship the student that these stages trained as a bundle in its folder; its card
    names the search."""
    search = context.search
    run = context.student_run(point.number)
    recipe = search.space.recipe(f"{search.space.name}-{point.number}", stages)
    origin = (
        f"Trial {point.number} of the search in {context.run.path.name}: "
        f"{describe_choice(point.choice)}."
    )
    notes = [*context.teacher_check.notes, origin, *([note] if note else [])]
    models = StageModels.from_teacher(
        recipe, context.task_teacher, context.training, run
    )
    job = Job(models, tuple(notes), started=began, student=student)
    bundle = Ship(search.max_drop).run(job).bundle
    assert bundle is not None, "it has shipped it"
    readme = (bundle.path / "README.md").read_text(encoding="utf-8")
    bundle = bundle.attach(
        "README.md",
        f"{readme}\n## Found by a search\n\n{origin} {note}".rstrip() + "\n",
    )
    precision = context.costs.precision(point.choice)
    answers = bundle.logits(context.evaluator.rows, precision=precision)
    score = float(context.evaluator.scores(answers)[context.evaluator.task.metric])
    size = (bundle.path / BUNDLE_FILES[precision]).stat().st_size / 1e6
    context.update_student(
        point.number, scores={"shipped": score}, bundle=str(bundle.path), file_mb=size
    )
    return bundle


def _fit_stages(
    context: SearchContext,
    part: str,
    stages: Sequence[Stage],
    point: TrialRecord,
    *,
    share: float = 1.0,
) -> list[Stage]:
    """Limit the stages to as many steps as there is time for, timed with this
    student."""

    def train(stage: Stage, run: Run) -> None:
        train_student(
            context,
            point,
            [stage],
            context.student_checkpoint(point.number, point.choice),
            run,
        )

    return context.time_budget.fit(
        part, stages, context.training.data, train, share=share
    )
