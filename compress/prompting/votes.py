"""Read labels out of the answers that a language model writes, and let the share of
each label be its probability.

One answer to a prompt yields a label without any doubt; the shares of several, drawn at
temperature 1, estimate the model's own probabilities (Wang et al. 2023,
"Self-Consistency", arXiv:2203.11171, take the majority of such answers).

Deviations: the shares are kept instead of the majority, and the answers are not
reasoned about first. Shapes: N rows, C labels.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from rich.console import Console

from compress.console import print_note
from compress.data.soft_labels import LEAST_SHARE
from compress.prompting.answers import LanguageModel, VotesAfter, ask_together
from compress.prompting.http_model import RemoteModel, RemoteVoter
from compress.prompting.labels import PromptedTeacher, SoftLabels, TaskPrompt
from compress.terminal import one_line

QUOTED: Final = 3
"""Maximum answers without a label that a message quotes."""


@dataclass(frozen=True)
class LabelReader:
    """Finds the label that an answer names: by the words of the prompt, the name of the
    label, or another name of it in the data."""

    task_prompt: TaskPrompt

    @cached_property
    def _known(self) -> list[Mapping[str, int | None]]:
        """Map each name, written in each form, to its label; None if several labels
        share it."""
        prompt = self.task_prompt.prompt
        names: list[tuple[str, int]] = []
        for owner, label in enumerate(self.task_prompt.labels):
            name = prompt.aliases.get(label, label)
            aliases = [other for other, own in prompt.aliases.items() if own == name]
            words = (*prompt.labels[name], label, name, *aliases)
            names += [(word, owner) for word in words]
        known: list[Mapping[str, int | None]] = []
        for write in NAME_FORMS:
            owners: dict[str, int | None] = {}
            for word, owner in names:
                form = write(word)
                shared = owners.get(form, owner) != owner
                owners[form] = None if shared else owner
            known.append(owners)
        return known

    def read(self, answer: str) -> int | None:
        """Return the label's id; None for an answer that names none, or several.

        The whole answer may be the name, its first line, what precedes an explanation
        in it ("Positive. The review ..."), or what follows a colon ("Sentiment:
        positive"). What a model thinks aloud, <think>...</think>, is not read.
        """
        text = answer.rpartition("</think>")[2].strip()
        line = text.partition("\n")[0]
        before = re.split(_EXPLANATION, line, maxsplit=1)[0]
        after = line.partition(":")[2]
        for parts in ((text,), (line,), (before, after)):
            found = {self._look_up(part) for part in parts} - {None}
            if len(found) == 1:
                return found.pop()
        return None

    def _look_up(self, text: str) -> int | None:
        for write, owners in zip(NAME_FORMS, self._known, strict=True):
            form = write(text)
            if form and form in owners:
                return owners[form]
        return None


_EXPLANATION: Final = re.compile(
    r"\.(?=\s|$)|:(?!\W*(?:\d|no\b|not\b|none\b|false\b))"
    r"|[;(]|\s[-\u2013\u2014]\s",
    re.IGNORECASE,
)
"""What separates a label from an explanation: not a decimal point, nor a colon before a
number or a denial ("spam: no")."""


def _fold(text: str) -> str:
    """Write a text in small letters, without dashes but a sign."""
    return " ".join(re.sub(r"_|-(?!\d)|(?<=\w)-", " ", text.casefold()).split())


def _strip(text: str) -> str:
    """Fold a text without the punctuation and quotes around it; a number keeps its
    sign."""
    return _fold(re.sub(r"^(?!-\d)(?:(?!-\d)[\W_])+|[\W_]+$", "", text))


NAME_FORMS: Final[tuple[Callable[[str], str], ...]] = (str.strip, _fold, _strip)
"""The ways to write a name, from the strictest."""


@dataclass(frozen=True)
class VotingTeacher(PromptedTeacher):
    """A language model with the prompt that it answers by writing a label."""

    voter: RemoteVoter

    @property
    def wanted(self) -> VotesAfter:  # type: ignore[override]
        return self.voter.wanted

    def label(self, texts: Sequence[Sequence[str]]) -> SoftLabels:
        fitted = self.fit(texts)
        notes = self._describe_cuts(fitted)
        prompts = [prompt for prompt, _ in fitted]
        found = ask_together(
            self.language_model, prompts, self.wanted, console=self.console
        )
        reader = LabelReader(self.task_prompt)
        labels = self.task_prompt.labels
        votes_NC = np.zeros((len(prompts), len(labels)))
        unread = Counter[str]()
        for row, answer in enumerate(found.answers):
            for text in answer.texts:
                label = reader.read(text)
                if label is None:
                    unread[text] += 1
                else:
                    votes_NC[row, label] += 1
        advice = ""
        if unread:
            quoted = ", ".join(
                f"{one_line(text, 60)!r} ({count:,})"
                for text, count in unread.most_common(QUOTED)
            )
            every = sum(len(answer.texts) for answer in found.answers)
            notes.append(
                f"{unread.total():,} of {every:,} answers of {self.name} name no "
                f"label: {quoted}{', ...' if len(unread) > QUOTED else ''}"
            )
            advice = (
                f"{notes[-1]}. Let the prompt name the labels and ask for one of them "
                "alone, add such words to `labels`, or raise `answer_tokens` in the "
                "endpoint file if answers are cut"
            )
        for note in notes:
            print_note(self.console, note)
        total_N1 = votes_NC.sum(axis=1, keepdims=True)
        shares_NC = votes_NC / np.maximum(total_N1, 1)
        log_p_NC = np.log(np.maximum(shares_NC, LEAST_SHARE)).astype(np.float32)
        log_p_NC[total_N1[:, 0] == 0] = -np.log(len(labels))
        return SoftLabels(
            log_p_NC,
            labels,
            found.asked,
            found.seconds,
            tuple(notes),
            advice,
        )


def prompted_teacher(
    model: LanguageModel, task_prompt: TaskPrompt, console: Console
) -> PromptedTeacher:
    """Make a classifier of a language model: from the answers that it writes if its
    endpoint has `mode: answer`, else from their likelihoods."""
    voter = model.voter if isinstance(model, RemoteModel) else None
    if voter is None:
        return PromptedTeacher(model, task_prompt, console)
    return VotingTeacher(model, task_prompt, console, voter)
