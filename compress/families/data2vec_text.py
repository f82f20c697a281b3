"""Data2Vec for text."""

from compress.families.family import Family

FAMILY = Family("data2vec-text", prepared_mask=True)
