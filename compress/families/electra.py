"""ELECTRA, with BERT's blocks and a factorised embedding."""

from dataclasses import replace

from compress.families import bert

FAMILY = replace(bert.FAMILY, name="electra", projects_if_different=True)
