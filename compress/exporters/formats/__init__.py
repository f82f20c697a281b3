"""Export a model for another runtime. A format is a function, named in `WRITERS`:

    write_openvino(context, folder, precisions) -> ExportResult

`export` does the rest for all of them: it writes the folder as a whole, with the
tokenizer and an `export.json` that says what each file is, how much its answers differ
from fp32's, and what made it.
"""

import importlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from compress.errors import ExportError, did_you_mean, first_reason
from compress.exporters import manifest
from compress.exporters.artifact import FILES, Bundle, Precision, check_writable
from compress.exporters.card import export_card
from compress.exporters.checkpoint import Checkpoint, Source
from compress.exporters.manifest import Stamp
from compress.exporters.predictor import pad
from compress.exporters.rewrite import FORM_KEY, SHIPPED
from compress.exporters.session import (
    Difference,
    Feeds,
    Run,
    difference,
    metadata,
    onnx_run,
    read_model,
    rows_for,
)
from compress.io import atomic_folder
from compress.models.checkpoints import describe_origin
from compress.outputs import check_output_folder
from compress.provenance import install_command, versions

if TYPE_CHECKING:
    from compress.data.task import TaskData
    from compress.exporters.int8 import Ranges
    from compress.records.certificate import Certificate, VariantResult

