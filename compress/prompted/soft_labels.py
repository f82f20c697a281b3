"""A prompted language model as a teacher of a classifier: soft labels for texts that nobody has labelled.

The economics are those of Wang et al. 2021, "Want To Reduce Labeling Cost? GPT-3 Can Help", arXiv:2108.13487: labels
of a large model cost a fraction of people's, and a small model trained on them can be as good as their teacher.

Shapes: N rows, A answers, C labels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray
from rich.console import Console

from compress import digest
from compress.data.task import Task
from compress.errors import PromptError, TeacherError
from compress.prompted import calibrate, http, likelihood
from compress.prompted.answers import Likelihoods, Speaker, ask
from compress.prompted.prompt import Prompt
from compress.prompted.questions import Questions, choose_examples
from compress.screen import print_note

ENOUGH = 20
"""Rows from which on one answer to all of them tells that the teacher does not tell them apart."""

MOST_UNANSWERED = 0.2
"""Share of rows that a teacher may leave without an answer."""
EQUAL = 1e-9
"""Scores that differ by less say nothing: floats of equal probabilities."""


@dataclass(frozen=True)
class SoftLabels:
    """log_p_NC: logarithms of the labels' probabilities, rows sum to 1. notes: what the reader should know.

    A row whose labels are all equally likely is not answered: the model told of none of them, or told them not apart.

    asked, seconds    how many rows were put to the model now, and in what time; the others were answered before
    """

    log_p_NC: NDArray[np.float32]
    labels: tuple[str, ...]
    asked: int
    seconds: float
    notes: tuple[str, ...]

    @property
    def answered(self) -> NDArray[np.bool_]:
        """Tell which of the N rows have an answer."""
        return np.ptp(self.log_p_NC, axis=1) > 0

    @property
    def shares(self) -> dict[str, float]:
        """The share of answered rows for which each label is the likeliest."""
        likeliest = self.log_p_NC[self.answered].argmax(axis=1)
        counts = np.bincount(likeliest, minlength=len(self.labels)) / max(1, len(likeliest))
        return dict(zip(self.labels, counts.tolist(), strict=True))

    @property
    def entropy(self) -> float:
        """Mean entropy of a row, as a share of the highest possible: 0 is certain of everything, 1 knows nothing."""
        log_p_NC = self.log_p_NC.astype(np.float64)
        return float(-(np.exp(log_p_NC) * log_p_NC).sum(axis=1).mean() / np.log(len(self.labels)))

    def balance(self, split: str) -> str:
        """One sentence on what the labels look like."""
        shares = ", ".join(f"{label} {share:.1%}" for label, share in self.shares.items())
        return f"{split}: answers {shares}; mean entropy {self.entropy:.2f} of the highest possible"


@dataclass(frozen=True)
class PromptedTeacher:
    """A language model, and the questions that make it a classifier."""

    speaker: Speaker
    questions: Questions
    console: Console

    @property
    def name(self) -> str:
        return self.speaker.name

    @cached_property
    def digest(self) -> str:
        """Of all that decides the labels: the model, the prompt, the examples."""
        settings = self.questions.prompt.model_dump(exclude={"name", "about", "examples"})
        shown = [each.model_dump() for each in self.questions.examples]
        return digest.of_value([self.speaker.digest, settings, shown, self.questions.labels])

    def label(self, texts: Sequence[Sequence[str]]) -> SoftLabels:
        """Probabilities of the labels for each text or pair. What was asked before comes from $COMPRESS_HOME.

        Raises PromptError where no text fits beside the prompt.
        """
        prompt = self.questions.prompt
        limits = [limit for limit in (prompt.max_length, self.speaker.longest) if limit is not None]
        room = min(limits) - max(self.speaker.count(answer) for answer in self.questions.answers)
        fitted = [self.questions.fitting(each, self.speaker.count, room) for each in texts]
        notes = []
        if cut := sum(was_cut for _, was_cut in fitted):
            notes.append(f"{cut:,} of {len(fitted):,} texts were cut to fit {min(limits)} tokens with their prompt")
        found = self._ask([question for question, _ in fitted])
        if found.absent:
            told = found.log_p_NA.size - found.absent
            notes.append(
                f"{self.name} told the likelihood of {told / found.log_p_NA.size:.1%} of the answers; the others were "
                "not among its likeliest tokens and count as the most they can be"
            )
        scores_NC = self._scores(found)
        answered_N = np.ptp(scores_NC, axis=1) > EQUAL
        answered_N &= np.ptp(found.log_p_NA / found.tokens_NA, axis=1) > EQUAL
        if unanswered := int((~answered_N).sum()):
            notes.append(
                f"{self.name} did not answer {unanswered:,} of {len(fitted):,} texts: all labels are as likely to it"
            )
        for note in notes:
            print_note(self.console, note)
        log_p_NC = calibrate.calibrated(scores_NC, self._log_p_cf(room)).astype(np.float32)
        log_p_NC[~answered_N] = -np.log(len(self.questions.labels))
        return SoftLabels(log_p_NC, self.questions.labels, found.asked, found.seconds, tuple(notes))

    def label_split(self, split: Dataset) -> SoftLabels:
        """Of a split's `text`, or `text` and `text_pair`."""
        columns = [split[name][:] for name in ("text", "text_pair") if name in split.column_names]
        return self.label(list(zip(*columns, strict=True)))

    def _ask(self, questions: Sequence[str]) -> Likelihoods:
        return ask(self.speaker, questions, self.questions.answers, console=self.console)

    def _scores(self, found: Likelihoods) -> NDArray[np.float64]:
        prompt = self.questions.prompt
        alone = self._ask([prompt.answer_context]).log_p_NA[0] if prompt.normalise == "unconditional" else None
        scores_NA = calibrate.normalised(found.log_p_NA, found.tokens_NA, prompt.normalise, alone)
        return calibrate.by_label(scores_NA, self.questions.owners)

    def _log_p_cf(self, room: int) -> NDArray[np.float64] | None:
        prompt = self.questions.prompt
        if prompt.calibrate == "none":
            return None
        texts = [[text] * (2 if prompt.pair else 1) for text in prompt.content_free]
        asked = [self.questions.fitting(each, self.speaker.count, room)[0] for each in texts]
        return calibrate.content_free(self._scores(self._ask(asked)))


