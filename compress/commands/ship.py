"""Trained student -> bundle, measured: what the user came for."""

import datetime
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray
from transformers import PreTrainedModel

from compress.benchmark.devices import open_device
from compress.benchmark.local import machine, race
from compress.config.recipe import Recipe
from compress.console import warn
from compress.data.sources import EMBEDDED, hub_id
from compress.data.task import Task
from compress.errors import ExportError
from compress.evaluation import baselines, embedding, metrics
from compress.evaluation.evaluator import Evaluator
from compress.exporters.artifact import Bundle, building
from compress.exporters.card import proof_line
from compress.exporters.onnx import makes_segments, parity, to_onnx
from compress.exporters.predictor import open_predictor
from compress.io import atomic_file, name_disk_errors, sha256
from compress.models import teacher as teachers
from compress.models.checkpoints import describe_origin
from compress.models.flops import count_parameters, flops_per_token
from compress.models.teacher import Teacher
from compress.provenance import command_line, versions
from compress.quantization.certify import certify, sign_file
from compress.quantization.select import CALIBRATION_ROWS, keep_score
from compress.records.latency import Latency, Setting
from compress.records.run_report import Report, ReportRow
from compress.reporting.html import render_html
from compress.reporting.remarks import run_warnings
from compress.reporting.tables import run_table
from compress.reporting.terminal import print_table
from compress.training.context import TrainingContext
from compress.training.logging import curves, mend
from compress.training.run import Run
from compress.training.stage import Trained, load_trained

LENGTHS = (128, 32)
"""Tokens at which latency is measured, one text and one thread at a time; at most what the bundle was made for."""
INT8_DROP = 0.005
"""A larger loss of score by quantisation is pointed out in the report."""
_LIBRARIES = ("compress", "torch", "transformers", "datasets", "onnxruntime", "onnx", "scikit-learn", "numpy")


@dataclass(frozen=True)
class Examined:
    """A model, what it says of the measured rows, and the file that said it (None: torch did, or it was asked)."""

    name: str
    logits: NDArray[np.float32]
    threshold: float | None
    model: PreTrainedModel | None = None
    file: Path | None = None
    parameters: int | None = None


@dataclass(frozen=True)
class Room:
    """The rows on which models are examined: those measured on, and those that choose a threshold, if one is needed."""

    evaluator: Evaluator
    chosen: Evaluator | None

    def examined(
        self, name: str, ask: Callable[[Dataset], NDArray[np.float32]], model: PreTrainedModel, file: Path | None
    ) -> Examined:
        """Thresholds are chosen where the weights were: on the validation split, for each model by itself."""
        threshold = self.chosen.threshold(ask(self.chosen.rows)) if self.chosen else None
        return Examined(name, ask(self.evaluator.rows), threshold, model, file, count_parameters(model))


