"""`compress bench`, `gate` and `report`: figures, how they are shown, and what follows from them."""

import json
import tempfile
import webbrowser
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from compress.cli.options import FAILED, UNDECIDED, console, grouped, print_json, told
from compress.config.options import (
    Batch,
    BatchSizes,
    DeviceOptions,
    Json,
    LabelColumn,
    Lengths,
    TextColumns,
    ThreadCounts,
    Threads,
    Wide,
    budget,
    data_option,
    device_option,
    output,
)


@grouped()
def bench(
    bundles: Annotated[list[Path], typer.Argument(help="Bundles, or .onnx, .xml, .tflite files, raced together.")],
    device: DeviceOptions = DeviceOptions(),
    precision: Annotated[str, device_option(help="Files of the bundles: int8,fp32; default: all.")] = "",
    threads: ThreadCounts = "1",
    batch: BatchSizes = "1",
    seq: Lengths = "128",
    rounds: Annotated[int, device_option(min=2, help="Measure in so many rounds, half in each pass.")] = 8,
    runs: Annotated[int, device_option(min=1, help="Time so many runs in each round.")] = 15,
    sustain: Annotated[str, device_option(help="Then run each without a pause so long, as 5m.")] = "",
    visitors: Annotated[int, device_option(min=1, help="browser: measure so many in turn, a file each.")] = 1,
    out: Annotated[Path | None, output(help="Write the result to this JSON file.")] = None,
    wide: Wide = False,
    as_json: Json = False,
) -> None:
    """Measure latency on a device: interleaved, warmed up, in two passes, with a verdict on noise.

    Example: compress bench runs/first/bundle --device browser --lan --seq 32,128 --out phone.json
    """
    with told(hint="A device that was not measured to its end has no file: the same command begins again."):
        from compress.benchmark import options
        from compress.commands.bench import bench as run
        from compress.commands.bench import bench_visitors
        from compress.reporting.terminal import print_bench

        options.check_output(out)
        talk = console(as_json)
        asked: dict[str, Any] = {
            "device": device, "precision": precision, "threads": options.parse_numbers("threads", threads),
            "batch": options.parse_numbers("batch", batch), "seq": options.parse_numbers("seq", seq),
            "rounds": rounds, "runs": runs, "sustain": options.parse_duration(sustain) if sustain else None,
            "say": lambda line: talk.print(line, markup=False, highlight=False, soft_wrap=True),
        }  # fmt: skip
        results = [run(bundles, **asked)] if visitors == 1 else bench_visitors(bundles, visitors, **asked)
        for number, result in enumerate(results, 1):
            if out is not None:
                result.write(out if visitors == 1 else out.with_stem(f"{out.stem}-{number}"))
            if as_json:
                print_json("bench", result.to_json())
            else:
                print_bench(console(answer=True), result, wide=wide)


