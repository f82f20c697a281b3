"""GPT-J, with rotary positions."""

from compress.families.family import Family

FAMILY = Family("gptj", length_setting="n_positions")
