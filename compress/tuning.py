"""Keep the fastest file for a device: build and check every variant, and race them there in turns.

with open_device("local") as device:
    tuned = tune(bundle, device=device, settings=[Setting()], evaluator=evaluator, calibration=rows)
"""

import json
import logging
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import exp, isfinite, log
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import ModelProto

from compress.benchmark.devices import Device
from compress.config.limits import check_max_drop
from compress.errors import CompressError, ExportError
from compress.exporters.artifact import Bundle, Precision
from compress.exporters.int8 import LEARNED_KEY, quantize_dynamic, quantize_learned, quantize_static
from compress.exporters.rewrite import PLAIN, Form, rewrite_graph
from compress.exporters.rewrite.attention import collapse
from compress.exporters.rewrite.graph import Graph, find_writer, list_floats, products
from compress.exporters.session import (
    SESSION_KEY,
    SESSION_WHY_KEY,
    UNFUSED_SKIP,
    UNFUSED_SKIP_WHY,
    create_session,
    declare_microsoft,
    difference,
    metadata,
    onnx_run,
    opset_of,
    quiet_logging,
    read_model,
    rows_for,
    session_entries,
    session_options,
)
from compress.quantization.calibration import choose_ranges, observe
from compress.quantization.certify import attach_certificate, certify, compare_logits, compute_logits
from compress.records.certificate import VariantResult
from compress.records.latency import DeviceError, Latency, Setting

if TYPE_CHECKING:
    from compress.evaluation.evaluator import Evaluator
    from compress.exporters.session import EncodedRow


def attention_fused(model: ModelProto, *, norms: bool) -> ModelProto | None:
    """Optimise the float32 model by `onnxruntime.transformers.optimizer`, with its SkipLayerNormalization where
    `norms`. None where no attention is of the form that can be fused."""
    cores = collapse(Graph.copy_of(model))
    if not cores:
        return None
    from onnxruntime.transformers.fusion_options import FusionOptions
    from onnxruntime.transformers.optimizer import optimize_model

    options = FusionOptions("bert")
    options.enable_skip_layer_norm = norms
    options.enable_bias_skip_layer_norm = norms
    options.enable_embed_layer_norm = False
    heads, width = cores[0].heads, cores[0].heads * cores[0].size
    with tempfile.TemporaryDirectory() as scratch, quiet_logging(logging.CRITICAL):
        path = Path(scratch) / "divided.onnx"
        onnx.save_model(_divide(model), path)
        found = optimize_model(
            str(path), "bert", num_heads=heads, hidden_size=width, optimization_options=options, opt_level=0
        )
    fused: ModelProto = found.model
    fused.producer_name, fused.producer_version = model.producer_name, model.producer_version
    declare_microsoft(fused)
    onnx.helper.set_model_props(fused, metadata(model))
    return fused


def _divide(model: ModelProto) -> ModelProto:
    """Divide scores by the root of the size instead of multiplying by its inverse: the one form the optimiser knows."""
    made = ModelProto()
    made.CopyFrom(model)
    graph, constants = Graph(made.graph), Graph.copy_of(model)
    writers = graph.writers()
    for node in [node for node in graph.nodes if node.op_type == "Softmax"]:
        added = writers.get(node.input[0])
        scaled = added and find_writer(writers, added.input[0], "Mul")
        factor = None if scaled is None else constants.value(scaled.input[1])
        if scaled is None or factor is None:
            continue
        name = f"{scaled.name}/inverse"
        graph.put(name, np.asarray(1.0 / factor, np.float32))
        scaled.op_type = "Div"
        scaled.input[1] = name
    graph.store()
    return made


FUSED = (
    "Attention",
    "BiasGelu",
    "DynamicQuantizeMatMul",
    "EmbedLayerNormalization",
    "FusedMatMul",
    "Gelu",
    "MatMulIntegerToFloat",
    "QAttention",
    "SkipLayerNormalization",
)
"""Operators that onnxruntime makes of several of a file's, or that are made for it."""

INTEGER = ("DynamicQuantizeMatMul", "MatMulIntegerToFloat")

FORMS = (Form(tokens_first=False), Form(merged=True), PLAIN)
PERCENTILE = 99.99

SLEEPING = {"session.intra_op.allow_spinning": "0"}
"""On cores that other programs use too, threads that spin while they wait take turns with them: 2 threads took 20 ms
instead of 2 (docs/export-speed.md). Not measured on a machine that does nothing else."""

