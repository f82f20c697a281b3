"""The phases that ship a student: trim its vocabulary, export, quantise, certify and
measure it."""

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.arrays import Floats
from compress.benchmark.devices import open_device
from compress.benchmark.local import race
from compress.config.options import Vocabulary
from compress.console import plain_printer, print_note, warn
from compress.data.collate import Collate
from compress.data.encoder import TextEncoder, text_encoder_of
from compress.data.task import TaskData
from compress.errors import CompressError, ExportError
from compress.evaluation import metrics
from compress.evaluation.evaluator import Evaluator
from compress.exporters.artifact import Bundle, building
from compress.exporters.int8 import quantize_dynamic
from compress.exporters.manifest import Precision
from compress.exporters.onnx import makes_segments
from compress.exporters.predictor import run_rows
from compress.exporters.rewrite.graph import products
from compress.exporters.session import open_session, read_model
from compress.io import atomic_file
from compress.jobs.card import card_fields
from compress.jobs.job import Job
from compress.jobs.measure import SHIPPED_LENGTHS, measure
from compress.jobs.phase import Estimated, Phase, estimate_phases, run_phases
from compress.jobs.trials import SCORED
from compress.jobs.trim import CorpusTexts, compare_answers, lines_of, texts_of
from compress.latency.measure import exported
from compress.models.padding import pads_left
from compress.provenance import predict_command
from compress.quantization.certify import CERTIFIED_ROWS as ROWS_JUDGED
from compress.quantization.certify import PROBE, Claim, certify, sign_file
from compress.quantization.select import ALPHAS, CALIBRATION_ROWS, keep_score
from compress.quantization.sensitivity import Mixed
from compress.records.certificate import Certificate
from compress.records.forecast import PhaseEstimate, time_call
from compress.records.latency import Setting
from compress.records.run_report import REPORT, Report
from compress.reporting.html import render_run
from compress.reporting.remarks import run_warnings
from compress.reporting.tables import run_table
from compress.reporting.terminal import print_table
from compress.trimming import (
    SmallModel,
    chunks,
    compare_encodings,
    count_tokens,
    trim_copy,
)

INT8_LIMIT = 0.002
"""Maximum drop of the score by int8, in its own unit, and the share of answers it may
change in validation."""
BUDGETED_LIMIT = 0.005
"""INT8_LIMIT of a student that was pruned to a latency, where keeping a matrix product
in float32 would undo the speed-up."""
RACED = 8
"""Rounds of the race in `Measure`."""
CHOICE_LIKELY = 0.1
"""Usual position of the time to quantise between its minimum (0) and maximum (1), from
docs/LOG.md."""
SHIPPED = 2.25
"""Size of a bundle as a multiple of its float32 weights: safetensors 1, fp32 ONNX 1,
int8 ONNX 0.25."""
FREQUENT = 8_000
"""Number of frequent tokens of a vocabulary that are kept although no text of the user
has them: they are likely in other texts (docs/LOG.md)."""


