"""The names that data sets give to the columns we look for."""

from __future__ import annotations

import re
from typing import Final

PAIRS: Final = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("question", "passage"),
    ("query", "passage"),
    ("query", "document"),
    ("#1string", "#2string"),
    ("text1", "text2"),
    ("texta", "textb"),
    ("text", "textpair"),
    ("sentencea", "sentenceb"),
    ("s1", "s2"),
)
SINGLES: Final = (
    *("text", "sentence", "review", "utterance", "content", "comment", "commenttext", "tweet", "message", "document"),
    *("passage", "query", "question", "description", "body", "input", "title"),
)
LABELS: Final = (
    *("label", "labels", "goldlabel", "class", "intent", "category", "score", "quality", "isduplicate", "target"),
    *("sentiment", "emotion", "rating", "stars", "similarity", "similarityscore", "relatednessscore", "topic"),
)
_KNOWN: Final = frozenset((*SINGLES, *LABELS, *(name for pair in PAIRS for name in pair)))


def plain(name: str) -> str:
    """A column name without case, spaces, dashes and underscores: how names are compared."""
    return re.sub(r"[\s_\-]+", "", name.lower())


def is_known(name: str) -> bool:
    return plain(name) in _KNOWN


def number(cell: str) -> float | None:
    """The number a cell spells, NaN and the infinities included; None where it spells none."""
    try:
        return float(cell) if "_" not in cell else None
    except ValueError:
        return None
