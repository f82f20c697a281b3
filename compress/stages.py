"""A stage is a function from model to model. All of ours minimise an objective: that is what `run_stage` does."""

import json
import resource
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from accelerate import PartialState
from datasets import Dataset
from numpy.typing import NDArray
from rich.console import Console
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from compress import digest, evaluate
from compress.data.batches import Collate, encode
from compress.data.cache import home
from compress.data.corpora import Corpus, encode_corpus
from compress.data.task import TaskData
from compress.files import filled
from compress.objective import Objective
from compress.precision import cast_linear_layers
from compress.recipe import Stage
from compress.run import Run
from compress.shape import Shape
from compress.step import Distillation
from compress.teacher_cache import TeacherCache, teacher_cache
from compress.teachers import Teacher
from compress.train import Score, Trained, train


@dataclass(frozen=True)
class Material:
    """What stages work on: the task, unlabelled text where there is a corpus, and how batches are made of them."""

    data: TaskData
    corpus: Corpus | None
    tokenizer: PreTrainedTokenizerBase
    collate: Collate
    bf16: bool
    console: Console

    def rows(self, stage: Stage) -> Dataset:
        """Encoded training rows. A stage on `text` takes the corpus, else the task's own sentences."""
        with PartialState().main_process_first():  # the others find what the first has cached
            if stage.data == "text" and self.corpus is not None:
                return encode_corpus(self.corpus, self.tokenizer, stage.max_length)
            return encode(self.data.train, self.tokenizer, stage.max_length)


def run_stage(
    stage: Stage,
    student: PreTrainedModel,
    teacher: Teacher | None,
    material: Material,
    run: Run,
    *,
    teacher_logits: NDArray[np.float32] | None = None,
) -> PreTrainedModel:
    """Train `student` by the stage's objective and keep the result in the run's directory of this stage.

    `teacher_logits` on the validation split add the agreement to each evaluation. The seed is set from the run and the
    stage's name, so that a stage does the same whether or not the ones before it ran in this process.
    """
    set_seed(run.seed + int(digest.of_value(stage.name)[:6], 16))
    rows = material.rows(stage)
    shape = Shape.of(teacher.model.config) if teacher else None
    objective = Objective(stage.objective, Shape.of(student.config), shape, kind=material.data.task.kind)
    shown = _cached(stage, objective, teacher, rows, material) if teacher and stage.cache_teacher else None
    if teacher and material.bf16:
        cast_linear_layers(teacher.model)
    step = Distillation(student, shown or (teacher.model if teacher else None), objective)
    scored = "logits" in objective.student_wants and stage.evaluate > 0
    score = scorer(material, stage, teacher_logits) if scored else None
    trained = train(step, stage, rows, material.collate, run, score=score, bf16=material.bf16, console=material.console)
    if run.main:
        with filled(run.result(stage.name)) as folder:
            _keep(folder, student, material, trained)
    return student


def scorer(material: Material, stage: Stage, teacher_logits: NDArray[np.float32] | None) -> Score:
    """student -> every metric on the validation split, the task's own as `score`, and the agreement."""
    task, split = material.data.task, material.data.validation
    rows = encode(split, material.tokenizer, stage.max_length)
    labels = np.asarray(split["label"][:])

    def score(student: PreTrainedModel) -> Mapping[str, float]:
        logits = evaluate.logits(student, rows, material.collate, bf16=material.bf16)
        values = evaluate.scores(task, logits, labels)
        values["score"] = values[task.metric]
        if teacher_logits is not None:
            values["agreement"] = evaluate.agreement(task, logits, teacher_logits)
        return values

    return score


def load_result(folder: Path) -> PreTrainedModel:
    """The model a stage kept."""
    model: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(folder, use_safetensors=True)
    return model


def taken(run: Run, stage: str) -> Trained:
    """What a finished stage took."""
    return Trained(**json.loads((run.result(stage) / "training.json").read_text(encoding="utf-8"))["trained"])


def _keep(folder: Path, student: PreTrainedModel, material: Material, trained: Trained) -> None:
    student.save_pretrained(folder)
    material.tokenizer.save_pretrained(folder)
    facts = {"trained": asdict(trained), "peak_rss_mb": peak_rss_mb()}
    (folder / "training.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def peak_rss_mb() -> float:
    """Most memory this process has held, in megabytes (10^6 bytes)."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def _cached(stage: Stage, objective: Objective, teacher: Teacher, rows: Dataset, material: Material) -> TeacherCache:
    layers = sorted({n for pairs in objective.pairs for _, n in pairs})
    wants = objective.teacher_wants
    key = digest.of_value([teacher.digest, rows._fingerprint, stage.max_length, sorted(wants), layers, material.bf16])
    folder = home() / "teacher-outputs" / key[:24]
    material.console.print(f"{stage.name}: teacher outputs are kept in {folder}")
    return teacher_cache(teacher.model, rows, material.collate, folder, wants=wants, layers=layers, bf16=material.bf16)
