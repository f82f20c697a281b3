"""Label texts with a prompted language model, and write them with the probabilities of
their labels, or with the texts that it answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from compress.arguments import (
    Count,
    DataLike,
    FileName,
    ModelLike,
    NameLike,
    PathName,
    SeedNumber,
    check_arguments,
    name_of,
    with_keywords_of,
)
from compress.config.options import ColumnOptions, OnWeakTeacher
from compress.data.objects import data_path
from compress.jobs.checks import join_processes
from compress.jobs.phase import Phase, estimate_phases, run_phases
from compress.models import precision as precisions
from compress.outputs import check_new_file, check_output_folder
from compress.prompting.answers import LanguageModel
from compress.prompting.http_model import EndpointLimits
from compress.prompting.labels import (
    SoftLabels,
    build_task_prompt,
    open_language_model,
)
from compress.prompting.prompt import Prompt, WritingPrompt, load_prompt
from compress.prompting.votes import prompted_teacher
from compress.prompting.writing import PromptedWriter, WrittenAnswers
from compress.records.forecast import Forecast
from compress.teachers.labelling import (
    AskForLabels,
    LabelJob,
    TextsToLabel,
    WriteLabels,
    load_texts,
    without_examples,
)
from compress.teachers.prompted import Labeller
from compress.teachers.writing import AskForTexts, WriteAnswers
from compress.training.processes import check_given, node_first
from compress.training.trainer import peak_rss_mb


@check_arguments
@dataclass(frozen=True, kw_only=True)
class LabelRequest:
    """The keywords of `compress.label` and its forecast. See there."""

    teacher: ModelLike
    prompt: NameLike
    data: DataLike
    out: FileName
    columns: ColumnOptions = ColumnOptions()
    seed: SeedNumber = 0
    precision: precisions.TrainingPrecision = "auto"
    gate: OnWeakTeacher = "refuse"
    allow_pickle: bool = False
    max_calls: Count | None = None
    max_tokens: Count | None = None
    batch: PathName | None = None
    console: Console | None = None

    def open(self) -> tuple[Sequence[Phase[Any]], LabelJob[Any, Any]]:
        """Check the arguments, and load the model and the texts; return the phases that
        the prompt asks for, and their job."""
        state = join_processes()
        file = Path(self.out)
        if state.is_main_process:
            _check_output(file)
        console = self.console or Console(quiet=True)
        teacher = name_of(self.teacher)
        limits = EndpointLimits(
            self.max_calls,
            self.max_tokens,
            Path(self.batch) if self.batch else None,
        )
        limits.check(teacher)
        prompt = load_prompt(name_of(self.prompt))
        columns = self.columns
        data = data_path(self.data)
        check_given(teacher=teacher, prompt=name_of(self.prompt), data=data)
        with node_first():
            texts = load_texts(
                data, text=columns.text, label=columns.label, seed=self.seed
            )
        if isinstance(prompt, WritingPrompt):
            asking = _ask_for_texts(prompt, texts)
        else:
            if texts.labelled is None:
                prompt = without_examples(prompt, console)
            asking = _ask_for_labels(prompt, texts, self.seed)
        model = open_language_model(
            teacher,
            allow_pickle=self.allow_pickle,
            bf16=precisions.choose(self.precision) == "bf16",
        )
        model = limits.apply(model)
        strict = self.gate == "refuse"
        return asking.phases, LabelJob(
            asking.make(model, console),
            texts,
            file,
            self.seed,
            strict,
            console,
            main=state.is_main_process,
        )


@dataclass(frozen=True)
class _Asking:
    """Hold the phases that a prompt asks for, and a function that makes their labeller
    from a language model."""

    phases: Sequence[Phase[Any]]
    make: Callable[[LanguageModel, Console], Labeller]


def _ask_for_labels(prompt: Prompt, texts: TextsToLabel, seed: int) -> _Asking:
    """Prepare the prompt for the labels of the texts."""
    task = texts.task(list(prompt.labels))
    task_prompt = build_task_prompt(prompt, task, train=texts.rows, seed=seed)
    return _Asking(
        (AskForLabels(), WriteLabels()),
        lambda model, console: prompted_teacher(model, task_prompt, console),
    )


def _ask_for_texts(prompt: WritingPrompt, texts: TextsToLabel) -> _Asking:
    prompt.check_texts(pair="text_pair" in texts.rows.column_names)
    return _Asking(
        (AskForTexts(), WriteAnswers()),
        lambda model, console: PromptedWriter(model, prompt, console),
    )


def _check_output(file: Path) -> None:
    """Raise OutputError if the file exists, or cannot be written."""
    if file.parent.is_dir():
        check_new_file(file, "out", "labelled.jsonl")
    else:
        check_output_folder(file.parent, "out")


@with_keywords_of(LabelRequest)
def label(request: LabelRequest) -> SoftLabels | WrittenAnswers:
    """Label texts with a prompted language model, and write one JSON line per text to
    `out`.

    teacher    alias (gpt2, flan-t5-base, ...), folder or hub id of a language model, or
               an endpoint's .yaml file
    prompt     name or path of a prompt's .yaml file
    data       a task, whose training rows are labelled and whose labels only score the
               teacher; or texts without labels: a table, a .txt file with one text per
               line, a corpus with one text per document
    max_calls, max_tokens  stop before a request to an endpoint that would exceed this
                           number of requests, or of tokens of prompts and answers
    batch      ask an endpoint by files in this folder: the first call writes
               requests-1.jsonl and so on, and raises AwaitedError; once the files of
               answers and errors are there as well, the same call continues
    gate       what to do with a teacher that labels every text alike, or scores no
               better than that; or that answers fewer than four texts in five

    With a prompt that has labels, a line holds `text` (and `text_pair`), the most
    likely `label`, and `probabilities` by label: the file can serve as training data.
    If the model did not answer, `label` and `probabilities` are null: remove such lines
    first. With a prompt that asks for a text (`{{ answer }}`), a line holds `text` (and
    `text_pair`) and `answer`, greedily decoded, as `compress pretrain --recipe t5`
    learns them; a text whose answer is empty, or has not ended within `max_new_tokens`,
    has no line. Answers are kept under $COMPRESS_HOME, so that an interrupted run
    continues where it stopped. The processes of a launch share the texts, and the first
    one writes `out`. Raises a CompressError.
    """
    phases, job = request.open()
    found: SoftLabels | WrittenAnswers = run_phases(phases, job).result
    return found


@with_keywords_of(LabelRequest)
def forecast_labelling(request: LabelRequest) -> Forecast:
    """Forecast what `compress.label` would take with the same arguments, on this
    machine.

    A local model answers more and more rows, until they take seconds. An endpoint
    answers one; the forecast ranges from all concurrent requests at the same time to
    one after another. The answers are kept for the actual run.
    """
    phases, job = request.open()
    _, estimates = estimate_phases(phases, job)
    title = f"{job.labeller.prompt.name}: {job.labeller.name} on {job.texts.name}"
    return Forecast(title, tuple(estimates), peak_rss_mb())
