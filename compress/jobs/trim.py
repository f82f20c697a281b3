"""The phases of trimming a vocabulary."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnxruntime
from datasets import Dataset

from compress.arguments import DataLike
from compress.arrays import Floats
from compress.benchmark.local import machine
from compress.config.options import ColumnOptions
from compress.data import load_task
from compress.data.audit import COLUMNS_OF_TEXTS
from compress.data.corpus import Corpus, load_corpus
from compress.data.encoder import TextEncoder, text_encoder_of
from compress.data.task import TaskData
from compress.evaluation.evaluator import Evaluator
from compress.exporters import manifest
from compress.exporters.artifact import Bundle
from compress.exporters.manifest import BUNDLE_FILES, Precision
from compress.jobs.phase import Estimated, Phase
from compress.models.checkpoints import resolve
from compress.models.loader import load_tokenizer
from compress.provenance import timestamp
from compress.quantization.certify import (
    ScoreDrop,
    attach_certificate,
    compare_logits,
    verdict,
)
from compress.records.certificate import Certificate
from compress.records.class_scores import compare_classes
from compress.records.forecast import PhaseEstimate, size_mb, time_call
from compress.records.latency import describe_device
from compress.records.run_report import REPORT
from compress.trimming import (
    TEXTS_PER_CHUNK,
    Trimmed,
    chunks,
    compare_encodings,
    count_tokens,
    trim_bundle,
    trim_checkpoint,
    trimming,
)


@dataclass(frozen=True)
class CorpusTexts:
    """Texts of several sources, one source after another; can be iterated
    repeatedly."""

    sources: tuple[Callable[[], Iterable[str]], ...]

    def __iter__(self) -> Iterator[str]:
        for source in self.sources:
            yield from source()


@dataclass(frozen=True)
class TrimResult:
    """A trimmed bundle, and what trimming cost.

    certificates   one per file, compared with the file before trimming; none without
                   labelled data
    alike          share of the split's texts encoded to the same tokens
    rows           examples in the split
    """

    trimmed: Trimmed
    certificates: tuple[Certificate, ...] = ()
    alike: float | None = None
    rows: int = 0


@dataclass(frozen=True)
class TrimJob:
    """A model, the texts whose tokens it keeps, and what its phases have made so far.

    model      the name or path of a checkpoint; bundle: None for a checkpoint
    data       labelled data that score a bundle; None without any
    min_count  drop tokens that occur less often; keep: texts whose tokens are kept
    small      the trimmed bundle, which appears in `out` when the job is closed
    """

    model: str
    out: Path
    bundle: Bundle | None
    data: TaskData | None
    texts: CorpusTexts
    min_count: int
    keep: Sequence[str]
    max_drop: float
    threads: int
    closing: ExitStack = field(default_factory=ExitStack)
    small: Bundle | None = None
    result: TrimResult | None = None


class Trim(Phase[TrimJob]):
    """Count the tokens of the texts, and write the model without the others."""

    def run(self, job: TrimJob) -> TrimJob:
        kept: dict[str, Any] = {"min_count": job.min_count, "keep": job.keep}
        if job.bundle is None:
            folder = resolve(job.model)
            trimmed = trim_checkpoint(folder, job.texts, job.out, **kept)
            return replace(job, result=TrimResult(trimmed))
        small, trimmed = job.closing.enter_context(
            trimming(job.bundle, job.texts, job.out, **kept)
        )
        return replace(job, small=small, result=TrimResult(trimmed))

    def estimate(self, job: TrimJob) -> Estimated[TrimJob]:
        folder = resolve(job.model) if job.bundle is None else job.bundle.path
        first = next(chunks(job.texts), [])
        began = time.perf_counter()
        characters = sum(map(len, job.texts))
        reading = time.perf_counter() - began
        encoder = text_encoder_of(load_tokenizer(folder))
        count_tokens(encoder, first)  # the first call is slower
        encoding = time_call(lambda: count_tokens(encoder, first))
        encoding *= characters / max(1, sum(map(len, first)))
        # over the texts, comparing their tokens before and after
        passes = 2 if job.min_count == 1 else 1
        counting = (1 + passes) * reading + (1 + 2 * passes) * encoding
        with TemporaryDirectory() as scratch:
            write: Callable[..., Trimmed] = partial(trim_checkpoint, folder)
            if job.bundle is not None:
                write = partial(trim_bundle, job.bundle)
            place = Path(scratch) / job.out.name
            writing = time_call(
                lambda: write(first, place, min_count=job.min_count, keep=job.keep)
            )
        note = f"{characters:,} characters"
        return job, [
            PhaseEstimate("counting tokens", seconds=(counting, counting), note=note),
            PhaseEstimate(
                "writing", seconds=(writing, writing), disk_mb=size_mb(folder)
            ),
        ]


class CertifyTrimmed(Phase[TrimJob]):
    """Score every file of a trimmed bundle and the file before, if there are labelled
    data."""

    def run(self, job: TrimJob) -> TrimJob:
        bundle = job.bundle
        small = job.small
        result = job.result
        if bundle is None or job.data is None:
            return job
        assert small is not None and result is not None, "it is written first"
        name, split = job.data.measured
        trimmed = result.trimmed
        method = (
            f"vocabulary trimming, {trimmed.before} to {len(trimmed.kept)} tokens "
            f"(min_count {job.min_count})"
        )
        proofs = certify_files(
            bundle,
            small,
            split,
            max_drop=job.max_drop,
            method=method,
            name=name,
            data=job.data.name,
            threads=job.threads,
        )
        report = replace(small.report(), title=job.out.name)
        written = small.attach(REPORT, report.to_json())
        for precision, proof in proofs.items():
            written, proofs[precision] = attach_certificate(written, precision, proof)
        before = TextEncoder.from_folder(bundle.path)
        after = TextEncoder.from_folder(written.path)
        same = [same for _, same in compare_encodings(before, after, texts_of(split))]
        certified = TrimResult(
            trimmed, tuple(proofs.values()), float(np.mean(same)), len(split)
        )
        return replace(job, small=written, result=certified)

    def estimate(self, job: TrimJob) -> Estimated[TrimJob]:
        bundle = job.bundle
        if bundle is None or job.data is None:
            return job, []
        _, split = job.data.measured
        few = min(64, len(split))
        rows = bundle.evaluator(split).subsample(few).rows
        seconds = 0.0
        for each in BUNDLE_FILES:
            if each not in bundle.files():
                continue
            score = partial(bundle.logits, precision=each, threads=job.threads)
            score(rows.select(range(1)))  # the first call is slower
            seconds += time_call(partial(score, rows))
        seconds *= 2 * len(split) / few
        note = f"{len(split):,} rows"
        return job, [PhaseEstimate("scoring", seconds=(seconds, seconds), note=note)]


TRIM_PHASES: tuple[Phase[TrimJob], ...] = (Trim(), CertifyTrimmed())


def load_trim_texts(
    model: str,
    *,
    data: DataLike | None,
    corpus: str | None,
    columns: ColumnOptions,
) -> tuple[Bundle | None, TaskData | None, CorpusTexts]:
    """Load the bundle (None for a checkpoint), the data, and the texts whose tokens are
    kept."""
    bundle = (
        Bundle.load(Path(model)) if manifest.find_bundle(Path(model), "task") else None
    )
    task_data: TaskData | None = None
    sources = list[Callable[[], Iterable[str]]]()
    if data is not None:
        if bundle is None:
            task_data = load_task(data, text=columns.text, label=columns.label)
        else:
            task_data = bundle.load_data(data, text=columns.text, label=columns.label)
        sources.append(partial(texts_of, task_data.train))
    if corpus is not None:
        sources.append(partial(lines_of, load_corpus(corpus)))
    return bundle, task_data, CorpusTexts(tuple(sources))


def lines_of(corpus: Corpus) -> Iterator[str]:
    """Yield every line of a corpus."""
    for document in corpus.documents():
        yield from document.splitlines()


def texts_of(split: Dataset) -> Iterator[str]:
    """Yield every text of a split, for any kind of task."""
    names = [each for each in COLUMNS_OF_TEXTS if each in split.column_names]
    found = split.select_columns(names)
    for table in found.with_format("arrow").iter(TEXTS_PER_CHUNK):
        for row in table.to_pylist():
            if "words" in row:
                yield " ".join(row["words"])
                yield from row["words"]
            else:
                yield from row.values()


def certify_files(
    before: Bundle,
    after: Bundle,
    split: Dataset,
    *,
    max_drop: float,
    method: str,
    name: str,
    data: str,
    threads: int = 1,
) -> dict[Precision, Certificate]:
    """Score each ONNX file before and after, each with its own tokenizer; return a
    certificate per file.

    name: the split's; method, data: for the certificate
    """
    evaluators = [each.evaluator(split) for each in (before, after)]
    threshold = before.manifest.threshold if before.task.unanswerable else None
    facts = machine()
    proofs = {}
    for precision in BUNDLE_FILES:
        if precision not in after.files():
            continue
        logits = [
            each.logits(evaluator.rows, precision=precision, threads=threads)
            for each, evaluator in zip((before, after), evaluators, strict=True)
        ]
        outcome = compare_answers(evaluators, logits, threshold=threshold)
        certified, reason = verdict(outcome, max_drop)
        proofs[precision] = Certificate(
            artefact=BUNDLE_FILES[precision],
            metric=before.task.metric,
            before=outcome.before,
            after=outcome.after,
            max_drop=max_drop,
            agreement=outcome.agreement,
            max_logit_difference=outcome.difference,
            rows=len(split),
            device=describe_device("local", facts),
            runtime=f"onnxruntime {onnxruntime.__version__}",
            certified=certified,
            reason=reason,
            date=timestamp(),
            method=method,
            split=name,
            data=data,
            exact_sha256=before.manifest.files[BUNDLE_FILES[precision]].sha256,
            classes=outcome.classes,
        )
    return proofs


def compare_answers(
    evaluators: Sequence[Evaluator],
    logits: Sequence[Floats],
    *,
    threshold: float | None = None,
) -> ScoreDrop:
    """Compare two models with different tokenizers: they answer the same examples, but
    not the same tokens. `threshold`: qa, see `Evaluator.scores`."""
    task = evaluators[0].task
    if not task.tokenwise:
        return compare_logits(evaluators[0], *logits, threshold=threshold)
    scores = []
    classes = []
    answers = []
    decisions = list[Any]()
    for evaluator, each in zip(evaluators, logits, strict=True):
        scored = evaluator.scores(each, threshold=threshold)
        scores.append(scored[task.metric])
        classes.append(evaluator.by_class(each))
        answers.append(task.list_answers(evaluator, each, threshold))
        decisions.append(task.decide(evaluator, each, threshold))
    one, other = answers
    agreement = float(np.mean(decisions[0] == decisions[1]))
    difference = _of_equal_rows(evaluators, logits)
    recalls = compare_classes(*classes)
    changed = sum(a != b for a, b in zip(one, other, strict=True))
    return ScoreDrop(scores[0], scores[1], agreement, difference, recalls, changed)


def _of_equal_rows(evaluators: Sequence[Evaluator], logits: Sequence[Floats]) -> float:
    """Return the largest |difference| of per-token logits in rows with equally many
    tokens."""
    parts = []
    for evaluator, each in zip(evaluators, logits, strict=True):
        ends = np.cumsum([len(ids) for ids in evaluator.rows["input_ids"]])
        parts.append(np.split(each, ends[:-1]))
    pairs = zip(*parts, strict=len(parts[0]) == len(parts[1]))
    return max(
        (
            float(np.abs(one - other).max())
            for one, other in pairs
            if one.shape == other.shape
        ),
        default=0.0,
    )
