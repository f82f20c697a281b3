"""Write a bundle for a neural processor, and certify the files: `compress export --for npu`.

    w8a16  weights int8, activations uint16
    w8a8   activations uint8, but for the operators that must have uint16 to keep the score

The ranges of activations, and the alpha of SmoothQuant where it helps, are those that bring the logits nearest to
fp32's on validation rows; so are the operators that w8a8 leaves in uint16. What is certified is the test split: the
fp32 file of the same shape, the quantised one on the CPU, and the same on the emulator of the processor, where that is
installed (`benchmark.htp`).
"""

import math
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from datasets import Dataset
from numpy.typing import NDArray

from compress.benchmark import htp
from compress.data.task import TaskData
from compress.errors import ExportError
from compress.evaluation.evaluator import Evaluator
from compress.exporters import npu
from compress.exporters.artifact import Bundle
from compress.exporters.formats import OPSET, ExportContext, ExportedFile, ExportResult
from compress.exporters.int8 import Ranges
from compress.exporters.onnx import to_onnx
from compress.exporters.predictor import VECTORS, join_answers, open_predictor, run_rows
from compress.exporters.rewrite import Form
from compress.exporters.rewrite.graph import layer
from compress.exporters.session import Feeds, Run, open_session, read_model, save_certified
from compress.provenance import versions
from compress.quantization.calibration import Histogram, Method, watch
from compress.quantization.certify import Logits, QuantizationEvaluator, ScoreDrop, compare_logits, record_outcome
from compress.quantization.select import ALPHAS, describe_calibration
from compress.quantization.sensitivity import Mixed, mix
from compress.quantization.smoothquant import channels, smooth
from compress.records.certificate import Certificate
from compress.records.latency import DeviceError
from compress.slicing.shape import positions

FORM = Form(tokens_first=False, masked_keys=False)
"""Rows first, the mask on the scores: of the keys it would take the range."""
CALIBRATIONS: tuple[tuple[Method, float], ...] = (("minmax", 100.0), ("percentile", 99.999), ("percentile", 99.99))
CALIBRATION_ROWS = 256
LEAST_ROWS = 16
"""Rows without which ranges are chance."""
SHORTEST = 8
"""Tokens of the shortest file: MobileBERT's trigrams, and any text, want some."""

EMULATED_ROWS = (32, 256)
"""Rows that the emulator answers, spread evenly: at least, and at most if that takes no more than EMULATED_SECONDS."""
EMULATED_SECONDS = 120.0
UNTIMED = (
    "no latency is told: the emulator's time says nothing of a phone's. A context binary is made for one version of "
    "the processor and of QNN; for any other the ONNX file is prepared anew"
)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Way:
    """One way to quantise: a float file of open shape, and the ranges of its activations."""

    method: str
    source: Path
    ranges: Ranges


@dataclass(frozen=True)
class Planner:
    """Chooses how a bundle is quantised, on validation rows of at most `length` tokens.

    source   the float file of open shape, with the mask on the scores
    rows     rows to calibrate on
    """

    source: Path
    rows: Dataset
    files: QuantizationEvaluator
    scratch: Path
    length: int

    @cached_property
    def ways(self) -> list[Way]:
        """Calibrate the file as it is, and smoothed by each alpha."""
        seen = observe(self.source, self.rows, threads=self.files.threads)
        found = [
            Way(describe_calibration(*each), self.source, {name: one.range(*each) for name, one in seen.items()})
            for each in CALIBRATIONS
        ]
        peaks = channels(self.source, self.rows, threads=self.files.threads)
        for alpha in ALPHAS:
            file = self.scratch / f"smooth-{alpha}.onnx"
            smooth(self.source, file, peaks, alpha=alpha)
            ranges = find_extremes(file, self.rows, threads=self.files.threads)
            found.append(Way(f"SmoothQuant, alpha {alpha:g}", file, ranges))
        return found

    def choose(self, precision: str, say: Say) -> Way:
        """Choose the way whose file has the least error."""
        errors: dict[float, Way] = {}
        for way in self.ways:
            file = self.scratch / "way.onnx"
            self.write(way, file, precision)
            error = self.files.error(file)
            say(f"  {precision}, {way.method}: mean squared error of the logits {error:.5f}")
            errors.setdefault(error, way)
        return errors[min(errors)]

    def write(
        self, way: Way, target: Path, precision: str, /, *, keep: Sequence[str] = (), length: int | None = None
    ) -> None:
        """Write the file of a precision; w8a8 with the activations of the blocks `keep` in uint16."""
        exact, ranges = self.fix(way, self.length if length is None else length)
        blocks = [] if precision == "w8a16" else find_blocks(exact)
        narrow = {name for block in blocks if block.name not in keep for name in block.nodes}
        npu.quantize(exact, target, ranges, precision=precision, narrow=narrow)

    def fix(self, way: Way, length: int) -> tuple[Path, Ranges]:
        """Write the float file of a fixed length, with the mask that the ranges allow; return it, and its ranges."""
        model, target = read_model(way.source), self.scratch / f"{way.source.stem}-{way.method}-{length}.onnx"
        ranges = npu.bound_mask(model, way.ranges, *npu.find_mask(model))
        if not target.is_file():
            bounded = self.scratch / "bounded.onnx"
            onnx.save_model(model, bounded)
            npu.fix(bounded, target, length)
        return target, ranges

    def mix(self, way: Way, max_drop: float) -> Mixed:
        """Choose the blocks whose activations must be uint16 in w8a8."""
        blocks = find_blocks(self.fix(way, self.length)[0])

        def make(target: Path, /, *, keep: Sequence[str] = ()) -> None:
            self.write(way, target, "w8a8", keep=keep)

        return mix(make, blocks, self.files, limit=max_drop, costs=lambda: {each.name: each.work for each in blocks})


