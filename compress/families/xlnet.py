"""XLNet, whose rows are padded before the text and end in [CLS]."""

from compress.families.family import Family

FAMILY = Family("xlnet", summary="last", segments_uncounted=True, reads_values=True)
