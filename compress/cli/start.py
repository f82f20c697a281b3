"""`compress doctor` and `inspect`: check this machine, look at a file or name,
and choose a command."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from compress.cli.options import (
    USER_ERROR,
    console,
    print_result,
    printer,
    user_errors,
    with_option_groups,
)
from compress.config import options as opt

if TYPE_CHECKING:
    from rich.console import RenderableType

    from compress.records.diagnosis import Check, Diagnosis
    from compress.records.inspection import Inspection

UNSOUND = 1
"""Exit code if something that the base install needs is missing or broken."""
INDENT = 24


def doctor(as_json: opt.Json = False) -> None:
    """Check what this machine has for each command, and print the command that installs
    what is missing.

    Exit code 1: something the base install needs is missing or broken. What only some
    commands need does not count.

    Example: compress doctor --json
    """
    with user_errors():
        from compress.commands.doctor import doctor as run

        def say(check: "Check") -> None:
            if check.group != "packages" or check.state != "ok":
                for line in _check_lines(check, console(as_json).width):
                    printer(as_json)(line)

        diagnosis = run(say=say)
        if as_json:
            print_result(diagnosis.to_json())
        else:
            for line in _verdict_lines(diagnosis):
                printer(answer=True)(line)
    if not diagnosis.ok:
        raise typer.Exit(UNSOUND)


def _check_lines(check: "Check", width: int) -> Iterator[str]:
    """Yield what was found; if something is missing, also what needs it and the command
    that installs it."""
    missing = check.state != "ok"
    head = f"{check.state:9}{check.name:15}"
    for words in (
        check.found,
        f"for {check.needed_for}" if missing and check.needed_for else "",
    ):
        if words:
            wide = max(width, 2 * INDENT)
            yield from textwrap.wrap(
                words,
                wide,
                initial_indent=head,
                subsequent_indent=" " * INDENT,
            )
            head = " " * INDENT
    if missing and check.remedy:
        yield " " * INDENT + check.remedy


def _verdict_lines(diagnosis: "Diagnosis") -> Iterator[str]:
    packages = [
        check.state == "ok" for check in diagnosis.checks if check.group == "packages"
    ]
    state = "ok" if all(packages) else "broken"
    yield (
        f"{state:9}{'packages':15}{sum(packages)} of {len(packages)} of the base "
        "install"
    )
    yield ""
    optional = [
        check.name
        for check in diagnosis.checks
        if check.state != "ok" and not check.required
    ]
    if diagnosis.faults:
        yield (
            "The base install lacks: "
            f"{', '.join(check.name for check in diagnosis.faults)}."
        )
    else:
        yield "The base install is complete." + (
            f" Not installed here: {', '.join(optional)}." if optional else ""
        )


@with_option_groups()
def inspect(
    thing: Annotated[
        str,
        typer.Argument(
            help="A path, a recipe's name, intents, minilm, an alias or a hub id."
        ),
    ],
    form: Annotated[
        Literal["checkpoint", "bundle", "recipe", "data", "run", "study"] | None,
        opt.data_option("--as", help="What it is, if the name is ambiguous."),
    ] = None,
    teacher: Annotated[
        str | None,
        opt.data_option(help="For data: try this teacher's tokenizer on the texts."),
    ] = None,
    columns: opt.DataOptions = opt.DataOptions(),
    as_json: opt.Json = False,
) -> None:
    """Describe a checkpoint, bundle, recipe, data set, run or search, and what to do
    with it next.

    Exit code 2: it cannot be read, or one of its files is damaged or missing.

    Example: compress inspect intents --teacher minilm
    """
    with user_errors():
        from compress.commands.inspect import inspect as run

        inspection = run(thing, form=form, teacher=teacher, columns=columns)
        if as_json:
            print_result(inspection.to_json())
        else:
            screen = console(answer=True)
            for part in _inspection_parts(inspection, screen.width):
                screen.print(part, soft_wrap=isinstance(part, str))
    if inspection.problems:
        raise typer.Exit(USER_ERROR)


MOST_LABELS = 12
MOST_FILES = 8
"""Labels and files that are printed at most; the JSON has them all."""


def _inspection_parts(found: "Inspection", width: int) -> "Iterator[RenderableType]":
    """Yield title, facts, tables of splits and scores, then problems, notes and the
    next commands."""
    yield from _wrap(found.title, width)
    facts = {"path": found.path, **found.facts}
    if found.form != "recipe":
        facts["licence"] = found.licence or "not stated"
    if found.labels:
        more = (
            f" and {len(found.labels) - MOST_LABELS} more"
            if len(found.labels) > MOST_LABELS
            else ""
        )
        facts["labels"] = ", ".join(found.labels[:MOST_LABELS]) + more
    if found.files:
        largest = sorted(found.files.items(), key=lambda each: -each[1])[:MOST_FILES]
        named = ", ".join(f"{name} {size / 1e6:,.2f}" for name, size in largest)
        facts["files"] = (
            f"{len(found.files)}, {sum(found.files.values()) / 1e6:,.2f} MB: {named}"
        )
    if found.verified is not None:
        facts["hashes"] = (
            "all files match"
            if found.verified
            else "some files do NOT match: see below"
        )
    wide = max(map(len, facts)) + 2
    for name, value in facts.items():
        if value is not None:
            text = f"{value:,}" if isinstance(value, int) else str(value)
            yield from _wrap(text, width, f"  {name:{wide}}")
    for table in _tables(found):
        yield ""
        yield table
    for words in (
        *(f"damaged: {each}" for each in found.problems),
        *(f"note: {each}" for each in found.notes),
    ):
        yield ""
        yield from _wrap(words, width)
    if found.next:
        yield "\nnext:"
        yield from (f"  {command}" for command in found.next)


def _wrap(words: str, width: int, head: str = "") -> list[str]:
    below = " " * len(head)
    return textwrap.wrap(
        words,
        max(width, 40),
        initial_indent=head,
        subsequent_indent=below,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [head]


def _tables(found: "Inspection") -> "Iterator[RenderableType]":
    """Yield tables of the splits, the rows they share, the tokenizer, and the
    scores."""
    rows: list[dict[str, Any]] = []
    for split in found.splits:
        shares = [100 * share for share in split.classes.values()]
        classes = (
            {"% of a class": f"{min(shares):.1f} to {max(shares):.1f}"}
            if shares
            else {}
        )
        rows.append(
            {
                "split": split.name,
                "rows": split.rows,
                "repeated": split.repeated,
                "conflicting": split.conflicting,
                "words": split.words.median,
                "p95": split.words.p95,
                "longest": split.words.longest,
                **classes,
            }
        )
    if rows:
        columns = max(rows, key=len)
        yield _table([{name: row.get(name, "") for name in columns} for row in rows])
    if found.overlaps:
        yield _table(
            [
                {
                    "shared by": f"{each.one} and {each.other}",
                    "rows": each.rows,
                    "of the second": f"{each.share:.1%}",
                }
                for each in found.overlaps
            ]
        )
    if (coverage := found.coverage) is not None:
        cut = (
            {}
            if coverage.cut is None
            else {f"over {coverage.limit:,}": f"{coverage.cut:.1%}"}
        )
        yield _table(
            [
                {
                    "tokenizer": coverage.tokenizer,
                    "texts": coverage.texts,
                    "unknown": f"{coverage.unknown:.2%}",
                    "tokens a word": coverage.pieces,
                    "tokens": coverage.tokens.median,
                    "p95": coverage.tokens.p95,
                    "longest": coverage.tokens.longest,
                    **cut,
                }
            ]
        )
    if found.scores:
        yield _table(found.scores)


def _table(rows: Sequence[Mapping[str, Any]]) -> "RenderableType":
    from rich.table import Table

    table = Table(
        *rows[0],
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        header_style="dim",
    )
    for column in table.columns:
        column.overflow = "fold"
        column.justify = "left" if column is table.columns[0] else "right"
    for row in rows:
        table.add_row(*(_format_cell(name, value) for name, value in row.items()))
    return table


def _format_cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name == "parameters":
        return f"{value / 1e6:.1f} M"
    if isinstance(value, float):
        return (
            f"{value:.2f}" if name in ("MB", "ms", "tokens a word") else f"{value:.4g}"
        )
    return f"{value:,}" if isinstance(value, int) else str(value)
