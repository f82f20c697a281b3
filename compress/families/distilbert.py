"""DistilBERT, with BERT's blocks under other names."""

from dataclasses import replace

from compress.families import bert

FAMILY = replace(bert.FAMILY, name="distilbert")
