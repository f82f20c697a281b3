"""RoCBERT."""

from compress.families.family import Family

FAMILY = Family("roc_bert", prepared_mask=True)
