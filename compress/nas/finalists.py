"""The best of a search: trained for a short while and ranked again, timed, and the winner distilled fully and shipped.

What a subnet scores inside the supernet ranks shapes well enough to choose some (the weights are shared), not to choose
one. A short distillation of each settles that: "flash distillation", Zhang et al. 2022, arXiv:2201.08539, Sec. 3.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from compress.benchmark.devices import Device
from compress.config.recipe import Stage, StudentSpec
from compress.errors import SearchError
from compress.exporters.artifact import FILES, Bundle, Precision
from compress.exporters.onnx import makes_segments
from compress.latency.measure import sample
from compress.nas.config import describe_choice
from compress.nas.context import ScratchEvaluator, SearchContext, score_student
from compress.records.search_report import SearchReport, TrialRecord
from compress.reporting.remarks import unmet
from compress.training.run import Run

KEEP = 0.97
"""Without a budget the winner is the fastest student with this share of its teacher's score."""
TRAINING = 0.6
"""Share of the last part's time for training: exporting, certifying and measuring take the rest."""


def shortlist(found: SearchReport, count: int) -> list[TrialRecord]:
    """Return the front, the best first, then the next best that keep the budgets, `count` in all.

    As the trials left them: what was trained or measured since changes nothing, so that a resumed search goes on with
    the same ones. Raises SearchError where none keeps the budgets, with the nearest.
    """
    bare = [replace(each, scores={"subnet": each.first}, measured=None) for each in found.points]
    trials = replace(found, points=tuple(bare), front=(), winner=None)
    front = trials.compute_front()
    feasible = [point for point in trials.points if trials.feasible(point)]
    if not feasible:
        raise SearchError(
            f"{found.study}: {unmet(found)}. Ask for less in another --out, or for more --trials with --resume"
        )
    feasible.sort(key=lambda point: (point.number not in front, -(point.score or 0.0), point.number))
    return [found.point(point.number) for point in feasible[:count]]


def distill_briefly(context: SearchContext, points: Sequence[TrialRecord]) -> None:
    """Distil each for a short while, from its part of the supernet, as far as the time stated for that goes.

    Those that had theirs are left alone.
    """
    if not points:
        return
    left, began = context.time_budget.left("short distillations"), time.monotonic()
    stages = _fit_stages(context, "short distillations", [context.search.space.short], points[0], share=1 / len(points))
    for point in points:
        if "short" in context.student_state(point.number).scores:
            continue
        if point is not points[0] and left is not None and time.monotonic() - began >= left:
            context.say(f"the time for short distillations is over: trial {point.number} and those after it have none")
            return
        context.training.console.print(
            f"short distillation of trial {point.number}: {describe_choice(point.choice)}", highlight=False
        )
        student = train_student(context, point, stages, context.student_checkpoint(point.number, point.choice))
        context.update_student(
            point.number, scores={"short": score_student(student, context.evaluator, context.training)}
        )


def find_checkpoint(context: SearchContext, point: TrialRecord) -> Path:
    """Find the student as its short distillation left it, which is made again where it is damaged; without one, as its
    trial knew it."""
    short, place = context.search.space.short, context.student_run(point.number)
    if "short" not in context.student_state(point.number).scores:
        return context.student_checkpoint(point.number, point.choice)
    if not place.done(short.name, context.training.console):
        stages = _fit_stages(context, "short distillations", [short], point, share=1.0)
        train_student(context, point, stages, context.student_checkpoint(point.number, point.choice))
    return place.result(short.name)


def train_student(
    context: SearchContext, point: TrialRecord, stages: Sequence[Stage], begin: Path, run: Run | None = None
) -> PreTrainedModel:
    """Train the student by `stages`, from the checkpoint in `begin`; keep it in its own folder, or in `run`."""
    spec = StudentSpec.model_validate({"init": str(begin)})
    recipe = context.search.space.recipe(f"trial {point.number}", stages, spec)
    run = run or context.student_run(point.number)
    return context.run_stages(recipe, run, recipe.stages, teacher_logits=context.teacher_check.logits)


