"""Data2Vec's model of texts."""

from compress.families.family import Family

FAMILY = Family("data2vec-text", prepared_mask=True)
