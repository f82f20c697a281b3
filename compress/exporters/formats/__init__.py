"""Export a model for another runtime. A format is a function, named in `WRITERS`:

    write_openvino(context, folder, precisions) -> ExportResult

`export` gives all of them the same frame: the folder is whole or not there, has the tokenizer, and an `export.json`
that says what each file is, how far its answers are from fp32's, and what made it.
"""

import importlib
import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from compress.errors import ExportError, did_you_mean
from compress.exporters import manifest
from compress.exporters.artifact import FILES, Bundle, Precision, check_writable
from compress.exporters.card import export_card
from compress.exporters.checkpoint import Checkpoint, Source
from compress.exporters.manifest import Stamp
from compress.exporters.rewrite import FORM_KEY, SHIPPED
from compress.exporters.session import Difference, Feeds, Run, difference, metadata, onnx_run, read_model, rows_for
from compress.io import atomic_folder
from compress.models.checkpoints import describe_origin
from compress.provenance import install_command, versions

if TYPE_CHECKING:
    from compress.data.task import TaskData
    from compress.exporters.int8 import Ranges
    from compress.records.certificate import Certificate, VariantResult

Format = Literal["onnx", "ort", "web", "text", "openvino", "executorch", "litert", "npu", "coreml"]
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
    "coreml": ("apple", ("fp32", "fp16", "w8"), ("fp16", "w8")),
}
"""The module that has `write_<format>` ('': whoever exports gives that function, which needs more than exporters have),
the precisions that it can write, and those that it writes unless asked."""
NAME = "export.json"
BESIDE = ("config.json", "generation_config.json", "special_tokens_map.json", "added_tokens.json")
TOKENIZER = ("tokenizer*.json", "tokenizer.model", "vocab.txt", "vocab.json", "merges.txt", "spiece.model", "spm.model")
OPSETS = range(12, 24)
"""The opsets that torch's TorchScript exporter, onnxruntime and its quantiser all do, for every family (torch 2.13,
onnxruntime 1.31): DeBERTa's graph is invalid below, the exporter ends above."""

OPSET = WITH_NORM = 17
"""The first opset with LayerNormalization as one operator is the one we write."""
FAR = 0.1
"""A largest difference beyond this share of the largest logit is warned of."""


