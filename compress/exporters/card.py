"""Render the model card: `README.md` of a bundle, in the hub's form."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from markupsafe import Markup

from compress.data.task import Kind
from compress.errors import BundleError, did_you_mean
from compress.models.heads import CLASSES

if TYPE_CHECKING:
    from compress.exporters.manifest import Manifest

TEMPLATE = Path(__file__).with_name("card.md.jinja")
PIPELINES: Mapping[Kind, str] = {"tagging": "token-classification", "qa": "question-answering"}
"""The hub's names, where it is not text-classification."""
EXAMPLES: Mapping[Kind, str] = {"tagging": '"a sentence"', "qa": '"a question", "the text it is about"'}
MARKS = re.compile(r"[\\`*_\[\]|#]")


@dataclass(frozen=True)
class Card:
    """Fields that only the maker knows of the model; all of it optional but the name.

    name        the title
    recipe      name of the recipe; citation: the paper it follows, one line
    teacher     what taught the model; base_model: the same as a hub id, where it has one
    data        name of the training data; language: its code, such as `en`
    rows        the scores table: one mapping per line, the columns are the first one's keys
    classes     the same of each class: precision / recall / F1 of every model
    limits      sentences on what the model must not be trusted with
    """

    name: str
    recipe: str = ""
    citation: str = ""
    teacher: str = ""
    base_model: str = ""
    data: str = ""
    language: str = ""
    rows: tuple[Mapping[str, Any], ...] = ()
    classes: tuple[Mapping[str, Any], ...] = ()
    limits: tuple[str, ...] = ()

    @classmethod
    def parse(cls, card: Mapping[str, Any]) -> "Card":
        """Read the fields. Raises BundleError for an unknown or missing key, and for rows whose columns differ."""
        known = [field.name for field in fields(cls)]
        for key in card:
            if key not in known:
                raise BundleError(f"model card: no field {key!r}.{did_you_mean(key, known)}")
        if "name" not in card:
            raise BundleError("model card: expected a name")
        lists = {name: tuple(card.get(name, ())) for name in ("rows", "classes", "limits")}
        for rows in (lists["rows"], lists["classes"]):
            for row in rows:
                if list(row) != list(rows[0]):
                    raise BundleError(
                        f"model card: a row has columns {list(row)}; expected {list(rows[0])} as in the first"
                    )
        return cls(**{**card, **lists})


def model_card(card: Mapping[str, Any], manifest: "Manifest") -> str:
    """Render the card as Markdown. Everything given is escaped; the licence is left to the user."""
    from jinja2 import Environment, StrictUndefined

    from compress.exporters.session import UNFUSED_SKIP

    content, task = Card.parse(card), manifest.task
    assert task is not None, "the card is of a model with a task"
    front = {
        "library_name": "transformers",
        "pipeline_tag": PIPELINES.get(task.kind, "text-classification"),
        "language": content.language,
        "base_model": content.base_model,
        "tags": ["compress", "distillation", "onnx", "int8"],
    }
    known = {key: value for key, value in front.items() if value}
    page = Environment(undefined=StrictUndefined, finalize=escaped, trim_blocks=True, keep_trailing_newline=True)
    return page.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        card=content,
        front_matter=Markup(yaml.safe_dump(known, sort_keys=False, allow_unicode=True)),
        made=manifest,
        task=task,
        example=Markup(EXAMPLES.get(task.kind, '"first text", "second text"' if task.pair else '"a text"')),
        head=Markup(CLASSES[task.kind]),
        session=[tuple(Markup(json.dumps(part)) for part in entry) for entry in UNFUSED_SKIP.items()],
    )


def escaped(value: object) -> str:
    """Write text as one line of Markdown that breaks no table cell, link or page; numbers to four significant digits.

    Applied to every expression of the template but those already marked as safe.
    """
    if isinstance(value, Markup):
        return value
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    text = " ".join(str(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").split())
    return MARKS.sub(r"\\\g<0>", text)
