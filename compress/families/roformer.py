"""RoFormer."""

from compress.families.family import Family

FAMILY = Family("roformer", prepared_mask=True)
