"""Radford et al. 2018, "Improving Language Understanding by Generative Pre-Training"
(GPT).

Eq. 2  P(u) = softmax(h W_e^T), with W_e the table of words
Eq. 5  L3(C) = L2(C) + lambda L1(C): the task's loss, and the language model's on the
       texts of the same rows (`next_token`)

Shapes: B texts, L tokens, D hidden, V vocabulary, R predicted tokens.

Deviations
- The paper sums over tokens and texts. As in the authors' code (openai/
  finetune-transformer-lm, train.py), L1 is the mean over the tokens of a text, then
  over texts, and L2 the mean over texts.
- No start, delimiter and extract tokens are added: a head of transformers reads the
  last token of the text, and a pair is joined as the tokenizer joins pairs. So no new
  tokens must be learned, and the shipped model reads what its tokenizer gives.
- A pair is read once, in its own order; the paper reads both orders of a similarity
  task and adds their states.
- Dropout on the table of words stops at the inputs; in the authors' code the same mask
  also changes eq. 2.
"""

from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from compress import families
from compress.errors import ObjectiveError
from compress.models.dropout import drop
from compress.models.signals import Signals
from compress.tensors import TensorDict, Tensors
from compress.training.objective import Objective, weigh_part
from compress.training.step import Distillation


def next_token(
    states_BLD: Tensor, table_VD: Tensor, ids_BL: Tensor, mask_BL: Tensor
) -> Tensor:
    """-log softmax(h W_e^T) of each next token, mean over the tokens of a text after
    its first, then over texts; a text of one token counts as 0."""
    real_BL = mask_BL.bool()
    predicted_BL = real_BL[:, :-1] & real_BL[:, 1:]
    logits_RV = states_BLD[:, :-1][predicted_BL] @ table_VD.T
    losses_R = cross_entropy(
        logits_RV.float(), ids_BL[:, 1:][predicted_BL], reduction="none"
    )
    counts_B1 = predicted_BL.sum(1, keepdim=True).clamp_min(1)
    shares_BL = predicted_BL / counts_B1
    return (losses_R * shares_BL[predicted_BL]).sum() / len(ids_BL)


class AuxiliaryObjective(Distillation):
    """step(**batch) -> `objective` + weight * L1 (eq. 5), in one forward pass.

    weight    lambda (Sec. 4.1)
    dropout   on the state that a classifier reads (Sec. 4.1), unless its head has its
              own dropout

    Raises ObjectiveError for a student that does not predict the next token from its
    table of words.
    """

    # each token of the vocabulary may be the next
    only_rows = False

    def __init__(
        self,
        student: PreTrainedModel,
        teacher: nn.Module | None,
        objective: Objective,
        *,
        weight: Annotated[float, Field(ge=0)] = 0.5,
        dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1,
    ) -> None:
        _check_decoder(student.config)
        objective.student_wants |= {"layers"}
        super().__init__(student, teacher, objective)
        self.weight = weight
        head = [part for part in student.children() if part is not student.base_model]
        self.hooks = [
            layer.register_forward_pre_hook(
                lambda layer, given: (
                    (drop(given[0], dropout),) if layer.training else None
                ),
            )
            for layer in head
            if not any(isinstance(part, nn.Dropout) for part in head)
        ]

    def items(self, batch: Tensors) -> TensorDict:
        texts = torch.tensor(float(len(batch["input_ids"])))
        return super().items(batch) | {"text": texts.to(batch["input_ids"].device)}

    def compute_losses(
        self,
        student: Signals,
        teacher: Signals | None,
        batch: Tensors,
        items: Tensors | None,
    ) -> TensorDict:
        parts = super().compute_losses(student, teacher, batch, items)
        table: Any = self.student.get_input_embeddings()
        language = self.weight * next_token(
            student.layers[-1], table.weight, batch["input_ids"], student.mask_BL
        )
        if items is not None:
            language = weigh_part(language, len(batch["input_ids"]), items["text"])
        total = parts["total"] + language
        return parts | {"total": total, "gpt.next_token": language}

    def finish(self) -> None:
        """Let the head read all of its states again."""
        for hook in self.hooks:
            hook.remove()


def _check_decoder(config: Any) -> None:
    """Raise ObjectiveError for a model whose states do not predict the next token by
    eq. 2."""
    reason = ""
    if not families.find(config.model_type).looks_back:
        reason = "is not known to predict the next token"
    elif not config.tie_word_embeddings:
        reason = "has a separate output layer, which a classifier does not load"
    if reason:
        raise ObjectiveError(
            f"gpt.AuxiliaryObjective: this {config.model_type} {reason}; expected a "
            "decoder whose output layer is its table of words (tie_word_embeddings), "
            "such as GPT-2, or leave the step out of the stage"
        )
