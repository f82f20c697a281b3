"""Score what benchmarks/recipes_for_real.py trains: the error of each row of a test split, or held-out document."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from transformers import PreTrainedModel

from compress.config.stages import Stage
from compress.config.term import Term
from compress.data.collate import Seq2SeqCollate
from compress.data.constants import IGNORE_INDEX
from compress.data.corpus import Corpus, build_rows, encode_corpus
from compress.data.masking import Words, count_tokens
from compress.errors import DataError
from compress.evaluation import metrics
from compress.evaluation.evaluator import Evaluator
from compress.evaluation.perplexity import logits_at
from compress.io import hash_value
from compress.jobs.job import Job
from compress.jobs.stages import StageModels
from compress.models.loader import load_result
from compress.models.signals import evaluating
from compress.papers import oord, q8bert, t5
from compress.slicing.shape import Shape
from compress.training import stage as training_stage
from compress.training.generation import sample_continuations
from compress.training.objective import Objective
from compress.training.stage import stage_seed
from compress.training.step import Step

DOCUMENTS, ROWS = 120, 12
"""Held-out documents that are scored, and the most rows of each."""
SPAN = 3
"""The mean length of the spans that T5 is asked for (Raffel et al. 2020, arXiv:1910.10683, Sec. 3.3.4)."""
Scored = tuple[dict[str, Any], NDArray[Any]]
"""What was found, and the error of each row or document."""


def score_majority(job: Job) -> Scored:
    """Score the most frequent class of the training rows."""
    data = job.models.context.data
    assert data.test is not None
    wrong = np.asarray(data.test["label"][:]) != np.bincount(data.train["label"][:]).argmax()
    return {"score": 1 - wrong.mean()}, wrong.astype(float)


def score_task(job: Job, *, int8: bool) -> dict[str, Scored]:
    """Run the stages; score the student on the test split, and as `without texts` what it was before it read these.

    The error is 1 for each row that is answered wrong, else 0; of questions 1 - F1, of rankings 1 - nDCG@10.
    """
    models = job.models
    context, last = models.context, models.recipe.stages[-1]
    student = models.run_stages(models.recipe.stages, teacher_logits=job.teacher_logits)
    assert context.data.test is not None
    exam = Evaluator.from_split(context.data.task, context.data.test, context.tokenizer, last.length)

    def score(model: Any, *, bf16: bool) -> Scored:
        scores = exam.example_scores(metrics.logits(model, exam.rows, context.collate, bf16=bf16))
        assert scores is not None
        return {"score": scores.mean()}, 1 - scores

    if int8:
        rows = context.rows(models.recipe.training[-1], models.run.seed)
        round_to_int8(student, context.collate(list(rows.select(range(min(256, len(rows)))))))
    ours = score(student, bf16=context.bf16 and not int8)
    ours[0]["parameters"] = student.num_parameters()
    found = {"recipe": ours}
    if isinstance(last, Stage) and last.corpus:
        before = models.run.result(models.recipe.stages[-2].name)
        found["without texts"] = score(load_result(before, last.head, context.kind), bf16=context.bf16)
    return found


def round_to_int8(student: Any, batch: Mapping[str, Tensor]) -> None:
    """Let a model compute as its int8 file will, with the ranges that it shows on a batch."""
    labels = Objective((Term("bert.labels"),), Shape.from_config(student.config), kind="classification")
    step = q8bert.QuantizationAware(student, None, labels)
    with torch.no_grad():
        step.train()(**batch)


def score_text(models: StageModels, stages: Sequence[Any], measure: str, *, untrained: bool) -> Scored:
    """Run stages on text, and score each held-out document by what `measure` says: see Proof. Of stages that learn to
    write a task's answers, score each row of the test split.

    untrained  train nothing: score an n-gram of the rows that the last stage reads
    """
    last = stages[-1]
    if untrained:
        wrong = nats(models, last)
        return {"nats": wrong.mean()}, wrong
    with patch.object(training_stage, "train", wraps=training_stage.train) as train:
        student = models.run_stages(stages)
    found: dict[str, Any] = {"parameters": student.num_parameters()}
    if last.data == "task":
        wrong = answer(student, models, last)
        return found | {"score": 1 - wrong.mean()}, wrong
    if measure == "rate":
        found["tokens"], wrong = detect(train.call_args.args[0], models, last)
    elif measure == "kl":
        teacher = models.teacher(last)
        assert teacher is not None
        wrong = kl_on_own_text(student, teacher.model, models, last)
        return found | {"kl": wrong.mean()}, wrong
    else:
        wrong = nats(models, last, student)
        if (teacher := models.teacher(last)) is not None and measure == "nats and teacher":
            found["teacher"] = nats(models, last, teacher.model).mean()
    return found | {"nats": wrong.mean()}, wrong


def answer(student: Any, models: StageModels, stage: Stage) -> NDArray[Any]:
    """Return 1 for each row of the test split whose likeliest answer is not its label, else 0."""
    context = models.context
    data = context.data
    assert data.test is not None
    log_p_NC = t5.answers(student, data.test, data.task, context.tokenizer, max_length=stage.length)
    return (log_p_NC.argmax(1) != np.asarray(data.test["label"][:])).astype(float)


def held_out(models: StageModels, stage: Stage) -> Iterator[Dataset]:
    """Yield the rows that a stage makes of each held-out document by itself; the same ones for every seed."""
    context = models.context
    assert context.corpus is not None
    text = context.corpus.part(True)
    for number, document in zip(range(DOCUMENTS), text.documents(), strict=False):
        key = hash_value([text.fingerprint, number])
        alone = Corpus(f"document {number}", key, partial(_once, document))
        with suppress(DataError):  # too short
            if stage.rows is None:
                rows = encode_corpus(alone, context.tokenizer, stage.length)
            else:
                rows = build_rows(
                    alone,
                    context.tokenizer,
                    stage.rows.function,
                    stage.rows.by,
                    stage.rows.options,
                    max_length=stage.length,
                    seed=0,
                )
            yield rows.select(range(min(len(rows), ROWS)))


def _once(document: str) -> Iterator[str]:
    return iter([document])


def nats(models: StageModels, stage: Stage, student: Any = None) -> NDArray[Any]:
    """Return the mean -log p of the tokens that the stage's corruption asks for in each held-out document.

    None as the student: an n-gram of the rows that the stage reads.
    """
    context, corrupt = models.context, stage.corrupt
    read = context.rows(stage, stage_seed(stage, models.run))
    words = Words.from_tokenizer(context.tokenizer)
    words = replace(words, counts_V=count_tokens(read, words.size))
    collate = context.collate
    if student is not None and stage.head == "seq2seq":
        collate = Seq2SeqCollate(context.tokenizer, student)
    model = None
    if student is None and corrupt is not None:
        seen = read.select(range(min(len(read), (stage.steps or 1) * stage.batch)))
        model = NGram(seen["input_ids"], words.size)
    found = []
    torch.manual_seed(0)
    for rows in held_out(models, stage):
        batch = collate(list(rows))
        batch = corrupt(batch, words=words) if corrupt is not None else batch
        at_BL = batch["labels"] != IGNORE_INDEX
        if not at_BL.any():
            continue
        if model is not None:
            spans = stage.head == "seq2seq"
            asked = model.nats_of_spans(batch, words.special_V) if spans else model.nats(batch, words.mask)
            found.append(asked.mean())
            continue
        batch = {name: value.to(student.device) for name, value in batch.items()}
        with evaluating(student), torch.no_grad(), torch.random.fork_rng():
            logits_RV = logits_at(student, batch, at_BL).float()
            found.append(float(cross_entropy(logits_RV, batch["labels"][at_BL])))
    return np.array(found)


def detect(step: Any, models: StageModels, stage: Stage) -> tuple[NDArray[Any], NDArray[Any]]:
    """Let a step's generator replace tokens of held-out text, and its discriminator tell which.

    Returns of each token its id, whether it is a replacement and the number of its document, (3, tokens); and the mean
    -log p of the discriminator in each document.
    """
    context, corrupt, words = models.context, stage.corrupt, Words.from_tokenizer(models.context.tokenizer)
    assert corrupt is not None
    detector, seen = step.discriminate.student, dict[str, Any]()
    step.discriminate.register_forward_pre_hook(lambda module, args, batch: seen.update(batch), with_kwargs=True)
    detector.register_forward_hook(lambda module, args, out: seen.update(logits=out.logits))
    tokens, found = [], []
    torch.manual_seed(0)
    with evaluating(step), torch.no_grad():
        for number, rows in enumerate(held_out(models, stage)):
            batch = corrupt(context.collate(list(rows)), words=words)
            step(**{name: value.to(detector.device) for name, value in batch.items()})
            real_BL, replaced_BL = seen["attention_mask"].bool(), seen["labels"]
            wrong_BL = binary_cross_entropy_with_logits(seen["logits"].float(), replaced_BL.float(), reduction="none")
            ids_T = seen["input_ids"][real_BL]
            tokens.append(torch.stack([ids_T, replaced_BL[real_BL], torch.full_like(ids_T, number)]).cpu().numpy())
            found.append(float(wrong_BL[real_BL].mean()))
    return np.concatenate(tokens, 1), np.array(found)


def guess_by_rate(tokens: NDArray[Any]) -> Scored:
    """Score how often the same token is a replacement at all other places; mean -log p of each document."""
    ids, replaced, document = tokens
    times, of_them = np.bincount(ids), np.bincount(ids, replaced)
    p = (of_them[ids] - replaced + replaced.mean()) / times[ids]
    wrong = np.bincount(document, -np.log(np.where(replaced > 0, p, 1 - p))) / np.bincount(document)
    return {"nats": wrong.mean()}, wrong


def kl_on_own_text(student: Any, teacher: Any, models: StageModels, stage: Stage) -> NDArray[Any]:
    """Return the mean KL(student || teacher), in nats, at the tokens that the student writes after 16 tokens of each
    document's rows."""
    context = models.context
    torch.manual_seed(0)
    found = []
    for rows in held_out(models, stage):
        first = context.collate(list(rows))
        batch = {name: value[:, :16].to(student.device) for name, value in first.items() if value.ndim == 2}
        pad = context.tokenizer.pad_token_id
        with evaluating(student), torch.no_grad():
            text = sample_continuations(student, batch, prompt=16, new_tokens=32, pad=pad, temperature=1.0)
            own, his = (
                model(input_ids=text["input_ids"], attention_mask=text["attention_mask"]).logits.log_softmax(-1)
                for model in (student, teacher)
            )
            kl_BL = (own.exp() * (own - his)).sum(-1)
        found.append(float(kl_BL[text["labels"] != IGNORE_INDEX].mean()))
    return np.array(found)


