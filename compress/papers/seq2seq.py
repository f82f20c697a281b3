"""Shleifer & Rush 2020, "Pre-trained Summarization Distillation", arXiv:2010.13002.

Direct distillation: L = a_data L_data + a_logits L_logits + a_hidden L_hidden, for
encoder-decoders
    bert.masked_lm                  L_data: cross entropy of the target tokens
    distilbert.masked_soft_targets  L_logits: T^2 KL over the target tokens, T = 2
                                    (authors' code)
    decoder_hidden, encoder_hidden  L_hidden: squared distance of the states of matched
                                    layers

Shapes: B examples, L tokens (of the target for decoder_hidden, of the source for
encoder_hidden), D hidden.

Deviations from the authors' code:
- every target token counts. Theirs counts positions whose decoder input is not the
  padding token: T5 starts with that token, so its first prediction is dropped.
- `normalise` layer-normalises each token's state. Theirs normalises over batch, tokens
  and width at once, so a state depends on the padding and on the other examples.
- layers are matched by their outputs (`layers: uniform`, or pairs); theirs by the
  inputs of the copied layer.
"""

from torch import Tensor
from torch.nn.functional import layer_norm

from compress.papers.tinybert import hidden
from compress.training.reads import reads


def hidden_distance(
    student_BLD: Tensor, teacher_BLD: Tensor, mask_BL: Tensor, *, normalise: bool
) -> Tensor:
    """MSE(H^S, H^T) over real tokens and the width; normalise: after a layer norm
    without parameters. Equal widths."""
    if normalise:
        D = student_BLD.shape[-1:]
        student_BLD = layer_norm(student_BLD.float(), D)
        teacher_BLD = layer_norm(teacher_BLD.float(), D)
    return hidden(student_BLD, teacher_BLD, mask_BL)


@reads("layers", per="label", mask="labels")
def decoder_hidden(
    student_BLD: Tensor, teacher_BLD: Tensor, mask_BL: Tensor, *, normalise: bool = True
) -> Tensor:
    """L_hidden of one pair of decoder layers, over the target tokens."""
    return hidden_distance(student_BLD, teacher_BLD, mask_BL, normalise=normalise)


@reads("encoder_layers", per="token")
def encoder_hidden(
    student_BLD: Tensor, teacher_BLD: Tensor, mask_BL: Tensor, *, normalise: bool = True
) -> Tensor:
    """L_hidden of one pair of encoder layers, over the source tokens."""
    return hidden_distance(student_BLD, teacher_BLD, mask_BL, normalise=normalise)
