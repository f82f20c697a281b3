"""Molchanov et al. 2017, "Pruning Convolutional Neural Networks for Resource Efficient
Inference", arXiv:1611.06440. Molchanov et al. 2019, "Importance Estimation for Neural
Network Pruning", arXiv:1906.10771. Michel, Levy & Neubig 2019, "Are Sixteen Heads
Really Better than One?", arXiv:1905.10650.

2017, Sec. 2.2    taylor  |sum over a unit's activations of activation *
                          dL/dactivation|, mean over examples
2019, Sec. 3.2    taylor  the same as a gate's gradient: |g dL/dg| at g = 1
Michel, Sec. 4.1  taylor  of a head: |Att_h(x)^T dL/dAtt_h(x)|, mean over examples

Shapes: B examples, U units of a group.

Deviations
- 2019 squares the gate's gradient of a minibatch, so that the batch decides what is
  cancelled; here, as in 2017 and in Michel's Sec. 4.1, the absolute value is taken per
  example. The code of Michel et al. takes it per token, so that tokens of one text do
  not cancel. The squares of examples are `theis.fisher`.
- scores are not normed within layers (2017, Sec. 2.3; Michel et al.), which changes no
  order within a layer: every block keeps as many units as the others, where Michel et
  al. compare the heads of all layers and take them away in steps.
- layers: the gate of skipping a layer, which is ours.
"""

from torch import Tensor
from transformers import PreTrainedModel

from compress.pruning.importance import Batches, Targets, gradients
from compress.slicing.plan import Group, SlicePlan
from compress.slicing.select import Importance


def taylor(
    student: PreTrainedModel,
    batches: Batches,
    plan: SlicePlan,
    *,
    targets: Targets = "labels",
) -> Importance:
    """Sum |dL/dg_u| of the gate g_u of every unit and layer, over the examples of these
    batches."""
    found = dict[Group, Tensor]()
    for of_batch in gradients(student, batches, plan, targets=targets):
        for group, gradient_BU in of_batch.items():
            found[group] = found.get(group, 0) + gradient_BU.abs().sum(0)
    return found
