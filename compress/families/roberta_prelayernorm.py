"""RoBERTa with norms before its blocks."""

from compress.families.family import Family

FAMILY = Family("roberta-prelayernorm", prepared_mask=True)
