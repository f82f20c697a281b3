"""Build WordPiece as a graph: BERT's normalisation, splitting and greedy longest match,
on all characters of a batch at once.

Three operators work on strings: onnxruntime's own `Tokenizer` splits a text into
characters and special tokens, without the characters that the normaliser drops; a
second `Tokenizer` finds the characters that form words of their own; `LabelEncoder`
numbers them. Everything else is integer arithmetic. No custom operator library is
needed.

Shapes: R texts, M symbols of all texts, one after another, T tokens of all texts.
"""

import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any, Final

import numpy as np
from onnx import TensorProto
from tokenizers import Tokenizer

from compress.errors import ExportError
from compress.exporters.session import MICROSOFT
from compress.exporters.tokenizer import trie
from compress.exporters.tokenizer.graph import (
    CLASSIC,
    Value,
    arange,
    columns,
    concat,
    full,
    minimum,
    op,
    where,
)

SURROGATES: Final = range(0xD800, 0xE000)
UNICODE: Final = 0x110000
WORDPIECE_BLOCK: Final = 256

LETTERS: Final = "\U00010330\u10d0"
"""A Gothic and a Georgian letter, of different blocks: no other character is normalised
to one of them."""

BETWEEN: Final = ""
"""The mark of a boundary between two words among the characters of
`CharacterMap.listed`."""

TokenizerJson = Mapping[str, Any]
"""The content of a tokenizer.json, or of a part of it."""

CodeRange = tuple[int, int]


@dataclass(frozen=True)
class CharacterMap:
    """The normalisation and splitting of every character.

    listed    character -> the characters that replace it, with BETWEEN where a word
              ends
    dropped   ranges (both ends included) of characters that are removed
    alone     ranges of characters that become a word of their own without a token
    All other characters become part of a word that has no token.
    """

    listed: Mapping[str, tuple[str, ...]]
    dropped: tuple[CodeRange, ...]
    alone: tuple[CodeRange, ...]


def read_characters(tokenizer: Tokenizer, known: frozenset[str]) -> CharacterMap:
    """Read how a tokenizer normalises every character; `known`: the characters of its
    tokens."""
    rules = json.loads(tokenizer.to_str())
    found = _normalise_all(
        json.dumps({name: rules[name] for name in ("normalizer", "pre_tokenizer")})
    )
    listed: dict[str, tuple[str, ...]] = {}
    alone: list[int] = [code for code in found.alone if chr(code) not in known]
    for character, parts in found.changed.items():
        if set(parts) - {BETWEEN} <= known or (BETWEEN in parts and len(parts) != 3):
            listed[character] = parts
        elif BETWEEN in parts:
            alone.append(ord(character))
    own = known.difference(found.changed, map(chr, found.dropped))
    single = own.intersection(map(chr, found.alone))
    listed |= {character: (BETWEEN, character, BETWEEN) for character in single}
    listed |= {character: (character,) for character in own - single}
    return CharacterMap(
        dict(sorted(listed.items())),
        join_ranges(found.dropped),
        join_ranges(sorted(alone)),
    )


@dataclass(frozen=True)
class _Normalisation:
    """The code points of Unicode that are `dropped`, the ones that stand `alone`
    unchanged, and the ones that are `changed`, with their replacements; all others are
    unchanged letters."""

    dropped: Sequence[int]
    alone: Sequence[int]
    changed: Mapping[str, tuple[str, ...]]