@grouped()
def gate(
    old: Annotated[Path, typer.Argument(help="The model in use: a bundle, or an .onnx file of one.")],
    new: Annotated[Path, typer.Argument(help="The model that is to replace it.")],
    max_slower: Annotated[str, budget(help="Allow it to take so much longer, such as 5%.")] = "5%",
    max_drop: Annotated[
        float, budget("--max-drop", min=0, max=100, help="Points of the score that may be lost.")
    ] = 0.5,
    max_larger: Annotated[str | None, budget(help="Allow its file to be so much larger; else any.")] = None,
    data: Annotated[str | None, data_option(help="Score both on this data, as for distill.")] = None,
    text: TextColumns = None,
    label: LabelColumn = None,
    precision: Annotated[
        Literal["int8", "fp32", "fp16", "w8", "q4"], device_option(help="Compare these files")
    ] = "int8",
    device: DeviceOptions = DeviceOptions(),
    threads: Threads = 1,
    batch: Batch = 1,
    seq: Annotated[int | None, device_option(min=1, help="Tokens; default: 128, or what the bundles read.")] = None,
    minutes: Annotated[float, budget(min=0.1, help="Measure latency for so long at most.")] = 5.0,
    markdown: Annotated[Path | None, output(help="Write the result to this file, for people.")] = None,
    junit: Annotated[Path | None, output(help="Write the result to this file, as JUnit's XML.")] = None,
    as_json: Json = False,
) -> None:
    """Tell whether a new model is slower, worse or larger than the one it is to replace, by more than is allowed.

    Exit code 0: passed; 1: failed; 3: cannot be told, in this time or with these rows.

    Example: compress gate runs/first/bundle runs/second/bundle --max-slower 5% --max-drop 0.3 --data intents
    """
    with told(hint="Nothing was written: the same command begins again."):
        from compress.benchmark import options
        from compress.commands.gate import gate as run
        from compress.io import atomic_file
        from compress.reporting.terminal import gate_junit, gate_markdown, gate_table, print_table

        options.check_output(markdown, "markdown", "gate.md")
        options.check_output(junit, "junit", "gate.xml")
        shown, answer = console(as_json), console(answer=True)
        result = run(
            old, new, max_slower=options.parse_percentage("max-slower", max_slower), max_drop=max_drop / 100,
            max_larger=None if max_larger is None else options.parse_percentage("max-larger", max_larger), data=data,
            text=text, label=label, precision=precision, device=device, threads=threads, batch=batch, seq=seq,
            minutes=minutes, say=partial(shown.print, markup=False, highlight=False, soft_wrap=True),
        )  # fmt: skip
        for path, content in ((markdown, gate_markdown(result)), (junit, gate_junit(result))):
            if path is not None:
                with atomic_file(path) as partly:
                    partly.write_text(content, encoding="utf-8")
        if as_json:
            print_json("gate", {"outcome": result.outcome, **json.loads(result.to_json())})
        else:
            print_table(answer, gate_table(result), more="in the files and in JSON")
            for one in result.checks:
                if one.outcome != "passed":
                    answer.print(f"{one.what}: {one.outcome}: {one.reason}", markup=False, highlight=False)
    if result.outcome != "passed":
        raise typer.Exit(FAILED if result.outcome == "failed" else UNDECIDED)


def report(
    inputs: Annotated[list[Path], typer.Argument(help="Runs, bundles, and files that `compress bench --out` wrote.")],
    html: Annotated[Path | None, output(help="Write one page to choose by, which opens offline.")] = None,
    at: Annotated[
        str | None, budget(help="Read latency there: a device, a setting, or both, such as browser, 32 tokens.")
    ] = None,
    budget_ms: Annotated[float | None, budget(min=0, help="Limit the median latency there, in milliseconds.")] = None,
    max_mb: Annotated[float | None, budget(min=0, help="Limit the size of the file, in MB.")] = None,
    min_score: Annotated[float | None, budget(help="Ask for at least this score, such as 0.9.")] = None,
    show: Annotated[bool, output("--open", help="Open the page in your browser.")] = False,
    wide: Wide = False,
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
        if show and html is None:
            html = Path(tempfile.mkdtemp(prefix="compress-report-")) / "choice.html"
        if html is not None:
            from compress.io import atomic_file
            from compress.reporting.html import render_choice

            with atomic_file(html) as partial:
                partial.write_text(render_choice(comparison, limits, chosen), encoding="utf-8")
        if as_json:
            print_json("report", terminal.choice_values(comparison, limits, chosen))
        else:
            terminal.print_table(talk, tables.choice_table(comparison, chosen), wide=wide)
            headline = remarks.choice_headline(comparison, limits, chosen)
            for line in ("", headline, *remarks.choice_remarks(comparison, chosen)):
                talk.print(line, markup=False, highlight=False)
        if html is not None:
            talk.print(f"page: {html}", markup=False, highlight=False, soft_wrap=True)
            if show and not webbrowser.open(html.resolve().as_uri()):
                talk.print("no browser was found here: open the page yourself", highlight=False)
