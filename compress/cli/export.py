"""`compress export`, `quantize`, `push`, `predict`, `demo`: what a bundle is made into, where it goes, what it says."""

import json
import os
import sys
import tempfile
import time
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from compress.cli.options import UNCERTIFIED, console, grouped, print_forecast, print_json, schema, told
from compress.config.options import (
    Assets,
    BatchSizes,
    CheckpointOptions,
    DeviceOptions,
    Int8Options,
    Json,
    LabelColumn,
    Lan,
    MaxDrop,
    Plan,
    TextColumns,
    ThreadCounts,
    Wide,
    data_option,
    device_option,
    output,
    training,
)
from compress.terminal import printable

if TYPE_CHECKING:
    from compress.exporters.artifact import Precision
    from compress.exporters.predictor import AnsweredLine, Answering


@dataclass(frozen=True, kw_only=True)
class TuneOptions(DeviceOptions):
    """The device and the settings that forms of the graph are raced on."""

    tune: Annotated[bool, device_option("--tune", help="Race all forms of the graph; keep the fastest.")] = False
    threads: ThreadCounts = "1"
    batch: BatchSizes = "1"
    seq: Annotated[str | None, device_option("--seq", help="Lengths: 32 if raced; npu, coreml: the longest.")] = None


@grouped(without=("affinity", "native", "webgpu"))
def export(
    model: Annotated[str, typer.Argument(help="A bundle or a run; or a checkpoint: alias, folder, hub id.")],
    out: Annotated[Path | None, output(help="The folder; else onnx goes into the bundle.")] = None,
    to: Annotated[
        Literal["onnx", "ort", "web", "text", "openvino", "executorch", "litert", "npu", "coreml"],
        output("--for", help="Write for this runtime"),
    ] = "onnx",
    precision: Annotated[str, output(help="Write fp32,int8,fp16,w8,q4,w8a16,w8a8; else the format's.")] = "",
    opset: Annotated[int | None, output(help="Write ONNX anew at this opset.")] = None,
    race: TuneOptions = TuneOptions(),
    max_drop: MaxDrop = 0.5,
    data: Annotated[str | None, data_option(help="Judge and calibrate on this data.")] = None,
    text: TextColumns = None,
    label: LabelColumn = None,
    checkpoint: CheckpointOptions = CheckpointOptions(),
    wide: Wide = False,
    as_json: Json = False,
) -> None:
    """Write a model for another runtime, compare its answers there with ours, and say where it will run well.

    Example: compress export runs/first/bundle --for text --out app
    """
    with told(hint="What was there is as it was: the same command begins again."):
        from compress.benchmark import options
        from compress.commands import export as command
        from compress.exporters.formats import NAME
        from compress.provenance import command_line
        from compress.reporting.terminal import print_export

        raced, fixed = None, command.FixedOptions(max_drop=max_drop / 100)
        if (of_fixed_length := to in ("npu", "coreml")) and race.seq is not None:
            fixed = replace(fixed, lengths=tuple(options.parse_numbers("seq", race.seq)))
        if race.tune:
            settings = options.parse_settings(race.threads, race.batch, race.seq or "32")
            raced = command.RaceOptions(settings, race, max_drop / 100)
        elif (unused := replace(race, seq=None) if of_fixed_length else race) != TuneOptions():
            _refuse_unraced(unused)
        made = command.export(
            model, out, to=to, precisions=[each.strip() for each in precision.split(",")] if precision else [],
            opset=opset, race=raced, fixed=fixed, data=data, text=text, label=label, checkpoint=checkpoint,
            command=command_line(),
            say=lambda line: console(as_json).print(line, markup=False, highlight=False, soft_wrap=True),
        )  # fmt: skip
        if as_json:
            print_json("export", made.path / NAME)
        else:
            print_export(console(), made, wide=wide)


def _refuse_unraced(race: TuneOptions) -> None:
    """Raise ExportError for an option of the race where nothing is raced."""
    from compress.errors import ExportError

    unused = next(each.name for each in fields(race) if getattr(race, each.name) != each.default)
    raise ExportError(f"--{unused}: is for the race, and nothing is raced; expected --tune with it")


