"""Ship a trained student: write the bundle, quantise and certify it, and measure it
beside its teacher."""

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
from compress.data.sources import EMBEDDED_DATA, hub_id
from compress.errors import ExportError
from compress.evaluation import embedding, metrics
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
from compress.provenance import command_line, predict_command, timestamp, versions
from compress.quantization.certify import Claim, certify, sign_file
from compress.quantization.select import CALIBRATION_ROWS, keep_score
from compress.records.latency import Latency, Setting
from compress.records.run_report import Report, ReportRow
from compress.reporting.html import render_run
from compress.reporting.remarks import run_warnings
from compress.reporting.tables import run_table
from compress.reporting.terminal import print_table
from compress.training.context import TrainingContext
from compress.training.logging import curves, mend
from compress.training.run import Run
from compress.training.stage import Trained, load_trained

SHIPPED_LENGTHS = (128, 32)
"""Tokens at which latency is measured, with one text and one thread; at most the
bundle's maximum."""
INT8_DROP = 0.005
"""If quantisation loses more of the score, the report says so."""
ComputeLogits = Callable[[Dataset], NDArray[np.float32]]
_LIBRARIES = (
    "compress",
    "torch",
    "transformers",
    "datasets",
    "onnxruntime",
    "onnx",
    "scikit-learn",
    "numpy",
)