NORMS, SLEEP = ", fused norms", ", sleeping threads"
WAYS: Mapping[str, tuple[Mapping[str, str], str, tuple[str, ...]]] = {
    "": (UNFUSED_SKIP, UNFUSED_SKIP_WHY, ()),
    NORMS: ({}, "Fused norms were the fastest of all variants where this file was tuned.", ("SkipLayerNormalization",)),
    SLEEP: (
        {**UNFUSED_SKIP, **SLEEPING},
        f"{UNFUSED_SKIP_WHY} Threads that sleep while they wait were the fastest where this file was tuned.",
        (),
    ),
}
"""The end of a variant's name -> session settings, why, and an operator more that onnxruntime should run."""


@dataclass(frozen=True)
class Variant:
    """One file of the race.

    expects  operators of which onnxruntime should run some, when it opens the file: one of each group
    fused    those of FUSED that it runs, and how many
    warning  what should have been there and is not; '' where all is as expected
    form     how the graph was rewritten; None: it is as traced
    quantise whether int8 is made of it too
    """

    name: str
    path: Path
    expects: tuple[tuple[str, ...], ...] = ()
    fused: Mapping[str, int] = field(default_factory=dict)
    warning: str = ""
    form: Form | None = None
    quantise: bool = True

    @property
    def entries(self) -> dict[str, str]:
        return session_entries(read_model(self.path), self.path)

    def counted(self) -> "Variant":
        """Count the operators that onnxruntime, on this machine, makes of the file."""
        found = count_fused(self.path)
        missing = [" or ".join(group) for group in self.expects if not any(found.get(name) for name in group)]
        told = [f"onnxruntime should run {name} here, and does not" for name in missing]
        return replace(self, fused=found, warning="; ".join(told))


def count_fused(path: Path) -> dict[str, int]:
    """Count the fused operators of the graph that onnxruntime really runs; {} for a file it cannot open."""
    options = session_options(1, session_entries(read_model(path), path))
    with tempfile.TemporaryDirectory() as scratch:
        options.optimized_model_filepath = str(Path(scratch) / "optimised.onnx")
        try:
            create_session(path, options, path)
        except ExportError:
            return {}
        graph = onnx.load_model(options.optimized_model_filepath).graph
    run = Counter(node.op_type for node in graph.node)
    return {name: run[name] for name in FUSED if run[name]}


def fp32_variants(source: Path, folder: Path, *, threads: int = 1) -> list[Variant]:
    """Write forms of the fp32 file `source`, as `to_onnx(form=None)` writes it, each in `folder`; the first is `source`
    as it is. For more than one of `threads`, one whose threads sleep while they wait is among them."""
    raw = read_model(source)
    made = [_save("fp32", raw, folder), _save("fp32", raw, folder, way=NORMS)]
    for norms in (False, True):
        if (found := attention_fused(raw, norms=norms)) is not None:
            name = "fp32, onnxruntime's fused attention"
            fused = _save(name, found, folder, ("Attention",), NORMS if norms else "")
            made.append(replace(fused, quantise=False))  # QAttention was slower wherever it was measured
    for form in FORMS:
        new = rewrite_graph(raw, form)
        if (form.tokens_first and not new.turned) or (form.merged and not new.merged):
            continue  # the same graph as of the form before
        left = f"attention of {new.softmaxes - new.attentions} of {new.softmaxes} layers is of no known form"
        for way in ("", NORMS, *([SLEEP] if threads > 1 else [])) if form == PLAIN else ("",):
            one = _save(f"fp32, {form}", new.model, folder, ("FusedMatMul",) if new.turned else (), way)
            told = [left] if new.attentions < new.softmaxes else []
            made.append(replace(one, form=form, warning="; ".join((*told, *filter(None, [one.warning])))))
    return made


