"""ConvBERT."""

from compress.families.family import Family

FAMILY = Family("convbert", prepared_mask=True)
