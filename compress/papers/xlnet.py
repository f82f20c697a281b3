"""Yang et al. 2019, "XLNet: Generalized Autoregressive Pretraining for Language
Understanding", arXiv:1906.08237.

Sec. 2.2, 2.3  permute  a factorisation order: which token the prediction of another may
                        see
Eq. 3, 5                the loss is bert.masked_lm over the targets, each seeing the
                        context and the targets before it

Shapes: B examples, L tokens, P the most targets of a row.

The result has the inputs of transformers' XLNetLMHeadModel: perm_mask (B, L, L), 1
where the first token may not see the second; target_mapping (B, P, L), a one-hot row
for each target; labels (B, P). input_ids do not change: the content stream must see the
targets that come earlier in the order; only the query stream hides them.

Deviations
- no segment recurrence: rows are independent, so the order runs over the whole row;
  theirs permutes within the half that is kept as memory.
- Sec. 3.1 (A.1 in the authors' code): spans of 1 to 5 tokens, each length as likely, as
  the paper has it; their code takes 1 to 5 whole words with p(n) ~ 1/n, and then adds
  single tokens until 85 of 512 are targets.
- special tokens see no target; theirs are ordered like targets, so that [SEP] and [CLS]
  see those that come before.
- transformers' own collator puts [MASK] in the place of the targets, which hides them
  from each other; we do not.
"""

import torch
from torch import Tensor

from compress.data.constants import IGNORE_INDEX
from compress.data.masking import Words
from compress.papers.bert import predictable
from compress.tensors import TensorDict, Tensors


def permute(
    batch: Tensors, words: Words, *, context: int = 6, longest: int = 5
) -> TensorDict:
    """Draw spans of targets and a random order of them (Sec. 2.3, 3.1); a row has at
    least one target.

    A span has 1 to `longest` tokens, at a random place of each stretch of `context`
    times its length, so 1/`context` of the tokens are targets (K = 6).
    """
    open_BL = predictable(batch, words)
    target_BL = torch.stack(
        [_spans(open_L, context, longest) for open_L in open_BL.cpu()]
    ).to(open_BL.device)
    order_BL = torch.rand(target_BL.shape, device=target_BL.device).masked_fill(
        ~target_BL, -1
    )
    hidden_BLL = target_BL[:, None, :] & (order_BL[:, :, None] <= order_BL[:, None, :])
    count_B = target_BL.sum(-1)
    P = max(1, int(count_B.max()))
    place_BP = target_BL.long().argsort(dim=-1, descending=True, stable=True)[:, :P]
    real_BP = torch.arange(P, device=place_BP.device) < count_B[:, None]
    mapping_BPL = (
        torch.nn.functional.one_hot(place_BP, target_BL.shape[1]) * real_BP[:, :, None]
    )
    labels_BP = batch["input_ids"].gather(1, place_BP).where(real_BP, IGNORE_INDEX)
    return dict(batch) | {
        "perm_mask": hidden_BLL.float(),
        "target_mapping": mapping_BPL.float(),
        "labels": labels_BP,
    }


def _spans(open_L: Tensor, context: int, longest: int) -> Tensor:
    """Mark the targets among the predictable positions, (L,); spans ignore the other
    positions between these."""
    places = open_L.nonzero().flatten()
    target_L = torch.zeros_like(open_L)
    begin = 0
    while begin < len(places):
        length = int(torch.randint(1, longest + 1, ()))
        start = begin + int(torch.randint((context - 1) * length + 1, ()))
        target_L[places[start : start + length]] = True
        begin += context * length
    if len(places) and not target_L.any():
        target_L[places[torch.randint(len(places), ())]] = True
    return target_L
