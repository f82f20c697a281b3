"""GPT-BigCode, which adds the word embeddings of token types, if it is given any."""

from compress.families.family import Family

FAMILY = Family("gpt_bigcode", segments_uncounted=True)
