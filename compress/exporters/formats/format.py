"""Define the record of a format, from which commands, cards and docs are made."""

from dataclasses import dataclass

ONNX_PRECISIONS = ("fp32", "int8", "fp16", "w8", "q4")
"""The precisions of a bundle's ONNX files."""


@dataclass(frozen=True)
class Extra:
    """An extra of pyproject.toml that a format uses.

    name      of the extra
    purpose   what it is needed for, as `compress doctor` says it
    required  whether files are not written without it
    """

    name: str
    purpose: str
    required: bool = True


@dataclass(frozen=True, kw_only=True)
class Race:
    """The settings by which `compress bench --formats` times the files of a format.

    precisions  raced unless others are requested
    with_data   raced too if there are data to calibrate them on
    needs_data  whether all precisions are calibrated on data
    one_row     whether a file takes one row at a time
    """

    precisions: tuple[str, ...]
    with_data: tuple[str, ...] = ()
    needs_data: bool = False
    one_row: bool = False


@dataclass(frozen=True, kw_only=True)
class Format:
    """The facts of a format, so that no other code compares its name.

    name        of the format, and of its file
    files       what is written, in Markdown, for docs/export.md
    shapes      the shapes of inputs that the files take, for docs/export.md
    needs       what must be installed or given, in Markdown, for docs/export.md
    precisions  that can be written
    default     the precisions that are written unless others are requested
    writer      the address of the function that writes the files: (context, folder,
                precisions) -> ExportResult
    reader      the address of the function that opens a file: (context, file) -> Run
    suffixes    of the model files
    runtime     the Python package that runs them on this machine; '' if none does
    extra       what to install, if the base install does not suffice
    library     as the hub calls it; '': the export is a bundle, with its own card
    snippets    the names of the templates of code that runs a file: see
                `exporters.snippets`
    race        how the files are timed, or a sentence that says why they cannot be
                timed here
    copies_tokenizer    whether the tokenizer is copied next to the written files
    fixed_length        whether lengths are given in advance, by `--seq`
    reads_data          whether `--data` is read without `--tune`
    leaves_out_prompts  whether vectors can leave out a prompt's tokens
    """

    name: str
    files: str
    shapes: str
    needs: str = ""
    precisions: tuple[str, ...]
    default: tuple[str, ...]
    writer: str
    reader: str
    suffixes: tuple[str, ...]
    runtime: str = ""
    extra: Extra | None = None
    library: str = ""
    snippets: tuple[str, ...] = ()
    race: Race | str
    copies_tokenizer: bool = True
    fixed_length: bool = False
    leaves_out_prompts: bool = False
    reads_data: bool = False
