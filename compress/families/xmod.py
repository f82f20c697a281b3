"""X-MOD."""

from compress.families.family import Family

FAMILY = Family("xmod", prepared_mask=True, float32_only=True)
