"""Render the model card: `README.md` of a bundle, in the hub's form."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from compress import families
from compress.data.task import Task
from compress.errors import BundleError, did_you_mean
from compress.exporters import formats
from compress.models.checkpoints import ORIGIN

if TYPE_CHECKING:
    from compress.exporters.manifest import Manifest
    from compress.exporters.snippets import Snippet
    from compress.records.certificate import Certificate

METRICS = {
    "matthews": "matthews_correlation",
    "pearson": "pearsonr",
    "spearman": "spearmanr",
    "exact": "exact_match",
}
"""The hub's names of metrics that differ from ours."""
MARKS = re.compile(r"[\\`*_\[\]|#]")


@dataclass(frozen=True)
class Card:
    """The contents of a model card that are not in the manifest; all optional except
    the name.

    name        the title
    recipe      name of the recipe; citation: the paper it follows, one line; command:
                the command that made the model
    teacher     the teacher's name; base_model: its hub id, if it has one, or ids
    license     of the teacher, as the hub calls it, or several; license_name,
                license_link: of one that the hub calls `other`; language: its code,
                such as `en`, or codes
    data        name of the training data; dataset, config: its id on the hub and its
                part; '' for other data
    split       the split that was scored
    results     metric, value, low, high (the ends of the 95 % interval, or None), rows
                and file of every score
    rows        the scores table: one mapping per line, all with the same keys
    classes     the table of precision / recall / F1 of every model by class
    vectors     the table of bytes and score by form of vectors
    proofs      sentences about the certificates; measured: about the measurements
    limits      sentences about the model's limits
    """

    name: str
    recipe: str = ""
    citation: str = ""
    command: str = ""
    teacher: str = ""
    base_model: str | list[str] = ""
    license: str | list[str] = ""
    license_name: str = ""
    license_link: str = ""
    language: str | list[str] = ""
    data: str = ""
    dataset: str = ""
    config: str = ""
    split: str = ""
    results: tuple[Mapping[str, Any], ...] = ()
    rows: tuple[Mapping[str, Any], ...] = ()
    classes: tuple[Mapping[str, Any], ...] = ()
    vectors: tuple[Mapping[str, Any], ...] = ()
    proofs: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()

    @classmethod
    def parse(cls, card: Mapping[str, Any]) -> "Card":
        """Read the fields. Raises BundleError for an unknown or missing key, and for
        rows with different columns."""
        known = [field.name for field in fields(cls)]
        for key in card:
            if key not in known:
                raise BundleError(
                    f"model card: no field {key!r}.{did_you_mean(key, known)}"
                )
        if "name" not in card:
            raise BundleError("model card: expected a name")
        lists = {
            field.name: tuple(card.get(field.name, ()))
            for field in fields(cls)
            if field.default == ()
        }
        for rows in (lists["rows"], lists["classes"], lists["vectors"]):
            for row in rows:
                if list(row) != list(rows[0]):
                    raise BundleError(
                        f"model card: a row has columns {list(row)}; expected "
                        f"{list(rows[0])} as in the first"
                    )
        return cls(**{**card, **lists})


def model_card(card: Mapping[str, Any], manifest: "Manifest") -> str:
    """Render the card as Markdown; all values are escaped."""
    from compress.exporters.session import UNFUSED_SKIP

    content = Card.parse(card)
    task = manifest.task
    assert task is not None, "only bundles with a task have this card"
    return render(
        card=content,
        title=content.name,
        front_matter=front_matter(
            content,
            "sentence-transformers" if task.vectors else "transformers",
            task.hub_tag or task.pipeline,
            [*(["distillation"] if content.teacher else []), "onnx", "int8"],
        ),
        made=manifest,
        own_class=families.find(manifest.model_type).own_class,
        task=task,
        pipeline=task.pipeline,
        example=Markup(task.example),
        head=Markup(task.head),
        shell=Markup(task.shell),
        command=Markup(" ".join(content.command.split())),  # in a block of code
        licence=licence(content),
        session=[
            tuple(Markup(json.dumps(part)) for part in entry)
            for entry in UNFUSED_SKIP.items()
        ],
    )


def proof_line(proof: "Certificate") -> str:
    """Summarise a certificate in one sentence, and in a second what the file loses on
    other processors."""
    line = (
        f"{proof.artefact}, {proof.method}, on {proof.place}; "
        f"{proof.device}, {proof.runtime}: {proof.metric} {proof.before:.4f} of fp32, "
        f"{proof.after:.4f} of this file; "
        f"{'certified' if proof.certified else 'NOT certified'}: {proof.reason}"
    )
    return f"{line}. {proof.warning}" if proof.warning else line


def revise(
    card: str,
    proofs: Sequence["Certificate"],
    replaced: Mapping[str, str],
) -> str:
    """Replace the certificates in a model card. For `replaced` files (precision ->
    name), remove the scores for the hub, and note that the scores in the table, if any,
    belong to earlier files."""
    from huggingface_hub import ModelCard

    found = ModelCard(card, ignore_metadata_errors=True)
    data: Any = found.data
    if data.eval_results:
        stale = tuple(f"({precision})" for precision in replaced)
        data.eval_results = [
            each
            for each in data.eval_results
            if not str(each.metric_name).endswith(stale)
        ]
    lines = [f"- {escape(proof_line(each))}" for each in proofs]
    lines += [
        f"- The scores and times above are of an earlier {escape(name)}."
        for name in replaced.values()
        if "## Scores\n" in found.text
    ]
    place = r"(?m)(?=^## Use\n)|\Z"
    if "## Certificate\n" in found.text:
        place = r"(?ms)^## Certificate\n.*?(?=^## |\Z)"
    section = "\n".join(["## Certificate", "", *lines, "\n"]) if lines else ""
    found.text = re.sub(place, lambda _: section, found.text, count=1)
    return str(found)


