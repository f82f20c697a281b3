"""Generate the reference of the site from the code: recipes, the command line, the public names."""

import inspect
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

import click
import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.models import OptionInfo

import compress
from benchmarks import effects
from compress.cli import app
from compress.config import catalog, loader
from compress.config.recipe import Recipe
from compress.exporters import formats
from compress.exporters.snippets import PLATFORMS
from compress.records.bench_result import BenchResult
from compress.records.run_report import Report
from compress.reporting import format as units
from compress.reporting.html import render_run
from compress.reporting.tables import Cell, ResultTable, run_table

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results" / "recipes"
GALLERY = RESULTS.parent / "gallery"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, for mkdocs."""
    pages = {"recipes.md": recipes(), "tried.md": tried(), "cli.md": command_line(), "api.md": api()}
    pages |= {"gallery.md": gallery(), **{f"gallery/{name}.html": render_run(one) for name, one in shipped().items()}}
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def formats_table() -> str:
    """Lay out the formats to export, by their records."""
    headings = ("`--for`", "files", "default `--precision`", "also", "shapes", "needs", "code in")
    lines = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    for each in formats.known():
        also = " ".join(one for one in each.precisions if one not in each.default)
        languages = [PLATFORMS[name.partition(".")[2]].title.partition(",")[0] for name in each.snippets]
        code = " ".join(languages) or "Python JavaScript"
        cells = (f"`{each.name}`", each.files, ",".join(each.default), also, each.shapes, each.needs, code)
        lines.append(" ".join(["|", " | ".join(cells), "|"]).replace("|  |", "| |"))
    return "\n".join(lines)


def recipes() -> str:
    """Describe every recipe by its own fields, grouped by what it needs."""
    every = [Recipe.load(name) for name in loader.names()]
    verdicts = effects.judge(effects.load(RESULTS))
    parts = [RECIPES.format(tried=len(verdicts), all=len(every))]
    for purpose, title in catalog.PURPOSES.items():
        rows = list[str]()
        for one in every:
            if catalog.purpose(one) != purpose:
                continue
            verdict = verdicts[one.name][0] if one.name in verdicts else ""
            paper = f"[{one.paper.authors} {one.paper.year}]({one.paper.url})"
            cells = (
                f"`{one.name}`",
                one.choose or one.about,
                catalog.student(one),
                f"{one.needs}; {one.cost}",
                f'<span class="{verdict.split()[0]}">{verdict}</span>' if verdict else "not run",
                paper,
            )
            rows.append(f"| {' | '.join(cells)} |")
        heading = "| recipe | choose it when | student | needs; cost | [tried](tried.md) | paper |\n" + "|---" * 6 + "|"
        parts.append("\n".join([f"## {title}\n", heading, *rows, ""]))
    return "\n".join(parts)


RECIPES = """---
wide: true
---
# Recipes

Each recipe holds a paper's numbers, each with its table, section or equation. `compress recipes NAME` prints one,
`--set stages.0.lr=3e-5` changes any of its numbers. Not sure? [Distil, prune or search?](choose.md) leads to one, and
without `--recipe` a [table](recipe-files.md) chooses.

