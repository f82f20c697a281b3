"""`compress export`, `quantize`, `push` and `demo`: convert, publish and show a
bundle."""

import tempfile
import time
import webbrowser
from contextlib import ExitStack, suppress
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
    user_errors,
    with_option_groups,
)
from compress.config import options as opt
from compress.exporters import formats

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
            "--seq", help=f"Tokens in the race, or of {', '.join(FIXED_LENGTH)} files."
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """Choose what to write, and where."""

    out: Annotated[
        Path | None,
        opt.output(help="New folder; by default, onnx goes into the bundle."),
    ] = None
    to: Annotated[FormatName, opt.output("--for", help="Write for this runtime")] = (
        "onnx"
    )
    precision: Annotated[
        str, opt.output(help=f"Weight formats: {','.join(WEIGHTS)}.")
    ] = ""
    opset: Annotated[
        int | None, opt.output(help="Export ONNX again at this opset, 12 to 23.")
    ] = None

    @property
    def precisions(self) -> list[str]:
        return [each.strip() for each in self.precision.split(",") if self.precision]


@dataclass(frozen=True, kw_only=True)
class HeldOutOptions(opt.ColumnOptions):
    """Name the data that a bundle is quantised on."""

    data: Annotated[
        str, opt.data_option(help="The data it was trained on, as for distill.")
    ]
    seed: Annotated[
        int, opt.data_option(help="Random seed of the rows held out for validation.")
    ] = 0


@with_option_groups(without=("affinity", "native", "webgpu", "plan"))
def export(
    model: Annotated[
        str,
        typer.Argument(help="A bundle, run or checkpoint (alias, folder, hub id)."),
    ],
    target: TargetOptions = TargetOptions(),
    race: TuneOptions = TuneOptions(),
    max_drop: opt.MaxDrop = opt.MAX_DROP,
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
        from compress.commands import preflight
        from compress.errors import ExportError
        from compress.exporters.export import NAME, check_settings
        from compress.exporters.manifest import find_bundle

        preflight.check_files(
            model=model, data=data, columns=columns, options=checkpoint
        )
        bundle = find_bundle(Path(model))
        check_settings(
            bundle or Path(model),
            target.out,
            to=target.to,
            precisions=target.precisions,
            opset=target.opset,
            in_place=bundle is not None,
        )

        from compress.benchmark import arguments
        from compress.commands import export as command
        from compress.exporters.writers.context import FixedOptions
        from compress.provenance import command_line
        from compress.reporting.terminal import print_export

        fixed_length = target.to in FIXED_LENGTH
        if max_drop != opt.MAX_DROP and not (race.tune or fixed_length):
            raise ExportError("--max-drop: only applies to a race; add --tune")
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
            target.out,
            to=target.to,
            precisions=target.precisions,
            opset=target.opset,
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
    source: HeldOutOptions,
    out: Annotated[
        Path | None,
        opt.output(help="A new bundle; default: replace the file in place."),
    ] = None,
    method: Annotated[
        Literal["auto", "dynamic", "static", "smoothquant", "qat"],
        opt.training(help="Quantise by this method; qat trains again"),
    ] = "auto",
    int8: opt.Int8Options = opt.Int8Options(),
    max_drop: opt.MaxDrop = opt.MAX_DROP,
    device: opt.DeviceOptions = opt.DeviceOptions(),
    overrides: Annotated[
        list[str] | None,
        opt.training("--set", help="qat: change a number: stages.0.epochs=1."),
    ] = None,
    shown: opt.PrintOptions = opt.PrintOptions(),
) -> None:
    """Quantise a bundle to int8 again, and certify the loss. Exit code 3: the loss
    exceeds --max-drop; the best file is kept.

    Example: compress quantize runs/first/bundle --data intents --max-drop 0.3
    """
    with user_errors(hint="The bundle was not changed."):
        from compress.commands import preflight
        from compress.exporters.artifact import check_destination

        preflight.check_files(bundle=bundle, data=source.data, columns=source)
        check_destination(bundle, out)

        from compress.commands import quantize as pipeline
        from compress.reporting import tables, terminal

        arguments: dict[str, Any] = {
            "bundle": bundle,
            "data": source.data,
            "method": method,
            "out": out,
            "int8": int8,
            "max_drop": max_drop / 100,
            "device": device,
            "columns": source,
            "seed": source.seed,
            "overrides": overrides or [],
        }
        if shown.plan:
            print_forecast(
                pipeline.forecast_quantization,
                shown.as_json,
                **arguments,
                console=console(shown.as_json),
            )
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
    bundle: opt.BundleFolder,
    repo: Annotated[
        str, typer.Argument(help="Hub repository, as owner/name; created if missing.")
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


def demo(
    bundle: opt.BundleFolder,
    out: Annotated[
        Path | None,
        opt.output(help="The folder to write; may be omitted with --serve."),
    ] = None,
    serve: Annotated[
        bool,
        opt.output("--serve", help="Serve the page here and open it, until Ctrl-C."),
    ] = False,
    no_open: Annotated[
        bool, opt.output("--no-open", help="Do not open the served page.")
    ] = False,
    precision: opt.AnsweringFile = "int8",
    data: Annotated[
        str | None,
        opt.data_option(help="Offer rows of this data to try; show its label names."),
    ] = None,
    title: Annotated[
        str | None, opt.output(help="Title of the page; default: the data's name.")
    ] = None,
    lan: opt.Lan = False,
    assets: opt.Assets = None,
    as_json: opt.Json = False,
) -> None:
    """Write a page that runs the model in the browser: a folder for any web server, no
    network needed.

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
            bundle,
            folder,
            precision=precision,
            data=data,
            title=title,
            assets=assets,
            say=say,
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
