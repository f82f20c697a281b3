"""`compress distill`, `pretrain` and `label`: whatever learns, or teaches."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from compress.cli.options import (
    console,
    continuation,
    grouped,
    is_first,
    print_forecast,
    print_json,
    print_result,
    run_folder,
    told,
)
from compress.config.options import (
    AllowPickle,
    CorpusName,
    DataName,
    DataOptions,
    Int8MaxDrop,
    Json,
    LengthOptions,
    OnWeakTeacher,
    Out,
    Plan,
    Precision,
    Recipe,
    RunOptions,
    Teacher,
    TextColumns,
    Wide,
    data_option,
    output,
    training,
)
from compress.errors import RecipeError


@grouped()
def distill(
    teacher: Teacher,
    data: DataName,
    out: Out = None,
    recipe: Recipe = "auto",
    corpus: CorpusName = None,
    prompt: Annotated[str | None, training(help="Let a language model teach by this prompt.")] = None,
    columns: DataOptions = DataOptions(),
    max_drop: Int8MaxDrop = None,
    length: LengthOptions = LengthOptions(),
    options: RunOptions = RunOptions(),
    plan: Plan = False,
    as_json: Json = False,
) -> None:
    """Distil a teacher into a student, export and quantise it, and measure it beside its teacher.

    Without --out the folder is a new one, runs/RECIPE-DATA-N; with --resume, the newest there that is not finished.

    Example: compress distill --teacher minilm --data intents --out runs/first
    """
    out = run_folder(out, recipe, data, resume=options.resume)
    with told(hint=continuation(out)):
        from compress.commands import preflight
        from compress.prompting.prompt import Prompt
        from compress.prompting.vectors import gives_vectors

        ready = preflight.load_choices(recipe, options.overrides, length)
        asked = None if prompt is None else Prompt.load(prompt)
        recorded = asked is not None or gives_vectors(teacher)
        preflight.check(ready, teacher=teacher, out=out, data=data, corpus=corpus, prompted=recorded, options=options)
        if plan:
            if recorded:
                raise RecipeError(["--plan: is of teachers that run here, not of one that is asked or gives vectors"])
            from compress.commands.forecast import forecast  # seconds: torch

            print_forecast(
                forecast, as_json, teacher=teacher, recipe=ready, data=data, corpus=corpus, columns=columns,
                length=length.minutes_alone, options=replace(options, overrides=None),
            )  # fmt: skip
            return
        from compress.commands.distill import distill as run  # seconds: torch

        shown = console(as_json)
        bundle = run(
            teacher=teacher, recipe=ready, data=data, out=out, corpus=corpus, prompt=asked, columns=columns,
            max_drop=None if max_drop is None else max_drop / 100, length=length.minutes_alone,
            options=replace(options, overrides=None), console=shown,
        )  # fmt: skip
        if as_json and is_first():
            print_json("distill", bundle.path / "report.json")


@grouped(without=("gate",))
def pretrain(
    teacher: Annotated[str, training(help="A teacher; or a model to take words and sizes of.")],
    recipe: Recipe,
    out: Out = None,
    corpus: CorpusName = None,
    data: Annotated[str | None, data_option(help="A labelled set, for stages that answer with text (T5).")] = None,
    length: LengthOptions = LengthOptions(),
    options: RunOptions = RunOptions(),
    plan: Plan = False,
    as_json: Json = False,
) -> None:
    """Run a recipe's stages on text alone; the result is a checkpoint: a general student, a language model, a teacher.

    Example: compress pretrain --teacher minilm --recipe tinybert-general --corpus pydoc --out runs/general
    """
    out = run_folder(out, recipe, corpus or data, resume=options.resume)
    with told(hint=continuation(out)):
        from compress.commands import preflight

        ready = preflight.load_recipe(recipe, options.overrides, length)
        preflight.without_task(ready, corpus, data)
        preflight.check(ready, teacher=teacher, out=out, data=data, corpus=corpus, options=options)
        given: dict[str, Any] = {
            "teacher": teacher, "recipe": ready, "corpus": corpus, "data": data, "length": length.minutes_alone,
            "options": replace(options, overrides=None),
        }  # fmt: skip
        if plan:
            from compress.commands.forecast import forecast_pretraining

            print_forecast(forecast_pretraining, as_json, **given)
            return
        from compress.commands.pretrain import pretrain as run  # seconds: torch

        shown = console(as_json)
        made = run(**given, out=out, console=shown)
        if as_json and is_first():
            print_json("pretrain", {"checkpoint": str(made)})


def label(
    teacher: Annotated[str, training(help="Alias, folder, hub id or an endpoint's .yaml.")],
    prompt: Annotated[str, training(help="A name of recipes/prompts, or a .yaml.")],
    data: Annotated[str, data_option(help="The data, as for distill; or texts without labels.")],
    out: Annotated[Path, output(help="The .jsonl file to write.")],
    text: TextColumns = None,
    label: Annotated[str | None, data_option(help="Name the label column; it only scores the teacher.")] = None,
    seed: Annotated[int, training(help="Seed the choice of examples.")] = 0,
    precision: Precision = "auto",
    gate: OnWeakTeacher = "refuse",
    allow_pickle: AllowPickle = False,
    plan: Plan = False,
    as_json: Json = False,
) -> None:
    """Let a prompted language model label texts: one line of JSON each, with the probabilities of the labels.

    Example: compress label --teacher gpt2 --prompt sentiment --data texts.txt --out labelled.jsonl
    """
    with told(hint="Answers are kept: the same command goes on from there."):
        from compress.commands.label import forecast_labelling
        from compress.commands.label import label as run

        given: dict[str, Any] = {
            "teacher": teacher, "prompt": prompt, "data": data, "out": out, "text": text, "label": label,
            "seed": seed, "precision": precision, "allow_pickle": allow_pickle,
        }  # fmt: skip
        if plan:
            print_forecast(forecast_labelling, as_json, **given)
            return
        done = run(**given, gate=gate, console=console(as_json))
        if as_json:
            counts = {"texts": len(done.log_p_NC), "answered": int(done.answered.sum())}
            print_json("label", {"labelled": str(out), **counts, "shares": done.shares, "asked": done.asked})


def recipes(
    name: Annotated[str | None, typer.Argument(help="Show this recipe, with its citation and numbers.")] = None,
    as_json: Json = False,
) -> None:
    """List the recipes and when to choose which, or show one; `auto` shows how one is chosen.

    Example: compress recipes tinybert
    """
    with told():
        from compress.config import catalog, choices, loader, recipe

        if name is not None:
            table = choices.is_table(name)
            found = choices.Choices.load(name) if table else recipe.Recipe.load(name)
            path = choices.table_path(name) if table else loader.locate(name)
            if as_json:
                print_json("recipe", found.plain())
            else:
                print_result(path.read_text(encoding="utf-8"))
            return
        listed = [recipe.Recipe.load(each) for each in loader.names()]
        if as_json:
            print_json("recipes", {"recipes": [catalog.plain(each) for each in listed]})
        else:
            print_result("\n".join(catalog.format_table(listed)))


def students(
    teacher: Annotated[str, typer.Argument(help="Alias (minilm, bert-base, ...), folder or hub id.")],
    wide: Wide = False,
    as_json: Json = False,
) -> None:
    """List the students a teacher allows, with size and cost, from its config alone, before anything is trained.

    Example: compress students minilm
    """
    with told():
        from compress.commands import students as listing

        found = listing.students_of(teacher)
        if as_json:
            print_json("students", asdict(found))
        else:
            listing.show(found, console(answer=True), wide=wide)


def clean(
    run: Annotated[Path, typer.Argument(help="Directory of a run or a search.")],
    dry_run: Annotated[bool, output("--dry-run", help="Only say how much this would free.")] = False,
    unfinished: Annotated[
        bool, output("--unfinished", help="Clean an unfinished run too, which then cannot be resumed.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Remove a run's checkpoints and left-overs. Bundle, report, log and the results of its stages stay.

    Example: compress clean runs/first
    """
    with told():
        from compress.training.run import clean

        freed = clean(run, unfinished=unfinished, dry_run=dry_run)
        if as_json:
            print_json("clean", {"run": str(run), "bytes": freed, "dry_run": dry_run})
            return
        did = "would free" if dry_run else "freed"
        console(answer=True).print(f"{run}: {did} {freed / 1e6:,.1f} MB", markup=False, highlight=False, soft_wrap=True)
