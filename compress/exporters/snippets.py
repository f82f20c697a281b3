"""Write the code that runs an exported file: a snippet for each platform of its format.

`templates/<runtime>.<platform>.jinja` has the code for a runtime on a platform;
`texts.<platform>.jinja` and `logits.<platform>.jinja` show how it reads each form of
answer (`Task.form`). Templates get these values:

    file, stem, suffix  the path of the model file, its name, and its ending
    inputs, outputs     of the file: `Port`s
    names               of variables for the inputs of a file that takes texts
    examples            a text, or two, after the prompt that the model expects
    row()               input -> the numbers of the example, without padding
    labels, form, head  of the task
    max_length, length  the most tokens of a row; the tokens of every row, or 0
    side                of a longer text that is cut off
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.data.encoder import TextEncoder
from compress.data.task import Task
from compress.exporters import formats

if TYPE_CHECKING:
    from compress.exporters.interface import Interface

TEMPLATES = Path(__file__).with_name("templates")
NO_TASK = {
    "labels": (),
    "form": "states",
    "head": "AutoModel",
}


@dataclass(frozen=True)
class Platform:
    """Describe where code runs.

    title     of the platform, as a heading
    language  of the code, as Markdown names it
    escapes   the characters that the language escapes in strings in addition to JSON's
    """

    title: str
    language: str
    escapes: Mapping[str, str] = field(default_factory=dict)

    def quote(self, value: str | Sequence[str]) -> str:
        """Write a string of the language, or several separated by commas."""
        if not isinstance(value, str):
            return ", ".join(map(self.quote, value))
        text = json.dumps(value, ensure_ascii=False)
        for character, escaped in self.escapes.items():
            text = text.replace(character, escaped)
        return text


PLATFORMS: Mapping[str, Platform] = {
    "python": Platform("Python", "python"),
    "javascript": Platform("JavaScript, in a browser or in Node", "js"),
    "kotlin": Platform("Kotlin, on Android", "kotlin", {"$": "\\$"}),
    "swift": Platform("Swift, on iOS and macOS", "swift"),
}


@dataclass(frozen=True)
class Snippet:
    """Code that runs a file. title: of its platform; language: as Markdown names it."""

    title: str
    language: str
    code: str


def write_snippets(
    names: Sequence[str],
    file: Path,
    interface: "Interface",
    task: Task | None,
    tokenizer: Path,
    **settings: Any,
) -> list[Snippet]:
    """Write the snippets with these names, `<runtime>.<platform>`.

    file       of the model, inside the exported folder
    interface  of the file; tokenizer: the path of tokenizer.json
    settings   further values for the templates
    """
    pair = task is not None and task.pair
    examples = ("a text", "another")[: 1 + pair]
    if task is not None and any(port.name == "input_ids" for port in interface.inputs):
        examples = tuple(map(task.preparation.prompt().__add__, examples))
    encoder = TextEncoder.from_folder(tokenizer.parent)
    about = NO_TASK
    if task is not None:
        about = {
            "labels": task.labels,
            "form": task.form,
            "head": "AutoModel" if task.vectors else task.head,
        }
    values = {
        "file": file.as_posix(),
        "stem": file.stem,
        "suffix": file.suffix.removeprefix("."),
        "inputs": interface.inputs,
        "outputs": interface.outputs,
        "names": ("text", "textPair"),
        "examples": examples,
        "row": partial(_encode, encoder.backend, examples),
        "length": interface.length,
        "side": encoder.settings.truncation_side,
        **about,
        **settings,
    }
    return [_render(name, values) for name in names]


def _render(name: str, values: Mapping[str, Any]) -> Snippet:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    platform = PLATFORMS[name.rpartition(".")[2]]
    environment = Environment(
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        loader=FileSystemLoader([TEMPLATES, *formats.__path__]),
    )
    environment.filters["quote"] = platform.quote
    code = environment.get_template(f"{name}.jinja").render(values).strip()
    return Snippet(platform.title, platform.language, code)


def _encode(backend: Any, texts: Sequence[str]) -> dict[str, list[int]]:
    row = backend.encode(*texts)
    return {
        "input_ids": row.ids,
        "attention_mask": row.attention_mask,
        "token_type_ids": row.type_ids,
    }
