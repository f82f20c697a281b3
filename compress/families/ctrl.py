"""CTRL, with sinusoidal positions."""

from compress.families.family import Family

FAMILY = Family("ctrl", length_setting="n_positions", segments_uncounted=True)
