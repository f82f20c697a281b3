"""Define constants that data, models and losses share."""

from typing import Final

IGNORE_INDEX: Final = -100
"""The label of a token that no loss and no metric counts: torch's and transformers'
own."""
MASKED: Final = -1e4
"""The score of padding in a softmax over positions: its exp is 0 in float32, even after
a temperature."""
MISSING_TAG: Final = -1
"""The tag of a word that has none, and for which a teacher answers."""
