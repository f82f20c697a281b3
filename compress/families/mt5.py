"""mT5, the multilingual T5."""

from compress.families.family import Family

FAMILY = Family("mt5", prepared_mask=True)
