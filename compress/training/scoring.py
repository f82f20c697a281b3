"""Score a student while it trains: by the task's metric, as a language model, or by its objective on held-out rows."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from datasets import Dataset
from numpy.typing import NDArray
from transformers import PreTrainedModel

from compress.config.recipe import Stage
from compress.config.reference import find
from compress.evaluation import metrics
from compress.evaluation.evaluator import Evaluator
from compress.evaluation.perplexity import measure_perplexity
from compress.models.heads import LANGUAGE
from compress.models.signals import evaluating
from compress.training.context import TrainingContext
from compress.training.step import Distillation, Step
from compress.training.trainer import Corrupt, Score


@dataclass(frozen=True)
class Scoring:
    """Score a student on `rows` rows. graded: by a metric of the task, else by a loss alone."""

    score: Score
    rows: int
    graded: bool = True


def improves(ended: Mapping[str, float], begun: Mapping[str, float], rows: int) -> bool:
    """Return True if a student is better than the one it was: by its score, or by its distance where that says little.

    That is within the largest standard error of a share of the `rows` that are scored.
    """
    rise = ended["score"] - begun["score"]
    if abs(rise) > 0.5 / math.sqrt(rows) or "distance" not in begun:
        return rise > 0
    return ended["distance"] < begun["distance"]


def choose_scoring(
    stage: Stage, step: Step, corrupt: Corrupt | None, context: TrainingContext, *, seed: int, teacher_logits: Any
) -> Scoring | None:
    """Choose what tells the best weights of this stage.

    The task's metric, a language model's on held-out text, or where there is neither and the end is open, the objective
    on the validation split.
    """
    if stage.evaluate == 0:
        return None
    reads_logits = not isinstance(step, Distillation) or "logits" in step.objective.student_wants
    if stage.data == "task" and stage.head == "task" and reads_logits:
        evaluator = Evaluator.from_split(
            context.data.task, context.data.validation, context.tokenizer, stage.max_length
        )
        return Scoring(scorer(context, evaluator, teacher_logits), len(evaluator))
    if stage.data == "task" and stage.head == "seq2seq":
        return Scoring(text_scorer(context, stage), len(context.data.validation))
    speaks = stage.head in LANGUAGE and step.student.get_output_embeddings() is not None
    if not (corrupt is not None and speaks and reads_logits) and not stage.open_ended:
        return None
    rows = context.rows(stage, seed, held_out=True)
    if corrupt is not None and speaks and reads_logits:
        return Scoring(language_scorer(context, rows, corrupt), len(rows), graded=False)
    return Scoring(objective_scorer(step, context, rows, stage.batch), len(rows), graded=False)


def text_scorer(context: TrainingContext, stage: Stage) -> Score:
    """Return student -> the task's metrics of the answers it would write on the validation split."""
    task, split, options = context.data.task, context.data.validation, stage.rows.options if stage.rows else {}
    labels = np.asarray(split["label"][:])

    def score(student: PreTrainedModel) -> Mapping[str, float]:
        said = find("t5.answers")(student, split, task, context.tokenizer, max_length=stage.max_length, **options)
        values = metrics.scores(task, said, labels)
        return values | {"score": values[task.metric]}

    return score


def objective_scorer(step: Step, context: TrainingContext, rows: Dataset, batch: int) -> Score:
    """Return student -> the mean loss of `step` on held-out rows as `distance`, and minus that as `score`."""
    order = np.argsort(np.asarray(rows["length"][:]), kind="stable")
    batches = [order[at : at + batch] for at in range(0, len(order), batch)]
    device = PartialState().device

    def score(student: PreTrainedModel) -> Mapping[str, float]:
        total = 0.0
        with evaluating(student), torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=context.bf16):
            for chosen in batches:
                made = context.collate([rows[int(row)] for row in chosen])
                loss = step(**{name: tensor.to(device) for name, tensor in made.items()})["loss"]
                total += len(chosen) * float(loss)
        return {"score": -total / len(rows), "distance": total / len(rows)}

    return score


def language_scorer(context: TrainingContext, rows: Dataset, corrupt: Corrupt) -> Score:
    """Return student -> perplexity on held-out text, and as `score` the mean log-likelihood of a token, in nats.

    `distance` is minus the score.
    """

    def score(student: PreTrainedModel) -> Mapping[str, float]:
        found = measure_perplexity(student, rows, context.collate, corrupt, bf16=context.bf16)
        return {"score": -found["nll"], "distance": found["nll"], "perplexity": found["perplexity"]}

    return score


def scorer(context: TrainingContext, evaluator: Evaluator, teacher_logits: NDArray[np.float32] | None) -> Score:
    """Return student -> every metric on the evaluator's rows, the task's own as `score`, and how near the teacher is.

    That is the agreement, and the `distance` (`Evaluator.distance`).
    """

    def score(student: PreTrainedModel) -> Mapping[str, float]:
        logits = metrics.logits(student, evaluator.rows, context.collate, bf16=context.bf16)
        values = evaluator.scores(logits)
        values["score"] = values[evaluator.task.metric]
        if teacher_logits is not None and teacher_logits.shape == logits.shape:
            values["agreement"] = evaluator.agreement(logits, teacher_logits)
            values["distance"] = evaluator.distance(logits, teacher_logits)
        return values

    return score
