"""Read and open ONNX files: their metadata, vocabulary and session options; and compare the answers of two.

The one place that decides session options: prediction, parity and the latency race all come through
`SESSION_OPTIONS` and `session_entries`. Imports onnx and onnxruntime only (0.2 s), neither torch nor transformers.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import onnx
import onnxruntime
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # protobuf ships no types
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as runtime

from compress.errors import ExportError
from compress.io import atomic_file
from compress.records.certificate import Certificate

HARMLESS_PREFIXES = ("optimization.", "mlas.")
HARMLESS = frozenset(
    {
        "session.disable_double_qdq_remover",
        "session.disable_prepacking",
        "session.disable_quant_qdq",
        "session.dynamic_block_base",
        "session.enable_quant_qdq_cleanup",
        "session.force_spinning_stop",
        "session.inter_op.allow_spinning",
        "session.intra_op.allow_spinning",
        "session.intra_op_thread_affinities",
        "session.qdqisint8allowed",
        "session.set_denormal_as_zero",
        "session.use_device_allocator_for_initializers",
        "session.x64quantprecision",
    }
)
"""Session settings that a file may ask for: how to compute. Others name folders and files to read or to write."""


def check_weights(model: onnx.ModelProto, path: Path) -> list[str]:
    """List the other files in which the file at `path` keeps weights, by their names in its folder.

    Raises ExportError for a name that is absolute, above the folder, reached through a link that leads out of it,
    missing, or shorter than the weights it should hold.
    """
    elsewhere = [tensor for tensor in _tensors(model) if tensor.data_location == onnx.TensorProto.EXTERNAL]
    return sorted({_check(tensor, path) for tensor in elsewhere})


def _check(tensor: onnx.TensorProto, path: Path) -> str:
    told = {entry.key: entry.value for entry in tensor.external_data}
    name, folder = told.get("location", ""), path.parent.resolve()
    strange = not name or "\0" in name or PurePosixPath(name).is_absolute() or PureWindowsPath(name).drive
    if strange or ".." in PureWindowsPath(name).parts or not (folder / name).resolve().is_relative_to(folder):
        raise ExportError(
            f"{path}: keeps the weight {tensor.name!r} in {name!r}, outside its own folder; nothing was read from "
            "there. If you trust it, put its weights beside it"
        )
    if not (folder / name).is_file():
        raise ExportError(f"{path}: keeps the weight {tensor.name!r} in {name!r}, which is missing; copy it beside it")
    size = (folder / name).stat().st_size
    try:
        start, length = int(told.get("offset", 0)), int(told.get("length", 0))
    except ValueError:
        start, length = -1, 0
    if min(start, length) < 0 or start + length > size:
        raise ExportError(
            f"{path}: the weight {tensor.name!r} should be at {told.get('offset', 0)} + {told.get('length', 0)} bytes "
            f"of {name!r}, which has {size}; the file is damaged or cut short: copy it again"
        )
    return name


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield every tensor of the file, those of branches, loops and functions too."""
    graphs = [model.graph]
    nodes = [node for function in model.functions for node in function.node]
    while graphs or nodes:
        for graph in graphs:
            yield from graph.initializer
            nodes += graph.node
        attributes = [attribute for node in nodes for attribute in node.attribute]
        sparse = [each for graph in graphs for each in graph.sparse_initializer]
        sparse += [each for attribute in attributes for each in (attribute.sparse_tensor, *attribute.sparse_tensors)]
        for attribute in attributes:
            yield from (attribute.t, *attribute.tensors)
        for each in sparse:
            yield from (each.values, each.indices)
        graphs, nodes = [graph for attribute in attributes for graph in (attribute.g, *attribute.graphs)], []


SESSION_KEY = "compress.session"
"""The metadata property that holds, as a JSON object, the session configuration entries the file wants."""

SESSION_WHY_KEY = "compress.session.why"

