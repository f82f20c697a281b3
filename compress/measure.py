"""Measure what was shipped: baselines, teacher and student side by side, on one split and one machine.

Every model row is scored from its ONNX file by onnxruntime, the way it will run, and the files are raced against each
other in one interleaved measurement.
"""

import datetime
import importlib.metadata
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray
from transformers import PreTrainedModel

from compress import baselines, evaluate, teachers
from compress.bench.local import machine, race
from compress.bench.protocol import Latency, Setting
from compress.data.task import Task
from compress.errors import ExportError
from compress.exam import Exam
from compress.export.bundle import Bundle
from compress.export.onnx import makes_segments, parity, to_onnx
from compress.export.predictor import open_predictor
from compress.flops import flops_per_token, parameters
from compress.journal import curves
from compress.recipe import Recipe
from compress.report import Report, Row, setting_name
from compress.run import Run
from compress.stages import Material
from compress.teachers import Teacher

LENGTHS = (128, 32)
"""Tokens at which latency is measured, one text and one thread at a time; at most what the bundle was made for."""
INT8_DROP = 0.005
"""A larger loss of score by quantisation is pointed out in the report."""
_LIBRARIES = ("compress", "torch", "transformers", "datasets", "onnxruntime", "onnx", "scikit-learn", "numpy")


