"""A changed ONNX model as a file: whole or not there, with the metadata that still hold, or with a new certificate."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import onnx

from compress.evidence import Certificate
from compress.export.session import metadata, read_model
from compress.files import written

CERTIFICATE_KEY = "compress.certificate"
"""The metadata property that holds a `Certificate` of this very file, as a JSON object."""

MICROSOFT = "com.microsoft"
"""The domain of onnxruntime's own operators."""


def inherited(model: onnx.ModelProto) -> dict[str, str]:
    """The metadata that also hold of a file made of this one: all but the certificate."""
    return {key: value for key, value in metadata(model).items() if key != CERTIFICATE_KEY}


def save_changed(model: onnx.ModelProto, target: Path, entries: Mapping[str, str] | None = None) -> None:
    """Writes a model that is another now than the file it came from, with `entries` among its metadata."""
    _save(model, target, {**inherited(model), **(entries or {})})


def certified(source: Path, target: Path, proof: Certificate) -> None:
    """Writes the ONNX file `source` with its certificate to `target`, which may be `source` itself."""
    model = read_model(source)
    _save(model, target, {**metadata(model), CERTIFICATE_KEY: json.dumps(asdict(proof))})


def certificate(path: Path) -> str:
    """The certificate that an ONNX file carries, as JSON; '' for none."""
    return metadata(read_model(path)).get(CERTIFICATE_KEY, "")


def declare_microsoft(model: onnx.ModelProto) -> None:
    """Lets a model have nodes of onnxruntime's own operators."""
    if all(each.domain != MICROSOFT for each in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid(MICROSOFT, 1))


def _save(model: onnx.ModelProto, target: Path, properties: Mapping[str, str]) -> None:
    onnx.helper.set_model_props(model, dict(properties))
    target.parent.mkdir(parents=True, exist_ok=True)
    with written(target) as partial:
        onnx.save_model(model, partial)
