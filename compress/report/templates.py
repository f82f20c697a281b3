"""Templates to pages: styles and pictures inside, no request, all text escaped."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from compress.report.cells import groups


def render(name: str, **shown: Any) -> str:
    """The template `name` of this folder with these values; one that it lacks is an error of ours."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["groups"] = groups
    return environment.get_template(name).render(**shown)
