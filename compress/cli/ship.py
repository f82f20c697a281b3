"""`compress export` and `predict`: what a bundle is made into, and what it says."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from compress.cli.options import AllowPickle, Json, console, told


def export(
    model: Annotated[str, typer.Argument(help="A bundle's or run's folder; or a checkpoint: alias, folder, hub id.")],
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
    pair: Annotated[bool, typer.Option("--pair", help="A checkpoint's classifier reads two texts.")] = False,
    pool: Annotated[
        Literal["mean", "cls", "max"] | None, typer.Option(help="How an encoder's tokens become one vector.")
    ] = None,
    normalise: Annotated[bool, typer.Option("--normalise", help="Such vectors have length 1.")] = False,
    max_length: Annotated[int | None, typer.Option(help="Tokens a checkpoint's texts are cut to.")] = None,
    allow_pickle: AllowPickle = False,
    as_json: Json = False,
) -> None:
    """Write a model for another runtime, compare its answers there with ours, and say where it will run well."""
    with told():
        from functools import partial

        from compress.export import formats
        from compress.export.formats.calibration import calibration_rows
        from compress.export.formats.outcome import show
        from compress.export.source import source

        found = source(
            model, pair=pair, pool=pool, normalise=normalise, max_length=max_length, allow_pickle=allow_pickle
        )
        rows = partial(calibration_rows, data=data, text=text, label=label) if data is not None else None
        precisions = [each.strip() for each in precision.split(",")] if precision else []
        made = formats.export(
            found,
            out,
            to=to,
            precisions=precisions,
            opset=opset,
            calibrate=rows,
            command=shlex.join(["compress", *sys.argv[1:]]),
        )
        if as_json:
            print((made.path / formats.NAME).read_text(encoding="utf-8"), end="")
        else:
            show(made, console())


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
