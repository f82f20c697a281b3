"""GTE."""

from compress.families.family import Family

FAMILY = Family("gte", prepared_mask=True)
