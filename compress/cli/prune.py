"""`compress prune`: a smaller model out of one that is there."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.cli.options import (
    UNCERTIFIED,
    console,
    continuation,
    grouped,
    is_first,
    print_forecast,
    print_json,
    run_folder,
    told,
)
from compress.config.options import (
    CorpusName,
    DataName,
    DataOptions,
    Int8MaxDrop,
    Json,
    LabelColumn,
    LengthOptions,
    MaxDrop,
    Out,
    Plan,
    PruneOptions,
    RunOptions,
    SettingOptions,
    TextColumns,
    data_option,
    output,
    training,
)

if TYPE_CHECKING:
    from rich.console import Console

    from compress.commands.trim import TrimResult


@grouped()
def prune(
    model: Annotated[str, typer.Argument(help="minilm, an alias, folder, hub id, or a bundle's folder.")],
    data: DataName,
    out: Out = None,
    recipe: Annotated[str, training(help="prune-taylor, -minitron, -cofi, -dynabert, or a .yaml.")] = "prune-taylor",
    target: PruneOptions = PruneOptions(),
    setting: SettingOptions = SettingOptions(),
    columns: DataOptions = DataOptions(),
    max_drop: Int8MaxDrop = None,
    length: LengthOptions = LengthOptions(),
    options: RunOptions = RunOptions(),
    plan: Plan = False,
    as_json: Json = False,
) -> None:
    """Cut from a model what matters least, to given sizes or a budget; let it recover, ship and measure it.

    Example: compress prune minilm --data intents --out runs/half --layers 4 --ffn 0.5
    """
    out = run_folder(out, recipe, data, resume=options.resume)
    with told(hint=continuation(out)):
        from compress.commands import preflight

        ready = preflight.load_recipe(recipe, options.overrides, length)
        preflight.check(ready, teacher=model, out=out, data=data, options=options)
        from compress.commands.prune import aimed  # seconds: torch
        from compress.commands.prune import prune as run

        if plan:
            from compress.commands.forecast import forecast

            print_forecast(
                forecast, as_json, teacher=model, recipe=aimed(ready, asdict(target), asdict(setting)), data=data,
                columns=columns, length=length.minutes_alone, options=replace(options, overrides=None),
            )  # fmt: skip
            return
        shown = console(as_json)
        bundle = run(
            model=model, recipe=ready, data=data, out=out, target=target, setting=setting, columns=columns,
            max_drop=None if max_drop is None else max_drop / 100, length=length.minutes_alone,
            options=replace(options, overrides=None), console=shown,
        )  # fmt: skip
        if as_json and is_first():
            print_json("prune", bundle.path / "report.json")


def trim(
    model: Annotated[str, typer.Argument(help="A bundle's folder; or a checkpoint: folder, hub id or alias.")],
    out: Annotated[Path, output(help="The new folder.")],
    data: Annotated[str | None, data_option(help="Count its training texts, score on its test split.")] = None,
    corpus: CorpusName = None,
    min_count: Annotated[int, training(min=1, help="Trim tokens that occur less often.")] = 1,
    keep: Annotated[list[str] | None, training(help="Keep the tokens of these words. Repeatable.")] = None,
    max_drop: MaxDrop = 0.5,
    text: TextColumns = None,
    label: LabelColumn = None,
    plan: Plan = False,
    as_json: Json = False,
) -> None:
    """Drop tokens that your texts never use from tokenizer and embedding; measure what that saves and costs.

    Exit code 3: a file loses more than --max-drop; the folder is kept, and the file marked.

    Example: compress trim runs/first/bundle --data intents --out runs/trimmed
    """
    with told(hint="Nothing was written: the same command begins again."):
        from compress.commands.trim import forecast_trimming
        from compress.commands.trim import trim as run

        given: dict[str, Any] = {
            "model": model, "out": out, "data": data, "corpus": corpus, "text": text, "label": label,
            "min_count": min_count, "keep": keep or (),
        }  # fmt: skip
        if plan:
            print_forecast(forecast_trimming, as_json, **given)
            return
        found = run(**given, max_drop=max_drop / 100)
        if as_json:
            facts = asdict(found)
            facts["trimmed"] |= {"path": str(out), "kept": len(found.trimmed.kept)}
            print_json("trim", facts)
        else:
            _show(found, console())
    if not all(proof.certified for proof in found.certificates):
        raise typer.Exit(UNCERTIFIED)


def _show(found: "TrimResult", shown: "Console") -> None:
    from rich.table import Column, Table

    trimmed = found.trimmed
    share = 1 - len(trimmed.kept) / trimmed.before
    shown.print(
        f"{trimmed.before:,} tokens to {len(trimmed.kept):,} ({share:.0%} fewer); {trimmed.whole:.2%} of "
        f"{trimmed.texts:,} texts of the corpus are read as before", highlight=False,
    )  # fmt: skip
    table = Table(Column("file", no_wrap=True), "MB", "score", "same answers", "verdict", box=None, pad_edge=False)
    proofs = {proof.artefact: proof for proof in found.certificates}
    for name, (before, after) in trimmed.bytes.items():
        cells = [Path(name).name, f"{before / 1e6:.2f} to {after / 1e6:.2f}"]
        if proof := proofs.get(name):
            cells += [f"{proof.before:.4f} to {proof.after:.4f}", f"{proof.agreement:.2%}", _verdict(proof.certified)]
        table.add_row(*cells)
    shown.print(table)
    for proof in proofs.values():
        shown.print(f"{proof.artefact}: {_verdict(proof.certified)}: {proof.reason}", markup=False, highlight=False)
    if found.alike is not None:
        split = found.certificates[0].split
        shown.print(f"{found.alike:.2%} of the texts of the {split} split ({found.rows:,} rows) are read as before")
    shown.print(f"{trimmed.path}", markup=False, highlight=False)


def _verdict(certified: bool) -> str:
    return "certified" if certified else "not certified"
