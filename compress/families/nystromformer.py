"""Nystromformer, whose first two positions are not used."""

from compress.families.family import Family

FAMILY = Family("nystromformer", first_row=2)
