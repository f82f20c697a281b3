"""Compare a shipped student with its teacher and the baselines."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.arrays import Floats
from compress.benchmark.local import machine, race
from compress.console import warn
from compress.data.collate import Batching, Collate
from compress.data.task import TaskData
from compress.errors import ExportError
from compress.evaluation import embedding, metrics
from compress.evaluation.evaluator import Evaluator
from compress.evaluation.kept import judge_kept
from compress.exporters.artifact import Bundle
from compress.exporters.onnx import makes_segments, parity, to_onnx
from compress.exporters.predictor import open_predictor
from compress.io import name_disk_errors, sha256
from compress.jobs.job import Job
from compress.models import teacher as teachers
from compress.models.flops import count_parameters, flops_per_token
from compress.models.padding import pads_left
from compress.models.teacher import Teacher
from compress.provenance import command_line, timestamp, versions
from compress.pruning.budget import SHIPPED_SHAPE, WHOLE_SHAPE, open_race
from compress.records.latency import Latency, Setting
from compress.records.path import WalkedPath
from compress.records.run_report import Report, ReportRow
from compress.training.logging import curves, mend
from compress.training.stage import Trained, load_trained

SHIPPED_LENGTHS = (128, 32)
"""Tokens at which latency is measured, with one text and one thread; at most the
bundle's maximum."""
INT8_DROP = 0.005
"""Drop of the score by int8, in its own unit, above which the report warns."""
ROWS_TRACED = 64
"""Rows on which the fp32 file is compared with torch, eight at a time."""
ComputeLogits = Callable[[Dataset], Floats]
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
    """A model with its answers to the measured rows. file: the ONNX file that computed
    them; None: torch, or recorded."""

    name: str
    evaluator: Evaluator
    logits: Floats
    threshold: float | None = None
    model: PreTrainedModel | None = None
    file: Path | None = None
    parameters: int | None = None


@dataclass(frozen=True)
class Scorer:
    """Asks models with the same tokenizer about the measured rows.

    calibration  the rows on which the threshold of each model is chosen, on the
                 validation split like its weights; None if the task has no threshold
    """

    bundle: Bundle
    evaluator: Evaluator
    calibration: Evaluator | None
    console: Console

    @staticmethod
    def from_job(
        bundle: Bundle,
        job: Job,
        tokenizer: PreTrainedTokenizerBase,
    ) -> "Scorer":
        data = job.models.context.data
        on = partial(
            Evaluator.from_split,
            data.task,
            tokenizer=tokenizer,
            max_length=bundle.manifest.max_length,
        )
        calibrated = data.task.unanswerable and data.test is not None
        return Scorer(
            bundle,
            on(split=data.measured[1]),
            on(split=data.validation) if calibrated else None,
            job.models.context.console,
        )

    def score(
        self,
        name: str,
        model: PreTrainedModel,
        compute: ComputeLogits,
        file: Path | None = None,
    ) -> ScoredModel:
        """Ask a model through `compute`; file: its ONNX file, if that computes the
        answers."""
        self.console.print(f"scoring {name}", highlight=False, markup=False)
        threshold = None
        if self.calibration is not None:
            threshold = self.calibration.threshold(compute(self.calibration.rows))
        logits = compute(self.evaluator.rows)
        parameters = count_parameters(model)
        return ScoredModel(
            name, self.evaluator, logits, threshold, model, file, parameters
        )

    def open(self, file: Path) -> ComputeLogits:
        """Return the function from rows to the logits of an ONNX file, read with the
        bundle's tokenizer."""
        return open_predictor(
            self.bundle.path,
            file,
            task=self.bundle.task,
            max_length=self.bundle.manifest.max_length,
            threads=os.cpu_count() or 1,
        ).logits

    def score_teacher(self, job: Job) -> tuple[ScoredModel, str]:
        """Ask the teacher through its ONNX file, or through torch if it cannot be
        exported; also return why it cannot."""
        teacher = job.teacher
        known = teacher.known_answers(self.evaluator.split)
        if known is not None:
            self.console.print(f"scoring {teacher.name}", highlight=False, markup=False)
            parameters = teacher.count_parameters()
            recorded = ScoredModel(
                teacher.name, self.evaluator, known, parameters=parameters
            )
            return recorded, ""
        models = job.models
        model = teachers.load(
            teacher.name,
            teacher.folder,
            models.context.data.task,
            allow_pickle=teacher.pickled,
        ).model
        file = models.run.path / "teacher" / "model.onnx"
        why = export_teacher(model, teacher, file)
        if not why:
            return self.score(teacher.name, model, self.open(file), file), ""
        by_torch = partial(metrics.logits, model, collate=models.context.collate)
        return self.score(teacher.name, model, by_torch), why


