"""What a model is asked when importance is told from gradients: losses summed over a batch's examples.

    labels    the task's own loss of the examples' labels
    teacher   soft targets (Hinton et al. 2015); a model that answers as its teacher does has no gradient
    drawn     the loss of answers drawn from what the model itself says, for examples without labels: the Fisher
              information is defined by these. Of a model without a head, its hidden states with Gaussian noise

What is drawn depends on an example's tokens alone: not on batches, padding or processes.

Shapes: B batch, L tokens, D hidden, V classes or vocabulary, R answers: of texts B, of tokens those that are real (or
labelled), of spans 2 B, starts and ends.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.errors import PruneError, did_you_mean
from compress.objective import MASKED
from compress.papers import bert, hinton
from compress.papers.bert import IGNORED
from compress.signals import Signals, read

Targets = Literal["labels", "teacher", "drawn"]


def summed(
    student: PreTrainedModel, batch: Mapping[str, Tensor], targets: Targets, teacher: nn.Module | None
) -> Tensor:
    """The sum of the answers' losses, float32. Raises PruneError where the batch or the teacher is lacking."""
    if targets not in get_args(Targets):
        raise PruneError(f"targets: {targets!r}.{did_you_mean(targets, get_args(Targets))}")
    if targets == "teacher" and teacher is None:
        raise PruneError("targets: teacher: no teacher was given; use labels, or drawn where there are none")
    labels = batch.get("labels")
    if targets == "labels" and labels is None:
        raise PruneError("targets: labels: these rows have no labels; use targets: drawn, or teacher")
    shown = read(student, batch, asked(student))
    if shown.logits is None and targets == "labels":
        raise PruneError(f"targets: labels: {type(student).__name__} has no head for them; use targets: drawn")
    chosen_BL = _chosen(student, shown, labels)
    mine_RV = _answers(student, shown, chosen_BL)
    if targets == "labels":
        assert labels is not None
        return bert.labels(mine_RV, _flat(student, shown, labels), None) * len(mine_RV)
    if targets == "drawn":
        return _of_drawn(student, shown, mine_RV, chosen_BL, batch["input_ids"])
    assert teacher is not None
    with torch.no_grad():
        theirs_RV = _answers(student, read(teacher, batch, asked(student)), chosen_BL)
    return _against(student, shown, mine_RV, theirs_RV) * len(mine_RV)


def asked(student: PreTrainedModel) -> frozenset[str]:
    """The signal that a model answers with: logits, or hidden states where it has no head."""
    return frozenset({"layers" if student.base_model is student else "logits"})


def _per_token(student: PreTrainedModel, shown: Signals) -> bool:
    return shown.logits is None or (shown.logits.dim() == 3 and not hasattr(student, "qa_outputs"))


def _chosen(student: PreTrainedModel, shown: Signals, labels: Tensor | None) -> Tensor:
    """(B, L) true where a model that answers per token is asked: at labels, else at real tokens."""
    labelled = labels is not None and shown.logits is not None and labels.shape == shown.logits.shape[:2]
    if labelled and _per_token(student, shown):
        assert labels is not None
        return labels != IGNORED
    return shown.mask_BL.bool()


def _answers(student: PreTrainedModel, shown: Signals, chosen_BL: Tensor) -> Tensor:
    """(R, V) logits, each row one answer; (R, D) hidden states where there is no head."""
    if shown.logits is None:
        return shown.layers[-1][chosen_BL].float()
    if shown.logits.dim() == 2:
        return shown.logits.float()
    if _per_token(student, shown):
        return shown.logits[chosen_BL].float()
    return shown.logits.float().mT.masked_fill(shown.mask_BL[:, None] == 0, MASKED).flatten(0, 1)


def _flat(student: PreTrainedModel, shown: Signals, labels: Tensor) -> Tensor:
    """The labels of `_answers`."""
    if shown.logits is None or shown.logits.dim() == 2:
        return labels
    return labels[labels != IGNORED] if _per_token(student, shown) else labels.flatten()


def _against(student: PreTrainedModel, shown: Signals, mine_RV: Tensor, theirs_RV: Tensor) -> Tensor:
    if shown.logits is None or _is_number(student, mine_RV):
        return hinton.matched_logits(mine_RV, theirs_RV, None)
    if _has_several(student):
        return hinton.soft_labels(mine_RV, theirs_RV, None)
    return hinton.soft_targets(mine_RV, theirs_RV, None)


def _is_number(student: PreTrainedModel, answers_RV: Tensor) -> bool:
    return answers_RV.shape[-1] == 1 or getattr(student.config, "problem_type", None) == "regression"


def _has_several(student: PreTrainedModel) -> bool:
    return getattr(student.config, "problem_type", None) == "multi_label_classification"


def _of_drawn(student: PreTrainedModel, shown: Signals, mine_RV: Tensor, chosen_BL: Tensor, ids_BL: Tensor) -> Tensor:
    """-log p(y) of one y for each answer, drawn from p; of numbers and hidden states 1/2 (z - y)^2, y ~ N(z, 1)."""
    counts = chosen_BL.sum(-1).tolist() if _per_token(student, shown) else [len(mine_RV) // len(ids_BL)] * len(ids_BL)
    said_RV, width = mine_RV.detach(), mine_RV.shape[-1]
    if shown.logits is None or _is_number(student, mine_RV):
        noise_RV = _random(torch.randn, ids_BL, shown.mask_BL, counts, width)
        return 0.5 * (mine_RV - said_RV - noise_RV).pow(2).sum()
    if _has_several(student):
        drawn_RV = (_random(torch.rand, ids_BL, shown.mask_BL, counts, width) < said_RV.sigmoid()).float()
        return bert.labels(mine_RV, drawn_RV, None) * len(mine_RV)
    level_R1 = _random(torch.rand, ids_BL, shown.mask_BL, counts, 1)
    drawn_R = (said_RV.softmax(-1).cumsum(-1) < level_R1).sum(-1).clamp_max(width - 1)
    return bert.labels(mine_RV, drawn_R, None) * len(mine_RV)


def _random(draw: Callable[..., Tensor], ids_BL: Tensor, mask_BL: Tensor, counts: Sequence[int], width: int) -> Tensor:
    """(R, width) numbers, `counts` rows of them for each example, which its tokens alone decide."""
    rows = []
    for ids_L, mask_L, count in zip(ids_BL.cpu(), mask_BL.bool().cpu(), counts, strict=True):
        seed = hash(tuple(ids_L[mask_L].tolist())) % 2**63  # of integers: the same in every process
        rows.append(draw(count, width, generator=torch.Generator().manual_seed(seed)))
    return torch.cat(rows).to(ids_BL.device)
