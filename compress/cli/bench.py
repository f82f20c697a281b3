"""`compress bench` and `report`: figures, and how they are shown."""

from pathlib import Path
from typing import Annotated

import typer

from compress.cli.options import console, grouped, print_result, told
from compress.config.options import (
    BatchSizes,
    DeviceOptions,
    Json,
    Lengths,
    ThreadCounts,
    budget,
    device_option,
    output,
)


@grouped()
def bench(
    bundles: Annotated[
        list[Path], typer.Argument(help="Bundles, or .onnx, .xml or .tflite files; they are raced together.")
    ],
    device: DeviceOptions = DeviceOptions(),
    precision: Annotated[
        str, device_option(help="Measure these files of the bundles, such as int8,fp32; default: all.")
    ] = "",
    threads: ThreadCounts = "1",
    batch: BatchSizes = "1",
    seq: Lengths = "128",
    rounds: Annotated[
        int, device_option(min=2, help="Measure in so many interleaved rounds, half of them in each pass.")
    ] = 8,
    runs: Annotated[int, device_option(min=1, help="Time so many runs in each round.")] = 15,
    sustain: Annotated[str, device_option(help="Then run each file without a pause for this long, such as 5m.")] = "",
    out: Annotated[Path | None, output(help="Write the result to this JSON file.")] = None,
    as_json: Json = False,
) -> None:
    """Measure latency on a device: interleaved, warmed up, in two passes, with a verdict on noise.

    Example: compress bench runs/first/bundle --device browser --lan --seq 32,128 --out phone.json
    """
    with told():
        from compress.benchmark import options
        from compress.commands.bench import bench as run
        from compress.records.bench_result import save
        from compress.reporting.terminal import bench_tables

        options.place(out)
        talk = console(as_json)
        result = run(
            bundles, device=device, precision=precision, threads=options.numbers("threads", threads),
            batch=options.numbers("batch", batch), seq=options.numbers("seq", seq), rounds=rounds, runs=runs,
            sustain=options.span(sustain) if sustain else None,
            say=lambda line: talk.print(line, markup=False, highlight=False, soft_wrap=True),
        )  # fmt: skip
        if out is not None:
            save(result, out)
        if as_json:
            print_result(result.to_json())
        else:
            for table in bench_tables(result):
                console(answer=True).print(table)


def report(
    inputs: Annotated[list[Path], typer.Argument(help="Runs, bundles, and files that `compress bench --out` wrote.")],
    html: Annotated[Path | None, output(help="Write one page to choose by, which opens offline.")] = None,
    at: Annotated[
        str | None, budget(help="Read latency there: a device, a setting, or both, such as browser, 32 tokens.")
    ] = None,
    budget_ms: Annotated[float | None, budget(min=0, help="Limit the median latency there, in milliseconds.")] = None,
    max_mb: Annotated[float | None, budget(min=0, help="Limit the size of the file, in MB.")] = None,
    min_score: Annotated[float | None, budget(help="Ask for at least this score, such as 0.9.")] = None,
    as_json: Json = False,
) -> None:
    """Compare the files of several bundles on every device they were measured on, and say which one to ship.

    Example: compress report runs/first runs/trimmed phone.json --html choice.html
    """
    with told():
        from compress.reporting import remarks, tables, terminal
        from compress.reporting.compare import Limits, compare, pick

        limits = Limits(budget_ms, max_mb, min_score)
        comparison = compare(inputs, at)
        chosen = pick(comparison, limits)
        talk = console(as_json, answer=True)
        if html is not None:
            from compress.io import written
            from compress.reporting.html import render_choice

            with written(html) as partial:
                partial.write_text(render_choice(comparison, limits, chosen), encoding="utf-8")
        if as_json:
            import json

            print_result(json.dumps(terminal.choice_values(comparison, limits, chosen), ensure_ascii=False, indent=1))
        else:
            talk.print(terminal.to_terminal(tables.choice_table(comparison, chosen), talk.width))
            headline = remarks.choice_headline(comparison, limits, chosen)
            for line in ("", headline, *remarks.choice_remarks(comparison, chosen)):
                talk.print(line, markup=False, highlight=False)
        if html is not None:
            talk.print(f"page: {html}", markup=False, highlight=False)
