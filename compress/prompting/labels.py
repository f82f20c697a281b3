"""A prompted language model as a teacher of a classifier: soft labels for texts that nobody has labelled.

The economics are those of Wang et al. 2021, "Want To Reduce Labeling Cost? GPT-3 Can Help", arXiv:2108.13487: labels
of a large model cost a fraction of people's, and a small model trained on them can be as good as their teacher.

From likelihoods of answers to probabilities of labels:
Brown et al. 2020, "Language Models are Few-Shot Learners", arXiv:2005.14165, Sec. 2.4: likelihood of an answer per
token, or divided by its likelihood after a context that asks nothing, P(answer | prompt) / P(answer | "Answer:").
Zhao et al. 2021, "Calibrate Before Use", arXiv:2102.09690, Sec. 5: q = softmax(W p), W = diag(p_cf)^-1, where p_cf are
the label probabilities for texts without content, averaged over several and normalised.

Everything is in logarithms, float64. Shapes: N rows, A answers, C labels, M texts without content.

Deviations: the paper's softmax of W p is replaced by dividing W p by its sum: the order of the labels is the same, and
p_cf uniform then leaves p as it is, where softmax would flatten it (the authors' code takes the argmax only, so
neither shows in their scores). Several answers for one label count with their mean; the authors' code sums them, which
favours the label with more words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Literal

import numpy as np
import yaml
from datasets import Dataset
from numpy.typing import NDArray
from rich.console import Console
from scipy.special import log_softmax, logsumexp

from compress import io as digest
from compress.config.recipe import INITS, Recipe, Stage
from compress.console import print_note
from compress.data.task import Task, TaskData
from compress.errors import ObjectiveError, PromptError, RecipeError, TeacherError, did_you_mean
from compress.models.teacher import RecordedLogits, Teacher
from compress.prompting import http_model, local_model
from compress.prompting.answers import Likelihoods, Speaker, ask
from compress.prompting.prompt import Example, Prompt
from compress.training.finetune import TeacherCheck, check_logits
from compress.training.objective import find_loss

ENOUGH: Final = 20
"""Rows from which on one answer to all of them tells that the teacher does not tell them apart."""
MOST_UNANSWERED: Final = 0.2
"""Share of rows that a teacher may leave without an answer."""
EQUAL: Final = 1e-9
"""Scores that differ by less say nothing: floats of equal probabilities."""

Array = NDArray[np.float64]


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
    def from_prompt(prompt: Prompt, labels: Sequence[str], examples: Sequence[Example], *, pair: bool) -> Questions:
        """Make a prompt ready. Raises PromptError where it does not fit the labels, or the (single or paired) texts."""
        named = label_names(prompt, labels)
        if pair != prompt.pair:
            asked, given = ("two texts", "one") if prompt.pair else ("one text", "two")
            raise PromptError([f"{prompt.name}: its template asks about {asked}, the task has {given}"])
        shown = [prompt.render(each.text, each.text_pair, prompt.labels[each.label][0]) for each in examples]
        head = "".join(part + prompt.separator for part in (prompt.instruction.rstrip(), *shown) if part)
        second = "y" if pair else None
        empty = prompt.render("x", second, "")
        asked = empty.rstrip()
        words = [(owner, word) for owner, name in enumerate(named) for word in prompt.labels[name]]
        answers = tuple(prompt.render("x", second, word)[len(asked) :] for _, word in words)
        owners = tuple(owner for owner, _ in words)
        return Questions(prompt, tuple(labels), tuple(examples), head, empty[len(asked) :], answers, owners)

    def ask(self, texts: Sequence[str]) -> str:
        """Write the prompt for a text, or a pair, up to where the answer begins."""
        text, second = texts if self.prompt.pair else (*texts, None)
        return self.head + self.prompt.render(str(text), second, "").removesuffix(self.tail)

    def fit(self, texts: Sequence[str], count: Callable[[str], int], room: int) -> tuple[str, bool]:
        """Write the prompt in at most `room` tokens, as `count` counts them, and tell whether texts were cut for that.

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
    """Keep at most so many characters of a text; no half word at its end, where that leaves any."""
    if len(text) <= characters:
        return text
    kept = text[:characters]
    whole = kept if text[characters].isspace() else kept.rpartition(" ")[0]
    return (whole or kept).rstrip()


def label_names(prompt: Prompt, labels: Sequence[str]) -> list[str]:
    """Return the prompt's name of each of the task's labels, in their order. PromptError for all that do not match."""
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
    """Take the examples written in the prompt, or as many rows of a labelled split as it asks for, in random order.

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


def normalise(
    log_p_NA: Array,
    tokens_NA: NDArray[np.int64],
    how: Literal["length", "none", "unconditional"],
    unconditional_A: Array | None = None,
) -> Array:
    """Make likelihoods of answers of different length comparable: (N, A).

    unconditional_A  log P(answer | a context like "Answer:"), for `how` of that name
    """
    if how == "length":
        return log_p_NA / tokens_NA
    if how == "none":
        return log_p_NA
    assert unconditional_A is not None
    return log_p_NA - unconditional_A


def average_by_label(scores_NA: Array, owners: Sequence[int]) -> Array:
    """Average exp(score) over each label's answers, in logarithms: (N, C). `owners`: the label of each answer."""
    groups = [np.flatnonzero(np.asarray(owners) == label) for label in range(max(owners) + 1)]
    return np.stack([logsumexp(scores_NA[:, group], axis=1) - np.log(len(group)) for group in groups], axis=1)


