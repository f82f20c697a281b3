"""Choose the fastest file for a device: build and check every variant, and race them
there.

with open_device("local") as device:
    tuned = tune(bundle, device=device, settings=[Setting()], evaluator=evaluator,
        calibration=rows)
"""

import json
import logging
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from math import isfinite
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import ModelProto

from compress.arguments import Share, check_arguments, with_keywords_of
from compress.benchmark.device import Device
from compress.errors import CompressError, ExportError
from compress.exporters.artifact import Bundle
from compress.exporters.int8 import (
    LEARNED_KEY,
    quantize_dynamic,
    quantize_learned,
    quantize_static,
)
from compress.exporters.manifest import Precision
from compress.exporters.rewrite.attention import collapse
from compress.exporters.rewrite.forms import PLAIN, Form, rewrite_graph
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
from compress.progress import Say
from compress.quantization.calibration import choose_ranges, observe
from compress.quantization.certify import (
    Claim,
    ScoreDrop,
    attach_certificate,
    certify,
    compare_logits,
    compute_logits,
)
from compress.records.certificate import VariantResult
from compress.records.latency import DeviceError, Latency, Setting, describe_device

if TYPE_CHECKING:
    from compress.evaluation.evaluator import Evaluator
    from compress.exporters.session import EncodedRow


def attention_fused(model: ModelProto, *, norms: bool) -> ModelProto | None:
    """Optimise the float32 model with `onnxruntime.transformers.optimizer`, with its
    SkipLayerNormalization if `norms`. Return None if no attention can be fused."""
    cores = collapse(Graph.copy_of(model))
    if not cores:
        return None
    from onnxruntime.transformers.fusion_options import FusionOptions
    from onnxruntime.transformers.optimizer import optimize_model

    options = FusionOptions("bert")
    options.enable_skip_layer_norm = norms
    options.enable_bias_skip_layer_norm = norms
    options.enable_embed_layer_norm = False
    heads = cores[0].heads
    width = cores[0].heads * cores[0].size
    with tempfile.TemporaryDirectory() as scratch, quiet_logging(logging.CRITICAL):
        path = Path(scratch) / "divided.onnx"
        onnx.save_model(_divide(model), path)
        optimized = optimize_model(
            str(path),
            "bert",
            num_heads=heads,
            hidden_size=width,
            optimization_options=options,
            opt_level=0,
        )
    fused: ModelProto = optimized.model
    fused.producer_name = model.producer_name
    fused.producer_version = model.producer_version
    declare_microsoft(fused)
    onnx.helper.set_model_props(fused, metadata(model))
    return fused


def _divide(model: ModelProto) -> ModelProto:
    """Divide scores by the root of the size instead of multiplying by its inverse, as
    the optimiser requires."""
    copy = ModelProto()
    copy.CopyFrom(model)
    graph = Graph(copy.graph)
    constants = Graph.copy_of(model)
    writers = graph.writers()
    for node in graph.of_type("Softmax"):
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
    return copy


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
"""Operators that onnxruntime fuses from several in a file, or that are written for
it."""

INTEGER = ("DynamicQuantizeMatMul", "MatMulIntegerToFloat")

FORMS = (Form(tokens_first=False), Form(merged=True), PLAIN)
TUNING_PERCENTILE = 99.99

SLEEPING = {"session.intra_op.allow_spinning": "0"}
"""Threads that spin while they wait compete with other programs for the cores: 2
threads took 20 ms instead of 2 (docs/export-speed.md). Not measured on an otherwise
idle machine."""

NORMS = ", fused norms"
SLEEP = ", sleeping threads"
WAYS: Mapping[str, tuple[Mapping[str, str], str, tuple[str, ...]]] = {
    "": (UNFUSED_SKIP, UNFUSED_SKIP_WHY, ()),
    NORMS: (
        {},
        "Fused norms were the fastest of all variants where this file was tuned.",
        ("SkipLayerNormalization",),
    ),
    SLEEP: (
        {**UNFUSED_SKIP, **SLEEPING},
        f"{UNFUSED_SKIP_WHY} Threads that sleep while they wait were the fastest where "
        "this file was tuned.",
        (),
    ),
}
"""Suffix of a variant's name -> session settings, the reason for them, and further
operators that should be fused."""


