"""`compress prune` and `trim`: make a model smaller."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.cli.options import (
    UNCERTIFIED,
    announce,
    console,
    is_first,
    print_forecast,
    print_json,
    run_folder,
    user_errors,
    with_option_groups,
)
from compress.config import options as opt

if TYPE_CHECKING:
    from rich.console import Console

    from compress.jobs.trim import TrimResult


@with_option_groups(without=("wide",))
def prune(
    model: Annotated[
        str,
        typer.Argument(
            help="An alias such as minilm, a folder, a hub id, or a bundle."
        ),
    ],
    data: opt.DataName,
    recipe: Annotated[
        str, opt.training(help="prune-taylor, -minitron, -cofi, -dynabert, or a .yaml.")
    ] = "prune-taylor",
    target: opt.PruneOptions = opt.PruneOptions(),
    setting: opt.SettingOptions = opt.SettingOptions(),
    columns: opt.DataOptions = opt.DataOptions(),
    shipped: opt.ShipOptions = opt.ShipOptions(),
    length: opt.LengthOptions = opt.LengthOptions(),
    options: opt.RunOptions = opt.RunOptions(),
    shown: opt.PrintOptions = opt.PrintOptions(),
) -> None:
    """Prune the least important parts of a model, to given sizes or a budget; let it
    recover, then ship and measure it.

    Example: compress prune minilm --data intents --out runs/half --layers 4 --ffn 0.5
    """
    out = run_folder(shipped.out, recipe, data, resume=options.resume)
    with user_errors(hint=out):
        from compress.commands import preflight
        from compress.jobs.request import PruneArguments

        request = preflight.prune_request(
            PruneArguments(
                model=model,
                data=data,
                out=out,
                recipe=recipe,
                target=target,
                setting=setting,
                columns=columns,
                vocabulary=shipped.vocabulary,
                length=length,
                options=options,
                console=console(shown.as_json),
            )
        )
        announce(f"pruning {model} on {data}", out, shown.as_json)
        from compress.commands import prune as command

        request = command.resolve_target(request, target, setting)
        if shown.plan:
            from compress.commands.distill import estimate_distillation

            print_forecast(estimate_distillation, shown.as_json, request=request)
            return
        bundle = command.run_pruning(request, shipped.limit)
        if shown.as_json and is_first():
            print_json("prune", bundle.path / "report.json")


@with_option_groups()
def trim(
    model: Annotated[
        str,
        typer.Argument(
            help="A bundle's folder; or a checkpoint: folder, hub id or alias."
        ),
    ],
    out: Annotated[Path, opt.output(help="The new folder.")],
    data: Annotated[
        str | None,
        opt.data_option(
            help="Count tokens of its train split, score on its test split."
        ),
    ] = None,
    corpus: opt.CorpusName = None,
    min_count: Annotated[
        int, opt.training(min=1, help="Drop tokens that occur fewer times than this.")
    ] = 1,
    keep: Annotated[
        list[str] | None, opt.training(help="Keep the tokens of this text. Repeatable.")
    ] = None,
    max_drop: opt.MaxDrop = opt.MAX_DROP,
    columns: opt.ColumnOptions = opt.ColumnOptions(),
    plan: opt.Plan = False,
    as_json: opt.Json = False,
) -> None:
    """Drop tokens that your texts never use from tokenizer and embedding; measure what
    that saves and costs.

    Exit code 3: a file loses more than --max-drop; the folder is kept, and the file is
    marked.

    Example: compress trim runs/first/bundle --data intents --out runs/trimmed
    """
    with user_errors(hint="Nothing was written. Run the same command again."):
        from compress.commands import preflight
        from compress.errors import ArgumentError

        if data is None and max_drop != opt.MAX_DROP:
            raise ArgumentError("max_drop", "data to score on", "none")
        preflight.check_trimming(data, corpus, out, columns)
        preflight.check_files(model=model, data=data, columns=columns, corpus=corpus)

        from compress.commands.trim import forecast_trimming
        from compress.commands.trim import trim as run

        arguments: dict[str, Any] = {
            "model": model,
            "out": out,
            "data": data,
            "corpus": corpus,
            "columns": columns,
            "min_count": min_count,
            "keep": keep or (),
        }
        if plan:
            print_forecast(
                forecast_trimming, as_json, **arguments, console=console(as_json)
            )
            return
        result = run(**arguments, max_drop=max_drop / 100)
        if as_json:
            values = asdict(result)
            values["trimmed"] |= {"path": str(out), "kept": len(result.trimmed.kept)}
            print_json("trim", values)
        else:
            _print_trimmed(result, console())
    if not all(proof.certified for proof in result.certificates):
        raise typer.Exit(UNCERTIFIED)


def _print_trimmed(result: "TrimResult", console: "Console") -> None:
    from rich.table import Column, Table

    trimmed = result.trimmed
    share = 1 - len(trimmed.kept) / trimmed.before
    console.print(
        f"{trimmed.before:,} tokens to {len(trimmed.kept):,} ({share:.0%} fewer); "
        f"{trimmed.whole:.2%} of {trimmed.texts:,} texts of the corpus are tokenized "
        "as before"
    )
    table = Table(
        Column("file", no_wrap=True),
        "MB",
        "score",
        "same answers",
        "verdict",
        box=None,
        pad_edge=False,
    )
    proofs = {proof.artefact: proof for proof in result.certificates}
    verdicts = {
        name: "certified" if proof.certified else "not certified"
        for name, proof in proofs.items()
    }
    for name, (before, after) in trimmed.bytes.items():
        cells = [Path(name).name, f"{before / 1e6:.2f} to {after / 1e6:.2f}"]
        if proof := proofs.get(name):
            cells += [
                f"{proof.before:.4f} to {proof.after:.4f}",
                f"{proof.agreement:.2%}",
                verdicts[name],
            ]
        table.add_row(*cells)
    console.print(table)
    for name, proof in proofs.items():
        console.print(f"{name}: {verdicts[name]}: {proof.reason}")
    if result.alike is not None:
        split = result.certificates[0].split
        console.print(
            f"{result.alike:.2%} of the texts of the {split} split ({result.rows:,} "
            "rows) are tokenized as before"
        )
    console.print(str(trimmed.path))
