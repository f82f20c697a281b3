"""Nomic's BERT."""

from compress.families.family import Family

FAMILY = Family("nomic_bert", prepared_mask=True)
