"""Entities in sequences of tags: the schemes IOB1, IOB2, IOE, BIOES and BILOU. Tjong Kim Sang & De Meulder 2003."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

OUTSIDE = "O"
_BEGINS, _ENDS = "BSU", "ESLU"
_PREFIXES = frozenset("BIESLU")


class Entity(NamedTuple):
    """Words `first` to `last` (exclusive) are one `label`."""

    label: str
    first: int
    last: int


def entities(tags: Sequence[str]) -> list[Entity]:
    """The entities of one sentence, tagged in IOB1, IOB2, IOE, BIOES or BILOU; labels without a prefix are of one word.

    As conlleval reads it, a tag that continues nothing, or another label, begins an entity: I-x after O or after B-y.
    """
    found: list[Entity] = []
    open_label, first = None, 0
    for at, tag in enumerate(tags):
        prefix, label = split_tag(tag)
        if open_label is not None and (prefix in _BEGINS or label != open_label):
            found.append(Entity(open_label, first, at))
            open_label = None
        if label is None:
            continue
        if open_label is None:
            open_label, first = label, at
        if prefix in _ENDS:
            found.append(Entity(open_label, first, at + 1))
            open_label = None
    if open_label is not None:
        found.append(Entity(open_label, first, len(tags)))
    return found


def split_tag(tag: str) -> tuple[str, str | None]:
    """`B-person` -> ("B", "person"); `O` -> ("O", None); a tag without prefix, `NOUN` -> ("S", "NOUN")."""
    if tag == OUTSIDE:
        return OUTSIDE, None
    if prefixed(tag):
        return tag[0], tag[2:]
    return "S", tag


def prefixed(tag: str) -> bool:
    return len(tag) > 2 and tag[0] in _PREFIXES and tag[1] == "-"


def iob2(tags: Sequence[str]) -> list[str]:
    """The same entities in IOB2: B- on the first word of each, I- on its others."""
    written = [OUTSIDE] * len(tags)
    for label, first, last in entities(tags):
        written[first:last] = [f"B-{label}", *[f"I-{label}"] * (last - first - 1)]
    return written
