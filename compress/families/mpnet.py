"""MPNet."""

from compress.families.family import Family

FAMILY = Family("mpnet", prepared_mask=True)
