"""SqueezeBERT."""

from compress.families.family import Family

FAMILY = Family("squeezebert", prepared_mask=True)
