"""Export a model for another runtime: write the folder as a whole, with the tokenizer
and an `export.json` that says what each file is, how much its answers differ from
fp32's, and what made it."""

import json
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from compress.data.encoder import TOKENIZER_JSON
from compress.errors import ExportError
from compress.exporters import formats, manifest
from compress.exporters.artifact import Bundle, check_writable
from compress.exporters.card import export_card
from compress.exporters.checkpoint import Checkpoint, ExportSource
from compress.exporters.interface import read_interface
from compress.exporters.manifest import Stamp
from compress.exporters.snippets import write_snippets
from compress.exporters.writers.context import (
    ExportContext,
    ExportOptions,
    ExportResult,
    Writer,
)
from compress.io import atomic_folder
from compress.models.checkpoints import describe_origin
from compress.outputs import check_output_folder
from compress.provenance import find_missing, install_command, timestamp, versions

NAME = "export.json"
OPSETS = range(12, 24)
"""The opsets that torch's TorchScript exporter, onnxruntime and its quantiser support
for every family (torch 2.13, onnxruntime 1.31): DeBERTa's graph is invalid below, the
exporter ends above."""

FAR = 0.1
"""The share of the largest logit above which a difference draws a warning."""


def export(
    source: ExportSource,
    out: Path | None,
    *,
    to: str = "onnx",
    precisions: Sequence[str] = (),
    opset: int | None = None,
    options: ExportOptions = ExportOptions(),
) -> ExportResult:
    """Write `source` for another runtime into the folder `out`, or, for `onnx`, into
    the bundle itself.

    precisions   of the weights; by default those of the format
    opset        export ONNX from the weights, at this opset; None: use the bundle's own
                 files
    options      names to record, the data, and the lengths of files with fixed lengths

    Raises ExportError for an unsupported precision or opset, a missing extra, a model
    that this format cannot hold, or a file whose answers differ from the model's; no
    files are left behind then.
    """
    chosen = check(source, out, to=to, precisions=precisions, opset=opset)
    format = formats.find(to)
    with ExitStack() as stack:
        scratch = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="compress-export."))
        )
        context = ExportContext.open(source, scratch, opset=opset, options=options)
        folder = (
            context.bundle.path
            if out is None
            else stack.enter_context(atomic_folder(out))
        )
        write: Writer = formats.load(format.writer)
        result = write(context, folder, chosen)
        if format.copies_tokenizer:
            copy_tokenizer(context.bundle.path, folder)
        task = context.bundle.manifest.task
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
        first = folder / names[0]
        interface = result.interface
        if interface is None and first.suffix == ".onnx":
            interface = read_interface(first)
        result = replace(
            result,
            interface=interface or context.interface(),
            labels=() if task is None else task.labels,
            path=context.bundle.path if out is None else out,
            to=to,
            sizes={name: (folder / name).stat().st_size for name in names},
            warnings=(*context.warnings, *result.warnings, *far),
        )
        record = _as_record(result, folder, context)
        text = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
        if manifest.is_bundle(folder):
            Bundle.load(folder).attach(NAME, text)
        else:
            assert result.interface is not None, "it was read above"
            snippets = write_snippets(
                format.snippets,
                Path(names[0]),
                result.interface,
                task,
                context.bundle.path / TOKENIZER_JSON,
                max_length=context.bundle.manifest.max_length,
                **result.settings,
            )
            titles = tuple(each.title for each in snippets)
            result = replace(result, snippets=titles)
            origin = describe_origin("", context.bundle.path)
            (folder / NAME).write_text(text, encoding="utf-8")
            card = export_card(record, origin, task, snippets)
            (folder / "README.md").write_text(card, encoding="utf-8")
    return result


def check(
    source: ExportSource,
    out: Path | None,
    *,
    to: str,
    precisions: Sequence[str],
    opset: int | None,
) -> list[str]:
    """Return the precisions to write. Raises ExportError for an unsupported format,
    precision or opset, or an unusable folder."""
    in_place = isinstance(source, Bundle)
    origin = source.path if isinstance(source, Bundle) else Path(source.name)
    chosen = check_settings(
        origin, out, to=to, precisions=precisions, opset=opset, in_place=in_place
    )
    if (
        isinstance(source, Checkpoint)
        and source.kind == "generative"
        and (to != "onnx" or precisions)
    ):
        raise ExportError(
            f"{source.name}: is a generative model, which is exported as ONNX in fp32 "
            "and int8 only; expected --for onnx, --out and no --precision"
        )
    if source.leaves_out_prompts and not formats.find(to).leaves_out_prompts:
        able = [each.name for each in formats.known() if each.leaves_out_prompts]
        raise ExportError(
            f"--for {to}: include_prompt is false in the Pooling of this model, so "
            "that its vectors leave the prompt out, which only files for onnxruntime "
            f"can do; expected --for {', '.join(able[:-1])} or {able[-1]}"
        )
    return chosen


def check_settings(
    origin: Path,
    out: Path | None,
    *,
    to: str,
    precisions: Sequence[str],
    opset: int | None,
    in_place: bool,
) -> list[str]:
    """Check the request before a model is loaded: see `check`.

    origin    the folder of the model
    in_place  whether it is a bundle, into which ONNX files can be written
    """
    format = formats.find(to)
    chosen = list(dict.fromkeys(precisions or format.default))
    for precision in chosen:
        if precision not in format.precisions:
            raise ExportError(
                f"--precision {precision}: --for {to} writes "
                f"{', '.join(format.precisions)}"
            )
    if opset is not None and opset not in OPSETS:
        raise ExportError(
            f"--opset {opset}: expected {OPSETS[0]} to {OPSETS[-1]}, which torch's "
            "exporter and onnxruntime support"
        )
    extra = format.extra
    if extra is not None and extra.required and (absent := find_missing(extra.name)):
        raise ExportError(
            f"--for {to} needs packages ({absent}): {install_command(extra.name)}"
        )
    if out is not None:
        _check_free(out, to, origin)
    elif to == "onnx" and opset is None and in_place:
        check_writable(origin)
    else:
        raise ExportError(
            "expected --out with the folder to write: only new precisions go into the "
            "bundle itself"
        )
    return chosen


def _check_free(out: Path, to: str, origin: Path) -> None:
    """Raise ExportError if the export would replace the model itself, or anything that
    is not an export; OutputError if no folder can be written there."""
    check_output_folder(out, "out")
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
    result: ExportResult, folder: Path, context: ExportContext
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
        "date": timestamp(),
        "command": context.options.command,
        "versions": versions(("compress", "torch", "transformers", *result.packages)),
        **asdict(result.interface or context.interface()),
        "labels": result.labels,
        "files": files,
        "verdicts": result.verdicts,
        "warnings": result.warnings,
    }


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer's files and the config to the exported model. Raises
    ExportError for a missing tokenizer."""
    if not (source / "tokenizer.json").is_file():
        raise ExportError(
            f"{source}: has no tokenizer.json, which the exported model needs; write "
            "the bundle again, or save the tokenizer there: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    for pattern in (
        "config.json",
        "generation_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "tokenizer*.json",
        "tokenizer.model",
        "vocab.txt",
        "vocab.json",
        "merges.txt",
        "spiece.model",
        "spm.model",
    ):
        for path in source.glob(pattern):
            shutil.copyfile(path, folder / path.name)
