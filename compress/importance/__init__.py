"""How much each unit of a model matters: a paper's function run over rows, kept on disk, the same on all processes.

plan = SlicePlan.of(model)
rated = importance.of(Call("molchanov.taylor"), model, plan, rows, collate)
kept = choose(plan, rated, sizes)
"""

from compress.importance.batches import Batches
from compress.importance.losses import Targets
from compress.importance.rated import agreed, of

__all__ = ["Batches", "Targets", "agreed", "of"]
