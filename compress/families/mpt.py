"""MPT, with biases for positions."""

from compress.families.family import Family

FAMILY = Family("mpt", length_setting="max_seq_len")