def int8_variants(
    sources: Sequence[Variant],
    folder: Path,
    *,
    keep: Sequence[str] = (),
    calibration: "Sequence[EncodedRow]" = (),
    learned: Mapping[str, Sequence[float]] | None = None,
) -> list[Variant]:
    """Write int8 of fp32 files: dynamic of each, with one scale per matrix of the fastest form, and static of it where
    there are rows to calibrate on. Of a model trained for int8, static of each with the `learned` ranges instead.

    Products named in `keep` stay float32; a file in which one of them was merged with others is passed over.
    """
    able = [
        source
        for source in sources
        if source.quantise and set(keep) <= {each.name for each in products(read_model(source.path).graph)}
    ]
    if learned:
        way = partial(quantize_learned, learned=learned, keep=keep)
        unmerged = [source for source in able if source.form is None or not source.form.merged]
        return [_quantise(source, "static int8, ranges learned in training", folder, way) for source in unmerged]
    made = [_quantise(source, "dynamic int8", folder, partial(quantize_dynamic, keep=keep)) for source in able]
    for source in able:
        if source.form == PLAIN and source.entries == UNFUSED_SKIP:
            per_matrix = partial(quantize_dynamic, keep=keep, per_channel=False)
            made.append(_quantise(source, "dynamic int8 per matrix", folder, per_matrix))
            if calibration:
                seen = observe(source.path, calibration)
                extremes, most = choose_ranges(seen, "minmax"), choose_ranges(seen, "percentile", PERCENTILE)
                ways = {
                    "static int8, minmax": partial(quantize_static, ranges=extremes, keep=keep),
                    f"static int8, percentile {PERCENTILE:g}": partial(quantize_static, ranges=most, keep=keep),
                    "static int8, minmax, qdq": partial(quantize_static, ranges=extremes, keep=keep, form="qdq"),
                }
                made += [_quantise(source, name, folder, way) for name, way in ways.items()]
    return made


def _quantise(source: Variant, way: str, folder: Path, quantise: Callable[[Path, Path], None]) -> Variant:
    target = _next(folder)
    quantise(source.path, target)
    return replace(
        source, name=source.name.replace("fp32", way, 1), path=target, expects=(*source.expects, INTEGER)
    ).counted()


def _save(name: str, model: ModelProto, folder: Path, expects: Sequence[str] = (), way: str = "") -> Variant:
    """Save the model as a file that asks for the session settings of this way."""
    target, made = _next(folder), ModelProto()
    made.CopyFrom(model)
    entries, why, more = WAYS[way]
    told = {**metadata(model), SESSION_KEY: json.dumps(dict(entries)), SESSION_WHY_KEY: why}
    onnx.helper.set_model_props(made, told)
    onnx.save_model(made, target)
    return Variant(name + way, target, tuple((each,) for each in (*expects, *more))).counted()


def _next(folder: Path) -> Path:
    return folder / f"{len(list(folder.iterdir()))}.onnx"


