"""Describe a model to export, and the written files, for the functions that write
formats."""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress import families
from compress.arguments import Share, TokenCount, check_arguments
from compress.errors import ExportError, first_reason
from compress.exporters.artifact import Bundle
from compress.exporters.checkpoint import ExportSource
from compress.exporters.interface import Interface, read_interface
from compress.exporters.manifest import BUNDLE_FILES, Precision
from compress.exporters.predictor import pad
from compress.exporters.rewrite.forms import FORM_KEY, SHIPPED_FORM, Form
from compress.exporters.session import (
    Difference,
    Feeds,
    RunFeeds,
    difference,
    input_names,
    metadata,
    onnx_run,
    read_model,
    rows_for,
)
from compress.progress import Say
from compress.provenance import install_command

if TYPE_CHECKING:
    from compress.data.task import TaskData
    from compress.exporters.int8 import Ranges
    from compress.records.certificate import Certificate, VariantResult

OPSET = WITH_NORM = 17
"""The first opset with LayerNormalization as one operator, which is the one we
write."""


@check_arguments
@dataclass(frozen=True)
class FixedOptions:
    """Options of files with fixed lengths, for NPUs and Core ML.

    lengths   in tokens, for NPUs one file each; empty: the bundle's max_length
    max_drop  the largest loss of score, in its own unit, for NPU files
    """

    lengths: tuple[TokenCount, ...] = ()
    max_drop: Share = 0.005


@dataclass(frozen=True)
class ExportOptions:
    """The options of an export, besides the format.

    name       the user's name of the source; '': its folder
    command    the command that is recorded
    fixed      the options of files with fixed lengths
    load_data  `Bundle.load_data` for the examples: text files are checked on their
               texts, files for NPUs are certified on them; None: there are none
    calibrate  computes the ranges of a bundle's fp32 file, for static int8
    certify    certifies the int8 file of the bundle that a checkpoint is written as
    say        called with progress messages
    """

    name: str = ""
    command: str = ""
    fixed: FixedOptions = FixedOptions()
    load_data: "Callable[..., TaskData] | None" = None
    calibrate: "Callable[[Bundle, Path], Ranges] | None" = None
    certify: Callable[[Bundle], Bundle] = lambda bundle: bundle
    say: Say = lambda _: None


@dataclass(frozen=True)
class ExportedFile:
    """One file of an export.

    file         path inside the folder, with forward slashes; for a model in several
                 files the first one, the others are in `with_files`
    precision    of the weights; `note`: a further remark
    difference   from the fp32 ONNX file's logits on random rows; None for a file that
                 is not a model
    certificate  of the ONNX file it was made from, as JSON; '' if that has none
    proofs       certificates of this file itself, one for each device that ran it
    """

    file: str
    precision: str
    difference: Difference | None
    note: str = ""
    with_files: tuple[str, ...] = ()
    certificate: str = ""
    proofs: "tuple[Certificate, ...]" = ()


@dataclass(frozen=True)
class ExportResult:
    """The files that a format wrote.

    verdicts          sentences about where and how to run it; packages: the ones whose
                      versions are recorded
    interface         of the files, where they are not ONNX
    settings          further values for the templates of `exporters.snippets`
    path, to, sizes   the folder, the format, and the bytes of each file; these, the
                      labels and the titles of the code in the card are filled in by
                      `export`
    tried             the variants that were raced before
    """

    files: tuple[ExportedFile, ...]
    verdicts: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    packages: tuple[str, ...] = ("onnx", "onnxruntime")
    interface: Interface | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    snippets: tuple[str, ...] = ()
    path: Path = Path()
    to: str = "onnx"
    sizes: Mapping[str, int] = field(default_factory=dict)
    tried: "tuple[VariantResult, ...]" = ()


