"""A language model as the teacher, which answers a prompt about each row."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
from rich.console import Console

from compress.config.loader import dump_yaml
from compress.config.options import RunOptions
from compress.data.task import TaskData
from compress.jobs.job import Job
from compress.jobs.phase import Estimated, Phase
from compress.machine import count_processes
from compress.models.teacher import Teacher
from compress.prompting.answers import (
    LanguageModel,
    WantedAnswer,
    answers_file,
    ask,
    list_unanswered,
)
from compress.prompting.http_model import RemoteModel, spent_on
from compress.prompting.labels import (
    PromptedTeacher,
    build_task_prompt,
    check_labels,
    list_texts,
    open_language_model,
)
from compress.prompting.prompt import AnyPrompt, Prompt
from compress.prompting.votes import prompted_teacher
from compress.records.forecast import PhaseEstimate, size_mb
from compress.teachers.source import Taught, TeacherSource
from compress.training.finetune import TeacherCheck, check_logits
from compress.training.processes import from_first


@dataclass(frozen=True)
class AskLanguageModel(Phase[Job]):
    """Let a language model answer the prompt about each row, and check its answers."""

    name: str
    prompt: Prompt
    strict: bool
    allow_pickle: bool

    def pending(self, job: Job) -> dict[str, str]:
        return {"": f"ask {job.models.base_teacher.name}"}

    def run(self, job: Job) -> Job:
        found = self.ask(job)
        # other machines round differently
        answers, check = from_first(lambda: found)
        teacher = job.models.base_teacher.record(**answers)
        job.models.run.confirm(teacher=teacher.digest)
        return job.with_teacher(teacher, check)

    def open(self, job: Job) -> PromptedTeacher:
        """Open the language model with the prompt for the task."""
        context = job.models.context
        task_prompt = build_task_prompt(
            self.prompt,
            context.data.task,
            train=context.data.train,
            seed=job.models.run.seed,
        )
        language_model = open_language_model(
            self.name, allow_pickle=self.allow_pickle, bf16=context.bf16
        )
        return prompted_teacher(language_model, task_prompt, context.console)

    def ask(self, job: Job) -> tuple[dict[str, Any], TeacherCheck]:
        """Return the answers of the language model, as `Teacher.record` takes them, and
        the check of their quality.

        The validation split is labelled first, so that an unsuitable model costs no
        more than that. The labels of the training split are used only for the examples
        that the prompt asks for. Raises CompressError.
        """
        prompted = self.open(job)
        data = job.models.context.data
        soft = {"validation": prompted.label_split(data.validation)}
        check = check_logits(
            prompted.name,
            soft["validation"].log_p_NC,
            data,
            strict=self.strict,
            remedy="Try other words for the labels, more examples, calibration or a "
            "larger model; to continue: --gate warn",
        )
        soft["train"] = prompted.label_split(data.train)
        warnings = check_labels(
            soft["train"], prompted.name, "training", strict=self.strict
        )
        if data.test is not None:
            soft["test"] = prompted.label_split(data.test)
        splits = {"validation": data.validation, "train": data.train, "test": data.test}
        logits = {
            splits[name]._fingerprint: labels.log_p_NC for name, labels in soft.items()
        }
        settings = dump_yaml(self.prompt.model_dump(mode="json"))
        notes = [
            *check.notes,
            *warnings,
            *(
                f"{name}: {note}"
                for name, labels in soft.items()
                for note in labels.notes
            ),
            *(
                soft[name].balance(f"{prompted.name}, asked about {name}")
                for name in ("train", "validation")
            ),
        ]
        asked = sum(labels.asked for labels in soft.values())
        seconds = sum(labels.seconds for labels in soft.values())
        if asked:
            notes.append(
                f"{prompted.name} answered {asked:,} prompts in {seconds:.0f} s, "
                f"{seconds / asked:.3f} s each."
            )
        if spent := spent_on(prompted.language_model):
            notes.append(f"asked of {prompted.name}: {spent.describe()}")
        answers = {
            "name": prompted.name,
            "digest": prompted.digest,
            "answers": logits,
            "files": {"prompt.yaml": settings},
            "parameters": prompted.language_model.parameters,
        }
        return answers, replace(check, notes=tuple(notes))

    def estimate(self, job: Job) -> Estimated[Job]:
        models = job.models
        labeller = self.open(job)
        data = models.context.data
        console = models.context.console
        splits = [data.validation, data.train]
        if data.test is not None:
            splits.append(data.test)
        texts = [each for split in splits for each in list_texts(split)]
        seed = models.run.seed
        ask = partial(estimate_answers, labeller, texts, seed=seed, console=console)
        found = from_first(ask)
        logits = {
            split._fingerprint: np.zeros((len(split), data.task.outputs), np.float32)
            for split in splits
        }
        teacher = models.base_teacher.record(labeller.name, labeller.digest, logits)
        return job.with_teacher(teacher), found


@dataclass(frozen=True)
class PromptedModel(TeacherSource):
    """A language model, or the .yaml file of an endpoint, with a prompt."""

    prompt: Prompt

    unlabelled = True

    def teach(self, data: TaskData, start: Teacher, *, bf16: bool) -> Taught:
        return data, start, {"student": start.digest}

    def phases(self, options: RunOptions) -> list[Phase[Job]]:
        strict = options.gate == "refuse"
        return [AskLanguageModel(self.name, self.prompt, strict, self.allow_pickle)]


class Labeller(Protocol):
    """A language model and the prompt it is asked with."""

    @property
    def name(self) -> str: ...
    @property
    def prompt(self) -> AnyPrompt: ...
    @property
    def language_model(self) -> LanguageModel: ...
    @property
    def wanted(self) -> WantedAnswer[Any]: ...
    def fit(self, texts: Sequence[Sequence[str]]) -> list[tuple[str, bool]]:
        """Write the prompt for each text or pair; return each with whether it was
        cut."""
        ...


def estimate_answers(
    labeller: Labeller,
    texts: Sequence[Sequence[str]],
    *,
    seed: int,
    console: Console,
) -> list[PhaseEstimate]:
    """Estimate the answers to these texts or pairs, by asking for some of them; these
    are kept. One process of a launch calls this."""
    model = labeller.language_model
    wanted = labeller.wanted
    remote = model if isinstance(model, RemoteModel) else None
    prompts = list(dict.fromkeys(prompt for prompt, _ in labeller.fit(texts)))
    left = list_unanswered(model, prompts, wanted)
    random.Random(seed).shuffle(left)
    phases = list[PhaseEstimate]()
    before = len(prompts) - len(left)
    if before:
        phases.append(
            PhaseEstimate("answered before", cached=True, note=f"{before:,} rows")
        )
    concurrency = remote.endpoint.concurrency if remote else 0
    count = 1
    took = 0.0
    speed = None
    most = 0.0
    seconds_of_trial = 6.0
    with console.status("trying a few rows"):
        while left and not (took and concurrency) and took < seconds_of_trial / 2:
            if remote and remote.batch:
                break  # it is answered within a day, whatever the rows
            some = left[:count]
            left = left[count:]
            count = 2 * count
            took = ask(model, some, wanted, console=Console(quiet=True)).seconds
            speed = len(some) / took
            most = took * sum(map(model.count, left)) / sum(map(model.count, some))
    cache = answers_file(model, wanted)
    disk_mb = (
        len(left) * size_mb(cache) / max(1, len(cache.read_bytes().splitlines()))
        if cache.is_file()
        else 0.0
    )
    at_once = max(1, concurrency, model.askers(count_processes()))
    seconds = (most / at_once, most)
    note = (
        f"{len(left):,} rows, {len(prompts) - before - len(left):,} were answered now"
    )
    if remote and left:
        length = sum(map(model.count, left)) / len(left)
        note += f"; {remote.meter.forecast(len(left), length)}"
    return [
        *phases,
        PhaseEstimate(f"asking {labeller.name}", (0, 0), seconds, speed, note, disk_mb),
    ]
