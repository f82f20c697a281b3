"""Label texts with a prompted language model, and write them with the probabilities of
their labels."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from compress.arguments import (
    DataLike,
    FileName,
    ModelLike,
    NameLike,
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
from compress.prompting.labels import (
    PromptedTeacher,
    SoftLabels,
    build_task_prompt,
    open_language_model,
)
from compress.prompting.prompt import Prompt
from compress.records.forecast import Forecast
from compress.teachers.labelling import AskForLabels, LabelJob, WriteLabels, load_texts
from compress.training.processes import check_given, node_first
from compress.training.trainer import peak_rss_mb

LABEL_PHASES: tuple[Phase[LabelJob], ...] = (AskForLabels(), WriteLabels())


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
    console: Console | None = None

    def open(self) -> LabelJob:
        """Check the arguments, and load the model and the texts."""
        state = join_processes()
        file = Path(self.out)
        if state.is_main_process:
            _check_output(file)
        teacher = name_of(self.teacher)
        prompt = Prompt.load(name_of(self.prompt))
        columns = self.columns
        data = data_path(self.data)
        check_given(teacher=teacher, prompt=name_of(self.prompt), data=data)
        with node_first():
            texts = load_texts(
                data, text=columns.text, label=columns.label, seed=self.seed
            )
        task = texts.task(list(prompt.labels))
        task_prompt = build_task_prompt(prompt, task, train=texts.rows, seed=self.seed)
        model = open_language_model(
            teacher,
            allow_pickle=self.allow_pickle,
            bf16=precisions.choose(self.precision) == "bf16",
        )
        console = self.console or Console(quiet=True)
        labeller = PromptedTeacher(model, task_prompt, console)
        strict = self.gate == "refuse"
        return LabelJob(
            labeller,
            texts,
            file,
            self.seed,
            strict,
            console,
            main=state.is_main_process,
        )


def _check_output(file: Path) -> None:
    """Raise OutputError if the file exists, or cannot be written."""
    if file.parent.is_dir():
        check_new_file(file, "out", "labelled.jsonl")
    else:
        check_output_folder(file.parent, "out")


@with_keywords_of(LabelRequest)
def label(request: LabelRequest) -> SoftLabels:
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
    $COMPRESS_HOME, so that an interrupted run continues where it stopped. The processes
    of a launch share the texts, and the first one writes `out`. Raises a CompressError.
    """
    return run_phases(LABEL_PHASES, request.open()).soft


@with_keywords_of(LabelRequest)
def forecast_labelling(request: LabelRequest) -> Forecast:
    """Forecast what `compress.label` would take with the same arguments, on this
    machine.

    A local model answers more and more rows, until they take seconds. An endpoint
    answers one; the forecast ranges from all concurrent requests at the same time to
    one after another. The answers are kept for the actual run.
    """
    job = request.open()
    _, estimates = estimate_phases(LABEL_PHASES, job)
    prompted = job.labeller.task_prompt.prompt.name
    title = f"{prompted}: {job.labeller.name} on {job.texts.name}"
    return Forecast(title, tuple(estimates), peak_rss_mb())
