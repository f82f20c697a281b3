"""`compress prune`: a smaller model out of one that is there."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from compress.cli.options import (
    UNCERTIFIED,
    AllowCode,
    AllowPickle,
    CorpusName,
    Int8MaxDrop,
    Json,
    OnWeakTeacher,
    Out,
    Overrides,
    Precision,
    Resume,
    Seed,
    console,
    print_result,
    told,
)

if TYPE_CHECKING:
    from rich.console import Console

    from compress.commands.trim import Measured


def prune(
    model: Annotated[str, typer.Argument(help="Alias (minilm, bert-base, ...), folder, hub id, or a bundle's folder.")],
    data: Annotated[str, typer.Option(help="intents, a folder with train and dev files, or a hub id (glue/sst2).")],
    out: Out,
    recipe: Annotated[
        str,
        typer.Option(help="How it is cut and recovers: prune-taylor, -minitron, -cofi, -dynabert, or a .yaml file."),
    ] = "prune-taylor",
    layers: Annotated[
        float | None, typer.Option(help="Layers to keep; below 1: a share of the model's, as for all sizes.")
    ] = None,
    hidden: Annotated[float | None, typer.Option(help="Width to keep.")] = None,
    heads: Annotated[float | None, typer.Option(help="Attention heads to keep in each layer.")] = None,
    ffn: Annotated[float | None, typer.Option(help="Neurons to keep in each feed-forward block.")] = None,
    embedding: Annotated[
        float | None, typer.Option(help="Embedding width to keep, where it is not the model's width.")
    ] = None,
    bottleneck: Annotated[float | None, typer.Option(help="Inner width to keep (MobileBERT).")] = None,
    max_latency_ms: Annotated[
        float | None, typer.Option(help="Instead of sizes: what one forward of its int8 file may take on --device.")
    ] = None,
    speedup: Annotated[
        float | None, typer.Option(help="Instead of sizes: so many times faster than the model's own int8 file there.")
    ] = None,
    max_params: Annotated[
        float | None, typer.Option(help="Instead of sizes, or with either: parameters it may have, as in 5e6.")
    ] = None,
    heterogeneous: Annotated[
        bool,
        typer.Option("--heterogeneous", help="Layers may differ in heads and neurons: no plain transformers model."),
    ] = False,
    device: Annotated[str, typer.Option(help="Where budgets are measured: as for bench.")] = "local",
    threads: Annotated[int, typer.Option(min=1, help="Threads it is measured on.")] = 1,
    batch: Annotated[int, typer.Option(min=1, help="Rows it is measured on.")] = 1,
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens in each; default: the recipe's max_length.")] = None,
    overrides: Overrides = None,
    text: Annotated[list[str] | None, typer.Option(help="Text column; given twice for pairs.")] = None,
    label: Annotated[str | None, typer.Option(help="Label column.")] = None,
    kind: Annotated[
        Literal["classification", "multilabel", "regression", "tagging", "qa"] | None,
        typer.Option(help="Kind of task."),
    ] = None,
    metric: Annotated[str | None, typer.Option(help="The score that chooses the best checkpoint.")] = None,
    seed: Seed = 0,
    precision: Precision = "auto",
    resume: Resume = False,
    gate: OnWeakTeacher = "refuse",
    max_drop: Int8MaxDrop = None,
    allow_pickle: AllowPickle = False,
    allow_code: AllowCode = None,
    as_json: Json = False,
) -> None:
    """Cut from a model what matters least, to given sizes or a budget; let it recover, ship and measure it."""
    with told(hint=f"Continue with: compress prune ... --out {out} --resume"):
        from compress.commands import preflight

        ready = preflight.load_recipe(recipe, overrides or [])
        preflight.check(
            ready,
            teacher=model,
            out=out,
            data=data,
            seed=seed,
            resume=resume,
            allow_pickle=allow_pickle,
            allow_code=allow_code,
        )
        from compress.commands.prune import prune as run  # seconds: torch

        shown = console(as_json)
        bundle = run(
            model=model,
            recipe=ready,
            data=data,
            out=out,
            layers=layers,
            hidden=hidden,
            heads=heads,
            ffn=ffn,
            embedding=embedding,
            bottleneck=bottleneck,
            max_latency_ms=max_latency_ms,
            speedup=speedup,
            max_params=max_params,
            uneven=heterogeneous,
            device=device,
            threads=threads,
            batch=batch,
            seq=seq,
            text=text,
            label=label,
            kind=kind,
            metric=metric,
            seed=seed,
            precision=precision,
            resume=resume,
            gate=gate,
            max_drop=None if max_drop is None else max_drop / 100,
            allow_pickle=allow_pickle,
            allow_code=allow_code,
            console=shown,
        )
        if as_json and not shown.quiet:
            print_result((bundle.path / "report.json").read_text(encoding="utf-8"))


def trim(
    model: Annotated[str, typer.Argument(help="A bundle's folder; or a checkpoint: folder, hub id or alias.")],
    out: Annotated[Path, typer.Option(help="New folder.")],
    data: Annotated[
        str | None, typer.Option(help="Its training texts count, its test split scores; as for distill.")
    ] = None,
    corpus: CorpusName = None,
    min_count: Annotated[int, typer.Option(min=1, help="Tokens that occur less often are trimmed.")] = 1,
    keep: Annotated[list[str] | None, typer.Option(help="Words whose tokens stay in any case; repeatable.")] = None,
    max_drop: Annotated[float, typer.Option(min=0, max=100, help="Points of the score that may be lost.")] = 0.5,
    text: Annotated[list[str] | None, typer.Option(help="Text column; given twice for pairs.")] = None,
    label: Annotated[str | None, typer.Option(help="Label column.")] = None,
    as_json: Json = False,
) -> None:
    """Drop tokens that your texts never use from tokenizer and embedding; measure what that saves and costs.

    Exit code 3: a file loses more than --max-drop; the folder is kept, and the file marked.
    """
    with told():
        import json
        from dataclasses import asdict

        from compress.commands.trim import trim as run

        found = run(
            model, out, data=data, corpus=corpus, text=text, label=label, min_count=min_count, keep=keep or (),
            max_drop=max_drop / 100,
        )  # fmt: skip
        if as_json:
            facts = asdict(found)
            facts["trimmed"] |= {"path": str(out), "kept": len(found.trimmed.kept)}
            print_result(json.dumps(facts, ensure_ascii=False, indent=1))
        else:
            _show(found, console())
    if not all(proof.certified for proof in found.certificates):
        raise typer.Exit(UNCERTIFIED)


def _show(found: "Measured", shown: "Console") -> None:
    from rich.table import Column, Table

    trimmed = found.trimmed
    share = 1 - len(trimmed.kept) / trimmed.before
    shown.print(
        f"{trimmed.before:,} tokens to {len(trimmed.kept):,} ({share:.0%} fewer); {trimmed.whole:.2%} of "
        f"{trimmed.texts:,} texts of the corpus are read as before", highlight=False,
    )  # fmt: skip
    table = Table(Column("file", overflow="fold"), "MB", "score", "same answers", "verdict", box=None)
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