@dataclass(frozen=True)
class ExportContext:
    """The inputs that the writers of all formats share.

    name       the user's name of the source
    bundle     the bundle to export; a checkpoint was written as one
    source     the bundle itself, or the checkpoint
    scratch    a temporary folder
    options    what the user requested, and the data
    remade     ONNX files of another opset, which replace all of the bundle's
    warnings   warnings of the export so far
    """

    name: str
    bundle: Bundle
    source: ExportSource
    scratch: Path
    options: ExportOptions = ExportOptions()
    remade: Mapping[Precision, Path] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @classmethod
    def open(
        cls,
        source: ExportSource,
        scratch: Path,
        *,
        opset: int | None = None,
        options: ExportOptions = ExportOptions(),
    ) -> "ExportContext":
        """Write a checkpoint as a bundle, and export the files again if an opset is
        given."""
        if isinstance(source, Bundle):
            name = options.name or source.path.name
            bundle = source
        else:
            name = source.name
            bundle = source.write(
                scratch / "bundle", opset=OPSET if opset is None else opset
            )
            bundle = options.certify(bundle)
        context = cls(name, bundle, source, scratch, options)
        if opset is None or bundle.manifest.kind != "task":
            return context
        return context._export_at(opset)

    def onnx(self, precision: Precision) -> Path:
        """Return the ONNX file of this precision; make it from the fp32 file if the
        bundle has none."""
        from compress.exporters.fp16 import to_float16
        from compress.exporters.weight_only import quantize_weights

        files = self.remade or self.bundle.files()
        target = files.get(precision, self.scratch / BUNDLE_FILES[precision])
        if precision in files or target.is_file():
            return target
        if precision == "fp16":
            to_float16(files["fp32"], target, self.trial_rows())
        elif precision in ("w8", "q4"):
            quantize_weights(files["fp32"], target, bits=8 if precision == "w8" else 4)
        else:
            raise ExportError(
                f"{self.bundle.path}: has no {precision} file; write it again"
            )
        return target

    def complete(self, precisions: Sequence[Precision]) -> Bundle:
        """Return the bundle if it has files of these precisions, else a temporary copy
        with the missing ones."""
        bundle = self.bundle
        missing = [name for name in precisions if name not in bundle.files()]
        if missing:
            bundle = bundle.copy_to(self.scratch / "complete" / bundle.path.name)
        for precision in missing:
            bundle = bundle.put(precision, self.onnx(precision))
        return bundle

    def interface(self) -> Interface:
        """Read the inputs and outputs of the fp32 file."""
        return read_interface(self.onnx("fp32"))

    def trial_rows(self) -> list[Feeds]:
        """Draw random rows for the fp32 file."""
        return rows_for(self.onnx("fp32"), self.bundle.manifest.max_length)

    def differs(
        self, other: RunFeeds, *, rows: Sequence[Feeds] | None = None
    ) -> Difference:
        """Compare the answers of `other` with those of the fp32 ONNX file."""
        return difference(
            onnx_run(self.onnx("fp32")),
            other,
            self.trial_rows() if rows is None else rows,
        )

    def model(self) -> Any:
        """Load the torch model: float32, eval mode, eager attention, which every
        exporter can read."""
        from compress.exporters.onnx import as_float32
        from compress.models.loader import load_model

        if isinstance(self.source, Bundle):
            model = load_model(self.bundle.path, self.bundle.task.auto_class()).model
        else:
            model = self.source.model
        model = as_float32(model)
        model.set_attn_implementation("eager")
        return model

    def pad_rows(
        self, run: Callable[[Mapping[str, Any]], Sequence[Any]], lengths: Sequence[int]
    ) -> RunFeeds:
        """Pad each row to the shortest of these lengths, in ascending order, before
        `run`; remove the padding's part of outputs that have a value for each token."""
        per_token = [
            "sequence_length" in output.shape for output in self.interface().outputs
        ]

        def padded(row: Feeds) -> list[Any]:
            tokens = row["input_ids"].shape[1]
            length = next(length for length in lengths if length >= tokens)
            outputs = run({name: pad(array, length) for name, array in row.items()})
            return [
                each[:, :tokens] if cut else each
                for each, cut in zip(outputs, per_token, strict=True)
            ]

        return padded

    def as_written(self) -> Path:
        """Return the fp32 ONNX file in the form that `to_onnx` writes: exported again
        from the weights if tuning, or an earlier version, left the bundle's file in
        another form."""
        own = self.onnx("fp32")
        target = self.scratch / "as_written.onnx"
        if self.remade or metadata(read_model(own)).get(FORM_KEY) == str(SHIPPED_FORM):
            return own
        if not target.is_file():
            self.export(self.model(), target, opset=OPSET)
        return target

    def export(
        self, model: Any, target: Path, *, opset: int, form: Form = SHIPPED_FORM
    ) -> None:
        """Export the torch model with the inputs of the fp32 file."""
        from compress.exporters.onnx import to_onnx

        to_onnx(
            model,
            target,
            opset=opset,
            segments="token_type_ids" in input_names(read_model(self.onnx("fp32"))),
            form=form,
            max_length=self.bundle.manifest.max_length,
        )

    @property
    def shortest_text(self) -> int:
        """Return the fewest tokens that the model's family reads."""
        return families.find(self.bundle.manifest.model_type).shortest_text

    def lengths(self) -> list[int]:
        """List the lengths of files with fixed shapes, in tokens, ascending."""
        wanted = sorted(set(self.options.fixed.lengths))
        return wanted or [self.bundle.manifest.max_length]

    def _export_at(self, opset: int) -> "ExportContext":
        """Export fp32 and int8 again from the weights; products that the int8 file left
        in float32 stay in float32."""
        from compress.exporters.int8 import quantize_dynamic
        from compress.exporters.rewrite.graph import list_floats

        made = self.scratch / f"opset{opset}"
        fp32 = made / "model.onnx"
        int8 = made / "model_quantized.onnx"
        self.export(self.model(), fp32, opset=opset)
        quantize_dynamic(
            fp32, int8, keep=list_floats(self.onnx("fp32"), self.onnx("int8"))
        )
        warned = list[str]()
        if not any(
            node.op_type == "DynamicQuantizeLinear"
            for node in read_model(self.onnx("int8")).graph.node
        ):
            warned.append(
                "the bundle's int8 file is static; at another opset it is dynamic "
                "int8, which the bundle was not certified with: quantise it anew with "
                "`compress quantize`"
            )
        if opset < WITH_NORM:
            warned.append(
                f"opset {opset} has no LayerNormalization: it is spelled out in other "
                f"operators, for onnxruntime to find again; {WITH_NORM} and above have "
                "it"
            )
        return replace(
            self, remade={"fp32": fp32, "int8": int8}, warnings=tuple(warned)
        )


Writer = Callable[[ExportContext, Path, Sequence[str]], ExportResult]


def import_extra(module: str, extra: str) -> Any:
    """Import a module of an extra. Raises ExportError if it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ExportError(
            f"{package} is not installed, and this format needs it: "
            f"{install_command(extra)}"
        ) from error


@contextmanager
def converting(context: ExportContext, runtime: str) -> Iterator[None]:
    """Re-raise any error of a runtime's converter as an ExportError that names the
    formats that support every family."""
    try:
        yield
    except (
        RuntimeError,
        TypeError,
        ValueError,
        AttributeError,
        LookupError,
        AssertionError,
    ) as error:
        raise ExportError(
            f"{context.name}: {context.bundle.manifest.model_type} cannot be exported "
            f"to {runtime} ({first_reason(error)}); --for onnx and --for ort take "
            "every family"
        ) from error
