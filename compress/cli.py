"""The command line: parse, call, print. torch and transformers are imported inside the commands that need them."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from compress import __version__

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)

Recipe = Annotated[str, typer.Option(help="Name (see `compress recipes`) or path of a .yaml file.")]
Out = Annotated[Path, typer.Option(help="Directory of the run.")]
CorpusName = Annotated[str | None, typer.Option(help="Unlabelled text: pydoc, a file, folder or hub id.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="As in stages.0.lr=3e-5; repeatable.")]
Seed = Annotated[int, typer.Option(help="Of every random number of the run.")]
Precision = Annotated[Literal["auto", "bf16", "fp32"], typer.Option(help="What training computes in.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the interrupted run in --out.")]
AllowPickle = Annotated[bool, typer.Option("--allow-pickle", help="Accept pickled weights you trust.")]
OnWeakTeacher = Annotated[
    Literal["refuse", "warn"], typer.Option(help="What to do with a teacher no better than the majority.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
USER_ERROR, INTERRUPTED = 2, 130


def _version(asked: bool) -> None:
    if asked:
        print(f"compress {__version__}")
        raise typer.Exit


@app.callback()
def compress(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Take a teacher and a paper's recipe, ship a small, fast, measured student."""


@app.command()
def distill(
    teacher: Annotated[str, typer.Option(help="Alias (minilm, bert-base, ...), folder or hub id.")],
    recipe: Recipe,
    data: Annotated[str, typer.Option(help="intents, a folder with train and dev files, or a hub id (glue/sst2).")],
    out: Out,
    corpus: CorpusName = None,
    prompt: Annotated[str | None, typer.Option(help="What a language model is asked, to teach without labels.")] = None,
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
    allow_pickle: AllowPickle = False,
    as_json: Json = False,
) -> None:
    """Distil a teacher into a student, export and quantise it, and measure it beside its teacher."""
    with _told(hint=f"Continue with: compress distill ... --out {out} --resume"):
        from compress.pipeline import distill as run

        console = _console(as_json)
        bundle = run(
            teacher=teacher,
            recipe=recipe,
            data=data,
            out=out,
            corpus=corpus,
            prompt=prompt,
            overrides=overrides or [],
            text=text,
            label=label,
            kind=kind,
            metric=metric,
            seed=seed,
            precision=precision,
            resume=resume,
            gate=gate,
            allow_pickle=allow_pickle,
            console=console,
        )
        if as_json and not console.quiet:
            print((bundle.path / "report.json").read_text(encoding="utf-8"))


@app.command()
def pretrain(
    teacher: Annotated[str, typer.Option(help="Who teaches, or whose vocabulary and sizes are taken.")],
    recipe: Recipe,
    out: Out,
    corpus: CorpusName = None,
    data: Annotated[str | None, typer.Option(help="Labelled set, for stages that answer with text (T5).")] = None,
    overrides: Overrides = None,
    seed: Seed = 0,
    precision: Precision = "auto",
    resume: Resume = False,
    allow_pickle: AllowPickle = False,
) -> None:
    """Run a recipe's stages on text alone: a general student, a language model, a teacher. Ends in a checkpoint."""
    with _told(hint=f"Continue with: compress pretrain ... --out {out} --resume"):
        from compress.pretraining import pretrain as run

        run(
            teacher=teacher,
            recipe=recipe,
            out=out,
            corpus=corpus,
            data=data,
            overrides=overrides or [],
            seed=seed,
            precision=precision,
            resume=resume,
            allow_pickle=allow_pickle,
            console=_console(),
        )


@app.command("label")
def label_texts(
    teacher: Annotated[str, typer.Option(help="Language model: alias (gpt2, ...), folder, hub id, endpoint's .yaml.")],
    prompt: Annotated[str, typer.Option(help="Name (see recipes/prompts) or path of a .yaml file.")],
    data: Annotated[str, typer.Option(help="As for distill; or texts without labels: a table, a .txt file, a corpus.")],
    out: Annotated[Path, typer.Option(help="The .jsonl file to write.")],
    text: Annotated[list[str] | None, typer.Option(help="Text column; given twice for pairs.")] = None,
    label: Annotated[str | None, typer.Option(help="Label column; it only scores the teacher.")] = None,
    seed: Annotated[int, typer.Option(help="Of the choice of examples.")] = 0,
    precision: Annotated[Literal["auto", "bf16", "fp32"], typer.Option(help="What the model computes in.")] = "auto",
    gate: OnWeakTeacher = "refuse",
    allow_pickle: AllowPickle = False,
) -> None:
    """Let a prompted language model label texts: one line of JSON each, with the probabilities of the labels."""
    with _told(hint="Answers are kept: the same command goes on from there."):
        from compress.prompted.labelled import label as run

        run(
            teacher=teacher,
            prompt=prompt,
            data=data,
            out=out,
            text=text,
            label=label,
            seed=seed,
            precision=precision,
            gate=gate,
            allow_pickle=allow_pickle,
            console=_console(),
        )


