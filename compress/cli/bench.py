"""`compress bench` and `report`: figures, and how they are shown."""

from pathlib import Path
from typing import Annotated

import typer

from compress.cli.options import DevicePython, DeviceTimeout, Json, console, print_result, told


def bench(
    bundles: Annotated[list[Path], typer.Argument(help="Bundles, .onnx, .xml or .tflite files: raced together.")],
    device: Annotated[str, typer.Option(help="local, ssh:[user@]host[:port], browser, adb or adb:SERIAL.")] = "local",
    precision: Annotated[str, typer.Option(help="Which files of the bundles, as in int8,fp32; all of them.")] = "",
    threads: Annotated[str, typer.Option(help="Thread counts, comma-separated.")] = "1",
    batch: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1",
    seq: Annotated[str, typer.Option(help="Lengths in tokens, comma-separated.")] = "128",
    rounds: Annotated[int, typer.Option(min=2, help="Interleaved rounds per setting, half of them in each pass.")] = 8,
    runs: Annotated[int, typer.Option(min=1, help="Timed runs per round.")] = 15,
    sustain: Annotated[str, typer.Option(help="Then each file without pause, as in 5m; at the first setting.")] = "",
    affinity: Annotated[str, typer.Option(help="CPUs to keep it on, as in 0-3; not in a browser.")] = "",
    lan: Annotated[
        bool, typer.Option("--lan", help="browser: other machines of the network may open the page.")
    ] = False,
    timeout: DeviceTimeout = 60.0,
    python: DevicePython = "python3",
    native: Annotated[
        Path | None, typer.Option(help="adb: an onnxruntime_perf_test or benchmark_model to run on the phone.")
    ] = None,
    assets: Annotated[
        Path | None, typer.Option(help="browser, adb: onnxruntime-web's tarball or folder, where npm cannot get it.")
    ] = None,
    webgpu: Annotated[bool, typer.Option("--webgpu", help="browser, adb: on the GPU what it has kernels for.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the result to this JSON file.")] = None,
    as_json: Json = False,
) -> None:
    """Measure latency on a device: interleaved, warmed up, in two passes, with a verdict on noise."""
    with told():
        from compress.benchmark import options
        from compress.commands.bench import bench as run
        from compress.records.bench_result import save
        from compress.reporting.tables import bench_tables

        options.place(out)
        talk = console(as_json)
        result = run(
            bundles, device=device, precision=precision, threads=options.numbers("threads", threads),
            batch=options.numbers("batch", batch), seq=options.numbers("seq", seq), rounds=rounds, runs=runs,
            sustain=options.span(sustain) if sustain else None, affinity=options.cpus(affinity), lan=lan,
            timeout=timeout, python=python, native=native, assets=assets, webgpu=webgpu,
            say=lambda line: talk.print(line, markup=False, highlight=False, soft_wrap=True),
        )  # fmt: skip
        if out is not None:
            save(result, out)
        if as_json:
            print_result(result.to_json())
        else:
            for table in bench_tables(result):
                talk.print(table)


def report(
    inputs: Annotated[list[Path], typer.Argument(help="Runs, bundles, and files of `compress bench --out`.")],
    html: Annotated[Path | None, typer.Option(help="Write one page that opens offline, to choose by.")] = None,
    at: Annotated[
        str | None, typer.Option(help="Where latency is read: a device, a setting, or both, as in browser, 32 tokens.")
    ] = None,
    budget_ms: Annotated[
        float | None, typer.Option(min=0, help="The median may take so many milliseconds there.")
    ] = None,
    max_mb: Annotated[float | None, typer.Option(min=0, help="The file may have so many MB.")] = None,
    min_score: Annotated[float | None, typer.Option(help="The score must be at least this, as 0.9.")] = None,
    as_json: Json = False,
) -> None:
    """Compare the files of several bundles on every device they were measured on, and say which one to ship."""
    with told():
        from compress.reporting import remarks, tables
        from compress.reporting.compare import Limits, compare, pick

        limits = Limits(budget_ms, max_mb, min_score)
        comparison = compare(inputs, at)
        chosen = pick(comparison, limits)
        talk = console(as_json)
        if html is not None:
            from compress.io import written
            from compress.reporting.html import render_choice

            with written(html) as partial:
                partial.write_text(render_choice(comparison, limits, chosen), encoding="utf-8")
        if as_json:
            import json

            print_result(json.dumps(tables.choice_values(comparison, limits, chosen), ensure_ascii=False, indent=1))
        else:
            talk.print(tables.to_terminal(tables.choice_table(comparison, chosen), talk.width))
            headline = remarks.choice_headline(comparison, limits, chosen)
            for line in ("", headline, *remarks.choice_remarks(comparison, chosen)):
                talk.print(line, markup=False, highlight=False)
        if html is not None:
            talk.print(f"page: {html}", markup=False, highlight=False)
