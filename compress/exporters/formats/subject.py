"""What is exported: the files and the model that a format makes its own of, whatever they were given as."""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.errors import ExportError
from compress.exporters.artifact import FILES, Bundle
from compress.exporters.parity import Difference, Row, Run, difference, onnx_run, rows_for
from compress.exporters.rewrite import FORM_KEY, SHIPPED
from compress.exporters.session import metadata, read_model

if TYPE_CHECKING:
    from compress.data.task import TaskData
    from compress.exporters.checkpoint import Encoder, Headed, Shipped
    from compress.exporters.int8 import Ranges

BESIDE = ("config.json", "generation_config.json", "special_tokens_map.json", "added_tokens.json")
TOKENIZER = ("tokenizer*.json", "tokenizer.model", "vocab.txt", "vocab.json", "merges.txt", "spiece.model", "spm.model")
OPSETS = range(12, 24)
"""What torch's TorchScript exporter, onnxruntime and its quantiser all do, for every family (torch 2.13,
onnxruntime 1.31): DeBERTa's graph is invalid below, the exporter ends above."""

OPSET = WITH_NORM = 17
"""The first opset with LayerNormalization as one operator is the one we write."""


@dataclass(frozen=True)
class Subject:
    """A bundle, or a folder of embeddings, while it is exported.

    name       what the user called it; folder: where its config, tokenizer and ONNX files are
    bundle     the folder as a bundle; none of embeddings
    files      its ONNX files by precision
    load       the torch model
    load_data  loads examples of the task; calibrate: finds the ranges of an fp32 file; none where there are no data
    scratch    a folder for files on the way, gone afterwards
    remade     ONNX files that take the place of all of the folder's: another opset
    warnings   what there is to say of it already
    """

    name: str
    folder: Path
    bundle: Bundle | None
    files: Mapping[str, Path]
    max_length: int
    model_type: str
    load: Callable[[], Any]
    scratch: Path
    load_data: "Callable[[Bundle], TaskData] | None" = None
    calibrate: "Callable[[Bundle, Path], Ranges] | None" = None
    remade: Mapping[str, Path] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @classmethod
    @contextmanager
    def opened(
        cls,
        source: "Shipped | Headed | Encoder",
        *,
        opset: int | None,
        load_data: "Callable[[Bundle], TaskData] | None" = None,
        calibrate: "Callable[[Bundle, Path], Ranges] | None" = None,
    ) -> Iterator["Subject"]:
        """A checkpoint is first written as what it becomes. Raises ExportError for an opset that cannot be."""
        from compress.exporters.checkpoint import Encoder, Shipped

        if opset is not None and opset not in OPSETS:
            raise ExportError(
                f"--opset {opset}: expected {OPSETS[0]} to {OPSETS[-1]}, which torch's exporter and onnxruntime can "
                "both do"
            )
        with tempfile.TemporaryDirectory(prefix="compress-export.") as kept:
            scratch = Path(kept)
            if isinstance(source, Encoder):
                yield cls._of_encoder(source, scratch, opset)
                return
            load: Callable[[], Any]
            if isinstance(source, Shipped):
                bundle = source.bundle
                load = partial(_loaded, bundle)
            else:
                bundle = source.write(scratch / "bundle")
                load = partial(getattr, source, "model")
            made = bundle.manifest
            subject = cls(
                source.name,
                bundle.path,
                bundle,
                bundle.files(),
                made.max_length,
                made.model_type,
                load,
                scratch,
                load_data,
                calibrate,
            )
            yield subject if opset is None else subject._at(opset)

    @classmethod
    def _of_encoder(cls, source: "Encoder", scratch: Path, opset: int | None) -> "Subject":
        from compress.exporters import embeddings
        from compress.exporters.onnx import Pooled

        made = source.write(scratch / "embeddings", opset=OPSET if opset is None else opset)
        files = {precision: made.path / name for precision, name in embeddings.FILES.items()}
        about = made.contents
        return cls(
            source.name,
            made.path,
            None,
            files,
            about.max_length,
            about.model_type,
            lambda: Pooled(source.model, source.reading),
            scratch,
        )

    def onnx(self, precision: str) -> Path:
        """The ONNX file of this precision, one of FILES, made of the fp32 one where the folder has none."""
        from compress.exporters.fp16 import to_float16
        from compress.exporters.weight_only import quantize_weights

        known = self.remade or self.files
        if precision in known:
            return known[precision]
        made = self.scratch / name_of(precision)
        if made.is_file():
            return made
        if precision == "fp16":
            to_float16(known["fp32"], made, self.trial_rows())
        elif precision in ("w8", "q4"):
            quantize_weights(known["fp32"], made, bits=8 if precision == "w8" else 4)
        else:
            raise ExportError(f"{self.folder}: has no {precision} file; write it again")
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
        from compress.exporters.onnx import as_float32

        model = as_float32(self.load())
        model.set_attn_implementation("eager")
        return model

    def as_written(self) -> Path:
        """The fp32 ONNX file in the form that `to_onnx` writes: exported from the weights anew where tuning, or an
        earlier version, left the folder's own in another one."""
        own = self.onnx("fp32")
        if self.remade or metadata(read_model(own)).get(FORM_KEY) == str(SHIPPED):
            return own
        made = self.scratch / "as_written.onnx"
        if not made.is_file():
            self._export(made, OPSET)
        return made

    def _export(self, target: Path, opset: int) -> None:
        from compress.exporters.onnx import to_onnx

        inputs = [each.name for each in read_model(self.onnx("fp32")).graph.input]
        to_onnx(self.model(), target, opset=opset, segments="token_type_ids" in inputs)

    def _at(self, opset: int) -> "Subject":
        """With fp32 and int8 exported from the weights anew; what the int8 file left in float32 stays so."""
        from compress.exporters.int8 import quantize_dynamic
        from compress.exporters.rewrite.products import left_in_float

        fp32, int8 = (self.scratch / f"opset{opset}" / name for name in ("model.onnx", "model_quantized.onnx"))
        self._export(fp32, opset)
        quantize_dynamic(fp32, int8, keep=left_in_float(self.onnx("fp32"), self.onnx("int8")))
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


def name_of(precision: str) -> str:
    """The name of the ONNX file of a precision, one of FILES."""
    known: Mapping[str, str] = FILES  # type: ignore[assignment]  # by any string
    return known[precision]


def _loaded(bundle: Bundle) -> Any:
    from compress.models.heads import task_class

    return task_class(bundle.task.kind).from_pretrained(bundle.path, use_safetensors=True)


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
