"""XLM."""

from compress.families.family import Family

FAMILY = Family("xlm", segments_uncounted=True, reads_values=True)