def open_speaker(name: str, *, allow_pickle: bool = False, bf16: bool = False) -> Speaker:
    """An alias, folder or hub id of a language model, or a .yaml file that describes an endpoint. Raises
    CompressError."""
    if name.endswith((".yaml", ".yml")):
        return http.open_endpoint(name)
    return likelihood.open_model(name, allow_pickle=allow_pickle, bf16=bf16)


def questions_for(prompt: Prompt, task: Task, *, train: Dataset, seed: int) -> Questions:
    """The prompt made ready for a task; examples that it wants are drawn from `train`. Raises PromptError."""
    if task.kind != "classification":
        raise PromptError([f"{prompt.name}: a prompt's answers are classes; the task is {task.kind}"])
    examples = choose_examples(prompt, train, task.labels, seed=seed)
    return Questions.of(prompt, task.labels, examples, pair=task.pair)


def refuse_unanswered(soft: SoftLabels, teacher: str, split: str, *, strict: bool) -> tuple[str, ...]:
    """Raise TeacherError, or with `strict` false give a note, where too many rows have no answer."""
    unanswered, rows = int((~soft.answered).sum()), len(soft.log_p_NC)
    if unanswered <= MOST_UNANSWERED * rows:
        return ()
    problem = (
        f"teacher {teacher} does not answer {unanswered:,} of {rows:,} {split} rows: all labels are equally likely to "
        f"it, and at most {MOST_UNANSWERED:.0%} may be so. Try other words for the labels, another `mode`, or more "
        "`top` tokens in the endpoint file"
    )
    if strict:
        raise TeacherError(f"{problem}. --gate warn goes on all the same")
    return (problem,)


def refuse_one_answer(soft: SoftLabels, teacher: str, split: str, *, strict: bool) -> tuple[str, ...]:
    """Raise TeacherError, or with `strict` false give a note, where one label is the likeliest for every row."""
    label, share = max(soft.shares.items(), key=lambda pair: pair[1])
    if share < 1 or len(soft.log_p_NC) < ENOUGH:
        return ()
    problem = (
        f"teacher {teacher} gives every one of {len(soft.log_p_NC):,} {split} rows the label {label!r}: there is "
        "nothing to learn from it. Try other words for the labels, examples, calibration, or a larger model"
    )
    if strict:
        raise TeacherError(problem)
    return (problem,)
