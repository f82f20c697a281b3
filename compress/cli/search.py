"""`compress search`: the students that are best under a budget, and any of them as a bundle."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from compress.cli.options import (
    AllowCode,
    AllowPickle,
    DevicePython,
    DeviceTimeout,
    Json,
    OnWeakTeacher,
    Overrides,
    Precision,
    Resume,
    Seed,
    console,
    print_result,
    told,
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def search(
    context: typer.Context,
    teacher: Annotated[str | None, typer.Option(help="Alias (minilm, bert-base, ...), folder or hub id.")] = None,
    data: Annotated[str | None, typer.Option(help="As for distill.")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory of the search.")] = None,
    space: Annotated[
        str,
        typer.Option(help="width-depth, dynabert, autotinybert, mobilebert, albert, or path of a .yaml file."),
    ] = "width-depth",
    overrides: Overrides = None,
    max_latency_ms: Annotated[
        float | None, typer.Option(help="What one forward of its file may take on --device.")
    ] = None,
    speedup: Annotated[
        float | None, typer.Option(help="So many times faster than the teacher's own file of that precision there.")
    ] = None,
    max_params: Annotated[float | None, typer.Option(help="Parameters it may have, as in 5e6.")] = None,
    max_file_mb: Annotated[float | None, typer.Option(help="What its file may have.")] = None,
    min_score: Annotated[float | None, typer.Option(help="What it must score on the validation split.")] = None,
    objective: Annotated[
        list[str] | None,
        typer.Option(help="latency, parameters, flops_per_token or file_mb, beside the score; repeatable."),
    ] = None,
    device: Annotated[str, typer.Option(help="Where latency is measured: as for bench.")] = "local",
    lan: Annotated[bool, typer.Option("--lan", help="A browser of another machine may be that device.")] = False,
    timeout: DeviceTimeout = 60.0,
    python: DevicePython = "python3",
    threads: Annotated[int, typer.Option(min=1, help="Threads it is measured on.")] = 1,
    batch: Annotated[int, typer.Option(min=1, help="Rows it is measured on.")] = 1,
    seq: Annotated[
        int | None, typer.Option(min=1, help="Tokens in each; default: 128, or the space's max_length.")
    ] = None,
    file: Annotated[Literal["int8", "fp32"], typer.Option(help="Which file is measured and shipped.")] = "int8",
    max_drop: Annotated[
        float, typer.Option(min=0, max=100, help="Points of the score that the shipped int8 file may lose.")
    ] = 0.5,
    shapes: Annotated[int, typer.Option(help="How many are measured to predict the others, 5 to 64.")] = 16,
    rounds: Annotated[int, typer.Option(min=2, help="Interleaved rounds of each measurement.")] = 4,
    runs: Annotated[int, typer.Option(min=1, help="Timed runs per round.")] = 10,
    anchor: Annotated[
        list[str] | None, typer.Option(help="A bundle of the same task to compare with; repeatable.")
    ] = None,
    sampler: Annotated[str, typer.Option(help="tpe, nsga2, gp or random.")] = "tpe",
    trials: Annotated[int | None, typer.Option(help="Shapes to score; default: 200, plain 24.")] = None,
    minutes: Annotated[float | None, typer.Option(help="For all of it, instead of what the stages say.")] = None,
    finalists: Annotated[int, typer.Option(help="How many are ranked again after a short distillation.")] = 8,
    winners: Annotated[int, typer.Option(help="How many are distilled fully.")] = 1,
    storage: Annotated[
        str | None,
        typer.Option(help="Database of the study: path of an SQLite file or postgresql://...; default: in --out."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Of the study in its storage; default: the directory's.")] = None,
    worker: Annotated[
        bool, typer.Option("--worker", help="Join the search in --storage and evaluate shapes for it.")
    ] = False,
    weights: Annotated[
        Path | None, typer.Option(help="With --worker: folder of the search's weights on this machine.")
    ] = None,
    text: Annotated[list[str] | None, typer.Option(help="Text column; given twice for pairs.")] = None,
    label: Annotated[str | None, typer.Option(help="Label column.")] = None,
    kind: Annotated[
        Literal["classification", "multilabel", "regression", "tagging", "qa"] | None,
        typer.Option(help="Kind of task."),
    ] = None,
    metric: Annotated[str | None, typer.Option(help="The score.")] = None,
    seed: Seed = 0,
    precision: Precision = "auto",
    resume: Resume = False,
    gate: OnWeakTeacher = "refuse",
    allow_pickle: AllowPickle = False,
    allow_code: AllowCode = None,
    as_json: Json = False,
) -> None:
    """Find the students that are best under a budget on your device; the best one is distilled and shipped."""
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
            chosen,
            teacher=teacher,
            out=out,
            data=data,
            seed=seed,
            resume=resume,
            allow_pickle=allow_pickle,
            allow_code=allow_code,
        )
        from compress.benchmark.devices import open_device  # seconds: torch
        from compress.commands.search import search as run
        from compress.pruning.budget import to_the_user

        found = run(
            teacher=teacher,
            data=data,
            out=out,
            space=chosen,
            max_latency_ms=max_latency_ms,
            speedup=speedup,
            max_params=max_params,
            max_file_mb=max_file_mb,
            min_score=min_score,
            objectives=list(dict.fromkeys(["score", *(objective or ["latency"])])),
            device=device,
            open_as=partial(
                open_device,
                lan=lan,
                timeout=timeout,
                python=python,
                say=to_the_user(device, shown),
            ),
            threads=threads,
            batch=batch,
            seq=seq,
            file=file,
            max_drop=max_drop / 100,
            shapes=shapes,
            rounds=rounds,
            runs=runs,
            anchors=anchor or [],
            sampler=sampler,
            trials=trials,
            minutes=minutes,
            finalists=finalists,
            winners=winners,
            storage=storage,
            name=name,
            text=text,
            label=label,
            kind=kind,
            metric=metric,
            seed=seed,
            precision=precision,
            resume=resume,
            gate=gate,
            allow_pickle=allow_pickle,
            allow_code=allow_code,
            console=shown,
        )
        if as_json:
            print_result(found.to_json())


@app.command()
def show(
    study: Annotated[Path, typer.Argument(help="Directory of a search.")],
    trial: Annotated[int | None, typer.Argument(help="Number of a trial; without it, the front is shown.")] = None,
    bundle: Annotated[Path | None, typer.Option(help="New folder for the trial's student.")] = None,
    train: Annotated[bool, typer.Option("--train", help="Distil it fully first, as the winner was.")] = False,
    allow_code: AllowCode = None,
    as_json: Json = False,
) -> None:
    """Show the front of a search, or write one of its students as a bundle."""
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
