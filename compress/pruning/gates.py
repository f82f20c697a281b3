"""Gates: a factor of 1 on every unit, and how each example's loss changes with it.

With a gate g_u on all that shows of unit u (`taps`), d loss / d g_u = sum of activation times gradient over the unit's
activations and the example's real tokens. One backward pass over the sum of a batch's losses gives it for every
example apart, as no example reads another. A head's gate is that of all its rows. A layer's gate leads from its input
to its output, x + g (f(x) - x): at 0 the layer is passed over.

Shapes: B batch, L tokens, D any width, U units of a group, H heads, K head size.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.errors import PruneError
from compress.pruning.hooks import KEY, Tap, evaluating, over_tokens, watching, watching_layers
from compress.pruning.importance import Batches, Targets
from compress.slicing.plan import LAYERS, Group, SlicePlan

SAME = 1e-6
"""A mean loss against the teacher, in nats, below which both say the same."""
Gradients = dict[Group, Tensor]
"""(B, U) of each group: the derivative of each example's loss by each unit's gate, float32."""


def gradients(student: PreTrainedModel, batches: Batches, plan: SlicePlan, *, targets: Targets) -> Iterator[Gradients]:
    """The gates' gradients of every batch. The student is not changed, and answers as when it is used.

    Raises PruneError where the student answers as its teacher does: what is left of the gradient is rounding.
    """
    noted, total, rows = _Noted(plan), 0.0, 0
    with _frozen(student, plan), noted.on(student):
        for batch in batches:
            noted.begin(batch["attention_mask"])
            with batches.computing():
                loss = batches.loss(student, batch, targets)
            loss.backward()
            total, rows = total + float(loss.detach()), rows + len(batch["attention_mask"])
            yield noted.found()
    if targets == "teacher" and rows and total / rows < SAME:
        raise PruneError(
            "targets: teacher: the student answers as its teacher does, so there is nothing to tell importance from; "
            "use targets: labels, or drawn"
        )


@dataclass
class _Noted:
    """What the backward pass of one batch has shown so far."""

    plan: SlicePlan
    mask_BL: Tensor = field(default_factory=lambda: torch.empty(0))
    sums: Gradients = field(default_factory=dict)

    def on(self, student: PreTrainedModel) -> ExitStack:
        """While open, forward and backward passes are noted."""
        hooks = ExitStack()
        hooks.enter_context(watching(student, self.plan, self._see))
        hooks.enter_context(watching_layers(student, self.plan, self._see_layer))
        return hooks

    def begin(self, mask_BL: Tensor) -> None:
        self.mask_BL, self.sums = mask_BL, {}

    def found(self) -> Gradients:
        """Heads are the sum of their rows; a head may be in several blocks."""
        sums, self.sums = self.sums, {}
        for rows, heads in self.plan.heads.items():
            if rows.axis == "value":
                of_BH = sums[rows].view(len(self.mask_BL), self.plan.sizes.heads, -1).sum(-1)
                sums[heads] = sums[heads] + of_BH if heads in sums else of_BH
        return sums

    def _see(self, tap: Tap, activation: Tensor) -> None:
        groups = [None if group is None or group.axis == KEY else group for group in tap.groups]
        if not any(groups) or not activation.requires_grad:
            return
        value = activation.detach()  # the hook must not hold what it hangs on

        def note(gradient: Tensor) -> None:
            product_BD = over_tokens(value.float() * gradient.float(), self.mask_BL)
            for group, part_BU in zip(groups, product_BD.chunk(len(groups), -1), strict=True):
                if group is not None:
                    self._add(group, part_BU)

        activation.register_hook(note)

    def _see_layer(self, number: int, before_BLD: Tensor, after_BLD: Tensor) -> None:
        if not after_BLD.requires_grad:
            return
        change_BLD = (after_BLD - before_BLD).detach()

        def note(gradient_BLD: Tensor) -> None:
            product_BD = over_tokens(change_BLD.float() * gradient_BLD.float(), self.mask_BL)
            of_BN = product_BD.new_zeros(len(product_BD), self.plan.groups[LAYERS])
            of_BN[:, number] = product_BD.sum(-1)
            self._add(LAYERS, of_BN)

        after_BLD.register_hook(note)

    def _add(self, group: Group, of_BU: Tensor) -> None:
        self.sums[group] = self.sums[group] + of_BU if group in self.sums else of_BU


@contextmanager
def _frozen(student: PreTrainedModel, plan: SlicePlan) -> Iterator[None]:
    """While open, the student is in eval mode and gradients begin at its embeddings: none of weights are computed."""
    wanted = [parameter for parameter in student.parameters() if parameter.requires_grad]
    words = [student.get_submodule(name) for name in plan.modules("words")]
    with ExitStack() as restored:
        restored.enter_context(evaluating(student))
        for parameter in wanted:
            restored.callback(parameter.requires_grad_, True)
        student.requires_grad_(False)
        for table in words:
            if isinstance(table, nn.Embedding):
                restored.callback(table.register_forward_hook(_begins).remove)
        yield


def _begins(module: nn.Module, args: object, out: Tensor) -> Tensor:
    return out.requires_grad_()
