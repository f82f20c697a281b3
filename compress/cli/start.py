"""`compress doctor`, `inspect` and `init`: what is here, what a thing is, and which command to run."""

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from compress.cli.options import USER_ERROR, console, grouped, print_result, told
from compress.config.options import DataOptions, Json, budget, data_option, device_option, output, training

if TYPE_CHECKING:
    from rich.console import RenderableType

    from compress.records.diagnosis import Check, Diagnosis
    from compress.records.inspection import Inspection

UNSOUND = 1
"""Exit code of a machine on which the base install lacks something."""
INDENT = 24


def doctor(as_json: Json = False) -> None:
    """Say what this machine has for each command, and the one command that brings what is missing.

    Exit code 1: something that the base install needs is missing or broken. What only some commands need is no fault.

    Example: compress doctor --json
    """
    with told():
        from compress.commands.doctor import doctor as run

        shown, answers = console(as_json), console(answer=True)

        def say(check: "Check") -> None:
            if check.group != "packages" or check.state != "ok":
                for line in _lines(check, shown.width):
                    shown.print(line, markup=False, highlight=False, soft_wrap=True)

        found = run(say=say)
        if as_json:
            print_result(found.to_json())
        else:
            for line in _verdict(found):
                answers.print(line, markup=False, highlight=False, soft_wrap=True)
    if not found.ok:
        raise typer.Exit(UNSOUND)


def _lines(check: "Check", width: int) -> Iterator[str]:
    """Yield what was found; of what is missing, also what for, and the command that brings it, whole."""
    missing = check.state != "ok"
    head = f"{check.state:9}{check.name:15}"
    for words in (check.found, f"for {check.needed_for}" if missing and check.needed_for else ""):
        if words:
            wide = max(width, 2 * INDENT)
            yield from textwrap.wrap(words, wide, initial_indent=head, subsequent_indent=" " * INDENT)
            head = " " * INDENT
    if missing and check.remedy:
        yield " " * INDENT + check.remedy


def _verdict(found: "Diagnosis") -> Iterator[str]:
    packages = [each for each in found.checks if each.group == "packages"]
    good = [each for each in packages if each.state == "ok"]
    state = "ok" if len(good) == len(packages) else "broken"
    yield f"{state:9}{'packages':15}{len(good)} of {len(packages)} of the base install"
    lacking = [each.name for each in found.checks if each.state != "ok" and not each.required]
    yield ""
    if found.faults:
        yield f"The base install lacks: {', '.join(each.name for each in found.faults)}."
    else:
        yield "The base install has all it needs." + (f" Not here: {', '.join(lacking)}." if lacking else "")


@grouped()
def inspect(
    thing: Annotated[str, typer.Argument(help="A path, a recipe's name, intents, minilm, an alias or a hub id.")],
    form: Annotated[
        Literal["checkpoint", "bundle", "recipe", "data", "run", "study"] | None,
        data_option("--as", help="Say what it is, where a name has several meanings."),
    ] = None,
    teacher: Annotated[str | None, data_option(help="Of data: try the tokenizer of this teacher on the texts.")] = None,
    columns: DataOptions = DataOptions(),
    as_json: Json = False,
) -> None:
    """Say what a checkpoint, bundle, recipe, data set, run or search is, and what can be done with it next.

    Exit code 2: it cannot be read, or a file of it is damaged or missing.

    Example: compress inspect intents --teacher minilm
    """
    with told():
        from compress.commands.inspect import inspect as run

        found = run(thing, form=form, teacher=teacher, columns=columns)
        if as_json:
            print_result(found.to_json())
        else:
            shown = console(answer=True)
            for part in _parts(found, shown.width):
                shown.print(part, markup=False, highlight=False, soft_wrap=isinstance(part, str))
    if found.problems:
        raise typer.Exit(USER_ERROR)


MOST_LABELS, MOST_FILES = 12, 8
"""Labels, and files, that are named; the JSON has them all."""


def _parts(found: "Inspection", width: int) -> "Iterator[RenderableType]":
    """Yield what it is, its facts, tables of splits and scores, then faults, notes and what can be done next."""
    yield from _wrap(found.title, width)
    facts = {"path": found.path, **found.facts}
    if found.form != "recipe":
        facts["licence"] = found.licence or "none is stated"
    if found.labels:
        more = f" and {len(found.labels) - MOST_LABELS} more" if len(found.labels) > MOST_LABELS else ""
        facts["labels"] = ", ".join(found.labels[:MOST_LABELS]) + more
    if found.files:
        largest = sorted(found.files.items(), key=lambda each: -each[1])[:MOST_FILES]
        named = ", ".join(f"{name} {size / 1e6:,.2f}" for name, size in largest)
        facts["files"] = f"{len(found.files)}, {sum(found.files.values()) / 1e6:,.2f} MB: {named}"
    if found.verified is not None:
        facts["hashes"] = "every file is as it was written" if found.verified else "NOT as written: see below"
    wide = max(map(len, facts)) + 2
    for name, value in facts.items():
        if value is not None:
            text = f"{value:,}" if isinstance(value, int) else str(value)
            yield from _wrap(text, width, f"  {name:{wide}}")
    for table in _tables(found):
        yield ""
        yield table
    for words in (*(f"damaged: {each}" for each in found.problems), *(f"note: {each}" for each in found.notes)):
        yield ""
        yield from _wrap(words, width)
    if found.next:
        yield "\nnext:"
        yield from (f"  {command}" for command in found.next)


