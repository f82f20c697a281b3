"""`compress bench`, `gate` and `report`: measure, compare, and decide."""

import json
import tempfile
import webbrowser
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from compress.cli.options import (
    FAILED,
    UNDECIDED,
    console,
    print_json,
    printer,
    user_errors,
    with_option_groups,
)
from compress.config import options as opt


@dataclass(frozen=True, kw_only=True)
class TimingOptions:
    """Choose the settings and rounds of a race, and what follows them."""

    threads: opt.ThreadCounts = "1"
    batch: opt.BatchSizes = "1"
    seq: Annotated[
        str | None,
        opt.device_option(
            help="Lengths in tokens, such as 32,128; default: 128, or the bundles' "
            "max_length if that is less."
        ),
    ] = None
    rounds: Annotated[
        int,
        opt.device_option(min=2, help="Number of rounds, half of them in each pass."),
    ] = 8
    runs: Annotated[int, opt.device_option(min=1, help="Timed runs in each round.")] = (
        15
    )
    sustain: Annotated[
        str,
        opt.device_option(help="Then run each file nonstop for this long, such as 5m."),
    ] = ""
    visitors: Annotated[
        int,
        opt.device_option(
            min=1, help="browser: visitors to wait for; a result file each."
        ),
    ] = 1


@with_option_groups(without=("plan",))
def bench(
    bundles: Annotated[
        list[Path],
        typer.Argument(
            help="Bundles or model files: .onnx, .ort, .xml, .tflite, .pte."
        ),
    ],
    data: Annotated[
        str | None,
        opt.data_option(
            help="With --formats: data to calibrate npu and int8 openvino."
        ),
    ] = None,
    formats: Annotated[
        str,
        opt.device_option(
            help="Export to these formats and race them: all, or onnx, ort, text, "
            "openvino, executorch, litert, npu."
        ),
    ] = "",
    precision: Annotated[
        str, opt.device_option(help="Race only these files, such as int8,fp32.")
    ] = "",
    timing: TimingOptions = TimingOptions(),
    device: opt.DeviceOptions = opt.DeviceOptions(),
    out: Annotated[
        Path | None,
        opt.file_output(help="Write the result here, for `compress report`."),
    ] = None,
    shown: opt.PrintOptions = opt.PrintOptions(),
) -> None:
    """Measure latency on this machine or another device. Files are warmed up and run in
    turns, in two passes; noisy results are marked.

    All options have defaults: name a bundle, and its files are timed on this machine.

    Example: compress bench runs/first/bundle --device browser --lan --seq 32,128 --out
    phone.json
    """
    with user_errors(
        hint="Unfinished measurements are not saved. Run the same command again."
    ):
        from compress.benchmark import arguments
        from compress.commands.bench import bench as run
        from compress.commands.bench import bench_visitors
        from compress.exporters.manifest import list_input_files
        from compress.outputs import check_output_file
        from compress.records.latency import DeviceError
        from compress.reporting.terminal import print_bench

        visitors = timing.visitors
        if visitors > 1 and shown.as_json:
            raise DeviceError(
                "--json: prints one result, and each of --visitors has one; "
                "expected --out alone, which writes a file for each"
            )
        outs = _number(out, visitors)
        for each in outs:
            check_output_file(each, "out", "latency.json", list_input_files(bundles))
        seq = timing.seq
        say = printer(shown.as_json)
        measure = partial(
            run,
            bundles,
            device=device,
            precision=precision,
            formats=formats,
            data=data,
            threads=arguments.parse_numbers("threads", timing.threads),
            batch=arguments.parse_numbers("batch", timing.batch),
            seq=() if seq is None else arguments.parse_numbers("seq", seq),
            rounds=timing.rounds,
            runs=timing.runs,
            sustain=arguments.parse_duration(timing.sustain)
            if timing.sustain
            else None,
            say=say,
        )
        results = (
            [measure()]
            if visitors == 1
            else bench_visitors(
                measure,
                visitors,
                device=device.device,
                say=say,
            )
        )
        for number, result in enumerate(results):
            if out is not None:
                result.write(outs[number])
            if shown.as_json:
                print_json("bench", result.to_json())
            else:
                print_bench(console(answer=True), result, wide=shown.wide)


def _number(out: Path | None, visitors: int) -> list[Path]:
    """List the files to write: one for each visitor, numbered if there are several."""
    if out is None:
        return []
    if visitors == 1:
        return [out]
    return [out.with_stem(f"{out.stem}-{number}") for number in range(1, visitors + 1)]


@dataclass(frozen=True, kw_only=True)
class GateLimits:
    """Limit what a new model may lose, and the time to measure it."""

    max_slower: Annotated[str, opt.budget(help="Maximum slowdown, such as 5%.")] = "5%"
    max_drop: Annotated[
        float | None,
        opt.budget(
            "--max-drop",
            min=0,
            max=100,
            help="Maximum points lost on --data; default: 0.5.",
        ),
    ] = None
    max_larger: Annotated[
        str | None,
        opt.budget(help="Maximum growth of the file, such as 5%; default: any."),
    ] = None
    minutes: Annotated[
        float, opt.budget(min=0.1, help="Maximum minutes to measure latency.")
    ] = 5.0


@dataclass(frozen=True, kw_only=True)
class GateFiles:
    """The files that a gate writes its result to."""

    markdown: Annotated[
        Path | None, opt.file_output(help="Write the result to this file as Markdown.")
    ] = None
    junit: Annotated[
        Path | None, opt.file_output(help="Write the result to this file as JUnit XML.")
    ] = None