def measure(
    bundle: Bundle,
    task_teacher: Teacher,
    student: PreTrainedModel,
    context: TrainingContext,
    *,
    recipe: Recipe,
    run: Run,
    notes: Sequence[str],
    command: str,
    seconds: float,
) -> Report:
    """Score, agreement, size, FLOPs and latency of baselines, teacher, student fp32 and student int8.

    On the test split, or the validation split where there is none with labels. `seconds`: wall time of the run so far.
    """
    data, length = context.data, bundle.manifest.max_length
    mend(run.path / "log.jsonl", partial(warn, context.console))
    name, split = ("validation", data.validation) if data.test is None else ("test", data.test)
    context.console.print(f"measuring on {len(split):,} {name} rows")
    elsewhere = data.task.unanswerable and data.test is not None
    chosen = Evaluator.from_split(data.task, data.validation, task_teacher.tokenizer, length) if elsewhere else None
    room = Room(Evaluator.from_split(data.task, split, task_teacher.tokenizer, length), chosen)
    context.console.print(f"scoring {task_teacher.name}", highlight=False, markup=False)
    teacher, note = _teacher(task_teacher, context, room, bundle, run.path / "teacher" / "model.onnx")
    students = []
    for which, path in bundle.files().items():
        context.console.print(f"scoring student {which}", highlight=False)
        students.append(room.examined(f"student {which}", _open_logits(bundle, path), student, path))
    files = {each.name: each.file for each in (teacher, *students) if each.file is not None}
    lengths = dict.fromkeys(min(each, length) for each in LENGTHS)
    context.console.print(f"timing {len(files)} files at {', '.join(map(str, lengths))} tokens", highlight=False)
    with context.console.status("timing") as status:  # a line that is not there but on a terminal
        times = race(files, [Setting(threads=1, batch=1, seq=each) for each in lengths], say=status.update)
    spent = {stage.name: load_trained(run, stage.name, context.console) for stage in (recipe.teacher, *recipe.stages)}
    rows = [
        *(ReportRow(each, "baseline", found) for each, found in baselines.baselines(data, split).items()),
        _row(teacher, room.evaluator, times, [spent[recipe.teacher.name]]),
        *(
            _row(each, room.evaluator, times, [spent[stage.name] for stage in recipe.stages], teacher)
            for each in students
        ),
    ]
    batches = [
        context.collate([room.evaluator.rows[i] for i in range(at, min(at + 8, len(room.evaluator.rows)))])
        for at in range(0, min(64, len(room.evaluator.rows)), 8)
    ]
    noisy = [f"{time.name}, {time.setting}: {time.noise}" for time in times if time.noisy]
    noisy += dict.fromkeys(f"{time.setting}: {time.busy}" for time in times if time.busy)
    return Report(
        title=f"{recipe.name}: {task_teacher.name} on {data.name}",
        recipe=recipe.name,
        teacher=task_teacher.name,
        data=data.name,
        kind=data.task.kind,
        metric=data.task.metric,
        labels=len(data.task.labels),
        split=name,
        split_rows=len(room.evaluator),
        rows=tuple(rows),
        command=command,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        seconds=seconds,
        stage_seconds={stage: each.seconds for stage, each in spent.items() if each},
        seed=run.seed,
        curves=curves(run.path / "log.jsonl"),
        versions=versions(_LIBRARIES),
        machine=machine(),
        noise="; ".join(noisy) or None,
        notes=(
            *data.notes,
            *notes,
            *([note] if note else []),
            *(each.note for each in spent.values() if each and each.note),
            *_note_int8(data.task, rows[-2], rows[-1]),
            *_note_vectors(room.evaluator, teacher, students[-1]),
            "fp32 ONNX against torch: logits differ by at most "
            f"{parity(student, bundle.files()['fp32'], batches):.1e}.",
            f"Training peaked at {max(each.peak_rss_mb if each else 0 for each in spent.values()):,.0f} MB of memory.",
        ),
    )


def _teacher(
    task_teacher: Teacher, context: TrainingContext, room: Room, bundle: Bundle, file: Path
) -> tuple[Examined, str | None]:
    """Run the teacher from an ONNX `file` of its own; by torch where that cannot be, with a note of why."""
    if task_teacher.recorded is not None:
        said = task_teacher.recorded.for_split(room.evaluator.split)
        return Examined(task_teacher.name, said, None, parameters=task_teacher.recorded.parameters), None
    model = teachers.load(
        task_teacher.name, task_teacher.folder, context.data.task, allow_pickle=task_teacher.pickled
    ).model
    why = _export(model, task_teacher, file)
    if why is None:
        return room.examined(task_teacher.name, _open_logits(bundle, file), model, file), None
    ask = partial(metrics.logits, model, collate=context.collate)
    return (
        room.examined(task_teacher.name, ask, model, None),
        f"The teacher was scored by torch and has no latency here. {why}",
    )


def _open_logits(bundle: Bundle, file: Path) -> Callable[[Dataset], NDArray[np.float32]]:
    """Return the function from rows to the logits of an ONNX file of the bundle."""
    threads = os.cpu_count() or 1
    return open_predictor(
        bundle.path, file, task=bundle.task, max_length=bundle.manifest.max_length, threads=threads
    ).logits


def _row(
    one: Examined,
    evaluator: Evaluator,
    times: Sequence[Latency],
    spent: Sequence[Trained | None],
    teacher: Examined | None = None,
) -> ReportRow:
    """Make a line of the report; that of a student if `teacher` is given."""
    agreement = None
    if teacher is not None:
        agreement = evaluator.agreement(one.logits, teacher.logits, thresholds=(one.threshold, teacher.threshold))
    measured: dict[str, Any] = {}
    if one.file is not None and one.model is not None:
        measured = {
            "flops_per_token": flops_per_token(one.model),
            "file_mb": one.file.stat().st_size / 1e6,
            "sha256": sha256(one.file),
            "latency": {str(time.setting): time for time in times if time.name == one.name},
            "peak_rss_mb": max(time.peak_rss_mb or 0.0 for time in times if time.name == one.name),
            **_training(spent),
        }
    return ReportRow(
        name=one.name,
        role="student" if teacher else "teacher",
        score=evaluator.scores(one.logits, threshold=one.threshold),
        agreement=agreement,
        parameters=one.parameters,
        classes=evaluator.by_class(one.logits),
        interval=evaluator.interval(one.logits, threshold=one.threshold),
        **measured,
    )