UNFUSED_SKIP = {"optimization.disable_specified_optimizers": "SkipLayerNormFusion;BiasSkipLayerNormFusion"}
UNFUSED_SKIP_WHY = (
    "On the CPU, onnxruntime's SkipLayerNormalization costs about 4x the Add + LayerNormalization it replaces: int8, "
    "6 layers x 384, 128 tokens, 1 thread, x86-64 with VNNI, onnxruntime 1.31: 6.6 ms fused, 5.6 ms not. "
    "Not measured on ARM."
)

UNOPENED = (
    runtime.EPFail,
    runtime.Fail,
    runtime.InvalidArgument,
    runtime.InvalidGraph,
    runtime.InvalidProtobuf,
    runtime.NoModel,
    runtime.NoSuchFile,
    runtime.NotImplemented,
    runtime.RuntimeException,
)
"""The errors of onnxruntime for a file it cannot run; they have no parent in common."""


def opset_of(model: onnx.ModelProto) -> int:
    """Return the version of ONNX's own operators."""
    return next(each.version for each in model.opset_import if each.domain in ("", "ai.onnx"))


def read_model(path: Path) -> onnx.ModelProto:
    """Parse the file, with the weights that it keeps in other files of its folder.

    Raises ExportError when it is missing or no ONNX file, and when it would have anything outside its folder read.
    """
    model = _parse(path)
    if check_weights(model, path):
        try:
            onnx.load_external_data_for_model(model, str(path.parent))
        except (onnx.checker.ValidationError, ValueError) as error:
            raise ExportError(f"{path}: the weights it keeps in other files cannot be read: {error}") from None
    return model


def weights_elsewhere(path: Path) -> list[str]:
    """List the other files of its folder in which an ONNX file keeps weights. Raises as `read_model` does."""
    return check_weights(_parse(path), path)


def metadata(model: onnx.ModelProto) -> dict[str, str]:
    """Read the properties that a model carries."""
    return {entry.key: entry.value for entry in model.metadata_props}


def session_entries(model: onnx.ModelProto, path: Path = Path("the ONNX file")) -> dict[str, str]:
    """Read the session configuration entries that the file asks for; none for a file that is not ours.

    Raises ExportError for entries that are none, or that would do more than choose how to compute.
    """
    try:
        entries = json.loads(metadata(model).get(SESSION_KEY, "{}"))
    except json.JSONDecodeError:
        entries = None
    if not isinstance(entries, dict) or not all(isinstance(value, str) for value in entries.values()):
        raise ExportError(f"{path}: its session settings are no names with texts; the file is damaged, or not ours")
    for name in entries:
        if name not in HARMLESS and not name.startswith(HARMLESS_PREFIXES):
            raise ExportError(
                f"{path}: asks for the session setting {name!r}, which is none that a file may choose; it is not opened"
            )
    return entries


SESSION_OPTIONS: Mapping[str, int] = {"inter_op_num_threads": 1, "log_severity_level": 4}
"""Attributes of SessionOptions that every CPU session gets, on other machines too (`benchmark.jobs`). Level 4 logs only
what is fatal: errors are raised, so there is no need to print them as well."""


def session_options(threads: int, entries: Mapping[str, str]) -> onnxruntime.SessionOptions:
    """Build the options of a CPU session: `threads` within an operator (0 leaves their number to onnxruntime), and the
    settings `entries` that the file asks for."""
    options = onnxruntime.SessionOptions()
    for name, value in {**SESSION_OPTIONS, "intra_op_num_threads": threads}.items():
        setattr(options, name, value)
    for key, entry in entries.items():
        options.add_session_config_entry(key, entry)
    return options


def open_session(path: Path, threads: int = 0) -> onnxruntime.InferenceSession:
    """Open a CPU session with the options the file asks for; `threads` 0 leaves their number to onnxruntime.

    Raises ExportError as `read_model` and `session_entries` do, and for a file that onnxruntime cannot run.
    """
    model = _parse(path)
    check_weights(model, path)
    return create_session(path, session_options(threads, session_entries(model, path)), path)


