"""Jina's third embeddings."""

from compress.families.family import Family

FAMILY = Family("jina_embeddings_v3", prepared_mask=True)
