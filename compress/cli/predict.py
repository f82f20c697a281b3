"""`compress predict`: answer texts, or the rows of a file, with a bundle."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from compress.cli.options import (
    console,
    print_json,
    printer,
    results,
    schema,
    user_errors,
    with_option_groups,
)
from compress.config import options as opt
from compress.machine import count_cores, count_processes
from compress.terminal import printable

if TYPE_CHECKING:
    from compress.exporters.manifest import Precision
    from compress.exporters.predictor import AnsweredLine, Answering
    from compress.exporters.shared_rows import RowShare


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """Name a file whose rows are answered, and the file of the answers."""

    rows: Annotated[
        Path | None,
        opt.data_option(
            "--input",
            help="Answer the rows of this file: .csv, .tsv, .jsonl, .json, .parquet, "
            ".txt.",
        ),
    ] = None
    answers: Annotated[
        Path | None,
        opt.file_output(
            "--output", help="Write answers here: .csv, .tsv, .jsonl, .parquet, .npy."
        ),
    ] = None
    text: opt.TextColumns = None


@dataclass(frozen=True, kw_only=True)
class VectorOptions:
    """Choose how a bundle computes and stores vectors, or how much it writes."""

    against: Annotated[
        Path | None,
        opt.data_option(
            help="Find the nearest texts in this file: a table, lines or .npy."
        ),
    ] = None
    top: Annotated[
        int | None,
        opt.data_option(min=1, help="Return this many nearest texts; default: 5."),
    ] = None
    vectors: Annotated[
        Literal["float32", "int8", "binary"],
        opt.output(help=".npy: a byte (int8) or a bit (binary) per number."),
    ] = "float32"
    prompt_name: Annotated[
        str | None,
        opt.data_option(help="Vectors: prefix texts with this prompt of the model."),
    ] = None
    new_tokens: Annotated[
        int | None,
        opt.output(min=1, help="Language models: maximum new tokens; default: 32."),
    ] = None


@with_option_groups()
def predict(
    bundle: opt.BundleFolder,
    texts: Annotated[
        list[str] | None,
        typer.Argument(help="Texts, or - for one per line of standard input."),
    ] = None,
    file: RowOptions = RowOptions(),
    pair: Annotated[
        str | None,
        opt.data_option(help="Second text of a pair, or the questions' context."),
    ] = None,
    vector: VectorOptions = VectorOptions(),
    precision: opt.AnsweringFile = "int8",
    on_error: Annotated[
        Literal["stop", "skip"],
        opt.output(help="What to do if a text is not UTF-8 or too long."),
    ] = "stop",
    as_json: opt.Json = False,
) -> None:
    """Label texts, tag words, answer questions, compute vectors, or continue a text.
    Needs neither torch nor transformers.

    Example: compress predict runs/first/bundle --input rows.csv --output answers.csv
    """
    with user_errors(hint="No file was written. Run the same command again."):
        from compress.errors import DataError

        if file.rows is not None or file.answers is not None or file.text:
            if file.rows is None or file.answers is None or texts:
                raise DataError(
                    "predict: a file needs both --input and --output, and no texts"
                )
            threads = max(
                1, count_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            )
            predictor = _open(bundle, precision, vector, threads=threads)
            settings = RowSettings(file.text, pair, on_error, vector.vectors)
            decisive = {"settings": settings, "precision": precision, "vector": vector}
            share = _find_share(bundle, file.rows, file.answers, decisive)
            _answer_rows(
                predictor, file.rows, file.answers, settings, share, as_json=as_json
            )
            return
        if vector.vectors != "float32":
            raise typer.BadParameter(
                "give an .npy file with --output", param_hint="--vectors"
            )
        if not texts:
            raise typer.BadParameter(
                "give texts, - for standard input, or a file with --input and --output"
            )
        predictor = _open(bundle, precision, vector)
        skipped = _answer_texts(predictor, texts, pair, on_error, as_json=as_json)
        if skipped:
            print(
                f"warning: {skipped:,} texts were skipped; errors are printed in their "
                "places",
                file=sys.stderr,
            )


def _open(
    bundle: Path,
    precision: "Precision",
    options: VectorOptions,
    *,
    threads: int = 1,
) -> "Answering":
    """Open a bundle to answer texts, or to find the nearest lines of a file."""
    from compress.exporters.artifact import Bundle

    if options.top is not None and options.against is None:
        raise typer.BadParameter(
            "give the file to search with --against", param_hint="--top"
        )
    if options.prompt_name is not None and options.against is not None:
        raise typer.BadParameter(
            "a search uses the prompts query and document; leave the option out",
            param_hint="--prompt-name",
        )
    loaded = Bundle.load(bundle)
    if loaded.generative:
        _refuse_for_text(options)
        new = options.new_tokens or 32
        return loaded.open_writer(precision, new=new, threads=threads)
    if options.new_tokens is not None:
        raise typer.BadParameter(
            f"{bundle} does not write text", param_hint="--new-tokens"
        )
    predictor = loaded.open(precision, threads=threads)
    if options.prompt_name is not None:
        predictor = predictor.with_prompt(options.prompt_name)
    if options.against is None:
        return predictor
    from compress.exporters.row_files import open_index

    return open_index(predictor, options.against, options.top or 5)


def _refuse_for_text(options: VectorOptions) -> None:
    """Refuse options that only apply to vectors."""
    given = {"--against": options.against, "--prompt-name": options.prompt_name}
    for name, value in given.items():
        if value is not None:
            raise typer.BadParameter(
                "this bundle writes text; expected one that computes vectors",
                param_hint=name,
            )


def _answer_texts(
    predictor: "Answering",
    texts: list[str],
    pair: str | None,
    on_error: Literal["stop", "skip"],
    *,
    as_json: bool,
) -> int:
    """Print the answers to texts, or to the lines of standard input; return how many
    were skipped."""
    from compress.errors import DataError
    from compress.exporters import predictor as stream

    second = None if pair is None else stream.decode(os.fsencode(pair), "--pair")
    piped = texts == ["-"]
    lines = stream.read_lines(sys.stdin.buffer) if piped else map(os.fsencode, texts)
    unit = "line" if piped else "text"
    skipped = 0
    with _print_answers(as_json) as show:
        for each in stream.answer_lines(predictor, lines, second=second, unit=unit):
            if each.error and on_error == "stop":
                raise DataError(
                    f"{each.error}. The answers before it are above; --on-error skip "
                    "continues after it"
                )
            skipped += bool(each.error)
            show(each)
    return skipped


@dataclass(frozen=True)
class RowSettings:
    """Hold how the rows of a file are answered: see `row_files.predict_file`."""

    columns: list[str] | None
    second: str | None
    on_error: Literal["stop", "skip"]
    vectors: Literal["float32", "int8", "binary"]


def _find_share(
    bundle: Path, rows: Path, answers: Path, decisive: dict[str, Any]
) -> "RowShare | None":
    """Return which rows this process answers, if torchrun has started several."""
    if count_processes() == 1:
        return None
    from compress.exporters import row_files
    from compress.exporters.artifact import Bundle
    from compress.exporters.shared_rows import RowShare

    row_files.check_files(rows, answers)
    manifest = Bundle.load(bundle).manifest
    return RowShare.from_environment(rows, answers, decisive | {"bundle": manifest})


def _answer_rows(
    predictor: "Answering",
    rows: Path,
    answers: Path,
    settings: RowSettings,
    share: "RowShare | None",
    *,
    as_json: bool,
) -> None:
    """Answer the rows of a file into another file."""
    from compress.exporters import row_files
    from compress.progress import Progress

    began = time.monotonic()
    with Progress(rows.name, unit="rows", console=console(as_json)) as bar:

        def advance(answered: int, share: float) -> None:
            bar.total = answered / share if share else None
            bar.advance(answered - bar.done)

        count, skipped = row_files.predict_file(
            predictor,
            rows,
            answers,
            **asdict(settings),
            share=share,
            say=advance,
            note=lambda text: print(f"note: {text}", file=sys.stderr),
        )
    if share is not None and not share.writes:
        return
    seconds = time.monotonic() - began
    if as_json:
        print_json(
            "predict",
            {
                "output": str(answers),
                "rows": count,
                "skipped": skipped,
                "seconds": seconds,
            },
        )
    else:
        speed = f"{count / max(seconds, 1e-9):,.0f} rows / s"
        printer()(f"{answers}: {count:,} rows, {skipped:,} skipped; {speed}")


@contextmanager
def _print_answers(as_json: bool) -> "Iterator[Callable[[AnsweredLine], None]]":
    """Yield a function that prints an answer: a line, or an item of a JSON list that is
    closed even after an error."""
    prefix = f'{{"schema": "{schema("predict")}", "answers": ['

    def row(each: "AnsweredLine") -> None:
        lines = [f"error: {each.error}"]
        if each.answer is not None:
            lines = each.answer.lines(each.text)
        for line in lines:
            print(printable(line).replace("\n", "\\n"), flush=True)

    def item(each: "AnsweredLine") -> None:
        nonlocal prefix
        values = {"error": each.error} if each.answer is None else asdict(each.answer)
        print(
            f"{prefix}\n{json.dumps(values, ensure_ascii=False)}",
            end="",
            flush=True,
            file=results(),
        )
        prefix = ","

    if not as_json:
        yield row
        return
    try:
        yield item
    finally:
        print("\n]}" if prefix == "," else f"{prefix}]}}", flush=True, file=results())
