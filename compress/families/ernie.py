"""ERNIE, with BERT's blocks."""

from dataclasses import replace

from compress.families import bert

FAMILY = replace(bert.FAMILY, name="ernie")
