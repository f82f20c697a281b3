"""Floating-point operations of a forward pass, counted by torch on the real graph rather than by a formula."""

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


@torch.inference_mode()
def flops_per_token(model: nn.Module, length: int = 128) -> float:
    """FLOPs (a multiply-add is two) of one forward pass over `length` tokens, divided by `length` (less where the
    model has fewer positions).

    Counts matrix products, attention included; embedding look-ups, norms and activations count nothing.
    """
    device = next(model.parameters()).device
    length = min(length, getattr(model.config, "max_position_embeddings", length) - 2)
    ids_BL = torch.ones(1, length, dtype=torch.long, device=device)
    training, learned = model.training, [each for each in model.parameters() if each.requires_grad]
    model.eval()
    # the counter asks what wants a gradient for its history, and a module may be given a parameter, which has none here
    for parameter in learned:
        parameter.requires_grad_(False)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids_BL, attention_mask=torch.ones_like(ids_BL))
    for parameter in learned:
        parameter.requires_grad_(True)
    model.train(training)
    return counter.get_total_flops() / length


def parameters(model: nn.Module) -> int:
    """Number of parameters, each tied one once."""
    return sum(parameter.numel() for parameter in model.parameters())
