"""`compress distill`, `pretrain` and `label`, which train or teach; `recipes`,
`students` and `clean`."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from compress.cli.options import (
    announce,
    console,
    is_first,
    print_forecast,
    print_json,
    print_result,
    printer,
    run_folder,
    user_errors,
    with_option_groups,
)
from compress.config import options as opt


@dataclass(frozen=True, kw_only=True)
class TaughtOptions:
    """Choose what a student learns from besides labelled data and its teacher."""

    corpus: opt.CorpusName = None
    prompt: Annotated[
        str | None, opt.training(help="Prompt for a language model as the teacher.")
    ] = None
    knowledge: Annotated[
        str | None,
        opt.training(help="Table of triples with facts that the teacher reads."),
    ] = None


@with_option_groups(without=("wide",))
def distill(
    teacher: opt.TeacherOption,
    data: opt.DataName,
    recipe: opt.RecipeOption = "auto",
    taught: TaughtOptions = TaughtOptions(),
    goal: opt.GoalOptions = opt.GoalOptions(),
    columns: opt.DataOptions = opt.DataOptions(),
    shipped: opt.ShipOptions = opt.ShipOptions(),
    length: opt.LengthOptions = opt.LengthOptions(),
    options: opt.RunOptions = opt.RunOptions(),
    shown: opt.PrintOptions = opt.PrintOptions(),
) -> None:
    """Distil a teacher into a student, export and quantise it, and measure it against
    its teacher.

    Without --out, the folder is a new runs/RECIPE-DATA-N; with --resume, the newest
    unfinished one.

    Example: compress distill --teacher minilm --data intents --out runs/first
    """
    out = run_folder(shipped.out, recipe, data, resume=options.resume)
    with user_errors(hint=out):
        from compress.commands import preflight
        from compress.jobs.request import ForecastArguments

        request = preflight.distill_request(
            ForecastArguments(
                teacher=teacher,
                data=data,
                recipe=recipe,
                corpus=taught.corpus,
                prompt=taught.prompt,
                knowledge=taught.knowledge,
                goal=goal,
                columns=columns,
                vocabulary=shipped.vocabulary,
                length=length,
                options=options,
                console=console(shown.as_json),
            ),
            out,
        )
        announce(f"distilling {teacher} on {data}", out, shown.as_json)
        from compress.commands import distill as command

        if shown.plan:
            print_forecast(
                command.estimate_distillation, shown.as_json, request=request
            )
            return
        bundle = command.run_distillation(request, shipped.limit)
        if shown.as_json and is_first():
            print_json("distill", bundle.path / "report.json")


@with_option_groups(without=("gate",))
def pretrain(
    teacher: Annotated[
        str,
        opt.training(
            help="The teacher, or a model whose vocabulary and sizes are used."
        ),
    ],
    recipe: opt.RecipeOption,
    out: opt.Out = None,
    corpus: opt.CorpusName = None,
    data: Annotated[
        str | None,
        opt.data_option(help="Labelled data, for stages that answer with text (T5)."),
    ] = None,
    length: opt.LengthOptions = opt.LengthOptions(),
    options: opt.RunOptions = opt.RunOptions(),
    plan: opt.Plan = False,
    as_json: opt.Json = False,
) -> None:
    """Run a recipe's stages on text alone. The result is a checkpoint: a general
    student, language model or teacher.

    Example: compress pretrain --teacher minilm --recipe tinybert-general --corpus pydoc
    --out runs/general
    """
    out = run_folder(out, recipe, corpus or data, resume=options.resume)
    with user_errors(hint=out):
        from compress.commands import preflight
        from compress.jobs.request import ForecastPretrainingArguments

        request = preflight.pretrain_request(
            ForecastPretrainingArguments(
                teacher=teacher,
                recipe=recipe,
                corpus=corpus,
                data=data,
                length=length,
                options=options,
                console=console(as_json),
            ),
            out,
        )
        announce(f"training on {corpus or data}", out, as_json)
        from compress.commands import pretrain as command

        if plan:
            print_forecast(command.estimate_pretraining, as_json, request=request)
            return
        checkpoint = command.run_pretraining(request)
        if as_json and is_first():
            from compress.jobs.pretrain import load_scores

            scores = load_scores(checkpoint.parent)
            found = [] if scores is None else scores.summarise()
            content = {"checkpoint": str(checkpoint), "perplexity": found}
            print_json("pretrain", content)


@dataclass(frozen=True, kw_only=True)
class LabelOptions:
    """Choose how texts are read and labelled."""

    seed: Annotated[
        int, opt.training(min=0, help="Random seed for choosing examples.")
    ] = 0
    precision: opt.PrecisionOption = "auto"
    gate: opt.OnWeakTeacher = "refuse"
    allow_pickle: opt.AllowPickle = False
    max_calls: Annotated[
        int | None,
        opt.training(help="Maximum number of requests to an endpoint.", min=1),
    ] = None
    max_tokens: Annotated[
        int | None,
        opt.training(help="Maximum tokens of prompts and answers.", min=1),
    ] = None
    batch: Annotated[
        Path | None,
        opt.training(help="Ask an endpoint by batch files in this folder."),
    ] = None


@with_option_groups()
def label(
    teacher: Annotated[
        str, opt.training(help="Alias, folder, hub id or an endpoint's .yaml.")
    ],
    prompt: Annotated[
        str, opt.training(help="A name in recipes/prompts, or a .yaml file.")
    ],
    data: Annotated[
        str, opt.data_option(help="The data, as for distill; or texts without labels.")
    ],
    out: Annotated[Path, opt.file_output(help="The .jsonl file to write.")],
    columns: opt.ColumnOptions = opt.ColumnOptions(),
    options: LabelOptions = LabelOptions(),
    plan: opt.Plan = False,
    as_json: opt.Json = False,
) -> None:
    """Label texts with a prompted language model: one JSON line per text, with the
    probabilities of the labels, or with the text that it answers. Labels in the data
    only score the model.

    Example: compress label --teacher gpt2 --prompt sentiment --data texts.txt --out
    labelled.jsonl
    """
    with user_errors(hint="Answers are saved. Run the same command again to continue."):
        from compress.arguments import NAME_CHECK
        from compress.commands import preflight

        teacher = NAME_CHECK.take(teacher, "teacher")
        prompt = NAME_CHECK.take(prompt, "prompt")
        arguments: dict[str, Any] = asdict(options)
        preflight.check_labelling(
            teacher, prompt, data, out, columns, allow_pickle=options.allow_pickle
        )

        from compress.commands import label as command
        from compress.prompting.batch import AwaitedError

        arguments["columns"] = columns
        arguments |= {"teacher": teacher, "prompt": prompt, "data": data, "out": out}
        arguments["console"] = console(as_json)
        if plan:
            print_forecast(command.forecast_labelling, as_json, **arguments)
            return
        try:
            found = command.label(**arguments)
        except AwaitedError as awaited:
            if not awaited.complete:
                raise
            files = [str(file) for file in awaited.files]
            printer(answer=not as_json)(str(awaited))
            if as_json:
                print_json("label", {"labelled": None, "request_files": files})
            return
        if as_json and is_first():
            print_json("label", {"labelled": str(out), **found.counts})


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(help="Show this recipe, with its citation and numbers."),
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """List the recipes and when to use each, or show one; `auto` shows how one is
    chosen.

    Example: compress recipes tinybert
    """
    with user_errors():
        from compress.config import catalog, choices, loader, recipe

        if name is not None:
            table = choices.is_table(name)
            loaded = choices.Choices.load(name) if table else recipe.Recipe.load(name)
            path = choices.table_path(name) if table else loader.locate(name)
            if as_json:
                print_json("recipe", loaded.plain())
            else:
                print_result(path.read_text(encoding="utf-8"))
            return
        everything = [recipe.Recipe.load(each) for each in loader.names()]
        if as_json:
            print_json(
                "recipes", {"recipes": [catalog.plain(each) for each in everything]}
            )
        else:
            print_result("\n".join(catalog.format_table(everything)))


def students(
    teacher: Annotated[
        str, typer.Argument(help="Alias (minilm, bert-base, ...), folder or hub id.")
    ],
    wide: opt.Wide = False,
    as_json: opt.Json = False,
) -> None:
    """List the students that a teacher allows, with size and cost, from its config
    alone; nothing is trained.

    Example: compress students minilm
    """
    with user_errors():
        from compress.models.checkpoints import find_place

        find_place(teacher)

        from compress.commands import students as listing

        students = listing.list_students(teacher)
        if as_json:
            print_json("students", asdict(students))
        else:
            listing.print_listing(students, console(answer=True), wide=wide)


def clean(
    run: Annotated[Path, typer.Argument(help="The folder of a run or a search.")],
    dry_run: Annotated[
        bool, opt.output("--dry-run", help="Only print how much this would free.")
    ] = False,
    unfinished: Annotated[
        bool,
        opt.output(
            "--unfinished",
            help="Clean an unfinished run too; it can then no longer be resumed.",
        ),
    ] = False,
    as_json: opt.Json = False,
) -> None:
    """Remove the checkpoints and leftovers of a run. Its bundle, report, log and stage
    results stay.

    Example: compress clean runs/first
    """
    with user_errors():
        from compress.training.run import clean

        freed = clean(run, unfinished=unfinished, dry_run=dry_run)
        if as_json:
            print_json("clean", {"run": str(run), "bytes": freed, "dry_run": dry_run})
            return
        printer(answer=True)(
            f"{run}: {'would free' if dry_run else 'freed'} {freed / 1e6:,.1f} MB"
        )
