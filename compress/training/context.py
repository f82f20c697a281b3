"""Share the data, tokenizer, precision and console among the stages of one command."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from accelerate import PartialState
from datasets import Dataset, concatenate_datasets
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from compress import families
from compress.config.recipe import Recipe, spec_of
from compress.config.reference import Call
from compress.config.stages import ReadsRows, Stage
from compress.console import print_note
from compress.data.collate import Batching
from compress.data.corpus import Corpus, build_rows, encode_corpus
from compress.data.query_groups import group_rows
from compress.data.task import Task, TaskData
from compress.data.tokenize import encode, encode_task, limit_rows
from compress.errors import DataError
from compress.kinds import Kind
from compress.models.teacher import Teacher
from compress.training.augment import asks_language_model, augment_split, task_text
from compress.training.objective import compares_queries
from compress.training.processes import node_first, share_rows
from compress.training.schedule import Length, TimeLimit
from compress.training.sharding import Sharding
from compress.training.unlabelled import with_texts

HELD_OUT_TOKENS: Final = 200_000
"""The most held-out tokens on which a language model is scored."""
LEAST_TOKENS: Final = 8_000_000
"""Tokens of a corpus that are encoded even if a stage reads fewer; takes a few
seconds."""
TOKENS_PER_SECOND: Final = {"cpu": 50_000, "cuda": 20_000_000}
"""Upper bound on the tokens that a student reads in a second of training, by device."""


@dataclass(frozen=True)
class TrainingContext:
    """Provide what stages work on: the task's data, unlabelled text if there is any,
    and how batches are collated.

    Stages that augment the task's rows use `masked_lm()`, the teacher's language model,
    or `base_teacher`, the teacher as the user named it. `sharding` is how a teacher is
    split that is fine-tuned.
    """

    task_data: TaskData | None
    corpus: Corpus | None
    tokenizer: PreTrainedTokenizerBase
    collate: Batching
    bf16: bool
    console: Console
    masked_lm: Callable[[], Teacher] | None = None
    base_teacher: Teacher | None = None
    time_limit: TimeLimit | None = None
    sharding: Sharding | None = None

    def seconds(self, stage: str) -> float | None:
        """Return the seconds that the time limit leaves to this stage, or None without
        a limit."""
        return None if self.time_limit is None else self.time_limit.seconds(stage)

    def explain_short(self, steps: int, length: Length | None, seconds: float) -> str:
        """Say how many minutes the least steps of a stage need, from its `steps` in
        `seconds`; '' without a time limit, or if it made half of the least steps."""
        limit = self.time_limit
        if limit is None or length is None or steps >= length.least / 2:
            return ""
        more = (length.least - steps) * seconds / max(1, steps) / 60
        return (
            f"--minutes {limit.minutes:g} left time for {steps:,} of {length.least:,} "
            f"steps; allow about {math.ceil(limit.minutes + more):,} minutes."
        )

    @property
    def kind(self) -> Kind | None:
        return self.task_data.task.kind if self.task_data else None

    @property
    def task(self) -> type[Task]:
        """Return the class of the task; without a task, the base of all kinds."""
        return type(self.task_data.task) if self.task_data else Task

    @property
    def data(self) -> TaskData:
        if self.task_data is None:
            raise DataError("a stage on the task's examples needs data: pass --data")
        return self.task_data

    @property
    def text(self) -> Corpus:
        """The corpus, or the task's own training texts."""
        return self.corpus or task_text(self.data, self.data.train)

    def text_part(self, stage: Stage, held_out: bool) -> Corpus:
        """Return the documents of the corpus that a stage trains on, or those that are
        held out; without a corpus, the task's texts."""
        if self.corpus is not None:
            text = self.corpus.part(held_out)
        else:
            text = task_text(
                self.data, self.data.validation if held_out else self.data.train
            )
        return text.with_line_ends(stage.continues_text)

    def rows(self, stage: Stage, seed: int, *, held_out: bool = False) -> Dataset:
        """Encode the rows to train on, or with `held_out` those on which a language
        model is scored."""
        if stage.data == "text":
            with node_first():  # the others read from the cache
                return self._text_rows(stage, seed, held_out)
        split = self.data.validation if held_out else self.split(stage, seed)
        with node_first():
            if stage.rows is not None:
                return encode_task(
                    split,
                    self.data.task,
                    self.tokenizer,
                    stage.rows.function,
                    stage.rows.options,
                    max_length=stage.length,
                )
            rows = encode(
                split,
                self.tokenizer,
                stage.length,
                preparation=self.data.task.preparation,
            )
            grouped = (
                self.task.vectors
                and compares_queries(stage.objective, self.kind)
                and not held_out
            )
            rows = group_rows(split, rows) if grouped else rows
            return rows if held_out else limit_rows(rows, stage.limit_rows)

    def split(self, stage: Stage, seed: int) -> Dataset:
        """Return the task's rows to train on, with variants of them and texts of the
        corpus if the stage reads these."""
        split = self.data.train
        if isinstance(stage.augment, Call):
            if self.masked_lm is None or self.base_teacher is None:
                raise DataError(
                    "a stage with `augment` needs a teacher: pass --teacher"
                )
            # the language model may have to be trained first, by all processes together
            lm = (
                self.masked_lm()
                if asks_language_model(stage.augment)
                else self.base_teacher
            )
            lm.model.to(PartialState().device)
            self.console.print(
                f"{stage.name}: augmenting the rows by {stage.augment.by}; they are "
                "cached"
            )
            # other machines round differently, and would choose other words
            split = share_rows(
                partial(
                    augment_split,
                    split,
                    stage.augment,
                    lm.model,
                    lm.tokenizer,
                    lm_digest=lm.digest,
                    seed=seed,
                )
            )
        if not stage.corpus:
            return split
        with node_first():
            without = len(split)
            split = with_texts(split, self.data, self.corpus, seed=seed)
        self.console.print(
            f"{stage.name}: adding {len(split) - without:,} texts of the corpus"
        )
        return split

    def sample(self, stage: ReadsRows, count: int, seed: int) -> Dataset:
        """Encode a random sample of `count` rows of the task, or of unlabelled text,
        for a stage that has to find out what a model needs.

        The task's rows come from the validation split, and also from the training split
        if the validation split has fewer: a fine-tuned model has memorised its training
        rows, and the gradients of its loss there are noise (docs/LOG.md).
        """
        with node_first():
            if stage.data == "text":
                parts = [
                    encode_corpus(
                        self.text.with_line_ends(stage.continues_text),
                        self.tokenizer,
                        stage.length,
                        limit_tokens=count * stage.length,
                    )
                ]
            else:
                parts = [
                    encode(
                        split,
                        self.tokenizer,
                        stage.length,
                        preparation=self.data.task.preparation,
                    )
                    for split in (self.data.validation, self.data.train)
                ]
        rng = np.random.default_rng(seed)
        left = count
        for at, rows in enumerate(parts):
            if left < len(rows):
                parts[at] = rows.select(
                    np.sort(rng.choice(len(rows), left, replace=False))
                )
            left -= len(parts[at])
        return concatenate_datasets(parts)

    def _text_rows(self, stage: Stage, seed: int, held_out: bool) -> Dataset:
        text = self.text_part(stage, held_out)
        limit = HELD_OUT_TOKENS if held_out else self._count_tokens_read(stage)
        if stage.rows is None:
            return encode_corpus(text, self.tokenizer, stage.length, limit_tokens=limit)
        return build_rows(
            text,
            self.tokenizer,
            stage.rows.function,
            stage.rows.by,
            stage.rows.options,
            max_length=stage.length,
            seed=seed,
            limit_tokens=limit,
        )

    def _count_tokens_read(self, stage: Stage) -> int | None:
        """Count the tokens of a corpus that a stage may read; None for all of them.

        They depend on the settings of the run alone, so that a resumed stage has the
        same rows.
        """
        limits = []
        # rare languages are read many times, others hardly once
        if stage.language_sampling is None:
            if stage.steps is not None:
                limits.append(
                    stage.steps * (stage.tokens or stage.batch * stage.length)
                )
            if self.time_limit is not None:
                rate = TOKENS_PER_SECOND.get(PartialState().device.type)
                if rate is not None:
                    limits.append(math.ceil(60 * self.time_limit.minutes * rate))
        limits = [max(LEAST_TOKENS, min(limits))] if limits else []
        if stage.limit_tokens is not None:
            limits.append(stage.limit_tokens)
        return min(limits, default=None)


def use_bf16(
    number_format: str,
    recipe: Recipe,
    base_teacher: Teacher,
    console: Console,
) -> bool:
    """Return True if this run computes in bfloat16; it does not, with a note, if a
    family of the run cannot."""
    specs = [spec for stage in recipe.stages if (spec := spec_of(recipe, stage))]
    used = {base_teacher.model.config.model_type, *(spec.family for spec in specs)}
    unfit = [name for name in sorted(used) if families.find(name).float32_only]
    if number_format == "bf16" and unfit:
        print_note(
            console,
            f"{', '.join(unfit)} models run in float32 only, so this run is slower",
        )
    return number_format == "bf16" and not unfit
