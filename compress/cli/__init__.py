"""The command line: parse, call, print. torch and transformers are imported inside the commands that need them."""

import os
import sys

import typer

from compress.cli import bench, export, prune, search, start, train
from compress.cli.options import Command, CommandGroup, Version, with_verbosity
from compress.terminal import escape_unencodable

app = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)  # fmt: skip
for command in (
    start.doctor,
    start.inspect,
    start.init,
    train.distill,
    train.pretrain,
    train.label,
    prune.prune,
    export.export,
    export.quantize,
    prune.trim,
    export.push,
    export.predict,
    export.demo,
    bench.bench,
    bench.gate,
    bench.report,
    train.recipes,
    train.students,
    train.clean,
):
    app.command(cls=Command)(with_verbosity(command))
app.add_typer(search.app, name="search")


@app.callback()
def compress(version: Version = False) -> None:
    """Take a teacher and a paper's recipe, ship a small, fast, measured student."""


def main() -> None:
    """Entry point of the `compress` script."""
    escape_unencodable()
    configure_libraries()
    if "_COMPRESS_COMPLETE" in os.environ:  # Typer would import it to strip markup, which our help does not have
        sys.modules["rich"] = None  # type: ignore[assignment]  # Python's mark for a missing module
    app()


def configure_libraries() -> None:
    """Silence libraries, and limit what their threads and caches take; variables that the user has set are kept.

    Their progress bars and advice would disturb ours. Threads that wait by spinning compete with other processes for
    the cores: beside one busy process, training fell from 360 to under 20 samples/s, and to 210 with sleeping threads.
    oneDNN keeps a product for each shape, with a buffer of its own, and every length of a batch makes new ones: of the
    1,024 that it keeps by default, a step uses few, and memory grows for hundreds of steps.
    """
    for name, value in {
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "true",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "OMP_WAIT_POLICY": "PASSIVE",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    }.items():
        os.environ.setdefault(name, value)