@app.command()
def predict(
    bundle: Annotated[Path, typer.Argument(help="A bundle's folder.")],
    texts: Annotated[list[str], typer.Argument(help="Texts, or - for one per line of standard input.")],
    pair: Annotated[str | None, typer.Option(help="The second sentence of a pair; the text questions are on.")] = None,
    fp32: Annotated[bool, typer.Option("--fp32", help="Use the fp32 file instead of int8.")] = False,
    as_json: Json = False,
) -> None:
    """Label texts, tag their words, or answer questions with a bundle. Needs neither torch nor transformers."""
    with _told():
        from compress.export.bundle import Bundle

        lines = [line.rstrip("\n") for line in sys.stdin] if texts == ["-"] else texts
        given = [(line, pair) for line in lines] if pair is not None else lines
        found = Bundle.load(bundle).predict(given, precision="fp32" if fp32 else "int8")
        if as_json:
            import json
            from dataclasses import asdict

            print(json.dumps([asdict(each) for each in found], ensure_ascii=False, indent=1))
        else:
            for line, each in zip(lines, found, strict=True):
                print(f"{each}\t{line}")


@app.command()
def bench(
    bundles: Annotated[list[Path], typer.Argument(help="One or more bundles, raced against each other.")],
    threads: Annotated[str, typer.Option(help="Thread counts, comma-separated.")] = "1",
    batch: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1",
    seq: Annotated[str, typer.Option(help="Lengths in tokens, comma-separated.")] = "128",
    rounds: Annotated[int, typer.Option(help="Interleaved rounds per setting.")] = 8,
    runs: Annotated[int, typer.Option(help="Timed runs per round.")] = 15,
    as_json: Json = False,
) -> None:
    """Measure latency on this machine: interleaved, warmed up, with a verdict on noise."""
    with _told():
        from compress.bench import show
        from compress.bench.local import machine, race
        from compress.export.bundle import Bundle

        files = {f"{path}:{which}": file for path in bundles for which, file in Bundle.load(path).files().items()}
        times = race(files, show.settings(threads, batch, seq), rounds=rounds, runs=runs)
        if as_json:
            print(show.as_json(times, machine()))
        else:
            _console().print(show.table(times, machine()))


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="Show this one, with its citation and numbers.")] = None,
    as_json: Json = False,
) -> None:
    """List the recipes and when to choose which, or show one."""
    with _told():
        import json

        from compress import guide, recipe, recipe_file

        if name is not None:
            found = recipe.Recipe.load(name)
            text = recipe_file.locate(name).read_text(encoding="utf-8")
            print(json.dumps(found.plain(), indent=1) if as_json else text)
            return
        listed = [recipe.Recipe.load(each) for each in recipe_file.names()]
        if as_json:
            print(json.dumps([guide.plain(each) for each in listed], ensure_ascii=False, indent=1))
        else:
            _console().print(guide.shown(listed))


@app.command()
def students(
    teacher: Annotated[str, typer.Argument(help="Alias (minilm, bert-base, ...), folder or hub id.")],
    as_json: Json = False,
) -> None:
    """List the students a teacher allows, with size and cost, from its config alone, before anything is trained."""
    with _told():
        from compress.students import listing

        found = listing.students_of(teacher)
        if as_json:
            print(listing.as_json(found))
        else:
            _console().print(listing.shown(found))


def _console(as_json: bool = False) -> "Console":
    """Where progress and tables go: standard output, or standard error when that is for JSON; silent but in rank 0."""
    from rich.console import Console

    return Console(stderr=as_json, quiet=os.environ.get("RANK", "0") != "0")


@contextmanager
def _told(hint: str = "") -> Iterator[None]:
    """Errors of the user's become a message and exit code 2, Ctrl-C 130; a traceback is a bug of ours."""
    from compress.errors import CompressError

    try:
        yield
    except CompressError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(USER_ERROR) from None
    except OSError as error:
        if error.errno in (None, errno.EPIPE):  # a library's own, and a reader that has read enough
            raise
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror}. Nothing half-written is left. {hint}".rstrip(), file=sys.stderr)
        raise typer.Exit(USER_ERROR) from None
    except KeyboardInterrupt:
        print(f"\ninterrupted. {hint}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None


def main() -> None:
    """Entry point of the `compress` script."""
    settle_libraries()
    app()


def settle_libraries() -> None:
    """Quiet, and good neighbours; whatever the user has set stays.

    Their progress bars and advice would break ours. Threads that wait by spinning fight with any other process for the
    cores: beside one busy process, training fell from 360 to under 20 samples/s, with waiting threads asleep to 210.
    """
    for name, value in {
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "true",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "OMP_WAIT_POLICY": "PASSIVE",
    }.items():
        os.environ.setdefault(name, value)