def card(report: Report, recipe: Recipe, origin: Mapping[str, str]) -> dict[str, Any]:
    """Make the fields of the model card, see `exporters.card.Card`; `origin`: those of the teacher's own."""
    setting = next(iter(report.settings), None)
    rows = [
        {
            "model": row.name,
            report.metric: f"{report.score(row):.4f}" if report.score(row) is not None else "",
            "95 % interval": f"{row.interval[0]:.3f} to {row.interval[1]:.3f}" if row.interval else "",
            **({"macro F1": _four(report.macro_f1(row))} if any(map(report.macro_f1, report.rows)) else {}),
            "parameters": f"{row.parameters:,}" if row.parameters else "",
            "file": f"{row.file_mb:.1f} MB" if row.file_mb else "",
            f"p50 ({setting})": f"{found.p50_ms:.2f} ms" if (found := report.latency(row)) else "",
        }
        for row in report.rows
    ]
    results = [
        {
            "metric": report.metric, "value": value, "low": row.interval and row.interval[0],
            "high": row.interval and row.interval[1], "rows": report.split_rows,
            "file": row.name.removeprefix("student "),
        }
        for row in report.of_role("student") if (value := report.score(row)) is not None
    ]  # fmt: skip
    paper, known = recipe.paper, hub_id(report.data)
    machine = [
        report.machine[key] for key in ("cpu", "cores", "instructions", "memory", "system") if key in report.machine
    ]
    return {
        "name": f"{recipe.name} student of {report.teacher} on {report.data}",
        "recipe": recipe.name,
        "citation": f"{paper.authors} {paper.year}, {paper.title}, {paper.url}",
        "command": report.command,
        "teacher": report.teacher,
        **origin,
        **({"language": "en"} if report.data in EMBEDDED else {}),
        "data": report.data,
        "dataset": known[0] if known else "",
        "config": known[1] if known else "",
        "split": report.split,
        "results": results,
        "rows": rows,
        "classes": _by_class(report),
        "proofs": [proof_line(proof) for proof in report.certificates],
        "measured": [
            *([", ".join(machine)] if machine else []),
            f"{report.date}; {', '.join(f'{name} {version}' for name, version in report.versions.items())}",
        ],
        "limits": [
            *run_warnings(report),
            f"Scored on the {report.split} split of {report.data} ({report.split_rows:,} {report.unit}) only.",
            "Latency is of the machine it was measured on; int8 results can differ between processors.",
        ],
    }


def _by_class(report: Report) -> list[dict[str, str]]:
    """List precision, recall and F1 of each class, a column for every model."""
    rows = [row for row in report.rows if row.classes]
    support = {one.label: one.support for row in rows for one in row.classes}
    scores = {row.name: {one.label: one for one in row.classes} for row in rows}
    return [
        {
            "class": label,
            "support": f"{count:,}",
            **{
                name: f"{one.precision:.3f} / {one.recall:.3f} / {one.f1:.3f}" if (one := each.get(label)) else ""
                for name, each in scores.items()
            },
        }
        for label, count in support.items()
    ]


