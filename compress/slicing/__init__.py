"""Slicing: one plan of which weights go together, for pruning, supernets and students that begin as their teacher.

plan = SlicePlan.of(model)
kept = choose(plan, magnitude(model), Sizes.asked(model.config, hidden=0.5, ffn=0.5))
small = sliced(model, kept)
"""

from compress.slicing.cut import cut, order, ordered, sliced
from compress.slicing.masking import masked
from compress.slicing.plan import Group, SlicePlan, parameters_of
from compress.slicing.select import Importance, Kept, choose, counts, magnitude, prefix
from compress.slicing.sizes import Sizes, resized

__all__ = [
    "Group",
    "Importance",
    "Kept",
    "Sizes",
    "SlicePlan",
    "choose",
    "counts",
    "cut",
    "magnitude",
    "masked",
    "order",
    "ordered",
    "parameters_of",
    "prefix",
    "resized",
    "sliced",
]
