"""Build byte-level BPE as a graph: GPT-2's splitting and merges by rank, on all bytes
of a batch at once.

Characters below U+0800 are listed in a `LabelEncoder`. The bytes of all others are
recovered from their hash: the steps of MurmurHash3 (Austin Appleby), which onnxruntime
has as an operator, are bijections of 32 bits for a given length. Words that are tokens
are found in a trie; all others are merged in rounds, and in each round every word
merges its pair of the lowest rank.

Shapes: R texts, N cells (characters, special tokens, boundaries) and M symbols (bytes,
special tokens, ends of words) of all texts, one after another, n unlisted characters, K
tokens of words while they are merged, T tokens of all texts.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Final

import numpy as np
from onnx import TensorProto
from tokenizers import Regex, Tokenizer, pre_tokenizers

from compress.arrays import Longs
from compress.errors import ExportError
from compress.exporters.session import MICROSOFT
from compress.exporters.tokenizer import trie
from compress.exporters.tokenizer.cells import (
    Cells,
    cut_texts,
    drop_repeated,
    insert,
    insert_spaces,
    is_among,
    measure,
    take_spaces,
)
from compress.exporters.tokenizer.graph import (
    Value,
    arange,
    columns,
    concat,
    full,
    maximum,
    minimum,
    op,
    where,
)
from compress.exporters.tokenizer.nfc import compose, read_composition
from compress.exporters.tokenizer.wordpiece import (
    PAD,
    SURROGATES,
    UNICODE,
    WORDPIECE_BLOCK,
    TokenizerJson,
    Tokens,
    contains,
    list_odd_tokens,
    number,
)

LISTED: Final = 0x800
"""Characters below this code point have one or two bytes in UTF-8."""
PLANE: Final = 0x10000
"""Characters from this code point on have four bytes in UTF-8."""

(
    BOUND,
    SPACE_CLASS,
    WHITE_CLASS,
    LETTER,
    STMD,
    RV,
    L,
    E,
    NUMBER_CLASS,
    OTHER_CLASS,
    QUOTE,
    DROPPED,
) = range(12)
"""Kinds of cells: the boundary of a text or a special token, a space, other white
space, letters (some of which end 's, 've, 'll ...), numbers, all others, the
apostrophe, and the white space between a tagger's words."""

CELL_KINDS: Final = QUOTE + 1
STARTS = 1
TWO = 2
THREE = 4
"""Flags of a cell: the start of a word, or of a contraction of two or three
characters."""

NO_SYMBOL: Final = -1
WORD_END: Final = 256
"""Symbols: no symbol, and the end of a word; lower numbers are bytes, higher ones
special tokens."""

MOST_BYTES_OF_CHARACTER: Final = 4
"""The most bytes of a character."""


@dataclass(frozen=True)
class ByteLevel:
    """The parts of a byte-level BPE tokenizer.

    bytes      the id of each byte's token
    whole      the trie of words that are one token, as bytes and special symbols
               followed by WORD_END
    pairs      the trie of pairs of ids that merge, with their rank as value; merged:
               the id that each rank produces
    special    special tokens that are recognised in a text
    stripping  those that take the white space before them
    blank      those that consist of white space, which these take too
    prefix     whether a space is put before a text, and after a special token, if there
               is none
    trimmed    whether offsets leave out spaces; with `kept`, all spaces but the one
               before a text
    edges      the numbers of spaces at the beginning and the end of each token
    composed   whether characters are composed, as in NFC
    """

    bytes: Longs
    whole: trie.Trie
    pairs: trie.Trie
    merged: Longs
    special: tuple[str, ...]
    stripping: tuple[str, ...]
    blank: tuple[str, ...]
    prefix: bool
    trimmed: bool
    kept: bool
    edges: Longs
    composed: bool

    @staticmethod
    def list_unsupported(described: TokenizerJson) -> list[str]:
        """List the features of a tokenizer, given as JSON, that the graph does not
        support."""
        model = described["model"]
        splitter = described["pre_tokenizer"] or {}
        wrong = []
        if composed := _list_normalizers(described):
            if composed != ["NFC"]:
                wrong.append(
                    f"normalizer {' and '.join(composed)} (expected NFC or none)"
                )
            odd = (
                each["content"]
                for each in described["added_tokens"]
                if each["normalized"]
            )
            wrong += [
                f"added token {each!r}, which NFC may change"
                for each in odd
                if read_composition().changes(each)
            ]
        if splitter.get("type") != "ByteLevel":
            wrong.append(f"pre_tokenizer {splitter.get('type')} (expected ByteLevel)")
        elif not splitter.get("use_regex", True):
            wrong.append("pre_tokenizer ByteLevel with use_regex false (expected true)")
        for option in (
            "dropout",
            "continuing_subword_prefix",
            "end_of_word_suffix",
            "byte_fallback",
        ):
            if model.get(option):
                wrong.append(
                    f"model BPE with {option} {model[option]!r} (expected none)"
                )
        if missing := _map_bytes().keys() - model["vocab"]:
            wrong.append(
                f"model BPE without tokens of {len(missing)} bytes (expected all 256)"
            )
        ranks = {
            one + other: rank for rank, (one, other) in enumerate(_list_merges(model))
        }
        for rank, pair in enumerate(_list_merges(model)):
            if any(ranks.get(part, -1) >= rank for part in pair):
                wrong.append(
                    f"merge {rank} of {' and '.join(map(repr, pair))}, one of which a "
                    "later merge makes"
                )
                break
        wrong += list_odd_tokens(described, ("single_word", "rstrip"))
        tokens = described["added_tokens"]
        early, late = (
            [token for token in tokens if token["normalized"] is value]
            for value in (False, True)
        )
        wrong += [
            f"added tokens {one['content']!r} and {other['content']!r}, which overlap "
            "and of which one is normalized"
            for one, other in product(early, late)
            if overlap(one["content"], other["content"])
        ]
        stripping = [token for token in tokens if token["lstrip"]]
        blank = [token for token in tokens if _is_blank(token["content"])]
        wrong += [
            f"added token {one['content']!r} with lstrip, which does not take "
            f"{other['content']!r} before it"
            for one, other in product(stripping, blank)
            if one["normalized"] or not other["normalized"]
        ]
        return wrong

    @classmethod
    def from_tokenizer(
        cls, tokenizer: Tokenizer, described: TokenizerJson
    ) -> "ByteLevel":
        """Read a tokenizer; `described`: its JSON, for which `list_unsupported` returns
        nothing."""
        model = described["model"]
        letters = _map_bytes()
        tokens = described["added_tokens"]
        vocabulary: dict[str, int] = model["vocab"]
        added = {token["content"]: token["id"] for token in tokens}
        words: dict[trie.Symbols, int] = {
            (WORD_END + 1 + index, WORD_END): key
            for index, key in enumerate(added.values())
        }
        for token, key in vocabulary.items():
            if letters.keys() >= set(token) and [
                each.id for each in tokenizer.model.tokenize(token)
            ] == [key]:
                words[(*(letters[letter] for letter in token), WORD_END)] = key
        merges = [
            tuple(vocabulary[part] for part in pair) for pair in _list_merges(model)
        ]
        makes = np.array(
            [vocabulary[one + other] for one, other in _list_merges(model)]
        )
        names = {key: token for token, key in (vocabulary | added).items()}
        size = max(names) + 1
        processors = [
            each for each in _list_processors(described) if each["type"] in TRIMMING
        ]
        return cls(
            bytes=np.array(
                [
                    vocabulary[letter]
                    for letter in sorted(letters, key=letters.__getitem__)
                ]
            ),
            whole=trie.build([words], WORD_END + 1 + len(added)),
            pairs=trie.build([{pair: rank for rank, pair in enumerate(merges)}], size),
            merged=makes,
            special=tuple(added),
            stripping=tuple(token["content"] for token in tokens if token["lstrip"]),
            blank=tuple(token for token in added if _is_blank(token)),
            prefix=described["pre_tokenizer"]["add_prefix_space"],
            trimmed=any(each["trim_offsets"] for each in processors),
            kept=any(each["add_prefix_space"] for each in processors),
            edges=np.array([_count_spaces(names.get(key, "")) for key in range(size)]),
            composed=bool(_list_normalizers(described)),
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
        characters that they cover; with `words` every text is a word that follows a
        space, or white space, which has no tokens.

        Raises ExportError for words if a special token begins with a space.
        """
        for token in self.special:
            if words and re.match(r" (\S|$)", token):
                raise ExportError(
                    f"tokenizer.json: added token {token!r} begins with a space; a "
                    "tagger expects none"
                )
        cells, symbols, sizes_R = self._cells(texts_R, prompt, spans=spans, words=words)
        end = where(_split(cells.kinds), WORD_END, NO_SYMBOL)
        bytes_N4 = symbols[cells.codes]
        flat = concat(columns(end), bytes_N4, axis=1).flat()
        real = flat > NO_SYMBOL
        symbols_M = flat.select(real)
        cells_M = real.nonzero() // (MOST_BYTES_OF_CHARACTER + 1)
        ended_M = symbols_M.equals(WORD_END)
        starts_M = ended_M.shift(1, bool)
        ids_M = self._find_whole(symbols_M, starts_M)
        words_M = ended_M.integers().cumsum()
        places = symbols_M.size(0) + 1
        found = (ids_M >= 0).integers().sums(words_M, places)
        known_M = found[words_M] > 0
        open_M = ~(ended_M | known_M)
        bytes_K = symbols_M.select(open_M).look_up(self.bytes)
        at_K = open_M.nonzero()
        ids_K, at_K = self._merge(bytes_K, starts_M.select(open_M), at_K)
        ids_M = ids_M.scatter(at_K, ids_K)
        token_M = ids_M >= 0
        ids_T = ids_M.select(token_M)
        cells_T = cells_M.select(token_M)
        tokens = Tokens(ids_T, cells.rows[cells_T], sizes_R=sizes_R)
        if cells.starts is None or cells.ends is None:
            return tokens
        inside_M = ~ended_M  # every such symbol is covered by a token
        order_M = inside_M.integers().cumsum(exclusive=True)
        inside = cells_M.select(inside_M)
        after_T = concat(order_M.select(token_M), inside.size(0))
        last_T = inside[after_T[1:] - 1]
        starts_T = cells.starts[cells_T]
        ends_T = cells.ends[last_T]
        if self.trimmed:
            starts_T, ends_T = self._trim(
                ids_T, starts_T, ends_T, first=-1 if words else 0
            )
        return replace(tokens, spans_T2=columns(starts_T, ends_T))

    def _cells(
        self,
        texts_R: Value,
        prompt: str,
        *,
        spans: bool,
        words: bool,
    ) -> tuple[Cells, Value, Value | None]:
        """Add the cells of all texts, each with a boundary after it; the symbols
        (codes, 4) of all codes; and with `spans` the characters of each text."""
        strings_RC, rows_N = cut_texts(texts_R, self.special, prompt)
        special_codes = {
            token: LISTED + index for index, token in enumerate(self.special)
        }
        boundary = LISTED + len(self.special)
        letters = (
            sorted(each for each in read_composition().letters if ord(each) >= LISTED)
            if self.composed
            else []
        )
        listed = {chr(code): code for code in range(LISTED)}
        listed |= {letter: index for index, letter in enumerate(letters, boundary + 1)}
        codes_RC = number(
            strings_RC, listed | special_codes | {PAD: boundary}, NO_SYMBOL
        )
        codes_N = codes_RC.flat()
        unlisted_N = codes_N < 0
        bytes_n4, points_n = _find_bytes(strings_RC.flat().select(unlisted_N))
        own_n = arange(points_n.size(0)) + (boundary + 1 + len(letters))
        codes_N = codes_N.scatter(unlisted_N.nonzero(), own_n)
        table = np.full(
            (boundary + 1 + len(letters), MOST_BYTES_OF_CHARACTER), NO_SYMBOL
        )
        every = _list_kinds()
        if words:  # as the regular expressions of Python see white space
            every = every.copy()
            every[[code for code in range(UNICODE) if chr(code).isspace()]] = DROPPED
        kinds = np.full(len(table), BOUND)
        for letter, code in listed.items():
            encoded = letter.encode()
            table[code, : len(encoded)] = list(encoded)
            kinds[code] = every[ord(letter)]
        table[LISTED:boundary, 0] = np.arange(
            WORD_END + 1, WORD_END + 1 + len(self.special)
        )
        known = concat(kinds, _find_kinds(every, points_n))
        cells = Cells(codes_N, rows_N, codes_N)
        sizes_R = None
        if spans:
            # The last symbol is for unlisted characters
            lengths = [*[1] * LISTED, *map(len, self.special), 0, 1]
            cells, sizes_R = measure(cells, codes_RC.shape(), lengths, lengths)
        if self.composed:
            cells = compose(
                cells,
                {letter: listed[letter] for letter in read_composition().letters},
            )
        cells = replace(cells, kinds=known[cells.codes])
        cells = drop_repeated(cells, boundary)
        if words:
            white_N = is_among(cells.kinds, [DROPPED])
            if self.blank:
                blank_N = is_among(
                    cells.codes, [special_codes[token] for token in self.blank]
                )
                white_N = white_N | blank_N
            cells = insert_spaces(
                cells,
                white_N,
                boundary=boundary,
                code=ord(" "),
                kind=SPACE_CLASS,
            )
        if self.stripping:
            stripping = [special_codes[token] for token in self.stripping]
            blank = [special_codes[token] for token in self.blank]
            cells = self._take_spaces(cells, stripping, blank, first=-1 if words else 0)
        if self.prefix:
            begins = is_among(cells.kinds.shift(1), [BOUND])
            spaced = is_among(cells.kinds, [BOUND, SPACE_CLASS])
            needed = begins & ~spaced
            cells = insert(cells, needed, code=ord(" "), kind=SPACE_CLASS, width=0)
        return cells, concat(table, bytes_n4), sizes_R

    def _take_spaces(
        self,
        cells: Cells,
        stripping: Sequence[int],
        blank: Sequence[int],
        *,
        first: int,
    ) -> Cells:
        """Let special tokens take the white space before them, which their spans
        include unless they are trimmed."""
        stripping_N = is_among(cells.codes, stripping)
        blank_N = is_among(cells.kinds, [SPACE_CLASS, WHITE_CLASS])
        if blank:
            blank_N = blank_N | is_among(cells.codes, blank)
        kept, starts_N = take_spaces(
            cells, stripping_N, blank_N, boundary=LISTED + len(self.special)
        )
        if cells.starts is None or starts_N is None or (self.trimmed and not self.kept):
            return kept
        wide_N = stripping_N
        if self.trimmed:
            one_N = (cells.starts - starts_N).equals(1)
            at_first = starts_N.equals(first)
            wide_N = wide_N & (one_N & at_first)
        return replace(kept, starts=where(wide_N, starts_N, cells.starts))

    def _find_whole(self, symbols_M: Value, starts_M: Value) -> Value:
        """Add (M,): the ids of words that are one token, at their first symbols; -1
        elsewhere."""
        small = symbols_M.cast(TensorProto.INT32)
        words_M = starts_M.integers().cumsum()
        count = symbols_M.size(0)
        sizes = full(count, 1).sums(words_M, count + 1)
        return trie.begin_matches(self.whole, small, starts_M, sizes.max())[1]

    def _merge(self, ids_K: Value, first_K: Value, at_K: Value) -> tuple[Value, Value]:
        """Add the ids and places of the tokens of words, given the ids of their bytes,
        which of these are the first of a word, and their places. In each round every
        word merges all occurrences of its pair of the lowest rank, until none has a
        pair."""
        body = ids_K.graph.body("merge")
        body.input("step", shape=[])
        body.input("going", TensorProto.BOOL, [])
        ids = body.input("ids")
        first = body.input("first", TensorProto.BOOL)
        at = body.input("at")
        # its children are the left ids
        root = int(self.pairs.base[self.pairs.roots[0]])
        base = self.pairs.base[root : root + len(self.edges)]
        place = ids.look_up(base).integers() + ids.shift(-1)
        led = place.look_up(self.pairs.check).integers().equals(ids + root)
        later = ~first
        joins = led & later.shift(-1, bool)
        none = len(self.merged)
        rank = where(joins, place.look_up(self.pairs.value).integers(), none)
        # counted from 1
        word = first.integers().cumsum()
        key = word * (none + 1) + rank
        order, _ = key.sort()
        lowest = order[first.nonzero()][word - 1]
        chosen = joins & key.equals(lowest)
        # Of overlapping pairs, as in aaa, merge every second one
        other = ~chosen
        others = concat([-1], other.nonzero())
        latest = others[other.integers().cumsum()]
        odd = (arange(ids.size(0)) - latest) % 2
        chosen = chosen & odd.cast(TensorProto.BOOL)
        made = rank.look_up(np.append(self.merged, 0))
        kept = ~chosen.shift(1, bool)
        body.output(rank.min() < none, TensorProto.BOOL, [])
        body.output(where(chosen, made, ids).select(kept))
        body.output(first.select(kept), TensorProto.BOOL)
        body.output(at.select(kept))
        begin = ids_K.size(0).scalar() > 0
        ids_K, _, at_K = ids_K.graph.run(body, None, begin, ids_K, first_K, at_K)
        return ids_K, at_K

    def _trim(
        self,
        ids_T: Value,
        starts_T: Value,
        ends_T: Value,
        *,
        first: int,
    ) -> tuple[Value, Value]:
        """Add the spans (T,), (T,) without spaces, trimmed like tokenizers does;
        `first`: where texts begin."""
        edges = ids_T.look_up(self.edges)
        before = edges.take(0, axis=1)
        after = edges.take(1, axis=1)
        if self.kept:
            at_first = starts_T.equals(first).integers()
            own = before.equals(1).integers() * at_first
            before = before - own
        starts_T = minimum(starts_T + before, ends_T)
        shorter = ends_T - after
        possible = shorter >= first
        return starts_T, where(possible, maximum(shorter, starts_T), ends_T)


TRIMMING: Final = "ByteLevel", "RobertaProcessing"
"""The post-processors that trim offsets."""


def _is_blank(token: str) -> bool:
    kinds = _list_kinds()
    return all(kinds[ord(letter)] in (SPACE_CLASS, WHITE_CLASS) for letter in token)


def overlap(one: str, other: str) -> bool:
    """Check whether one text contains the other, or begins with the other's ending."""
    return any(
        first in second
        or any(first[-size:] == second[:size] for size in range(1, len(first)))
        for first, second in ((one, other), (other, one))
    )


def _list_merges(model: TokenizerJson) -> list[Sequence[str]]:
    return [
        pair.split(" ", 1) if isinstance(pair, str) else pair
        for pair in model["merges"]
    ]


def _list_normalizers(described: TokenizerJson) -> list[str]:
    normalizer = described["normalizer"] or {"normalizers": []}
    return [each["type"] for each in normalizer.get("normalizers", [normalizer])]


def _list_processors(described: TokenizerJson) -> list[TokenizerJson]:
    processor = described["post_processor"] or {"type": None}
    return processor["processors"] if processor["type"] == "Sequence" else [processor]


def _map_bytes() -> dict[str, int]:
    """Map GPT-2's letter for each byte to the byte: printable bytes are their own
    letters, all others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


def _count_spaces(token: str) -> tuple[int, int]:
    """Count the spaces at both ends of a token, whether or not they are written as
    letters."""
    begins = len(token) - len(re.sub(r"^[\u0120\s]+", "", token))
    ends = len(token) - len(re.sub(r"[\u0120\s]+\Z", "", token))
    return begins, ends


def _split(kinds_N: Value) -> Value:
    """Add (N,) bool: the cells at which a word begins by GPT-2's pattern, and all
    boundaries."""
    key = kinds_N.shift(1)
    for each in (kinds_N, kinds_N.shift(-1), kinds_N.shift(-2)):
        key = key * CELL_KINDS + each
    flags = np.array(
        [_find_flags(*kinds) for kinds in product(range(CELL_KINDS), repeat=4)],
        np.uint8,
    )
    flags_N = key.look_up(flags).integers()
    starts = flags_N % 2
    two = flags_N.equals(STARTS | TWO).integers()
    three = flags_N.equals(STARTS | THREE).integers()
    inside = two.shift(1) + three.shift(1)
    after = two.shift(2) + three.shift(3)
    return starts - inside + after > 0


def _find_flags(before: int, here: int, after: int, second: int) -> int:
    """Find the flags of a cell from its kind, the kind of the previous cell, and the
    kinds of the next two cells.

    The pattern: 's|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+|
    ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+
    """
    blank = SPACE_CLASS, WHITE_CLASS
    groups = dict.fromkeys((STMD, RV, L, E), LETTER) | {QUOTE: OTHER_CLASS}
    if BOUND in (before, here):
        starts = True
    elif here in blank:
        starts = before not in blank or after not in (*blank, BOUND)
    elif before in blank:
        starts = before == WHITE_CLASS
    else:
        starts = groups.get(before, before) != groups.get(here, here)
    if not starts:
        return 0
    if here == QUOTE and after == STMD:
        return STARTS | TWO
    return (
        STARTS | THREE
        if here == QUOTE and (after, second) in ((RV, E), (L, L))
        else STARTS
    )


@lru_cache(maxsize=1)
def _list_kinds() -> Longs:
    """List the kind of every character, as classified by the regular expressions of
    tokenizers."""
    every = "".join(
        chr(code) if code not in SURROGATES else " " for code in range(UNICODE)
    )
    kinds = np.full(UNICODE, OTHER_CLASS)
    for pattern, kind in (
        (r"\s+", WHITE_CLASS),
        (r"\p{L}+", LETTER),
        (r"\p{N}+", NUMBER_CLASS),
    ):
        found = pre_tokenizers.Split(
            Regex(pattern), "removed", invert=True
        ).pre_tokenize_str(every)
        for _, (first, end) in found:
            kinds[first:end] = kind
    for characters, kind in (
        (" ", SPACE_CLASS),
        ("stmd", STMD),
        ("rv", RV),
        ("l", L),
        ("e", E),
        ("'", QUOTE),
    ):
        kinds[[ord(character) for character in characters]] = kind
    return kinds


def _find_kinds(kinds: Longs, points_n: Value) -> Value:
    """Add the kinds of characters, given as code points."""
    blocks, numbers = np.unique(
        kinds.reshape(-1, WORDPIECE_BLOCK).astype(np.uint8), axis=0, return_inverse=True
    )
    size = WORDPIECE_BLOCK
    block_n = (points_n // size).look_up(numbers.reshape(-1))
    place_n = block_n * size + points_n % size
    return place_n.look_up(blocks.reshape(-1)).integers()


ROUND: Final = 1 << 32


def _find_bytes(strings_n: Value) -> tuple[Value, Value]:
    """Add the UTF-8 bytes (n, 4), with NO_SYMBOL as the fourth of three, and the code
    points (n,) of characters from U+0800 on.

    The hash is inverted step by step, from the last to the first; seed 0, one block of
    four bytes or a remainder of three.
    """
    long_n = contains(strings_n, ((PLANE, UNICODE - 1),)).cast(TensorProto.BOOL)
    four_n = long_n.integers()
    value = op("MurmurHash3", strings_n, domain=MICROSOFT, seed=0).integers()
    for shift, factor in ((16, 0xC2B2AE35), (13, 0x85EBCA6B)):
        value = _divide(_undo_shift(value, shift), factor)
    lengths = np.array([[size >> bit & 1 for bit in range(32)] for size in (3, 4)])
    value = _undo_shift(value, 16, flips=four_n.look_up(lengths))
    mixed = _divide(value - 0xE6546B64, 5)
    value = where(long_n, _rotate(mixed, 13), value)
    value = _divide(_rotate(_divide(value, 0x1B873593), 15), 0xCC9E2D51)
    places = [1 << 8 * place for place in range(MOST_BYTES_OF_CHARACTER)]
    bytes_n4 = columns(value) // places % 256
    shares = np.array([[1 << 12, 1 << 6, 1, 0], [1 << 18, 1 << 12, 1 << 6, 1]])
    marks = shares @ [[0xE0, 0xF0], [0x80, 0x80], [0x80, 0x80], [0, 0x80]]
    weighed = bytes_n4 * four_n.look_up(shares)
    points_n = weighed.sum(1) - four_n.look_up(marks.diagonal())
    missing = np.array([[0, 0, 0, NO_SYMBOL], [0] * MOST_BYTES_OF_CHARACTER])
    return bytes_n4 + four_n.look_up(missing), points_n


def _undo_shift(value: Value, shift: int, flips: Value | None = None) -> Value:
    """Add x of which x ^ (x >> shift) is `value`, with the bits `flips` (n, 32)
    inverted."""
    powers = [1 << bit for bit in range(32)]
    bits = columns(value) // powers % 2
    reads = sum(np.eye(32, k=-by, dtype=np.float32) for by in range(0, 32, shift))
    sums = op("MatMul", bits.cast(TensorProto.FLOAT), reads).integers()
    if flips is not None:
        sums = sums + flips
    return (sums % 2 * powers).sum(1)


def _divide(value: Value, factor: int) -> Value:
    """Add x of which x * factor is `value`, modulo 2^32."""
    inverse = pow(factor, -1, ROUND)
    # so that the product has 64 bits
    signed = inverse if inverse < ROUND // 2 else inverse - ROUND
    return value * signed % ROUND


def _rotate(value: Value, bits: int) -> Value:
    """Add 32-bit numbers rotated to the right."""
    low = value % (1 << bits) * (ROUND >> bits)
    return value // (1 << bits) + low
