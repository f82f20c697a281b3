"""The phase that exports, quantises, certifies and measures a student."""

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel

from compress.benchmark.local import race
from compress.errors import ExportError
from compress.evaluation.evaluator import Evaluator
from compress.exporters.int8 import quantize_dynamic
from compress.exporters.manifest import Precision
from compress.exporters.onnx import makes_segments
from compress.exporters.predictor import run_rows
from compress.exporters.rewrite.graph import products
from compress.exporters.session import open_session, read_model
from compress.jobs.job import Job
from compress.jobs.phase import Phase
from compress.jobs.ship import SHIPPED_LENGTHS, ship
from compress.jobs.trials import SCORED
from compress.latency.measure import exported
from compress.models.teacher import Teacher
from compress.quantization.certify import CERTIFIED_ROWS as ROWS_JUDGED
from compress.quantization.certify import PROBE
from compress.quantization.select import ALPHAS, CALIBRATION_ROWS
from compress.records.forecast import PhaseEstimate, time_call
from compress.records.latency import Setting
from compress.training.context import TrainingContext

RACED = 8
"""Rounds of the race in `ship`."""
LIKELY = 0.1
"""The share of the span between its least and its most seconds after which exporting
mostly ends (docs/LOG.md)."""
SHIPPED = 2.25
"""Size of a bundle relative to its weights: these, plus ONNX with four bytes per
number, and with one."""


@dataclass(frozen=True)
class Ship(Phase[Job]):
    """Export the student, quantise and certify it, and measure it beside its teacher.

    max_drop: how much of the score, in its own unit, int8 may lose
    """

    max_drop: float

    def pending(self, job: Job) -> dict[str, str]:
        return {"bundle": "export to ONNX"}

    def run(self, job: Job) -> Job:
        models = job.models
        if not models.run.main:
            return job
        assert job.student is not None, "the stages come first"
        bundle = ship(
            job.student,
            job.teacher,
            models.context,
            recipe=models.recipe,
            run=models.run,
            notes=job.notes,
            started=job.started - models.run.before,
            int8_limit=self.max_drop,
        )
        return replace(job, bundle=bundle)

    def estimate(self, job: Job) -> tuple[Job, list[PhaseEstimate]]:
        assert job.student is not None, "the stages come first"
        length = job.models.recipe.stages[-1].length
        context = job.models.context
        student_mb = job.trials.student_mb
        found = estimate_shipping(job.student, job.teacher, context, length, student_mb)
        return job, [found]


def estimate_shipping(
    student: PreTrainedModel,
    teacher: Teacher,
    context: TrainingContext,
    length: int,
    student_mb: float,
) -> PhaseEstimate:
    """PhaseEstimate `ship`.

    Both files of the student and one of the teacher are exported, raced, and run on few
    rows, as for choosing, certifying and measuring int8. The minimum assumes that int8
    is near enough to fp32 as it is written; the maximum, that it is smoothed and each
    product tried in float32. A teacher that cannot be exported, or is not a model here,
    is left out.
    """
    configs = {"fp32": student.config, "int8": student.config}
    if teacher.recorded is None:
        try:
            seconds, choosing = _time_files(
                {**configs, "teacher": teacher.model.config}, context, length
            )
        except ExportError:
            seconds, choosing = _time_files(configs, context, length)
    else:
        seconds, choosing = _time_files(configs, context, length)
    return PhaseEstimate(
        "export and measure",
        seconds=(seconds, seconds + choosing),
        disk_mb=SHIPPED * student_mb,
        likely=LIKELY,
    )


def _time_files(
    configs: Mapping[str, object], context: TrainingContext, length: int
) -> tuple[float, float]:
    """Return the seconds of exporting, racing and running these files, and those that
    choosing int8 may take besides. Raises ExportError."""
    data = context.data
    threads = os.cpu_count() or 1
    split = data.validation if data.test is None else data.test
    scored = Evaluator.from_split(data.task, split, context.tokenizer, length)
    rows = scored.subsample(SCORED).rows
    precisions: dict[str, Precision] = {
        name: "int8" if name == "int8" else "fp32" for name in configs
    }
    began = time.perf_counter()
    export = exported(
        configs,
        Setting(1, 1, length),
        precision=precisions,
        kind=data.task.kind,
        segments=makes_segments(context.tokenizer),
    )
    with export as files:
        seconds = time.perf_counter() - began
        lengths = dict.fromkeys(min(each, length) for each in SHIPPED_LENGTHS)
        settings = [Setting(1, 1, each) for each in lengths]
        seconds += RACED / 2 * time_call(partial(race, files, settings, rounds=2))
        per_row = {}
        for name, file in files.items():
            session = open_session(file, threads=threads)
            run = partial(run_rows, session, rows, threads=threads)
            per_row[name] = time_call(run) / len(rows)
            if name == "teacher":
                seconds += per_row[name] * len(split)
            else:
                judged = min(ROWS_JUDGED, len(data.validation))
                seconds += per_row[name] * (judged + 2 * len(split))
        return seconds, _time_choosing(files["fp32"], per_row, context)


def _time_choosing(
    source: Path, per_row: Mapping[str, float], context: TrainingContext
) -> float:
    """Estimate the seconds of `keep_score` beyond its first look, from those that the
    fp32 and int8 files take."""
    data = context.data
    trial = source.with_suffix(".trial.onnx")
    probed = min(PROBE, len(data.validation))
    judged = min(ROWS_JUDGED, len(data.validation))
    count = len(products(read_model(source).graph))
    writing = time_call(partial(quantize_dynamic, source, trial))
    attempt = writing + probed * per_row["int8"]
    trial.unlink()
    observing = min(CALIBRATION_ROWS, len(data.train)) * per_row["fp32"]
    smoothing = observing + len(ALPHAS) * (attempt + probed * per_row["fp32"])
    trying = (2 * count + 1) * attempt
    return smoothing + trying + math.log2(2 * count) * judged * per_row["int8"]
