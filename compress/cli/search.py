"""`compress search`: find the best students under a budget, and write any of them as a
bundle."""

from collections.abc import Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from compress.arguments import NAME_CHECK, check_arguments
from compress.cli.options import (
    Command,
    CommandGroup,
    announce,
    console,
    print_forecast,
    print_json,
    run_folder,
    user_errors,
    with_option_groups,
    with_verbosity,
)
from compress.config import options as opt

app = typer.Typer(
    cls=CommandGroup,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@dataclass(frozen=True, kw_only=True)
class LimitOptions(opt.BudgetOptions):
    """The limits of one student, and how many points of its score int8 may lose."""

    max_drop: opt.MaxDrop = opt.MAX_DROP


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The options of a worker: another process that evaluates shapes for a search."""

    worker: Annotated[
        bool,
        opt.search_option(
            "--worker", help="Evaluate shapes for the search in --storage."
        ),
    ] = False
    weights: Annotated[
        Path | None,
        opt.search_option(help="--worker: the folder with the search's weights."),
    ] = None


@check_arguments
@dataclass(frozen=True, kw_only=True)
class InputOptions:
    """Name what a search starts from, and where it is stored."""

    teacher: Annotated[
        str | None, opt.training(help="The teacher: an alias, a folder or a hub id.")
    ] = None
    data: Annotated[
        str | None,
        opt.data_option(help="intents, a folder of train and dev files, or a hub id."),
    ] = None
    out: Annotated[
        Path | None,
        opt.output(help="The search's folder; default: a new runs/SPACE-DATA-N."),
    ] = None
    space: Annotated[
        str,
        opt.training(
            help="width-depth, npu, dynabert, autotinybert, mobilebert, albert or a "
            ".yaml file."
        ),
        NAME_CHECK,
    ] = "width-depth"


READ_BY_WORKERS: Final = frozenset(
    {"worker", "weights", "storage", "name", "minutes", "allow_code"}
    | {"quiet", "log_level", "as_json"}
)
"""The options that a worker reads."""


def _refuse_given(context: typer.Context, read: Set[str], where: str) -> None:
    """End the command with an error if an option is given that is not read."""
    for each in context.command.params:
        source = context.get_parameter_source(each.name or "")
        given = source is not None and source.name == "COMMANDLINE"
        if given and each.name not in read:
            context.fail(f"{each.opts[0]} {where} has no effect: leave it out.")


@app.callback(invoke_without_command=True)
@with_verbosity
@with_option_groups(without=("affinity", "native", "assets", "webgpu", "wide"))
def search(
    context: typer.Context,
    inputs: InputOptions = InputOptions(),
    limits: LimitOptions = LimitOptions(),
    device: opt.MeasureOptions = opt.MeasureOptions(),
    study: opt.StudyOptions = opt.StudyOptions(),
    join: WorkerOptions = WorkerOptions(),
    columns: opt.DataOptions = opt.DataOptions(),
    options: opt.RunOptions = opt.RunOptions(),
    shown: opt.PrintOptions = opt.PrintOptions(),
) -> None:
    """Find the best students under a budget on your device; the winner is distilled and
    shipped.

    Example: compress search --teacher minilm --data intents --out runs/found
    --max-latency-ms 4 --minutes 60
    """
    if context.invoked_subcommand is not None:
        _refuse_given(context, frozenset(), f"before {context.invoked_subcommand}")
        return
    if join.worker:
        _refuse_given(context, READ_BY_WORKERS, "of a worker")
    elif join.weights is not None:
        context.fail("--weights is for a --worker: leave it out.")
    teacher = inputs.teacher
    data = inputs.data
    out = inputs.out
    if data is not None and not join.worker:
        out = run_folder(out, inputs.space, data, resume=options.resume)
    with user_errors(hint=out or ""):
        from compress.errors import SearchError

        if join.worker:
            if study.storage is None:
                raise SearchError(
                    "--worker: needs --storage, the same as the search that it joins"
                )
            from compress.nas.worker import join as work

            work(
                study.storage,
                name=study.name,
                weights=join.weights,
                minutes=study.minutes,
                allow_code=options.allow_code,
                console=console(shown.as_json),
            )
            return
        for each in context.command.params:
            if each.name in ("teacher", "data") and not getattr(inputs, each.name):
                context.fail(
                    f"Missing option '{each.opts[0]}'. Expected: "
                    f"{getattr(each, 'help', '')}"
                )
        assert teacher and data and out
        from compress.commands import preflight
        from compress.nas.config import Budget, Space

        loaded = Space.load(inputs.space, options.overrides or [])
        preflight.check(
            loaded,
            teacher=teacher,
            out=out,
            data=data,
            columns=columns,
            options=options,
        )
        preflight.check_search(loaded, study, device)
        announce(f"searching for students of {teacher} on {data}", out, shown.as_json)
        from compress.commands import search as command

        budget = asdict(limits)
        max_drop = budget.pop("max_drop") / 100
        arguments: dict[str, Any] = {
            "teacher": teacher,
            "data": data,
            "out": out,
            "space": loaded,
            "budget": Budget(**budget),
            "device": device,
            "study": study,
            "max_drop": max_drop,
            "columns": columns,
            "options": options,
            "console": console(shown.as_json),
        }
        if shown.plan:
            print_forecast(command.forecast_search, shown.as_json, **arguments)
            return
        report = command.search(**arguments)
        if shown.as_json:
            print_json("search", report.to_json())


@app.command(cls=Command)
@with_verbosity
def show(
    study: Annotated[Path, typer.Argument(help="The folder of a search.")],
    trial: Annotated[
        int | None, typer.Argument(help="Number of a trial; default: show the front.")
    ] = None,
    bundle: Annotated[
        Path | None, opt.output(help="Write the trial's student to this new folder.")
    ] = None,
    train: Annotated[
        bool, opt.training("--train", help="Distil it fully first, like the winner.")
    ] = False,
    allow_code: opt.AllowCode = None,
    wide: opt.Wide = False,
    as_json: opt.Json = False,
) -> None:
    """Show the Pareto front of a search, or write one of its students as a bundle.

    Example: compress search show runs/found 12 --bundle student12
    """
    with user_errors(hint="The search was not changed."):
        from compress.errors import SearchError
        from compress.records.search_report import load_report

        if trial is None and (train or allow_code):
            raise SearchError(
                "--train, --allow-code: only for a trial that is written; give a trial "
                "and --bundle"
            )
        if (trial is None) != (bundle is None):
            raise SearchError(
                f"give both a trial and --bundle, as in: compress search show {study} "
                "12 --bundle student-12"
            )
        report = load_report(study)
        if trial is None or bundle is None:
            if as_json:
                print_json("search", report.to_json())
            else:
                from compress.nas import record

                record.print_front(report, console(answer=True), wide=wide)
            return
        from compress.commands.search import show as write

        written = write(
            study,
            trial,
            bundle,
            train=train,
            allow_code=allow_code,
            console=console(as_json),
        )
        if as_json:
            print_json("search-show", written.path / "report.json")
        else:
            console().print(f"bundle: {written.path}")
