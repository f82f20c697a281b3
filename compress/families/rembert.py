"""RemBERT."""

from compress.families.family import Family

FAMILY = Family("rembert", prepared_mask=True)
