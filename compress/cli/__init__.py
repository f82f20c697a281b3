"""The command line: parse, call, print. torch and transformers are imported inside the
commands that need them."""

import os
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Any

import typer

from compress.cli.interrupts import interrupt_on_sigterm
from compress.cli.options import HELP, Command, CommandGroup, Version, with_verbosity
from compress.terminal import escape_unencodable, open_closed_streams

COMMANDS = {
    "doctor": ("start", "Check this machine for what each command needs."),
    "inspect": ("start", "Describe a checkpoint, bundle, recipe, data set or run."),
    "distill": ("train", "Distil a teacher into a student, export and measure it."),
    "pretrain": ("train", "Run a recipe's stages on text alone."),
    "label": ("train", "Label texts with a prompted language model."),
    "prune": ("prune", "Prune a model to given sizes or a budget."),
    "search": ("search", "Find the best students under a budget on your device."),
    "export": ("export", "Export a model for another runtime, and check its answers."),
    "quantize": ("export", "Quantise a bundle to int8 again, and certify the loss."),
    "trim": ("prune", "Drop the tokens that your texts never use."),
    "push": ("export", "Publish a bundle on the hub, with its card."),
    "predict": (
        "predict",
        "Label texts, tag words, answer questions, compute vectors.",
    ),
    "demo": ("export", "Write a page that runs the model in the browser."),
    "bench": ("bench", "Measure latency on this machine or another."),
    "gate": ("bench", "Check that a new model is not slower, worse or larger."),
    "report": ("bench", "Compare the files of several bundles on all devices."),
    "recipes": ("train", "List the recipes and when to use each, or show one."),
    "students": ("train", "List the students that a teacher allows."),
    "clean": ("train", "Remove the checkpoints and leftovers of a run."),
}
"""The module of each command, and its line in the list of commands."""


READS_BUNDLES = frozenset(
    [
        "inspect",
        "export",
        "quantize",
        "trim",
        "push",
        "predict",
        "demo",
        "bench",
        "gate",
        "report",
    ]
)
"""Commands that read bundles and have no `--allow-code` of their own."""


class CommandsOnDemand(Mapping[str, Any]):
    """Map names to commands: a command is imported, and its options are read, when it
    is looked up."""

    def __getitem__(self, name: str) -> Any:
        return _build(name)

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


@cache
def _build(name: str) -> Any:
    module = import_module(f"{__name__}.{COMMANDS[name][0]}")
    app = getattr(module, "app", None)
    if app is None:
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        command = with_verbosity(
            getattr(module, name), reads_bundles=name in READS_BUNDLES
        )
        app.command(cls=Command)(command)
    built = typer.main.get_command(app)
    built.name = name
    return built


class RootGroup(CommandGroup):
    """List the commands without building them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = CommandsOnDemand()

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, summary) for name, (_, summary) in COMMANDS.items()]
            )


app = typer.Typer(
    cls=RootGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": HELP, "max_content_width": 100},
)


@app.callback()
def compress(version: Version = False) -> None:
    """Take a teacher and a paper's recipe, ship a small, fast, measured student."""


def main() -> None:
    """Entry point of the `compress` script."""
    open_closed_streams()
    escape_unencodable()
    configure_libraries()
    # Typer would import it to strip markup, which our help does not have
    if "_COMPRESS_COMPLETE" in os.environ:
        sys.modules["rich"] = None  # type: ignore[assignment]  # Python's mark for a missing module
    with interrupt_on_sigterm():
        app()


def configure_libraries() -> None:
    """Silence libraries, and limit what their threads and caches take; variables that
    the user has set are kept.

    Their progress bars and advice would disturb ours. Threads that wait by spinning
    compete with other processes for the cores: next to one busy process, training fell
    from 360 to under 20 samples/s, and to 210 with sleeping threads. oneDNN caches a
    primitive with its own buffer for each shape, and every batch length makes new ones:
    a step uses few of the 1,024 that it caches by default, and memory grows for
    hundreds of steps.
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
