"""GPT of 2018, which adds the word embeddings of token types, if it is given any."""

from compress.families.family import Family

FAMILY = Family("openai-gpt", segments_uncounted=True)
