"""Slicing: one plan of which weights belong together, for pruning, supernets and
students that are cut out of their teacher.

from compress.slicing.plan import SlicePlan
from compress.slicing.select import choose, magnitude
from compress.slicing.sizes import Sizes
from compress.slicing.cut import slice_model

plan = SlicePlan.from_model(model) kept = choose(plan, magnitude(model),
Sizes.from_request(model.config, hidden=0.5, ffn=0.5)) small = slice_model(model, kept)
"""
