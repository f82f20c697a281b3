"""Trained student -> bundle, measured: what the user came for."""

import os
import time
from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedModel

from compress.address import command_line
from compress.bench.device import open_device
from compress.exam import Exam
from compress.export.bundle import Bundle, building
from compress.files import written
from compress.measure import card, measure
from compress.quantize.certify import certify, signed
from compress.quantize.pipeline import CALIBRATION_ROWS, keep_score
from compress.recipe import Recipe
from compress.report.headline import warnings
from compress.run import Run
from compress.screen import warn
from compress.stages import Material
from compress.teachers import Teacher

INT8_LIMIT = 0.002
"""How much of the score, and what share of the answers, quantisation may change on the validation split, where nobody
says otherwise."""
BUDGETED_LIMIT = 0.005
"""The same of a student that was made for a latency: a product in float32 costs what pruning has saved."""


def ship(
    student: PreTrainedModel,
    tutor: Teacher,
    material: Material,
    *,
    recipe: Recipe,
    run: Run,
    notes: Sequence[str],
    started: float,
    int8_limit: float = INT8_LIMIT,
) -> Bundle:
    """Write `bundle/` and `report.html` into the run's directory and print the comparison.

    int8 is dynamic where that stays within `int8_limit` of fp32, else SmoothQuant of training rows, else the nearer of
    the two with what it must leave in float32; it is certified on the validation split that decided so. The bundle gets
    its name when all of that is in it. `started`: time.time() of the run's start.
    """
    data, length, console = material.data, recipe.stages[-1].max_length, material.console
    threads, place = os.cpu_count() or 1, run.path / "bundle"
    with building(place) as folder:
        bundle = Bundle.write(
            folder, model=student.cpu(), tokenizer=tutor.tokenizer, task=data.task, max_length=length,
            recipe=recipe.to_yaml(), card={"name": f"{recipe.name} student of {tutor.name}"},
        )  # fmt: skip
        exam = Exam.of(data.task, data.validation, tutor.tokenizer, length)
        bundle, mixed, method = keep_score(
            bundle, exam, limit=int8_limit, threads=threads,
            rows=lambda: Exam.of(data.task, data.train, tutor.tokenizer, length).spread(CALIBRATION_ROWS).rows,
        )  # fmt: skip
        if mixed.keep:
            warn(console, mixed.price())
            notes = [*notes, f"{mixed.price()} They are: {', '.join(mixed.keep)}."]
        if data.task.unanswerable:
            bundle = bundle.with_threshold(exam.threshold(bundle.logits(exam.rows, threads=threads)))
        with open_device("local") as here:
            proof = certify(
                bundle, "int8", exam, max_drop=int8_limit, device=here, method=method,
                split="validation", data=data.name, kept=mixed.keep, cost=mixed.cost,
            )  # fmt: skip
        bundle, proof = signed(bundle, "int8", proof)  # before the file is measured: it is another one from here on
        report = measure(
            bundle, tutor, student, material,
            recipe=recipe, run=run, notes=notes, command=command_line(), seconds=time.time() - started,
        )  # fmt: skip
        report = replace(report, certificates=(proof,), sensitivity=mixed.sensitivity)
        bundle = bundle.attach("report.json", report.to_json())
        if tutor.asked is not None:
            bundle = bundle.attach("prompt.yaml", tutor.asked.prompt)
        bundle.attach("README.md", bundle.card(card(report, recipe, tutor.name)))
    with written(run.path / "report.html") as page:
        page.write_text(report.html(), encoding="utf-8")
    console.print(report.table(console.width))
    for warning in warnings(report):
        warn(console, warning)
    console.print(f"bundle: {place}    page: {run.path / 'report.html'}", highlight=False)
    return Bundle.load(place)
