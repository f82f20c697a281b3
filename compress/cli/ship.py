"""`compress export` and `predict`: what a bundle is made into, and what it says."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from compress.cli.options import Json, console, told


def export(
    bundle: Annotated[Path, typer.Argument(help="A bundle's folder.")],
    out: Annotated[Path | None, typer.Option(help="Folder to write; without it, onnx goes into the bundle.")] = None,
    to: Annotated[
        Literal["onnx", "ort", "web", "openvino", "executorch", "litert"],
        typer.Option("--for", help="What is to run it."),
    ] = "onnx",
    precision: Annotated[str, typer.Option(help="fp32,int8,fp16,w8,q4, comma-separated; default: the format's.")] = "",
    opset: Annotated[int | None, typer.Option(help="ONNX anew from the weights, at this opset.")] = None,
    data: Annotated[str | None, typer.Option(help="Calibrates static int8 (openvino); as for distill.")] = None,
    text: Annotated[list[str] | None, typer.Option(help="Text column; given twice for pairs.")] = None,
    label: Annotated[str | None, typer.Option(help="Label column.")] = None,
    as_json: Json = False,
) -> None:
    """Write a bundle for another runtime, compare the answers there with ours, and say where it will run well."""
    with told():
        from compress.export import formats
        from compress.export.bundle import Bundle
        from compress.export.formats.calibration import calibration_rows
        from compress.export.formats.outcome import table
        from compress.ship import command_line

        found = Bundle.load(bundle)
        rows = calibration_rows(found, data, text=text, label=label) if data is not None else ()
        precisions = [each.strip() for each in precision.split(",")] if precision else []
        made = formats.export(found, out, to=to, precisions=precisions, opset=opset, rows=rows, command=command_line())
        if as_json:
            print((made.path / formats.NAME).read_text(encoding="utf-8"), end="")
            return
        shown = console()
        shown.print(table(made))
        for verdict in made.verdicts:
            shown.print(verdict, markup=False, highlight=False)
        for warning in made.warnings:
            shown.print(f"[yellow]warning[/] {warning}", highlight=False)
        shown.print(f"{made.path}: {formats.NAME} says what is in it", markup=False, highlight=False)


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
