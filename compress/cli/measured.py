"""`compress bench`: figures, and how they are shown."""

from pathlib import Path
from typing import Annotated

import typer

from compress.cli.options import Json, console, told


def bench(
    bundles: Annotated[list[Path], typer.Argument(help="One or more bundles, raced against each other.")],
    threads: Annotated[str, typer.Option(help="Thread counts, comma-separated.")] = "1",
    batch: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1",
    seq: Annotated[str, typer.Option(help="Lengths in tokens, comma-separated.")] = "128",
    rounds: Annotated[int, typer.Option(help="Interleaved rounds per setting.")] = 8,
    runs: Annotated[int, typer.Option(help="Timed runs per round.")] = 15,
    as_json: Json = False,
) -> None:
    """Measure latency on this machine: interleaved, warmed up, with a verdict on noise."""
    with told():
        from compress.bench import show
        from compress.bench.local import machine, race
        from compress.export.bundle import Bundle

        files = {f"{path}:{which}": file for path in bundles for which, file in Bundle.load(path).files().items()}
        times = race(files, show.settings(threads, batch, seq), rounds=rounds, runs=runs)
        if as_json:
            print(show.as_json(times, machine()))
        else:
            console().print(show.table(times, machine()))
