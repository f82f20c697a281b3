"""Write a bundle for a neural processor, and certify the files: `compress export --for
npu`.

    w8a16  weights int8, activations uint16
    w8a8   activations uint8, except for operators that need uint16 to keep the score

The ranges of activations, the alpha of SmoothQuant if it helps, and the operators that
w8a8 leaves in uint16 are chosen on validation rows, for the least error of the logits.
On the test split, the fp32 file of the same shape is certified, the quantised file on
the CPU, and the same on the emulator of the processor, if installed (`benchmark.htp`).
"""

import math
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import onnx
from datasets import Dataset

from compress.arrays import Floats
from compress.benchmark import htp
from compress.data.task import TaskData
from compress.errors import ExportError
from compress.exporters import npu
from compress.exporters.artifact import Bundle
from compress.exporters.int8 import Ranges
from compress.exporters.predictor import join_answers, open_predictor, run_rows
from compress.exporters.rewrite.graph import layer
from compress.exporters.session import (
    Feeds,
    RunFeeds,
    open_session,
    read_model,
    save_certified,
)
from compress.exporters.writers.context import (
    OPSET,
    ExportContext,
    ExportedFile,
    ExportResult,
)
from compress.models.padding import refuse_last_token
from compress.progress import Say
from compress.provenance import versions
from compress.quantization.calibration import Method, iterate_activations
from compress.quantization.certify import Claim, QuantizationEvaluator, judge
from compress.quantization.select import (
    Way,
    calibrate_each,
    choose_least_error,
    smooth_each,
)
from compress.quantization.sensitivity import Mixed, mix
from compress.records.certificate import Certificate
from compress.records.latency import DeviceError
from compress.slicing.shape import positions

NPU_CALIBRATIONS: tuple[tuple[Method, float], ...] = (
    ("minmax", 100.0),
    ("percentile", 99.999),
    ("percentile", 99.99),
)
NPU_ROWS = 256
LEAST_ROWS = 16
"""The fewest rows for calibration."""
SHORTEST = 8
"""The shortest fixed length, in tokens: MobileBERT's trigrams, and any text, need
several."""

EMULATED_ROWS = (32, 256)
"""Rows for the emulator, spread evenly: the minimum, and the maximum if that takes at
most EMULATED_SECONDS."""
EMULATED_SECONDS = 120.0
LEAST_AGREEMENT = 0.9
"""Agreement with the fp32 file's answers below which even a certified file draws a
warning."""
UNTIMED = (
    "no latency is reported: the emulator's time does not predict a phone's. A "
    "context binary is for one version of the processor and of QNN; for any other the "
    "ONNX file is compiled again"
)


@dataclass(frozen=True)
class Planner:
    """Chooses how to quantise a bundle, on validation rows of at most `length` tokens.

    source   the float file of open shape, with the mask on the scores
    rows     calibration rows
    """

    source: Path
    rows: Dataset
    files: QuantizationEvaluator
    scratch: Path
    length: int

    @cached_property
    def ways(self) -> list[Way]:
        """Calibrate the original file by each method, and the file smoothed with each
        alpha."""
        source = self.source
        rows = self.rows
        threads = self.files.threads
        names = npu.activations(source)
        ways = calibrate_each(
            source, rows, NPU_CALIBRATIONS, names=names, threads=threads
        )

        def find_ranges(file: Path, _: Ranges) -> Ranges:
            return find_extremes(file, rows, threads=threads)

        for way in smooth_each(
            source, rows, self.scratch, find_ranges, threads=threads
        ):
            ways.append(replace(way, method=f"SmoothQuant, {way.method}"))
        return ways

    def choose(self, precision: str, say: Say) -> Way:
        """Choose the way whose file has the least error."""
        ways = {f"{precision}, {way.method}": way for way in self.ways}
        makes = {
            name: partial(self.write, way, precision=precision)
            for name, way in ways.items()
        }
        file = self.scratch / "way.onnx"
        return ways[choose_least_error(makes, self.files, file, say)]

    def write(
        self,
        way: Way,
        target: Path,
        /,
        *,
        precision: str,
        keep: Sequence[str] = (),
        length: int | None = None,
    ) -> None:
        """Write the file of a precision; w8a8 with the activations of the blocks `keep`
        in uint16."""
        exact, ranges = self.fix(way, self.length if length is None else length)
        blocks = [] if precision == "w8a16" else find_blocks(exact)
        narrow = {
            name for block in blocks if block.name not in keep for name in block.nodes
        }
        npu.quantize(exact, target, ranges, precision=precision, narrow=narrow)

    def fix(self, way: Way, length: int) -> tuple[Path, Ranges]:
        """Write the float file with a fixed length and a bounded mask; return it with
        its ranges."""
        model = read_model(way.source)
        target = self.scratch / f"{way.source.stem}-{way.method}-{length}.onnx"
        ranges = npu.bound_mask(model, way.ranges, *npu.find_mask(model))
        if not target.is_file():
            bounded = self.scratch / "bounded.onnx"
            onnx.save_model(model, bounded)
            npu.fix(bounded, target, length)
        return target, ranges

    def mix(self, way: Way, max_drop: float) -> Mixed:
        """Choose the blocks whose activations need uint16 in w8a8."""
        blocks = find_blocks(self.fix(way, self.length)[0])
        make = partial(self.write, way, precision="w8a8")
        return mix(
            make,
            blocks,
            self.files,
            limit=max_drop,
            costs=lambda: {each.name: each.work for each in blocks},
        )


