"""The text encoder of TIPS v2."""

from compress.families.family import Family

FAMILY = Family("tipsv2_text_model", length_setting="max_position_embeddings")
