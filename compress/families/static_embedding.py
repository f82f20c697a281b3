"""Our static students, the mean of their tokens' vectors."""

from compress.families.family import Family

FAMILY = Family("static-embedding", own_class=True, layered=False, counted=True)
