"""`compress export`, `quantize`, `push`, `predict` and `demo`: convert, publish and use
a bundle."""

import json
import os
import sys
import tempfile
import time
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from compress.cli.options import (
    UNCERTIFIED,
    console,
    print_forecast,
    print_json,
    printer,
    results,
    schema,
    user_errors,
    with_option_groups,
)
from compress.config import options as opt
from compress.exporters import formats
from compress.terminal import printable

if TYPE_CHECKING:
    from compress.data.vector_index import StoredForm
    from compress.exporters.manifest import Precision
    from compress.exporters.predictor import AnsweredLine, Answering


if TYPE_CHECKING:
    FormatName = str
else:
    FormatName = Literal[tuple(formats.names())]
WEIGHTS = dict.fromkeys(
    precision for each in formats.known() for precision in each.precisions
)
FIXED_LENGTH = [each.name for each in formats.known() if each.fixed_length]


@dataclass(frozen=True, kw_only=True)
class TuneOptions(opt.DeviceOptions):
    """The device and the settings on which variants of the graph are raced."""

    tune: Annotated[
        bool,
        opt.device_option(
            "--tune", help="Race variants of the ONNX graph; keep the fastest."
        ),
    ] = False
    threads: opt.ThreadCounts = "1"
    batch: opt.BatchSizes = "1"
    seq: Annotated[
        str | None,
        opt.device_option(
            "--seq", help=f"Tokens of the race; {', '.join(FIXED_LENGTH)}: of files."
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class VectorOptions:
    """Options for the vectors of a bundle that computes some."""

    against: Annotated[
        Path | None,
        opt.data_option(
            help="Find the nearest texts of this file: a table, lines, .npy."
        ),
    ] = None
    top: Annotated[
        int | None,
        opt.data_option(min=1, help="Return this many nearest texts; default: 5."),
    ] = None
    vectors: Annotated[
        Literal["float32", "int8", "binary"],
        opt.output(help="Of .npy: int8 a byte, binary a bit a number."),
    ] = "float32"
    prompt_name: Annotated[
        str | None,
        opt.data_option(help="Vectors: put this prompt of the model before texts."),
    ] = None


@with_option_groups(without=("affinity", "native", "webgpu", "plan"))
def export(
    model: Annotated[
        str,
        typer.Argument(help="A bundle, run or checkpoint (alias, folder, hub id)."),
    ],
    out: Annotated[
        Path | None, opt.output(help="A new folder; onnx needs none: into the bundle.")
    ] = None,
    to: Annotated[
        FormatName,
        opt.output("--for", help="Write for this runtime"),
    ] = "onnx",
    precision: Annotated[
        str, opt.output(help=f"Of the weights: {','.join(WEIGHTS)}.")
    ] = "",
    opset: Annotated[
        int | None, opt.output(help="Export ONNX again at this opset, 12 to 23.")
    ] = None,
    race: TuneOptions = TuneOptions(),
    max_drop: opt.MaxDrop = 0.5,
    data: Annotated[
        str | None,
        opt.data_option(help="Calibrate, check texts and score on this data."),
    ] = None,
    columns: opt.ColumnOptions = opt.ColumnOptions(),
    checkpoint: opt.CheckpointOptions = opt.CheckpointOptions(),
    shown: opt.PrintOptions = opt.PrintOptions(),
) -> None:
    """Export a model for another runtime, check its answers there, and say where it
    will run well.

    Device options are for --tune. `compress bench --formats all` times all formats.

    Example: compress export runs/first/bundle --for text --out app
    """
    with user_errors(hint="Nothing was changed. Run the same command again."):
        from compress.benchmark import arguments
        from compress.commands import export as command
        from compress.errors import ExportError
        from compress.exporters.export import NAME
        from compress.exporters.writers.context import FixedOptions
        from compress.provenance import command_line
        from compress.reporting.terminal import print_export

        fixed_length = to in FIXED_LENGTH
        settings = None
        fixed = FixedOptions(max_drop=max_drop / 100)
        if fixed_length and race.seq is not None:
            fixed = replace(
                fixed, lengths=tuple(arguments.parse_numbers("seq", race.seq))
            )
        if race.tune:
            sizes = arguments.parse_settings(race.threads, race.batch, race.seq or "32")
            settings = command.RaceOptions(sizes, race, max_drop / 100)
        else:
            for each in fields(race):
                if getattr(race, each.name) != each.default and not (
                    fixed_length and each.name == "seq"
                ):
                    raise ExportError(
                        f"--{each.name}: only applies to a race; add --tune"
                    )
        result = command.export(
            model,
            out,
            to=to,
            precisions=[each.strip() for each in precision.split(",")]
            if precision
            else [],
            opset=opset,
            race=settings,
            fixed=fixed,
            data=data,
            columns=columns,
            checkpoint=checkpoint,
            command=command_line(),
            say=printer(shown.as_json),
        )
        if shown.as_json:
            print_json("export", result.path / NAME)
        else:
            print_export(console(), result, wide=shown.wide)


@with_option_groups(without=("affinity", "native", "webgpu"))
def quantize(
    bundle: Annotated[Path, typer.Argument(help="The folder of a bundle.")],
    data: Annotated[
        str, opt.data_option(help="The data it was trained on, as for distill.")
    ],
    out: Annotated[
        Path | None,
        opt.output(help="A new bundle; default: replace the file in place."),
    ] = None,
    method: Annotated[
        Literal["auto", "dynamic", "static", "smoothquant", "qat"],
        opt.training(help="Quantise by this method; qat trains again"),
    ] = "auto",
    int8: opt.Int8Options = opt.Int8Options(),
    max_drop: opt.MaxDrop = 0.5,
    device: opt.DeviceOptions = opt.DeviceOptions(),
    columns: opt.ColumnOptions = opt.ColumnOptions(),
    overrides: Annotated[
        list[str] | None,
        opt.training("--set", help="qat: change a number: stages.0.epochs=1."),
    ] = None,
    seed: Annotated[
        int, opt.data_option(help="Seed the rows held out to validate.")
    ] = 0,
    shown: opt.PrintOptions = opt.PrintOptions(),
) -> None:
    """Quantise a bundle to int8 again, and certify the loss. Exit code 3: more than
    --max-drop; the best file is kept.

    Example: compress quantize runs/first/bundle --data intents --max-drop 0.3
    """
    with user_errors(hint="The bundle was not changed."):
        from compress.commands import quantize as pipeline
        from compress.reporting import tables, terminal

        arguments: dict[str, Any] = {
            "bundle": bundle,
            "data": data,
            "method": method,
            "out": out,
            "int8": int8,
            "max_drop": max_drop / 100,
            "device": device,
            "columns": columns,
            "seed": seed,
            "overrides": overrides or [],
        }
        if shown.plan:
            print_forecast(pipeline.forecast_quantization, shown.as_json, **arguments)
            return
        result = pipeline.quantize(**arguments, say=printer(shown.as_json))
        if shown.as_json:
            print_json("quantize", terminal.quantized_values(result))
        else:
            for table in tables.latency_tables(
                (time.name, time) for time in result.times
            ):
                terminal.print_table(console(), table, wide=shown.wide)
            console().print(terminal.format_quantized(result))
            console().print(f"bundle: {result.bundle.path}")
    if not result.proof.certified:
        raise typer.Exit(UNCERTIFIED)


def push(
    bundle: Annotated[Path, typer.Argument(help="The folder of a bundle or a run.")],
    repo: Annotated[
        str, typer.Argument(help="On the hub, as owner/name; created if missing.")
    ],
    public: Annotated[
        bool, opt.output("--public", help="Make a new repository public.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be sent.")
    ] = False,
    as_json: opt.Json = False,
) -> None:
    """Publish a bundle on the hub, with its card. Private by default; the token is
    HF_TOKEN or your login.

    Example: compress push runs/first/bundle my-team/intents-small --dry-run
    """
    with user_errors():
        from compress.commands.push import push as run

        result = run(bundle, repo, private=not public, dry_run=dry_run)
        if as_json:
            print_json("push", asdict(result))
            return
        say = printer()
        for name, size in result.files.items():
            say(f"{size / 1e6:>9,.2f} MB  {name}")
        say(
            f"{sum(result.files.values()) / 1e6:>9,.2f} MB  in {len(result.files)} "
            "files"
        )
        facts = [f"{key} {value}" for key, value in result.card.items()]
        say(f"card: {'; '.join([*facts, *result.scores])}")
        if result.missing:
            say(f"missing from the card: {', '.join(result.missing)}")
        visibility = "private" if result.private else "public"
        say(
            f"would go to {result.repo}, {visibility} if it is new"
            if dry_run
            else f"published: {result.url}"
        )


@with_option_groups()
def predict(
    bundle: Annotated[Path, typer.Argument(help="The folder of a bundle or a run.")],
    texts: Annotated[
        list[str] | None,
        typer.Argument(help="Texts, or - for one per line of standard input."),
    ] = None,
    rows: Annotated[
        Path | None,
        opt.data_option(
            "--input",
            help="Answer the rows of this file: .csv, .tsv, .jsonl, .json, .parquet, "
            ".txt.",
        ),
    ] = None,
    answers: Annotated[
        Path | None,
        opt.file_output(
            "--output", help="Write answers here: .csv, .tsv, .jsonl, .npy."
        ),
    ] = None,
    text: opt.TextColumns = None,
    pair: Annotated[
        str | None,
        opt.data_option(help="Second text of a pair, or the questions' context."),
    ] = None,
    vector: VectorOptions = VectorOptions(),
    precision: Annotated[
        Literal["int8", "fp32", "fp16", "w8", "q4"],
        opt.output(help="Answer with this file."),
    ] = "int8",
    on_error: Annotated[
        Literal["stop", "skip"], opt.output(help="If a text is not UTF-8 or too long.")
    ] = "stop",
    as_json: opt.Json = False,
) -> None:
    """Label texts, tag words, answer questions, or compute vectors. Needs neither torch
    nor transformers.

    Example: compress predict runs/first/bundle --input rows.csv --output answers.csv
    """
    with user_errors(hint="No file was written. Run the same command again."):
        from compress.errors import DataError

        if rows is not None or answers is not None or text:
            if rows is None or answers is None or texts:
                raise DataError(
                    "predict: a file needs both --input and --output, and no texts"
                )
            predictor = _open(bundle, precision, vector, threads=os.cpu_count() or 1)
            _predict_file(
                predictor, rows, answers, text, pair, on_error, vector.vectors, as_json
            )
            return
        if vector.vectors != "float32":
            raise typer.BadParameter(
                "give an .npy file with --output", param_hint="--vectors"
            )
        if not texts:
            raise typer.BadParameter(
                "give texts, - for standard input, or a file with --input and --output"
            )
        from compress.exporters import predictor as stream

        second = None if pair is None else stream.decode(os.fsencode(pair), "--pair")
        piped = texts == ["-"]
        lines = (
            stream.read_lines(sys.stdin.buffer) if piped else map(os.fsencode, texts)
        )
        predictor = _open(bundle, precision, vector)
        skipped = 0
        with _print_answers(as_json) as show:
            for each in stream.answer_lines(
                predictor, lines, second=second, unit="line" if piped else "text"
            ):
                if each.error and on_error == "stop":
                    raise DataError(
                        f"{each.error}. The answers before it are above; --on-error "
                        "skip goes on after it"
                    )
                skipped += bool(each.error)
                show(each)
        if skipped:
            print(
                f"warning: {skipped:,} texts were skipped; errors are printed in their "
                "places",
                file=sys.stderr,
            )


def demo(
    bundle: Annotated[Path, typer.Argument(help="The folder of a bundle or a run.")],
    out: Annotated[
        Path | None,
        opt.output(help="The folder to write; may be omitted with --serve."),
    ] = None,
    serve: Annotated[
        bool,
        opt.output("--serve", help="Serve the page here and open it, until Ctrl-C."),
    ] = False,
    no_open: Annotated[
        bool, opt.output("--no-open", help="Do not open the page that is served.")
    ] = False,
    precision: Annotated[
        Literal["int8", "fp32", "fp16", "w8", "q4"],
        opt.output(help="Answer with this file."),
    ] = "int8",
    lan: opt.Lan = False,
    assets: opt.Assets = None,
    as_json: opt.Json = False,
) -> None:
    """Write a page that answers in the browser what you type: a folder for any web
    server, no network needed.

    Example: compress demo runs/first/bundle --serve
    """
    with user_errors(hint="Nothing was changed."), ExitStack() as stack:
        from compress.benchmark.browser.device import qr_code
        from compress.commands import demo as command
        from compress.errors import ExportError

        if out is None and not serve:
            raise ExportError(
                "nothing to do: give --out with the folder to write, or --serve, or "
                "both"
            )
        if (lan or no_open) and not serve:
            raise ExportError(
                f"{'--lan' if lan else '--no-open'}: only applies to a served page; "
                "add --serve"
            )
        say = printer(as_json)
        answer = printer(as_json, answer=True)
        folder = (
            out
            or Path(
                stack.enter_context(
                    tempfile.TemporaryDirectory(prefix="compress-demo.")
                )
            )
            / "site"
        )
        result = command.demo(
            bundle, folder, precision=precision, assets=assets, say=say
        )
        sizes = {**result.parts, "all": sum(result.sizes.values())}
        say(", ".join(f"{part} {size / 1e6:.2f} MB" for part, size in sizes.items()))
        link = stack.enter_context(command.serve(result, lan=lan)) if serve else None
        if as_json:
            print_json(
                "demo",
                {
                    "path": None if out is None else str(out),
                    "files": result.sizes,
                    "link": link,
                },
            )
        if out is not None:
            answer(f"page: {out / 'index.html'}, for any web server")
        if link is not None:
            with suppress(KeyboardInterrupt):
                answer(f"serving until Ctrl-C: {link}")
                if lan:
                    say(qr_code(link))
                if not no_open and not webbrowser.open(link):
                    say("no browser was found here: open the link yourself")
                while True:
                    time.sleep(3600)


def _open(
    bundle: Path, precision: "Precision", options: VectorOptions, *, threads: int = 1
) -> "Answering":
    """Open a bundle to answer texts, or to find the nearest lines of a file."""
    from compress.exporters.artifact import Bundle

    if options.top is not None and options.against is None:
        raise typer.BadParameter(
            "give the file to search with --against", param_hint="--top"
        )
    if options.prompt_name is not None and options.against is not None:
        raise typer.BadParameter(
            "a search uses the prompts query and document; leave the option out",
            param_hint="--prompt-name",
        )
    predictor = Bundle.load(bundle).open(precision, threads=threads)
    if options.prompt_name is not None:
        predictor = predictor.with_prompt(options.prompt_name)
    if options.against is None:
        return predictor
    from compress.exporters.row_files import open_index

    return open_index(predictor, options.against, options.top or 5)


def _predict_file(
    predictor: "Answering",
    rows: Path,
    answers: Path,
    columns: list[str] | None,
    pair: str | None,
    on_error: Literal["stop", "skip"],
    vectors: "StoredForm",
    as_json: bool,
) -> None:
    """Answer the rows of a file into another file."""
    from compress.exporters import row_files
    from compress.progress import Progress

    row_files.check_files(rows, answers)
    for note in row_files.list_notes(
        rows, predictor.task, columns, pair=pair is not None
    ):
        print(f"note: {note}", file=sys.stderr)
    began = time.monotonic()
    with Progress(rows.name, unit="rows", console=console(as_json)) as bar:

        def advance(answered: int, share: float) -> None:
            bar.total = answered / share if share else None
            bar.advance(answered - bar.done)

        count, skipped = row_files.predict_file(
            predictor,
            rows,
            answers,
            columns=columns,
            second=pair,
            on_error=on_error,
            vectors=vectors,
            say=advance,
        )
    seconds = time.monotonic() - began
    if as_json:
        print_json(
            "predict",
            {
                "output": str(answers),
                "rows": count,
                "skipped": skipped,
                "seconds": seconds,
            },
        )
    else:
        speed = f"{count / max(seconds, 1e-9):,.0f} rows / s"
        printer()(f"{answers}: {count:,} rows, {skipped:,} skipped; {speed}")


@contextmanager
def _print_answers(as_json: bool) -> "Iterator[Callable[[AnsweredLine], None]]":
    """Yield a function that prints an answer: a line, or an item of a JSON list that is
    closed even after an error."""
    prefix = f'{{"schema": "{schema("predict")}", "answers": ['

    def row(each: "AnsweredLine") -> None:
        line = f"error: {each.error}" if each.error else f"{each.answer}\t{each.text}"
        print(printable(line).replace("\n", "\\n"), flush=True)

    def item(each: "AnsweredLine") -> None:
        nonlocal prefix
        values = {"error": each.error} if each.answer is None else asdict(each.answer)
        print(
            f"{prefix}\n{json.dumps(values, ensure_ascii=False)}",
            end="",
            flush=True,
            file=results(),
        )
        prefix = ","

    if not as_json:
        yield row
        return
    try:
        yield item
    finally:
        print("\n]}" if prefix == "," else f"{prefix}]}}", flush=True, file=results())
