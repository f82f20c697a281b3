"""DistilBERT, with BERT's blocks under names of its own."""

from dataclasses import replace

from compress.families import bert

FAMILY = replace(bert.FAMILY, name="distilbert")
