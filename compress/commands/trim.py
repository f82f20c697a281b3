"""A trimmed bundle beside the whole one, on a labelled split: score, agreement, and how many texts read alike."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from tokenizers import Tokenizer

from compress.benchmark.local import machine
from compress.config.limits import check_max_drop
from compress.data import load_task
from compress.data.corpus import Corpus, load_corpus
from compress.data.objects import DataLike
from compress.data.windows import plain
from compress.errors import CompressError
from compress.evaluation.evaluator import Evaluator, count_differing
from compress.exporters import manifest
from compress.exporters.artifact import FILES, Bundle, Precision
from compress.models.checkpoints import resolve
from compress.quantization.certify import ScoreDrop, attach_certificate, verdict
from compress.records.certificate import Certificate
from compress.records.class_scores import changes
from compress.records.latency import identity
from compress.records.run_report import NAME as REPORT
from compress.trimming.model import Trimmed, check_new, trim_checkpoint, trimming
from compress.trimming.vocabulary import compare_encodings

if TYPE_CHECKING:
    from datasets import Dataset

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class CorpusTexts:
    """Texts of several sources, one source after another; can be gone through again and again."""

    sources: tuple[Callable[[], Iterable[str]], ...]

    def __iter__(self) -> Iterator[str]:
        for source in self.sources:
            yield from source()


@dataclass(frozen=True)
class TrimResult:
    """A bundle that was trimmed, and what it cost.

    certificates   one for each file, the file before trimming as what it is compared with; none without labelled data
    alike          share of the split's texts encoded to the same tokens; rows: examples in the split
    """

    trimmed: Trimmed
    certificates: tuple[Certificate, ...] = ()
    alike: float | None = None
    rows: int = 0


def trim(
    model: str,
    out: Path,
    *,
    data: DataLike | None = None,
    corpus: str | None = None,
    text: Sequence[str] | None = None,
    label: str | None = None,
    min_count: int = 1,
    keep: Sequence[str] = (),
    max_drop: float = 0.005,
    threads: int = 1,
) -> TrimResult:
    """Trim a bundle, or a checkpoint, for the training texts of `data` and for `corpus`. Every file of a bundle is
    scored on the test split of `data`, or on the validation split where there is none: nothing is chosen by it.

    max_drop  of the score, in its own unit; a file that loses more is marked as not certified, and kept.
    The folder gets its name when all of it is certified or marked; killed before, the same call begins again.
    Raises CompressError with neither data nor corpus, BundleError for data of another task, and as `trim_bundle`.
    """
    if data is None and corpus is None:
        raise CompressError("trim: no texts; give --data, whose training texts say which tokens are used, or --corpus")
    check_max_drop(max_drop)
    check_new(out)
    bundle = Bundle.load(Path(model)) if manifest.find_bundle(Path(model), "task") else None
    sources: list[Callable[[], Iterable[str]]] = []
    if data is not None:
        if bundle is None:
            found = load_task(data, text=text, label=label)
        else:
            found = bundle.load_data(data, text=text, label=label)
        sources.append(partial(texts_of, found.train))
    if corpus is not None:
        sources.append(partial(_lines, load_corpus(corpus)))
    texts = CorpusTexts(tuple(sources))
    if bundle is None:
        return TrimResult(trim_checkpoint(resolve(model), texts, out, min_count=min_count, keep=keep))
    with trimming(bundle, texts, out, min_count=min_count, keep=keep) as (small, trimmed):
        if data is None:
            return TrimResult(trimmed)
        split, name = (found.validation, "validation") if found.test is None else (found.test, "test")
        method = f"vocabulary trimming, {trimmed.before} to {len(trimmed.kept)} tokens (min_count {min_count})"
        proofs = certified(
            bundle, small, split, max_drop=max_drop, method=method, name=name, data=found.name, threads=threads
        )
        made = small.attach(REPORT, replace(small.report(), title=out.name).to_json())
        for precision, proof in proofs.items():
            made, proofs[precision] = attach_certificate(made, precision, proof)
        before, after = (plain(Tokenizer.from_file(str(each.path / "tokenizer.json"))) for each in (bundle, made))
        alike = float(np.mean([same for _, same in compare_encodings(before, after, texts_of(split))]))
        return TrimResult(trimmed, tuple(proofs.values()), alike, len(split))


def _lines(corpus: Corpus) -> Iterator[str]:
    for document in corpus.documents():
        yield from document.splitlines()


def texts_of(split: "Dataset") -> Iterator[str]:
    """Yield every text of a split, of whatever kind its task is."""
    for row in split:
        if "words" in row:
            yield " ".join(row["words"])
            yield from row["words"]
        else:
            yield from (row[name] for name in ("text", "text_pair", "question", "context") if name in row)


def certified(
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
    """Score each ONNX file before and after, each bundle reading the split with its own tokenizer.

    `name` is the split's; method and data are as the certificate tells them.
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
        outcome = _outcome(before, evaluators, logits)
        good, reason = verdict(outcome, max_drop)
        proofs[precision] = Certificate(
            artefact=FILES[precision],
            metric=before.task.metric,
            before=outcome.before,
            after=outcome.after,
            max_drop=max_drop,
            agreement=outcome.agreement,
            max_logit_difference=outcome.difference,
            rows=len(split),
            device=identity("local", facts),
            runtime=f"onnxruntime {onnxruntime.__version__}",
            certified=good,
            reason=reason,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            method=method,
            split=name,
            data=data,
            exact_sha256=before.manifest.files[FILES[precision]].sha256,
            classes=outcome.classes,
        )
    return proofs


