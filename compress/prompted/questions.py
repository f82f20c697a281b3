"""From the texts of a task to what a model is asked, and the answers it may give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from compress.errors import PromptError, did_you_mean
from compress.prompted.prompt import Example, Prompt

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class Questions:
    """A prompt made ready for one task.

    head     instruction and examples, as they stand before every question
    tail     the white space between question and answer: part of the answer, as tokenizers want it
    answers  the strings that may follow a prompt, every word of every label; owners: the label id of each
    """

    prompt: Prompt
    labels: tuple[str, ...]
    examples: tuple[Example, ...]
    head: str
    tail: str
    answers: tuple[str, ...]
    owners: tuple[int, ...]

    @staticmethod
    def of(prompt: Prompt, labels: Sequence[str], examples: Sequence[Example], *, pair: bool) -> Questions:
        """Raises PromptError where the prompt is not one for these labels, or not for (single or paired) texts."""
        named = label_names(prompt, labels)
        if pair != prompt.pair:
            asked, given = ("two texts", "one") if prompt.pair else ("one text", "two")
            raise PromptError([f"{prompt.name}: its template asks about {asked}, the task has {given}"])
        shown = [prompt.rendered(each.text, each.text_pair, prompt.labels[each.label][0]) for each in examples]
        head = "".join(part + prompt.separator for part in (prompt.instruction.rstrip(), *shown) if part)
        second = "y" if pair else None
        empty = prompt.rendered("x", second, "")
        asked = empty.rstrip()
        words = [(owner, word) for owner, name in enumerate(named) for word in prompt.labels[name]]
        answers = tuple(prompt.rendered("x", second, word)[len(asked) :] for _, word in words)
        owners = tuple(owner for owner, _ in words)
        return Questions(prompt, tuple(labels), tuple(examples), head, empty[len(asked) :], answers, owners)

    def ask(self, texts: Sequence[str]) -> str:
        """The prompt for a text, or a pair, up to where the answer begins."""
        text, second = texts if self.prompt.pair else (*texts, None)
        return self.head + self.prompt.rendered(str(text), second, "").removesuffix(self.tail)

    def fitting(self, texts: Sequence[str], count: Callable[[str], int], room: int) -> tuple[str, bool]:
        """The prompt, and whether texts were cut so that it takes at most `room` tokens, as `count` counts them.

        Texts lose their end, the longer of a pair first; template, instruction and examples stay whole. Raises
        PromptError when those alone are too long.
        """
        whole = self.ask(texts)
        if count(whole) <= room:
            return whole, False
        bare = count(self.ask([""] * len(texts)))
        if bare > room:
            raise PromptError(
                [
                    f"{self.prompt.name}: before any text it takes {bare} tokens, and {room} are left: show fewer or "
                    "shorter examples, or raise max_length as far as the model reads"
                ]
            )
        fewest, most = 0, max(map(len, texts))  # characters kept of each text: `fewest` fit, `most` do not
        while most - fewest > 1:
            middle = (fewest + most) // 2
            fits = count(self.ask([_cut(text, middle) for text in texts])) <= room
            fewest, most = (middle, most) if fits else (fewest, middle)
        return self.ask([_cut(text, fewest) for text in texts]), True


def _cut(text: str, characters: int) -> str:
    """At most so many characters of a text; no half word at its end, where that leaves any."""
    if len(text) <= characters:
        return text
    kept = text[:characters]
    whole = kept if text[characters].isspace() else kept.rpartition(" ")[0]
    return (whole or kept).rstrip()


def label_names(prompt: Prompt, labels: Sequence[str]) -> list[str]:
    """The prompt's name of each of the task's labels, in their order. PromptError naming all that do not match."""
    named = [prompt.aliases.get(label, label) for label in labels]
    unknown = [label for label, name in zip(labels, named, strict=True) if name not in prompt.labels]
    left = [name for name in prompt.labels if name not in named]
    problems = [f"{prompt.name}: no label {label!r}, as the task has.{did_you_mean(label, left)}" for label in unknown]
    if not unknown:
        problems = [f"{prompt.name}: labels.{name}: the task has no such label" for name in left]
    problems += [
        f"{prompt.name}: {name!r} names two of the task's labels" for name in set(named) if named.count(name) > 1
    ]
    if problems:
        hint = f"the task's labels are {', '.join(labels)}; `aliases:` in a copy of the prompt can map other names"
        raise PromptError([*problems, hint])
    return named


def choose_examples(prompt: Prompt, split: Dataset, labels: Sequence[str], *, seed: int) -> tuple[Example, ...]:
    """The examples written in the prompt, or as many rows of a labelled split as it asks for, in random order.

    Every label comes as often as any other, give or take one. Raises PromptError where labels or rows are missing.
    """
    if not isinstance(prompt.examples, int):
        return prompt.examples
    if not prompt.examples:
        return ()
    if "label" not in split.column_names:
        raise PromptError(
            [f"{prompt.name}: examples: {prompt.examples} cannot be chosen from rows without labels: write them out"]
        )
    rng, ids, named = np.random.default_rng(seed), np.asarray(split["label"][:]), label_names(prompt, labels)
    rows: list[int] = []
    for turn, owner in enumerate(rng.permutation(len(named))):
        count = prompt.examples // len(named) + (turn < prompt.examples % len(named))
        its_own = np.flatnonzero(ids == owner)
        if len(its_own) < count:
            raise PromptError(
                [f"{prompt.name}: examples: {count} of {named[owner]!r} are wanted, {len(its_own)} rows have it"]
            )
        rows += rng.choice(its_own, count, replace=False).tolist()
    chosen = [split[int(row)] for row in rng.permutation(rows)]
    return tuple(Example(text=row["text"], text_pair=row.get("text_pair"), label=named[row["label"]]) for row in chosen)