@dataclass(frozen=True)
class Variant:
    """A file of the race.

    expects  groups of operators; onnxruntime should run at least one of each
    fused    the operators of FUSED that it runs, with their counts
    warning  the expected operators that are missing; '' if there are none
    form     how the graph was rewritten; None: it is as traced
    quantise whether to make int8 variants of it
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

    def with_fused_counts(self) -> "Variant":
        """Count the fused operators that onnxruntime runs on this machine."""
        fused = count_fused(self.path)
        missing = [
            " or ".join(group)
            for group in self.expects
            if not any(fused.get(name) for name in group)
        ]
        warnings = [
            f"onnxruntime should run {name} here, and does not" for name in missing
        ]
        return replace(self, fused=fused, warning="; ".join(warnings))


def count_fused(path: Path) -> dict[str, int]:
    """Count the fused operators in the graph that onnxruntime runs; {} if it cannot
    open the file."""
    options = session_options(1, session_entries(read_model(path), path))
    with tempfile.TemporaryDirectory() as scratch:
        options.optimized_model_filepath = str(Path(scratch) / "optimised.onnx")
        try:
            create_session(path, options, path)
        except ExportError:
            return {}
        graph = onnx.load_model(options.optimized_model_filepath).graph
    counts = Counter(node.op_type for node in graph.node)
    return {name: counts[name] for name in FUSED if counts[name]}


def fp32_variants(source: Path, folder: Path, *, threads: int = 1) -> list[Variant]:
    """Write forms of the fp32 file `source`, as traced by `to_onnx(form=None)`, to
    `folder`; the first is unchanged. With more than one thread, one more has threads
    that sleep while they wait."""
    traced = read_model(source)
    variants = [_save("fp32", traced, folder), _save("fp32", traced, folder, way=NORMS)]
    for way in ("", NORMS):
        if (model := attention_fused(traced, norms=way == NORMS)) is not None:
            name = "fp32, onnxruntime's fused attention"
            variant = _save(name, model, folder, ("Attention",), way)
            # QAttention was slower wherever it was measured
            variants.append(replace(variant, quantise=False))
    ways = {PLAIN: ["", NORMS]}
    if threads > 1:
        ways[PLAIN].append(SLEEP)
    for form in FORMS:
        new = rewrite_graph(traced, form)
        if (form.tokens_first and not new.turned) or (form.merged and not new.merged):
            continue  # the same graph as for the previous form
        unknown = (
            f"the attention of {new.softmaxes - new.attentions} of {new.softmaxes} "
            "layers has an unknown form"
        )
        for way in ways.get(form, [""]):
            variant = _save(
                f"fp32, {form}",
                new.model,
                folder,
                ("FusedMatMul",) if new.turned else (),
                way,
            )
            warnings = [unknown] if new.attentions < new.softmaxes else []
            variants.append(
                replace(
                    variant,
                    form=form,
                    warning="; ".join(filter(None, (*warnings, variant.warning))),
                )
            )
    return variants


def int8_variants(
    sources: Sequence[Variant],
    folder: Path,
    *,
    keep: Sequence[str] = (),
    calibration: "Sequence[EncodedRow]" = (),
    learned: Mapping[str, Sequence[float]] | None = None,
) -> list[Variant]:
    """Write int8 files: dynamic ones of each fp32 file, and of the plain form also one
    with a scale per matrix, and static ones if there are rows for calibration. With
    `learned` ranges, write a static one of each file instead.

    Products in `keep` stay in float32; files in which one of them was merged with
    others are skipped.
    """
    suitable = [
        source
        for source in sources
        if source.quantise
        and set(keep) <= {each.name for each in products(read_model(source.path).graph)}
    ]
    if learned:
        method = "static int8, ranges learned in training"
        quantise = partial(quantize_learned, learned=learned, keep=keep)
        return [
            _quantise(source, method, folder, quantise)
            for source in suitable
            if source.form is None or not source.form.merged
        ]
    variants = [
        _quantise(source, "dynamic int8", folder, partial(quantize_dynamic, keep=keep))
        for source in suitable
    ]
    for source in suitable:
        if source.form == PLAIN and source.entries == UNFUSED_SKIP:
            methods = {
                "dynamic int8 per matrix": partial(
                    quantize_dynamic, keep=keep, per_channel=False
                )
            }
            if calibration:
                seen = observe(source.path, calibration)
                minmax = choose_ranges(seen, "minmax")
                percentile = choose_ranges(seen, "percentile", TUNING_PERCENTILE)
                static = partial(quantize_static, keep=keep)
                methods |= {
                    "static int8, minmax": partial(static, ranges=minmax),
                    f"static int8, percentile {TUNING_PERCENTILE:g}": partial(
                        static, ranges=percentile
                    ),
                    "static int8, minmax, qdq": partial(
                        static, ranges=minmax, form="qdq"
                    ),
                }
            variants += [
                _quantise(source, name, folder, quantise)
                for name, quantise in methods.items()
            ]
    return variants


def _quantise(
    source: Variant,
    method: str,
    folder: Path,
    quantise: Callable[[Path, Path], None],
) -> Variant:
    target = _next(folder)
    quantise(source.path, target)
    name = source.name.replace("fp32", method, 1)
    expects = (*source.expects, INTEGER)
    return replace(source, name=name, path=target, expects=expects).with_fused_counts()


def _save(
    name: str,
    model: ModelProto,
    folder: Path,
    expects: Sequence[str] = (),
    way: str = "",
) -> Variant:
    """Save the model as a file with the session settings of `WAYS[way]`."""
    target = _next(folder)
    copy = ModelProto()
    copy.CopyFrom(model)
    entries, reason, more = WAYS[way]
    properties = {
        **metadata(model),
        SESSION_KEY: json.dumps(dict(entries)),
        SESSION_WHY_KEY: reason,
    }
    onnx.helper.set_model_props(copy, properties)
    onnx.save_model(copy, target)
    return Variant(
        name + way, target, tuple((operator,) for operator in (*expects, *more))
    ).with_fused_counts()


def _next(folder: Path) -> Path:
    return folder / f"{len(list(folder.iterdir()))}.onnx"


PARITY = 1e-4
"""The largest allowed difference of the logits from the traced graph's, relative to the
largest (or to 1)."""
TUNING_ROWS = 400
"""Rows of the evaluator for comparing int8 files, spread evenly over it."""
TUNING_ROUNDS = 6
TUNING_RUNS = 10
"""Number of turns of each file at a setting, and of timed forward passes in each
turn."""
GAIN = 0.02
"""The minimum gain for which a faster file replaces the present one."""


@dataclass(frozen=True)
class Tuned:
    """The bundle with the chosen files, and the results of all variants, in the order
    of the races."""

    bundle: Bundle
    tried: tuple[VariantResult, ...]

    @property
    def chosen(self) -> tuple[VariantResult, ...]:
        """Return the chosen variants of fp32 and, if raced, of int8."""
        return tuple(each for each in self.tried if each.chosen)


@check_arguments
@dataclass(frozen=True)
class TuneRequest:
    """The arguments of `tune`. See there."""

    bundle: Bundle
    _: KW_ONLY
    device: Device
    settings: Sequence[Setting]
    evaluator: "Evaluator | None" = None
    calibration: "Sequence[EncodedRow]" = ()
    max_drop: Share = 0.005
    proof: "Evaluator | None" = None
    split: str = "validation"
    data: str = ""
    out: Path | None = None
    say: Say = lambda _: None


@with_keywords_of(TuneRequest)
def tune(request: TuneRequest) -> Tuned:
    """Tune a bundle: choose the fp32 file, and with an evaluator the int8 file, that is
    fastest on the device; write the results into its report.

    settings     the settings of the race; the geometric mean of the ratios decides
    evaluator    rows for comparing int8 files; without it the int8 file is not tuned
    calibration  encoded rows other than the evaluator's, for static int8
    max_drop     the allowed drop of the score of an int8 file, in its own unit, and the
                 share of the answers that may change; a file that is no worse than the
                 bundle's own is also allowed
    proof        rows that certify the int8 file; default: those of the evaluator, which
                 chose it
    split, data  the origin of the certificate's rows
    out          a new folder for the tuned bundle; default: in place

    A file must be GAIN faster than the bundle's own to replace it. The bundle is not
    changed before everything is measured. Every form is exported again from the
    weights. Ratios are to the bundle's own fp32 file. Raises DeviceError if the device
    fails, ExportError for a model that cannot be exported.
    """
    bundle = request.bundle
    device = request.device
    say = request.say
    if not request.settings:
        raise ExportError("tune: no settings to race at; expected at least one")
    own = bundle.files()
    with tempfile.TemporaryDirectory(prefix="compress-tune.") as scratch:
        folder = Path(scratch)
        for name in ("fp32", "int8"):
            (folder / name).mkdir()
        say("building fp32 variants")
        most = max(setting.threads for setting in request.settings)
        exact = fp32_variants(_export(bundle, folder), folder / "fp32", threads=most)
        checked = check_exact(bundle, device, exact)
        tried, best = _race(request, checked, checked[0])
        fastest: dict[Precision, Checked] = {"fp32": best}
        kept: Sequence[str] = ()
        if request.evaluator is not None:
            say("building int8 variants")
            kept = list_floats(own["fp32"], own["int8"])
            config = (bundle.path / "config.json").read_text(encoding="utf-8")
            int8 = int8_variants(
                exact,
                folder / "int8",
                keep=kept,
                calibration=request.calibration,
                learned=json.loads(config).get(LEARNED_KEY, {}),
            )
            checked_int8 = check_int8(
                bundle,
                device,
                exact[0],
                int8,
                evaluator=request.evaluator.subsample(TUNING_ROWS),
                max_drop=request.max_drop,
            )
            more, fastest["int8"] = _race(request, checked_int8, checked[0])
            tried += more
        chosen = {
            precision: each.variant
            for precision, each in fastest.items()
            if not each.own
        }
        candidate = bundle.copy_to(folder / "candidate" / bundle.path.name)
        for precision, variant in chosen.items():
            candidate = candidate.put(precision, variant.path)
        if "int8" in chosen:
            proof = request.proof or request.evaluator
            assert proof is not None, "it is tuned with an evaluator only"
            say(f"certifying int8 on {len(proof):,} {request.split} rows")
            claim = Claim(
                chosen["int8"].name,
                request.max_drop,
                request.split,
                request.data,
                tuple(kept),
            )
            certificate = certify(candidate, "int8", proof, device, claim)
            candidate, _ = attach_certificate(candidate, "int8", certificate)
        candidate = candidate.attach_evidence(tuning=tried)
        if request.out is not None:
            return Tuned(candidate.copy_to(request.out), tuple(tried))
        return Tuned(bundle.adopt(candidate, tuple(chosen)), tuple(tried))


@dataclass(frozen=True)
class Checked:
    """A variant after comparing its logits.

    problem  why they are not good enough; '' if they are
    own      whether it is the bundle's present file
    """

    variant: Variant
    difference: float | None
    problem: str
    agreement: float | None = None
    own: bool = False


def check_exact(
    bundle: Bundle,
    device: Device,
    variants: Sequence[Variant],
) -> list[Checked]:
    """Compare the bundle's own file and the variants with the first variant, as traced:
    on the device row by row, and on this machine in a padded batch."""
    traced = variants[0]
    own = Variant("fp32 of the bundle", bundle.files()["fp32"]).with_fused_counts()
    rows = rows_for(traced.path, bundle.manifest.max_length)
    encoded: list[EncodedRow] = [
        {name: array[0].tolist() for name, array in row.items()} for row in rows
    ]
    exact = device.logits(traced.path, encoded)
    longest = max(row["input_ids"].shape[1] for row in rows)
    padded = {
        name: np.concatenate(
            [
                np.pad(row[name], ((0, 0), (0, longest - row[name].shape[1])))
                for row in rows
            ]
        )
        for name in rows[0]
    }
    largest = max(1.0, *(float(np.abs(logits).max()) for logits in exact))
    checked = []
    for variant in (own, *variants):
        try:
            pairs = zip(device.logits(variant.path, encoded), exact, strict=True)
            apart = [
                np.abs(logits - expected).max() / largest for logits, expected in pairs
            ]
        except DeviceError as error:
            # the device cannot run this form; if the device is lost, the race fails too
            checked.append(Checked(variant, None, str(error), own=variant is own))
            continue
        local = difference(
            onnx_run(traced.path), onnx_run(variant.path), [padded]
        ).relative
        most = float(np.max([*apart, local]))  # NaN stays NaN
        problem = (
            ""
            if most <= PARITY
            else f"its logits differ by {most:.2g} of the largest; allowed: {PARITY:g}"
        )
        known = most if isfinite(most) else None
        checked.append(Checked(variant, known, problem, own=variant is own))
    return checked


def check_int8(
    bundle: Bundle,
    device: Device,
    exact: Variant,
    variants: Sequence[Variant],
    *,
    evaluator: "Evaluator",
    max_drop: float,
) -> list[Checked]:
    """Compare the bundle's own file and the variants with fp32, on the device, on the
    rows of the evaluator."""
    expected = compute_logits(device, exact.path, evaluator)

    def compare(variant: Variant) -> ScoreDrop:
        logits = compute_logits(device, variant.path, evaluator)
        return compare_logits(evaluator, expected, logits, threshold=bundle.threshold)

    own = Variant("int8 of the bundle", bundle.files()["int8"]).with_fused_counts()
    present = compare(own)
    checked = [Checked(own, present.difference, "", present.agreement, own=True)]
    for variant in variants:
        try:
            outcome = compare(variant)
        except CompressError as error:
            # it does not run there, or its logits are not finite
            checked.append(Checked(variant, None, str(error)))
            continue
        problem = ""
        no_worse = (
            outcome.drop <= present.drop and outcome.agreement >= present.agreement
        )
        if not no_worse and not outcome.near(max_drop):
            problem = (
                f"loses {100 * outcome.drop:.2f} points and changes "
                f"{100 * (1 - outcome.agreement):.1f} % of the answers; at most "
                f"{100 * max_drop:g} of each are allowed"
            )
        checked.append(Checked(variant, outcome.difference, problem, outcome.agreement))
    return checked


def _export(bundle: Bundle, folder: Path) -> Path:
    """Trace the fp32 file from the weights, at the opset of the bundle's own; every
    form is made from it."""
    from compress.exporters.onnx import to_onnx
    from compress.models.loader import load_model

    own = read_model(bundle.files()["fp32"])
    model = load_model(bundle.path, bundle.task.auto_class()).model
    segments = "token_type_ids" in [node.name for node in own.graph.input]
    traced = folder / "traced.onnx"
    longest = bundle.manifest.max_length
    to_onnx(
        model,
        traced,
        opset=opset_of(own),
        segments=segments,
        form=None,
        max_length=longest,
    )
    return traced


def _race(
    request: TuneRequest,
    checked: Sequence[Checked],
    baseline: Checked,
) -> tuple[list[VariantResult], Checked]:
    """Race the files; return all results and the file to ship: the bundle's own, unless
    another is GAIN faster by the geometric mean. Ratios are to the `baseline`."""
    device = request.device
    passed = [each for each in checked if not each.problem or each.own]
    files = {each.variant.name: each.variant.path for each in (baseline, *passed)}
    request.say(f"racing {len(files)} files on {device.name}")
    times: dict[str, list[Latency]] = {name: [] for name in files}
    for latency in device.race(
        files, request.settings, rounds=TUNING_ROUNDS, runs=TUNING_RUNS
    ):
        times[latency.name].append(latency)
    ratios = {
        name: {
            str(time.setting): time.p50_ms / base.p50_ms
            for time, base in zip(of_file, times[baseline.variant.name], strict=True)
        }
        for name, of_file in times.items()
    }

    def mean(each: Checked) -> float:
        return geometric_mean(ratios[each.variant.name].values())

    own = next(each for each in passed if each.own)
    best = min((each for each in passed if not each.problem), key=mean, default=own)
    chosen = best if mean(best) < (1 - GAIN) * mean(own) else own
    description = describe_device(device.name, device.facts())
    results = []
    for each in checked:
        name = each.variant.name
        own_times = times.get(name, [])
        results.append(
            VariantResult(
                variant=name,
                device=description,
                p50_ms={str(time.setting): time.p50_ms for time in own_times},
                ratio=ratios.get(name, {}),
                difference=each.difference,
                file_mb=each.variant.path.stat().st_size / 1e6,
                passed=not each.problem,
                chosen=each is chosen,
                reason="; ".join(filter(None, (each.problem, each.variant.warning))),
                agreement=each.agreement,
                noisy=any(time.noisy for time in own_times),
                entries=each.variant.entries,
                fused=each.variant.fused,
            )
        )
    return results, chosen