@dataclass(frozen=True)
class ScoredModel:
    """A model with its answers to the measured rows. file: the ONNX file that gave
    them; None: torch, or recorded."""

    name: str
    logits: NDArray[np.float32]
    threshold: float | None = None
    model: PreTrainedModel | None = None
    file: Path | None = None
    parameters: int | None = None


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
    """Measure score, agreement, size, FLOPs and latency of baselines, teacher, student
    fp32 and student int8.

    On the test split, or the validation split if there is none with labels. seconds:
    wall time of the run so far.
    """
    data = context.data
    length = bundle.manifest.max_length
    console = context.console
    mend(run.path / "log.jsonl", partial(warn, console))
    name, split = (
        ("validation", data.validation) if data.test is None else ("test", data.test)
    )
    evaluator = Evaluator.from_split(data.task, split, task_teacher.tokenizer, length)
    unit = data.task.scored_unit(data.task.metric)
    console.print(f"measuring on {len(evaluator):,} {name} {unit}")
    # for a threshold, which is chosen per model, on the validation split like the
    # weights
    calibration = None
    if data.task.unanswerable and data.test is not None:
        calibration = Evaluator.from_split(
            data.task, data.validation, task_teacher.tokenizer, length
        )

    def score(
        name: str, run_model: ComputeLogits, model: PreTrainedModel, file: Path | None
    ) -> ScoredModel:
        console.print(f"scoring {name}", highlight=False, markup=False)
        threshold = (
            None
            if calibration is None
            else calibration.threshold(run_model(calibration.rows))
        )
        return ScoredModel(
            name,
            run_model(evaluator.rows),
            threshold,
            model,
            file,
            count_parameters(model),
        )

    why = None
    if (recorded := task_teacher.recorded) is not None:
        console.print(f"scoring {task_teacher.name}", highlight=False, markup=False)
        logits = recorded.for_split(evaluator.split)
        teacher = ScoredModel(task_teacher.name, logits, parameters=recorded.parameters)
    else:
        teacher_file = run.path / "teacher" / "model.onnx"
        model = teachers.load(
            task_teacher.name,
            task_teacher.folder,
            data.task,
            allow_pickle=task_teacher.pickled,
        ).model
        if (why := export_teacher(model, task_teacher, teacher_file)) is None:
            teacher = score(
                task_teacher.name,
                _open_logits(bundle, teacher_file),
                model,
                teacher_file,
            )
        else:
            by_torch = partial(metrics.logits, model, collate=context.collate)
            teacher = score(task_teacher.name, by_torch, model, None)
    students = [
        score(f"student {precision}", _open_logits(bundle, file), student, file)
        for precision, file in bundle.files().items()
    ]
    files = {
        scored.name: scored.file
        for scored in (teacher, *students)
        if scored.file is not None
    }
    lengths = dict.fromkeys(min(tokens, length) for tokens in SHIPPED_LENGTHS)
    console.print(
        f"timing {len(files)} files at {', '.join(map(str, lengths))} tokens",
        highlight=False,
    )
    with console.status("timing") as status:  # only shown on a terminal
        times = race(
            files,
            [Setting(threads=1, batch=1, seq=tokens) for tokens in lengths],
            say=status.update,
        )
    trained = {
        stage.name: load_trained(run, stage.name, console)
        for stage in (recipe.teacher, *recipe.stages)
    }
    rows = [
        *(
            ReportRow(each, "baseline", found)
            for each, found in data.task.baselines(data, split).items()
        ),
        make_row(teacher, evaluator, times, [trained[recipe.teacher.name]]),
        *(
            make_row(
                scored,
                evaluator,
                times,
                [trained[stage.name] for stage in recipe.stages],
                teacher,
            )
            for scored in students
        ),
    ]
    batches = [
        context.collate(
            [evaluator.rows[i] for i in range(at, min(at + 8, len(evaluator.rows)))]
        )
        for at in range(0, min(64, len(evaluator.rows)), 8)
    ]
    noisy = [
        f"{time.name}, {time.setting}: {time.noise}" for time in times if time.noisy
    ]
    noisy += dict.fromkeys(
        f"{time.setting}: {time.busy}" for time in times if time.busy
    )
    peak_mb = max(each.peak_rss_mb if each else 0 for each in trained.values())
    before = rows[-2].score[data.task.metric] or 0.0
    after = rows[-1].score[data.task.metric] or 0.0
    int8_loss = before - after if before - after > INT8_DROP else None
    return Report(
        title=f"{recipe.name}: {task_teacher.name} on {data.name}",
        recipe=recipe.name,
        teacher=task_teacher.name,
        data=data.name,
        kind=data.task.kind,
        metric=data.task.metric,
        labels=len(data.task.labels),
        split=name,
        split_rows=len(evaluator),
        rows=tuple(rows),
        command=command,
        date=timestamp(),
        seconds=seconds,
        stage_seconds={stage: each.seconds for stage, each in trained.items() if each},
        seed=run.seed,
        curves=curves(run.path / "log.jsonl"),
        versions=versions(_LIBRARIES),
        machine=machine(),
        noise="; ".join(noisy) or None,
        vectors=embedding.score_forms(
            evaluator.split, students[-1].logits, data.task.metric
        )
        if data.task.vectors
        else (),
        notes=(
            *data.notes,
            *notes,
            *(
                [f"The teacher was scored by torch and has no latency here. {why}"]
                if why
                else ()
            ),
            *(each.note for each in trained.values() if each and each.note),
            *(
                [
                    f"int8 loses {100 * int8_loss:.1f} points of {data.task.metric}; "
                    "ship the fp32 file if that matters."
                ]
                if int8_loss
                else ()
            ),
            *note_vectors(evaluator, teacher, students[-1]),
            "fp32 ONNX against torch: logits differ by at most "
            f"{parity(student, bundle.files()['fp32'], batches):.1e}.",
            f"Training peaked at {peak_mb:,.0f} MB of memory.",
        ),
    )


def export_teacher(model: PreTrainedModel, teacher: Teacher, path: Path) -> str | None:
    """Write the teacher's ONNX file, with its config beside it; return the error if
    that is impossible."""
    path.parent.mkdir(exist_ok=True)
    with name_disk_errors(path.parent):
        model.config.save_pretrained(path.parent)
    try:
        to_onnx(model, path, segments=makes_segments(teacher.tokenizer))
    except ExportError as error:
        return str(error)
    return None


def _open_logits(bundle: Bundle, file: Path) -> ComputeLogits:
    """Return the function from rows to the logits of an ONNX file, read with the
    bundle's tokenizer."""
    threads = os.cpu_count() or 1
    return open_predictor(
        bundle.path,
        file,
        task=bundle.task,
        max_length=bundle.manifest.max_length,
        threads=threads,
    ).logits