def _four(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _export(teacher: PreTrainedModel, task_teacher: Teacher, path: Path) -> str | None:
    """Write the teacher's ONNX file with its config beside it, or say why that cannot be done."""
    path.parent.mkdir(exist_ok=True)
    with name_disk_errors(path.parent):
        teacher.config.save_pretrained(path.parent)
    try:
        to_onnx(teacher, path, segments=makes_segments(task_teacher.tokenizer))
    except ExportError as error:
        return str(error)
    return None


def _training(spent: Sequence[Trained | None]) -> dict[str, Any]:
    seconds = sum(each.seconds for each in spent if each)
    examples = sum(each.examples for each in spent if each)
    if not seconds:
        return {}
    return {"train_seconds": seconds, "samples_per_second": examples / seconds}


def _note_int8(task: Task, fp32: ReportRow, int8: ReportRow) -> list[str]:
    before, after = fp32.score[task.metric] or 0.0, int8.score[task.metric] or 0.0
    if before - after > INT8_DROP:
        return [f"int8 loses {100 * (before - after):.1f} points of {task.metric}; ship the fp32 file if that matters."]
    return []


def _note_vectors(evaluator: Evaluator, teacher: Examined, student: Examined) -> list[str]:
    """Say how well a student's vectors ask those of its teacher, as they do of an index that is not made again; and
    what smaller forms of them lose."""
    if evaluator.task.kind != "embedding" or teacher.logits.shape != student.logits.shape:
        return []
    metric = evaluator.task.metric
    found = embedding.scores(evaluator.split, teacher.logits, queries_NE=student.logits)[metric]
    smaller = embedding.compact_scores(evaluator.split, student.logits, metric)
    return [
        f"Vectors of {student.name} asking the teacher's own, of an index that is not made again: {metric} "
        f"{found:.3f}; mean cosine between the two {embedding.similarity(student.logits, teacher.logits):.3f}.",
        f"Vectors of {student.name} kept smaller, {metric}: "
        + "; ".join(f"{how} {score:.3f}" for how, score in smaller.items())
        + ".",
    ]


INT8_LIMIT = 0.002
"""The part of the score, in its own unit, and the share of the answers that quantisation may change on the validation
split, where nobody says otherwise."""
BUDGETED_LIMIT = 0.005
"""The same of a student that was made for a latency: a product in float32 costs what pruning has saved."""


def ship(
    student: PreTrainedModel,
    task_teacher: Teacher,
    context: TrainingContext,
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
    data, console, tokenizer = context.data, context.console, task_teacher.tokenizer
    length, threads, place = recipe.stages[-1].max_length, os.cpu_count() or 1, run.path / "bundle"
    with building(place) as folder:
        bundle = Bundle.write(
            folder, model=student.cpu(), tokenizer=tokenizer, task=data.task, max_length=length,
            recipe=recipe.to_yaml(), card={"name": f"{recipe.name} student of {task_teacher.name}"},
        )  # fmt: skip
        evaluator = Evaluator.from_split(data.task, data.validation, tokenizer, length)
        bundle, mixed, method = keep_score(
            bundle, evaluator, limit=int8_limit, threads=threads,
            rows=lambda: (
                Evaluator.from_split(data.task, data.train, tokenizer, length).subsample(CALIBRATION_ROWS).rows
            ),
        )  # fmt: skip
        if mixed.keep:
            warn(console, mixed.price())
            notes = [*notes, f"{mixed.price()} They are: {', '.join(mixed.keep)}."]
        if data.task.unanswerable:
            bundle = bundle.set_threshold(evaluator.threshold(bundle.logits(evaluator.rows, threads=threads)))
        with open_device("local") as here:
            proof = certify(
                bundle, "int8", evaluator, max_drop=int8_limit, device=here, method=method,
                split="validation", data=data.name, kept=mixed.keep, cost=mixed.cost,
            )  # fmt: skip
        bundle, proof = sign_file(bundle, "int8", proof)  # before the file is measured: it is another one from here on
        report = measure(
            bundle, task_teacher, student, context,
            recipe=recipe, run=run, notes=notes, command=command_line(), seconds=time.time() - started,
        )  # fmt: skip
        report = replace(report, certificates=(proof,), sensitivity=mixed.sensitivity)
        bundle = bundle.attach("report.json", report.to_json())
        if task_teacher.recorded is not None and task_teacher.recorded.prompt is not None:
            bundle = bundle.attach("prompt.yaml", task_teacher.recorded.prompt)
        origin: dict[str, str] = {}
        if task_teacher.recorded is None:  # the licences of two models, the one asked and the one trained, would bind
            base = context.base_teacher or task_teacher
            origin = describe_origin(base.name, base.folder)
        bundle.attach("README.md", bundle.card(card(report, recipe, origin)))
    with atomic_file(run.path / "report.html") as page:
        page.write_text(render_html(report), encoding="utf-8")
    print_table(console, run_table(report), more="on the page")
    for warning in run_warnings(report):
        warn(console, warning)
    console.print(f"bundle: {place}    page: {run.path / 'report.html'}", highlight=False)
    return Bundle.load(place)
