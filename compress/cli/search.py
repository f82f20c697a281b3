"""`compress search`: the students that are best under a budget, and any of them as a bundle."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from compress.cli.options import (
    Command,
    CommandGroup,
    console,
    continuation,
    grouped,
    print_forecast,
    print_json,
    run_folder,
    talking,
    told,
)
from compress.config.options import (
    AllowCode,
    BudgetOptions,
    DataOptions,
    Json,
    MaxDrop,
    MeasureOptions,
    Plan,
    RunOptions,
    StudyOptions,
    Wide,
    data_option,
    output,
    search_option,
    training,
)

app = typer.Typer(cls=CommandGroup, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@dataclass(frozen=True, kw_only=True)
class LimitOptions(BudgetOptions):
    """The limits of one student, and the points of its score that int8 may lose."""

    max_drop: MaxDrop = 0.5


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The part of another process, which evaluates shapes for a search."""

    worker: Annotated[bool, search_option("--worker", help="Evaluate shapes for the search in --storage.")] = False
    weights: Annotated[Path | None, search_option(help="--worker: the folder of the search's weights here.")] = None


@app.callback(invoke_without_command=True)
@talking
@grouped(without=("affinity", "native", "assets", "webgpu"))
def search(
    context: typer.Context,
    teacher: Annotated[str | None, training(help="The teacher: an alias, a folder or a hub id.")] = None,
    data: Annotated[str | None, data_option(help="The data, as for distill.")] = None,
    out: Annotated[Path | None, output(help="The search's folder; else a new runs/SPACE-DATA-N.")] = None,
    space: Annotated[str, training(help="Or dynabert, autotinybert, mobilebert, albert, a .yaml.")] = "width-depth",
    limits: LimitOptions = LimitOptions(),
    device: MeasureOptions = MeasureOptions(),
    study: StudyOptions = StudyOptions(),
    join: WorkerOptions = WorkerOptions(),
    columns: DataOptions = DataOptions(),
    options: RunOptions = RunOptions(),
    plan: Plan = False,
    as_json: Json = False,
) -> None:
    """Find the students that are best under a budget on your device; the best one is distilled and shipped.

    Example: compress search --teacher minilm --data intents --out runs/found --max-latency-ms 4 --minutes 60
    """
    if context.invoked_subcommand is not None:
        return
    shown = console(as_json)
    if data is not None and not join.worker:
        out = run_folder(out, space, data, resume=options.resume)
    with told(hint="" if out is None else continuation(out)):
        from compress.errors import SearchError

        if join.worker:
            from compress.commands.search import work

            if study.storage is None:
                raise SearchError("--worker: joins a search in its storage; give --storage, as that search was given")
            work(
                study.storage, name=study.name, weights=join.weights, minutes=study.minutes,
                allow_code=options.allow_code, console=shown,
            )  # fmt: skip
            return
        missing = [f"--{each}" for each, given in {"teacher": teacher, "data": data}.items() if given is None]
        if teacher is None or data is None or out is None:
            raise SearchError(f"search: needs {', '.join(missing)} too; see compress search --help")
        from compress.commands import preflight
        from compress.nas.config import Space

        chosen = Space.load(space, options.overrides or [])
        preflight.check(chosen, teacher=teacher, out=out, data=data, options=options)
        from compress.commands.search import search as run  # seconds: torch
        from compress.nas.config import Budget

        most = asdict(limits)
        max_drop = most.pop("max_drop") / 100
        given: dict[str, Any] = {
            "teacher": teacher, "data": data, "out": out, "space": chosen, "budget": Budget(**most), "device": device,
            "study": study, "max_drop": max_drop, "columns": columns, "options": options,
        }  # fmt: skip
        if plan:
            from compress.commands.forecast_search import forecast_search

            print_forecast(forecast_search, as_json, **given)
            return
        found = run(**given, console=shown)
        if as_json:
            print_json("search", found.to_json())


@app.command(cls=Command)
@talking
def show(
    study: Annotated[Path, typer.Argument(help="The folder of a search.")],
    trial: Annotated[int | None, typer.Argument(help="Number of a trial; without it, the front is shown.")] = None,
    bundle: Annotated[Path | None, output(help="The new folder for the trial's student.")] = None,
    train: Annotated[bool, training("--train", help="Distil it fully first, as the winner was.")] = False,
    allow_code: AllowCode = None,
    wide: Wide = False,
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
                f"a trial and --bundle belong together: compress search show {study} 12 --bundle student-12"
            )
        if trial is None or bundle is None:
            found = record.load_report(study)
            if as_json:
                print_json("search", found.to_json())
            else:
                record.print_front(found, console(answer=True), wide=wide)
            return
        from compress.commands.search import show as write

        made = write(study, trial, bundle, train=train, allow_code=allow_code, console=console(as_json))
        if as_json:
            print_json("search-show", made.path / "report.json")
        else:
            console().print(f"bundle: {made.path}", markup=False, highlight=False)