def create_session(
    file: Path, options: onnxruntime.SessionOptions, named: Path, **more: Any
) -> onnxruntime.InferenceSession:
    """Create a CPU session. Raises ExportError, which names `named`, for a file that onnxruntime cannot run."""
    try:
        return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"], **more)
    except UNOPENED as error:
        told = " ".join(str(error).split())
        raise ExportError(f"{named}: onnxruntime {onnxruntime.__version__} cannot open it: {told}") from None


@contextmanager
def quiet_logging(level: int) -> Iterator[None]:
    """Drop log records up to this level, by which onnxruntime's tools report their progress."""
    before = logging.root.manager.disable
    logging.disable(level)
    try:
        yield
    finally:
        logging.disable(before)


def _parse(path: Path) -> onnx.ModelProto:
    if not path.is_file():
        raise ExportError(f"{path}: no such file; expected an ONNX model")
    try:
        model = onnx.load_model(path, load_external_data=False)
    except DecodeError as error:
        raise ExportError(f"{path}: not an ONNX model, or a truncated one ({error}); write or copy it again") from None
    if not model.ir_version or not model.opset_import:  # any bytes may happen to be a message without these
        raise ExportError(
            f"{path}: not an ONNX model, or a truncated one (it names no version of ONNX); write or copy it again"
        )
    newest = onnx.defs.onnx_opset_version()
    if (
        own := max((each.version for each in model.opset_import if each.domain in ("", "ai.onnx")), default=0)
    ) > newest:
        raise ExportError(
            f"{path}: is of opset {own}, and onnx {onnx.__version__} knows none above {newest}; export it anew at an "
            "older one (17 runs everywhere), or install newer versions of onnx and onnxruntime"
        )
    return model


def vocabulary_size(model: onnx.ModelProto, path: Path) -> int:
    """Count the token ids that the model knows: the rows of the table that `input_ids` looks up.

    Where the ids take another way, `vocab_size` of the config.json beside the file, or one folder up, decides.
    """
    tables = token_tables(model.graph)
    if rows := [table.dims[0] for table in model.graph.initializer if table.name in tables]:
        return rows[0]
    if size := read_vocabulary_size(path):
        return size
    raise ExportError(
        f"{path}: no table is looked up by an input named input_ids, and no config.json beside it gives vocab_size; "
        "expected the ONNX file of a text encoder. Put its config.json into the same folder."
    )


def token_tables(graph: onnx.GraphProto) -> set[str]:
    """Find the constants with a row per token: those that nodes reading the ids read too, whole or taken apart for
    being quantised, with as many rows as the largest of them."""
    constants = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    made = {node.output[0]: node for node in graph.node}
    ids = {"input_ids"}
    found: dict[str, int] = {}
    for node in graph.node:
        if node.op_type in ("Cast", "Identity", "Slice") and node.input[0] in ids:
            ids.add(node.output[0])
        elif node.op_type in ("Gather", "GatherBlockQuantized", "EmbedLayerNormalization") and ids & set(node.input):
            read = list(node.input[2:3] if node.op_type == "EmbedLayerNormalization" else node.input)
            for name in read:
                if name in made and made[name].op_type in ("DequantizeLinear", "Cast", "Identity"):
                    read += made[name].input
            found |= {name: constants[name][0] for name in read if constants.get(name)}
    rows = max(found.values(), default=0)
    return {name for name, size in found.items() if size == rows}


def read_vocabulary_size(path: Path) -> int | None:
    """Read `vocab_size` of the config.json beside the file, or one folder up; None where there is none."""
    for config in (path.parent / "config.json", path.parent.parent / "config.json"):
        if config.is_file() and (size := json.loads(config.read_text(encoding="utf-8")).get("vocab_size")):
            return int(size)
    return None


CERTIFICATE_KEY = "compress.certificate"
"""The metadata property that holds a `Certificate` of this very file, as a JSON object."""

MICROSOFT = "com.microsoft"
"""The domain of onnxruntime's own operators."""