PARITY = 1e-4
"""The most that the logits of another form may differ from the traced graph's, relative to the largest (or to 1)."""
ROWS = 400
"""Rows of the evaluator that judge an int8 file, spread evenly over it."""
LOSES = "loses {:.2f} points and changes {:.1f} % of the answers; at most {:g} of each are allowed"
GAIN = 0.02
"""The least gain by which a faster file takes the place of the one that is there."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Tuned:
    """The bundle with the files that were chosen, and all that were tried, in the order of the races."""

    bundle: Bundle
    tried: tuple[VariantResult, ...]

    @property
    def chosen(self) -> tuple[VariantResult, ...]:
        """Return the chosen variants, of fp32 and, where it was raced, of int8."""
        return tuple(each for each in self.tried if each.chosen)


def tune(
    bundle: Bundle,
    *,
    device: Device,
    settings: Sequence[Setting],
    evaluator: "Evaluator | None" = None,
    calibration: "Sequence[EncodedRow]" = (),
    max_drop: float = 0.005,
    proof: "Evaluator | None" = None,
    split: str = "validation",
    data: str = "",
    out: Path | None = None,
    rounds: int = 6,
    runs: int = 10,
    say: Say = lambda _: None,
) -> Tuned:
    """Tune the bundle, in place or in a new folder `out`: with the fp32 file, and with an evaluator the int8 file,
    that is fastest on the device; what was tried goes into its report.

    settings     at each of which all are raced; the geometric mean of the ratios decides
    evaluator    rows that judge int8; without it int8 stays as it is, since nothing says what it may lose
    calibration  encoded rows, none of the evaluator's: with them static int8 is in the race
    max_drop     of the score, in its own unit, that an int8 file may lose; at most that share of the answers may
                 change. One that is no worse than the bundle's own passes as well
    proof        rows that certify the int8 file, where those of the evaluator, which chose it, should not
    split, data  what the certificate's rows are
    rounds, runs    turns that each file has at a setting, and timed forwards in each

    A file must be GAIN faster than the bundle's own to take its place. The bundle is untouched until all is measured.
    Every form is made of the weights anew, however the bundle's own files are written. Ratios are to its own fp32 file.
    Raises DeviceError where the device fails, ExportError for a model that cannot be exported.
    """
    check_max_drop(max_drop)
    if not settings:
        raise ExportError("tune: no settings to race at; expected at least one")
    own = bundle.files()
    race = partial(_race, device=device, settings=settings, rounds=rounds, runs=runs, say=say)
    with tempfile.TemporaryDirectory(prefix="compress-tune.") as scratch:
        folder = Path(scratch)
        for name in ("fp32", "int8"):
            (folder / name).mkdir()
        say("building fp32 variants")
        most = max(setting.threads for setting in settings)
        exact = fp32_variants(_export(bundle, folder), folder / "fp32", threads=most)
        checked = check_exact(bundle, device, exact)
        tried, taken = race(checked)
        chosen: dict[Precision, Path] = {"fp32": taken.variant.path} if not taken.own else {}
        if evaluator is not None:
            say("building int8 variants")
            kept = list_floats(own["fp32"], own["int8"])
            learned = json.loads((bundle.path / "config.json").read_text(encoding="utf-8")).get(LEARNED_KEY, {})
            built = int8_variants(exact, folder / "int8", keep=kept, calibration=calibration, learned=learned)
            judged = check_int8(bundle, device, exact[0], built, evaluator=evaluator.subsample(ROWS), max_drop=max_drop)
            more, taken = race(judged, beside=checked[0])
            tried += more
            chosen |= {"int8": taken.variant.path} if not taken.own else {}
        candidate = bundle.copy_to(folder / "candidate" / bundle.path.name)
        for precision, path in chosen.items():
            candidate = candidate.put(precision, path)
        if "int8" in chosen and evaluator is not None:
            judges = proof or evaluator
            say(f"certifying int8 on {len(judges):,} {split} rows")
            way = next(each.variant for each in reversed(tried) if each.chosen)
            certificate = certify(
                candidate, "int8", judges, max_drop=max_drop, device=device, method=way, split=split, data=data,
                kept=kept,
            )  # fmt: skip
            candidate, _ = attach_certificate(candidate, "int8", certificate)
        candidate = candidate.attach_evidence(tuning=tried)
        if out is not None:
            return Tuned(candidate.copy_to(out), tuple(tried))
        return Tuned(bundle.adopt(candidate, chosen), tuple(tried))


@dataclass(frozen=True)
class Checked:
    """A variant and what its answers are worth: wrong says why they are not good enough, '' when they are.

    own  it is the bundle's file as it is
    """

    variant: Variant
    difference: float | None
    wrong: str
    agreement: float | None = None
    own: bool = False


def check_exact(bundle: Bundle, device: Device, variants: Sequence[Variant]) -> list[Checked]:
    """Compare the bundle's own file, then the variants, with the first of these, which is as traced: on the device row
    by row, and here in a padded batch."""
    first = variants[0]
    own = Variant("fp32 of the bundle", bundle.files()["fp32"]).counted()
    rows = rows_for(first.path, bundle.manifest.max_length)
    lists: list[EncodedRow] = [{name: array[0].tolist() for name, array in row.items()} for row in rows]
    exact = device.logits(first.path, lists)
    longest = max(row["input_ids"].shape[1] for row in rows)
    padded = {
        name: np.concatenate([np.pad(row[name], ((0, 0), (0, longest - row[name].shape[1]))) for row in rows])
        for name in rows[0]
    }
    largest = max(1.0, *(float(np.abs(each).max()) for each in exact))
    found = []
    for variant in (own, *variants):
        try:
            pairs = zip(device.logits(variant.path, lists), exact, strict=True)
            there = float(np.max([np.abs(one - two).max() for one, two in pairs])) / largest
        except DeviceError as error:  # this form is not for this device; a device that is gone fails the race too
            found.append(Checked(variant, None, str(error), own=variant is own))
            continue
        here = difference(onnx_run(first.path), onnx_run(variant.path), [padded]).relative
        apart = float(np.max([there, here]))  # NaN stays NaN
        wrong = "" if apart <= PARITY else f"its logits differ by {apart:.2g} of the largest; at most {PARITY:g} may"
        found.append(Checked(variant, apart if isfinite(apart) else None, wrong, own=variant is own))
    return found


def check_int8(
    bundle: Bundle,
    device: Device,
    exact: Variant,
    variants: Sequence[Variant],
    *,
    evaluator: "Evaluator",
    max_drop: float,
) -> list[Checked]:
    """Compare each with fp32, on the device, on the rows of the evaluator; the bundle's own first."""
    threshold = bundle.manifest.threshold if bundle.task.unanswerable else None
    logits = partial(compute_logits, device, evaluator=evaluator)
    expected = logits(exact.path)
    own = Variant("int8 of the bundle", bundle.files()["int8"]).counted()
    usual = compare_logits(evaluator, expected, logits(own.path), threshold=threshold)
    found = [Checked(own, usual.difference, "", usual.agreement, own=True)]
    for variant in variants:
        try:
            outcome = compare_logits(evaluator, expected, logits(variant.path), threshold=threshold)
        except CompressError as error:  # does not run there, or answers what is no number
            found.append(Checked(variant, None, str(error)))
            continue
        no_worse = outcome.drop <= usual.drop and outcome.agreement >= usual.agreement
        wrong = "" if no_worse or outcome.near(max_drop) else LOSES.format(
            100 * outcome.drop, 100 * (1 - outcome.agreement), 100 * max_drop
        )  # fmt: skip
        found.append(Checked(variant, outcome.difference, wrong, outcome.agreement))
    return found


