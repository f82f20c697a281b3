"""Generate the reference of the site from the code: recipes, the command line, the public names."""

from typing import Any

import click
import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import compress
from compress.cli import app
from compress.config import catalog, loader
from compress.config.recipe import Recipe


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, for mkdocs."""
    for name, content in {"recipes.md": recipes(), "cli.md": command_line(), "api.md": api()}.items():
        files.append(File.generated(config, name, content=content))
    return files


def recipes() -> str:
    """Describe every recipe by its own fields, grouped by what it needs."""
    every = [Recipe.load(name) for name in loader.names()]
    parts = [
        "# Recipes\n\nEach recipe holds a paper's numbers, every one with its table, section or equation. "
        "`compress recipes NAME` prints it; `--set stages.0.lr=3e-5` overrides any number.\n"
    ]
    for purpose, title in catalog.PURPOSES.items():
        rows = [
            f"| `{one.name}` | [{one.paper.authors} {one.paper.year}]({one.paper.url}) | {catalog.student(one)} | "
            f"{one.needs} | {one.cost} | {one.choose or one.about} |"
            for one in every
            if catalog.purpose(one) == purpose
        ]
        heading = "| recipe | paper | student | needs | cost | choose it when |\n|---|---|---|---|---|---|"
        parts.append("\n".join([f"## {title}\n", heading, *rows, ""]))
    return "\n".join(parts)


def command_line() -> str:
    """Describe every command with its options, as its help does."""
    root = typer.main.get_command(app)
    parts = ["# Command line\n\n`compress --help` and `compress COMMAND --help` show the same.\n"]
    for words, command in commands(root, ("compress",)):
        context = click.Context(command, info_name=" ".join(words))
        help_text = command.get_help(context)
        parts.append(f"## {' '.join(words)}\n\n```text\n{help_text}\n```\n")
    return "\n".join(parts)


def commands(command: Any, words: tuple[str, ...]) -> list[tuple[tuple[str, ...], Any]]:
    """List a command and everything below it, with the words that call it."""
    below = getattr(command, "commands", {})
    own = [] if below and not command.invoke_without_command else [(words, command)]
    return own + [found for name, each in below.items() for found in commands(each, (*words, name))]


def api() -> str:
    """List the public names; mkdocstrings puts their signatures and docstrings in."""
    parts = ["# Python API\n\nEverything a command does is one call. All other names may change without notice.\n"]
    parts += [f"::: {home}.{name}\n    options:\n      show_root_full_path: false\n" for name, home in homes().items()]
    return "\n".join(parts)


def homes() -> dict[str, str]:
    """Return the module in which each public name is defined."""
    return {name: getattr(compress, name).__module__ for name in compress.__all__}