Format = Literal[
    "onnx",
    "ort",
    "web",
    "text",
    "openvino",
    "executorch",
    "litert",
    "npu",
    "coreml",
    "coreai",
]
FORMATS: tuple[Format, ...] = get_args(Format)
WRITERS: Mapping[Format, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "onnx": ("onnxruntime", tuple(FILES), ("fp32", "int8")),
    "ort": ("onnxruntime", tuple(FILES), ("fp32", "int8")),
    "web": ("onnxruntime", tuple(FILES), ("int8", "fp16")),
    "text": ("onnxruntime", tuple(FILES), ("int8",)),
    "openvino": ("openvino", ("fp32", "fp16", "w8", "int8"), ("fp16", "w8")),
    "executorch": ("mobile", ("fp32", "int8"), ("fp32", "int8")),
    "litert": ("mobile", ("fp32", "int8", "w8"), ("fp32", "int8")),
    "npu": ("", ("w8a16", "w8a8"), ("w8a16",)),
    "coreml": ("apple", ("fp32", "fp16", "w8", "p6", "p4"), ("fp16", "w8")),
    "coreai": ("apple", ("fp32", "fp16", "w8", "p6", "p4"), ("fp16", "w8")),
}
"""The module of `write_<format>` ('': the caller of `export` passes that function,
which needs higher packages), the precisions that it can write, and those that it writes
by default."""
NAME = "export.json"
BESIDE = (
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
TOKENIZER = (
    "tokenizer*.json",
    "tokenizer.model",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "spm.model",
)
OPSETS = range(12, 24)
"""The opsets that torch's TorchScript exporter, onnxruntime and its quantiser support
for every family (torch 2.13, onnxruntime 1.31): DeBERTa's graph is invalid below, the
exporter ends above."""

OPSET = WITH_NORM = 17
"""The first opset with LayerNormalization as one operator, which is the one we
write."""
FAR = 0.1
"""The share of the largest logit beyond which a difference is warned of."""


@dataclass(frozen=True)
class ExportedFile:
    """One file of an export.

    file         path inside the folder, with forward slashes; of a model in several
                 files the first, the others are in `with_files`
    precision    of the weights; `note`: what else there is to say of it
    difference   from the fp32 ONNX file's logits on made-up rows; None for a file that
                 is not a model
    certificate  of the ONNX file it was made of, as JSON; '' where that has none
    proofs       certificates of this file itself, one for each place where it was run
    """

    file: str
    precision: str
    difference: Difference | None
    note: str = ""
    with_files: tuple[str, ...] = ()
    certificate: str = ""
    proofs: "tuple[Certificate, ...]" = ()


Writer = Callable[["ExportContext", Path, Sequence[str]], "ExportResult"]


@dataclass(frozen=True)
class ExportResult:
    """The files that a format wrote.

    verdicts          sentences on where and how to run it; packages: those whose
                      versions are recorded
    code              opens a file in its runtime, where the line of `card.RUNTIMES`
                      does not
    path, to, sizes   the folder, the format, and the bytes of each file: filled in by
                      `export`
    tried             the variants that were raced before
    """

    files: tuple[ExportedFile, ...]
    verdicts: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    packages: tuple[str, ...] = ("onnx", "onnxruntime")
    code: str = ""
    path: Path = Path()
    to: Format = "onnx"
    sizes: Mapping[str, int] = field(default_factory=dict)
    tried: "tuple[VariantResult, ...]" = ()


def export(
    source: Source,
    out: Path | None,
    *,
    to: Format = "onnx",
    precisions: Sequence[str] = (),
    opset: int | None = None,
    name: str = "",
    load_data: "Callable[[Bundle], TaskData] | None" = None,
    calibrate: "Callable[[Bundle, Path], Ranges] | None" = None,
    command: str = "",
    writer: Writer | None = None,
) -> ExportResult:
    """Write `source` for another runtime into the folder `out`, or, for `onnx`, into
    the bundle itself.

    precisions   of the weights; by default those of the format
    opset        export ONNX from the weights, at this opset; None: use the bundle's own
                 files
    name         the user's name of the source; '': its folder
    load_data    loads examples of a bundle's task, on whose texts a text file is
                 checked
    calibrate    computes the ranges of a bundle's fp32 file, for static int8
    command      the command that is recorded
    writer       the function that writes the format, where WRITERS has none

    Raises ExportError for an unsupported precision or opset, a missing extra, a model
    that this format cannot hold, or a file whose answers are not the model's; nothing
    is left then.
    """
    write, chosen = check(source, out, to=to, precisions=precisions, opset=opset)
    with ExitStack() as stack:
        scratch = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="compress-export."))
        )
        context = ExportContext.open(source, scratch, name=name, opset=opset)
        context = replace(context, load_data=load_data, calibrate=calibrate)
        folder = (
            context.bundle.path
            if out is None
            else stack.enter_context(atomic_folder(out))
        )
        result: ExportResult = (writer or write)(context, folder, chosen)
        # the first copies all files, the second has the tokenizer in its graph
        if to not in ("onnx", "text"):
            copy_tokenizer(context.bundle.path, folder)
        names = [
            name for each in result.files for name in (each.file, *each.with_files)
        ]
        far = [
            f"{each.file}: logits differ from fp32's by up to {found.largest:.2g} "
            f"where the largest is {found.logit:.2g}, on {found.rows} rows of random "
            "tokens; score it on real data before it ships"
            for each in result.files
            if (found := each.difference) is not None and not found.relative <= FAR
        ]
        result = replace(
            result,
            path=context.bundle.path if out is None else out,
            to=to,
            sizes={name: (folder / name).stat().st_size for name in names},
            warnings=(*context.warnings, *result.warnings, *far),
        )
        record = _as_record(result, folder, context, command)
        text = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
        if manifest.is_bundle(folder):
            Bundle.load(folder).attach(NAME, text)
        else:
            task, origin = (
                context.bundle.manifest.task,
                describe_origin("", context.bundle.path),
            )
            (folder / NAME).write_text(text, encoding="utf-8")
            card = export_card(record, origin, task, code=result.code)
            (folder / "README.md").write_text(card, encoding="utf-8")
    return result


