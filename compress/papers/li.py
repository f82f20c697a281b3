"""Li et al. 2017, "Pruning Filters for Efficient ConvNets", arXiv:1608.08710.

Sec. 3.1  magnitude  units with small weights are cut first; neither gradients nor data
                     are needed

Deviations
- the paper sums the absolute weights that write a filter; here the norm of the weights
  that write a unit is multiplied by the norm of the weights that read it
  (`slicing.select.magnitude`), as a transformer's next product may ignore a large unit.
- layers are not ranked.
"""

from accelerate import PartialState
from transformers import PreTrainedModel

from compress.pruning.importance import Batches
from compress.slicing.plan import SlicePlan
from compress.slicing.select import Importance
from compress.slicing.select import magnitude as of_weights


def magnitude(
    student: PreTrainedModel, batches: Batches, plan: SlicePlan
) -> Importance:
    """Multiply the norms of the weights that write and that read each unit; processes
    return equal shares."""
    return {
        group: of_unit / PartialState().num_processes
        for group, of_unit in of_weights(student, plan).items()
    }
