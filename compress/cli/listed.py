"""`compress recipes` and `students`: what there is to choose from."""

from typing import Annotated

import typer

from compress.cli.options import Json, console, print_result, told


def recipes(
    name: Annotated[str | None, typer.Argument(help="Show this one, with its citation and numbers.")] = None,
    as_json: Json = False,
) -> None:
    """List the recipes and when to choose which, or show one."""
    with told():
        import json

        from compress import guide, recipe, recipe_file

        if name is not None:
            found = recipe.Recipe.load(name)
            text = recipe_file.locate(name).read_text(encoding="utf-8")
            print_result(json.dumps(found.plain(), indent=1) if as_json else text)
            return
        listed = [recipe.Recipe.load(each) for each in recipe_file.names()]
        if as_json:
            print_result(json.dumps([guide.plain(each) for each in listed], ensure_ascii=False, indent=1))
        else:
            console().print(guide.shown(listed))


def students(
    teacher: Annotated[str, typer.Argument(help="Alias (minilm, bert-base, ...), folder or hub id.")],
    as_json: Json = False,
) -> None:
    """List the students a teacher allows, with size and cost, from its config alone, before anything is trained."""
    with told():
        from compress.students import listing

        found = listing.students_of(teacher)
        if as_json:
            print_result(listing.as_json(found))
        else:
            console().print(listing.shown(found))