@dataclass(frozen=True)
class ShipJob:
    """A trained student, the folder of its bundle until that is complete, and what the
    phases have made so far.

    small          the student with fewer tokens, if it ships; vocabulary: what became
                   of its vocabulary, for the report and the card
    method, mixed  how int8 was made, and which products stay in float32
    proof          the certificate of the int8 file
    timed          seconds of the steps, if the job is only estimated
    """

    job: Job
    folder: Path
    small: SmallModel | None = None
    vocabulary: tuple[str, ...] = ()
    written: Bundle | None = None
    method: str = ""
    mixed: Mixed | None = None
    proof: Certificate | None = None
    report: Report | None = None
    timed: "FileTimes | None" = None

    @property
    def student(self) -> PreTrainedModel:
        """The student as it ships."""
        if self.small is not None:
            return self.small.model
        assert self.job.student is not None, "the stages come first"
        return self.job.student

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer that ships with the student."""
        if self.small is not None:
            return self.small.tokenizer
        return self.job.teacher.tokenizer

    @property
    def encoder(self) -> TextEncoder:
        """Return the encoder of the shipped tokenizer."""
        return text_encoder_of(self.tokenizer)

    @property
    def texts(self) -> CorpusTexts:
        """Return the texts whose tokens a trimmed vocabulary keeps: those to train on,
        and prompts."""
        data = self.data
        sources: list[Callable[[], Iterable[str]]] = [
            partial(texts_of, data.train),
            lambda: data.task.preparation.in_turn,
        ]
        corpus = self.job.models.context.corpus
        if corpus is not None:
            sources.append(partial(lines_of, corpus))
        return CorpusTexts(tuple(sources))

    @property
    def bundle(self) -> Bundle:
        assert self.written is not None, "`Export` writes it"
        return self.written

    @property
    def times(self) -> "FileTimes":
        assert self.timed is not None, "`Export` measures them"
        return self.timed

    @property
    def length(self) -> int:
        """Return the maximum tokens of a text."""
        return self.job.models.recipe.stages[-1].length

    @property
    def data(self) -> TaskData:
        return self.job.models.context.data

    def evaluate_on(self, split: Dataset) -> Evaluator:
        """Return an evaluator of files on these rows."""
        return Evaluator.from_split(self.data.task, split, self.tokenizer, self.length)

    def score_by_torch(self, rows: Evaluator) -> Floats:
        """Compute the student's logits of an evaluator's rows without a file."""
        collate = Collate(self.tokenizer, left=pads_left(self.student))
        return metrics.logits(self.student, rows.rows, collate)

    def note_vocabulary(self, note: str) -> "ShipJob":
        """Return the job with what became of its vocabulary, and print it."""
        note = f"vocabulary: {note}"
        print_note(self.job.models.context.console, note)
        return replace(self, vocabulary=(note,))

    def keep_vocabulary(self, why: str) -> "ShipJob":
        """Return the job with the reason why all tokens stay."""
        return self.note_vocabulary(f"{len(self.tokenizer):,} tokens stay; {why}")


@dataclass(frozen=True)
class FileTimes:
    """The seconds that the files of a student take.

    export   writing all of them
    choice   choosing int8 beyond a first look, at most
    race     a race of two rounds
    per_row  of a row, by the name of the file
    """

    export: float
    choice: float
    race: float
    per_row: Mapping[str, float]

    @property
    def students(self) -> float:
        """Return the seconds of a row in both files of the student."""
        return self.per_row["fp32"] + self.per_row["int8"]


@dataclass(frozen=True)
class TrimVocabulary(Phase[ShipJob]):
    """Remove the tokens from the student that the user's texts do not have, except
    frequent ones, if its score and answers on the validation split then stay within
    `limit`."""

    limit: float

    def run(self, job: ShipJob) -> ShipJob:
        try:
            small = trim_copy(
                job.student.cpu(), job.tokenizer, job.texts, frequent=FREQUENT
            )
        except CompressError as error:
            return job.keep_vocabulary(str(error))
        if len(small.kept) == small.before:
            return job.keep_vocabulary("all are frequent or in your texts")
        trimmed = replace(job, small=small)
        before = job.evaluate_on(job.data.validation).subsample(ROWS_JUDGED)
        after = trimmed.evaluate_on(before.split)
        exact = job.score_by_torch(before)
        other = trimmed.score_by_torch(after)
        logits = (exact, other)
        evaluators = (before, after)
        outcome = compare_answers(evaluators, logits)
        kept = f"{len(small.kept):,} tokens"
        if not outcome.near(self.limit):
            lost = 100 * outcome.drop
            changed = 100 * outcome.changed_share
            allowed = 100 * self.limit
            return job.keep_vocabulary(
                f"{kept} would lose {lost:.2f} points and change {changed:.2f} % of "
                f"the validation answers, where {allowed:g} are allowed"
            )
        texts = texts_of(job.data.validation)
        same = compare_encodings(job.encoder, trimmed.encoder, texts)
        alike = 100 * np.mean([each for _, each in same])
        return trimmed.note_vocabulary(
            f"{small.before:,} to {kept}; {alike:.1f} % of validation texts tokenised "
            "as before"
        )

    def estimate(self, job: ShipJob) -> Estimated[ShipJob]:
        texts = job.texts
        first = next(chunks(texts), [])
        count = partial(count_tokens, job.encoder, first)
        count()  # the first call is slower
        counting = time_call(count)
        characters = sum(map(len, texts))
        counted = sum(map(len, first))
        counting *= characters / max(1, counted)
        few = job.evaluate_on(job.data.validation)
        rows = min(ROWS_JUDGED, len(few))
        few = few.subsample(SCORED)
        score = partial(job.score_by_torch, few)
        scoring = time_call(score)
        scoring *= rows / len(few)
        seconds = counting + 2 * scoring
        found = PhaseEstimate("vocabulary", seconds=(seconds, seconds))
        return job, [found]


class Export(Phase[ShipJob]):
    """Write the bundle: weights, tokenizer, ONNX, recipe."""

    def run(self, job: ShipJob) -> ShipJob:
        models = job.job.models
        teacher = job.job.teacher
        bundle = Bundle.write(
            job.folder,
            model=job.student.cpu(),
            tokenizer=job.tokenizer,
            task=job.data.task,
            max_length=job.length,
            recipe=models.recipe.to_yaml(),
            card={"name": f"{models.recipe.name} student of {teacher.name}"},
        )
        return replace(job, written=bundle)

    def estimate(self, job: ShipJob) -> Estimated[ShipJob]:
        times = _time_files(job)
        found = PhaseEstimate(
            "export",
            seconds=(times.export, times.export),
            disk_mb=SHIPPED * job.job.trials.student_mb,
        )
        return replace(job, timed=times), [found]


@dataclass(frozen=True)
class Quantise(Phase[ShipJob]):
    """Choose how int8 is made, on the validation split: dynamic if that stays within
    `limit` of fp32, else SmoothQuant on training rows, else the better of the two with
    some products left in float32."""

    limit: float

    def run(self, job: ShipJob) -> ShipJob:
        data = job.data
        threads = os.cpu_count() or 1
        evaluator = job.evaluate_on(data.validation)
        bundle, mixed, method = keep_score(
            job.bundle,
            evaluator,
            limit=self.limit,
            threads=threads,
            rows=lambda: job.evaluate_on(data.train).subsample(CALIBRATION_ROWS).rows,
        )
        if mixed.keep:
            warn(job.job.models.context.console, mixed.price())
        if data.task.unanswerable:
            logits = bundle.logits(evaluator.rows, threads=threads)
            bundle = bundle.set_threshold(evaluator.threshold(logits))
        return replace(job, written=bundle, mixed=mixed, method=method)

    def estimate(self, job: ShipJob) -> Estimated[ShipJob]:
        rows = len(job.data.validation)
        least = min(ROWS_JUDGED, rows) * job.times.students
        found = PhaseEstimate(
            "quantise", seconds=(least, least + job.times.choice), likely=CHOICE_LIKELY
        )
        return job, [found]


@dataclass(frozen=True)
class Certify(Phase[ShipJob]):
    """Certify the int8 file on the measured rows: the test split, or else the
    validation split, which also decided how it is made. Sign it before it is measured,
    because this changes the file."""

    limit: float

    def run(self, job: ShipJob) -> ShipJob:
        mixed = job.mixed
        assert mixed is not None, "int8 is chosen first"
        name, split = job.data.measured
        claim = Claim(
            job.method, self.limit, name, job.data.name, mixed.keep, mixed.cost
        )
        with open_device("local") as here:
            rows = job.evaluate_on(split)
            proof = certify(job.bundle, "int8", rows, here, claim)
        bundle, proof = sign_file(job.bundle, "int8", proof)
        return replace(job, written=bundle, proof=proof)

    def estimate(self, job: ShipJob) -> Estimated[ShipJob]:
        rows = len(job.data.measured[1])
        seconds = rows * job.times.students
        note = f"{rows:,} rows"
        return job, [PhaseEstimate("certify", seconds=(seconds, seconds), note=note)]


class Measure(Phase[ShipJob]):
    """Compare the student with its teacher, and write report and card."""

    def run(self, job: ShipJob) -> ShipJob:
        models = job.job.models
        teacher = job.job.teacher
        mixed = job.mixed
        assert mixed is not None and job.proof is not None, "int8 is certified first"
        notes = (*job.job.notes, *job.vocabulary)
        if mixed.keep:
            notes += (f"{mixed.price()} They are: {', '.join(mixed.keep)}.",)
        whole = replace(job.job, notes=notes)
        report = measure(job.bundle, job.student, job.tokenizer, whole)
        report = replace(
            report, certificates=(job.proof,), sensitivity=mixed.sensitivity
        )
        bundle = job.bundle.attach(REPORT, report.to_json())
        for name, text in teacher.evidence().items():
            bundle = bundle.attach(name, text)
        fields = card_fields(report, models.recipe, teacher.origin(models.base_teacher))
        fields["limits"] = [*job.vocabulary, *fields["limits"]]
        bundle = bundle.attach("README.md", bundle.card(fields))
        return replace(job, written=bundle, report=report)

    def estimate(self, job: ShipJob) -> Estimated[ShipJob]:
        _, split = job.data.measured
        seconds = RACED / 2 * job.times.race
        seconds += len(split) * sum(job.times.per_row.values())
        note = f"{len(split):,} rows"
        return job, [PhaseEstimate("measure", seconds=(seconds, seconds), note=note)]


@dataclass(frozen=True)
class Ship(Phase[Job]):
    """Ship the student: its bundle appears in the run's folder, with a page, when the
    phases of its files are done. The first process does it.

    max_drop    how much of the score, in its own unit, int8 may lose
    vocabulary  auto: the user's tokens and frequent ones, if the score stays; full: all
    """

    max_drop: float
    vocabulary: Vocabulary = "full"

    @property
    def phases(self) -> list[Phase[ShipJob]]:
        limit = self.max_drop
        trims = [TrimVocabulary(limit)] if self.vocabulary == "auto" else []
        return [*trims, Export(), Quantise(limit), Certify(limit), Measure()]

    def pending(self, job: Job) -> dict[str, str]:
        return {"bundle": "export to ONNX"}

    def run(self, job: Job) -> Job:
        run = job.models.run
        if not run.main:
            return job
        place = run.path / "bundle"
        with building(place) as folder:
            shipped = run_phases(self.phases, ShipJob(job, folder))
        assert shipped.report is not None, "its last phase has measured it"
        _present(shipped.report, job)
        return replace(job, bundle=Bundle.load(place))

    def estimate(self, job: Job) -> Estimated[Job]:
        folder = job.models.run.path / "bundle"
        _, found = estimate_phases(self.phases, ShipJob(job, folder))
        return job, found


def _present(report: Report, job: Job) -> None:
    """Write the report's page, and print the comparison and what to do next."""
    folder = job.models.run.path
    console = job.models.context.console
    with atomic_file(folder / "report.html") as page:
        page.write_text(render_run(report), encoding="utf-8")
    print_table(console, run_table(report), more="on the page")
    for warning in run_warnings(report):
        warn(console, warning)
    place = folder / "bundle"
    console.print(f"bundle: {place}    page: {folder / 'report.html'}", highlight=False)
    pair = job.models.context.data.task.pair
    plain_printer(console)(f"next: {predict_command(place, pair=pair)}")


