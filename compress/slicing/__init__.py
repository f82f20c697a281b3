"""Slicing: one plan of which weights go together, for pruning, supernets and students that begin as their teacher.

from compress.slicing.plan import SlicePlan
from compress.slicing.select import choose, magnitude
from compress.slicing.sizes import Sizes
from compress.slicing.cut import sliced

plan = SlicePlan.from_model(model)
kept = choose(plan, magnitude(model), Sizes.from_request(model.config, hidden=0.5, ffn=0.5))
small = sliced(model, kept)
"""
