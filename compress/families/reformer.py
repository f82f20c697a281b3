"""Reformer, with axial positions."""

from compress.families.family import Family

FAMILY = Family("reformer", length_setting="max_position_embeddings")