def _outcome(bundle: Bundle, evaluators: Sequence[Evaluator], logits: Sequence[Logits]) -> ScoreDrop:
    """Compare two bundles that cut texts differently: they answer the same examples, but not the same tokens."""
    threshold = bundle.manifest.threshold if bundle.task.unanswerable else None
    scored = zip(evaluators, logits, strict=True)
    before, after = (evaluator.scores(each, threshold=threshold)[bundle.task.metric] for evaluator, each in scored)
    recalls = changes(*(evaluator.by_class(each) for evaluator, each in zip(evaluators, logits, strict=True)))
    if not bundle.task.tokenwise:
        agreement, changed = evaluators[0].agreement(logits[1], logits[0]), evaluators[0].changed(logits[1], logits[0])
        return ScoreDrop(before, after, agreement, float(np.abs(logits[1] - logits[0]).max()), recalls, changed)
    one, other = (_answers(evaluator, each, threshold) for evaluator, each in zip(evaluators, logits, strict=True))
    same = [a == b for a, b in zip(_flat(one), _flat(other), strict=True)]
    changed = count_differing(one, other)
    return ScoreDrop(before, after, float(np.mean(same)), _of_equal_rows(evaluators, logits), recalls, changed)


def _answers(evaluator: Evaluator, logits: Logits, threshold: float | None) -> list[Any]:
    """List the tags of every sentence, or the text that answers each question."""
    return (
        evaluator.tags(logits)
        if evaluator.task.kind == "tagging"
        else list(evaluator.texts(logits, threshold=threshold))
    )


def _flat(answers: Sequence[Any]) -> list[str]:
    """List the tag of every word, or the texts as they are."""
    return [tag for each in answers for tag in (each if isinstance(each, list) else [each])]


def _of_equal_rows(evaluators: Sequence[Evaluator], logits: Sequence[Logits]) -> float:
    """Return the largest |difference| of per-token logits in rows of as many tokens."""
    parts = []
    for evaluator, each in zip(evaluators, logits, strict=True):
        ends = np.cumsum([len(ids) for ids in evaluator.rows["input_ids"]])
        parts.append(np.split(each, ends[:-1]))
    pairs = zip(*parts, strict=len(parts[0]) == len(parts[1]))
    return max((float(np.abs(one - other).max()) for one, other in pairs if one.shape == other.shape), default=0.0)
