"""Define constants that data, models and losses share."""

from typing import Final

IGNORE_INDEX: Final = -100
"""The label of a token that no loss and no metric counts: torch's and transformers'
own."""
MISSING_TAG: Final = -1
"""The tag of a word that has none, and for which a teacher answers."""
