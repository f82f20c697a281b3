"""Model2Vec: static word vectors out of a sentence transformer (Tulkens & van Dongen
2024, Minish Lab, https://github.com/MinishLab/model2vec; no paper). Weights after
Arora, Liang & Ma 2017, "A Simple but Tough-to-Beat Baseline for Sentence Embeddings"
(SIF), ICLR.

from_teacher   v(token) = w(token) P (h(token) - mean h)

    h(token)   mean of the teacher's last hidden states of a text of this token only:
               [CLS] token [SEP]
    P          the leading directions of h over the vocabulary (principal components),
               as many as the student is wide
    w(token)   a / (a + p(token)), a = 1e-4: frequent words say little (SIF, Eq. 1)
    p(token)   by Zipf's law, as 1 / rank, where the rank is the token's place among the
               used tokens of the vocabulary

Shapes: V tokens, D width of the teacher, E width of the student, L tokens of a text
(before, the token, after).

Deviations: the teacher is that of the stage, fine-tuned for its task in
`recipes/static.yaml` rather than a sentence transformer, and the vectors are trained
afterwards. The tokenizer is the teacher's, as student and teacher read the same rows,
so nothing is dropped from the vocabulary and [CLS] and [SEP] are in every text: their
vectors, like those of all special tokens but the unknown one, begin as 0. All vectors
are scaled by one number so that the root mean square of their elements over the
vocabulary is 1 / sqrt(E), which suits a head with default initial weights. SIF's second
step, removing the first principal component, is left out, as in Model2Vec. Unused
places, such as the 994 at the beginning of BERT's vocabulary, have no ranks, as in
Model2Vec (counting them as words costs 5 points of Spearman on STS-B, see docs/LOG.md);
single characters and special tokens do have ranks, so they count as frequent words."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compress.data.masking import Words
from compress.errors import StudentError

TEXTS_PER_BATCH = 512


@torch.no_grad()
def from_teacher(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    *,
    words: Words,
    sif: float = 1e-4,
    batch: int = TEXTS_PER_BATCH,
) -> None:
    """Fill the vectors of a `static-embedding` student; its head keeps its random
    initial weights.

    sif: `a` above; 0 makes all weights 1. Raises StudentError for another family, and
    for a student wider than its teacher.
    """
    if student.config.model_type != "static-embedding":
        raise StudentError(
            "student.init: model2vec.from_teacher fills static-embedding students, not "
            f"{student.config.model_type}; use family: static-embedding, or init: "
            "teacher"
        )
    table_VE: Any = student.get_input_embeddings().weight
    tokens, width = table_VE.shape
    states_VD = _states(teacher, words, tokens, batch)
    if width > states_VD.shape[1]:
        raise StudentError(
            f"student.hidden: {width}; the teacher's states have {states_VD.shape[1]} "
            "dimensions, and the vectors cannot have more: --set "
            f"student.hidden={states_VD.shape[1]}"
        )
    vectors_VE = _components(states_VD, width) * _weights(tokens, sif, words.unused_V)[
        :, None
    ].to(states_VD)
    begin_as_0 = words.special_V[:tokens].clone()
    if words.unknown is not None:
        begin_as_0[words.unknown] = False
    vectors_VE[: len(begin_as_0)][begin_as_0.to(vectors_VE.device)] = 0
    scale = vectors_VE.pow(2).mean().sqrt() * width**0.5
    table_VE.copy_(vectors_VE / scale)


def _states(teacher: PreTrainedModel, words: Words, tokens: int, batch: int) -> Tensor:
    """Average the last hidden states of a text of each token, (V, D)."""
    encoder: Any = (
        teacher.get_encoder()
        if teacher.config.is_encoder_decoder
        else teacher.base_model
    )
    device = encoder.device
    training = encoder.training
    encoder.eval()
    found = []
    for at in range(0, tokens, batch):
        ids_B = torch.arange(at, min(at + batch, tokens), device=device)
        columns = [*words.before, None, *words.after]
        ids_BL = torch.stack(
            [
                ids_B if each is None else torch.full_like(ids_B, each)
                for each in columns
            ],
            1,
        )
        out = encoder(input_ids=ids_BL, attention_mask=torch.ones_like(ids_BL))
        found.append(out.last_hidden_state.float().mean(1))
    encoder.train(training)
    return torch.cat(found)


def _components(states_VD: Tensor, width: int) -> Tensor:
    """Centre the vectors and project them onto their leading directions, the largest
    variance first, (V, E)."""
    centred_VD = (states_VD - states_VD.mean(0)).double()
    _, directions_DD = torch.linalg.eigh(centred_VD.T @ centred_VD)
    kept_DE = directions_DD.flip(1)[:, :width]
    largest_E = kept_DE.abs().argmax(0)
    # otherwise the library decides
    signs_E = kept_DE[largest_E, torch.arange(width, device=kept_DE.device)].sign()
    return (centred_VD @ (kept_DE * signs_E)).to(states_VD)


def _weights(tokens: int, sif: float, unused_V: Tensor | None) -> Tensor:
    """Compute a / (a + p) of each token, (V,); p = 0 for unused places of the
    vocabulary."""
    if sif == 0:
        return torch.ones(tokens)
    used_V = torch.ones(tokens, dtype=torch.bool)
    if unused_V is not None:
        used_V[: len(unused_V)] = ~unused_V[:tokens].to(used_V.device)
    shares_V = used_V / (used_V.cumsum(0) + 1.0).double()
    return (sif / (sif + shares_V / shares_V.sum())).float()