def make_row(
    scored: ScoredModel,
    evaluator: Evaluator,
    times: Sequence[Latency],
    trained: Sequence[Trained | None],
    teacher: ScoredModel | None = None,
) -> ReportRow:
    """Make a row of the report. teacher: that of a student; None for the teacher's own
    row."""
    agreement = None
    if teacher is not None:
        agreement = evaluator.agreement(
            scored.logits,
            teacher.logits,
            thresholds=(scored.threshold, teacher.threshold),
        )
    measured: dict[str, Any] = {}
    if scored.file is not None and scored.model is not None:
        own = [time for time in times if time.name == scored.name]
        measured = {
            "flops_per_token": flops_per_token(scored.model),
            "file_mb": scored.file.stat().st_size / 1e6,
            "sha256": sha256(scored.file),
            "latency": {str(time.setting): time for time in own},
            "peak_rss_mb": max(time.peak_rss_mb or 0.0 for time in own),
        }
        if seconds := sum(each.seconds for each in trained if each):
            examples = sum(each.examples for each in trained if each)
            measured |= {
                "train_seconds": seconds,
                "samples_per_second": examples / seconds,
            }
    return ReportRow(
        name=scored.name,
        role="student" if teacher else "teacher",
        score=evaluator.scores(scored.logits, threshold=scored.threshold),
        agreement=agreement,
        parameters=scored.parameters,
        classes=evaluator.by_class(scored.logits),
        interval=evaluator.interval(scored.logits, threshold=scored.threshold),
        **measured,
    )


def card(report: Report, recipe: Recipe, origin: Mapping[str, str]) -> dict[str, Any]:
    """Make the fields of the model card (see `exporters.card.Card`). origin: those
    taken from the teacher's card."""
    setting = next(iter(report.settings), None)
    with_f1 = any(map(report.macro_f1, report.rows))
    rows = [
        {
            "model": row.name,
            report.metric: ""
            if (score := report.score(row)) is None
            else f"{score:.4f}",
            "95 % interval": f"{row.interval[0]:.3f} to {row.interval[1]:.3f}"
            if row.interval
            else "",
            **(
                {
                    "macro F1": ""
                    if (f1 := report.macro_f1(row)) is None
                    else f"{f1:.4f}"
                }
                if with_f1
                else {}
            ),
            "parameters": f"{row.parameters:,}" if row.parameters else "",
            "file": f"{row.file_mb:.1f} MB" if row.file_mb else "",
            f"p50 ({setting})": f"{found.p50_ms:.2f} ms"
            if (found := report.latency(row))
            else "",
        }
        for row in report.rows
    ]
    results = [
        {
            "metric": report.metric,
            "value": value,
            "low": row.interval and row.interval[0],
            "high": row.interval and row.interval[1],
            "rows": report.split_rows,
            "file": row.name.removeprefix("student "),
        }
        for row in report.of_role("student")
        if (value := report.score(row)) is not None
    ]
    paper = recipe.paper
    known = hub_id(report.data)
    libraries = ", ".join(f"{name} {each}" for name, each in report.versions.items())
    machine = [
        report.machine[key]
        for key in ("cpu", "cores", "instructions", "memory", "system")
        if key in report.machine
    ]
    return {
        "name": f"{recipe.name} student of {report.teacher} on {report.data}",
        "recipe": recipe.name,
        "citation": f"{paper.authors} {paper.year}, {paper.title}, {paper.url}",
        "command": report.command,
        "teacher": report.teacher,
        **origin,
        **({"language": "en"} if report.data in EMBEDDED_DATA else {}),
        "data": report.data,
        "dataset": known[0] if known else "",
        "config": known[1] if known else "",
        "split": report.split,
        "results": results,
        "rows": rows,
        "classes": _by_class(report),
        "vectors": [
            {
                "form": form.name,
                "bytes of a vector": f"{form.bytes:,}",
                report.metric: f"{form.score:.4f}",
            }
            for form in report.vectors
        ],
        "proofs": [proof_line(proof) for proof in report.certificates],
        "measured": [
            *([", ".join(machine)] if machine else []),
            f"{report.date}; {libraries}",
        ],
        "limits": [
            *run_warnings(report),
            f"Scored on the {report.split} split of {report.data} "
            f"({report.split_rows:,} {report.unit}) only.",
            "Latency is of the machine it was measured on; int8 results can differ "
            "between processors.",
        ],
    }


def _by_class(report: Report) -> list[dict[str, str]]:
    """List precision, recall and F1 of each class, a column for every model."""
    rows = [row for row in report.rows if row.classes]
    support = {each.label: each.support for row in rows for each in row.classes}
    cells = {
        (
            row.name,
            each.label,
        ): f"{each.precision:.3f} / {each.recall:.3f} / {each.f1:.3f}"
        for row in rows
        for each in row.classes
    }
    return [
        {
            "class": label,
            "support": f"{count:,}",
            **{row.name: cells.get((row.name, label), "") for row in rows},
        }
        for label, count in support.items()
    ]