@dataclass(frozen=True)
class Block:
    """Operators from one softmax or layer norm to the next, whose activations have the same bits: within an encoder
    some of these must have more. work: the numbers in the weights they read."""

    name: str
    nodes: tuple[str, ...]
    work: float


CUTS = ("LayerNormalization", "Softmax")


def find_blocks(source: Path) -> list[Block]:
    """Divide the operators of a file."""
    graph = read_model(source).graph
    sizes = {tensor.name: math.prod(tensor.dims) for tensor in graph.initializer}
    depths, members = dict[str, int](), dict[int, list[onnx.NodeProto]]()
    for node in graph.node:
        depth = max((depths.get(name, 0) for name in node.input), default=0) + (node.op_type in CUTS)
        depths.update(dict.fromkeys(node.output, depth))
        members.setdefault(depth, []).append(node)
    return [
        Block(
            f"block {depth}, from {layer(nodes[0].name)}",
            tuple(node.name for node in nodes),
            1.0 + sum(sizes.get(name, 0) for node in nodes for name in node.input),
        )
        for depth, nodes in sorted(members.items())
    ]


def observe(source: Path, rows: Dataset, *, threads: int) -> dict[str, Histogram]:
    """Count the numbers in each activation of the file, on rows without padding."""
    model = read_model(source)
    seen = {name: Histogram() for name in npu.activations(source)}
    for values in watch(model, list(seen), rows, threads=threads, source=source):
        for name, value in values.items():
            try:
                seen[name].add(value)
            except ValueError:
                raise ExportError(f"{source}: {name} is not finite on these rows; its weights are broken") from None
    return seen


def find_extremes(source: Path, rows: Dataset, *, threads: int) -> Ranges:
    """Find the lowest and highest value of each activation of the file, on rows without padding."""
    found = dict[str, tuple[float, float]]()
    for values in watch(read_model(source), npu.activations(source), rows, threads=threads, source=source):
        for name, value in values.items():
            low, high = found.get(name, (0.0, 0.0))
            found[name] = min(low, float(value.min())), max(high, float(value.max()))
    return found


