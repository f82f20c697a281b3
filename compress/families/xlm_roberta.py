"""XLM-R, with RoBERTa's blocks and positions."""

from dataclasses import replace

from compress.families import roberta

FAMILY = replace(roberta.FAMILY, name="xlm-roberta")
