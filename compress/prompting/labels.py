"""Use a prompted language model as the teacher of a classifier: soft labels for texts
that nobody has labelled.

Motivation: Wang et al. 2021, "Want To Reduce Labeling Cost? GPT-3 Can Help",
arXiv:2108.13487: the labels of a large model cost a fraction of human labels, and a
small model trained on them can be as good as its teacher.

From likelihoods of answers to probabilities of labels: Brown et al. 2020, "Language
Models are Few-Shot Learners", arXiv:2005.14165, Sec. 2.4: likelihood of an answer per
token, or divided by its likelihood after a neutral context, P(answer | prompt) /
P(answer | "Answer:"). Zhao et al. 2021, "Calibrate Before Use", arXiv:2102.09690, Sec.
5: q = softmax(W p), W = diag(p_cf)^-1, where p_cf are the label probabilities for
content-free texts, averaged over several and normalised.

Everything is in logarithms, float64. Shapes: N rows, A answers, C labels, M
content-free texts.

Deviations: the paper's softmax of W p is replaced by dividing W p by its sum: the order
of the labels is the same, and a uniform p_cf then leaves p unchanged, whereas softmax
would flatten it (the authors' code takes only the argmax, so their scores do not depend
on it). Several answers for one label count with their mean; the authors' code sums
them, which favours the label with more words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, Literal

import numpy as np
from datasets import Dataset
from rich.console import Console
from scipy.special import log_softmax, logsumexp

from compress import io as digest
from compress.arrays import Doubles, Flags, Floats, Longs
from compress.config.recipe import Recipe
from compress.config.stages import INITS
from compress.console import print_note
from compress.data.task import Task
from compress.errors import (
    ObjectiveError,
    PromptError,
    RecipeError,
    TeacherError,
    did_you_mean,
)
from compress.models.checkpoints import resolve
from compress.prompting import http_model, local_model
from compress.prompting.answers import (
    LanguageModel,
    LikelihoodOf,
    Likelihoods,
    ask_together,
    stack_likelihoods,
)
from compress.prompting.prompt import Example, Prompt, fit
from compress.training.objective import find_loss
from compress.training.processes import node_first

ENOUGH: Final = 20
"""The minimum number of rows for which the same label everywhere shows that the teacher
cannot tell them apart."""
MOST_UNANSWERED: Final = 0.2
"""The largest share of rows that a teacher may leave unanswered."""
EQUAL: Final = 1e-9
"""Scores that differ by less are equal up to rounding."""


@dataclass(frozen=True)
class TaskPrompt:
    """A prompt prepared for a task.

    head     instruction and examples, which precede every question
    tail     the white space between question and answer, which tokenizers expect in the
             answer
    answers  the strings that may follow a prompt, every word of every label; owners:
             the label id of each
    """

    prompt: Prompt
    labels: tuple[str, ...]
    examples: tuple[Example, ...]
    head: str
    tail: str
    answers: tuple[str, ...]
    owners: tuple[int, ...]

    @staticmethod
    def from_prompt(
        prompt: Prompt,
        labels: Sequence[str],
        examples: Sequence[Example],
        *,
        pair: bool,
    ) -> TaskPrompt:
        """Prepare a prompt. Raises PromptError if it does not fit the labels, or the
        number of texts in a row."""
        names = label_names(prompt, labels)
        prompt.check_texts(pair=pair)
        second = "y" if pair else None
        unanswered = prompt.render("x", second, "")
        start = len(unanswered.rstrip())
        words = [
            (owner, word)
            for owner, name in enumerate(names)
            for word in prompt.labels[name]
        ]
        answers = tuple(prompt.render("x", second, word)[start:] for _, word in words)
        owners = tuple(owner for owner, _ in words)
        return TaskPrompt(
            prompt,
            tuple(labels),
            tuple(examples),
            _write_head(prompt, examples),
            unanswered[start:],
            answers,
            owners,
        )

    def render(self, texts: Sequence[str]) -> str:
        """Write the prompt for a text or a pair, up to where the answer begins."""
        text, second = texts if self.prompt.pair else (*texts, None)
        return self.head + self.prompt.render(str(text), second, "").removesuffix(
            self.tail
        )

    def fit(
        self, texts: Sequence[str], count: Callable[[str], int], limit: int
    ) -> tuple[str, bool]:
        """Write the prompt in at most `limit` tokens: see `prompt.fit`. A text that is
        one of the examples is not shown with its label."""
        asked = tuple(map(str, texts))
        others = tuple(each for each in self.examples if each.texts != asked)
        shown = self
        if len(others) < len(self.examples):
            head = _write_head(self.prompt, others)
            shown = replace(self, examples=others, head=head)
        return fit(shown.render, texts, count, limit, name=self.prompt.name)


def _write_head(prompt: Prompt, examples: Sequence[Example]) -> str:
    """Write the instruction and the examples."""
    shown = [
        prompt.render(each.text, each.text_pair, prompt.labels[each.label][0])
        for each in examples
    ]
    return "".join(
        part + prompt.separator
        for part in (prompt.instruction.rstrip(), *shown)
        if part
    )


def label_names(prompt: Prompt, labels: Sequence[str]) -> list[str]:
    """Return the prompt's name of each of the task's labels, in order. Raises
    PromptError with all mismatches."""
    names = [prompt.aliases.get(label, label) for label in labels]
    unknown = [
        label
        for label, name in zip(labels, names, strict=True)
        if name not in prompt.labels
    ]
    unused = [name for name in prompt.labels if name not in names]
    problems = [
        f"{prompt.name}: lacks the task's label {label!r}.{did_you_mean(label, unused)}"
        for label in unknown
    ]
    if not unknown:
        problems = [
            f"{prompt.name}: labels.{name}: the task has no such label"
            for name in unused
        ]
    problems += [
        f"{prompt.name}: {name!r} names two of the task's labels"
        for name in set(names)
        if names.count(name) > 1
    ]
    if problems:
        hint = (
            f"the task's labels are {', '.join(labels)}; `aliases:` in a copy of the "
            "prompt can map other names"
        )
        raise PromptError([*problems, hint])
    return names


def choose_examples(
    prompt: Prompt, split: Dataset, labels: Sequence[str], *, seed: int
) -> tuple[Example, ...]:
    """Return the examples in the prompt, or draw as many rows of a labelled split as it
    asks for, in random order.

    The labels are balanced, give or take one row. Raises PromptError if labels or rows
    are missing.
    """
    if not isinstance(prompt.examples, int):
        return prompt.examples
    if not prompt.examples:
        return ()
    if "label" not in split.column_names:
        raise PromptError(
            [
                f"{prompt.name}: examples: {prompt.examples} cannot be chosen from "
                "rows without labels: write them out in a copy of it, as in examples: "
                f"[{{text: ..., label: {next(iter(prompt.labels))}}}]"
            ]
        )
    rng = np.random.default_rng(seed)
    ids = np.asarray(split["label"][:])
    names = label_names(prompt, labels)
    rows: list[int] = []
    for turn, label in enumerate(rng.permutation(len(names))):
        count = prompt.examples // len(names) + (turn < prompt.examples % len(names))
        candidates = np.flatnonzero(ids == label)
        if len(candidates) < count:
            raise PromptError(
                [
                    f"{prompt.name}: examples: needs {count} of {names[label]!r}, "
                    f"which only {len(candidates)} rows have"
                ]
            )
        rows += rng.choice(candidates, count, replace=False).tolist()
    chosen = [split[int(row)] for row in rng.permutation(rows)]
    return tuple(
        Example(
            text=row["text"], text_pair=row.get("text_pair"), label=names[row["label"]]
        )
        for row in chosen
    )


def normalise(
    log_p_NA: Doubles,
    tokens_NA: Longs,
    how: Literal["length", "none", "unconditional"],
    unconditional_A: Doubles | None = None,
) -> Doubles:
    """Make likelihoods of answers of different length comparable: (N, A).

    unconditional_A  log P(answer | a context like "Answer:"), for how="unconditional"
    """
    if how == "length":
        return log_p_NA / tokens_NA
    if how == "none":
        return log_p_NA
    assert unconditional_A is not None
    return log_p_NA - unconditional_A


def average_by_label(scores_NA: Doubles, owners: Sequence[int]) -> Doubles:
    """Average exp(score) over the answers of each label, in logarithms: (N, C).
    `owners`: the label of each answer."""
    groups = [
        np.flatnonzero(np.asarray(owners) == label) for label in range(max(owners) + 1)
    ]
    return np.stack(
        [
            logsumexp(scores_NA[:, group], axis=1) - np.log(len(group))
            for group in groups
        ],
        axis=1,
    )


def content_free_prior(scores_MC: Doubles) -> Doubles:
    """Average the probabilities for the M content-free texts, then normalise over the
    labels: log p_cf (C,)."""
    return np.asarray(log_softmax(logsumexp(scores_MC, axis=0)))


def calibrate(scores_NC: Doubles, log_p_cf_C: Doubles | None) -> Doubles:
    """Divide the probabilities by p_cf, if given, and normalise: log q (N, C)."""
    return np.asarray(
        log_softmax(scores_NC if log_p_cf_C is None else scores_NC - log_p_cf_C, axis=1)
    )


@dataclass(frozen=True)
class SoftLabels:
    """The probabilities of the labels for each row, as logarithms.

    asked, seconds  rows that were sent to the model now, and the time for them; the
                    others were cached
    notes           remarks for the user
    advice          what to do about rows without an answer
    spent           requests and tokens of an endpoint

    A row whose labels are all equally likely counts as unanswered.
    """

    log_p_NC: Floats
    labels: tuple[str, ...]
    asked: int
    seconds: float
    notes: tuple[str, ...]
    advice: str = (
        "Try other words for the labels, another `mode`, or more `top` tokens in the "
        "endpoint file"
    )
    spent: Mapping[str, int] = field(default_factory=dict)

    @property
    def answered(self) -> Flags:
        """Return which of the N rows have an answer."""
        return np.ptp(self.log_p_NC, axis=1) > 0

    @property
    def shares(self) -> dict[str, float]:
        """Return the share of answered rows for which each label is the likeliest."""
        likeliest = self.log_p_NC[self.answered].argmax(axis=1)
        counts = np.bincount(likeliest, minlength=len(self.labels)) / max(
            1, len(likeliest)
        )
        return dict(zip(self.labels, counts.tolist(), strict=True))

    @property
    def entropy(self) -> float:
        """Return the mean entropy of a row relative to the maximum, from 0 (certain) to
        1 (uniform)."""
        log_p_NC = self.log_p_NC.astype(np.float64)
        return float(
            -(np.exp(log_p_NC) * log_p_NC).sum(axis=1).mean() / np.log(len(self.labels))
        )

    @property
    def counts(self) -> dict[str, Any]:
        """Return the figures that --json prints."""
        return {
            "texts": len(self.log_p_NC),
            "answered": int(self.answered.sum()),
            "shares": self.shares,
            "asked": self.asked,
            **self.spent,
        }

    def balance(self, split: str) -> str:
        """Describe the labels in one sentence."""
        shares = ", ".join(
            f"{label} {share:.1%}" for label, share in self.shares.items()
        )
        return (
            f"{split}: answers {shares}; mean entropy {self.entropy:.2f} of the maximum"
        )


@dataclass(frozen=True)
class PromptedTeacher:
    """A language model with the prompt that makes it a classifier."""

    language_model: LanguageModel
    task_prompt: TaskPrompt
    console: Console

    @property
    def name(self) -> str:
        return self.language_model.name

    @cached_property
    def digest(self) -> str:
        """Return a hash of everything that the labels depend on: the model, the prompt,
        the examples."""
        settings = self.prompt.model_dump(exclude={"name", "about", "examples"})
        shown = [each.model_dump() for each in self.task_prompt.examples]
        return digest.hash_value(
            [self.language_model.digest, settings, shown, self.task_prompt.labels]
        )

    @property
    def prompt(self) -> Prompt:
        return self.task_prompt.prompt

    @property
    def wanted(self) -> LikelihoodOf:
        """Return what is asked about each prompt."""
        return LikelihoodOf(self.task_prompt.answers)

    def label(self, texts: Sequence[Sequence[str]]) -> SoftLabels:
        """Compute the probabilities of the labels for each text or pair, with the cache
        in $COMPRESS_HOME.

        Raises PromptError if the prompt leaves no room for a text.
        """
        fitted = self.fit(texts)
        rows = len(fitted)
        prompt = self.prompt
        notes = self._describe_cuts(fitted)
        empty = []
        if prompt.calibrate != "none":
            empty = [[text] * (2 if prompt.pair else 1) for text in prompt.content_free]
        prompts = [question for question, _ in (*fitted, *self.fit(empty))]
        if prompt.normalise == "unconditional":
            prompts.append(prompt.answer_context)
        asked = ask_together(
            self.language_model, prompts, self.wanted, console=self.console
        )

        def select(first: int, last: int | None) -> Likelihoods:
            part = replace(asked, answers=asked.answers[first:last])
            return stack_likelihoods(self.name, part)

        unconditional_A = None
        if prompt.normalise == "unconditional":
            unconditional_A = select(-1, None).log_p_NA[0]
        found = select(0, rows)
        if found.absent:
            reported = 1 - found.absent / found.log_p_NA.size
            notes.append(
                f"{self.name} reported the likelihood of {reported:.1%} of the "
                "answers; the others were not among its likeliest tokens, and an upper "
                "bound is used"
            )
        scores_NC = self._scores(found, unconditional_A)
        answered_N = np.ptp(scores_NC, axis=1) > EQUAL
        answered_N &= np.ptp(found.log_p_NA / found.tokens_NA, axis=1) > EQUAL
        if unanswered := int((~answered_N).sum()):
            notes.append(
                f"{self.name} did not answer {unanswered:,} of {len(fitted):,} texts: "
                "all labels are equally likely"
            )
        for note in notes:
            print_note(self.console, note)
        log_p_cf_C = None
        if empty:
            content_free = select(rows, rows + len(empty))
            log_p_cf_C = content_free_prior(self._scores(content_free, unconditional_A))
        log_p_NC = calibrate(scores_NC, log_p_cf_C).astype(np.float32)
        log_p_NC[~answered_N] = -np.log(len(self.task_prompt.labels))
        return SoftLabels(
            log_p_NC, self.task_prompt.labels, found.asked, found.seconds, tuple(notes)
        )

    def label_split(self, split: Dataset) -> SoftLabels:
        """Label the `text`, or `text` and `text_pair`, of a split."""
        return self.label(list_texts(split))

    def fit(self, texts: Sequence[Sequence[str]]) -> list[tuple[str, bool]]:
        """Write the prompt for each text or pair; return each with whether it was cut,
        see `TaskPrompt.fit`."""
        count = self.language_model.count
        limit = self._longest - max(map(count, self.task_prompt.answers))
        return [self.task_prompt.fit(each, count, limit) for each in texts]

    @property
    def _longest(self) -> int:
        return self.prompt.limit(self.language_model.longest)

    def _describe_cuts(self, fitted: Sequence[tuple[str, bool]]) -> list[str]:
        cut = sum(was_cut for _, was_cut in fitted)
        if not cut:
            return []
        return [
            f"{cut:,} of {len(fitted):,} texts were cut to fit {self._longest} tokens "
            "with their prompt"
        ]

    def _scores(self, found: Likelihoods, unconditional_A: Doubles | None) -> Doubles:
        how = self.prompt.normalise
        scores_NA = normalise(found.log_p_NA, found.tokens_NA, how, unconditional_A)
        return average_by_label(scores_NA, self.task_prompt.owners)


def list_texts(split: Dataset) -> list[tuple[str, ...]]:
    """List the `text`, or `text` and `text_pair`, of each row of a split."""
    columns = [
        split[name][:] for name in ("text", "text_pair") if name in split.column_names
    ]
    return list(zip(*columns, strict=True))


def open_language_model(
    name: str, *, allow_pickle: bool = False, bf16: bool = False
) -> LanguageModel:
    """Open a language model by alias, folder, hub id, or the .yaml file of an endpoint.
    The first process of each machine downloads. Raises CompressError."""
    if http_model.names_endpoint(name):
        return http_model.open_endpoint(name)
    with node_first():
        resolve(name, allow_pickle=allow_pickle)
    return local_model.open_model(name, allow_pickle=allow_pickle, bf16=bf16)


def build_task_prompt(
    prompt: Prompt, task: Task, *, train: Dataset, seed: int
) -> TaskPrompt:
    """Prepare the prompt for a task, with examples from `train` if it asks for any.
    Raises PromptError."""
    if not task.one_label:
        raise PromptError(
            [f"{prompt.name}: a prompt is for classification; the task is {task.kind}"]
        )
    examples = choose_examples(prompt, train, task.labels, seed=seed)
    return TaskPrompt.from_prompt(prompt, task.labels, examples, pair=task.pair)


def check_labels(
    soft: SoftLabels, teacher: str, split: str, *, strict: bool
) -> list[str]:
    """Raise TeacherError, or return notes if not `strict`, if too many rows are
    unanswered or all labels are alike."""
    notes = []
    unanswered = int((~soft.answered).sum())
    rows = len(soft.log_p_NC)
    if unanswered > MOST_UNANSWERED * rows:
        notes.append(
            f"teacher {teacher} does not answer {unanswered:,} of {rows:,} {split} "
            "rows, for which all labels are equally likely; expected at most "
            f"{MOST_UNANSWERED:.0%}. {soft.advice}"
        )
    label, share = max(soft.shares.items(), key=lambda pair: pair[1])
    if share == 1 and rows >= ENOUGH:
        notes.append(
            f"teacher {teacher} gives every one of {rows:,} {split} rows the label "
            f"{label!r}: there is nothing to learn from it. Try other words for the "
            "labels, examples, calibration, or a larger model"
        )
    if notes and strict:
        raise TeacherError(f"{notes[0]}. To continue anyway: --gate warn")
    return notes


def starting_checkpoint(recipe: Recipe, *, default: str | None = None) -> str:
    """Return the checkpoint that the student starts from, which also determines its
    tokenizer.

    default: the checkpoint if the recipe names none. Raises RecipeError with everything
    in the recipe that a teacher with only label probabilities, or vectors, cannot
    provide.
    """
    problems = []
    init = recipe.student.init
    if default is not None and init in INITS:
        init = default
    if not isinstance(init, str) or init in INITS:
        problems.append(
            f"{recipe.name}: student.init: a prompted teacher has no encoder to build "
            "a student from; name the checkpoint to start from: --set "
            "student.init=minilm"
        )
    for at, stage in enumerate(recipe.training):
        if stage.kind != "distill" or stage.teacher != "task":
            continue
        where = f"{recipe.name}: stages[{at}]"
        problems += [
            f"{where}.{name}: this teacher has only answered the task's own rows; "
            "remove it"
            for name in ("augment", "corpus", "rows", "step")
            if getattr(stage, name) not in (None, False, "auto")
        ]
        if stage.data != "task" or stage.head != "task":
            problems.append(
                f"{where}.data, head: this teacher teaches the task; expected `task` "
                "for both"
            )
        for term in stage.objective:
            try:
                reading = find_loss(term).reading
            except ObjectiveError:  # reported with the other problems of objectives
                continue
            if reading.against == "teacher" and reading.signal != "logits":
                problems.append(
                    f"{where}.objective: {term.name} reads {reading.signal}; this "
                    "teacher has only logits"
                )
    if problems:
        raise RecipeError(problems)
    return str(init)
