"""A cross-encoder as the teacher of vectors, which learn from its scores of
passages."""

from dataclasses import dataclass
from pathlib import Path

from compress.config.recipe import Recipe
from compress.data.task import TaskData
from compress.jobs.checks import reads_scores
from compress.models import checkpoints
from compress.models.teacher import Teacher, is_reranker
from compress.teachers.checkpoint import CheckpointTeacher
from compress.teachers.source import Taught
from compress.teachers.vectors import cut_out_of
from compress.training.processes import node_first
from compress.training.reranker import load_reranker, score_passages


@dataclass(frozen=True)
class CrossEncoder(CheckpointTeacher):
    """A cross-encoder that scores the passages of queries; its student is cut out of
    `start`."""

    @property
    def note(self) -> str:
        return (
            f"{self.name} has scored the passages; the student is cut out of "
            f"{self.start}"
        )

    def resolve(self, recipe: Recipe) -> Recipe:
        return cut_out_of(self.start, recipe)

    def teach(self, data: TaskData, start: Teacher, *, bf16: bool) -> Taught:
        data, start, _ = super().teach(data, start, bf16=bf16)
        folder = checkpoints.resolve(self.name, allow_pickle=self.allow_pickle)
        scorer = load_reranker(folder, allow_pickle=self.allow_pickle)
        digests = {"student": start.digest, "teacher": scorer.digest}
        with node_first():  # the others read from the cache
            data = score_passages(data, scorer, bf16=bf16)
        return data, start, digests


def is_cross_encoder(teacher: str, recipe: Recipe, *, allow_pickle: bool) -> bool:
    """Return True if the recipe learns from the scores of a cross-encoder, and the
    teacher is one."""
    if not reads_scores(recipe):
        return False
    with node_first():
        folder: Path = checkpoints.resolve(teacher, allow_pickle=allow_pickle)
    return is_reranker(folder, allow_pickle=allow_pickle)
