"""A teacher whose answers to the task's rows are recorded: the scores in the data."""

from dataclasses import dataclass

from compress.config.options import RunOptions
from compress.jobs.job import Job
from compress.jobs.phase import Estimated, Phase
from compress.teachers.source import TeacherSource
from compress.training.finetune import check_logits


@dataclass(frozen=True)
class CheckAnswers(Phase[Job]):
    """Check the recorded answers of a teacher. If `strict`, refuse answers that teach
    nothing."""

    strict: bool

    def run(self, job: Job) -> Job:
        teacher = job.models.base_teacher
        data = job.models.context.data
        answers = teacher.known_answers(data.validation)
        assert answers is not None, "its source has recorded them"
        check = check_logits(
            teacher.name,
            answers,
            data,
            strict=self.strict,
            remedy="Check that its vectors or scores belong to these texts, and "
            "differ. --gate warn continues with a warning",
        )
        return job.with_teacher(teacher, check)

    def estimate(self, job: Job) -> Estimated[Job]:
        return job.with_teacher(job.models.base_teacher), []


@dataclass(frozen=True)
class RecordedScores(TeacherSource):
    """A teacher's scores in the data; the name is only the start's."""

    @property
    def note(self) -> str:
        return (
            f"the teacher's scores are in the data; the student is cut out of "
            f"{self.name}"
        )

    def phases(self, options: RunOptions) -> list[Phase[Job]]:
        return [CheckAnswers(options.gate == "refuse")]
