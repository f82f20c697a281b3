"""Score a student during training: by the task's metric, by perplexity, or by its
objective on held-out rows."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Final

import numpy as np
import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import PreTrainedModel

from compress.arrays import Floats, whole_numbers
from compress.config.reference import find
from compress.config.stages import Stage
from compress.data.corpus import iterate_documents
from compress.data.held_out import DECIDING_ROWS
from compress.data.masking import Frame, Words
from compress.errors import DataError
from compress.evaluation import metrics
from compress.evaluation.evaluator import Evaluator
from compress.evaluation.perplexity import SEED, measure_perplexity, score_rows
from compress.models.heads import LANGUAGE
from compress.models.signals import evaluating
from compress.training.context import TrainingContext
from compress.training.step import Distillation, Score, Step, WrappedStep
from compress.training.trainer import Corrupt

LOG_LIKELIHOOD = "log-likelihood"
"""The mean log-likelihood of a held-out token, in nats."""
NEGATIVE_LOSS = "negative loss"
"""The negative of the stage's loss on held-out rows."""
SCORED_DOCUMENTS: Final = 64
TOKENS_OF_DOCUMENT: Final = 256
"""The number of documents on which a finished language model is scored, and the most
tokens of each: many beginnings have a smaller error than few whole documents."""
TOKENS_OF_BATCH: Final = 2048


@dataclass(frozen=True)
class Scoring:
    """A function that scores a student on `rows` rows. graded: the score is a metric of
    the task, not a loss.

    measure: what the score is: a metric of the task, LOG_LIKELIHOOD or NEGATIVE_LOSS.
    """

    score: Score
    rows: int
    graded: bool = True
    measure: str | None = None


def improves(new: Mapping[str, float], old: Mapping[str, float], rows: int) -> bool:
    """Return True if a student's score has improved or, if the change of its score is
    not significant, its distance.

    Changes within the largest standard error of a proportion of the `rows` that are
    scored are not significant.
    """
    rise = new["score"] - old["score"]
    if abs(rise) > 0.5 / math.sqrt(rows) or "distance" not in old:
        return rise > 0
    return new["distance"] < old["distance"]


def choose_scoring(
    stage: Stage,
    step: Step,
    corrupt: Corrupt | None,
    context: TrainingContext,
    *,
    seed: int,
    teacher_logits: Any,
) -> Scoring | None:
    """Choose the score that selects the best weights of this stage.

    It is the task's metric, or a language model's perplexity on held-out text. A stage
    of open length that has neither, or that learns to write answers, is scored by its
    objective on the validation split.
    """
    if stage.evaluate == 0:
        return None
    reads_logits = _reads_logits(step)
    if stage.data == "task" and stage.head == "task" and reads_logits:
        whole = Evaluator.from_split(
            context.data.task, context.data.validation, context.tokenizer, stage.length
        )
        evaluator, teacher_logits = whole.sample(DECIDING_ROWS, teacher_logits)
        return Scoring(
            scorer(context, evaluator, teacher_logits),
            len(evaluator),
            measure=context.data.task.metric,
        )
    writes = stage.data == "task" and context.task.writes
    if stage.data == "task" and stage.head == "seq2seq" and not writes:
        return Scoring(
            text_scorer(context, stage),
            len(context.data.validation),
            measure=context.data.task.metric,
        )
    is_language_model = (
        stage.head in LANGUAGE and step.student.get_output_embeddings() is not None
    )
    by_language = corrupt is not None and is_language_model and reads_logits
    if not by_language and not stage.open_ended and not writes:
        return None
    rows = context.rows(stage, seed, held_out=True)
    if corrupt is not None and by_language:
        return Scoring(
            language_scorer(context, rows, corrupt),
            len(rows),
            graded=False,
            measure=LOG_LIKELIHOOD,
        )
    score = objective_scorer(step, context, rows, stage.batch, corrupt)
    return Scoring(score, len(rows), graded=False, measure=NEGATIVE_LOSS)


def _reads_logits(step: Step) -> bool:
    """Return True unless the step, or the one that it wraps, compares hidden states or
    attention alone."""
    while isinstance(step, WrappedStep):
        step = step.wrapped
    return (
        not isinstance(step, Distillation) or "logits" in step.objective.student_wants
    )


def text_scorer(context: TrainingContext, stage: Stage) -> Score:
    """Return student -> the task's metrics of the answers that it generates on the
    validation split."""
    task = context.data.task
    split = context.data.validation
    options = stage.rows.options if stage.rows else {}
    labels = np.asarray(split["label"][:])

    def score(student: PreTrainedModel) -> Mapping[str, float]:
        answers = find("t5.answers")(
            student, split, task, context.tokenizer, max_length=stage.length, **options
        )
        values = task.score_rows(answers, labels)
        return values | {"score": values[task.metric]}

    return score


