"""CamemBERT, with RoBERTa's positions."""

from compress.families.family import Family

FAMILY = Family("camembert", first_row=1, after_padding=True, prepared_mask=True)