*Tried*: {tried} of {all} recipes were compared, on real data, with the same student trained without the recipe's idea.
*Works* means better than that control; *no better*, that the trial shows no difference; *harmful*, worse.
[The trials](tried.md) have the effects and their intervals.
"""

CONTROLS = {
    "teacher": "the same student trained on the labels, or the text, alone",
    "text": "the same recipe without its stages on text",
    "importance": "the teacher cut in one step by weight magnitude, then trained in the same way",
    "step": "the same stages without the mechanism",
    "variants": "the same recipe on the rows alone",
    "embed-mse": "`embed-mse`",
    "two views": "the same student, trained without a teacher to recognise a text under another dropout",
    "n-gram": "a bigram model of the rows it was trained on",
    "majority": "the most frequent class",
    "rate": "how often the same token is a replacement elsewhere",
}
FIGURES = {
    "score": ("accuracy, F1 or nDCG@10", "{:.1%}", "{:+.1f}", 100),
    "nats": ("nats per token", "{:.3f}", "{:+.3f}", 1),
    "kl": ("KL to the teacher", "{:.4f}", "{:+.4f}", 1),
}
"""How each figure is called and written, and a lead in it: of scores in points."""


def tried() -> str:
    """Tabulate each recipe against its control on real data, from benchmarks/results/recipes."""
    found = effects.load(RESULTS)
    verdicts = effects.judge(found)
    judged = [verdict for verdict, _ in verdicts.values()]
    parts = [
        "# Recipes on real data\n",
        f"{len(found)} of {len(loader.names())} recipes were compared with a control that has the same labelled rows "
        "and chooses its own length by the same rule, at small sizes, in minutes on one core. "
        f"{judged.count('works')} work, {judged.count('no better')} are no better, {judged.count('harmful')} do harm. "
        "The test is over seeds and test rows together, two-sided, at 5 % with Holm's correction over this table. "
        "*No better* means that the trial shows no difference, not that there is none. Each interval is at 95 %. "
        "`benchmarks/recipes_for_real.py` says what is compared, and `benchmarks/effects.py` has the "
        "formulas; each file in `benchmarks/results/recipes` has its command, versions and commit.\n",
        "| recipe | control | scored by | recipe | control | effect (interval) | corrected p | minutes | verdict |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    apart = list[str]()
    for name, each in found.items():
        runs = each["runs"]
        figure = next(one for one in FIGURES if one in runs["recipe"][0])
        unit, form, _, _ = FIGURES[figure]
        ours, theirs = (form.format(fmean(run[figure] for run in runs[side])) for side in ("recipe", "control"))
        verdict, p = verdicts[name]
        minutes = sum(run["minutes"] for run in runs["recipe"])
        parts.append(
            f"| `{name}` | {CONTROLS[each['control']]} | {unit} | {ours} | {theirs} | "
            f"{_lead(each, 'control', figure)} | {p:.2g} | {minutes:.0f} | {verdict} |"
        )
        if "texts" in each["effects"]:
            cells = (_lead(each, key, figure) for key in ("teacher", "texts", "control"))
            apart.append(f"| `{name}` | {' | '.join(cells)} |")
    if apart:
        parts += [
            "\nWhat the teacher adds on the labelled rows alone, and what it adds by labelling unlabelled texts:\n",
            "| recipe | teacher, same rows | texts | both |",
            "|---|---|---|---|",
            *apart,
        ]
    reasons = dict[str, list[str]]()
    for name in loader.names():
        if name not in found:
            reasons.setdefault(effects.NOT_RUN.get(name, effects.NOT_YET), []).append(f"`{name}`")
    parts += ["\nNot run here:\n", *(f"- {', '.join(names)}: {reason}." for reason, names in reasons.items())]
    parts.append("\nMore on vectors and rankings: [embeddings](embeddings.md) and [a reranker](reranker.md).\n")
    return "\n".join(parts)


def _lead(result: dict[str, Any], effect: str, figure: str) -> str:
    """Write an effect with its interval."""
    _, _, form, scale = FIGURES[figure]
    mean, low, high = (form.format(scale * result["effects"][effect][key]) for key in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})"


def shipped() -> dict[str, Report]:
    """Read the reports of the gallery's students, by name."""
    return {path.stem: Report.from_json(path) for path in sorted(GALLERY.glob("*.json")) if "@" not in path.name}


