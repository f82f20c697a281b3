"""BigBird."""

from compress.families.family import Family

FAMILY = Family("big_bird", prepared_mask=True)