@lru_cache(maxsize=2)
def _normalise_all(rules: str) -> _Normalisation:
    """Apply a normaliser and a splitter, given as JSON, to every character inside a
    word (takes 1.2 s)."""
    unknown = {"type": "WordLevel", "vocab": {}, "unk_token": ""}
    tokenizer = Tokenizer.from_str(
        json.dumps(
            {"version": "1.0", "added_tokens": [], "model": unknown} | json.loads(rules)
        )
    )

    def normalise(text: str) -> str:
        """Normalise a text, with a space where words are split."""
        normal = (
            text
            if tokenizer.normalizer is None
            else tokenizer.normalizer.normalize_str(text)
        )
        return " ".join(
            word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normal)
        )

    dropped = array("l")
    alone = array("l")
    changed = {}
    for character, result in change_each(normalise):
        if result == character != " ":
            continue
        if not result:
            dropped.append(ord(character))
        elif result == f" {character} ":
            alone.append(ord(character))
        else:
            changed[character] = tuple(
                BETWEEN if part == " " else part for part in result
            )
    return _Normalisation(dropped, alone, changed)


def list_blocks() -> list[list[str]]:
    """List all characters, in blocks that are small enough for `isolate`."""
    firsts = range(0, UNICODE, WORDPIECE_BLOCK)
    return [
        list(map(chr, range(first, first + WORDPIECE_BLOCK)))
        for first in firsts
        if first not in SURROGATES
    ]


def change_each(change: Callable[[str], str]) -> Iterator[tuple[str, str]]:
    """Change every character separately; yield each with the result."""
    for block in list_blocks():
        yield from zip(block, isolate(block, change), strict=True)


def isolate(
    texts: Sequence[str], change: Callable[[str], str], *, between: str = LETTERS
) -> list[str]:
    """Change all texts in one call, each between two separators: the first character of
    `between` that they do not contain."""
    letter = between[any(between[0] in text for text in texts)]
    return change(letter.join(("", *texts, ""))).split(letter)[1:-1]


def characters(ranges: Iterable[CodeRange]) -> str:
    """Format the ranges as the inside of a character class of a regular expression."""
    return "".join(f"\\x{{{first:x}}}-\\x{{{last:x}}}" for first, last in ranges)


def join_ranges(codes: Sequence[int]) -> tuple[CodeRange, ...]:
    """Join ascending code points into ranges; a range may span the surrogates, which no
    text contains."""
    found: list[CodeRange] = []
    for code in codes:
        if found and (
            found[-1][1] == code - 1
            or (found[-1][1] == SURROGATES[0] - 1 and code == SURROGATES[-1] + 1)
        ):
            found[-1] = (found[-1][0], code)
        else:
            found.append((code, code))
    return tuple(found)


NO_STATE: Final = 0
PIECE_END: Final = 1
UNKNOWN: Final = 2
FIRST: Final = 3
"""Symbols: padding, the end of a word, a character that no token contains; then the
characters of tokens."""

PAD: Final = "padding"
"""The padding of shorter rows of characters; more than one character, so that no text
can contain it."""


@dataclass(frozen=True)
class Tokens:
    """The tensors that hold the tokens of all texts, in order.

    ids_T       the ids, without special tokens around a text; lines_T: the index of
                each token's text
    spans_T2    the first character of its text that a token covers, and the end; if
                requested
    sizes_R     characters of each text; if requested
    """

    ids_T: Value
    lines_T: Value
    spans_T2: Value | None = None
    sizes_R: Value | None = None