@grouped(without=("affinity", "native", "webgpu"))
def quantize(
    bundle: Annotated[Path, typer.Argument(help="The folder of a bundle.")],
    data: Annotated[str, data_option(help="The data it was made from, as for distill.")],
    out: Annotated[Path | None, output(help="A new bundle; else the file is replaced in place.")] = None,
    method: Annotated[
        Literal["auto", "dynamic", "static", "smoothquant", "qat"],
        training(help="Make int8 in this way; qat trains again"),
    ] = "auto",
    int8: Int8Options = Int8Options(),
    max_drop: MaxDrop = 0.5,
    device: DeviceOptions = DeviceOptions(),
    text: TextColumns = None,
    label: LabelColumn = None,
    overrides: Annotated[list[str] | None, training("--set", help="qat: change a number: stages.0.epochs=1.")] = None,
    seed: Annotated[int, data_option(help="Seed the rows held out to validate.")] = 0,
    plan: Plan = False,
    wide: Wide = False,
    as_json: Json = False,
) -> None:
    """Make the int8 file anew and certify what it loses. Exit code 3: more than --max-drop; the nearest is kept.

    Example: compress quantize runs/first/bundle --data intents --max-drop 0.3
    """
    with told(hint="The bundle is as it was."):
        from compress.commands import quantize as pipeline
        from compress.exporters.artifact import Bundle
        from compress.reporting import tables, terminal

        shown = console(as_json)
        given: dict[str, Any] = {
            "data": data, "method": method, "out": out, "int8": int8, "device": device, "text": text, "label": label,
            "seed": seed, "overrides": overrides or [],
        }  # fmt: skip
        if plan:
            print_forecast(pipeline.forecast_quantization, as_json, bundle=Bundle.load(bundle), **given)
            return
        done = pipeline.quantize(
            Bundle.load(bundle), **given, max_drop=max_drop / 100,
            say=partial(shown.print, highlight=False, markup=False, soft_wrap=True),
        )  # fmt: skip
        if as_json:
            print_json("quantize", terminal.quantized_values(done))
        else:
            for table in tables.latency_tables((time.name, time) for time in done.times):
                terminal.print_table(shown, table, wide=wide)
            shown.print(terminal.format_quantized(done), highlight=False, markup=False)
            shown.print(f"bundle: {done.bundle.path}", highlight=False)
    if not done.proof.certified:
        raise typer.Exit(UNCERTIFIED)


def push(
    bundle: Annotated[Path, typer.Argument(help="The folder of a bundle or a run.")],
    repo: Annotated[str, typer.Argument(help="On the hub, as owner/name; made if not there.")],
    public: Annotated[bool, output("--public", help="Let everybody see a repository that is made.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be sent.")] = False,
    as_json: Json = False,
) -> None:
    """Publish a bundle on the hub, with its card. Private unless said otherwise; the token is HF_TOKEN or your login.

    Example: compress push runs/first/bundle my-team/intents-small --dry-run
    """
    with told():
        from compress.commands.push import push as run

        done = run(bundle, repo, private=not public, dry_run=dry_run)
        if as_json:
            print_json("push", asdict(done))
            return
        shown = partial(console().print, markup=False, highlight=False, soft_wrap=True)
        for name, size in done.files.items():
            shown(f"{size / 1e6:>9,.2f} MB  {name}")
        shown(f"{sum(done.files.values()) / 1e6:>9,.2f} MB  in {len(done.files)} files")
        shown(f"card: {'; '.join([*(f'{key} {value}' for key, value in done.card.items()), *done.scores])}")
        if done.missing:
            shown(f"the card says nothing of: {', '.join(done.missing)}")
        visible = "private" if done.private else "public"
        shown(f"would go to {done.repo}, {visible} where it is new" if dry_run else f"published: {done.url}")


def predict(
    bundle: Annotated[Path, typer.Argument(help="The folder of a bundle or a run.")],
    texts: Annotated[list[str] | None, typer.Argument(help="Texts, or - for one per line of standard input.")] = None,
    rows: Annotated[
        Path | None, data_option("--input", help="Answer the rows of this file: .csv, .tsv, .jsonl, .txt.")
    ] = None,
    answers: Annotated[Path | None, output("--output", help="Write them here: .csv, .tsv, .jsonl, .npy.")] = None,
    text: TextColumns = None,
    pair: Annotated[str | None, data_option(help="Second sentence of a pair, or text of questions.")] = None,
    against: Annotated[
        Path | None, data_option(help="Find the nearest of this file's lines, by the bundle's vectors.")
    ] = None,
    top: Annotated[int | None, data_option(min=1, help="Nearest texts of --against: 5 where not said.")] = None,
    precision: Annotated[Literal["int8", "fp32", "fp16", "w8", "q4"], output(help="Answer with this file.")] = "int8",
    on_error: Annotated[Literal["stop", "skip"], output(help="At a text that is no UTF-8 or too long.")] = "stop",
    as_json: Json = False,
) -> None:
    """Label texts, tag their words, answer questions, or give vectors. Needs neither torch nor transformers.

    Example: compress predict runs/first/bundle --input rows.csv --output answers.csv
    """
    with told(hint="No file was written: the same command begins again."):
        if rows is not None or answers is not None or text:
            opened = _open(bundle, precision, against, top, threads=os.cpu_count() or 1)
            _predict_file(opened, texts, rows, answers, text, pair, on_error, as_json)
            return
        if not texts:
            raise typer.BadParameter("give texts, - for standard input, or a file with --input and --output")
        from compress.errors import DataError
        from compress.exporters import predictor as stream

        second = None if pair is None else stream.decode(os.fsencode(pair), "--pair")
        piped = texts == ["-"]
        given = stream.read_lines(sys.stdin.buffer) if piped else map(os.fsencode, texts)
        predictor, skipped = _open(bundle, precision, against, top), 0
        with _listed(as_json) as show:
            for each in stream.answer_lines(predictor, given, second=second, unit="line" if piped else "text"):
                if each.error and on_error == "stop":
                    raise DataError(f"{each.error}. The answers before it are above; --on-error skip goes on after it")
                skipped += bool(each.error)
                show(each)
        if skipped:
            print(f"warning: {skipped:,} texts were skipped; the errors are in their places", file=sys.stderr)


