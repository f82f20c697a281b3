"""`compress predict`: what a bundle is made into, and what it says."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from compress.cli.options import Json, told


def predict(
    bundle: Annotated[Path, typer.Argument(help="A bundle's folder.")],
    texts: Annotated[list[str], typer.Argument(help="Texts, or - for one per line of standard input.")],
    pair: Annotated[str | None, typer.Option(help="The second sentence of a pair; the text questions are on.")] = None,
    precision: Annotated[
        Literal["int8", "fp32", "fp16", "w8", "q4"], typer.Option(help="Which file answers.")
    ] = "int8",
    as_json: Json = False,
) -> None:
    """Label texts, tag their words, or answer questions with a bundle. Needs neither torch nor transformers."""
    with told():
        from compress.export.bundle import Bundle

        lines = [line.rstrip("\n") for line in sys.stdin] if texts == ["-"] else texts
        given = [(line, pair) for line in lines] if pair is not None else lines
        found = Bundle.load(bundle).predict(given, precision=precision)
        if as_json:
            import json
            from dataclasses import asdict

            print(json.dumps([asdict(each) for each in found], ensure_ascii=False, indent=1))
        else:
            for line, each in zip(lines, found, strict=True):
                print(f"{each}\t{line}")