def content_free_prior(scores_MC: Array) -> Array:
    """Average the probabilities for the M texts without content, then normalise over the labels: log p_cf (C,)."""
    mean_C: Array = logsumexp(scores_MC, axis=0)
    return np.asarray(log_softmax(mean_C))


def calibrate(scores_NC: Array, log_p_cf_C: Array | None) -> Array:
    """Divide probabilities by p_cf, and normalise: log q (N, C); None: q = p."""
    return np.asarray(log_softmax(scores_NC if log_p_cf_C is None else scores_NC - log_p_cf_C, axis=1))


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
        """Describe the labels in one sentence."""
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
        """Return the digest of all that decides the labels: the model, the prompt, the examples."""
        settings = self.questions.prompt.model_dump(exclude={"name", "about", "examples"})
        shown = [each.model_dump() for each in self.questions.examples]
        return digest.hash_value([self.speaker.digest, settings, shown, self.questions.labels])

    def label(self, texts: Sequence[Sequence[str]]) -> SoftLabels:
        """Probabilities of the labels for each text or pair. What was asked before comes from $COMPRESS_HOME.

        Raises PromptError where no text fits beside the prompt.
        """
        fitted = self.fit(texts)
        notes = []
        if cut := sum(was_cut for _, was_cut in fitted):
            notes.append(f"{cut:,} of {len(fitted):,} texts were cut to fit {self._longest} tokens with their prompt")
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
        log_p_NC = calibrate(scores_NC, self._log_p_cf()).astype(np.float32)
        log_p_NC[~answered_N] = -np.log(len(self.questions.labels))
        return SoftLabels(log_p_NC, self.questions.labels, found.asked, found.seconds, tuple(notes))

    def label_split(self, split: Dataset) -> SoftLabels:
        """Label the `text`, or `text` and `text_pair`, of a split."""
        return self.label(texts_of(split))

    def fit(self, texts: Sequence[Sequence[str]]) -> list[tuple[str, bool]]:
        """Write the prompt for each text or pair, and tell whether it was cut: see `Questions.fit`."""
        room = self._longest - max(self.speaker.count(answer) for answer in self.questions.answers)
        return [self.questions.fit(each, self.speaker.count, room) for each in texts]

    @property
    def _longest(self) -> int:
        limits = (self.questions.prompt.max_length, self.speaker.longest)
        return min(limit for limit in limits if limit is not None)

    def _ask(self, questions: Sequence[str]) -> Likelihoods:
        return ask(self.speaker, questions, self.questions.answers, console=self.console)

    def _scores(self, found: Likelihoods) -> NDArray[np.float64]:
        prompt = self.questions.prompt
        alone = self._ask([prompt.answer_context]).log_p_NA[0] if prompt.normalise == "unconditional" else None
        scores_NA = normalise(found.log_p_NA, found.tokens_NA, prompt.normalise, alone)
        return average_by_label(scores_NA, self.questions.owners)

    def _log_p_cf(self) -> NDArray[np.float64] | None:
        prompt = self.questions.prompt
        if prompt.calibrate == "none":
            return None
        texts = [[text] * (2 if prompt.pair else 1) for text in prompt.content_free]
        return content_free_prior(self._scores(self._ask([asked for asked, _ in self.fit(texts)])))


def texts_of(split: Dataset) -> list[tuple[str, ...]]:
    """List the `text`, or `text` and `text_pair`, of each row of a split."""
    columns = [split[name][:] for name in ("text", "text_pair") if name in split.column_names]
    return list(zip(*columns, strict=True))


def open_speaker(name: str, *, allow_pickle: bool = False, bf16: bool = False) -> Speaker:
    """Open a language model by alias, folder or hub id, or the endpoint that a .yaml file describes.

    Raises CompressError.
    """
    if name.endswith((".yaml", ".yml")):
        return http_model.open_endpoint(name)
    return local_model.open_model(name, allow_pickle=allow_pickle, bf16=bf16)


def questions_for(prompt: Prompt, task: Task, *, train: Dataset, seed: int) -> Questions:
    """Make the prompt ready for a task; examples that it wants are drawn from `train`. Raises PromptError."""
    if task.kind != "classification":
        raise PromptError([f"{prompt.name}: a prompt's answers are classes; the task is {task.kind}"])
    examples = choose_examples(prompt, train, task.labels, seed=seed)
    return Questions.from_prompt(prompt, task.labels, examples, pair=task.pair)