def check(
    source: Source,
    out: Path | None,
    *,
    to: Format,
    precisions: Sequence[str],
    opset: int | None,
) -> tuple[Any, list[Precision]]:
    """Raise ExportError for an unsupported format, precision or opset, or an unusable
    folder; return the function that writes the format, and the precisions to write."""
    if to not in FORMATS:
        raise ExportError(f"--for {to}: no such format.{did_you_mean(to, FORMATS)}")
    module, supported, defaults = WRITERS[to]
    chosen: list[Any] = list(dict.fromkeys(precisions or defaults))
    for precision in chosen:
        if precision not in supported:
            raise ExportError(
                f"--precision {precision}: --for {to} writes {', '.join(supported)}"
            )
    if opset is not None and opset not in OPSETS:
        raise ExportError(
            f"--opset {opset}: expected {OPSETS[0]} to {OPSETS[-1]}, which torch's "
            "exporter and onnxruntime support"
        )
    if (
        isinstance(source, Checkpoint)
        and source.kind == "generative"
        and (to != "onnx" or precisions or out is None)
    ):
        raise ExportError(
            f"{source.name}: is a generative model, which is exported as ONNX in fp32 "
            "and int8 only; expected --for onnx, --out and no --precision"
        )
    if leaves_out_prompts(source) and WRITERS[to][0] != "onnxruntime":
        raise ExportError(
            f"--for {to}: include_prompt is false in the Pooling of this model, so "
            "that its vectors leave the prompt out, which only files for onnxruntime "
            "can do; expected --for onnx, ort, web or text"
        )
    if out is not None:
        _check_free(out, to, source)
    elif to == "onnx" and opset is None and isinstance(source, Bundle):
        check_writable(source.path)
    else:
        raise ExportError(
            "expected --out with the folder to write: only new precisions go into the "
            "bundle itself"
        )
    write = (
        getattr(importlib.import_module(f"{__name__}.{module}"), f"write_{to}")
        if module
        else None
    )
    return write, chosen


def leaves_out_prompts(source: Source) -> bool:
    """Check whether a model leaves the tokens of prompts out of its vectors."""
    if isinstance(source, Bundle):
        return source.leaves_out_prompts
    return source.sentence is not None and source.sentence.leaves_out_prompts


def _check_free(out: Path, to: Format, source: Source) -> None:
    """Raise ExportError where the export would replace the model itself, or anything
    that is not an export; OutputError where no folder can be written."""
    check_output_folder(out, "out")
    origin = source.path if isinstance(source, Bundle) else Path(source.name)
    if origin.exists() and origin.resolve().is_relative_to(out.resolve()):
        raise ExportError(
            f"--out {out}: contains the model itself, which the export would replace; "
            "expected another folder"
        )
    if to != "onnx" and manifest.is_bundle(out):
        raise ExportError(
            f"--out {out}: is a bundle, which --for {to} does not write; expected a "
            "new folder"
        )
    ours = manifest.is_bundle(out) or (out / NAME).is_file()
    if out.is_dir() and any(out.iterdir()) and not ours:
        raise ExportError(
            f"{out}: exists and is not an export; expected a new folder, or an export "
            "to replace"
        )


def _as_record(
    result: ExportResult, folder: Path, context: "ExportContext", command: str
) -> dict[str, Any]:
    files = []
    for each in result.files:
        for name in (each.file, *each.with_files):
            fields = (
                asdict(each) if name == each.file else {"precision": each.precision}
            )
            fields = {
                key: value
                for key, value in fields.items()
                if key not in ("file", "with_files") and value
            }
            if "certificate" in fields:
                fields["certificate"] = json.loads(fields["certificate"])
            if "proofs" in fields:
                fields["certificates"] = fields.pop("proofs")
            files.append({"file": name, **asdict(Stamp.of(folder / name)), **fields})
    return {
        "format": 1,
        "for": result.to,
        "source": Path(context.name).name or context.name,
        "model_type": context.bundle.manifest.model_type,
        "max_length": context.bundle.manifest.max_length,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "versions": versions(("compress", "torch", "transformers", *result.packages)),
        "files": files,
        "verdicts": result.verdicts,
        "warnings": result.warnings,
    }


