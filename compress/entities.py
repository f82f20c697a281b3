"""Entities: which words a sequence of tags names, and how well two sequences agree (CoNLL 2000 and 2003).

Tjong Kim Sang & Buchholz 2000, "Introduction to the CoNLL-2000 Shared Task: Chunking", arXiv:cs/0009008, and its
script conlleval: an entity is right when first word, last word and label all are; precision, recall and F1 are over
all entities of all labels (micro).
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from compress.classes import ClassScore

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
        prefix, label = split(tag)
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


def split(tag: str) -> tuple[str, str | None]:
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


def by_label(answers: Sequence[Sequence[str]], truth: Sequence[Sequence[str]]) -> tuple[ClassScore, ...]:
    """Score the entities of each label apart, labels in alphabetical order; `scored` has those of all together."""
    said = {(n, *entity) for n, tags in enumerate(answers) for entity in entities(tags)}
    true = {(n, *entity) for n, tags in enumerate(truth) for entity in entities(tags)}
    right, given, there = (Counter(one[1] for one in each) for each in (said & true, said, true))
    return tuple(ClassScore.of(label, right[label], given[label], there[label]) for label in sorted(given | there))


def scored(answers: Sequence[Sequence[str]], truth: Sequence[Sequence[str]]) -> dict[str, float]:
    """f1, precision and recall over the entities of all sentences, accuracy over their words; 0.0 where there are none.

    Sentences come in the same order and with the same number of words.
    """
    said = {(n, *entity) for n, tags in enumerate(answers) for entity in entities(tags)}
    true = {(n, *entity) for n, tags in enumerate(truth) for entity in entities(tags)}
    right = len(said & true)
    words = sum(map(len, truth))
    same = sum(one == other for pair in zip(answers, truth, strict=True) for one, other in zip(*pair, strict=True))
    return {
        "f1": 2 * right / max(1, len(said) + len(true)),
        "precision": right / max(1, len(said)),
        "recall": right / max(1, len(true)),
        "accuracy": same / max(1, words),
    }
