"""Let a language model write the answer to a prompt about each text: a summary, a
translation, an answer from memory.

Decoding is greedy (temperature 0 at an endpoint): the same prompt has the same answer,
which is kept under $COMPRESS_HOME. An answer ends where the model ends it, or before
the first of the prompt's `stop`. One that is empty, or that has reached
`max_new_tokens` without an end, does not count as an answer: it would teach the student
to stop in the middle.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from compress.errors import TeacherError
from compress.prompting.answers import (
    LanguageModel,
    TextAfter,
    WrittenText,
    ask_together,
)
from compress.prompting.labels import MOST_UNANSWERED
from compress.prompting.prompt import WritingPrompt, fit


@dataclass(frozen=True)
class WrittenAnswers:
    """The answer to each row, or None.

    asked, seconds  prompts that were sent to the model now, and the time for them
    notes           remarks for the user
    spent           requests and tokens of an endpoint
    """

    texts: tuple[str | None, ...]
    asked: int
    seconds: float
    notes: tuple[str, ...]
    spent: Mapping[str, int] = field(default_factory=dict)

    @property
    def answered(self) -> int:
        return sum(text is not None for text in self.texts)

    @property
    def counts(self) -> dict[str, Any]:
        """Return the figures that --json prints."""
        return {
            "texts": len(self.texts),
            "answered": self.answered,
            "asked": self.asked,
            **self.spent,
        }


@dataclass(frozen=True)
class PromptedWriter:
    """A language model with the prompt that it answers with texts."""

    language_model: LanguageModel
    prompt: WritingPrompt
    console: Console

    @property
    def name(self) -> str:
        return self.language_model.name

    @property
    def wanted(self) -> TextAfter:
        """Return what is asked about each prompt."""
        return TextAfter(
            self.prompt.max_new_tokens,
            self.prompt.stop,
        )

    def render(self, texts: Sequence[str]) -> str:
        """Write the prompt for a text or a pair, up to where the answer begins."""
        prompt = self.prompt
        shown = [
            prompt.render(each.text, each.text_pair, each.answer)
            for each in prompt.examples
        ]
        first = texts[0]
        second = texts[1] if prompt.pair else None
        asked = prompt.render(first, second, "").rstrip()
        parts = (prompt.instruction.rstrip(), *shown, asked)
        return prompt.separator.join(part for part in parts if part)

    def fit(self, texts: Sequence[Sequence[str]]) -> list[tuple[str, bool]]:
        """Write the prompt for each text or pair; return each with whether it was cut,
        see `prompt.fit`."""
        model = self.language_model
        room = self.prompt.limit(model.longest) - self.prompt.max_new_tokens
        return [
            fit(self.render, each, model.count, room, name=self.prompt.name)
            for each in texts
        ]

    def write(self, texts: Sequence[Sequence[str]]) -> WrittenAnswers:
        """Write the answer about each text or pair, with the cache in $COMPRESS_HOME.

        Raises PromptError if the prompt leaves no room for a text.
        """
        fitted = self.fit(texts)
        found = ask_together(
            self.language_model,
            [prompt for prompt, _ in fitted],
            self.wanted,
            console=self.console,
        )
        notes = list[str]()
        if cut := sum(was_cut for _, was_cut in fitted):
            notes.append(
                f"{cut:,} of {len(fitted):,} texts were cut to fit "
                f"{self.prompt.limit(self.language_model.longest)} tokens with their "
                "prompt and answer"
            )
        texts_written = [_answer_of(each) for each in found.answers]
        return WrittenAnswers(
            tuple(texts_written),
            found.asked,
            found.seconds,
            tuple(notes),
        )


def _answer_of(written: WrittenText) -> str | None:
    """Return the text, if it ends and is not empty."""
    return written.text if written.finished and written.text else None


def check_written(
    found: WrittenAnswers, prompt: WritingPrompt, teacher: str, *, strict: bool
) -> list[str]:
    """Raise TeacherError, or return notes if not `strict`, if too many rows are
    unanswered, or all answers are alike."""
    rows = len(found.texts)
    notes = list[str]()
    problems = list[str]()
    missing = rows - found.answered
    if missing:
        note = (
            f"teacher {teacher} has no answer to {missing:,} of {rows:,} texts, which "
            "are left out: it wrote nothing, or reached max_new_tokens, "
            f"{prompt.max_new_tokens}, before it ended"
        )
        many = missing > MOST_UNANSWERED * rows
        (problems if many else notes).append(note)
    if found.answered > 1 and len({*found.texts} - {None}) == 1:
        problems.append(
            f"teacher {teacher} writes the same answer to every text: there is nothing "
            "to learn from it"
        )
    if problems and strict:
        raise TeacherError(
            f"{problems[0]}. Try another `template`, `examples`, `stop`, more "
            "`max_new_tokens` or a larger model; to continue anyway: --gate warn"
        )
    return [*problems, *notes]
