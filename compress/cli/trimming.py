"""`compress trim`: a vocabulary down to what a corpus uses."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compress.cli.options import UNCERTIFIED, CorpusName, Json, console, print_result, told

if TYPE_CHECKING:
    from rich.console import Console

    from compress.trim.measured import Measured


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

        from compress.trim.measured import trim_measured

        found = trim_measured(
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
