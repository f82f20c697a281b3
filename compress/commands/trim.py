"""Trim the vocabulary of a bundle or checkpoint, and certify what that costs on
labelled data."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from rich.console import Console

from compress.arguments import (
    Count,
    DataLike,
    ModelLike,
    NameLike,
    PathName,
    Share,
    ThreadCount,
    check_arguments,
    name_of,
    optional_name,
)
from compress.benchmark.local import machine
from compress.config.options import ColumnOptions
from compress.data import load_task
from compress.data.corpus import Corpus, load_corpus
from compress.data.encoder import TextEncoder, text_encoder_of
from compress.data.task import TaskData
from compress.errors import CompressError
from compress.evaluation.evaluator import Evaluator, count_differing
from compress.exporters import manifest
from compress.exporters.artifact import FILES, Bundle, Precision
from compress.models.checkpoints import resolve
from compress.provenance import timestamp
from compress.quantization.certify import ScoreDrop, attach_certificate, verdict
from compress.records.certificate import Certificate
from compress.records.class_scores import compare_classes
from compress.records.forecast import Estimate, Forecast, size_mb, time_call
from compress.records.latency import describe_device
from compress.records.run_report import REPORT
from compress.training.trainer import peak_rss_mb
from compress.trimming import (
    Trimmed,
    check_new,
    chunks,
    compare_encodings,
    count_tokens,
    trim_bundle,
    trim_checkpoint,
    trimming,
)

if TYPE_CHECKING:
    from datasets import Dataset

Logits = NDArray[np.float32]


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


@check_arguments
def trim(
    model: ModelLike,
    out: PathName,
    *,
    data: DataLike | None = None,
    corpus: NameLike | None = None,
    columns: ColumnOptions = ColumnOptions(),
    min_count: Count = 1,
    keep: Sequence[str] = (),
    max_drop: Share = 0.005,
    threads: ThreadCount = 1,
) -> TrimResult:
    """Trim a bundle or a checkpoint to the tokens of the training texts of `data` and
    of `corpus`.

    Every file of a bundle is scored on the test split of `data`, or on the validation
    split if there is none.

    min_count  drop tokens that occur less often
    keep       texts whose tokens are kept in any case
    max_drop   allowed loss of the score, in its own unit; a file that loses more is
               marked as not certified, and kept

    The folder appears when all of it is certified or marked; after an interruption,
    repeat the call. Raises CompressError with neither data nor corpus, BundleError for
    data of another task, and the errors of `trim_bundle`.
    """
    model, out = name_of(model), Path(out)
    bundle, task_data, texts = _load_texts(
        model, out, data=data, corpus=optional_name(corpus), columns=columns
    )
    if bundle is None:
        return TrimResult(
            trim_checkpoint(resolve(model), texts, out, min_count=min_count, keep=keep)
        )
    with trimming(bundle, texts, out, min_count=min_count, keep=keep) as (
        small,
        trimmed,
    ):
        if task_data is None:
            return TrimResult(trimmed)
        split, name = (
            (task_data.validation, "validation")
            if task_data.test is None
            else (task_data.test, "test")
        )
        method = (
            f"vocabulary trimming, {trimmed.before} to {len(trimmed.kept)} tokens "
            f"(min_count {min_count})"
        )
        proofs = certify_files(
            bundle,
            small,
            split,
            max_drop=max_drop,
            method=method,
            name=name,
            data=task_data.name,
            threads=threads,
        )
        result = small.attach(REPORT, replace(small.report(), title=out.name).to_json())
        for precision, proof in proofs.items():
            result, proofs[precision] = attach_certificate(result, precision, proof)
        before, after = (
            TextEncoder.from_folder(each.path) for each in (bundle, result)
        )
        alike = float(
            np.mean(
                [same for _, same in compare_encodings(before, after, texts_of(split))]
            )
        )
        return TrimResult(trimmed, tuple(proofs.values()), alike, len(split))


def _load_texts(
    model: str,
    out: Path,
    *,
    data: DataLike | None,
    corpus: str | None,
    columns: ColumnOptions,
) -> tuple[Bundle | None, TaskData | None, CorpusTexts]:
    """Load the bundle (None for a checkpoint), the data, and the texts whose tokens are
    kept."""
    if data is None and corpus is None:
        raise CompressError(
            "trim: no texts; give --data, whose training texts show which tokens are "
            "used, or --corpus"
        )
    check_new(out)
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
        sources.append(partial(_lines, load_corpus(corpus)))
    return bundle, task_data, CorpusTexts(tuple(sources))


SCORED = 64
"""Rows of the split that a forecast scores."""


@check_arguments
def forecast_trimming(
    model: ModelLike,
    out: PathName,
    *,
    data: DataLike | None = None,
    corpus: NameLike | None = None,
    columns: ColumnOptions = ColumnOptions(),
    min_count: Count = 1,
    keep: Sequence[str] = (),
    threads: ThreadCount = 1,
    console: Console | None = None,
) -> Forecast:
    """Forecast what `compress.trim` would take with the same arguments, on this
    machine.

    All texts are read once and counted; everything else is done with the first
    thousand, into a temporary folder.
    """
    from compress.models.loader import load_tokenizer

    model, out = name_of(model), Path(out)
    bundle, task_data, texts = _load_texts(
        model, out, data=data, corpus=optional_name(corpus), columns=columns
    )
    folder = resolve(model) if bundle is None else bundle.path
    first, phases = next(chunks(texts), []), list[Estimate]()
    began = time.perf_counter()
    characters = sum(map(len, texts))
    reading = time.perf_counter() - began
    encoder = text_encoder_of(load_tokenizer(folder))
    count_tokens(encoder, first)  # the first call is slower
    encoding = (
        time_call(lambda: count_tokens(encoder, first))
        * characters
        / max(1, sum(map(len, first)))
    )
    # over the texts, comparing their tokens before and after
    passes = 2 if min_count == 1 else 1
    seconds = (1 + passes) * reading + (1 + 2 * passes) * encoding
    phases.append(
        Estimate(
            "counting tokens",
            seconds=(seconds, seconds),
            note=f"{characters:,} characters",
        )
    )
    with (
        TemporaryDirectory() as scratch,
        (console or Console(quiet=True)).status("trying each phase"),
    ):
        write = (
            partial(trim_checkpoint, folder)
            if bundle is None
            else partial(trim_bundle, bundle)
        )
        seconds = time_call(
            lambda: write(
                first, Path(scratch) / out.name, min_count=min_count, keep=keep
            )
        )
    phases.append(
        Estimate("writing", seconds=(seconds, seconds), disk_mb=size_mb(folder))
    )
    if bundle is not None and task_data is not None:
        split = task_data.validation if task_data.test is None else task_data.test
        rows, files = (
            bundle.evaluator(split).subsample(SCORED).rows,
            [each for each in FILES if each in bundle.files()],
        )
        for each in files:
            # the first call is slower
            bundle.logits(rows.select(range(1)), precision=each, threads=threads)
        seconds = sum(
            time_call(partial(bundle.logits, rows, precision=each, threads=threads))
            for each in files
        )
        seconds *= 2 * len(split) / min(SCORED, len(split))
        phases.append(
            Estimate("scoring", seconds=(seconds, seconds), note=f"{len(split):,} rows")
        )
    return Forecast(f"{model}, trimmed", tuple(phases), peak_rss_mb())


def _lines(corpus: Corpus) -> Iterator[str]:
    for document in corpus.documents():
        yield from document.splitlines()


def texts_of(split: "Dataset") -> Iterator[str]:
    """Yield every text of a split, for any kind of task."""
    for row in split:
        if "words" in row:
            yield " ".join(row["words"])
            yield from row["words"]
        else:
            yield from (
                row[name]
                for name in ("text", "text_pair", "question", "context")
                if name in row
            )


def certify_files(
    before: Bundle,
    after: Bundle,
    split: "Dataset",
    *,
    max_drop: float,
    method: str,
    name: str,
    data: str,
    threads: int = 1,
) -> dict[Precision, Certificate]:
    """Score each ONNX file before and after, each with its own tokenizer; return a
    certificate per file.

    name: that of the split; method, data: for the certificate
    """
    evaluators = [each.evaluator(split) for each in (before, after)]
    facts, proofs = machine(), {}
    for precision in FILES:
        if precision not in after.files():
            continue
        logits = [
            each.logits(evaluator.rows, precision=precision, threads=threads)
            for each, evaluator in zip((before, after), evaluators, strict=True)
        ]
        outcome = compare_answers(before, evaluators, logits)
        certified, reason = verdict(outcome, max_drop)
        proofs[precision] = Certificate(
            artefact=FILES[precision],
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
            exact_sha256=before.manifest.files[FILES[precision]].sha256,
            classes=outcome.classes,
        )
    return proofs


def compare_answers(
    bundle: Bundle, evaluators: Sequence[Evaluator], logits: Sequence[Logits]
) -> ScoreDrop:
    """Compare two bundles with different tokenizers: they answer the same examples, but
    not the same tokens."""
    threshold = bundle.manifest.threshold if bundle.task.unanswerable else None
    scored = zip(evaluators, logits, strict=True)
    before, after = (
        evaluator.scores(each, threshold=threshold)[bundle.task.metric]
        for evaluator, each in scored
    )
    recalls = compare_classes(
        *(
            evaluator.by_class(each)
            for evaluator, each in zip(evaluators, logits, strict=True)
        )
    )
    if not bundle.task.tokenwise:
        agreement, changed = (
            evaluators[0].agreement(logits[1], logits[0]),
            evaluators[0].count_changed(logits[1], logits[0]),
        )
        return ScoreDrop(
            before,
            after,
            agreement,
            float(np.abs(logits[1] - logits[0]).max()),
            recalls,
            changed,
        )
    one, other = (
        _answers(evaluator, each, threshold)
        for evaluator, each in zip(evaluators, logits, strict=True)
    )
    same = [a == b for a, b in zip(_flat(one), _flat(other), strict=True)]
    changed = count_differing(one, other)
    return ScoreDrop(
        before,
        after,
        float(np.mean(same)),
        _of_equal_rows(evaluators, logits),
        recalls,
        changed,
    )


def _answers(
    evaluator: Evaluator, logits: Logits, threshold: float | None
) -> list[Any]:
    """List the tags of every sentence, or the text that answers each question."""
    return (
        evaluator.tags(logits)
        if evaluator.task.kind == "tagging"
        else list(evaluator.texts(logits, threshold=threshold))
    )


def _flat(answers: Sequence[Any]) -> list[str]:
    """List the tag of every word, or the texts as they are."""
    return [
        tag for each in answers for tag in (each if isinstance(each, list) else [each])
    ]


def _of_equal_rows(evaluators: Sequence[Evaluator], logits: Sequence[Logits]) -> float:
    """Return the largest |difference| of per-token logits in rows of as many tokens."""
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
