"""A stage is a function from model to model. All of ours minimise an objective: that is what `run_stage` does."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers
from accelerate import PartialState
from datasets import Dataset
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from compress import digest, evaluate
from compress.call import Call, options
from compress.data.batches import Batching, encode
from compress.data.built import built
from compress.data.cache import home
from compress.data.corpora import Corpus, encode_corpus
from compress.data.made import asks_language_model, augmented, task_text
from compress.data.seq2seq import Seq2SeqCollate, encode_task
from compress.data.task import Kind, TaskData
from compress.data.words import Words, counts
from compress.errors import DamagedError, DataError
from compress.exam import Exam
from compress.export.saved import save_tokenizer
from compress.files import filled, verify
from compress.heads import LANGUAGE
from compress.objective import Objective
from compress.papers.t5 import answers
from compress.perplexity import held_out
from compress.precision import cast_linear_layers
from compress.recipe import Stage
from compress.run import Run
from compress.screen import warn
from compress.shape import Shape
from compress.step import Distillation, Step
from compress.teacher_cache import TeacherCache, of_logits, teacher_cache
from compress.teachers import Teacher
from compress.train import Trained, train
from compress.trainer import Corrupt, Score

HELD_OUT_TOKENS: Final = 200_000
"""How much text, at most, scores a language model."""


@dataclass(frozen=True)
class Material:
    """What stages work on: the task, unlabelled text where there is a corpus, and how batches are made of them.

    For stages that augment the task's rows: `masked_lm` opens the teacher's language model, `given` is the teacher as
    the user named it.
    """

    task_data: TaskData | None
    corpus: Corpus | None
    tokenizer: PreTrainedTokenizerBase
    collate: Batching
    bf16: bool
    console: Console
    masked_lm: Callable[[], Teacher] | None = None
    given: Teacher | None = None

    @property
    def kind(self) -> Kind | None:
        return self.task_data.task.kind if self.task_data else None

    @property
    def data(self) -> TaskData:
        if self.task_data is None:
            raise DataError("a stage on the task's examples needs them: give --data")
        return self.task_data

    @property
    def text(self) -> Corpus:
        """The corpus, else the task's own training texts."""
        return self.corpus or task_text(self.data, self.data.train)

    def rows(self, stage: Stage, seed: int, *, held_out: bool = False) -> Dataset:
        """Encoded rows to train on, or with `held_out` those kept apart to score a language model on."""
        lm = None if held_out or stage.augment is None else self._augmenter(stage.augment)
        with PartialState().main_process_first():  # the others find what the first has cached
            if stage.data == "text":
                return self._text_rows(stage, seed, held_out)
            split = self.data.validation if held_out else self.data.train
            if stage.augment is not None and lm is not None:
                self.console.print(f"{stage.name}: more rows by {stage.augment.by}; they are kept")
                split = augmented(split, stage.augment, lm.model, lm.tokenizer, lm_digest=lm.digest, seed=seed)
            if stage.rows is not None:
                return encode_task(
                    split, self.data.task, self.tokenizer, stage.rows.function, stage.rows.options,
                    max_length=stage.max_length,
                )  # fmt: skip
            return encode(split, self.tokenizer, stage.max_length)

    def _augmenter(self, call: Call) -> Teacher:
        """The model that an augmentation asks. It may have to be trained first, by all processes together."""
        if self.masked_lm is None or self.given is None:
            raise DataError("a stage with `augment` needs a teacher: give --teacher")
        lm = self.masked_lm() if asks_language_model(call) else self.given
        lm.model.to(PartialState().device)
        return lm

    def _text_rows(self, stage: Stage, seed: int, held_out: bool) -> Dataset:
        if self.corpus is not None:
            text = self.corpus.part(held_out)
        else:
            text = task_text(self.data, self.data.validation if held_out else self.data.train)
        limit = HELD_OUT_TOKENS if held_out else stage.limit_tokens
        if stage.rows is None:
            return encode_corpus(text, self.tokenizer, stage.max_length, limit_tokens=limit)
        builder, options = stage.rows.function, stage.rows.options
        return built(
            text, self.tokenizer, builder, stage.rows.by, options,
            max_length=stage.max_length, seed=seed, limit_tokens=limit,
        )  # fmt: skip