def gallery() -> str:
    """Show the command, scores, sizes and latencies of every student in the gallery."""
    overview = ["| student, int8 | score | file, MB | median of the longest texts, ms |", "|---|---|---|---|"]
    details = list[str]()
    for name, report in shipped().items():
        results = [BenchResult.from_json(path) for path in sorted(GALLERY.glob(f"{name}@*.json"))]
        table = run_table(report)
        columns = [one for one in table.on_page if one.rank <= SHOWN and not (results and one.group == "Inference")]
        hidden = ("~", "timing", "latency")[: 3 if results else 2]
        caption = [each for each in table.caption if not each.startswith(hidden)]
        table = replace(table, columns=tuple(columns), caption=tuple(caption))
        cells = {one.heading: one.cells[-1] for one in table.columns}
        last = [(result.latencies[-1], DEVICES.get(result.device, f"on {result.device}")) for result in results]
        times = [f"{'~' * one.noisy}{units.three_digits(one.p50_ms)} {where}" for one, where in last]
        caption = below_baseline(report)
        mark = f"; {caption}" if caption else ""
        overview.append(
            f"| [{name}](#{name}) | {_cell(next(iter(cells.values())))}{mark} | {cells['file, MB'].text} | "
            f"{', '.join(times) or cells['p50, ms'].text} |"
        )
        machine = ", ".join(report.machine[key] for key in ("cpu", "cores") if key in report.machine)
        known = f"compress {report.versions.get('compress', '')}, {report.date[:10]}"
        details += [f"## {name}\n", f"```\n{report.command}\n```\n"]
        if caption:
            details.append(f"**Do not ship this one: it is {caption}.** {WHY_SHOWN.get(name, '')}\n")
        details += [markdown(table), devices(results)]
        details.append(f"{known}; {machine}. [Full report](gallery/{name}.html).\n")
    return "\n".join([INTRODUCTION, *overview, "", *details])


def below_baseline(report: Report) -> str:
    """Say which baseline scores above the shipped student; '' if none does."""
    own = report.score(report.rows[-1])
    scores = {row.name: score for row in report.of_role("baseline") if (score := report.score(row)) is not None}
    best = max(scores, key=scores.__getitem__, default="")
    if own is None or not best or own >= scores[best]:
        return ""
    return f"worse than the baseline {best}, {units.score(scores[best])}"


def devices(results: Sequence[BenchResult]) -> str:
    """Lay out the median of each file on each device, a column per setting."""
    settings = list(dict.fromkeys(str(one.setting) for result in results for one in result.latencies))
    if not settings:
        return ""
    rows = dict[str, dict[str, str]]()
    for result in results:
        for one in result.latencies:
            file = f"{one.name.rpartition(':')[2]} {DEVICES.get(result.device, f'on {result.device}')}"
            rows.setdefault(file, {})[str(one.setting)] = "~" * one.noisy + units.three_digits(one.p50_ms)
    lines = [f"| median, ms | {' | '.join(settings)} |", "|---|" + "---|" * len(settings)]
    lines += [f"| {file} | {' | '.join(times.get(each, '') for each in settings)} |" for file, times in rows.items()]
    return "\n".join([*lines, ""])


INTRODUCTION = """# Gallery

Each student was created with the command shown, and its figures come from its report. `benchmarks/gallery.py` runs the
commands, keeps the reports, and times both files of each student again on the available devices; no result is left out.
`~`: two passes disagreed, as the machine was shared.
"""
WHY_SHOWN = {
    "albert-sst2": "Its one layer takes the place of the teacher's six, and the command gave it 8 minutes to learn.",
    "distilbert-intents-brief": "Teacher and student had 160 steps together: it shows the effect of too short a run.",
}
"""Why the gallery shows a student that a baseline beats, if that is known."""
SHOWN = 4
"""The highest rank of a column of a run's table that the gallery shows."""
DEVICES = {"local": "natively", "browser": "in Chromium"}
"""How the gallery names the devices of the machine itself."""