def export_card(
    record: Mapping[str, Any],
    origin: Mapping[str, str],
    task: Task | None,
    snippets: "Sequence[Snippet]",
) -> str:
    """Render the README.md of an export other than a bundle, from its export.json and
    fields of its model's `Card`.

    snippets  the code that runs a file, for each platform
    """
    library = formats.find(record["for"]).library
    card = Card.parse({"name": record["source"], **origin})
    # transformers.js's name for the pipeline of vectors
    pipeline = "feature-extraction"
    if task is not None and not task.vectors:
        pipeline = task.pipeline
    longest = record["max_length"]
    about = (
        f"{escape(record['model_type'])}, for {library}; texts of at most "
        f"{longest} tokens. Exported by compress from {escape(card.name)}."
    )
    warnings = [f"warning: {warning}" for warning in record["warnings"]]
    files = [{"precision": "", "note": "", **each} for each in record["files"]]
    onnx = any(each["file"].endswith(".onnx") for each in files)
    tags = [
        record["for"],
        "onnx" if onnx else "",
        *(each["precision"] for each in files),
    ]
    return file_card(
        replace(card, name=f"{card.name} for {library}"),
        library,
        pipeline,
        about=[about],
        snippets=snippets,
        record=record,
        files=files,
        tags=tuple(dict.fromkeys(filter(None, tags))),
        verdicts=[*record["verdicts"], *warnings],
    )


def licence(card: Card) -> Markup:
    """Describe the licences of the weights and of the data, as far as they are
    known."""
    teacher = escape(card.base_model or card.teacher)
    data = escape(card.data)
    if card.license:
        text = (
            f"{escape(card.license_name or card.license)}: the licence of "
            f"{teacher or 'the model that it was made from'}, by its own card."
        )
    else:
        whose = (
            f"the licence of {teacher} is unknown"
            if teacher
            else "the origin of the weights is unknown"
        )
        text = (
            f"No licence is given: {whose}. Whoever publishes the model adds "
            "`license:` at the top."
        )
    if card.dataset:
        text += (
            " The data have their own licence: "
            f"https://huggingface.co/datasets/{card.dataset}."
        )
    elif data:
        ours = data == "intents"
        licence = "part of compress, Apache-2.0" if ours else "under an unknown licence"
        text += f" The data, {data}, are {licence}."
    return Markup(text)


def front_matter(
    card: Card,
    library: str,
    pipeline: str,
    tags: Sequence[str],
) -> Markup:
    """Render the hub's metadata of a card by its own client; unknown fields are left
    out."""
    from huggingface_hub import EvalResult, ModelCardData

    results = [
        EvalResult(
            task_type=pipeline,
            dataset_type=card.dataset or card.data,
            dataset_name=card.data,
            dataset_config=card.config or None,
            dataset_split=card.split or None,
            metric_type=METRICS.get(one["metric"], one["metric"]),
            metric_name=f"{one['metric']} ({one['file']})",
            metric_value=one["value"],
            metric_args={"rows": one["rows"], "interval_95": [one["low"], one["high"]]},
        )
        for one in card.results
    ]
    origin: dict[str, Any] = {name: getattr(card, name) or None for name in ORIGIN}
    data = ModelCardData(
        **origin,
        library_name=library,
        pipeline_tag=pipeline,
        datasets=card.dataset or None,
        tags=["compress", *tags],
        metrics=list(
            dict.fromkeys(
                METRICS.get(one["metric"], one["metric"]) for one in card.results
            )
        )
        or None,
        model_name=card.name if results else None,
        eval_results=results or None,
    )
    return Markup(data.to_yaml() + "\n")


def file_card(
    card: Card,
    library: str,
    pipeline: str,
    *,
    about: Sequence[str],
    load: str = "",
    snippets: "Sequence[Snippet]" = (),
    record: Mapping[str, Any] | None = None,
    files: Sequence[Mapping[str, Any]] = (),
    verdicts: Sequence[str] = (),
    tags: Sequence[str] = ("onnx", "int8"),
) -> str:
    """Render the card of files that are not a task's bundle.

    library, pipeline   the hub's names
    about      Markdown of the first paragraphs; load: Python that opens the files, or
               `snippets` for several platforms
    record     export.json, with the inputs, outputs and labels of the files
    files      path, precision, bytes and note of each
    verdicts   sentences about where and how to run the files
    """
    shown = [(each.title, each.language, Markup(each.code)) for each in snippets]
    if load:
        shown.append(("", "python", Markup(load)))
    return render(
        front_matter=front_matter(card, library, pipeline, tags),
        title=card.name,
        task=None,
        about=[Markup(paragraph) for paragraph in about],
        files=files,
        record=record,
        snippets=shown,
        verdicts=verdicts,
        licence=licence(card),
    )


def render(**values: Any) -> str:
    """Render the template of cards; values that are not marked as safe are escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    page = Environment(
        undefined=StrictUndefined,
        finalize=escape,
        trim_blocks=True,
        keep_trailing_newline=True,
        loader=FileSystemLoader(Path(__file__).parent),
    )
    return page.get_template("card.md.jinja").render(values)


def escape(value: object) -> str:
    """Escape a value, or a list of names, as one line of Markdown that is safe in
    tables and links; floats are rounded to four significant digits."""
    if isinstance(value, Markup):
        return value
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        value = ", ".join(value)
    text = " ".join(
        str(value)
        .replace("&", "&amp;")
        .replace("<", "&lt;")
        .replace(">", "&gt;")
        .split()
    )
    return MARKS.sub(r"\\\g<0>", text)
