"""Initialise a MobileBERT: from an IB-BERT, whose embedding and heads fit it, or from any BERT, of which little does.

From a BERT. Word embeddings become their coordinates along the E directions in which the teacher's normalised
embeddings are largest; the middle third of the trigram map takes them into the D-wide stream by an isometry, positions
and types follow the same way, and the first norm's gain makes the mean square 1 over the vocabulary. So the student
begins with what the teacher's embedding says, up to a rotation, and learns the outer thirds of the trigram from 0.

Nothing rescales a stream without norms, so the layers are drawn to keep its size: every linear map has standard
deviation 1 / sqrt(inputs), which makes outputs as large as inputs and attention scores of order 1, and the last one of
each of N layers 1 / sqrt(N) of it: noise grows 5 times over 12 layers of MobileBERT-tiny, where it would 17,000.
The authors' 0.02 serves where every layer is taught by itself (`from_teacher`): layers then start near the identity.
With only a task to learn, a student of 12 layers drawn by the authors' way, embedding included, still guessed on SST-2
after 100 steps (0.58 of 600 validation rows) where one started as here had 0.81 after 80: one seed each, schedules of
500 and 200 steps, and what embedding and layers do to it apart was not measured.

Shapes: V vocabulary, W width of the teacher's embedding, E of the student's, D hidden.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.errors import StudentError
from compress.models.init_weights import KNOWN, directions, tables, weight_of
from compress.slicing.shape import Shape

_FAMILIES = tuple(family for family in KNOWN if not family.startswith("deberta"))


@torch.no_grad()
def from_teacher(student: PreTrainedModel, teacher: PreTrainedModel) -> None:
    """Copy embeddings, pooler and heads of an IB-BERT; not the embedding's norm, which is of another kind.

    The layers stay as drawn, with the config's `initializer_range`: 0.02, the authors'. Raises StudentError when the
    embeddings differ in shape.
    """
    mine, theirs = _outside_layers(student), _outside_layers(teacher)
    for name in [name for name in mine if name.startswith("embeddings.")]:
        if name not in theirs or mine[name].shape != theirs[name].shape:
            found = tuple(theirs[name].shape) if name in theirs else "absent"
            raise StudentError(
                f"mobilebert.from_teacher: {name} is {tuple(mine[name].shape)} in the student and {found} in the "
                "teacher: give both the same embedding and hidden size, or use mobilebert.from_bert"
            )
    for name in mine.keys() & theirs.keys():
        if mine[name].shape == theirs[name].shape:
            mine[name].copy_(theirs[name])


def _outside_layers(model: PreTrainedModel) -> dict[str, Tensor]:
    """List the weights of embeddings, pooler and heads by their names without the family's prefix."""
    prefix = f"{model.base_model_prefix}."
    named = {name.removeprefix(prefix): parameter.data for name, parameter in model.named_parameters()}
    left_out = ("encoder.", "embeddings.LayerNorm")
    return {name: parameter for name, parameter in named.items() if not name.startswith(left_out)}


@torch.no_grad()
def from_bert(student: PreTrainedModel, teacher: PreTrainedModel) -> None:
    """Copy the teacher's embedding in the student's width, and draw layers so that the stream keeps its size.

    Pooler and heads stay as drawn. Raises StudentError for a teacher whose embedding is not BERT's.
    """
    mine, theirs = Shape.from_config(student.config), Shape.from_config(teacher.config)
    if mine.family != "mobilebert" or theirs.family not in _FAMILIES:
        raise StudentError(
            f"mobilebert.from_bert makes a mobilebert of {', '.join(_FAMILIES)}, not {mine.family} of {theirs.family}"
        )
    if mine.vocabulary != theirs.vocabulary or mine.embedding > mine.hidden:
        raise StudentError(
            f"mobilebert.from_bert: the student has {mine.vocabulary} tokens, an embedding of {mine.embedding} and a "
            f"stream of {mine.hidden}; it needs the teacher's {theirs.vocabulary} tokens, and a stream no narrower "
            "than the embedding"
        )
    base: Any = student.base_model
    _fill_embeddings(base.embeddings, teacher)
    for layer in base.encoder.layer:
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0, 1 / math.sqrt(module.in_features))
        last = layer.output.bottleneck if student.config.use_bottleneck else layer.output
        last.dense.weight.div_(math.sqrt(mine.layers))


def _fill_embeddings(embeddings: Any, teacher: PreTrainedModel) -> None:
    trigram_DE3 = embeddings.embedding_transformation.weight
    known = {weight_of(name): p.data.to(trigram_DE3.device) for name, p in teacher.named_parameters()}
    source = {weight: tensor for weight, tensor in known.items() if weight is not None}
    words_VW, positions_PW, types_TW = tables(teacher, source)
    W, E = words_VW.shape[1], embeddings.embedding_size
    basis_WR, cosine = directions(words_VW, positions_PW, types_TW, keep=min(E, W), eps=1e-12)
    D, R = len(trigram_DE3), basis_WR.shape[1]
    embeddings.word_embeddings.weight.zero_()
    embeddings.word_embeddings.weight[:, :R].copy_(words_VW @ basis_WR)
    into_DR = nn.init.orthogonal_(basis_WR.new_empty(D, R))
    middle = E if embeddings.trigram_input else 0
    trigram_DE3.zero_()
    trigram_DE3[:, middle : middle + R].copy_(into_DR)
    for table, module in ((positions_PW, embeddings.position_embeddings), (types_TW, embeddings.token_type_embeddings)):
        rows = torch.arange(len(module.weight)).clamp(max=len(table) - 1)  # a RoBERTa has one token type
        module.weight.copy_((table @ basis_WR @ into_DR.T)[rows])
    rows_VW = words_VW + positions_PW[:1] + types_TW[:1]
    length = float(rows_VW.norm(dim=-1).mean() * cosine)
    embeddings.LayerNorm.weight.fill_(math.sqrt(D) / length)
    embeddings.LayerNorm.bias.zero_()
