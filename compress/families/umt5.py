"""UMT5: T5 with separate biases in every layer."""

from compress.families.family import Family

FAMILY = Family("umt5", prepared_mask=True)