def run_stage(
    stage: Stage,
    student: PreTrainedModel,
    teacher: Teacher | None,
    material: Material,
    run: Run,
    *,
    teacher_logits: Any = None,
    origin_D: Tensor | None = None,
    judged: Callable[[Score], Score] | None = None,
) -> PreTrainedModel:
    """Train `student` by the stage's objective and keep the result in the run's directory of this stage.

    `teacher_logits` on the validation split add the agreement to each evaluation. `origin_D`: the dimensions of the
    teacher that those of a student cut out of it came from. `judged` makes of the stage's score another, as one that
    asks parts of the student. The seed is set from the run and the stage's name, so that a stage does the same whether
    or not the ones before it ran in this process. The result is the step's student, which may have become another
    model when the step finished.
    """
    if stage.head == "seq2seq":
        material = replace(material, collate=Seq2SeqCollate(material.tokenizer, student))
    seed = (run.seed + int(digest.of_value(stage.name)[:6], 16)) % 2**32
    set_seed(seed)
    rows = material.rows(stage, seed)
    words = _words(stage, material, rows) if stage.corrupt or stage.step else None
    corrupt = partial(stage.corrupt, words=words) if stage.corrupt else None
    if teacher and material.bf16:
        cast_linear_layers(teacher.model)
    made = _step(stage, student, teacher, material, words=words, rows=rows, origin_D=origin_D)
    score = _score(stage, made, corrupt, material, seed=seed, teacher_logits=teacher_logits)
    if judged is not None and score is not None:
        score = judged(score)
    with _only_head(student) if stage.train == "head" else nullcontext():
        trained = train(
            made, stage, rows, material.collate, run,
            corrupt=corrupt, score=score, bf16=material.bf16, console=material.console,
        )  # fmt: skip
    if run.main:
        with filled(run.result(stage.name), sealed=True) as folder:
            _keep(folder, made.student, material, trained)
        run.keep_seconds()
    return made.student


def _step(
    stage: Stage,
    student: PreTrainedModel,
    teacher: Teacher | None,
    material: Material,
    *,
    words: Words | None,
    rows: Dataset,
    origin_D: Tensor | None,
) -> Step:
    objective = None
    if stage.objective:
        shape = Shape.of(teacher.model.config) if teacher else None
        kind = material.kind if stage.head == "task" else None
        objective = Objective(stage.objective, Shape.of(student.config), shape, kind=kind)
        for map_DS in objective.projections.parameters() if origin_D is not None else ():
            map_DS.data = torch.eye(len(map_DS))[:, origin_D]  # instead of a random map, which must first be learned
    model = teacher.model if teacher else None
    known = options(stage.step.function) if stage.step else {"shown": None}
    shown = None
    if objective and teacher and "shown" in known:
        if teacher.asked:
            shown = of_logits(teacher.asked.of(material.data.train), rows)
        elif stage.cache_teacher:
            shown = _cached(stage, objective, teacher, rows, material)
    if stage.step is not None:
        given = {"words": words} | ({"shown": shown} if "shown" in known else {})
        made: Step = stage.step(student, model, objective, **given)
        return made
    assert objective is not None, "the recipe was checked"
    return Distillation(student, shown or model, objective)


def _words(stage: Stage, material: Material, rows: Dataset) -> Words:
    """The vocabulary for what corrupts a batch, with its counts, and for a paper's own step."""
    words = Words.of(material.tokenizer)
    if stage.corrupt is not None:
        words = replace(words, counts_V=counts(rows, words.size))
    return words.to(PartialState().device)


@contextmanager
def _only_head(student: PreTrainedModel) -> Iterator[None]:
    """While open, what is below the head is not trained."""
    below = [parameter for parameter in student.base_model.parameters() if parameter.requires_grad]
    for parameter in below:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in below:
            parameter.requires_grad_(True)