def markdown(table: ResultTable) -> str:
    """Write a table, and its caption below it."""
    columns = table.on_page
    heading = [" | ".join(["| ", *(each.heading for each in columns)]) + " |", "|" + "---|" * (1 + len(columns))]
    rows = [[line.name, *(_cell(each.cells[at]) for each in columns)] for at, line in enumerate(table.rows)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*heading, *lines, "", "; ".join(table.caption), ""])


def _cell(cell: Cell) -> str:
    return f"{cell.text} ({cell.detail})" if cell.detail else cell.text


def command_line() -> str:
    """Print the help of every command."""
    root = typer.main.get_command(app)
    parts = [
        "# Command line\n\n`compress -h` and `compress COMMAND -h` show this help with options in groups; `-V` prints "
        "the version.\n\n"
        "`--quiet` prints only errors, the last line and the requested output (tables of `bench`, `report` and the "
        "lists, JSON, predictions). `--log-level warning` adds warnings; `debug` also shows the libraries' messages "
        "and a traceback below an error.\n\n"
        "`compress --install-completion` enables completion of commands, options and choices in bash, zsh and fish; "
        "`compress --show-completion` prints the script instead.\n"
    ]
    for words, command in commands(root, ("compress",)):
        context = click.Context(command, info_name=" ".join(words), help_option_names=["-h", "--help"])
        help_text = command.get_help(context)
        parts.append(f"## {' '.join(words)}\n\n```text\n{help_text}\n```\n")
    return "\n".join(parts)


def commands(command: Any, words: tuple[str, ...]) -> list[tuple[tuple[str, ...], Any]]:
    """List a command and its subcommands, with the words that call each."""
    below = getattr(command, "commands", {})
    own = [] if below and not command.invoke_without_command else [(words, command)]
    return own + [found for name, each in below.items() for found in commands(each, (*words, name))]


def api() -> str:
    """List the public names, functions first; mkdocstrings adds signatures, members and docstrings."""
    public = {name: getattr(compress, name) for name in compress.__all__}
    functions = {name: one for name, one in public.items() if inspect.isfunction(one)}
    commands = [name for name, one in functions.items() if one.__module__.startswith("compress.commands.")]
    forecasts = [name for name in commands if name.startswith("forecast")]
    options = [name for name, one in public.items() if described(one)]
    results = ["Bundle", "Report", "CompressError"]
    groups = {
        "Commands": [name for name in commands if name not in forecasts],
        "What they return": results,
        "Forecasts": forecasts,
        "Losses, students, data": [name for name in functions if name not in commands],
        "Options": options,
        "Types": [name for name in public if name not in {*functions, *results, *options}],
    }
    parts = [
        "---\ndeep: true\n---\n# Python API\n\nEvery command is one function call. A name that is not on this page may "
    ]
    parts[0] += "change without notice.\n"
    for title, names in groups.items():
        parts += [f"## {title}\n", *(_documented(name, public[name]) for name in names)]
    return "\n".join(parts)


def _documented(name: str, one: Any) -> str:
    """Ask mkdocstrings for a name; list the fields of a group of options by their help."""
    rows = described(one)
    lines = [f"::: {one.__module__}.{name}", "    options:", "      show_root_full_path: false"]
    if not rows:
        return "\n".join([*lines, ""])
    table = ["| field | type | default | meaning |", "|---|---|---|---|", *rows]
    return "\n".join([*lines, "      members: false", "      show_signature: false", "", *table, ""])


def described(one: Any) -> list[str]:
    """Return the rows of a table of an option group's fields, none for anything else."""
    if not is_dataclass(one):
        return []
    rows = list[str]()
    for field in fields(one):
        hint = field.type
        helps = [each.help for each in getattr(hint, "__metadata__", ()) if isinstance(each, OptionInfo)]
        if helps:
            kind = inspect.formatannotation(get_args(hint)[0]).replace("typing.", "")
            default = "required" if field.default is MISSING else f"`{field.default!r}`"
            rows.append(f"| `{field.name}` | `{kind}` | {default} | {helps[0] or ''} |")
    return rows
