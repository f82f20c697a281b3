"""A language model as the teacher, which answers a prompt about each row."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from accelerate import PartialState
from rich.console import Console

from compress.config.options import RunOptions
from compress.data.task import TaskData
from compress.jobs.job import Job
from compress.jobs.phase import Phase
from compress.models.teacher import RecordedLogits, Teacher
from compress.prompting.answers import answers_file, ask, list_unanswered
from compress.prompting.http_model import RemoteModel
from compress.prompting.labels import (
    PromptedTeacher,
    build_task_prompt,
    list_texts,
    open_language_model,
    prompt_teacher,
)
from compress.prompting.prompt import Prompt
from compress.records.forecast import Estimate, size_mb
from compress.teachers.source import TeacherSource


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
        models = job.models
        context = models.context
        # the other processes find its answers in the cache
        with PartialState().main_process_first():
            teacher, check = prompt_teacher(
                self.name,
                self.prompt,
                models.base_teacher,
                context.data,
                seed=models.run.seed,
                bf16=context.bf16,
                strict=self.strict,
                allow_pickle=self.allow_pickle,
                console=context.console,
            )
        models.run.confirm(teacher=teacher.digest)
        return job.with_teacher(teacher, check)

    def estimate(self, job: Job) -> tuple[Job, list[Estimate]]:
        models = job.models
        data, seed = models.context.data, models.run.seed
        prompt = build_task_prompt(self.prompt, data.task, train=data.train, seed=seed)
        language_model = open_language_model(
            self.name, allow_pickle=self.allow_pickle, bf16=models.context.bf16
        )
        labeller = PromptedTeacher(language_model, prompt, models.context.console)
        splits = [data.validation, data.train]
        if data.test is not None:
            splits.append(data.test)
        texts = [each for split in splits for each in list_texts(split)]
        found = estimate_answers(
            labeller, texts, seed=seed, console=models.context.console
        )
        logits = {
            split._fingerprint: np.zeros((len(split), data.task.outputs), np.float32)
            for split in splits
        }
        teacher = replace(
            models.base_teacher, name=labeller.name, recorded=RecordedLogits(logits)
        )
        return job.with_teacher(teacher), found


@dataclass(frozen=True)
class PromptedModel(TeacherSource):
    """A language model, or the .yaml file of an endpoint, with a prompt."""

    prompt: Prompt

    unlabelled = True

    def teach(
        self, data: TaskData, start: Teacher, *, bf16: bool
    ) -> tuple[TaskData, Teacher, dict[str, str]]:
        return data, start, {"student": start.digest}

    def phases(self, options: RunOptions) -> list[Phase[Job]]:
        strict = options.gate == "refuse"
        return [AskLanguageModel(self.name, self.prompt, strict, self.allow_pickle)]


def estimate_answers(
    labeller: PromptedTeacher,
    texts: Sequence[Sequence[str]],
    *,
    seed: int,
    console: Console,
) -> list[Estimate]:
    """Estimate the answers to these texts or pairs, by asking for some of them; these
    are kept."""
    model, answers = labeller.language_model, labeller.task_prompt.answers
    prompts = list(dict.fromkeys(prompt for prompt, _ in labeller.fit(texts)))
    left = list_unanswered(model, prompts, answers)
    random.Random(seed).shuffle(left)
    phases, before = list[Estimate](), len(prompts) - len(left)
    if before:
        phases.append(Estimate("answered before", cached=True, note=f"{before:,} rows"))
    concurrency = model.endpoint.concurrency if isinstance(model, RemoteModel) else 0
    count, took, speed, most = 1, 0.0, None, 0.0
    seconds_of_trial = 6.0
    with console.status("trying a few rows"):
        while left and not (took and concurrency) and took < seconds_of_trial / 2:
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
        Estimate(f"asking {labeller.name}", (0, 0), seconds, speed, note, disk_mb),
    ]
