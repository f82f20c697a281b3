"""Text in, label out: one file that an app gives a string and that answers with a label, the tokenizer inside.

See `compress.exporters.tokenizer`: it reads every hard text, and all of `--data`, as the tokenizer does, or is refused.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from compress.data.task import TaskData
from compress.errors import ExportError
from compress.exporters.artifact import FILES, Precision
from compress.exporters.formats import ExportContext, ExportedFile, ExportResult
from compress.exporters.session import certificate
from compress.exporters.tokenizer import text_file

if TYPE_CHECKING:
    from compress.exporters.predictor import Text

PRECISIONS = tuple(FILES)
DEFAULT = ("int8",)


def write(context: ExportContext, folder: Path, precisions: Sequence[Precision]) -> ExportResult:
    """Write a file for each precision: `model_text.onnx` is int8, the others have theirs in their names."""
    if context.bundle.manifest.kind != "task":
        raise ExportError(
            f"{context.name}: gives vectors, no labels; expected a model for classification or regression"
        )
    if context.remade:
        raise ExportError("--opset: a text file has its bundle's own; expected no --opset")
    bundle = context.bundle
    texts = [] if context.load_data is None else all_texts(context.load_data(bundle))
    made, verdicts = [], []
    for precision in precisions:
        name = "model_text.onnx" if precision == "int8" else f"model_text_{precision}.onnx"
        found = text_file(bundle, folder / name, precision=precision, texts=texts)
        made.append(ExportedFile(name, precision, None, "text in", certificate=certificate(bundle.files()[precision])))
        given = f", and all {found.given:,} texts of the data" if found.given else ""
        verdicts.append(
            f"{name}: reads {found.hard} hard texts{given} as the tokenizer does; needs no custom operators: any full "
            "build of onnxruntime runs it, for Python, mobile or the web"
        )
    return ExportResult(tuple(made), tuple(verdicts))


def all_texts(data: TaskData) -> "list[Text]":
    """Return the different texts, or pairs, of every split, in their order."""
    columns = ("text", "text_pair") if data.task.pair else ("text",)
    splits = [split for split in (data.train, data.validation, data.test) if split is not None]
    rows = dict.fromkeys(row for split in splits for row in zip(*(split[name][:] for name in columns), strict=True))
    return [row if data.task.pair else row[0] for row in rows]
