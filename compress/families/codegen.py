"""CodeGen, with rotary positions."""

from compress.families.family import Family

FAMILY = Family("codegen", length_setting="n_positions")
