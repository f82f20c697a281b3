"""Initialise a MobileBERT: from an IB-BERT, whose embedding and heads fit, or from any
BERT, of which only little fits.

From a BERT. Word embeddings become their coordinates along the E directions in which
the teacher's normalised embeddings are largest; the middle third of the trigram map
embeds them isometrically into the D-wide stream, positions and types go the same way,
and the first norm's gain makes the mean square 1 over the vocabulary. So the student
begins with the teacher's embedding, up to a rotation, and learns the outer thirds of
the trigram from 0.

Without norms nothing rescales the stream, so the layers are drawn to preserve its size:
every linear map has standard deviation 1 / sqrt(inputs), which makes outputs as large
as inputs and attention scores of order 1, and the last one of each of N layers 1 /
sqrt(N) of that. Noise then grows 5-fold over 12 layers of MobileBERT-tiny, instead of
17,000-fold. The authors' 0.02 works if every layer is taught separately
(`from_teacher`): layers then start near the identity. Trained on a task alone, a
student of 12 layers drawn the authors' way, embedding included, still guessed on SST-2
after 100 steps (0.58 of 600 validation rows), while one initialised as here had 0.81
after 80: one seed each, schedules of 500 and 200 steps; the effects of embedding and
layers were not measured separately.

Shapes: V vocabulary, W width of the teacher's embedding, E of the student's, D hidden.
"""

import math
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from compress import families
from compress.errors import StudentError
from compress.models.init_weights import (
    directions,
    strip_prefix,
    tables,
    weights_by_role,
)
from compress.slicing.shape import Shape
from compress.tensors import TensorDict


@torch.no_grad()
def from_teacher(student: PreTrainedModel, teacher: PreTrainedModel) -> None:
    """Copy embeddings, pooler and heads of an IB-BERT, but not the embedding's norm,
    which is of another kind.

    The layers stay as drawn, with the config's `initializer_range`: the authors' 0.02.
    Raises StudentError if the embeddings differ in shape.
    """

    def copied(model: PreTrainedModel) -> TensorDict:
        named = strip_prefix(model, dict(model.named_parameters()))
        left_out = ("encoder.", "embeddings.LayerNorm")
        return {
            name: each for name, each in named.items() if not name.startswith(left_out)
        }

    mine = copied(student)
    theirs = copied(teacher)
    for name in [name for name in mine if name.startswith("embeddings.")]:
        if name not in theirs or mine[name].shape != theirs[name].shape:
            found = tuple(theirs[name].shape) if name in theirs else "absent"
            raise StudentError(
                f"mobilebert.from_teacher: {name} is {tuple(mine[name].shape)} in the "
                f"student and {found} in the teacher: give both the same embedding and "
                "hidden size, or use mobilebert.from_bert"
            )
    for name in mine.keys() & theirs.keys():
        if mine[name].shape == theirs[name].shape:
            mine[name].copy_(theirs[name])


@torch.no_grad()
def from_bert(student: PreTrainedModel, teacher: PreTrainedModel) -> None:
    """Copy the teacher's embedding at the student's width, and draw layers that
    preserve the size of the stream.

    Pooler and heads stay as drawn. Raises StudentError unless the teacher's embedding
    is BERT's.
    """
    mine = Shape.from_config(student.config)
    theirs = Shape.from_config(teacher.config)
    if mine.family != "mobilebert" or not families.find(theirs.family).bert_embedding:
        known = families.names("bert_embedding")
        raise StudentError(
            f"mobilebert.from_bert makes a mobilebert of {known}, not {mine.family} of "
            f"{theirs.family}"
        )
    if mine.vocabulary != theirs.vocabulary or mine.embedding > mine.hidden:
        raise StudentError(
            f"mobilebert.from_bert: the student has {mine.vocabulary} tokens, an "
            f"embedding of {mine.embedding} and a stream of {mine.hidden}; it needs "
            f"the teacher's {theirs.vocabulary} tokens, and a stream no narrower than "
            "the embedding"
        )
    base: Any = student.base_model
    _fill_embeddings(base.embeddings, teacher)
    for layer in base.encoder.layer:
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0, 1 / math.sqrt(module.in_features))
        last = (
            layer.output.bottleneck if student.config.use_bottleneck else layer.output
        )
        last.dense.weight.div_(math.sqrt(mine.layers))


def _fill_embeddings(embeddings: Any, teacher: PreTrainedModel) -> None:
    trigram_DE3 = embeddings.embedding_transformation.weight
    source = {
        weight: tensor.to(trigram_DE3.device)
        for weight, tensor in weights_by_role(teacher).items()
    }
    words_VW, positions_PW, types_TW = tables(teacher, source)
    W = words_VW.shape[1]
    E = embeddings.embedding_size
    basis_WR, cosine = directions(
        words_VW, positions_PW, types_TW, keep=min(E, W), eps=1e-12
    )
    D = len(trigram_DE3)
    R = basis_WR.shape[1]
    embeddings.word_embeddings.weight.zero_()
    embeddings.word_embeddings.weight[:, :R].copy_(words_VW @ basis_WR)
    into_DR = nn.init.orthogonal_(basis_WR.new_empty(D, R))
    middle = E if embeddings.trigram_input else 0
    trigram_DE3.zero_()
    trigram_DE3[:, middle : middle + R].copy_(into_DR)
    for table, module in (
        (positions_PW, embeddings.position_embeddings),
        (types_TW, embeddings.token_type_embeddings),
    ):
        # a RoBERTa has one token type
        rows = torch.arange(len(module.weight)).clamp(max=len(table) - 1)
        module.weight.copy_((table @ basis_WR @ into_DR.T)[rows])
    rows_VW = words_VW + positions_PW[:1] + types_TW[:1]
    length = float(rows_VW.norm(dim=-1).mean() * cosine)
    embeddings.LayerNorm.weight.fill_(math.sqrt(D) / length)
    embeddings.LayerNorm.bias.zero_()
