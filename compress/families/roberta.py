"""RoBERTa, whose positions are counted from after the padding token's."""

from dataclasses import replace

from compress.families import bert

FAMILY = replace(bert.FAMILY, name="roberta", first_row=1, after_padding=True)