@dataclass(frozen=True)
class WordPiece:
    """The parts of a WordPiece tokenizer.

    symbols     character, or special token -> symbol
    reading     the normalisation of characters
    pieces      the trie of tokens: those that begin a word, those that continue one
    special     special tokens that are recognised in a text
    unknown     id of the unknown token; longest: the most characters of a word; longer
                words are unknown
    """

    symbols: Mapping[str, int]
    reading: CharacterMap
    pieces: trie.Trie
    special: tuple[str, ...]
    unknown: int
    longest: int

    @staticmethod
    def list_unsupported(described: TokenizerJson) -> list[str]:
        """List what the graph does not support in a tokenizer, given as its JSON."""
        parts = {
            part: (described[part] or {}).get("type")
            for part in ("normalizer", "pre_tokenizer")
        }
        steps = [
            step["type"]
            for step in (described["normalizer"] or {}).get("normalizers", ())
        ]
        # do_lower_case of a folder of sentence-transformers
        if steps == ["Lowercase", "BertNormalizer"]:
            parts["normalizer"] = "BertNormalizer"
        expected = {"normalizer": "BertNormalizer", "pre_tokenizer": "BertPreTokenizer"}
        wrong = [
            f"{part} {parts[part]} (expected {expected[part]})"
            for part in parts
            if parts[part] != expected[part]
        ]
        return wrong + list_odd_tokens(
            described, ("single_word", "lstrip", "rstrip", "normalized")
        )

    @classmethod
    def from_tokenizer(
        cls, tokenizer: Tokenizer, described: TokenizerJson
    ) -> "WordPiece":
        """Read a tokenizer; `described`: its JSON, in which `list_unsupported` finds
        nothing."""
        model = described["model"]
        special = {token["content"]: token["id"] for token in described["added_tokens"]}
        prefix = model["continuing_subword_prefix"]
        begin = {word: number for word, number in model["vocab"].items() if word}
        inside = {
            word[len(prefix) :]: number
            for word, number in begin.items()
            if word.startswith(prefix)
        }
        inside.pop("", None)
        known = frozenset("".join((*begin, *inside)))
        reading = read_characters(tokenizer, known)
        single = {
            part
            for parts in reading.listed.values()
            if BETWEEN in parts
            for part in parts
        } - {BETWEEN}
        letters = {part for parts in reading.listed.values() for part in parts} & known
        symbols = {
            character: index for index, character in enumerate(sorted(letters), FIRST)
        }
        symbols |= {
            token: index for index, token in enumerate(special, FIRST + len(symbols))
        }

        def spelled(words: Mapping[str, int]) -> dict[trie.Symbols, int]:
            """Spell the words that can occur: words of characters that the normaliser
            keeps and that do not stand alone."""
            possible = (
                word
                for word in words
                if set(word) <= letters and (len(word) == 1 or not set(word) & single)
            )
            return {
                tuple(symbols[letter] for letter in word): words[word]
                for word in possible
            }

        whole = spelled(begin) | {
            (symbols[token],): number for token, number in special.items()
        }
        pieces = trie.build([whole, spelled(inside)], FIRST + len(symbols))
        unknown = model["vocab"][model["unk_token"]]
        return cls(
            symbols,
            reading,
            pieces,
            tuple(special),
            unknown,
            model["max_input_chars_per_word"],
        )

    def write(
        self,
        texts_R: Value,
        *,
        prompt: str = "",
        spans: bool = False,
        words: bool = False,
    ) -> Tokens:
        """Add the tokens of all texts, each after `prompt`, and with `spans` the
        characters that they cover; white space is no token, and `words` changes
        nothing."""
        symbols_M, rows_M, measured = self._symbols(texts_R, prompt, spans=spans)
        inside_M = symbols_M > np.array(PIECE_END, np.int32)
        inside = inside_M.integers()
        count = symbols_M.size(0)
        before = concat([0], inside[:-1])
        starts_M = inside > before
        starts = starts_M.integers()
        root, other = np.array(self.pieces.roots, np.int32)
        begin = where(starts_M, root, other)
        # counted from 1; 0 before the first word
        words_M = starts.cumsum()
        places = count + 1
        sizes = inside.sums(words_M, places)
        longest = sizes.max()
        lengths_M, ids_M = trie.longest_matches(self.pieces, symbols_M, begin, longest)
        none_M = lengths_M.equals(0)
        ahead = minimum(arange(count) + lengths_M, count)
        # one place after all others, which leads to itself
        jumps = concat(where(none_M, count, ahead), count)
        begun = concat(starts, [0])
        reached_M = trie.follow_chains(begun, jumps, longest)[:-1]
        begun_M = inside_M & reached_M
        faults = (begun_M & none_M).integers().sums(words_M, places)
        lost = (faults > 0) | (sizes > self.longest)
        lost_M = lost[words_M]
        token_M = begun_M & (starts_M | ~lost_M)
        ids = where(lost_M, self.unknown, ids_M)
        tokens = Tokens(ids.select(token_M), rows_M.select(token_M))
        if measured is None:
            return tokens
        lengths_RC, cells_M = measured
        at_T = token_M.nonzero()
        reach_M = where(lost_M, sizes[words_M], lengths_M)
        last_T = at_T + reach_M[at_T] - 1
        starts_RC = lengths_RC.cumsum(axis=1, exclusive=True)
        ends_RC = starts_RC + lengths_RC
        starts_T = starts_RC.flat()[cells_M[at_T]]
        ends_T = ends_RC.flat()[cells_M[last_T]]
        spans_T2 = columns(starts_T, ends_T)
        return replace(tokens, spans_T2=spans_T2, sizes_R=lengths_RC.sum(1))

    def _symbols(
        self, texts_R: Value, prompt: str, *, spans: bool
    ) -> tuple[Value, Value, tuple[Value, Value] | None]:
        """Add the (M,) int32 symbols, each text ending with PIECE_END, and the (M,)
        numbers of their texts; for spans also the (R, C) lengths of the parts of the
        texts, 0 for padding, and the (M,) places among these R x C."""
        special = "|".join(
            re.escape(token) for token in sorted(self.special, key=len, reverse=True)
        )
        # Dropped characters are skipped, unless characters are counted
        every = (
            f"[^{characters(self.reading.dropped)}]"
            if self.reading.dropped and not spans
            else "(?s:.)"
        )
        strings = cut(texts_R, f"{special}|{every}" if special else every)
        dropped = [] if spans else self.reading.dropped
        strings = put_before(
            strings, texts_R, cut_prompt(prompt, self.special, dropped)
        )
        table = [(UNKNOWN,), (PIECE_END, UNKNOWN, PIECE_END), (PIECE_END,)]
        spelled: dict[tuple[int, ...], int] = {
            symbols: index for index, symbols in enumerate(table)
        }
        numbers: dict[str, int] = {PAD: 2}
        for character, parts in self.reading.listed.items():
            symbols = tuple(
                PIECE_END if part == BETWEEN else self.symbols.get(part, UNKNOWN)
                for part in parts
            )
            numbers[character] = spelled.setdefault(symbols, len(spelled))
        for token in self.special:
            numbers[token] = spelled.setdefault(
                (PIECE_END, self.symbols[token], PIECE_END), len(spelled)
            )
        table = list(spelled)
        filling = 2
        if spans:  # dropped characters have a code, and so has the padding
            filling = len(table) + 1
            table = [*table, (), (PIECE_END,)]
            numbers[PAD] = filling
        codes = number(strings, numbers, 0)
        if spans:
            codes = self._unlisted(codes, strings, dropped=len(table) - 2)
        elif self.reading.alone:
            codes = codes + self._alone(strings, codes)
        codes = op("Pad", codes, [0, 0, 0, 1], filling)
        symbols_M, cells_M, _ = spell(table, codes)
        rows_M = cells_M // codes.size(1)
        if not spans:
            return symbols_M, rows_M, None
        lengths = np.ones(len(table), np.int64)
        lengths[filling] = 0
        for token in self.special:
            lengths[numbers[token]] = len(token)
        return symbols_M, rows_M, (codes.look_up(lengths), cells_M)

    def _alone(self, strings: Value, codes: Value) -> Value:
        """Add 1 where an unlisted character stands alone, 0 elsewhere."""
        alone = contains(strings, self.reading.alone)
        return alone.reshape(strings.shape()) * codes.equals(0).integers()

    def _unlisted(self, codes: Value, strings: Value, *, dropped: int) -> Value:
        """Replace the codes of the few unlisted characters: 1 for characters that stand
        alone, or `dropped`."""
        flat = codes.flat()
        unlisted = flat.equals(0)
        strings = strings.flat().select(unlisted)
        own = full(strings.shape())
        for ranges, code in ((self.reading.alone, 1), (self.reading.dropped, dropped)):
            if ranges:
                own = own + contains(strings, ranges) * code
        return flat.scatter(unlisted.nonzero(), own).reshape(codes.shape())


