"""The phases of labelling texts with a prompted language model."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, repeat
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from accelerate import PartialState
from datasets import Dataset
from rich.console import Console

from compress.arguments import DataLike
from compress.console import print_note
from compress.data import load_task, schema, sources
from compress.data.cache import home
from compress.data.corpus import load_corpus
from compress.data.objects import data_path
from compress.data.table_files import is_table_file
from compress.data.task import Task, TaskData
from compress.data.text_files import reading
from compress.errors import DataError, TeacherError
from compress.io import hash_value, make_folder
from compress.jobs.loading import TaskLoader
from compress.jobs.phase import Estimated, Phase
from compress.jobs.request import DistillRequest
from compress.models import precision as precisions
from compress.outputs import output_file
from compress.prompting.http_model import spent_on
from compress.prompting.labels import (
    PromptedTeacher,
    SoftLabels,
    build_task_prompt,
    check_labels,
    list_texts,
    open_language_model,
)
from compress.prompting.prompt import Prompt
from compress.prompting.usage import Meter
from compress.prompting.votes import prompted_teacher
from compress.records.forecast import PhaseEstimate
from compress.teachers.prompted import Labeller, estimate_answers
from compress.training.processes import from_first, node_first


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
        """Return the task of the texts; for texts without labels, the classification
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


LabellerT = TypeVar("LabellerT", bound=Labeller)
FoundT = TypeVar("FoundT")


