"""XLM-R XL."""

from compress.families.family import Family

FAMILY = Family("xlm-roberta-xl", prepared_mask=True)
