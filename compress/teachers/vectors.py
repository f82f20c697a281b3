"""Vectors of the texts as the teacher: in a file, or from an endpoint."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from compress.config.options import RunOptions
from compress.config.recipe import Recipe
from compress.data.task import TaskData
from compress.jobs.job import Job
from compress.jobs.phase import Estimated, Phase
from compress.models.teacher import Teacher
from compress.prompting.vectors import CachedVectors, VectorFile
from compress.records.forecast import PhaseEstimate
from compress.teachers.recorded import CheckAnswers
from compress.teachers.source import Taught, TeacherSource
from compress.training.teacher_vectors import with_vectors


@dataclass
class TrialVectors:
    """Stand in for an endpoint of vectors: ask for one batch of texts, and make up the
    other vectors.

    missing  texts that a run would have to ask for; seconds: what the batch took;
             width: numbers of a vector
    """

    source: CachedVectors
    missing: int = 0
    seconds: float = 0.0
    width: int = 0

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def digest(self) -> str:
        """Return another digest than the source's once vectors are made up, since
        similarities are cached by it."""
        return f"{self.source.digest}-trial" if self.missing else self.source.digest

    def vectors(self, texts: Sequence[str]) -> NDArray[np.float16]:
        """Return the vectors if they are all known, else random ones."""
        left = self.source.list_missing(texts)
        if left and not self.width:
            began = time.perf_counter()
            asked = left[: self.source.encoder.endpoint.batch]
            self.width = self.source.vectors(asked).shape[1]
            self.seconds = time.perf_counter() - began
            left = left[len(asked) :]
        if not left:
            return self.source.vectors(texts)
        self.missing += len(left)
        return (
            np.random.default_rng(0)
            .normal(size=(len(texts), self.width))
            .astype(np.float16)
        )

    def forecast(self) -> list[PhaseEstimate]:
        """Forecast the requests for the missing texts, from all concurrent ones at the
        same time to one after another."""
        if not self.missing:
            return []
        endpoint = self.source.encoder.endpoint
        seconds = math.ceil(self.missing / endpoint.batch) * self.seconds
        speed = endpoint.batch / self.seconds
        disk_mb = 2 * self.width * self.missing / 1e6
        times = (seconds / endpoint.concurrency, seconds)
        note = f"{self.missing:,} texts"
        return [
            PhaseEstimate(f"asking {self.name}", (0, 0), times, speed, note, disk_mb)
        ]


@dataclass(frozen=True)
class AskForVectors(Phase[Job]):
    """Ask an endpoint for vectors, which is done as the data are read."""

    source: TrialVectors

    def estimate(self, job: Job) -> Estimated[Job]:
        return job, self.source.forecast()


@dataclass(frozen=True)
class VectorTeacher(TeacherSource):
    """A file of vectors, or the .yaml file of an endpoint."""

    source: VectorFile | CachedVectors | TrialVectors

    def for_trial(self) -> "VectorTeacher":
        if not isinstance(self.source, CachedVectors):
            return self
        return replace(self, source=TrialVectors(self.source))

    def resolve(self, recipe: Recipe) -> Recipe:
        return cut_out_of(self.start, recipe)

    def teach(self, data: TaskData, start: Teacher, *, bf16: bool) -> Taught:
        digest = start.digest
        data, teacher = with_vectors(data, self.source, start)
        return data, teacher, {"student": digest, "teacher": self.source.digest}

    def phases(self, options: RunOptions) -> list[Phase[Job]]:
        check = CheckAnswers(options.gate == "refuse")
        if isinstance(self.source, TrialVectors):
            return [AskForVectors(self.source), check]
        return [check]


def cut_out_of(start: str, recipe: Recipe) -> Recipe:
    """Return the recipe with a student that is cut out of the start, if its `init`
    names the start."""
    if recipe.student.init != start:
        return recipe
    student = recipe.student.model_copy(update={"init": "teacher"})
    return recipe.model_copy(update={"student": student})