def list_odd_tokens(described: TokenizerJson, options: Sequence[str]) -> list[str]:
    """List the added tokens that have any of these options."""
    found = (
        (token["content"], [name for name in options if token[name]])
        for token in described["added_tokens"]
    )
    return [
        f"added token {content!r} with {', '.join(odd)} (expected none of these)"
        for content, odd in found
        if odd
    ]


def cut(texts: Value, pattern: str, filling: str = PAD) -> Value:
    """Add (texts, most matches) strings: the longest matches in each text, one after
    another, padded with `filling`."""
    return op(
        "Tokenizer",
        texts,
        domain=MICROSOFT,
        mark=0,
        mincharnum=1,
        pad_value=filling,
        tokenexp=pattern,
    )


def cut_prompt(
    prompt: str, whole: Iterable[str], dropped: Sequence[CodeRange] = ()
) -> list[str]:
    """Cut a prompt like `cut` cuts texts: into the matches of `whole`, the longest
    first, and single characters, without the ranges `dropped`.

    Raises ExportError for a prompt whose end is the beginning of one of `whole`, which
    a text may complete.
    """
    longest = sorted(whole, key=len, reverse=True)
    for each in longest:
        if any(prompt.endswith(each[:size]) for size in range(1, len(each))):
            raise ExportError(
                f"prompt {prompt!r}: ends like the beginning of the token {each!r}, so "
                "that its tokens depend on the text; a text file needs another prompt"
            )
    pattern = "|".join((*map(re.escape, longest), "."))
    pieces = re.findall(pattern, prompt, flags=re.DOTALL)
    return [
        piece
        for piece in pieces
        if len(piece) > 1
        or not any(first <= ord(piece) <= last for first, last in dropped)
    ]


