"""`compress clean`: the disk that a run no longer needs."""

from pathlib import Path
from typing import Annotated

import typer

from compress.cli.options import console, told


def clean(
    run: Annotated[Path, typer.Argument(help="Directory of a run or a search.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say how much it would free.")] = False,
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="Also of a run that is not finished: it loses what --resume needs.")
    ] = False,
) -> None:
    """Remove a run's checkpoints and left-overs. Bundle, report, log and the results of its stages stay."""
    with told():
        from compress.run import clean

        freed = clean(run, unfinished=unfinished, dry_run=dry_run)
        did = "would free" if dry_run else "freed"
        console().print(f"{run}: {did} {freed / 1e6:,.1f} MB", markup=False, highlight=False, soft_wrap=True)