@dataclass(frozen=True)
class QuantizedBlock:
    """The operators between two softmaxes or layer norms, whose activations have the
    same number of bits.

    work  the size of the weights that they read
    """

    name: str
    nodes: tuple[str, ...]
    work: float


CUTS = ("LayerNormalization", "Softmax")


def find_blocks(source: Path) -> list[QuantizedBlock]:
    """Divide the operators of a file into blocks."""
    graph = read_model(source).graph
    sizes = {tensor.name: math.prod(tensor.dims) for tensor in graph.initializer}
    depths = dict[str, int]()
    members = dict[int, list[onnx.NodeProto]]()
    for node in graph.node:
        depth = max((depths.get(name, 0) for name in node.input), default=0) + (
            node.op_type in CUTS
        )
        depths.update(dict.fromkeys(node.output, depth))
        members.setdefault(depth, []).append(node)
    return [
        QuantizedBlock(
            f"block {depth}, from {layer(nodes[0].name)}",
            tuple(node.name for node in nodes),
            1.0 + sum(sizes.get(name, 0) for node in nodes for name in node.input),
        )
        for depth, nodes in sorted(members.items())
    ]


def find_extremes(source: Path, rows: Dataset, *, threads: int) -> Ranges:
    """Find the lowest and highest value of each activation of the file, on rows without
    padding."""
    ranges = dict[str, tuple[float, float]]()
    names = npu.activations(source)
    for values in iterate_activations(source, names, rows, threads=threads):
        for name, value in values.items():
            low, high = ranges.get(name, (0.0, 0.0))
            ranges[name] = min(low, float(value.min())), max(high, float(value.max()))
    return ranges