def objective_scorer(
    step: Step,
    context: TrainingContext,
    rows: Dataset,
    batch: int,
    corrupt: Corrupt | None = None,
) -> Score:
    """Return student -> the mean loss of `step` on held-out rows as `distance`, and its
    negative as `score`.

    Means run over all rows together. Rows are corrupted in the same way every time.
    """
    order = np.argsort(whole_numbers(rows, "length"), kind="stable")
    chosen = [order[at : at + batch] for at in range(0, len(order), batch)]
    device = PartialState().device

    def score(student: PreTrainedModel) -> Mapping[str, float]:
        devices = [device] if device.type == "cuda" else []
        with (
            evaluating(student),
            torch.random.fork_rng(devices),
            torch.no_grad(),
            torch.autocast(device.type, torch.bfloat16, enabled=context.bf16),
        ):
            torch.manual_seed(SEED)
            batches = list[dict[str, Any]]()
            for numbers in chosen:
                inputs = context.collate([rows[int(row)] for row in numbers])
                moved = {name: tensor.to(device) for name, tensor in inputs.items()}
                batches.append(corrupt(moved) if corrupt else moved)
            weights = [len(numbers) / len(rows) for numbers in chosen]
            counts = [step.items(inputs) for inputs in batches]
            if any(counts):
                mean = {
                    name: torch.stack([count[name] for count in counts]).mean()
                    for name in counts[0]
                }
                batches = [{**inputs, "items": mean} for inputs in batches]
                weights = [1 / len(batches)] * len(batches)
            losses = [float(step(**inputs)["loss"]) for inputs in batches]
        distance = sum(
            weight * loss for weight, loss in zip(weights, losses, strict=True)
        )
        return {"score": -distance, "distance": distance}

    return score


def language_scorer(context: TrainingContext, rows: Dataset, corrupt: Corrupt) -> Score:
    """Return student -> perplexity on held-out text, and as `score` the mean
    log-likelihood of a token, in nats.

    `distance` is the negative of the score.
    """

    def score(student: PreTrainedModel) -> Mapping[str, float]:
        values = measure_perplexity(
            student, rows, context.collate, corrupt, bf16=context.bf16
        )
        return {
            "score": -values["nll"],
            "distance": values["nll"],
            "perplexity": values["perplexity"],
        }

    return score


def writes_text(stage: Stage, context: TrainingContext) -> bool:
    """Return True if a stage trains a causal language model on running text in one
    language."""
    return (
        stage.continues_text
        and stage.data == "text"
        and stage.rows is not None
        and stage.corrupt is not None
        and (context.corpus is None or not context.corpus.parts)
    )


def encode_held_out(stage: Stage, context: TrainingContext, seed: int) -> Dataset:
    """Encode the first held-out documents, each alone: rows with `document`, its
    number.

    At most SCORED_DOCUMENTS documents, and of each the first rows, about
    TOKENS_OF_DOCUMENT tokens. Raises DataError if there is no text.
    """
    builder = stage.rows
    assert builder is not None, "the stage writes text"
    text = context.text_part(stage, held_out=True)
    most = max(1, TOKENS_OF_DOCUMENT // stage.length)
    rng = np.random.default_rng(seed)
    frame = Frame.from_tokenizer(context.tokenizer)
    found = list[dict[str, Any]]()
    documents = iterate_documents(text, context.tokenizer)
    for number, document in enumerate(islice(documents, SCORED_DOCUMENTS)):
        rows = builder([document], frame, max_length=stage.length, rng=rng)
        for row in islice(rows, most):
            found.append({**row, "length": len(row["input_ids"]), "document": number})
    if not found:
        raise DataError(f"{text.name}: no document is long enough to be scored.")
    return Dataset.from_list(found)


def score_documents(
    model: PreTrainedModel, rows: Dataset, stage: Stage, context: TrainingContext
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Return the sum of -log p of each document of `encode_held_out`, in nats, and its
    number of predicted tokens."""
    model.to(PartialState().device)
    words = Words.from_tokenizer(context.tokenizer).to(PartialState().device)
    assert stage.corrupt is not None, "the stage writes text"
    sums, counts = score_rows(
        model,
        rows,
        np.arange(len(rows)),
        context.collate,
        partial(stage.corrupt, words=words),
        batch=max(1, TOKENS_OF_BATCH // stage.length),
        bf16=context.bf16,
    )
    owners = np.asarray(rows["document"][:])
    nats = np.bincount(owners, sums)
    tokens = np.bincount(owners, counts).astype(int)
    scored = tokens > 0
    return tuple(nats[scored].tolist()), tuple(tokens[scored].tolist())


def scorer(
    context: TrainingContext,
    evaluator: Evaluator,
    teacher_logits: Floats | None,
) -> Score:
    """Return student -> every metric on the evaluator's rows, the task's own as
    `score`.

    With teacher logits, `agreement` and `distance` (`Evaluator.distance`) compare the
    student with the teacher.
    """

    def score(student: PreTrainedModel) -> Mapping[str, float]:
        logits = metrics.logits(
            student, evaluator.rows, context.collate, bf16=context.bf16
        )
        values = evaluator.scores(logits)
        values["score"] = values[evaluator.task.metric]
        if teacher_logits is not None and teacher_logits.shape == logits.shape:
            values["agreement"] = evaluator.agreement(logits, teacher_logits)
            values["distance"] = evaluator.distance(logits, teacher_logits)
        return values

    return score
