"""UMT5, T5 with biases of its own in every layer."""

from compress.families.family import Family

FAMILY = Family("umt5", prepared_mask=True)
