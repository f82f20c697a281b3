"""What a tokenizer's normaliser and word splitter make of every character of Unicode, asked of the tokenizer itself.

Only for tokenizers that treat each character by itself (BERT's): then a text is read character by character from a
table. A table of all 1.1 million characters would be larger than the model; but a word with a character that no token
has becomes the unknown token whatever else is in it, so those characters need no table, only the ranges in which they
stand alone.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tokenizers import Tokenizer

SURROGATES: Final = range(0xD800, 0xE000)
UNICODE: Final = 0x110000
BLOCK: Final = 256

BETWEEN: Final = ""
"""Between two words; in `Reading.listed`, a symbol of its own beside characters."""

Range = tuple[int, int]


@dataclass(frozen=True)
class Reading:
    """How characters are read.

    listed    character -> the characters it becomes, with BETWEEN where a word ends
    dropped   ranges (both ends included) of characters that leave nothing behind
    alone     ranges of characters that become a word of their own which no token is in
    All other characters become part of a word that has no token.
    """

    listed: Mapping[str, tuple[str, ...]]
    dropped: tuple[Range, ...]
    alone: tuple[Range, ...]


def read_off(tokenizer: Tokenizer, known: frozenset[str]) -> Reading:
    """Asks the tokenizer what becomes of each character; `known` are the characters in its tokens (0.8 s)."""
    listed: dict[str, tuple[str, ...]] = {}
    dropped: list[int] = []
    alone: list[int] = []
    for block in _blocks():
        whole = "".join(map(chr, block))
        if becomes(tokenizer, whole) == tuple(whole) and not known & set(whole):
            continue  # most of Unicode: letters of one unknown word
        for code in block:
            parts = becomes(tokenizer, chr(code))
            if not parts:
                dropped.append(code)
            elif set(parts) - {BETWEEN} <= known or (BETWEEN in parts and len(parts) != 3):
                listed[chr(code)] = parts
            elif BETWEEN in parts:
                alone.append(code)
    return Reading(listed, _ranges(dropped), _ranges(alone))


def _blocks() -> Iterator[range]:
    """All code points that a text can hold."""
    for first in range(0, UNICODE, BLOCK):
        if first not in SURROGATES:
            yield range(first, first + BLOCK)


def becomes(tokenizer: Tokenizer, character: str) -> tuple[str, ...]:
    """What a character, or several, in the middle of a word become: (), ("e",), (BETWEEN,), (BETWEEN, "!", BETWEEN)."""
    normal = character if tokenizer.normalizer is None else tokenizer.normalizer.normalize_str(character)
    if not normal:
        return ()
    words = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(f"a{normal}a")]
    parts = [part for word in words for part in (BETWEEN, *word)]
    return tuple(parts[2:-1])


def characters(ranges: Iterable[Range]) -> str:
    """The ranges inside a character class of a regular expression."""
    return "".join(f"\\x{{{first:x}}}-\\x{{{last:x}}}" for first, last in ranges)


def _ranges(codes: Sequence[int]) -> tuple[Range, ...]:
    """Ascending code points as ranges; surrogates, which are never asked for, may be inside."""
    found: list[Range] = []
    for code in codes:
        if found and (found[-1][1] == code - 1 or (found[-1][1] == SURROGATES[0] - 1 and code == SURROGATES[-1] + 1)):
            found[-1] = (found[-1][0], code)
        else:
            found.append((code, code))
    return tuple(found)