class NGram:
    """A bigram model of both neighbours: P(w | left, right) ~ P(w | left) P(right | w); Witten and Bell's smoothing."""

    def __init__(self, texts: Any, size: int) -> None:
        pairs = np.zeros((size, size))
        for ids in texts:
            np.add.at(pairs, (np.asarray(ids[:-1]), np.asarray(ids[1:])), 1)
        self.single = (pairs.sum(0) + 1) / (pairs.sum() + size)
        kinds = (pairs > 0).sum(1, keepdims=True)
        self.after = (pairs + np.maximum(kinds, 1) * self.single) / (pairs.sum(1, keepdims=True) + np.maximum(kinds, 1))

    def nats(self, batch: Mapping[str, Tensor], mask: int | None) -> NDArray[Any]:
        """Return -log P of each label, given its neighbours as far as they are to be seen."""
        ids, labels = batch["input_ids"].numpy(), batch["labels"].numpy()
        found = []
        for row, at in zip(*np.nonzero(labels != IGNORE_INDEX), strict=True):
            left = right = None
            if "target_mapping" in batch:  # places of the targets, whose neighbours may be targets too
                place = int(batch["target_mapping"][row, at].argmax())
                targets = set(batch["target_mapping"][row].argmax(-1)[batch["labels"][row] != IGNORE_INDEX].tolist())
                left = ids[row, place - 1] if place - 1 not in targets else None
                right = ids[row, place + 1] if place + 1 < ids.shape[1] and place + 1 not in targets else None
            elif mask in ids:
                left = ids[row, at - 1] if ids[row, at - 1] != mask else None
                right = ids[row, at + 1] if at + 1 < ids.shape[1] and ids[row, at + 1] != mask else None
            else:
                left = ids[row, at]
            p_V = self.single if left is None else self.after[left]
            p_V = p_V if right is None else p_V * self.after[:, right]
            found.append(-math.log(p_V[labels[row, at]] / p_V.sum()))
        return np.array(found)

    def nats_of_spans(self, batch: Mapping[str, Tensor], special_V: Tensor) -> NDArray[Any]:
        """Return -log P of each label of corrupted spans, given the word before it in the text.

        The sentinels' order and the end are known; a span ends after each of its words with p = 1 / SPAN.
        """
        found = []
        for ids_L, labels_M in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
            left, begins = None, True
            for label in labels_M:
                if label == IGNORE_INDEX:
                    break
                if special_V[label]:
                    found.append(0.0 if begins else math.log(SPAN))
                    at = ids_L.index(label) if label in ids_L else 0
                    left, begins = ids_L[at - 1] if at else None, True
                    continue
                p_V = self.single if left is None else self.after[left]
                found.append(-math.log(p_V[label] * (1 if begins else 1 - 1 / SPAN)))
                left, begins = label, False
        return np.array(found)


class TwoViews(Step):
    """Tell the vector of a text, under another dropout, from those of the other texts of the batch; without a teacher.

    SimCSE without labels: Gao et al. 2021, arXiv:2104.08821, Eq. 4, with its temperature.
    """

    student: PreTrainedModel
    only_rows = True

    def __init__(self, student: Any, teacher: Any, objective: Any) -> None:
        super().__init__()
        self.student = student

    def forward(self, **batch: Any) -> dict[str, Tensor]:
        inputs = {name: value for name, value in batch.items() if name not in ("labels", "row")}
        one_BD, other_BD = (self.student(**inputs).sentence_embedding.float() for _ in range(2))
        loss = oord.infonce(one_BD, other_BD, temperature=0.05)
        return {"loss": loss, "two views": loss.detach()}