def demo(
    bundle: Annotated[Path, typer.Argument(help="The folder of a bundle or a run.")],
    out: Annotated[Path | None, output(help="The folder to write; else only --serve.")] = None,
    serve: Annotated[bool, output("--serve", help="Serve the page here and open it, until Ctrl-C.")] = False,
    no_open: Annotated[bool, output("--no-open", help="Serve it, and leave opening it to you.")] = False,
    precision: Annotated[Literal["int8", "fp32", "fp16", "w8", "q4"], output(help="Answer with this file.")] = "int8",
    lan: Lan = False,
    assets: Assets = None,
    as_json: Json = False,
) -> None:
    """Write a page in which the model answers what one types: a folder for any web server, which needs no network.

    Example: compress demo runs/first/bundle --serve
    """
    with told(hint="What was there is as it was."), ExitStack() as stack:
        from compress.benchmark.browser.device import qr_code
        from compress.commands import demo as command
        from compress.errors import ExportError

        if out is None and not serve:
            raise ExportError("nothing to do: expected --out with the folder to write, or --serve, or both")
        if (lan or no_open) and not serve:
            unused = "--lan" if lan else "--no-open"
            raise ExportError(f"{unused}: is for a page that is served; expected --serve with it")
        shown = partial(console(as_json).print, markup=False, highlight=False, soft_wrap=True)
        answer = partial(console(as_json, answer=True).print, markup=False, highlight=False, soft_wrap=True)
        folder = out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="compress-demo."))) / "site"
        made = command.demo(bundle, folder, precision=precision, assets=assets, say=shown)
        sizes = {**made.parts, "all": sum(made.sizes.values())}
        shown(", ".join(f"{part} {size / 1e6:.2f} MB" for part, size in sizes.items()))
        link = stack.enter_context(command.serve(made, lan=lan)) if serve else None
        if as_json:
            print_json("demo", {"path": None if out is None else str(out), "files": made.sizes, "link": link})
        if out is not None:
            answer(f"page: {out / 'index.html'}, for any web server")
        if link is not None:
            with suppress(KeyboardInterrupt):
                answer(f"serving until Ctrl-C: {link}")
                if lan:
                    shown(qr_code(link))
                if not no_open and not webbrowser.open(link):
                    shown("no browser was found here: open the link yourself")
                while True:
                    time.sleep(3600)


def _open(
    bundle: Path, precision: "Precision", against: Path | None, top: int | None, *, threads: int = 1
) -> "Answering":
    """Open a bundle to answer texts, or to find the nearest of a file's lines."""
    from compress.data.text_files import lines
    from compress.exporters.artifact import Bundle
    from compress.exporters.nearest import NearestTexts

    if top is not None and against is None:
        raise typer.BadParameter("is of the nearest texts: give the file to search with --against", param_hint="--top")
    predictor = Bundle.load(bundle).open(precision, threads=threads)
    if against is None:
        return predictor
    return NearestTexts.from_texts(predictor, list(filter(None, map(str.strip, lines(against)))), top or 5)


def _predict_file(
    predictor: "Answering",
    texts: list[str] | None,
    rows: Path | None,
    answers: Path | None,
    columns: list[str] | None,
    pair: str | None,
    on_error: Literal["stop", "skip"],
    as_json: bool,
) -> None:
    from compress.errors import DataError
    from compress.exporters import row_files
    from compress.progress import Progress

    if rows is None or answers is None or texts:
        raise DataError("predict: a file needs --input and --output, and no texts beside them")
    row_files.check_files(rows, answers)
    shown = console(as_json)
    began = time.monotonic()
    with Progress(rows.name, unit="rows", console=shown) as bar:

        def say(answered: int, share: float) -> None:
            bar.total = answered / share if share else None
            bar.advance(answered - bar.done)

        done, skipped = row_files.predict_file(
            predictor, rows, answers, columns=columns, second=pair, on_error=on_error,
            say=say,
        )  # fmt: skip
    seconds = time.monotonic() - began
    if as_json:
        found = {"output": str(answers), "rows": done, "skipped": skipped, "seconds": seconds}
        print_json("predict", found)
    else:
        speed = f"{done / max(seconds, 1e-9):,.0f} rows / s"
        said = f"{answers}: {done:,} rows, {skipped:,} skipped; {speed}"
        shown.print(said, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _listed(as_json: bool) -> "Iterator[Callable[[AnsweredLine], None]]":
    """Print answers as they come, one a line; as JSON, in a list that is closed whatever happens."""
    before = f'{{"schema": "{schema("predict")}", "answers": ['

    def row(each: "AnsweredLine") -> None:
        line = f"error: {each.error}" if each.error else f"{each.answer}\t{each.text}"
        print(printable(line).replace("\n", "\\n"), flush=True)

    def item(each: "AnsweredLine") -> None:
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
        print("\n]}" if before == "," else f"{before}]}}", flush=True)
