"""Read and open ONNX files: their metadata, vocabulary and session options; compare the
answers of two files.

The one place that decides session options: prediction, parity and latency races all use
`SESSION_OPTIONS` and `session_entries`. Imports onnx and onnxruntime only (0.2 s),
neither torch nor transformers.
"""

import copy
import io
import json
import logging
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import onnx
import onnxruntime
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # protobuf ships no types
from onnxruntime.capi import onnxruntime_pybind11_state as runtime

from compress.arrays import Floats, Longs
from compress.errors import ExportError, first_reason, shorten
from compress.io import atomic_file, parse_json
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
"""Session settings that a file may choose, as they only say how to compute. Others name
folders and files to read or write."""

SESSION_KEY = "compress.session"
"""The metadata property that holds, as a JSON object, the session configuration entries
that the file asks for."""
SESSION_WHY_KEY = "compress.session.why"
CERTIFICATE_KEY = "compress.certificate"
"""The metadata property that holds the `Certificate` of this very file, as a JSON
object."""
MICROSOFT = "com.microsoft"
"""The domain of onnxruntime's contrib operators."""

UNFUSED_SKIP = {
    "optimization.disable_specified_optimizers": (
        "SkipLayerNormFusion;BiasSkipLayerNormFusion"
    )
}
UNFUSED_SKIP_WHY = (
    "On the CPU, onnxruntime's SkipLayerNormalization costs about 4x the Add + "
    "LayerNormalization it replaces: int8, 6 layers x 384, 128 tokens, 1 thread, "
    "x86-64 with VNNI, onnxruntime 1.31: 6.6 ms fused, 5.6 ms not. Not measured on ARM."
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
"""The errors of onnxruntime for a file that it cannot run; they share no base class."""

SESSION_OPTIONS: Mapping[str, int] = {
    "inter_op_num_threads": 1,
    "log_severity_level": 4,
}
"""Attributes of SessionOptions for every CPU session, on other machines too
(`benchmark.jobs`). Level 4 logs only fatal errors: all others are raised as
exceptions."""


def read_model(path: Path) -> onnx.ModelProto:
    """Parse an ONNX file, with the weights that it keeps in other files of its folder;
    a node without a name gets its output's.

    Raises ExportError for a file that is missing or not ONNX, and for one that points
    outside its folder.
    """
    model = _parse(path)
    if _find_weights(model, path):
        try:
            onnx.load_external_data_for_model(model, str(path.parent))
        except (onnx.checker.ValidationError, ValueError) as error:
            raise ExportError(
                f"{path}: the weights it keeps in other files cannot be read "
                f"({first_reason(error)}); copy them again"
            ) from None
    for node in model.graph.node:
        node.name = node.name or node.output[0]
    return model


def input_names(model: onnx.ModelProto) -> list[str]:
    """List the inputs that a file needs, without those that have a default."""
    optional = {tensor.name for tensor in model.graph.initializer}
    return [each.name for each in model.graph.input if each.name not in optional]


def expose(model: onnx.ModelProto, names: Iterable[str]) -> onnx.ModelProto:
    """Copy a model, with these tensors as outputs too."""
    exposed = copy.deepcopy(model)
    outputs = {each.name for each in exposed.graph.output}
    exposed.graph.output.extend(
        onnx.ValueInfoProto(name=name) for name in names if name not in outputs
    )
    return exposed


def weights_elsewhere(path: Path) -> list[str]:
    """List the other files of its folder in which an ONNX file keeps weights. Raises
    the errors of `read_model`."""
    return _find_weights(_parse(path), path)


def _parse(path: Path) -> onnx.ModelProto:
    if not path.is_file():
        raise ExportError(f"{path}: no such file; expected an ONNX model")
    try:
        model = onnx.load_model(path, load_external_data=False)
        problem = "it has no ONNX version"
    except DecodeError as error:
        model = onnx.ModelProto()
        problem = shorten(str(error))
    # random bytes may decode to a message without these
    if not model.ir_version or not model.opset_import:
        raise ExportError(
            f"{path}: not an ONNX model, or a truncated one ({problem}); write or copy "
            "it again"
        )
    newest = onnx.defs.onnx_opset_version()
    opset = max(
        (each.version for each in model.opset_import if each.domain in ("", "ai.onnx")),
        default=0,
    )
    if opset > newest:
        raise ExportError(
            f"{path}: is of opset {opset}, and onnx {onnx.__version__} supports "
            f"{newest} at most; export it again at an older one (17 runs everywhere), "
            "or install newer versions of onnx and onnxruntime"
        )
    return model


def _find_weights(model: onnx.ModelProto, path: Path) -> list[str]:
    """List the other files in which the file at `path` keeps weights, by their names in
    its folder.

    Raises ExportError for a name that is absolute, above the folder, reached through a
    link that leads out of it, missing, or shorter than the weights it should hold.
    """
    names = set[str]()
    folder = path.parent.resolve()
    for tensor in _list_tensors(model):
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        place = {entry.key: entry.value for entry in tensor.external_data}
        name = place.get("location", "")
        strange = (
            not name
            or "\0" in name
            or PurePosixPath(name).is_absolute()
            or PureWindowsPath(name).drive
        )
        if (
            strange
            or ".." in PureWindowsPath(name).parts
            or not (folder / name).resolve().is_relative_to(folder)
        ):
            raise ExportError(
                f"{path}: keeps the weight {tensor.name!r} in {name!r}, outside its "
                "own folder; nothing was read from there. If you trust it, move its "
                "weights into the folder of the file"
            )
        if not (folder / name).is_file():
            raise ExportError(
                f"{path}: keeps the weight {tensor.name!r} in {name!r}, which is "
                "missing; copy it too"
            )
        size = (folder / name).stat().st_size
        try:
            start = int(place.get("offset", 0))
            length = int(place.get("length", 0))
        except ValueError:
            start = -1
            length = 0
        if min(start, length) < 0 or start + length > size:
            raise ExportError(
                f"{path}: the weight {tensor.name!r} should be at "
                f"{place.get('offset', 0)} + {place.get('length', 0)} bytes of "
                f"{name!r}, which has {size}; the file is damaged or cut short: copy "
                "it again"
            )
        names.add(name)
    return sorted(names)


def _list_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield every tensor of the file, including tensors of branches, loops and
    functions."""
    graphs = [model.graph]
    nodes = [node for function in model.functions for node in function.node]
    while graphs or nodes:
        for graph in graphs:
            yield from graph.initializer
            nodes += graph.node
        attributes = [attribute for node in nodes for attribute in node.attribute]
        sparse = [each for graph in graphs for each in graph.sparse_initializer]
        for attribute in attributes:
            yield from (attribute.t, *attribute.tensors)
            sparse += (attribute.sparse_tensor, *attribute.sparse_tensors)
        for each in sparse:
            yield from (each.values, each.indices)
        graphs = [
            graph
            for attribute in attributes
            for graph in (attribute.g, *attribute.graphs)
        ]
        nodes = []


def opset_of(model: onnx.ModelProto) -> int:
    """Return the opset version of ONNX's standard operators."""
    return next(
        each.version for each in model.opset_import if each.domain in ("", "ai.onnx")
    )


def check_opset(model: onnx.ModelProto, path: Path, least: int, use: str) -> None:
    """Raise ExportError for a file of an older opset than its use needs."""
    if (own := opset_of(model)) < least:
        raise ExportError(
            f"{path}: is of opset {own}; {use} needs {least} or newer: export the "
            f"model again with --opset {least}"
        )


def metadata(model: onnx.ModelProto) -> dict[str, str]:
    """Read the metadata properties of a model."""
    return {entry.key: entry.value for entry in model.metadata_props}


def session_entries(
    model: onnx.ModelProto, path: Path = Path("the ONNX file")
) -> dict[str, str]:
    """Read the session configuration entries that the file asks for; {} for files of
    other tools.

    Raises ExportError for malformed entries, and for entries that would do more than
    choose how to compute.
    """
    try:
        entries = json.loads(metadata(model).get(SESSION_KEY, "{}"))
    except json.JSONDecodeError:
        entries = None
    if not isinstance(entries, dict) or not all(
        isinstance(value, str) for value in entries.values()
    ):
        raise ExportError(
            f"{path}: its session settings are not an object of strings; the file is "
            "damaged, or not ours"
        )
    for name in entries:
        if name not in HARMLESS and not name.startswith(HARMLESS_PREFIXES):
            raise ExportError(
                f"{path}: asks for the session setting {name!r}, which no file may "
                "choose; not opened"
            )
    return entries


def session_options(
    threads: int, entries: Mapping[str, str]
) -> onnxruntime.SessionOptions:
    """Build the options of a CPU session: `threads` within an operator (0: as many as
    onnxruntime chooses), and the settings `entries` that the file asks for."""
    options = onnxruntime.SessionOptions()
    for name, value in {**SESSION_OPTIONS, "intra_op_num_threads": threads}.items():
        setattr(options, name, value)
    for key, entry in entries.items():
        options.add_session_config_entry(key, entry)
    return options


def open_session(path: Path, threads: int = 0) -> onnxruntime.InferenceSession:
    """Open a CPU session with the options that the file asks for; with `threads` 0,
    onnxruntime chooses their number.

    Raises the errors of `read_model` and `session_entries`, and ExportError for a file
    that onnxruntime cannot run.
    """
    model = _parse(path)
    _find_weights(model, path)
    return create_session(
        path, session_options(threads, session_entries(model, path)), path
    )


def create_session(
    file: Path | bytes, options: onnxruntime.SessionOptions, named: Path, **more: Any
) -> onnxruntime.InferenceSession:
    """Create a CPU session. Raises ExportError, which names `named`, for a file that
    onnxruntime cannot run."""
    try:
        return onnxruntime.InferenceSession(
            file, options, providers=["CPUExecutionProvider"], **more
        )
    except UNOPENED as error:
        reason = runtime_reason(error)
        raise ExportError(
            f"{named}: onnxruntime {onnxruntime.__version__} cannot open it: {reason}"
        ) from error


def runtime_reason(error: BaseException) -> str:
    """Return onnxruntime's error for a file that it cannot open or run, in one line and
    without the file's name."""
    message = re.sub(
        r"^\[ONNXRuntimeError\] : \d+ : (\w+) : (?:Load model from .*? failed: ?)?",
        r"\1: ",
        str(error),
    )
    return shorten(message)


@contextmanager
def quiet_logging(level: int) -> Iterator[None]:
    """Drop log records up to this level, by which onnxruntime's tools report their
    progress."""
    before = logging.root.manager.disable
    logging.disable(level)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def quiet() -> Iterator[None]:
    """Drop warnings, log records up to warnings, and everything written to standard
    output and error, including by C++ libraries. Exceptions are not affected."""
    _flush_streams()
    kept = dict[int, int]()
    for number in (1, 2):
        with suppress(OSError):  # closed, as in a service
            kept[number] = os.dup(number)
    try:
        with (
            tempfile.TemporaryFile() as dropped,
            redirect_stdout(io.StringIO()),
            redirect_stderr(io.StringIO()),
            warnings.catch_warnings(action="ignore"),
            quiet_logging(logging.WARNING),
        ):
            for number in kept:
                os.dup2(dropped.fileno(), number)
            yield
    finally:
        _flush_streams()
        for number, original in kept.items():
            os.dup2(original, number)
            os.close(original)


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def vocabulary_size(model: onnx.ModelProto, path: Path) -> int:
    """Count the token ids of the model: the rows of the table that `input_ids` looks
    up.

    If there is no such table, use `vocab_size` of the config.json in the folder of the
    file, or one folder up.
    """
    tables = token_tables(model.graph)
    rows = [table.dims[0] for table in model.graph.initializer if table.name in tables]
    if size := rows[0] if rows else read_vocabulary_size(path):
        return size
    raise ExportError(
        f"{path}: no table is looked up by an input named input_ids, and no "
        "config.json beside it gives vocab_size; expected the ONNX file of a text "
        "encoder. Put its config.json into the same folder."
    )


def token_tables(graph: onnx.GraphProto) -> set[str]:
    """Find the constants with a row per token: constants read by the nodes that read
    the ids, whole or split up by quantisation, with as many rows as the largest of
    them."""
    constants = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    writers = {node.output[0]: node for node in graph.node}
    ids = {"input_ids"}
    found: dict[str, int] = {}
    for node in graph.node:
        if (
            node.op_type in ("Cast", "Identity", "Reshape", "Slice", "Transpose")
            and node.input[0] in ids
        ):
            ids.add(node.output[0])
        elif node.op_type in (
            "Gather",
            "GatherBlockQuantized",
            "EmbedLayerNormalization",
        ) and ids & set(node.input):
            read = list(
                node.input[2:3]
                if node.op_type == "EmbedLayerNormalization"
                else node.input
            )
            for name in read:
                if name in writers and writers[name].op_type in (
                    "DequantizeLinear",
                    "Cast",
                    "Identity",
                ):
                    read += writers[name].input
            found |= {name: constants[name][0] for name in read if constants.get(name)}
    rows = max(found.values(), default=0)
    return {name for name, size in found.items() if size == rows}


def read_vocabulary_size(path: Path) -> int | None:
    """Read `vocab_size` of the config.json in the folder of the file, or one folder up;
    None if there is none."""
    for config in (path.parent / "config.json", path.parent.parent / "config.json"):
        if config.is_file() and (size := parse_json(config).get("vocab_size")):
            return int(size)
    return None


def inherit_metadata(model: onnx.ModelProto) -> dict[str, str]:
    """Return the metadata that are also valid for a file made from this one: all but
    the certificate."""
    return {
        key: value for key, value in metadata(model).items() if key != CERTIFICATE_KEY
    }


def save_changed(
    model: onnx.ModelProto, target: Path, entries: Mapping[str, str] | None = None
) -> None:
    """Save a changed model, with `entries` in its metadata and without its
    certificate."""
    if any(node.domain == MICROSOFT for node in model.graph.node):
        declare_microsoft(model)
    _save(model, target, {**inherit_metadata(model), **(entries or {})})


def save_certified(source: Path, target: Path, proof: Certificate) -> None:
    """Write the ONNX file `source` with its certificate to `target`, which may be
    `source` itself."""
    model = read_model(source)
    _save(
        model, target, {**metadata(model), CERTIFICATE_KEY: json.dumps(asdict(proof))}
    )


def read_certificate(path: Path) -> str:
    """Read the certificate in an ONNX file, as JSON; '' if it has none."""
    return metadata(read_model(path)).get(CERTIFICATE_KEY, "")


def declare_microsoft(model: onnx.ModelProto) -> None:
    """Declare the domain of onnxruntime's contrib operators in a model."""
    if all(each.domain != MICROSOFT for each in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid(MICROSOFT, 1))


def _save(model: onnx.ModelProto, target: Path, properties: Mapping[str, str]) -> None:
    onnx.helper.set_model_props(model, dict(properties))
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(target) as partial:
        onnx.save_model(model, partial)


SETTLED_LENGTHS = (2, 3, 7, 16, 33, 64, 100, 128)
LONGEST_ROW = 512
"""The most tokens of a row on which another file is compared with the fp32 file: long
rows reveal errors of windows and positions."""

PROMPT_LENGTH = "prompt_length"
"""The name of an optional input of a sentence encoder's file, and of the column of rows
that it reads: how many tokens a prompt takes at the beginning, by default 0."""

EncodedRow = Mapping[str, Any]
"""One encoded text: input_ids, attention_mask and, if the model has segments,
token_type_ids, with a number per token; and prompt_length, one number, if a prompt is
left out of the vector."""

Feeds = Mapping[str, Longs]
"""One row, without padding, as a session reads it: input name -> (1, tokens)."""

RunFeeds = Callable[[Feeds], Sequence[Floats]]
"""Run a row: return the arrays of the fp32 file's outputs, in its order, (1, ...)."""


@dataclass(frozen=True)
class Difference:
    """The largest |logit - fp32's logit| over rows; `logit`: the largest |logit| of
    fp32 on these rows."""

    largest: float
    logit: float
    rows: int

    @property
    def relative(self) -> float:
        """Divide by the largest logit, or by 1."""
        return self.largest / max(1.0, self.logit)


def rows_for(path: Path, max_length: int) -> list[Feeds]:
    """Draw reproducible rows of random tokens, of up to `max_length` or LONGEST_ROW
    tokens, with the inputs of the ONNX file at `path`. The second half of each row is
    the second text of a pair.

    Raises ExportError for a file that is not a text encoder.
    """
    model = read_model(path)
    names = input_names(model)
    vocabulary = vocabulary_size(model, path)
    draw = np.random.default_rng(0)
    rows: list[Feeds] = []
    longest = min(max_length, LONGEST_ROW)
    for length in sorted(
        {longest, *(length for length in SETTLED_LENGTHS if length <= longest)}
    ):
        ids = draw.integers(0, vocabulary, (1, length))
        segments = np.arange(length)[None] * 2 // length
        known = {
            "input_ids": ids,
            "attention_mask": np.ones_like(ids),
            "token_type_ids": segments,
        }
        if unknown := [name for name in names if name not in known]:
            raise ExportError(
                f"{path}: reads {', '.join(unknown)}; expected a text encoder's file, "
                f"which reads {', '.join(known)}"
            )
        rows.append({name: known[name] for name in names})
    return rows


def onnx_run(path: Path) -> RunFeeds:
    """Open the file in onnxruntime, on the CPU, with one thread, and return the
    function that runs a row."""
    session = open_session(path, threads=1)
    return lambda row: session.run(None, dict(row))


def difference(exact: RunFeeds, other: RunFeeds, rows: Sequence[Feeds]) -> Difference:
    """Compare the answers of `other` with the exact ones; NaN if any logit of `other`
    is NaN."""
    apart = []
    sizes = []
    for row in rows:
        for expected, found in zip(exact(row), other(row), strict=True):
            with np.errstate(invalid="ignore"):  # inf - inf
                apart.append(np.abs(np.asarray(found, np.float32) - expected).max())
            sizes.append(np.abs(expected).max())
    return Difference(float(np.max(apart)), float(np.max(sizes)), len(rows))