@dataclass(frozen=True)
class ExportContext:
    """Hold what the writers of all formats share.

    name       the user's name of the source
    bundle     the bundle to export; a checkpoint was written as one
    source     the bundle itself, or the checkpoint
    scratch    a temporary folder
    load_data  loads examples of the task; calibrate: computes the ranges of an fp32
               file; None where there are no data
    remade     ONNX files of another opset, in place of all of the bundle's
    warnings   warnings of the export so far
    """

    name: str
    bundle: Bundle
    source: Source
    scratch: Path
    load_data: "Callable[[Bundle], TaskData] | None" = None
    calibrate: "Callable[[Bundle, Path], Ranges] | None" = None
    remade: Mapping[Precision, Path] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @classmethod
    def open(
        cls, source: Source, scratch: Path, *, name: str, opset: int | None
    ) -> "ExportContext":
        """Write a checkpoint as a bundle, and export the files again where an opset is
        given."""
        if isinstance(source, Bundle):
            bundle, name = source, name or source.path.name
        else:
            bundle, name = (
                source.write(
                    scratch / "bundle", opset=OPSET if opset is None else opset
                ),
                source.name,
            )
        context = cls(name, bundle, source, scratch)
        return (
            context
            if opset is None or bundle.manifest.kind != "task"
            else context._export_at(opset)
        )

    def onnx(self, precision: Precision) -> Path:
        """Return the ONNX file of this precision; make it from the fp32 file where the
        bundle has none."""
        from compress.exporters.fp16 import to_float16
        from compress.exporters.weight_only import quantize_weights

        files = self.remade or self.bundle.files()
        target = files.get(precision, self.scratch / FILES[precision])
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

    def trial_rows(self) -> list[Feeds]:
        """Draw random rows for the fp32 file."""
        return rows_for(self.onnx("fp32"), self.bundle.manifest.max_length)

    def differs(self, other: Run, *, rows: Sequence[Feeds] | None = None) -> Difference:
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
        from compress.models.heads import task_class
        from compress.models.loader import load_model

        if isinstance(self.source, Bundle):
            model = load_model(
                self.bundle.path, task_class(self.bundle.task.kind)
            ).model
        else:
            model = self.source.model
        model = as_float32(model)
        model.set_attn_implementation("eager")
        return model

    def pad_rows(
        self, run: Callable[[Mapping[str, Any]], Sequence[Any]], lengths: Sequence[int]
    ) -> Run:
        """Pad each row to the shortest of these lengths, in ascending order, before
        `run`; remove the padding's part of outputs that have a value for each token."""
        per_token = [
            "sequence_length"
            in [size.dim_param for size in each.type.tensor_type.shape.dim]
            for each in read_model(self.onnx("fp32")).graph.output
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
        from the weights where tuning, or an earlier version, left the bundle's own file
        in another form."""
        own, target = self.onnx("fp32"), self.scratch / "as_written.onnx"
        if self.remade or metadata(read_model(own)).get(FORM_KEY) == str(SHIPPED):
            return own
        if not target.is_file():
            self._export(target, OPSET)
        return target

    def _export(self, target: Path, opset: int) -> None:
        from compress.exporters.onnx import to_onnx

        inputs = [each.name for each in read_model(self.onnx("fp32")).graph.input]
        longest = self.bundle.manifest.max_length
        to_onnx(
            self.model(),
            target,
            opset=opset,
            segments="token_type_ids" in inputs,
            max_length=longest,
        )

    def _export_at(self, opset: int) -> "ExportContext":
        """Export fp32 and int8 again from the weights; what the int8 file left in
        float32 stays so."""
        from compress.exporters.int8 import quantize_dynamic
        from compress.exporters.rewrite.graph import list_floats

        fp32, int8 = (
            self.scratch / f"opset{opset}" / name
            for name in ("model.onnx", "model_quantized.onnx")
        )
        self._export(fp32, opset)
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


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer's files and the config to the exported model. Raises
    ExportError for a missing tokenizer."""
    if not (source / "tokenizer.json").is_file():
        raise ExportError(
            f"{source}: has no tokenizer.json, which the exported model needs; write "
            "the bundle again, or save the tokenizer there: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    for pattern in (*BESIDE, *TOKENIZER):
        for path in source.glob(pattern):
            shutil.copyfile(path, folder / path.name)


def import_extra(module: str, extra: str) -> Any:
    """Import a module of an extra. Raises ExportError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ExportError(
            f"{package} is not installed; expected it for this format: "
            f"{install_command(extra)}"
        ) from error


@contextmanager
def converting(context: ExportContext, runtime: str) -> Iterator[None]:
    """Re-raise any error of a runtime's converter as an ExportError that names the
    formats that take every family."""
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
