"""Define constants that data, models and losses share."""

from typing import Final

IGNORE_INDEX: Final = -100
"""The label of a token that losses and metrics ignore, as in torch and transformers."""
MASKED: Final = -1e4
"""The score of padding in a softmax over positions: its exp is 0 in float32, even after
a temperature."""
MISSING_TAG: Final = -1
"""The class id of a word without a tag, which a teacher's answer replaces."""