def _export(bundle: Bundle, folder: Path) -> Path:
    """Trace the fp32 file from the weights, at the opset of the bundle's own: what every form is made of."""
    from compress.exporters.onnx import to_onnx
    from compress.models.heads import task_class

    own = read_model(bundle.files()["fp32"])
    model = task_class(bundle.task.kind).from_pretrained(bundle.path, use_safetensors=True)
    segments = "token_type_ids" in [each.name for each in own.graph.input]
    to_onnx(model, folder / "traced.onnx", opset=opset_of(own), segments=segments, form=None)
    return folder / "traced.onnx"


def _race(
    checked: Sequence[Checked],
    beside: Checked | None = None,
    *,
    device: Device,
    settings: Sequence[Setting],
    rounds: int,
    runs: int,
    say: Say,
) -> tuple[list[VariantResult], Checked]:
    """Race the files; return what each took, and the one to ship. `beside`: runs too, as what ratios are to; else that
    is the first, the bundle's own."""
    base = beside or checked[0]
    able = [each for each in checked if not each.wrong or each.own]
    runners = list({each.variant.name: each for each in (base, *able)}.values())
    say(f"racing {len(runners)} files on {device.name}")
    files = {each.variant.name: each.variant.path for each in runners}
    times: dict[str, list[Latency]] = {name: [] for name in files}
    for latency in device.race(files, settings, rounds=rounds, runs=runs):
        times[latency.name].append(latency)
    ratios = {
        name: {
            str(each.setting): each.p50_ms / one.p50_ms
            for each, one in zip(found, times[base.variant.name], strict=True)
        }
        for name, found in times.items()
    }
    taken = _fastest(able, ratios)
    facts = device.facts()
    described = ", ".join(filter(None, (device.name, facts.get("cpu", ""), facts.get("instructions", ""))))
    tried = [
        VariantResult(
            variant=each.variant.name,
            device=described,
            p50_ms={str(time.setting): time.p50_ms for time in times.get(each.variant.name, ())},
            ratio=ratios.get(each.variant.name, {}),
            difference=each.difference,
            file_mb=each.variant.path.stat().st_size / 1e6,
            passed=not each.wrong,
            chosen=each is taken,
            reason="; ".join(filter(None, (each.wrong, each.variant.warning))),
            agreement=each.agreement,
            noisy=any(time.noisy for time in times.get(each.variant.name, ())),
            entries=each.variant.entries,
            fused=each.variant.fused,
        )
        for each in checked
    ]
    return tried, taken


def _fastest(able: Sequence[Checked], ratios: Mapping[str, Mapping[str, float]]) -> Checked:
    """Choose the right one with the least geometric mean; the bundle's own unless another is GAIN faster."""

    def mean(each: Checked) -> float:
        found = ratios[each.variant.name].values()
        return exp(sum(log(ratio) for ratio in found) / len(found))

    own = next(each for each in able if each.own)
    best = min((each for each in able if not each.wrong), key=mean, default=own)
    return best if mean(best) < (1 - GAIN) * mean(own) else own
