"""Build the job of a runner (file, runtime, session options), and check files and
settings before a measurement."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import GraphProto, TensorProto

from compress.benchmark.arguments import RUNTIME_CHOICES
from compress.benchmark.remote.runner import INPUTS
from compress.errors import ExportError
from compress.exporters.session import (
    PROMPT_LENGTH,
    SESSION_OPTIONS,
    EncodedRow,
    read_model,
    read_vocabulary_size,
    session_entries,
    vocabulary_size,
    weights_elsewhere,
)
from compress.exporters.tokenizer.text_model import read_proof
from compress.io import JsonObject, parse_json
from compress.records.latency import WARM_UP, DeviceError, Setting

SIDECAR = ".session.json"
"""`model.xml` is opened with the OpenVINO properties in `model.session.json`:
{"INFERENCE_PRECISION_HINT": "f32"}."""


def timing_job(path: Path) -> JsonObject:
    """Build the job that times a file. Raises ExportError if it reads neither token ids
    nor texts."""
    job = _open_job(path)
    model = read_model(path) if path.suffix == ".onnx" else None
    if model is not None and any(
        node.type.tensor_type.elem_type == TensorProto.STRING
        for node in model.graph.input
    ):
        if not (words := read_proof(path).words):
            raise ExportError(
                f"{path}: lists no words to time it with; write it again with: "
                "compress export --for text"
            )
        return {**job, "words": words}
    size = read_vocabulary_size(path) if model is None else vocabulary_size(model, path)
    if not size:
        raise ExportError(
            f"{path}: vocab_size is unknown. Put the model's config.json into the same "
            "folder"
        )
    return {**job, "vocabulary": size}


def logits_job(path: Path) -> JsonObject:
    """Build the job that computes the logits of rows."""
    if path.suffix not in (".onnx", ".xml"):
        raise ExportError(
            f"{path}: logits are computed for .onnx and .xml files only; a "
            f"{path.suffix} file can only be timed"
        )
    return _open_job(path)


def _open_job(path: Path) -> JsonObject:
    # the session entries of an .ort file took effect when it was written
    entries: dict[str, str] = {}
    if path.suffix == ".onnx":
        entries = session_entries(read_model(path))
    elif path.suffix == ".xml":
        entries = _read_properties(path)
    elif not path.is_file():
        raise ExportError(f"{path}: no such file; expected an exported model")
    return {
        "runtime": RUNTIME_CHOICES[path.suffix],
        "options": dict(SESSION_OPTIONS),
        "entries": entries,
        "warm_up": WARM_UP,
        "threads": 1,
    }


def check_settings(
    device: str,
    cores: str,
    files: Mapping[str, Path],
    settings: Sequence[Setting],
) -> None:
    """Raise DeviceError for more threads than the device has cores, or more tokens than
    a file has positions.

    `cores`: the number of CPUs, then any text, as `Device.facts` reports it; '' if
    unknown.
    """
    count = cores.partition(" ")[0]
    most = max(setting.threads for setting in settings)
    if count.isdecimal() and most > int(count):
        raise DeviceError(
            f"--threads {most}: {device} has {count} CPUs to use; expected at most "
            f"{count}"
        )
    longest = max(setting.seq for setting in settings)
    for name, path in files.items():
        graph = read_model(path).graph if path.suffix == ".onnx" else GraphProto()
        rows = (
            tensor.dims[0]
            for tensor in graph.initializer
            if "position_embeddings" in tensor.name and len(tensor.dims) == 2
        )
        # no table if positions are relative
        limit = min(rows, default=longest)
        if longest > limit:
            raise DeviceError(
                f"--seq {longest}: {name} has {limit} positions; expected at most "
                f"{limit}"
            )


def refuse_prompt_length(row: EncodedRow, name: str) -> None:
    """Raise DeviceError for a row of a model whose vectors leave prompts out, on a
    device that cannot do that."""
    if PROMPT_LENGTH in row:
        raise DeviceError(
            f"{name}: include_prompt is false in the Pooling of this model, so that "
            "its vectors leave the prompt out, which this device cannot do; use "
            "--device local or ssh"
        )


def input_types(path: Path) -> dict[str, Any]:
    """Return the numpy types of an ONNX file's inputs, by name. Raises DeviceError if
    it is not a text encoder."""
    graph = read_model(path).graph
    # old files list these among the inputs
    constants = {tensor.name for tensor in graph.initializer}
    types = {
        node.name: node.type.tensor_type.elem_type
        for node in graph.input
        if node.name not in constants
    }
    if unknown := sorted(types.keys() - set(INPUTS)):
        raise DeviceError(
            f"{path}: inputs {', '.join(unknown)} are not among {', '.join(INPUTS)}; "
            "expected the ONNX file of a text encoder"
        )
    return {
        name: np.int32 if dtype == TensorProto.INT32 else np.int64
        for name, dtype in types.items()
    }


def parts(path: Path) -> list[Path]:
    """List the files of a model, `path` first, then those of its weights, which are in
    its folder."""
    if path.suffix == ".xml":
        return [path, path.with_suffix(".bin")]
    weights = weights_elsewhere(path) if path.suffix == ".onnx" else []
    return [path, *(path.parent / name for name in weights)]


def _read_properties(path: Path) -> dict[str, str]:
    """Read the OpenVINO properties beside a model; {} if there are none."""
    for part in parts(path):
        if not part.is_file():
            raise ExportError(
                f"{part}: no such file; expected an OpenVINO model, an .xml with a "
                ".bin beside it"
            )
    sidecar = path.with_suffix(SIDECAR)
    if not sidecar.is_file():
        return {}
    try:
        properties = parse_json(sidecar)
    except json.JSONDecodeError as error:
        raise ExportError(f"{sidecar}: not JSON ({error})") from None
    if not isinstance(properties, dict):
        raise ExportError(
            f"{sidecar}: expected an object of OpenVINO properties, such as "
            '{"INFERENCE_PRECISION_HINT": "f32"}'
        )
    return {str(key): str(value) for key, value in properties.items()}
