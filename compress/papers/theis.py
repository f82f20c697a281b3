"""Theis et al. 2018, "Faster gaze prediction with dense networks and Fisher pruning",
arXiv:1801.05787. Kwon et al. 2022, "A Fast Post-Training Pruning Framework for
Transformers", arXiv:2204.09656.

Theis, Sec. 2.1, Eq. 6-7  fisher  1/2N sum_n g_nu^2, g_nu = sum of activation *
                                  dL/dactivation of example n
Kwon, Sec. 4.1, Eq. 8     fisher  the diagonal of the Fisher information of masks on
                                  heads and neurons

Shapes: B examples, U units of a group.

Deviations
- the constant 1/2 is left out.
- Kwon et al. go on to rearrange the mask within a layer, and to tune it; neither is
  done here.
- hidden widths and layers have gates too, which is ours.
- with targets: labels, as in both papers, it is the empirical Fisher information;
  targets: drawn is the true one, by one draw for each example.
"""

from torch import Tensor
from transformers import PreTrainedModel

from compress.pruning.importance import Batches, Targets, gradients
from compress.slicing.plan import Group, SlicePlan
from compress.slicing.select import Importance


def fisher(
    student: PreTrainedModel,
    batches: Batches,
    plan: SlicePlan,
    *,
    targets: Targets = "labels",
) -> Importance:
    """Sum (dL/dg_u)^2 of the gate g_u of every unit and layer, over the examples of
    these batches."""
    found = dict[Group, Tensor]()
    for of_batch in gradients(student, batches, plan, targets=targets):
        for group, gradient_BU in of_batch.items():
            found[group] = found.get(group, 0) + gradient_BU.square().sum(0)
    return found