def measure(
    bundle: Bundle,
    tutor: Teacher,
    student: PreTrainedModel,
    material: Material,
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
    data, console = material.data, material.console
    name, split = ("validation", data.validation) if data.test is None else ("test", data.test)
    console.print(f"measuring on {len(split):,} {name} rows")
    length = bundle.manifest.max_length
    exam = Exam.of(data.task, split, tutor.tokenizer, length)
    elsewhere = data.task.unanswerable and data.test is not None
    chosen = Exam.of(data.task, data.validation, tutor.tokenizer, length) if elsewhere else None

    def threshold(ask: Callable[[Dataset], NDArray[np.float32]]) -> float | None:
        """Chosen where the weights were: on the validation split, for each model by itself."""
        return chosen.threshold(ask(chosen.rows)) if chosen else None

    files = {f"student {which}": path for which, path in bundle.files().items()}
    models = {"student fp32": student, "student int8": student}
    compared = [Row(each, "baseline", found) for each, found in baselines.baselines(data, split).items()]
    if tutor.asked is not None:
        said, given = tutor.asked.of(split), None
        compared.append(Row(tutor.name, "teacher", exam.scores(said), parameters=tutor.asked.parameters))
    else:
        models["teacher"] = teachers.load(tutor.name, tutor.folder, data.task, allow_pickle=tutor.pickled).model
        why = _export(models["teacher"], tutor, run.path / "teacher" / "model.onnx")
        if why is None:
            files = {"teacher": run.path / "teacher" / "model.onnx", **files}
        else:
            ask = partial(evaluate.logits, models["teacher"], collate=material.collate)
            said, given = ask(exam.rows), threshold(ask)
            notes = [*notes, f"The teacher was scored by torch and has no latency here. {why}"]
            scores = exam.scores(said, threshold=given)
            compared.append(Row(tutor.name, "teacher", scores, parameters=parameters(models["teacher"])))
    threads = os.cpu_count() or 1
    opened = {
        each: open_predictor(bundle.path, path, task=data.task, max_length=length, threads=threads)
        for each, path in files.items()
    }
    logits = {each: predictor.logits(exam.rows) for each, predictor in opened.items()}
    own = {each: threshold(predictor.logits) for each, predictor in opened.items()}
    if "teacher" not in files:
        logits["teacher"], own["teacher"] = said, given
    lengths = dict.fromkeys(min(each, length) for each in LENGTHS)
    times = race(files, [Setting(threads=1, batch=1, seq=length) for length in lengths])
    spent = {stage.name: _spent(run, stage.name) for stage in (recipe.teacher, *recipe.stages)}
    for each, path in files.items():
        stages = [recipe.teacher.name] if each == "teacher" else [stage.name for stage in recipe.stages]
        compared.append(
            Row(
                name=tutor.name if each == "teacher" else each,
                role="teacher" if each == "teacher" else "student",
                score=exam.scores(logits[each], threshold=own[each]),
                agreement=None
                if each == "teacher"
                else exam.agreement(logits[each], logits["teacher"], thresholds=(own[each], own["teacher"])),
                parameters=parameters(models[each]),
                flops_per_token=flops_per_token(models[each]),
                file_mb=path.stat().st_size / 1e6,
                latency=_latency(times, each),
                peak_rss_mb=max(time.peak_rss_mb for time in times if time.name == each),
                **_training([spent[stage] for stage in stages]),
            )
        )
    batches = [
        material.collate([exam.rows[i] for i in range(at, min(at + 8, len(exam.rows)))])
        for at in range(0, min(64, len(exam.rows)), 8)
    ]
    notes = [
        *data.notes,
        *notes,
        *_noticed(data.task, compared[-2], compared[-1]),
        f"fp32 ONNX against torch: logits differ by at most {parity(student, files['student fp32'], batches):.1e}.",
        f"Training peaked at {max(each.get('peak_rss_mb', 0) for each in spent.values()):,.0f} MB of memory.",
    ]
    noisy = [f"{time.name}: {time.noise}" for time in times if time.noisy]
    return Report(
        title=f"{recipe.name}: {tutor.name} on {data.name}",
        recipe=recipe.name,
        teacher=tutor.name,
        data=data.name,
        kind=data.task.kind,
        metric=data.task.metric,
        labels=len(data.task.labels),
        split=name,
        split_rows=len(split),
        rows=tuple(compared),
        command=command,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        seconds=seconds,
        stage_seconds={stage: each["trained"]["seconds"] for stage, each in spent.items() if each},
        seed=run.seed,
        curves=curves(run.path / "log.jsonl"),
        versions={library: importlib.metadata.version(library) for library in _LIBRARIES},
        machine=machine(),
        noise="; ".join(noisy) or None,
        notes=tuple(notes),
    )


def card(report: Report, recipe: Recipe, teacher: str) -> dict[str, Any]:
    """What the model card says: see export.card.Card."""
    setting = next(iter(report.settings), None)
    rows = [
        {
            "model": row.name,
            report.metric: f"{report.score(row):.4f}" if report.score(row) is not None else "",
            "parameters": f"{row.parameters:,}" if row.parameters else "",
            "file": f"{row.file_mb:.1f} MB" if row.file_mb else "",
            f"p50 ({setting})": f"{found['p50_ms']:.2f} ms" if (found := report.latency(row)) else "",
        }
        for row in report.rows
    ]
    paper = recipe.paper
    return {
        "name": f"{recipe.name} student of {teacher} on {report.data}",
        "recipe": recipe.name,
        "citation": f"{paper.authors} {paper.year}, {paper.title}, {paper.url}",
        "teacher": teacher,
        "data": report.data,
        "rows": rows,
        "limits": [
            f"Scored on the {report.split} split of {report.data} ({report.split_rows:,} rows) only.",
            "Latency is of the machine it was measured on; int8 results can differ between processors.",
        ],
    }


def _export(teacher: PreTrainedModel, tutor: Teacher, path: Path) -> str | None:
    """Write the teacher's ONNX file with its config beside it, or say why that cannot be done."""
    path.parent.mkdir(exist_ok=True)
    teacher.config.save_pretrained(path.parent)
    try:
        to_onnx(teacher, path, segments=makes_segments(tutor.tokenizer))
    except ExportError as error:
        return str(error)
    return None


def _spent(run: Run, stage: str) -> dict[str, Any]:
    """What a stage of this run recorded of its training; {} when it ran in an earlier run, or not at all."""
    file = run.result(stage) / "training.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return found


def _training(spent: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    seconds = sum(each["trained"]["seconds"] for each in spent if each)
    examples = sum(each["trained"]["examples"] for each in spent if each)
    if not seconds:
        return {}
    return {"train_seconds": seconds, "samples_per_second": examples / seconds}


def _latency(times: Sequence[Latency], name: str) -> dict[str, Any]:
    found = {}
    for time in times:
        if time.name == name:
            setting = {"threads": time.setting.threads, "batch": time.setting.batch, "seq": time.setting.seq}
            figures = {key: getattr(time, key) for key in ("min_ms", "p50_ms", "p95_ms", "noisy")}
            found[setting_name(**setting)] = {**setting, **figures}
    return found


def _noticed(task: Task, fp32: Row, int8: Row) -> list[str]:
    before, after = fp32.score[task.metric] or 0.0, int8.score[task.metric] or 0.0
    if before - after > INT8_DROP:
        return [f"int8 loses {100 * (before - after):.1f} points of {task.metric}; ship the fp32 file if that matters."]
    return []