def refuse_unusable(soft: SoftLabels, teacher: str, split: str, *, strict: bool) -> list[str]:
    """Raise TeacherError, or with `strict` false give notes, where labels teach nothing.

    Too many rows have no answer, or one label is the likeliest for every row.
    """
    notes = []
    unanswered, rows = int((~soft.answered).sum()), len(soft.log_p_NC)
    if unanswered > MOST_UNANSWERED * rows:
        notes.append(
            f"teacher {teacher} does not answer {unanswered:,} of {rows:,} {split} rows: all labels are equally likely "
            f"to it, and at most {MOST_UNANSWERED:.0%} may be so. Try other words for the labels, another `mode`, or "
            "more `top` tokens in the endpoint file"
        )
    label, share = max(soft.shares.items(), key=lambda pair: pair[1])
    if share == 1 and rows >= ENOUGH:
        notes.append(
            f"teacher {teacher} gives every one of {rows:,} {split} rows the label {label!r}: there is nothing to "
            "learn from it. Try other words for the labels, examples, calibration, or a larger model"
        )
    if notes and strict:
        raise TeacherError(f"{notes[0]}. --gate warn goes on all the same")
    return notes


REMEDY = (
    "Try other words for the labels, more examples, calibration or a larger model; --gate warn goes on all the same"
)


def starting_checkpoint(recipe: Recipe, *, usual: str | None = None) -> str:
    """Name the checkpoint that the student begins as, with its tokenizer and vocabulary: a language model has others.

    usual: the one where the recipe names none. Raises RecipeError for all that such a recipe cannot ask of a teacher
    that only gives probabilities of labels, or vectors.
    """
    problems = []
    init = recipe.student.init
    if usual is not None and init in INITS:
        init = usual
    if not isinstance(init, str) or init in INITS:
        problems.append(
            f"{recipe.name}: student.init: a prompted teacher has no encoder to build a student from; name the "
            "checkpoint it begins as: --set student.init=minilm"
        )
    for at, stage in enumerate(recipe.training):
        problems += [f"{recipe.name}: stages[{at}].{problem}" for problem in _problems(stage)]
    if problems:
        raise RecipeError(problems)
    return str(init)


def _problems(stage: Stage) -> list[str]:
    if stage.kind != "distill" or stage.teacher != "task":
        return []
    problems = [
        f"{name}: this teacher has answered for the task's own rows only; remove it"
        for name in ("augment", "corpus", "rows", "step")
        if getattr(stage, name) not in (None, False, "auto")
    ]
    if stage.data != "task" or stage.head != "task":
        problems.append("data, head: this teacher teaches the task: expected `task` for both")
    for term in stage.objective:
        try:
            reading = find_loss(term).reading
        except ObjectiveError:  # told with all other problems of objectives
            continue
        if reading.against == "teacher" and reading.signal != "logits":
            problems.append(f"objective: {term.name} reads {reading.signal}; this teacher shows logits only")
    return problems


def prompt_teacher(
    name: str,
    prompt: Prompt,
    base_teacher: Teacher,
    data: TaskData,
    *,
    seed: int,
    bf16: bool,
    strict: bool,
    allow_pickle: bool,
    console: Console,
) -> tuple[Teacher, TeacherCheck]:
    """Return `base_teacher` with the answers of the language model `name` for its own, and what the gate saw of them.

    The validation split is asked about first: a model that is no teacher costs no more than that. Labels in the
    training split serve as examples, where the prompt wants some, and for nothing else. Raises CompressError.
    """
    questions = questions_for(prompt, data.task, train=data.train, seed=seed)
    speaker = open_speaker(name, allow_pickle=allow_pickle, bf16=bf16)
    prompted = PromptedTeacher(speaker, questions, console)
    soft = {"validation": prompted.label_split(data.validation)}
    seen = check_logits(prompted.name, soft["validation"].log_p_NC, data, strict=strict, remedy=REMEDY)
    soft["train"] = prompted.label_split(data.train)
    unusable = refuse_unusable(soft["train"], prompted.name, "training", strict=strict)
    if data.test is not None:
        soft["test"] = prompted.label_split(data.test)
    splits = {"validation": data.validation, "train": data.train, "test": data.test}
    logits = {splits[each]._fingerprint: found.log_p_NC for each, found in soft.items()}
    settings = yaml.safe_dump(prompt.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)
    notes = [
        *seen.notes,
        *unusable,
        *(f"{each}: {note}" for each, found in soft.items() for note in found.notes),
        *(soft[each].balance(f"{prompted.name}, asked about {each}") for each in ("train", "validation")),
    ]
    asked, seconds = sum(each.asked for each in soft.values()), sum(each.seconds for each in soft.values())
    if asked:
        notes.append(f"{prompted.name} answered {asked:,} prompts in {seconds:.0f} s, {seconds / asked:.3f} s each.")
    recorded = RecordedLogits(logits, settings, speaker.parameters)
    teacher = replace(base_teacher, name=prompted.name, digest=prompted.digest, recorded=recorded)
    return teacher, replace(seen, notes=tuple(notes))
