"""The phases of letting a language model write answers to texts."""

from dataclasses import replace

from compress.console import print_note
from compress.errors import TeacherError
from compress.jobs.phase import Estimated, Phase
from compress.prompting.labels import list_texts
from compress.prompting.writing import PromptedWriter, WrittenAnswers, check_written
from compress.teachers.labelling import LabelJob

WritingJob = LabelJob[PromptedWriter, WrittenAnswers]


class AskForTexts(Phase[WritingJob]):
    """Let the language model answer each text. Raises TeacherError for a useless model,
    if the job is strict, and for one without any answer."""

    def run(self, job: WritingJob) -> WritingJob:
        writer = job.labeller
        found = writer.write(list_texts(job.texts.rows))
        notes = [*job.texts.notes, *found.notes]
        if found.asked:
            notes.append(
                f"{found.asked:,} prompts in {found.seconds:.0f} s, "
                f"{found.seconds / found.asked:.3f} s each"
            )
        found = replace(found, spent=job.spent.counts)
        if found.spent:
            notes.append(job.spent.describe())
        notes += check_written(found, writer.prompt, writer.name, strict=job.strict)
        for note in notes:
            print_note(job.console, note)
        if not found.answered:
            raise TeacherError(f"teacher {writer.name} has no answer to any text")
        return replace(job, found=found)

    def estimate(self, job: WritingJob) -> Estimated[WritingJob]:
        return job, job.estimate_asking()


class WriteAnswers(Phase[WritingJob]):
    """Write one JSON line per answered text."""

    def run(self, job: WritingJob) -> WritingJob:
        rows = zip(list_texts(job.texts.rows), job.result.texts, strict=True)
        job.write(
            {**dict(zip(("text", "text_pair"), texts, strict=False)), "answer": answer}
            for texts, answer in rows
            if answer is not None
        )
        return job