def put_before(strings_RC: Value, texts_R: Value, pieces: Sequence[str]) -> Value:
    """Add (R, P + C) strings: the same P pieces before the strings of each text."""
    if not pieces:
        return strings_RC
    shape = concat(texts_R.size(0), [len(pieces)])
    return concat(op("Expand", list(pieces), shape), strings_RC, axis=1)


def spell(table: Sequence[Sequence[int]], codes: Value) -> tuple[Value, Value, Value]:
    """Add (M,) int32: the symbols of each code in a table, one after another; (M,) the
    places of their codes; and (M,) the place of each symbol among the symbols of its
    code."""
    lengths = np.array([len(symbols) for symbols in table])
    width = lengths.max()
    codes_N = codes.flat()
    longer_NW = columns(codes_N.look_up(lengths)) > np.arange(width)
    at_M = longer_NW.flat().nonzero()
    places_M = at_M // width
    steps_M = at_M % width
    first_N = codes_N.look_up(lengths.cumsum() - lengths)
    symbols_M = (first_N[places_M] + steps_M).look_up(list(chain.from_iterable(table)))
    return symbols_M.cast(TensorProto.INT32), places_M, steps_M


def contains(strings: Value, ranges: Sequence[CodeRange]) -> Value:
    """Add (n,): 1 for each of n strings that contains a character of these ranges, 0
    for the others."""
    # Every batch needs such a character; not U+0000, which a constant loses
    example = [chr(ranges[0][0] or ranges[0][1])]
    matched = cut(concat(strings.flat(), example), f"[{characters(ranges)}]")
    return number(matched, {PAD: 0}, 1).flat()[:-1]


def number(strings: Value, numbers: Mapping[str, int], other: int) -> Value:
    """Add the number of each string; `other` for strings without one."""
    return op(
        "LabelEncoder",
        strings,
        domain=CLASSIC,
        keys_strings=list(numbers),
        values_int64s=list(numbers.values()),
        default_int64=other,
    )