def _wrap(words: str, width: int, head: str = "") -> list[str]:
    below = " " * len(head)
    return textwrap.wrap(
        words, max(width, 40), initial_indent=head, subsequent_indent=below, break_long_words=False,
        break_on_hyphens=False,
    ) or [head]  # fmt: skip


def _tables(found: "Inspection") -> "Iterator[RenderableType]":
    """Yield tables of the splits, of the rows they share, of the tokenizer, and of the report."""

    def table(rows: list[dict[str, Any]]) -> "RenderableType":
        from rich.table import Table

        laid = Table(*(name for name in rows[0]), box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for column in laid.columns:
            column.overflow, column.justify = "fold", "left" if column is laid.columns[0] else "right"
        for row in rows:
            laid.add_row(*(_cell(name, value) for name, value in row.items()))
        return laid

    rows = []
    for each in found.splits:
        shares = [100 * share for share in each.classes.values()]
        classes = {"% of a class": f"{min(shares):.1f} to {max(shares):.1f}"} if shares else {}
        rows.append({
            "split": each.name, "rows": each.rows, "repeated": each.repeated, "conflicting": each.conflicting,
            "words": each.words.median, "p95": each.words.p95, "longest": each.words.longest, **classes,
        })  # fmt: skip
    if rows:
        wanted = max(rows, key=len)
        yield table([{name: row.get(name, "") for name in wanted} for row in rows])
    if found.overlaps:
        yield table([
            {"shared by": f"{each.one} and {each.other}", "rows": each.rows, "of the second": f"{each.share:.1%}"}
            for each in found.overlaps
        ])  # fmt: skip
    if (seen := found.coverage) is not None:
        cut = {} if seen.cut is None else {f"over {seen.limit:,}": f"{seen.cut:.1%}"}
        yield table([{
            "tokenizer": seen.tokenizer, "texts": seen.texts, "unknown": f"{seen.unknown:.2%}",
            "tokens a word": seen.pieces, "tokens": seen.tokens.median, "p95": seen.tokens.p95,
            "longest": seen.tokens.longest, **cut,
        }])  # fmt: skip
    if found.scores:
        yield table([dict(row) for row in found.scores])


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name == "parameters":
        return f"{value / 1e6:.1f} M"
    if isinstance(value, float):
        return f"{value:.2f}" if name in ("MB", "ms", "tokens a word") else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


QUESTIONS = {
    "teacher": ("What is the teacher? An alias such as bert-base, a folder or a hub id", "minilm"),
    "data": ("What is the data? A folder, a file or a hub id; intents is embedded", "intents"),
    "goal": ("What matters most: score, size, speed, or at most so many ms (a number)", "score"),
    "minutes": ("How many minutes may it take? 0: as many as it needs", "0"),
    "device": ("Where will it run: local, browser, adb or ssh:HOST", "local"),
}


def is_answered() -> bool:
    """Tell whether somebody is there to answer questions."""
    return sys.stdin.isatty()


def init(
    teacher: Annotated[str | None, training(help="The teacher: an alias, a folder or a hub id.")] = None,
    data: Annotated[str | None, data_option(help="The data, as for distill.")] = None,
    goal: Annotated[
        str | None, budget(help="What matters most: score, size, speed, or a number: at most so many ms.")
    ] = None,
    minutes: Annotated[float | None, training(min=0, help="Take about so many minutes; 0: no limit.")] = None,
    device: Annotated[str | None, device_option(help="Where it will run: local, browser, adb or ssh:HOST.")] = None,
    file: Annotated[Path | None, output(help="Write the recipe to this new .yaml file, to be changed.")] = None,
    as_json: Json = False,
) -> None:
    """Ask five questions, and write the command that fits the answers, with its parts explained. Nothing is run.

    What an option says is not asked; without a terminal nothing is asked, and the defaults are taken.

    Example: compress init --data intents --goal 4 --minutes 60
    """
    given = {"teacher": teacher, "data": data, "goal": goal, "minutes": minutes, "device": device}
    for name, (question, usual) in QUESTIONS.items():
        if given[name] is None:
            given[name] = typer.prompt(question, default=usual, err=as_json) if is_answered() else usual
    with told():
        from compress.commands.init import init as run
        from compress.errors import CompressError

        try:
            limit, answer = float(str(given["minutes"])), str(given["goal"])
            latency = float(answer) if answer[:1].isdigit() else None
        except ValueError:
            raise CompressError(f"{given['minutes']}, {given['goal']}: expected numbers of minutes and ms") from None
        found = run(
            teacher=str(given["teacher"]), data=str(given["data"]), device=str(given["device"]), file=file,
            goal="latency" if latency is not None else answer, latency_ms=latency,  # type: ignore[arg-type]  # `init` checks it
            minutes=limit or None,
        )  # fmt: skip
        if as_json:
            print_result(found.to_json())
            return
        shown = console(answer=True)
        lines = ["", found.command, ""]
        wide = min(34, max(map(len, found.parts)) + 4)
        for part, why in found.parts.items():
            lines += _wrap(why, shown.width, f"  {part:{wide - 2}}")
        if found.file:
            lines += ["", f"written: {found.file}"]
        lines += ["", "how long, before it begins:", f"  {found.plan}"] if found.plan else []
        lines += ["", "then:", *(f"  {command}" for command in found.after)]
        for line in lines:
            shown.print(line, markup=False, highlight=False, soft_wrap=True)