def inherit_metadata(model: onnx.ModelProto) -> dict[str, str]:
    """Return the metadata that also hold of a file made of this one: all but the certificate."""
    return {key: value for key, value in metadata(model).items() if key != CERTIFICATE_KEY}


def save_changed(model: onnx.ModelProto, target: Path, entries: Mapping[str, str] | None = None) -> None:
    """Save a model that is another now than the file it came from, with `entries` among its metadata."""
    _save(model, target, {**inherit_metadata(model), **(entries or {})})


def certified(source: Path, target: Path, proof: Certificate) -> None:
    """Write the ONNX file `source` with its certificate to `target`, which may be `source` itself."""
    model = read_model(source)
    _save(model, target, {**metadata(model), CERTIFICATE_KEY: json.dumps(asdict(proof))})


def certificate(path: Path) -> str:
    """Return the certificate that an ONNX file carries, as JSON; '' for none."""
    return metadata(read_model(path)).get(CERTIFICATE_KEY, "")


def declare_microsoft(model: onnx.ModelProto) -> None:
    """Declare the domain of onnxruntime's own operators in a model."""
    if all(each.domain != MICROSOFT for each in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid(MICROSOFT, 1))


def _save(model: onnx.ModelProto, target: Path, properties: Mapping[str, str]) -> None:
    onnx.helper.set_model_props(model, dict(properties))
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(target) as partial:
        onnx.save_model(model, partial)


LENGTHS = (2, 3, 7, 16, 33, 64, 100, 128)
SEGMENTS = "token_type_ids"

EncodedRow = Mapping[str, Sequence[int]]
"""One encoded text: input_ids, attention_mask and, where the model has segments, token_type_ids."""

Feeds = Mapping[str, NDArray[np.int64]]
"""One row, without padding, as a session takes it: input name -> (1, tokens)."""

Run = Callable[[Feeds], Sequence[NDArray[np.float32]]]
"""A function that answers a row: the arrays of the fp32 file's outputs, in its order, (1, ...)."""


@dataclass(frozen=True)
class Difference:
    """The largest |logit - fp32's logit| over rows; `logit`: the largest |logit| of fp32 there."""

    largest: float
    logit: float
    rows: int

    @property
    def relative(self) -> float:
        """Divide by the largest logit, or by 1."""
        return self.largest / max(1.0, self.logit)


def rows_for(path: Path, max_length: int) -> list[Feeds]:
    """Make rows of random tokens, the same each time, of up to `max_length` tokens, with the inputs that the ONNX file
    `path` has; of two segments where it has them. Raises ExportError where it is no text encoder's."""
    model = read_model(path)
    names = [each.name for each in model.graph.input]
    vocabulary, draw = vocabulary_size(model, path), np.random.default_rng(0)
    rows: list[Feeds] = []
    for length in LENGTHS:
        if length > max_length:
            break
        ids = draw.integers(0, vocabulary, (1, length))
        known = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        known[SEGMENTS] = np.arange(length)[None] * 2 // length
        if unknown := [name for name in names if name not in known]:
            raise ExportError(
                f"{path}: reads {', '.join(unknown)}; expected a text encoder's file, which reads {', '.join(known)}"
            )
        rows.append({name: known[name] for name in names})
    return rows


def onnx_run(path: Path) -> Run:
    """Open the file in onnxruntime, on the CPU, with one thread."""
    session = open_session(path, threads=1)
    return lambda row: session.run(None, dict(row))


def difference(exact: Run, other: Run, rows: Sequence[Feeds]) -> Difference:
    """Compare the answers of `other` with the exact ones; NaN when any logit of `other` is."""
    apart, sizes = [], []
    for row in rows:
        for one, two in zip(exact(row), other(row), strict=True):
            with np.errstate(invalid="ignore"):  # inf - inf
                apart.append(np.abs(np.asarray(two, np.float32) - one).max())
            sizes.append(np.abs(one).max())
    return Difference(float(np.max(apart)), float(np.max(sizes)), len(rows))