@dataclass(frozen=True)
class ExportedFile:
    """One file of an export.

    file         path inside the folder, with forward slashes; a model in two files is named by the first, the other
                 is in `with_files`
    precision    of the weights; `note`: what it is, where that does not say it all
    difference   from the fp32 ONNX file's logits on made-up rows; none of a file that is no model
    certificate  of the ONNX file it was made of, as JSON, where that carries one
    proofs       certificates of this file itself, of each place where it was run
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
    """The files that a format wrote; verdicts are sentences on where and how to run it, packages those whose versions
    matter.

    code              opens a file in its runtime, where a line that is the same for all does not
    path, to, sizes   the folder, the format, and the bytes of each file: filled in by `export`
    tried             what was raced before
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
    """Write `source` for another runtime into the folder `out`, or, for `onnx`, into the bundle itself.

    precisions   what the weights are held in; the format's own choice where none is given
    opset        ONNX anew from the weights, at this opset; none: the bundle's own files
    name         what the user called the source; '': by its folder
    load_data    loads examples of a bundle's task, whose texts a text file is checked on
    calibrate    finds the ranges of a bundle's fp32 file, for static int8
    command      what is written down as the command that did it
    writer       the function that writes the format, where WRITERS has none

    Raises ExportError for a precision or opset that cannot be, a missing extra, a model that this format cannot hold,
    or a file whose answers are not the model's; nothing is left then.
    """
    write, chosen = check(source, out, to=to, precisions=precisions, opset=opset)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="compress-export.")))
        context = ExportContext.open(source, scratch, name=name, opset=opset, load_data=load_data, calibrate=calibrate)
        folder = context.bundle.path if out is None else stack.enter_context(atomic_folder(out))
        result: ExportResult = (writer or write)(context, folder, chosen)
        if to not in ("onnx", "text"):  # which copies all there is, and has it inside
            copy_tokenizer(context.bundle.path, folder)
        names = [name for each in result.files for name in (each.file, *each.with_files)]
        far = [
            f"{each.file}: logits differ from fp32's by up to {apart.largest:.2g} where the largest is "
            f"{apart.logit:.2g}, on {apart.rows} rows of random tokens; score it on real data before it ships"
            for each in result.files
            if (apart := each.difference) is not None and not apart.relative <= FAR
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
            task, origin = context.bundle.manifest.task, describe_origin("", context.bundle.path)
            (folder / NAME).write_text(text, encoding="utf-8")
            card = export_card(record, origin, task, code=result.code)
            (folder / "README.md").write_text(card, encoding="utf-8")
    return result


def check(
    source: Source, out: Path | None, *, to: Format, precisions: Sequence[str], opset: int | None
) -> tuple[Any, list[Precision]]:
    """Raise ExportError for a format, precision, opset or folder that cannot be; return the function that writes the
    format, and the precisions that it is to write."""
    if to not in FORMATS:
        raise ExportError(f"--for {to}: no such format.{did_you_mean(to, FORMATS)}")
    module, able, usual = WRITERS[to]
    chosen: list[Any] = list(dict.fromkeys(precisions or usual))
    for precision in chosen:
        if precision not in able:
            raise ExportError(f"--precision {precision}: --for {to} writes {', '.join(able)}")
    if opset is not None and opset not in OPSETS:
        raise ExportError(
            f"--opset {opset}: expected {OPSETS[0]} to {OPSETS[-1]}, which torch's exporter and onnxruntime can both do"
        )
    if isinstance(source, Checkpoint) and source.kind == "generative" and (to != "onnx" or precisions or out is None):
        raise ExportError(
            f"{source.name}: writes text, and is exported as ONNX in fp32 and int8 only; expected --for onnx, --out "
            "and no --precision"
        )
    if out is not None:
        _check_free(out, to, source)
    elif to == "onnx" and opset is None and isinstance(source, Bundle):
        check_writable(source.path)
    else:
        raise ExportError("expected --out with the folder to write: only new precisions go into a bundle itself")
    write = getattr(importlib.import_module(f"{__name__}.{module}"), f"write_{to}") if module else None
    return write, chosen


def _check_free(out: Path, to: Format, source: Source) -> None:
    """Raise ExportError where something is that is no export, and that the export would take the place of."""
    origin = source.path if isinstance(source, Bundle) else Path(source.name)
    if origin.exists() and origin.resolve().is_relative_to(out.resolve()):
        raise ExportError(
            f"--out {out}: holds the model itself, which the export would replace; expected another folder"
        )
    if to != "onnx" and manifest.is_bundle(out):
        raise ExportError(f"--out {out}: is a bundle, and --for {to} writes none; expected a new folder")
    ours = manifest.is_bundle(out) or (out / NAME).is_file()
    if (out.exists() and not out.is_dir()) or (out.is_dir() and any(out.iterdir()) and not ours):
        raise ExportError(f"{out}: exists and is no export; expected a new folder, or an export to replace")


def _as_record(result: ExportResult, folder: Path, context: "ExportContext", command: str) -> dict[str, Any]:
    files = []
    for made in result.files:
        for name in (made.file, *made.with_files):
            of_model = asdict(made) if name == made.file else {"precision": made.precision}
            known = {key: value for key, value in of_model.items() if key not in ("file", "with_files") and value}
            if "certificate" in known:
                known["certificate"] = json.loads(known["certificate"])
            if "proofs" in known:
                known["certificates"] = known.pop("proofs")
            files.append({"file": name, **asdict(Stamp.of(folder / name)), **known})
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
    """A bundle while it is exported; a checkpoint has become one.

    name       what the user called it
    source     what was given: the bundle itself, or the checkpoint
    scratch    a folder for files on the way, gone afterwards
    load_data  loads examples of the task; calibrate: finds the ranges of an fp32 file; none where there are no data
    remade     ONNX files that take the place of all of the bundle's: another opset
    warnings   what there is to say of it already
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
        cls,
        source: Source,
        scratch: Path,
        *,
        name: str,
        opset: int | None,
        load_data: "Callable[[Bundle], TaskData] | None" = None,
        calibrate: "Callable[[Bundle, Path], Ranges] | None" = None,
    ) -> "ExportContext":
        """Write a checkpoint as the bundle that it becomes, and a bundle's files anew where an opset is asked for."""
        if isinstance(source, Bundle):
            bundle, called = source, name or source.path.name
        else:
            bundle, called = source.write(scratch / "bundle", opset=OPSET if opset is None else opset), source.name

        context = cls(called, bundle, source, scratch, load_data, calibrate)
        return context if opset is None or bundle.manifest.kind != "task" else context._at(opset)

    def onnx(self, precision: Precision) -> Path:
        """Return the ONNX file of this precision, made of the fp32 one where the bundle has none."""
        from compress.exporters.fp16 import to_float16
        from compress.exporters.weight_only import quantize_weights

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
            raise ExportError(f"{self.bundle.path}: has no {precision} file; write it again")
        return made

    def trial_rows(self) -> list[Feeds]:
        """Make up rows that the fp32 file can read."""
        return rows_for(self.onnx("fp32"), self.bundle.manifest.max_length)

    def differs(self, other: Run, *, rows: Sequence[Feeds] | None = None) -> Difference:
        """Compare the answers of `other` with those of the fp32 ONNX file."""
        return difference(onnx_run(self.onnx("fp32")), other, self.trial_rows() if rows is None else rows)

    def model(self) -> Any:
        """Load the torch model: float32, eval mode, attention written out as every exporter reads it."""
        from compress.exporters.onnx import as_float32
        from compress.models.heads import task_class

        if isinstance(self.source, Bundle):
            model = task_class(self.bundle.task.kind).from_pretrained(self.bundle.path, use_safetensors=True)
        else:
            model = self.source.model
        model = as_float32(model)
        model.set_attn_implementation("eager")
        return model

    def as_written(self) -> Path:
        """Return the fp32 ONNX file in the form that `to_onnx` writes: exported from the weights anew where tuning, or
        an earlier version, left the bundle's own in another one."""
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

    def _at(self, opset: int) -> "ExportContext":
        """Export fp32 and int8 from the weights anew; what the int8 file left in float32 stays so."""
        from compress.exporters.int8 import quantize_dynamic
        from compress.exporters.rewrite.graph import list_floats

        fp32, int8 = (self.scratch / f"opset{opset}" / name for name in ("model.onnx", "model_quantized.onnx"))
        self._export(fp32, opset)
        quantize_dynamic(fp32, int8, keep=list_floats(self.onnx("fp32"), self.onnx("int8")))
        warned = []
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
    """Copy the tokenizer's files and the config beside the model. Raises ExportError where there is no tokenizer."""
    if not (source / "tokenizer.json").is_file():
        raise ExportError(
            f"{source}: has no tokenizer.json, without which nobody can feed the exported model; write the bundle "
            "again, or save the tokenizer there: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    for pattern in (*BESIDE, *TOKENIZER):
        for path in source.glob(pattern):
            shutil.copyfile(path, folder / path.name)


def required(module: str, extra: str) -> Any:
    """Import a module that an extra brings. Raises ExportError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ExportError(
            f"{package} is not installed; expected it for this format: {install_command(extra)}"
        ) from error


@contextmanager
def converting(context: ExportContext, runtime: str) -> Iterator[None]:
    """Turn whatever a runtime's converter fails with into an ExportError that says what takes every family."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError) as error:
        first = (str(error).splitlines() or [""])[0]
        raise ExportError(
            f"{context.name}: {context.bundle.manifest.model_type} cannot be exported to {runtime} "
            f"({type(error).__name__}: {first}); --for onnx and --for ort take every family"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Drop warnings, and what is written to the file descriptors of standard output and error meanwhile. Errors are
    raised as ever: they do not come this way."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    kept = [os.dup(number) for number in (1, 2)]
    try:
        with tempfile.TemporaryFile() as dropped, warnings.catch_warnings(action="ignore"):
            for number in (1, 2):
                os.dup2(dropped.fileno(), number)
            yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number, original in zip((1, 2), kept, strict=True):
            os.dup2(original, number)
            os.close(original)
