"""Define the base class of the sources of a teacher's answers, one file each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from compress.config.options import RunOptions
from compress.config.recipe import Recipe
from compress.config.stages import Stage
from compress.data.corpus import Corpus
from compress.data.task import TaskData
from compress.errors import TeacherError
from compress.jobs.job import Job
from compress.jobs.phase import Phase
from compress.models.teacher import Teacher

MINILM = "minilm"
"""The checkpoint that students are cut out of if the teacher is not a checkpoint and
the recipe names none."""
Taught = tuple[TaskData, Teacher, dict[str, str]]
"""The data, the teacher, and the digests of teacher and start."""


@dataclass(frozen=True)
class TeacherSource:
    """A source of answers that has only answered the task's own rows.

    name    as the user named it
    start   the checkpoint that students are cut out of, or begin as
    """

    name: str
    start: str
    allow_pickle: bool

    unlabelled: ClassVar[bool] = False
    """Whether the data may be texts without labels."""
    tuned: ClassVar[bool] = False
    """Whether it is fine-tuned if it has no head for the task."""

    @property
    def note(self) -> str:
        """Say what the teacher is, if its name does not; '' if it does."""
        return ""

    def for_trial(self) -> "TeacherSource":
        """Return a source that makes answers up if asking for all of them takes
        long."""
        return self

    def resolve(self, recipe: Recipe) -> Recipe:
        """Let a student whose `init` is the start be cut out of it."""
        return recipe

    def teach(self, data: TaskData, start: Teacher, *, bf16: bool) -> Taught:
        """Add to the data what the teacher knows about them.

        Return the data, the teacher, and the digests of teacher and start, as a run
        records them.
        """
        raise NotImplementedError

    def compare(self, data: TaskData, teacher: Teacher, max_length: int) -> TaskData:
        """Give texts without gold similarities the teacher's. max_length: the tokens of
        a text that are read when students are scored."""
        return data

    def take_scores(
        self, data: TaskData, teacher: Teacher, recipe: Recipe
    ) -> tuple["TeacherSource", Teacher]:
        """Return another source and its teacher if the data hold its scores. Raises
        TeacherError for scores that this source does not read."""
        if "teacher" in data.train.column_names:
            raise TeacherError(
                f"{data.name} has the answers of a teacher, and {self.name} is asked "
                "as well: remove them from the data, or name as the teacher the "
                "checkpoint that the student begins as"
            )
        return self, teacher

    def extend(self, recipe: Recipe, data: TaskData, corpus: Corpus | None) -> Recipe:
        """Let the stages read more rows than the task's own, if the teacher can answer
        for them."""
        return recipe

    def untrained(self, teacher: Teacher, recipe: Recipe) -> Sequence[Stage]:
        """Return the stages that train the teacher."""
        return ()

    def phases(self, options: RunOptions) -> list[Phase[Job]]:
        """List the phases that make the teacher and check it."""
        raise NotImplementedError
