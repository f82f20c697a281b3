"""Templates to pages: styles and pictures inside, no request, all text escaped."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from compress.report.cells import groups

FOLDER = Path(__file__).parent


def render(template: str | Path, **shown: Any) -> str:
    """The template of this folder by its name, or of another by its path, with these values.

    One of another folder may extend and include those here. A value that is lacking is an error of ours.
    """
    path = FOLDER / template
    environment = Environment(
        loader=FileSystemLoader((path.parent, FOLDER)),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["groups"] = groups
    return environment.get_template(path.name).render(**shown)