def write_npu(
    context: ExportContext,
    folder: Path,
    precisions: Sequence[str],
    *,
    lengths: Sequence[int] = (),
    max_drop: float = 0.005,
    say: Say = lambda _: None,
) -> ExportResult:
    """Write a file for each precision and length, and certify it: see `compress.exporters.formats`.

    lengths   in tokens; none: the bundle's max_length
    max_drop  of the score, in its own unit, for which w8a8 takes operators into uint16, and that a certificate allows

    Raises ExportError for what an NPU cannot take, a length beyond the model's positions, and too few rows.
    """
    if context.remade:
        raise ExportError(f"--opset: files for NPUs are of opset {OPSET}; expected no --opset")
    bundle, model = context.bundle, context.model()
    lengths = sorted(set(lengths)) or [bundle.manifest.max_length]
    _check_lengths(lengths, positions(model))
    data = _load(context)
    source = _export(context, model)
    longest = at_length(bundle, lengths[-1])
    judged = longest.evaluator(data.validation)
    # no longer than its texts are: files of a fixed length compute the padding too
    planned = min(lengths[-1], max(len(ids) for ids in judged.rows["input_ids"]))
    rows = longest.evaluator(data.train).subsample(CALIBRATION_ROWS).rows
    if len(rows) < LEAST_ROWS:
        raise ExportError(
            f"{data.name}: the train split has {len(rows)} {'row' if len(rows) == 1 else 'rows'} to calibrate on; "
            f"expected at least {LEAST_ROWS}"
        )
    files = QuantizationEvaluator.from_bundle(longest, judged, threads=os.cpu_count() or 1)
    planner = Planner(source, rows, files, context.scratch, max(planned, SHORTEST))
    calibrated = f"calibrating on {len(rows):,} rows, judging on {len(judged):,}"
    emulator, made = htp.find_emulator(), list[ExportedFile]()
    verdicts, warnings = [_describe_lengths(lengths)], list[str]()
    if not emulator:
        warnings.append(f"not run on the emulator of the HTP, which is not installed: {htp.how_to_install()}")
    for precision in precisions:
        say(f"{precision}: {calibrated}")
        way = planner.choose(precision, say)
        mixed = planner.mix(way, max_drop) if precision == "w8a8" else None
        kept = () if mixed is None else mixed.keep
        if mixed is not None:
            say(f"  activations of 16 bits in {len(kept)} of {mixed.products} blocks; {'; '.join(kept)}")
        told: dict[str, Any] = {"max_drop": max_drop, "method": f"{precision}, {way.method}", "kept": kept}
        for length in lengths:
            target, (exact, _) = folder / f"model_{precision}_{length}.onnx", planner.fix(way, length)
            planner.write(way, target, precision, keep=kept, length=length)
            say(f"{target.name}: certifying")
            proofs = certify_file(at_length(bundle, length), exact, target, data, **told)
            save_certified(target, target, proofs[-1])  # that of the CPU, where every row was answered
            if emulator:
                try:
                    proofs.append(certify_emulated(at_length(bundle, length), target, data, emulator, **told))
                except DeviceError as error:
                    warnings.append(f"{target.name}: {error}")
            note = f"one row of {length} tokens" + (f", {len(kept)} blocks in 16 bits" if kept else "")
            rows = [row for row in context.trial_rows() if row["input_ids"].shape[1] <= length]
            apart = context.differs(_run_fixed(target), rows=rows)
            made.append(ExportedFile(target.name, precision, apart, note, proofs=tuple(proofs)))
            verdicts += map(describe_proof, proofs[1:])
            warnings += [_describe_left(each) for each in proofs if each.left]
    verdicts.append(UNTIMED)
    return ExportResult(tuple(made), tuple(verdicts), tuple(warnings))


def _run_fixed(file: Path) -> Run:
    session = open_session(file, threads=1)

    def run(row: Feeds) -> Sequence[NDArray[np.float32]]:
        encoded = {name: value[0].tolist() for name, value in row.items()}
        return [each[None] for each in run_rows(session, [encoded], threads=1)[0]]

    return run


def _describe_lengths(lengths: Sequence[int]) -> str:
    """Say what the files are fed with."""
    named = ", ".join(str(length) for length in lengths)
    return (
        f"shapes are fixed: one row of {named} tokens a file. Take the shortest that holds the text, pad with "
        "attention_mask 0; inputs are int32"
    )


def _describe_left(proof: Certificate) -> str:
    """Warn of nodes that the processor does not take."""
    return (
        f"{proof.artefact}: the HTP does not take {', '.join(proof.left)}: these run on the CPU, and handing over "
        "costs more than they do"
    )


def _check_lengths(lengths: Sequence[int], limit: int | None) -> None:
    """Raise ExportError for a length that no file can have."""
    for length in lengths:
        if length < SHORTEST or (limit is not None and length > limit):
            most = "" if limit is None else f" to {limit}, the model's positions"
            raise ExportError(f"--seq {length}: expected {SHORTEST}{most or ' or more'} tokens")


def _load(context: ExportContext) -> TaskData:
    """Load the examples to calibrate on and to certify with."""
    if context.bundle.manifest.kind != "task" or context.load_data is None:
        raise ExportError(
            "--for npu: activations are calibrated, and the files certified, on real rows of a bundle's task; "
            "expected a bundle, and --data with what it was made from"
        )
    return context.load_data(context.bundle)