def time_finalists(context: SearchContext, points: Sequence[TrialRecord], device: Device) -> float:
    """Time the points on the device in one race with the teacher: shipped files as they are, other shapes with random
    weights. What the teacher took, in ms."""
    search, costs, files = context.search, context.costs, dict[str, Path]()
    configs: dict[str, Any] = {"teacher": costs.shapes.teacher}
    precisions: dict[str, Precision] = {"teacher": search.precision}
    for point in points:
        name, precision = str(point.number), costs.precision(point.choice)
        bundle = context.student_state(point.number).bundle
        if bundle is None:
            configs[name], precisions[name] = costs.shapes.config(point.choice), precision
        else:
            files[name] = Bundle.load(Path(bundle)).path / FILES[precision]
    samples = sample(
        configs, device, search.setting, precision=precisions, kind=costs.kind, files=files, rounds=search.rounds,
        segments=makes_segments(context.training.tokenizer), runs=search.runs, say=context.say,
    )  # fmt: skip
    found = {each.name: each for each in samples}
    for point in points:
        context.update_student(point.number, measured={str(search.setting): found[str(point.number)].ms})
    for each in samples:
        if each.noisy:
            context.say(f"timing of {each.name}: {each.noise}")
    return found["teacher"].ms


def choose_winner(found: SearchReport, points: Sequence[TrialRecord], besides: Sequence[int] = ()) -> int:
    """Return the number of the best finalist within its budgets; without any, of the fastest that keeps KEEP.

    Where none keeps the budgets when it is measured, the one that exceeds them least.
    """
    now = [found.point(point.number) for point in points if point.number not in besides]
    if not now:
        raise SearchError(f"{found.study}: no trial was completed; nothing can be trained further")
    within = [point for point in now if found.feasible(point)]
    if not within:
        return min(now, key=lambda point: (len(found.exceeded(point)), found.ms(point) or 0.0)).number
    if not found.budgets and found.teacher_score is not None:
        good = [point for point in within if (point.score or 0.0) >= KEEP * found.teacher_score]
        if good:
            return min(good, key=lambda point: (found.ms(point) or 0.0, point.number)).number
    return max(within, key=lambda point: (point.score or 0.0, -(found.ms(point) or 0.0), -point.number)).number


def distill_winner(context: SearchContext, point: TrialRecord, *, share: float = 1.0) -> Bundle:
    """Distil the student by the final stages, ship it as a bundle in its directory, and score the shipped file.

    share: of the time for the last part.
    """
    kept, space = context.student_state(point.number), context.search.space
    if kept.bundle is not None and "shipped" in kept.scores and "final" in kept.scores:
        return Bundle.load(Path(kept.bundle))
    began = time.time()
    stages = _fit_stages(context, "final", space.final, point, share=TRAINING * share)
    student = train_student(context, point, stages, find_checkpoint(context, point))
    context.update_student(point.number, scores={"final": score_student(student, context.evaluator, context.training)})
    return ship_student(context, point, student, [*_earlier_stages(context, point), *stages], began=began)


def ship_student(
    context: SearchContext,
    point: TrialRecord,
    student: PreTrainedModel,
    stages: Sequence[Stage],
    *,
    began: float,
    note: str = "",
) -> Bundle:
    """Ship the student that had these stages as a bundle in its folder, with what it was part of in its notes."""
    search, place = context.search, context.student_run(point.number)
    recipe = search.space.recipe(f"{search.space.name}-{point.number}", stages)
    found = f"Trial {point.number} of the search in {context.run.path.name}: {describe_choice(point.choice)}."
    notes = [*context.teacher_check.notes, found, *([note] if note else [])]
    bundle = context.ship(
        student, context.task_teacher, context.training, recipe=recipe, run=place, notes=notes, started=began,
        int8_limit=search.max_drop,
    )  # fmt: skip
    readme = (bundle.path / "README.md").read_text(encoding="utf-8")
    bundle = bundle.attach("README.md", f"{readme}\n## Found by a search\n\n{found} {note}".rstrip() + "\n")
    precision = context.costs.precision(point.choice)
    answers = bundle.logits(context.evaluator.rows, precision=precision)
    score = float(context.evaluator.scores(answers)[context.evaluator.task.metric])
    size = bundle.files()[precision].stat().st_size / 1e6
    context.update_student(point.number, scores={"shipped": score}, bundle=str(bundle.path), file_mb=size)
    return bundle


def _earlier_stages(context: SearchContext, point: TrialRecord) -> list[Stage]:
    """List what trained the student before the final stages."""
    space = context.search.space
    if isinstance(context.student_evaluator, ScratchEvaluator):
        return list(context.student_evaluator.legs)
    assert space.supernet is not None, "a space of a supernet has its stage"
    short = [space.short] if "short" in context.student_state(point.number).scores else []
    return [space.supernet, *short]


def _fit_stages(
    context: SearchContext, part: str, stages: Sequence[Stage], point: TrialRecord, *, share: float
) -> list[Stage]:
    """Give the stages as many steps as there is time for, timed with this student."""

    def train(stage: Stage, run: Run) -> None:
        train_student(context, point, [stage], context.student_checkpoint(point.number, point.choice), run)

    return context.time_budget.fit(part, stages, context.training.data, train, share=share)
