"""`compress search`: the students that are best under a budget, and any of them as a bundle."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from compress.cli.options import (
    AllowCode,
    AllowPickle,
    Batch,
    Command,
    DeviceName,
    DevicePython,
    DeviceTimeout,
    Group,
    Json,
    Kind,
    LabelColumn,
    Lan,
    MaxDrop,
    Metric,
    OnWeakTeacher,
    Overrides,
    Precision,
    Resume,
    Seed,
    TextColumns,
    Threads,
    budget,
    console,
    data_option,
    device_option,
    output,
    print_result,
    search_option,
    told,
    training,
)

app = typer.Typer(cls=Group, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def search(
    context: typer.Context,
    teacher: Annotated[str | None, training(help="The teacher: an alias, a folder or a hub id.")] = None,
    data: Annotated[str | None, data_option(help="The data, as for distill.")] = None,
    out: Annotated[Path | None, output(help="The folder of the search.")] = None,
    space: Annotated[
        str,
        training(help="The space: width-depth, dynabert, autotinybert, mobilebert, albert or a .yaml."),
    ] = "width-depth",
    overrides: Overrides = None,
    max_latency_ms: Annotated[float | None, budget(help="Limit the latency of its file on --device.")] = None,
    speedup: Annotated[
        float | None, budget(help="Ask for so many times the speed of the teacher's file of that precision.")
    ] = None,
    max_params: Annotated[float | None, budget(help="Limit its parameters, such as 5e6.")] = None,
    max_file_mb: Annotated[float | None, budget(help="Limit the size of its file.")] = None,
    min_score: Annotated[float | None, budget(help="Ask for this score on the validation split.")] = None,
    objective: Annotated[
        list[str] | None,
        budget(help="Optimise latency, parameters, flops_per_token or file_mb. Repeatable."),
    ] = None,
    device: DeviceName = "local",
    lan: Lan = False,
    timeout: DeviceTimeout = 60.0,
    python: DevicePython = "python3",
    threads: Threads = 1,
    batch: Batch = 1,
    seq: Annotated[
        int | None, device_option(min=1, help="Measure at so many tokens; default: 128, or the space's max_length.")
    ] = None,
    file: Annotated[Literal["int8", "fp32"], device_option(help="Measure and ship this file.")] = "int8",
    max_drop: MaxDrop = 0.5,
    shapes: Annotated[int, device_option(help="Measure so many shapes, 5 to 64, to predict the others.")] = 16,
    rounds: Annotated[int, device_option(min=2, help="Measure in so many interleaved rounds.")] = 4,
    runs: Annotated[int, device_option(min=1, help="Time so many runs in each round.")] = 10,
    anchor: Annotated[list[str] | None, output(help="Compare with this bundle of the same task. Repeatable.")] = None,
    sampler: Annotated[str, search_option(help="Draw shapes by tpe, nsga2, gp or random.")] = "tpe",
    trials: Annotated[int | None, search_option(help="Score so many shapes; default: 200, plain 24.")] = None,
    minutes: Annotated[
        float | None, search_option(help="Take so many minutes for everything, instead of what the stages say.")
    ] = None,
    finalists: Annotated[int, search_option(help="Rank so many again after a short distillation.")] = 8,
    winners: Annotated[int, search_option(help="Distil so many fully.")] = 1,
    storage: Annotated[
        str | None,
        search_option(help="The study's database: an SQLite file or postgresql://...; default: in --out."),
    ] = None,
    name: Annotated[
        str | None, search_option(help="The name of the study in its storage; default: the folder's name.")
    ] = None,
    worker: Annotated[
        bool, search_option("--worker", help="Join the search in --storage and evaluate shapes for it.")
    ] = False,
    weights: Annotated[
        Path | None, search_option(help="With --worker: the folder of the search's weights on this machine.")
    ] = None,
    text: TextColumns = None,
    label: LabelColumn = None,
    kind: Kind = None,
    metric: Metric = None,
    seed: Seed = 0,
    precision: Precision = "auto",
    resume: Resume = False,
    gate: OnWeakTeacher = "refuse",
    allow_pickle: AllowPickle = False,
    allow_code: AllowCode = None,
    as_json: Json = False,
) -> None:
    """Find the students that are best under a budget on your device; the best one is distilled and shipped.

    Example: compress search --teacher minilm --data intents --out runs/found --max-latency-ms 4 --minutes 60
    """
    if context.invoked_subcommand is not None:
        return
    shown = console(as_json)
    hint = "" if worker else f"Continue with: compress search ... --out {out} --resume"
    with told(hint=hint):
        from compress.errors import SearchError

        if worker:
            from compress.commands.search import work

            if storage is None:
                raise SearchError("--worker: joins a search in its storage; give --storage, as that search was given")
            work(storage, name=name, weights=weights, minutes=minutes, allow_code=allow_code, console=shown)
            return
        missing = [
            f"--{each}" for each, given in {"teacher": teacher, "data": data, "out": out}.items() if given is None
        ]
        if teacher is None or data is None or out is None:
            raise SearchError(f"search: needs {', '.join(missing)} too; see compress search --help")
        from compress.commands import preflight
        from compress.nas import space_file

        chosen = space_file.load(space, overrides or [])
        preflight.check(
            chosen, teacher=teacher, out=out, data=data, seed=seed, resume=resume, allow_pickle=allow_pickle,
            allow_code=allow_code,
        )  # fmt: skip
        from compress.benchmark.devices import open_device  # seconds: torch
        from compress.commands.search import search as run
        from compress.pruning.budget import device_messages

        say = device_messages(device, shown)
        found = run(
            teacher=teacher, data=data, out=out, space=chosen, max_latency_ms=max_latency_ms, speedup=speedup,
            max_params=max_params, max_file_mb=max_file_mb, min_score=min_score,
            objectives=list(dict.fromkeys(["score", *(objective or ["latency"])])), device=device,
            open_as=partial(open_device, lan=lan, timeout=timeout, python=python, say=say), threads=threads,
            batch=batch, seq=seq, file=file, max_drop=max_drop / 100, shapes=shapes, rounds=rounds, runs=runs,
            anchors=anchor or [], sampler=sampler, trials=trials, minutes=minutes, finalists=finalists,
            winners=winners, storage=storage, name=name, text=text, label=label, kind=kind, metric=metric, seed=seed,
            precision=precision, resume=resume, gate=gate, allow_pickle=allow_pickle, allow_code=allow_code,
            console=shown,
        )  # fmt: skip
        if as_json:
            print_result(found.to_json())


@app.command(cls=Command)
def show(
    study: Annotated[Path, typer.Argument(help="The folder of a search.")],
    trial: Annotated[int | None, typer.Argument(help="Number of a trial; without it, the front is shown.")] = None,
    bundle: Annotated[Path | None, output(help="The new folder for the trial's student.")] = None,
    train: Annotated[bool, typer.Option("--train", help="Distil it fully first, as the winner was.")] = False,
    allow_code: AllowCode = None,
    as_json: Json = False,
) -> None:
    """Show the front of a search, or write one of its students as a bundle.

    Example: compress search show runs/found 12 --bundle student12
    """
    with told(hint="The search is as it was."):
        from compress.errors import SearchError
        from compress.nas import record

        if (trial is None) != (bundle is None):
            raise SearchError(
                "show: a trial and --bundle belong together, as in: compress search show STUDY 12 --bundle OUT"
            )
        if trial is None or bundle is None:
            found = record.read(study)
            if as_json:
                print_result(found.to_json())
            else:
                record.show(found, console())
            return
        from compress.commands.search import show as write

        made = write(study, trial, bundle, train=train, allow_code=allow_code, console=console(as_json))
        if as_json:
            print_result((made.path / "report.json").read_text(encoding="utf-8"))
        else:
            console().print(f"bundle: {made.path}", markup=False, highlight=False)