def _time_files(job: ShipJob) -> FileTimes:
    """Export, race and run the files of the student and of the teacher, on few rows and
    with untrained weights. A teacher that cannot be exported, or that is not a model
    here, is left out."""
    configs = {"fp32": job.student.config, "int8": job.student.config}
    teacher = job.job.teacher
    if teacher.answers_any_rows:
        try:
            return _time_configs({**configs, "teacher": teacher.model.config}, job)
        except ExportError:
            pass
    return _time_configs(configs, job)


def _time_configs(configs: Mapping[str, object], job: ShipJob) -> FileTimes:
    """Time the files of models with these configs. Raises ExportError."""
    length = job.length
    threads = os.cpu_count() or 1
    _, split = job.data.measured
    rows = job.evaluate_on(split).subsample(SCORED).rows
    precisions: dict[str, Precision] = {
        name: "int8" if name == "int8" else "fp32" for name in configs
    }
    began = time.perf_counter()
    export = exported(
        configs,
        Setting(1, 1, length),
        precision=precisions,
        kind=job.data.task.kind,
        segments=makes_segments(job.job.teacher.tokenizer),
    )
    with export as files:
        exporting = time.perf_counter() - began
        lengths = dict.fromkeys(min(each, length) for each in SHIPPED_LENGTHS)
        settings = [Setting(1, 1, each) for each in lengths]
        racing = time_call(partial(race, files, settings, rounds=2))
        per_row = {}
        for name, file in files.items():
            session = open_session(file, threads=threads)
            run = partial(run_rows, session, rows, threads=threads)
            per_row[name] = time_call(run) / len(rows)
        choosing = _time_choice(files["fp32"], per_row, job)
    return FileTimes(exporting, choosing, racing, per_row)


def _time_choice(source: Path, per_row: Mapping[str, float], job: ShipJob) -> float:
    """Estimate the seconds of `keep_score` beyond its first look, from the seconds that
    the fp32 and int8 files take."""
    data = job.data
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