@with_option_groups()
def gate(
    old: Annotated[
        Path,
        typer.Argument(help="The current model: a bundle, or its .onnx file."),
    ],
    new: Annotated[Path, typer.Argument(help="The model to replace it with.")],
    limits: GateLimits = GateLimits(),
    data: Annotated[
        str | None, opt.data_option(help="Score both on this data, as for distill.")
    ] = None,
    columns: opt.ColumnOptions = opt.ColumnOptions(),
    precision: Annotated[
        Literal["int8", "fp32", "fp16", "w8", "q4"],
        opt.device_option(help="Compare these files"),
    ] = "int8",
    device: opt.DeviceSettingOptions = opt.DeviceSettingOptions(),
    files: GateFiles = GateFiles(),
    as_json: opt.Json = False,
) -> None:
    """Check that a new model is not slower, worse or larger than the old one by more
    than allowed.

    Exit code 0: passed; 1: failed; 3: undecided in this time or with these rows.

    Example: compress gate runs/first/bundle runs/second/bundle --max-slower 5%
    --max-drop 0.3 --data intents
    """
    with user_errors(hint="Nothing was written. Run the same command again."):
        from compress.benchmark import arguments
        from compress.commands.gate import gate as run
        from compress.errors import OutputError
        from compress.exporters.manifest import list_input_files
        from compress.outputs import check_output_file, output_file
        from compress.reporting.terminal import (
            gate_junit,
            gate_markdown,
            gate_table,
            print_table,
        )

        outputs = (
            ("markdown", files.markdown, "gate.md", gate_markdown),
            ("junit", files.junit, "gate.xml", gate_junit),
        )
        for option, path, example, _ in outputs:
            if path is not None:
                check_output_file(path, option, example, list_input_files([old, new]))
        same = [each.resolve() for each in (files.markdown, files.junit) if each]
        if len(set(same)) < len(same):
            raise OutputError(
                f"--markdown and --junit {files.junit}: are the same file; expected "
                "two different ones"
            )
        result = run(
            old,
            new,
            max_slower=arguments.parse_percentage("max-slower", limits.max_slower),
            max_drop=None if limits.max_drop is None else limits.max_drop / 100,
            max_larger=None
            if limits.max_larger is None
            else arguments.parse_percentage("max-larger", limits.max_larger),
            data=data,
            columns=columns,
            precision=precision,
            device=device,
            minutes=limits.minutes,
            say=printer(as_json),
        )
        for _, path, _, write in outputs:
            if path is not None:
                with output_file(path) as unfinished:
                    unfinished.write_text(write(result), encoding="utf-8")
        if as_json:
            print_json(
                "gate", {"outcome": result.outcome, **json.loads(result.to_json())}
            )
        else:
            print_table(
                console(answer=True),
                gate_table(result),
                more="in the files and in JSON",
            )
            for check in result.checks:
                if check.outcome != "passed":
                    console(answer=True).print(
                        f"{check.what}: {check.outcome}: {check.reason}"
                    )
    if result.outcome != "passed":
        raise typer.Exit(FAILED if result.outcome == "failed" else UNDECIDED)


def report(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            help="Runs, bundles, and files written by `compress bench --out`."
        ),
    ],
    html: Annotated[
        Path | None,
        opt.file_output(help="Write the comparison to one page, which opens offline."),
    ] = None,
    at: Annotated[
        str | None,
        opt.budget(
            help="Where to compare latency: a device, a setting, or both, such as "
            "`browser, 32 tokens`."
        ),
    ] = None,
    budget_ms: Annotated[
        float | None,
        opt.budget(min=0, help="Maximum median latency there, in milliseconds."),
    ] = None,
    max_mb: Annotated[
        float | None, opt.budget(min=0, help="Maximum size of the file, in MB.")
    ] = None,
    min_score: Annotated[
        float | None, opt.budget(help="Minimum score, such as 0.9.")
    ] = None,
    show: Annotated[
        bool, opt.output("--open", help="Open the page in your browser.")
    ] = False,
    wide: opt.Wide = False,
    as_json: opt.Json = False,
) -> None:
    """Compare the files of several bundles on all devices where they were measured, and
    say which one to ship.

    Example: compress report runs/first runs/trimmed phone.json --html choice.html
    """
    with user_errors():
        from compress.exporters.manifest import list_input_files
        from compress.outputs import check_output_file, output_file
        from compress.reporting import remarks, tables, terminal
        from compress.reporting.compare import Limits, compare, pick

        if html is not None:
            check_output_file(html, "html", "choice.html", list_input_files(inputs))
        limits = Limits(budget_ms, max_mb, min_score)
        comparison = compare(inputs, at)
        chosen = pick(comparison, limits)
        screen = console(as_json, answer=True)
        if show and html is None:
            html = Path(tempfile.mkdtemp(prefix="compress-report-")) / "choice.html"
        if html is not None:
            from compress.reporting.html import render_comparison

            with output_file(html) as unfinished:
                unfinished.write_text(
                    render_comparison(comparison, limits, chosen), encoding="utf-8"
                )
        if as_json:
            print_json("report", terminal.choice_values(comparison, limits, chosen))
        else:
            terminal.print_table(
                screen, tables.choice_table(comparison, chosen), wide=wide
            )
            headline = remarks.choice_headline(comparison, limits, chosen)
            for line in ("", headline, *remarks.choice_remarks(comparison, chosen)):
                screen.print(line)
        if html is not None:
            screen.print(f"page: {html}", soft_wrap=True)
            if show and not webbrowser.open(html.resolve().as_uri()):
                screen.print("no browser was found here: open the page yourself")
