"""Label texts with a prompted language model, and write them with the probabilities of
their labels."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from datasets import Dataset
from rich.console import Console

from compress.arguments import (
    DataLike,
    FileName,
    ModelLike,
    NameLike,
    SeedNumber,
    check_arguments,
    name_of,
)
from compress.config.options import ColumnOptions
from compress.console import print_note
from compress.data import load_task, schema, sources
from compress.data.corpus import load_corpus
from compress.data.objects import data_path
from compress.data.table_files import SUFFIXES
from compress.data.task import Task, TaskData
from compress.data.text_files import reading
from compress.errors import DataError, TeacherError
from compress.evaluation import metrics
from compress.io import make_folder
from compress.models import precision as precisions
from compress.outputs import check_new_file, check_output_folder, output_file
from compress.prompting.answers import answers_file, ask, list_unanswered
from compress.prompting.http_model import RemoteModel
from compress.prompting.labels import (
    PromptedTeacher,
    SoftLabels,
    build_task_prompt,
    check_labels,
    list_texts,
    open_language_model,
)
from compress.prompting.prompt import Prompt
from compress.records.forecast import Forecast, Phase, size_mb
from compress.training.trainer import peak_rss_mb


@dataclass(frozen=True)
class TextsToLabel:
    """The texts that `label` reads.

    rows      columns `text`, and `text_pair` for pairs
    labelled  the task of texts that have labels already; None if they have none
    """

    name: str
    rows: Dataset
    labelled: TaskData | None
    notes: tuple[str, ...] = ()

    def task(self, labels: Sequence[str]) -> Task:
        """Return the task of the texts; of those without labels, the classification
        into `labels`."""
        if self.labelled is not None:
            return self.labelled.task
        return Task(
            "classification",
            tuple(self.rows.column_names),
            "label",
            tuple(labels),
            "accuracy",
        )


@check_arguments
def label(
    *,
    teacher: ModelLike,
    prompt: NameLike,
    data: DataLike,
    out: FileName,
    columns: ColumnOptions = ColumnOptions(),
    seed: SeedNumber = 0,
    precision: precisions.Precision = "auto",
    gate: Literal["refuse", "warn"] = "refuse",
    allow_pickle: bool = False,
    console: Console | None = None,
) -> SoftLabels:
    """Label texts with a prompted language model, and write one JSON line per text to
    `out`.

    teacher    alias (gpt2, flan-t5-base, ...), folder or hub id of a language model, or
               an endpoint's .yaml file
    prompt     name or path of a prompt's .yaml file
    data       a task, whose training rows are labelled and whose labels only score the
               teacher; or texts without labels: a table, a .txt file with one text per
               line, a corpus with one text per document
    gate       what to do with a teacher that gives every text the same label, or scores
               no better than that

    A line holds `text` (and `text_pair`), the most likely `label`, and `probabilities`
    by label: the file can serve as training data. If the model did not answer, `label`
    and `probabilities` are null: remove such lines first. Answers are kept under
    $COMPRESS_HOME, so that an interrupted run continues where it stopped. Raises a
    CompressError.
    """
    console, file = console or Console(quiet=True), Path(out)
    labeller, texts = _prepare(
        name_of(teacher),
        name_of(prompt),
        data,
        file,
        columns=columns,
        seed=seed,
        precision=precision,
        allow_pickle=allow_pickle,
        console=console,
    )
    soft = labeller.label_split(texts.rows)
    notes = [*texts.notes, soft.balance(texts.name)]
    if soft.asked:
        notes.append(
            f"{soft.asked:,} prompts in {soft.seconds:.0f} s, "
            f"{soft.seconds / soft.asked:.3f} s each"
        )
    notes += check_labels(soft, labeller.name, texts.name, strict=gate == "refuse")
    notes += check_score(soft, texts, labeller.name, strict=gate == "refuse")
    for note in notes:
        print_note(console, note)
    make_folder(file.parent)
    with output_file(file) as partial, partial.open("w", encoding="utf-8") as rows:
        for row, log_p_C in zip(texts.rows, soft.log_p_NC, strict=True):
            rows.write(
                json.dumps(_line(row, log_p_C, soft.labels), ensure_ascii=False) + "\n"
            )
    console.print(f"{len(soft.log_p_NC):,} texts: {file}", highlight=False)
    return soft


def _prepare(
    teacher: str,
    prompt: str,
    data: DataLike,
    file: Path,
    *,
    columns: ColumnOptions,
    seed: int,
    precision: precisions.Precision,
    allow_pickle: bool,
    console: Console,
) -> tuple[PromptedTeacher, TextsToLabel]:
    """Check the arguments, and load the model and the texts."""
    if file.parent.is_dir():
        check_new_file(file, "out", "labelled.jsonl")
    else:
        check_output_folder(file.parent, "out")
    loaded = Prompt.load(prompt)
    texts = load_texts(data, text=columns.text, label=columns.label, seed=seed)
    task_prompt = build_task_prompt(
        loaded, texts.task(list(loaded.labels)), train=texts.rows, seed=seed
    )
    model = open_language_model(
        teacher, allow_pickle=allow_pickle, bf16=precisions.choose(precision) == "bf16"
    )
    return PromptedTeacher(model, task_prompt, console), texts


SECONDS = 6.0
"""Seconds that the trial of a local model should take."""


@check_arguments
def forecast_labelling(
    *,
    teacher: ModelLike,
    prompt: NameLike,
    data: DataLike,
    out: FileName,
    columns: ColumnOptions = ColumnOptions(),
    seed: SeedNumber = 0,
    precision: precisions.Precision = "auto",
    allow_pickle: bool = False,
    console: Console | None = None,
) -> Forecast:
    """Forecast what `compress.label` would take with the same arguments, on this
    machine.

    A local model answers more and more rows, until they take seconds. An endpoint
    answers one; the forecast ranges from all concurrent requests at the same time to
    one after another. The answers are kept for the actual run.
    """
    console = console or Console(quiet=True)
    labeller, texts = _prepare(
        name_of(teacher),
        name_of(prompt),
        data,
        Path(out),
        columns=columns,
        seed=seed,
        precision=precision,
        allow_pickle=allow_pickle,
        console=console,
    )
    rows = list_texts(texts.rows)
    phases = forecast_answers(labeller, rows, seed=seed, console=console)
    written_mb = sum(len(text) for row in rows for text in row) / 1e6
    phases[-1] = replace(phases[-1], disk_mb=phases[-1].disk_mb + written_mb)
    return Forecast(
        f"{labeller.task_prompt.prompt.name}: {labeller.name} on {texts.name}",
        tuple(phases),
        peak_rss_mb(),
    )


def forecast_answers(
    labeller: PromptedTeacher,
    texts: Sequence[Sequence[str]],
    *,
    seed: int,
    console: Console,
) -> list[Phase]:
    """Forecast the answers to these texts or pairs, by asking for some of them; these
    are kept."""
    model, answers = labeller.language_model, labeller.task_prompt.answers
    prompts = list(dict.fromkeys(prompt for prompt, _ in labeller.fit(texts)))
    left = list_unanswered(model, prompts, answers)
    random.Random(seed).shuffle(left)
    phases, before = list[Phase](), len(prompts) - len(left)
    if before:
        phases.append(Phase("answered before", cached=True, note=f"{before:,} rows"))
    concurrency = model.endpoint.concurrency if isinstance(model, RemoteModel) else 0
    count, took, speed, most = 1, 0.0, None, 0.0
    with console.status("trying a few rows"):
        while left and not (took and concurrency) and took < SECONDS / 2:
            some, left, count = left[:count], left[count:], 2 * count
            took = ask(model, some, answers, console=Console(quiet=True)).seconds
            speed, most = (
                len(some) / took,
                took * sum(map(model.count, left)) / sum(map(model.count, some)),
            )
    cache = answers_file(model, answers)
    disk_mb = (
        len(left) * size_mb(cache) / max(1, len(cache.read_bytes().splitlines()))
        if cache.is_file()
        else 0.0
    )
    seconds = (most / max(1, concurrency), most)
    note = (
        f"{len(left):,} rows, {len(prompts) - before - len(left):,} were answered now"
    )
    return [
        *phases,
        Phase(f"asking {labeller.name}", (0, 0), seconds, speed, note, disk_mb),
    ]


def _line(
    row: Mapping[str, Any], log_p_C: Any, labels: Sequence[str]
) -> dict[str, Any]:
    texts = {name: row[name] for name in ("text", "text_pair") if name in row}
    if np.ptp(log_p_C) == 0:
        return texts | {"label": None, "probabilities": None}
    shares = {
        name: round(float(p), 6)
        for name, p in zip(labels, np.exp(log_p_C), strict=True)
    }
    return texts | {"label": labels[int(log_p_C.argmax())], "probabilities": shares}


def check_score(
    soft: SoftLabels, texts: TextsToLabel, teacher: str, *, strict: bool
) -> list[str]:
    """Score the labels against those of the data, if it has any. Raises TeacherError
    for a useless teacher."""
    if texts.labelled is None:
        return []
    labels_N = np.asarray(texts.rows["label"][:])
    constant_NC = np.tile(
        np.bincount(labels_N, minlength=len(soft.labels)), (len(labels_N), 1)
    )
    task = texts.labelled.task
    own, always = (
        metrics.scores(task, logits, labels_N)[task.metric]
        for logits in (soft.log_p_NC, constant_NC)
    )
    note = (
        f"{task.metric} {own:.3f} against the labels in the data; always the most "
        f"frequent one: {always:.3f}"
    )
    if own <= always and strict:
        raise TeacherError(
            f"teacher {teacher} is no teacher for this task: {note}. --gate warn "
            "writes them anyway"
        )
    return [note]


def load_texts(
    source: DataLike,
    *,
    text: Sequence[str] | None = None,
    label: str | None = None,
    seed: int = 0,
) -> TextsToLabel:
    """Load texts to label.

    A source with a label column is a task: its training rows are read, and their labels
    only score the teacher. Of any other table the text columns are read; a .txt file
    whose lines have no columns is a table of one text per line. Everything else is a
    corpus, with one text per document. Raises DataError for a source without text, or
    if the text column cannot be detected.
    """
    source = data_path(source)
    path = sources.local(source)
    with reading(source):
        is_corpus = _is_corpus(source, path)
    if is_corpus:
        corpus = load_corpus(source)
        return TextsToLabel(
            corpus.name,
            _rows([[each for each in corpus.documents() if each.strip()]]),
            None,
        )
    splits = sources.find(
        source,
        [*(text or ()), *(part.strip() for part in (label or "").split(",") if part)],
    )
    if label is not None or schema.has_label(splits.train):
        data = load_task(source, text=text, label=label, seed=seed)
        return TextsToLabel(data.name, data.train, data, data.notes)
    chosen, notes = schema.choose_text(splits.train, text)
    read: list[list[str]] = [[] for _ in chosen]
    empty = 0
    for batch in splits.train.read(chosen):
        for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            cells = [(cell or "").strip() for cell in row]
            empty += not any(cells)
            for column, cell in zip(read, cells, strict=True):
                if any(cells):
                    column.append(cell)
    if not read[0]:
        raise DataError(f"{source}: it contains no text.")
    left_out = (f"{splits.name}: left out {empty:,} empty texts",) if empty else ()
    return TextsToLabel(
        splits.name, _rows(read), None, (*splits.notes, *notes, *left_out)
    )


def _is_corpus(source: str, path: Path) -> bool:
    if source == "pydoc":
        return True
    if path.is_dir():
        return not any(
            "train" in entry.name and entry.suffix.lower() in SUFFIXES
            for entry in path.iterdir()
        )
    return path.is_file() and path.suffix.lower() not in SUFFIXES


def _rows(texts: Sequence[list[str]]) -> Dataset:
    return Dataset.from_dict(dict(zip(("text", "text_pair"), texts, strict=False)))
