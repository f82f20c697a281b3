"""Build the files that one model can be: forms of its graph, session settings, ways to int8; `tune` races them."""

import json
import logging
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import ModelProto

from compress.errors import ExportError
from compress.exporters.int8 import quantize_dynamic, quantize_learned, quantize_static
from compress.exporters.rewrite import PLAIN, Form, rewrite_graph
from compress.exporters.rewrite.attention import collapse
from compress.exporters.rewrite.graph import Graph, find_writer, products
from compress.exporters.session import (
    SESSION_KEY,
    SESSION_WHY_KEY,
    UNFUSED_SKIP,
    UNFUSED_SKIP_WHY,
    create_session,
    declare_microsoft,
    metadata,
    quiet_logging,
    read_model,
    session_entries,
    session_options,
)
from compress.quantization.calibration import choose_ranges, observe

if TYPE_CHECKING:
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