def write_npu(
    context: ExportContext,
    folder: Path,
    precisions: Sequence[str],
) -> ExportResult:
    """Write a file for each precision and length, and certify it: see
    `compress.exporters.formats.npu`.

    The allowed drop of the score decides which operators stay in uint16, and what is
    certified.

    Raises ExportError for a model that an NPU cannot run, a length beyond the model's
    positions, or too few rows.
    """
    if context.remade:
        raise ExportError(
            f"--opset: files for NPUs are of opset {OPSET}; expected no --opset"
        )
    say = context.options.say
    max_drop = context.options.fixed.max_drop
    bundle = context.bundle
    model = context.model()
    lengths = _lengths(context, model)
    if bundle.manifest.kind != "task" or context.options.load_data is None:
        raise ExportError(
            "--for npu: files are calibrated and certified on real rows of a bundle's "
            "task; expected a bundle, and --data with what it was trained on"
        )
    if not bundle.task.tokenwise and not bundle.task.vectors:
        refuse_last_token(context.name, bundle.manifest.model_type)
    data = context.options.load_data(bundle)
    source = _export(context, model)
    longest = limit_length(bundle, lengths[-1])
    evaluator = longest.evaluator(data.validation)
    # files of a fixed length compute padding too, so no longer than the longest text
    planned = min(lengths[-1], max(len(ids) for ids in evaluator.rows["input_ids"]))
    rows = longest.evaluator(data.train).subsample(NPU_ROWS).rows
    if len(rows) < LEAST_ROWS:
        raise ExportError(
            f"{data.name}: the train split has {len(rows)} "
            f"{'row' if len(rows) == 1 else 'rows'} to calibrate on; expected at least "
            f"{LEAST_ROWS}"
        )
    files = QuantizationEvaluator.from_bundle(
        longest, evaluator, threads=os.cpu_count() or 1
    )
    planner = Planner(source, rows, files, context.scratch, max(planned, SHORTEST))
    emulator = htp.find_emulator()
    exported = list[ExportedFile]()
    verdicts = list[str]()
    warnings = list[str]()
    verdicts.append(
        f"shapes are fixed: one row of {', '.join(map(str, lengths))} tokens per file. "
        "Use the shortest that fits the text, and pad with attention_mask 0; inputs "
        "are int32"
    )
    if not emulator:
        warnings.append(
            "not run on the HTP emulator, which is not installed: "
            f"{htp.how_to_install()}"
        )
    for precision in precisions:
        say(
            f"{precision}: calibrating on {len(rows):,} rows, evaluating on "
            f"{len(evaluator):,}"
        )
        way = planner.choose(precision, say)
        mixed = planner.mix(way, max_drop) if precision == "w8a8" else None
        kept = () if mixed is None else mixed.keep
        if mixed is not None:
            blocks = "; ".join(
                [
                    f"16-bit activations in {len(kept)} of {mixed.products} blocks",
                    *kept,
                ]
            )
            say(f"  {blocks}")
        split, _ = data.measured
        claim = Claim(f"{precision}, {way.method}", max_drop, split, data.name, kept)
        for length in lengths:
            target = folder / f"model_{precision}_{length}.onnx"
            (exact, _) = planner.fix(way, length)
            planner.write(way, target, precision=precision, keep=kept, length=length)
            say(f"{target.name}: certifying")
            limited = limit_length(bundle, length)
            proofs = certify_file(limited, exact, target, data, claim)
            # the proof on the CPU, which ran every row
            save_certified(target, target, proofs[-1])
            if emulator:
                try:
                    proofs.append(
                        certify_emulated(limited, target, data, emulator, claim)
                    )
                except DeviceError as error:
                    warnings.append(f"{target.name}: {error}")
            note = f"one row of {length} tokens" + (
                f", {len(kept)} blocks in 16 bits" if kept else ""
            )
            trial_rows = [
                row
                for row in context.trial_rows()
                if row["input_ids"].shape[1] <= length
            ]
            apart = context.differs(open_file(context, target), rows=trial_rows)
            exported.append(
                ExportedFile(target.name, precision, apart, note, proofs=tuple(proofs))
            )
            verdicts += map(describe_proof, proofs[1:])
            warnings += list_warnings(proofs[1:])
    verdicts.append(UNTIMED)
    return ExportResult(tuple(exported), tuple(verdicts), tuple(warnings))


def _lengths(context: ExportContext, model: Any) -> list[int]:
    """List the lengths of the files, in tokens, ascending. Raises ExportError for one
    beyond the model's positions."""
    lengths = context.lengths()
    limit = positions(model)
    most = " or more" if limit is None else f" to {limit}, the model's positions"
    for length in lengths:
        if length < SHORTEST or (limit is not None and length > limit):
            raise ExportError(f"--seq {length}: expected {SHORTEST}{most} tokens")
    return lengths


def list_warnings(proofs: Sequence[Certificate]) -> list[str]:
    """Return warnings about operators that the HTP leaves to the CPU, and about a score
    that is kept with other answers than fp32's.

    A weak student can keep its score this way: it errs on other rows than before.
    """
    left = [
        f"{proof.artefact}: the HTP does not support {', '.join(proof.left)}: these "
        "run on the CPU, and moving data there and back costs more than they do"
        for proof in proofs
        if proof.left
    ]
    measured = proofs[0]  # on every row
    if not measured.certified or measured.agreement >= LEAST_AGREEMENT:
        return left
    return [
        *left,
        f"{measured.artefact}: keeps the score, but {1 - measured.agreement:.0%} of "
        "its answers differ from the fp32 file's: inspect some before you ship it, or "
        "use w8a16",
    ]


