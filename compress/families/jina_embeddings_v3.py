"""Jina embeddings v3."""

from compress.families.family import Family

FAMILY = Family("jina_embeddings_v3", prepared_mask=True)