def note_vectors(
    evaluator: Evaluator, teacher: ScoredModel, student: ScoredModel
) -> list[str]:
    """Say how well a student's vectors search an existing index of the teacher's."""
    if not evaluator.task.vectors or teacher.logits.shape != student.logits.shape:
        return []
    metric = evaluator.task.metric
    score = embedding.scores(
        evaluator.split, teacher.logits, queries_NE=student.logits
    )[metric]
    return [
        f"Vectors of {student.name} searching the teacher's, as in an existing index: "
        f"{metric} {score:.3f}; mean cosine between the two "
        f"{embedding.similarity(student.logits, teacher.logits):.3f}."
    ]


INT8_LIMIT = 0.002
"""The most that int8 may lower the score, in its own unit, and the share of answers it
may change when validated."""
BUDGETED_LIMIT = 0.005
"""The same for a student that was made for a latency: a product in float32 costs what
pruning has saved."""


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
    """Write `bundle/` and `report.html` into the run's directory, and print the
    comparison.

    int8 is dynamic if that stays within `int8_limit` of fp32, else SmoothQuant on
    training rows, else the better of the two with some products left in float32. It is
    certified on the validation split, which also decided that. The bundle appears when
    it is complete. started: time.time() at the start of the run.
    """
    data = context.data
    console = context.console
    tokenizer = task_teacher.tokenizer
    length = recipe.stages[-1].length
    threads = os.cpu_count() or 1
    place = run.path / "bundle"
    with building(place) as folder:
        bundle = Bundle.write(
            folder,
            model=student.cpu(),
            tokenizer=tokenizer,
            task=data.task,
            max_length=length,
            recipe=recipe.to_yaml(),
            card={"name": f"{recipe.name} student of {task_teacher.name}"},
        )
        evaluator = Evaluator.from_split(data.task, data.validation, tokenizer, length)
        bundle, mixed, method = keep_score(
            bundle,
            evaluator,
            limit=int8_limit,
            threads=threads,
            rows=lambda: (
                Evaluator.from_split(data.task, data.train, tokenizer, length)
                .subsample(CALIBRATION_ROWS)
                .rows
            ),
        )
        if mixed.keep:
            warn(console, mixed.price())
            notes = [*notes, f"{mixed.price()} They are: {', '.join(mixed.keep)}."]
        if data.task.unanswerable:
            bundle = bundle.set_threshold(
                evaluator.threshold(bundle.logits(evaluator.rows, threads=threads))
            )
        with open_device("local") as here:
            claim = Claim(
                method, int8_limit, "validation", data.name, mixed.keep, mixed.cost
            )
            proof = certify(bundle, "int8", evaluator, here, claim)
        # before the file is measured, because this changes it
        bundle, proof = sign_file(bundle, "int8", proof)
        report = measure(
            bundle,
            task_teacher,
            student,
            context,
            recipe=recipe,
            run=run,
            notes=notes,
            command=command_line(),
            seconds=time.time() - started,
        )
        report = replace(report, certificates=(proof,), sensitivity=mixed.sensitivity)
        bundle = bundle.attach("report.json", report.to_json())
        if (
            task_teacher.recorded is not None
            and task_teacher.recorded.prompt is not None
        ):
            bundle = bundle.attach("prompt.yaml", task_teacher.recorded.prompt)
        origin: dict[str, str] = {}
        # else two licences apply: of the prompted and of the trained model
        if task_teacher.recorded is None:
            base = context.base_teacher or task_teacher
            origin = describe_origin(base.name, base.folder)
        bundle.attach("README.md", bundle.card(card(report, recipe, origin)))
    with atomic_file(run.path / "report.html") as page:
        page.write_text(render_run(report), encoding="utf-8")
    print_table(console, run_table(report), more="on the page")
    for warning in run_warnings(report):
        warn(console, warning)
    console.print(
        f"bundle: {place}    page: {run.path / 'report.html'}", highlight=False
    )
    console.print(
        f"next: {predict_command(place, pair=data.task.pair)}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    return Bundle.load(place)