def open_file(context: ExportContext, file: Path) -> RunFeeds:
    """Open a file of a fixed length; rows are padded to it."""
    session = open_session(file, threads=1)

    def run(row: Feeds) -> Sequence[Floats]:
        encoded = {name: value[0].tolist() for name, value in row.items()}
        return [each[None] for each in run_rows(session, [encoded], threads=1)[0]]

    return run


def _export(context: ExportContext, model: Any) -> Path:
    """Write the float file that the others are made from. Raises ExportError for a
    family that NPUs do not support."""
    traced = context.scratch / "traced.onnx"
    source = context.scratch / "npu.onnx"
    context.export(model, traced, opset=OPSET, form=npu.FORM)
    npu.prepare(traced, source)
    npu.find_mask(
        read_model(source), f"{context.name}: {context.bundle.manifest.model_type}"
    )
    return source


def limit_length(bundle: Bundle, length: int) -> Bundle:
    """Return the bundle with another max_length."""
    return replace(bundle, manifest=replace(bundle.manifest, max_length=length))


def certify_file(
    bundle: Bundle,
    exact: Path,
    file: Path,
    data: TaskData,
    claim: Claim,
) -> list[Certificate]:
    """Compare a file, and the float file `exact` that it was made from, with the
    bundle's fp32 file on the CPU."""
    _, split = data.measured
    evaluator = bundle.evaluator(split)
    threads = os.cpu_count() or 1
    length = bundle.manifest.max_length
    before = bundle.logits(evaluator.rows, precision="fp32", threads=threads)
    proofs = []
    unquantised = replace(claim, method=f"fp32, {length} tokens", kept=())
    for path, claimed in ((exact, unquantised), (file, claim)):
        predictor = open_predictor(
            bundle.path, path, task=bundle.task, max_length=length, threads=threads
        )
        proof = judge(
            bundle,
            evaluator,
            before,
            predictor.logits(evaluator.rows),
            claimed,
            artefact=file.name,
            device=f"CPU, {platform.machine()}",
            runtime=f"onnxruntime {versions(['onnxruntime'])['onnxruntime']}",
        )
        proofs.append(proof)
    return proofs


def certify_emulated(
    bundle: Bundle,
    file: Path,
    data: TaskData,
    python: str,
    claim: Claim,
) -> Certificate:
    """Compare a file on the emulator of the HTP with the bundle's fp32 file on the CPU,
    on EMULATED_ROWS rows.

    Raises DeviceError if the emulator fails.
    """
    _, split = data.measured
    evaluator = bundle.evaluator(split)
    fewest, most = EMULATED_ROWS
    chosen = evaluator.subsample(fewest)
    outputs = bundle.task.answer_outputs
    emulated = htp.emulate(python, file, list(chosen.rows), outputs=outputs)
    if (
        rows := min(most, len(evaluator), int(EMULATED_SECONDS / emulated.seconds))
    ) > fewest:
        chosen = evaluator.subsample(rows)
        emulated = htp.emulate(python, file, list(chosen.rows), outputs=outputs)
    before = bundle.logits(chosen.rows, precision="fp32", threads=os.cpu_count() or 1)
    proof = judge(
        bundle,
        chosen,
        before,
        join_answers(bundle.task, emulated.answers),
        claim,
        artefact=file.name,
        device=htp.HTP_NAME,
        runtime=emulated.runtime,
    )
    megabytes = emulated.context_bytes / 1e6
    return replace(proof, left=emulated.left, context_mb=megabytes)


def describe_proof(proof: Certificate) -> str:
    """Describe a certificate in a sentence."""
    summary = (
        f"{proof.artefact}, {proof.method}, {proof.device}: {proof.metric} "
        f"{proof.after:.4f} ({proof.before:.4f} in fp32), {proof.agreement:.1%} of the "
        f"answers agree, logits differ by at most {proof.max_logit_difference:.2g}, "
        f"{proof.rows:,} {proof.split} rows; "
        f"{'certified' if proof.certified else 'not certified'}: {proof.reason}"
    )
    if proof.context_mb is None:
        return summary
    supported = f"all but {len(proof.left)} nodes" if proof.left else "every node"
    return (
        f"{summary}; the HTP runs {supported}; context binary {proof.context_mb:.1f} MB"
    )