def export_teacher(model: PreTrainedModel, teacher: Teacher, path: Path) -> str:
    """Write the teacher's ONNX file, with its config next to it; return the error if
    that is impossible, else ''."""
    path.parent.mkdir(exist_ok=True)
    with name_disk_errors(path.parent):
        model.config.save_pretrained(path.parent)
    try:
        to_onnx(model, path, segments=makes_segments(teacher.tokenizer))
    except ExportError as error:
        return str(error)
    return ""


def measure(
    bundle: Bundle,
    student: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    job: Job,
) -> Report:
    """Measure score, agreement, size, FLOPs and latency of baselines, teacher, student
    fp32 and student int8. tokenizer: the student's.

    On the test split, or the validation split if there is none with labels.
    """
    models = job.models
    run = models.run
    recipe = models.recipe
    context = models.context
    console = context.console
    data = context.data
    mend(run.path / "log.jsonl", partial(warn, console))
    split_name, split = data.measured
    scorer = Scorer.from_job(bundle, job, tokenizer)
    evaluator = scorer.evaluator
    unit = data.task.scored_unit(data.task.metric)
    console.print(f"measuring on {len(evaluator):,} {split_name} {unit}")
    collate = Collate(tokenizer, left=pads_left(student))
    examiner = Scorer.from_job(bundle, job, job.teacher.tokenizer)
    teacher, why = examiner.score_teacher(job)
    students = [
        scorer.score(f"student {precision}", student, scorer.open(file), file)
        for precision, file in bundle.files().items()
    ]
    times = time_files([teacher, *students], bundle.manifest.max_length, console)
    trained = {
        stage.name: load_trained(run, stage.name, console)
        for stage in (recipe.teacher, *recipe.stages)
    }
    spent = [trained[stage.name] for stage in recipe.stages]
    rows = [
        ReportRow(name, "baseline", scores)
        for name, scores in data.task.baselines(data, split).items()
    ]
    rows.append(make_row(teacher, times, [trained[recipe.teacher.name]]))
    rows += [make_row(each, times, spent, teacher) for each in students]
    notes = [
        *data.notes,
        *job.notes,
        *note_split(data),
        *note_teacher(why),
        *(each.note for each in trained.values() if each and each.note),
        *note_int8(rows, data.task.metric),
        *note_vectors(evaluator, teacher, students[-1]),
        *note_parity(bundle, student, evaluator, collate),
        *note_memory(list(trained.values())),
    ]
    return Report(
        title=f"{recipe.name}: {job.teacher.name} on {data.name}",
        recipe=recipe.name,
        teacher=job.teacher.name,
        data=data.name,
        kind=data.task.kind,
        metric=data.task.metric,
        labels=len(data.task.labels),
        split=split_name,
        split_rows=len(evaluator),
        rows=tuple(rows),
        command=command_line(),
        date=timestamp(),
        seconds=time.time() - job.started + run.before,
        stage_seconds={stage: each.seconds for stage, each in trained.items() if each},
        seed=run.seed,
        curves=curves(run.path / "log.jsonl"),
        versions=versions(_LIBRARIES),
        machine=machine(),
        noise=describe_noise(times),
        vectors=embedding.score_forms(
            evaluator.split, students[-1].logits, data.task.metric
        )
        if data.task.vectors
        else (),
        notes=tuple(notes),
        path=test_path(job, bundle, students[-1], teacher),
    )


def test_path(
    job: Job,
    bundle: Bundle,
    student: ScoredModel,
    teacher: ScoredModel,
) -> WalkedPath | None:
    """Return the path with the share of the score that the shipped file keeps on the
    measured rows, and with its latency and the teacher's; None without a path."""
    path = job.path
    asked = job.asked
    if path is None or asked is None:
        return None
    evaluator = student.evaluator
    kept = judge_kept(
        evaluator,
        student.logits,
        teacher.logits,
        path.keep,
        asked.target.confidence,
        taught=teacher.evaluator,
        thresholds=(student.threshold, teacher.threshold),
    )
    path = replace(path, tested=kept)
    if not path.where:
        return path
    context = job.models.context
    with open_race(bundle, asked, job.teacher, context) as race_once:
        times = race_once()
    return replace(
        path,
        measured=times[SHIPPED_SHAPE].p50_ms,
        whole_measured=times[WHOLE_SHAPE].p50_ms,
    )