def _score(
    stage: Stage, step: Step, corrupt: Corrupt | None, material: Material, *, seed: int, teacher_logits: Any
) -> Score | None:
    """What tells the best weights of this stage: the task's metric, or a language model's on text kept apart."""
    if stage.evaluate == 0:
        return None
    reads_logits = not isinstance(step, Distillation) or "logits" in step.objective.student_wants
    if stage.data == "task" and stage.head == "task" and reads_logits:
        return scorer(material, stage, teacher_logits)
    if stage.data == "task" and stage.head == "seq2seq":
        return text_scorer(material, stage)
    speaks = stage.head in LANGUAGE and step.student.get_output_embeddings() is not None
    if corrupt is not None and speaks and reads_logits:
        return language_scorer(material, stage, corrupt, seed)
    return None


def text_scorer(material: Material, stage: Stage) -> Score:
    """student -> the task's metrics of the answers it would write on the validation split."""
    task, split, options = material.data.task, material.data.validation, stage.rows.options if stage.rows else {}
    labels = np.asarray(split["label"][:])

    def score(student: PreTrainedModel) -> Mapping[str, float]:
        said = answers(student, split, task, material.tokenizer, max_length=stage.max_length, **options)
        values = evaluate.scores(task, said, labels)
        return values | {"score": values[task.metric]}

    return score


def language_scorer(material: Material, stage: Stage, corrupt: Corrupt, seed: int) -> Score:
    """student -> perplexity on held-out text, and as `score` the mean log-likelihood of a token, in nats."""
    rows = material.rows(stage, seed, held_out=True)

    def score(student: PreTrainedModel) -> Mapping[str, float]:
        found = held_out(student, rows, material.collate, corrupt, bf16=material.bf16)
        return {"score": -found["nll"], "perplexity": found["perplexity"]}

    return score


def scorer(material: Material, stage: Stage, teacher_logits: NDArray[np.float32] | None) -> Score:
    """student -> every metric on the validation split, the task's own as `score`, and the agreement."""
    task = material.data.task
    exam = Exam.of(task, material.data.validation, material.tokenizer, stage.max_length)

    def score(student: PreTrainedModel) -> Mapping[str, float]:
        logits = evaluate.logits(student, exam.rows, material.collate, bf16=material.bf16)
        values = exam.scores(logits)
        values["score"] = values[task.metric]
        if teacher_logits is not None and teacher_logits.shape == logits.shape:
            values["agreement"] = exam.agreement(logits, teacher_logits)
        return values

    return score


def taken(run: Run, stage: str, console: Console) -> Trained | None:
    """Read what a stage of this run took; None when it ran in an earlier run, not at all, or the record is damaged."""
    folder = run.result(stage)
    if not folder.is_dir():
        return None
    try:
        verify(folder)
    except DamagedError as error:
        warn(console, f"{error} The report does not say what stage {stage} took.")
        return None
    return Trained.read(folder)


def _keep(folder: Path, student: PreTrainedModel, material: Material, trained: Trained) -> None:
    student.save_pretrained(folder)
    save_tokenizer(folder, material.tokenizer)
    trained.write(folder)


def _cached(stage: Stage, objective: Objective, teacher: Teacher, rows: Dataset, material: Material) -> TeacherCache:
    layers = sorted({n for pairs in objective.pairs for _, n in pairs})
    wants = objective.teacher_wants
    computed = [str(teacher.model.dtype), teacher.model.device.type, material.bf16]
    computed += [torch.__version__, transformers.__version__]
    key = digest.of_value([teacher.digest, rows._fingerprint, stage.max_length, sorted(wants), layers, *computed])
    folder = home() / "teacher-outputs" / key[:24]
    material.console.print(f"{stage.name}: teacher outputs are kept in {folder}")
    return teacher_cache(teacher.model, rows, material.collate, folder, wants=wants, layers=layers, bf16=material.bf16)