def _export(context: ExportContext, model: Any) -> Path:
    """Write the float file that all others are made of. Raises ExportError for a family that an NPU cannot take."""
    traced, source = context.scratch / "traced.onnx", context.scratch / "npu.onnx"
    inputs = [each.name for each in read_model(context.onnx("fp32")).graph.input]
    to_onnx(model, traced, opset=OPSET, segments="token_type_ids" in inputs, form=FORM)
    npu.prepare(traced, source)
    try:
        npu.find_mask(read_model(source))
    except ExportError as error:
        family = context.bundle.manifest.model_type
        raise ExportError(
            f"{context.name}: {family} {error}; an NPU takes the files of BERT, DistilBERT, RoBERTa, ELECTRA, ALBERT "
            "and MobileBERT. --for onnx and --for ort take every family"
        ) from None
    return source


def at_length(bundle: Bundle, length: int) -> Bundle:
    """Return the bundle as if it read texts of at most `length` tokens."""
    return replace(bundle, manifest=replace(bundle.manifest, max_length=length))


def certify_file(
    bundle: Bundle, exact: Path, file: Path, data: TaskData, *, max_drop: float, method: str, kept: Sequence[str] = ()
) -> list[Certificate]:
    """Compare a file, and the float file `exact` that it was made of, with the bundle's fp32 file on the CPU."""
    evaluator, split = _proof_rows(bundle, data)
    threads, length = os.cpu_count() or 1, bundle.manifest.max_length
    before = bundle.logits(evaluator.rows, precision="fp32", threads=threads)
    proofs = []
    for each, made in ((exact, f"fp32, {length} tokens"), (file, method)):
        opened = open_predictor(bundle.path, each, task=bundle.task, max_length=length, threads=threads)
        outcome = _compare(bundle, evaluator, before, opened.logits(evaluator.rows))
        proof = record_outcome(
            outcome, bundle.task.metric, file.name, method=made, max_drop=max_drop, rows=len(evaluator), split=split,
            data=data.name, device=f"CPU, {platform.machine()}",
            runtime=f"onnxruntime {versions(['onnxruntime'])['onnxruntime']}",
        )  # fmt: skip
        proofs.append(replace(proof, kept=tuple(kept) if each is file else ()))
    return proofs


def certify_emulated(
    bundle: Bundle,
    file: Path,
    data: TaskData,
    python: str,
    *,
    max_drop: float,
    method: str,
    kept: Sequence[str] = (),
) -> Certificate:
    """Compare a file on the emulator of the HTP with the bundle's fp32 file on the CPU, on EMULATED_ROWS rows.

    Raises DeviceError where the emulator fails.
    """
    evaluator, split = _proof_rows(bundle, data)
    fewest, most = EMULATED_ROWS
    chosen, outputs = evaluator.subsample(fewest), VECTORS.get(bundle.task.kind)
    found = htp.emulate(python, file, list(chosen.rows), outputs=outputs)
    if (rows := min(most, len(evaluator), int(EMULATED_SECONDS / found.seconds))) > fewest:
        chosen = evaluator.subsample(rows)
        found = htp.emulate(python, file, list(chosen.rows), outputs=outputs)
    before = bundle.logits(chosen.rows, precision="fp32", threads=os.cpu_count() or 1)
    outcome = _compare(bundle, chosen, before, join_answers(bundle.task, found.answers))
    proof = record_outcome(
        outcome, bundle.task.metric, file.name, method=method, max_drop=max_drop, rows=len(chosen), split=split,
        data=data.name, device=htp.NAME, runtime=found.runtime,
    )  # fmt: skip
    return replace(proof, kept=tuple(kept), left=found.left, context_mb=found.context_bytes / 1e6)


def _proof_rows(bundle: Bundle, data: TaskData) -> tuple[Evaluator, str]:
    """Encode the test split, or the validation split where there is none, and name it."""
    split, name = (data.validation, "validation") if data.test is None else (data.test, "test")
    return bundle.evaluator(split), name


def _compare(bundle: Bundle, evaluator: Evaluator, before: Logits, after: Logits) -> ScoreDrop:
    threshold = bundle.manifest.threshold if bundle.task.unanswerable else None
    return compare_logits(evaluator, before, after, threshold=threshold)


def describe_proof(proof: Certificate) -> str:
    """Say in a sentence what a certificate holds."""
    said = (
        f"{proof.artefact}, {proof.method}, {proof.device}: {proof.metric} {proof.after:.4f} ({proof.before:.4f} in "
        f"fp32), {proof.agreement:.1%} of the answers agree, logits differ by at most "
        f"{proof.max_logit_difference:.2g}, {proof.rows:,} {proof.split} rows; "
        f"{'certified' if proof.certified else 'not certified'}: {proof.reason}"
    )
    if proof.context_mb is None:
        return said
    taken = f"all but {len(proof.left)} nodes" if proof.left else "every node"
    return f"{said}; the HTP takes {taken}; context binary {proof.context_mb:.1f} MB"