def time_files(
    scored: Sequence[ScoredModel],
    max_length: int,
    console: Console,
) -> list[Latency]:
    """Race the files of these models at the lengths that a report shows."""
    files = {each.name: each.file for each in scored if each.file is not None}
    lengths = list(dict.fromkeys(min(each, max_length) for each in SHIPPED_LENGTHS))
    console.print(
        f"timing {len(files)} files at {', '.join(map(str, lengths))} tokens",
        highlight=False,
    )
    settings = [Setting(threads=1, batch=1, seq=tokens) for tokens in lengths]
    with console.status("timing") as status:  # only shown on a terminal
        return race(files, settings, say=status.update)


def make_row(
    scored: ScoredModel,
    times: Sequence[Latency],
    trained: Sequence[Trained | None],
    teacher: ScoredModel | None = None,
) -> ReportRow:
    """Make a row of the report. teacher: the student's; None for the teacher's own
    row."""
    evaluator = scored.evaluator
    agreement = None if teacher is None else measure_agreement(scored, teacher)
    measured = dict[str, Any]()
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


def measure_agreement(student: ScoredModel, teacher: ScoredModel) -> float:
    """Measure how far the student predicts what the teacher predicts. If they have
    different tokens, only their answers about words or whole texts can be compared."""
    thresholds = (student.threshold, teacher.threshold)
    task = student.evaluator.task
    if not task.tokenwise:
        return student.evaluator.agreement(
            student.logits, teacher.logits, thresholds=thresholds
        )
    own: Any = task.decide(student.evaluator, student.logits, student.threshold)
    taught = task.decide(teacher.evaluator, teacher.logits, teacher.threshold)
    return float(np.mean(own == taught))


def describe_noise(times: Sequence[Latency]) -> str | None:
    """Say what disturbed the timing, or return None if nothing did."""
    noisy = [
        f"{each.name}, {each.setting}: {each.noise}" for each in times if each.noisy
    ]
    busy = dict.fromkeys(f"{each.setting}: {each.busy}" for each in times if each.busy)
    return "; ".join([*noisy, *busy]) or None


def note_split(data: TaskData) -> list[str]:
    """Warn that the scored rows have decided other things, if there are no test
    rows."""
    if data.test is not None:
        return []
    return [
        "There is no labelled test split: these scores are from the validation rows, "
        "which also chose the best weights, the threshold if the task has one, how "
        "int8 is made and, where units were cut by their importance, which ones. New "
        "texts may score a little lower."
    ]


def note_teacher(why: str) -> list[str]:
    """Say why the teacher has no latency, if it has none."""
    if not why:
        return []
    return [f"The teacher was scored by torch and has no latency here. {why}"]


def note_int8(rows: Sequence[ReportRow], metric: str) -> list[str]:
    """Warn if int8 loses much of the score of fp32, the row before it."""
    fp32, int8 = rows[-2:]
    lost = (fp32.score[metric] or 0.0) - (int8.score[metric] or 0.0)
    if lost <= INT8_DROP:
        return []
    return [
        f"int8 loses {100 * lost:.1f} points of {metric}; if that matters, ship the "
        "fp32 file, or try another method: `compress quantize --method`."
    ]


def note_vectors(
    evaluator: Evaluator,
    teacher: ScoredModel,
    student: ScoredModel,
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


def note_parity(
    bundle: Bundle,
    student: PreTrainedModel,
    evaluator: Evaluator,
    collate: Batching,
) -> list[str]:
    """Say how far the fp32 file is from torch."""
    rows = list(evaluator.rows.select(range(min(ROWS_TRACED, len(evaluator.rows)))))
    batches = (collate(rows[at : at + 8]) for at in range(0, len(rows), 8))
    return [
        "fp32 ONNX against torch: logits differ by at most "
        f"{parity(student, bundle.files()['fp32'], batches):.1e}."
    ]


def note_memory(trained: Sequence[Trained | None]) -> list[str]:
    """Say how much memory training took at most."""
    peak_mb = max(each.peak_rss_mb if each else 0 for each in trained)
    return [f"Training peaked at {peak_mb:,.0f} MB of memory."]
