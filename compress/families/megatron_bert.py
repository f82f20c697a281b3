"""Megatron-BERT."""

from compress.families.family import Family

FAMILY = Family("megatron-bert", prepared_mask=True)
