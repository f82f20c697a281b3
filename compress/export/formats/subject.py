"""What is exported: a bundle, and the files and the model that a format makes its own of."""

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.errors import ExportError
from compress.export.bundle import FILES, Bundle, Precision
from compress.export.session import metadata, read_model
from compress.export.trial import Difference, Row, Run, difference, onnx_run, rows_for

if TYPE_CHECKING:
    from compress.export.predictor import Row as Tokens

CERTIFICATE_KEY = "compress.certificate"
BESIDE = ("config.json", "generation_config.json", "special_tokens_map.json", "added_tokens.json")
TOKENIZER = ("tokenizer*.json", "tokenizer.model", "vocab.txt", "vocab.json", "merges.txt", "spiece.model", "spm.model")
OPSETS = range(12, 24)
"""What torch's TorchScript exporter, onnxruntime and its quantiser all do, for every family (torch 2.13,
onnxruntime 1.31): DeBERTa's graph is invalid below, the exporter ends above."""

WITH_NORM = 17
"""The first opset with LayerNormalization as one operator."""


@dataclass(frozen=True)
class Subject:
    """A bundle while it is exported.

    rows      encoded examples, where there are data: what static int8 is calibrated on
    scratch   a folder for files on the way, gone afterwards
    remade    ONNX files that take the place of all of the bundle's: another opset
    warnings  what there is to say of it already
    """

    bundle: Bundle
    scratch: Path
    rows: "Sequence[Tokens]" = ()
    remade: Mapping[str, Path] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @classmethod
    @contextmanager
    def opened(cls, bundle: Bundle, *, rows: "Sequence[Tokens]" = ()) -> Iterator["Subject"]:
        with tempfile.TemporaryDirectory(prefix="compress-export.") as scratch:
            yield cls(bundle, Path(scratch), rows)

    @property
    def max_length(self) -> int:
        return self.bundle.manifest.max_length

    def onnx(self, precision: Precision) -> Path:
        """The ONNX file of this precision, made of the fp32 one where the bundle has none."""
        from compress.export.half import to_float16
        from compress.export.weight_only import quantize_weights

        known = self.remade or self.bundle.files()
        if precision in known:
            return known[precision]
        made = self.scratch / FILES[precision]
        if made.is_file():
            return made
        if precision == "fp16":
            to_float16(known["fp32"], made, self.trial_rows())
        elif precision in ("w8", "q4"):
            quantize_weights(known["fp32"], made, bits=8 if precision == "w8" else 4)
        else:
            raise ExportError(f"{self.bundle.path}: has no {precision} file; write the bundle again")
        return made

    def per_token(self) -> list[bool]:
        """Of each output, whether it has an answer for every token."""
        outputs = read_model(self.onnx("fp32")).graph.output
        return ["sequence_length" in [size.dim_param for size in each.type.tensor_type.shape.dim] for each in outputs]

    def trial_rows(self) -> list[Row]:
        return rows_for(self.onnx("fp32"), self.max_length)

    def differs(self, other: Run, *, rows: Sequence[Row] | None = None) -> Difference:
        """How far `other` answers from the fp32 ONNX file."""
        return difference(onnx_run(self.onnx("fp32")), other, self.trial_rows() if rows is None else rows)

    def model(self) -> Any:
        """The torch model: float32, eval mode, attention written out as every exporter reads it."""
        from compress.export.onnx import as_float32
        from compress.heads import task_class

        model = as_float32(task_class(self.bundle.task.kind).from_pretrained(self.bundle.path, use_safetensors=True))
        model.set_attn_implementation("eager")
        return model

    def at_opset(self, opset: int) -> "Subject":
        """With fp32 and int8 exported from the weights anew; what the int8 file left in float32 stays so.

        Raises ExportError for an opset that the exporter or onnxruntime cannot do.
        """
        from compress.export.int8 import quantize_dynamic
        from compress.export.onnx import to_onnx

        if opset not in OPSETS:
            raise ExportError(
                f"--opset {opset}: expected {OPSETS[0]} to {OPSETS[-1]}, which torch's exporter and "
                "onnxruntime can both do"
            )
        fp32, int8 = (self.scratch / f"opset{opset}" / name for name in ("model.onnx", "model_quantized.onnx"))
        inputs = [each.name for each in read_model(self.onnx("fp32")).graph.input]
        to_onnx(self.model(), fp32, opset=opset, segments="token_type_ids" in inputs)
        quantize_dynamic(fp32, int8, keep=_kept(self.onnx("fp32"), self.onnx("int8")))
        warned = [*self.warnings]
        if not any(node.op_type == "DynamicQuantizeLinear" for node in read_model(self.onnx("int8")).graph.node):
            warned.append(
                "the bundle's int8 file is static; at another opset it is dynamic int8, which the bundle was not "
                "certified with: quantise it anew with `compress quantize`"
            )
        if opset < WITH_NORM:
            warned.append(
                f"opset {opset} has no LayerNormalization: it is spelled out in other operators, for onnxruntime to "
                f"find again; {WITH_NORM} and above have it"
            )
        return replace(self, remade={"fp32": fp32, "int8": int8}, warnings=tuple(warned))


def copy_tokenizer(source: Path, folder: Path) -> None:
    """The tokenizer's files and the config, beside the model. Raises ExportError where there is no tokenizer."""
    if not (source / "tokenizer.json").is_file():
        raise ExportError(
            f"{source}: has no tokenizer.json, without which nobody can feed the exported model; write the bundle "
            "again, or save the tokenizer there: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    for pattern in (*BESIDE, *TOKENIZER):
        for path in source.glob(pattern):
            shutil.copyfile(path, folder / path.name)


def certificate(path: Path) -> str:
    """The certificate that an ONNX file carries, as JSON; '' for none."""
    return metadata(read_model(path)).get(CERTIFICATE_KEY, "")


def _kept(fp32: Path, int8: Path) -> list[str]:
    """Products with constant weights that the int8 file computes in float32."""
    graph = read_model(fp32).graph
    weights = {each.name for each in graph.initializer}
    exact = {node.name for node in read_model(int8).graph.node if node.op_type == "MatMul"}
    return [node.name for node in graph.node if node.name in exact and node.input[1] in weights]