@dataclass(frozen=True)
class LabelJob(Generic[LabellerT, FoundT]):
    """Texts, the language model that labels or answers them, and the file that the main
    process of a launch writes them to."""

    labeller: LabellerT
    texts: TextsToLabel
    file: Path
    seed: int
    strict: bool
    console: Console
    main: bool = True
    found: FoundT | None = None

    @property
    def result(self) -> FoundT:
        """The answers, once the model has been asked."""
        assert self.found is not None, "the model is asked first"
        return self.found

    def estimate_asking(self) -> list[PhaseEstimate]:
        """Estimate asking about all texts by asking about some."""
        rows = list_texts(self.texts.rows)
        ask = partial(
            estimate_answers,
            self.labeller,
            rows,
            seed=self.seed,
            console=self.console,
        )
        found = from_first(ask)
        written_mb = sum(len(text) for row in rows for text in row) / 1e6
        found[-1] = replace(found[-1], disk_mb=found[-1].disk_mb + written_mb)
        return found

    @property
    def spent(self) -> Meter:
        """What an endpoint has been asked."""
        return spent_on(self.labeller.language_model) or Meter()

    def write(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Write the file, a JSON line for each of `lines`, in the main process."""
        if not self.main:
            return
        count = 0
        make_folder(self.file.parent)
        with (
            output_file(self.file) as partial,
            partial.open("w", encoding="utf-8") as rows,
        ):
            for line in lines:
                rows.write(json.dumps(line, ensure_ascii=False) + "\n")
                count += 1
        self.console.print(f"{count:,} texts: {self.file}", highlight=False)


LabelsJob = LabelJob[PromptedTeacher, SoftLabels]


class AskForLabels(Phase[LabelsJob]):
    """Ask the language model about each text. Raises TeacherError for a useless one, if
    the job is strict."""

    def run(self, job: LabelsJob) -> LabelsJob:
        texts = job.texts
        name = job.labeller.name
        soft = job.labeller.label_split(texts.rows)
        soft = replace(soft, spent=job.spent.counts)
        notes = [*texts.notes, soft.balance(texts.name)]
        if soft.asked:
            notes.append(
                f"{soft.asked:,} prompts in {soft.seconds:.0f} s, "
                f"{soft.seconds / soft.asked:.3f} s each"
            )
        if soft.spent:
            notes.append(job.spent.describe())
        notes += check_labels(soft, name, texts.name, strict=job.strict)
        notes += check_score(soft, texts, name, strict=job.strict)
        for note in notes:
            print_note(job.console, note)
        return replace(job, found=soft)

    def estimate(self, job: LabelsJob) -> Estimated[LabelsJob]:
        return job, job.estimate_asking()


class WriteLabels(Phase[LabelsJob]):
    """Write one JSON line per text."""

    def run(self, job: LabelsJob) -> LabelsJob:
        soft = job.result
        job.write(
            _line(row, log_p_C, soft.labels)
            for row, log_p_C in zip(job.texts.rows, soft.log_p_NC, strict=True)
        )
        return job


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
    """Score the labels against the data's own, if it has any. Raises TeacherError for a
    useless teacher."""
    if texts.labelled is None:
        return []
    labels_N = np.asarray(texts.rows["label"][:])
    constant_NC = np.tile(
        np.bincount(labels_N, minlength=len(soft.labels)), (len(labels_N), 1)
    )
    task = texts.labelled.task
    own = task.score_rows(soft.log_p_NC, labels_N)[task.metric]
    always = task.score_rows(constant_NC, labels_N)[task.metric]
    note = (
        f"{task.metric} {own:.3f} against the labels in the data; always the most "
        f"frequent one: {always:.3f}"
    )
    if own <= always and strict:
        raise TeacherError(
            f"teacher {teacher} cannot teach this task: {note}. --gate warn "
            "writes them anyway"
        )
    return [note]


def label_texts(
    request: DistillRequest, tasks: TaskLoader, *, trial: bool
) -> DistillRequest:
    """Label the texts of a request by its prompt, if they have no labels; return the
    request with the file of labels, kept under $COMPRESS_HOME.

    tasks   loads the request's data
    trial   make the labels up

    The labels are the language model's own: scores against them are agreement with it.
    Raises a CompressError.
    """
    columns = request.columns
    if request.prompt is None or columns.kind is not None:
        return request
    with node_first():
        if not tasks.load(columns, unlabelled=True).task.vectors:
            return request
        texts = load_texts(request.data, text=columns.text)
    console = request.console
    options = request.options
    prompt = without_examples(request.prompt, console)
    task = texts.task(list(prompt.labels))
    labeller = prompted_teacher(
        open_language_model(
            request.teacher,
            allow_pickle=options.allow_pickle,
            bf16=precisions.choose(options.precision) == "bf16",
        ),
        build_task_prompt(prompt, task, train=texts.rows, seed=options.seed),
        console,
    )
    key = hash_value([labeller.digest, list_texts(texts.rows), trial, "labels alone"])
    file = home() / "labelled" / f"{texts.name}-{key[:12]}.jsonl"
    main = PartialState().is_local_main_process
    strict = options.gate == "refuse"
    job: LabelsJob = LabelJob(
        labeller,
        texts,
        file,
        options.seed,
        strict,
        Console(quiet=True) if trial else console,
        main=main,
    )
    labels = cycle(task.labels)
    lines: Iterable[Mapping[str, Any]] = (
        row | {"label": label} for row, label in zip(texts.rows, labels, strict=False)
    )
    if not trial:
        job = AskForLabels().run(job)
        found = map(_line, texts.rows, job.result.log_p_NC, repeat(task.labels))
        lines = (
            {name: line[name] for name in line if name != "probabilities"}
            for line in found
            if line["label"] is not None
        )
    with node_first():
        if not file.is_file():
            job.write(lines)
    print_note(
        console,
        "the texts have no labels: the language model's labels take their place, and "
        "scores are agreement with it",
    )
    return replace(request, data=str(file), prompt=prompt)


def without_examples(prompt: Prompt, console: Console) -> Prompt:
    """Return the prompt without examples that rows would provide, for rows without
    labels."""
    if not isinstance(prompt.examples, int) or not prompt.examples:
        return prompt
    print_note(
        console,
        f"{prompt.name}: no row has a label, so that the prompt has no examples. In a "
        "copy of it, write some: examples: [{text: ..., label: "
        f"{next(iter(prompt.labels))}}}, ...]",
    )
    return prompt.model_copy(update={"examples": 0})


def load_texts(
    source: DataLike,
    *,
    text: Sequence[str] | None = None,
    label: str | None = None,
    seed: int = 0,
) -> TextsToLabel:
    """Load texts to label.

    A source with a label column is a task: its training rows are read, and their labels
    only score the teacher. From any other table, the text columns are read; a .txt file
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
            "train" in entry.name and is_table_file(entry) for entry in path.iterdir()
        )
    return path.is_file() and not is_table_file(path)


def _rows(texts: Sequence[list[str]]) -> Dataset:
    return Dataset.from_dict(dict(zip(("text", "text_pair"), texts, strict=False)))
