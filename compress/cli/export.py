"""`compress export`, `quantize` and `predict`: what a bundle is made into, and what it says."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from compress.cli.options import (
    UNCERTIFIED,
    AllowPickle,
    DevicePython,
    DeviceTimeout,
    Json,
    console,
    print_result,
    told,
)
from compress.terminal import printable

if TYPE_CHECKING:
    from compress.exporters.predictor import Answered


def export(
    model: Annotated[str, typer.Argument(help="A bundle's or run's folder; or a checkpoint: alias, folder, hub id.")],
    out: Annotated[Path | None, typer.Option(help="Folder to write; without it, onnx goes into the bundle.")] = None,
    to: Annotated[
        Literal["onnx", "ort", "web", "text", "openvino", "executorch", "litert"],
        typer.Option("--for", help="What is to run it; text: the tokenizer is in the file."),
    ] = "onnx",
    precision: Annotated[str, typer.Option(help="fp32,int8,fp16,w8,q4, comma-separated; default: the format's.")] = "",
    opset: Annotated[int | None, typer.Option(help="ONNX anew from the weights, at this opset.")] = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="First race all forms of the graph, and keep the fastest.")
    ] = False,
    device: Annotated[str, typer.Option(help="Where they race: as for bench.")] = "local",
    lan: Annotated[bool, typer.Option("--lan", help="Allow a browser on another machine to connect.")] = False,
    timeout: DeviceTimeout = 60.0,
    python: DevicePython = "python3",
    threads: Annotated[str, typer.Option(help="Thread counts to race at, comma-separated.")] = "1",
    batch: Annotated[str, typer.Option(help="Batch sizes to race at, comma-separated.")] = "1",
    seq: Annotated[str, typer.Option(help="Lengths in tokens to race at, comma-separated.")] = "32",
    max_drop: Annotated[float, typer.Option(min=0, max=100, help="Points that a raced int8 file may lose.")] = 0.5,
    data: Annotated[str | None, typer.Option(help="Judges int8 in the race, calibrates; as for distill.")] = None,
    text: Annotated[list[str] | None, typer.Option(help="Text column; given twice for pairs.")] = None,
    label: Annotated[str | None, typer.Option(help="Label column.")] = None,
    pair: Annotated[bool, typer.Option("--pair", help="A checkpoint's classifier reads two texts.")] = False,
    pool: Annotated[
        Literal["mean", "cls", "max"] | None, typer.Option(help="How an encoder's tokens become one vector.")
    ] = None,
    normalise: Annotated[bool, typer.Option("--normalise", help="Such vectors have length 1.")] = False,
    max_length: Annotated[int | None, typer.Option(min=1, help="Tokens a checkpoint's texts are cut to.")] = None,
    allow_pickle: AllowPickle = False,
    as_json: Json = False,
) -> None:
    """Write a model for another runtime, compare its answers there with ours, and say where it will run well."""
    with told():
        from compress.benchmark import options
        from compress.commands.export import Race
        from compress.commands.export import export as run
        from compress.exporters.formats import NAME
        from compress.exporters.formats.outcome import show
        from compress.provenance import command_line

        if not tune:
            _raced_only(device != "local", lan, threads != "1", batch != "1", seq != "32")
        made = run(
            model,
            out,
            to=to,
            precisions=[each.strip() for each in precision.split(",")] if precision else [],
            opset=opset,
            race=Race(device, options.settings(threads, batch, seq), max_drop / 100, lan, timeout, python)
            if tune
            else None,
            data=data,
            text=text,
            label=label,
            pair=pair,
            pool=pool,
            normalise=normalise,
            max_length=max_length,
            allow_pickle=allow_pickle,
            command=command_line(),
            say=lambda line: console(as_json).print(line, markup=False, highlight=False, soft_wrap=True),
        )
        if as_json:
            print_result((made.path / NAME).read_text(encoding="utf-8"))
        else:
            show(made, console())


def _raced_only(*given: bool) -> None:
    """Raises ExportError for an option of the race where there is none."""
    from compress.errors import ExportError

    names = ("device", "lan", "threads", "batch", "seq")
    if unused := [name for name, is_given in zip(names, given, strict=True) if is_given]:
        raise ExportError(f"--{unused[0]}: is for the race, and nothing is raced; expected --tune with it")


def quantize(
    bundle: Annotated[Path, typer.Argument(help="A bundle's folder.")],
    data: Annotated[str, typer.Option(help="What the bundle was made from; as for distill.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the new bundle; without it, in place.")] = None,
    method: Annotated[
        Literal["auto", "dynamic", "static", "smoothquant", "qat"],
        typer.Option(help="How int8 is made; auto: static, or smoothquant where that is nearer; qat trains again."),
    ] = "auto",
    calibration: Annotated[
        Literal["minmax", "percentile", "entropy"] | None, typer.Option(help="Default: what comes nearest to fp32.")
    ] = None,
    percentile: Annotated[float, typer.Option(min=50, max=100, help="For --calibration percentile.")] = 99.99,
    rows: Annotated[int, typer.Option(min=1, help="Rows of the train split to calibrate on.")] = 512,
    max_drop: Annotated[float, typer.Option(min=0, max=100, help="Points of the score that int8 may lose.")] = 0.5,
    form: Annotated[
        Literal["fused", "qdq"], typer.Option(help="For onnxruntime on CPUs, or for other runtimes.")
    ] = "fused",
    reduce_range: Annotated[
        bool, typer.Option("--reduce-range", help="7-bit weights, for x86 processors without VNNI.")
    ] = False,
    device: Annotated[str, typer.Option(help="Where it is certified: local, ssh:HOST, browser, adb.")] = "local",
    lan: Annotated[bool, typer.Option("--lan", help="browser: reachable from other machines, as a phone.")] = False,
    timeout: DeviceTimeout = 60.0,
    python: DevicePython = "python3",
    text: Annotated[list[str] | None, typer.Option(help="Text column; given twice for pairs.")] = None,
    label: Annotated[str | None, typer.Option(help="Label column.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="qat: as in stages.0.epochs=1.")] = None,
    seed: Annotated[int, typer.Option(help="Of the rows held out where the data has no validation split.")] = 0,
    as_json: Json = False,
) -> None:
    """Make the int8 file anew and certify what it loses. Exit code 3: more than --max-drop; the nearest is kept."""
    with told(hint="The bundle is as it was."):
        from compress.commands import quantize as pipeline
        from compress.exporters.artifact import Bundle
        from compress.reporting import tables

        shown = console(as_json)
        done = pipeline.quantize(
            Bundle.load(bundle),
            data,
            method=method,
            out=out,
            calibration=calibration,
            percentile=percentile,
            rows=rows,
            max_drop=max_drop / 100,
            form=form,
            reduce_range=reduce_range,
            device=device,
            lan=lan,
            timeout=timeout,
            python=python,
            text=text,
            label=label,
            seed=seed,
            overrides=overrides or [],
            say=partial(shown.print, highlight=False, markup=False, soft_wrap=True),
        )
        if as_json:
            print_result(tables.quantized_json(done))
        else:
            for table in tables.latency_tables((time.name, time) for time in done.times):
                shown.print(tables.to_terminal(table))
            shown.print(tables.quantized_text(done), highlight=False, markup=False)
            shown.print(f"bundle: {done.bundle.path}", highlight=False)
    if not done.proof.certified:
        raise typer.Exit(UNCERTIFIED)


def predict(
    bundle: Annotated[Path, typer.Argument(help="A bundle's or run's folder.")],
    texts: Annotated[list[str], typer.Argument(help="Texts, or - for one per line of standard input.")],
    pair: Annotated[str | None, typer.Option(help="The second sentence of a pair; the text questions are on.")] = None,
    precision: Annotated[
        Literal["int8", "fp32", "fp16", "w8", "q4"], typer.Option(help="Which file answers.")
    ] = "int8",
    on_error: Annotated[
        Literal["stop", "skip"],
        typer.Option(help="At a text that is no UTF-8 or too long: stop, or go on; skip puts the error in its place."),
    ] = "stop",
    as_json: Json = False,
) -> None:
    """Label texts, tag their words, or answer questions with a bundle. Needs neither torch nor transformers."""
    with told():
        from compress.errors import DataError
        from compress.exporters import predictor as stream
        from compress.exporters.artifact import Bundle

        second = None if pair is None else stream.decode(os.fsencode(pair), "--pair")
        piped = texts == ["-"]
        given = stream.lines(sys.stdin.buffer) if piped else map(os.fsencode, texts)
        predictor, skipped = Bundle.load(bundle).open(precision), 0
        with _listed(as_json) as show:
            for each in stream.answers(predictor, given, second=second, unit="line" if piped else "text"):
                if each.error and on_error == "stop":
                    raise DataError(f"{each.error}. The answers before it are above; --on-error skip goes on after it")
                skipped += bool(each.error)
                show(each)
        if skipped:
            print(f"warning: {skipped:,} texts were skipped; the errors are in their places", file=sys.stderr)


@contextmanager
def _listed(as_json: bool) -> "Iterator[Callable[[Answered], None]]":
    """Print answers as they come, one a line; as JSON, in a list that is closed whatever happens."""
    before = "["

    def row(each: "Answered") -> None:
        line = f"error: {each.error}" if each.error else f"{each.answer}\t{each.text}"
        print(printable(line).replace("\n", "\\n"), flush=True)

    def item(each: "Answered") -> None:
        nonlocal before
        plain = {"error": each.error} if each.answer is None else asdict(each.answer)
        print(f"{before}\n{json.dumps(plain, ensure_ascii=False)}", end="", flush=True)
        before = ","

    if not as_json:
        yield row
        return
    try:
        yield item
    finally:
        print("[]" if before == "[" else "\n]", flush=True)
