"""Build byte-level BPE as a graph: GPT-2's splitting and merges by rank, on all bytes
of a batch at once.

Characters below U+0800 are listed in a `LabelEncoder`. The bytes of every other one are
recovered from its hash: the steps of MurmurHash3 (Austin Appleby), of which onnxruntime
has an operator, are bijections of 32 bits for a given length. A word that is a token is
found in a trie; all others are merged in rounds, in each of which every word merges its
pair of the lowest rank.

Shapes: R texts, N cells (characters, special tokens, boundaries) and M symbols (bytes,
special tokens, ends of words) of all texts, one after another, n characters that are
not listed, K tokens of words while they are merged, T tokens of all texts.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper
from tokenizers import Regex, Tokenizer, pre_tokenizers

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
from compress.exporters.tokenizer.nfc import compose, read_composition
from compress.exporters.tokenizer.trie import GraphBuilder
from compress.exporters.tokenizer.wordpiece import (
    PAD,
    SURROGATES,
    UNICODE,
    WORDPIECE_BLOCK,
    Tokens,
    contains,
    list_odd_tokens,
    number,
)

LISTED: Final = 0x800
"""Characters below have one byte or two in UTF-8."""
PLANE: Final = 0x10000
"""Characters from here on have four bytes."""

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
space, letters (of which some end 's, 've, 'll ...), numbers, all others, the
apostrophe, and the white space between a tagger's words."""

CELL_KINDS: Final = QUOTE + 1
STARTS = 1
TWO = 2
THREE = 4
"""Flags of a cell: a word starts here; a contraction of two, or of three, characters
does."""

NO_SYMBOL: Final = -1
WORD_END: Final = 256
"""Symbols: none, the end of a word; below are bytes, above special tokens."""

MOST_BYTES_OF_CHARACTER: Final = 4
"""The most bytes of a character."""


@dataclass(frozen=True)
class ByteLevel:
    """The parts of a byte-level BPE tokenizer.

    bytes      the id of each byte's token
    whole      the trie of words that are one token; of byte numbers and special
               symbols, followed by WORD_END
    pairs      the trie of pairs of ids that merge, valued by rank; merged: the id that
               each rank makes
    special    special tokens that are recognised in a text
    stripping  those that take the white space before them
    blank      those that consist of white space, which these take too
    prefix     whether a space is put before a text, and after a special token, where
               none is
    trimmed    whether offsets leave out spaces; with `kept`, all but the one before a
               text
    edges      the spaces that the token of each id begins and ends with
    composed   whether characters are composed, as by NFC
    """

    bytes: NDArray[np.int64]
    whole: trie.Trie
    pairs: trie.Trie
    merged: NDArray[np.int64]
    special: tuple[str, ...]
    stripping: tuple[str, ...]
    blank: tuple[str, ...]
    prefix: bool
    trimmed: bool
    kept: bool
    edges: NDArray[np.int64]
    composed: bool

    @staticmethod
    def list_unsupported(described: Mapping[str, Any]) -> list[str]:
        """List what the graph does not support in a tokenizer, given as its JSON."""
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
        cls, tokenizer: Tokenizer, described: Mapping[str, Any]
    ) -> "ByteLevel":
        """Read a tokenizer; `described`: its JSON, in which `list_unsupported` finds
        nothing."""
        model = described["model"]
        letters = _map_bytes()
        tokens = described["added_tokens"]
        vocabulary: dict[str, int] = model["vocab"]
        added = {token["content"]: token["id"] for token in tokens}
        words: dict[trie.Word, int] = {
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
        graph: GraphBuilder,
        texts_R: str,
        *,
        prompt: str = "",
        spans: bool = False,
        words: bool = False,
    ) -> Tokens:
        """Add the tokens of all texts, each after `prompt`, and with `spans` the
        characters that they cover; with `words` every text is a word that follows a
        space, or white space, which has no tokens.

        Raises ExportError for words of which a special token begins with the space
        before them.
        """
        for token in self.special:
            if words and re.match(r" (\S|$)", token):
                raise ExportError(
                    f"tokenizer.json: added token {token!r} begins with a space; a "
                    "tagger expects none"
                )
        cells, symbols, sizes_R = self._cells(
            graph, texts_R, prompt, spans=spans, words=words
        )
        end = graph.op(
            "Where",
            _split(graph, cells.kinds),
            graph.constant(WORD_END),
            graph.constant(NO_SYMBOL),
        )
        bytes_N4 = graph.op("Gather", symbols, cells.codes)
        flat = graph.flat(graph.op("Concat", graph.columns(end), bytes_N4, axis=1))
        real = graph.op("Greater", flat, graph.constant(NO_SYMBOL))
        symbols_M = graph.select(flat, real)
        cells_M = graph.op(
            "Div",
            graph.flat(graph.op("NonZero", real)),
            graph.constant(MOST_BYTES_OF_CHARACTER + 1),
        )
        ended_M = graph.op("Equal", symbols_M, graph.constant(WORD_END))
        starts_M = graph.shift(ended_M, 1, bool)
        ids_M = self._find_whole(graph, symbols_M, starts_M)
        words_M = graph.op("CumSum", graph.integers(ended_M), graph.constant(0))
        places = graph.op("Add", graph.size(symbols_M, 0), graph.constant([1]))
        found = graph.sums(
            graph.integers(graph.op("GreaterOrEqual", ids_M, graph.constant(0))),
            words_M,
            places,
        )
        known_M = graph.op(
            "Greater", graph.op("Gather", found, words_M), graph.constant(0)
        )
        open_M = graph.op("Not", graph.op("Or", ended_M, known_M))
        bytes_K = graph.op(
            "Gather", graph.constant(self.bytes), graph.select(symbols_M, open_M)
        )
        at_K = graph.flat(graph.op("NonZero", open_M))
        ids_K, at_K = self._merge(graph, bytes_K, graph.select(starts_M, open_M), at_K)
        ids_M = graph.op("ScatterElements", ids_M, at_K, ids_K, axis=0)
        token_M = graph.op("GreaterOrEqual", ids_M, graph.constant(0))
        ids_T = graph.select(ids_M, token_M)
        cells_T = graph.select(cells_M, token_M)
        tokens = Tokens(ids_T, graph.op("Gather", cells.rows, cells_T), sizes_R=sizes_R)
        if not spans:
            return tokens
        inside_M = graph.op("Not", ended_M)  # every such symbol is covered by a token
        order_M = graph.op(
            "CumSum", graph.integers(inside_M), graph.constant(0), exclusive=1
        )
        inside = graph.select(cells_M, inside_M)
        after_T = graph.op(
            "Concat", graph.select(order_M, token_M), graph.size(inside, 0), axis=0
        )
        last_T = graph.op(
            "Gather",
            inside,
            graph.op("Sub", graph.slice(after_T, 1), graph.constant(1)),
        )
        starts_T = graph.op("Gather", cells.starts, cells_T)
        ends_T = graph.op("Gather", cells.ends, last_T)
        if self.trimmed:
            starts_T, ends_T = self._trim(
                graph, ids_T, starts_T, ends_T, first=-1 if words else 0
            )
        return replace(tokens, spans_T2=graph.columns(starts_T, ends_T))

    def _cells(
        self,
        graph: GraphBuilder,
        texts_R: str,
        prompt: str,
        *,
        spans: bool,
        words: bool,
    ) -> tuple[Cells, str, str]:
        """Add the cells of all texts, each with a boundary after it; the symbols
        (codes, 4) of all codes; and with `spans` the characters of each text."""
        strings_RC, rows_N = cut_texts(graph, texts_R, self.special, prompt)
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
            graph, strings_RC, listed | special_codes | {PAD: boundary}, NO_SYMBOL
        )
        codes_N = graph.flat(codes_RC)
        unlisted_N = graph.op("Less", codes_N, graph.constant(0))
        bytes_n4, points_n = _find_bytes(
            graph, graph.select(graph.flat(strings_RC), unlisted_N)
        )
        beyond = graph.constant(boundary + 1 + len(letters))
        own_n = graph.op("Add", graph.numbers(graph.size(points_n, 0)), beyond)
        codes_N = graph.op(
            "ScatterElements",
            codes_N,
            graph.flat(graph.op("NonZero", unlisted_N)),
            own_n,
            axis=0,
        )
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
        known = graph.op(
            "Concat", graph.constant(kinds), _find_kinds(graph, every, points_n), axis=0
        )
        cells = Cells(codes_N, rows_N)
        sizes_R = ""
        if spans:
            # The last one is of characters that are not listed
            lengths = [*[1] * LISTED, *map(len, self.special), 0, 1]
            cells, sizes_R = measure(
                graph, cells, graph.op("Shape", codes_RC), lengths, lengths
            )
        if self.composed:
            cells = compose(
                graph,
                cells,
                {letter: listed[letter] for letter in read_composition().letters},
            )
        cells = replace(cells, kinds=graph.op("Gather", known, cells.codes))
        cells = drop_repeated(graph, cells, boundary)
        if words:
            white_N = is_among(graph, cells.kinds, [DROPPED])
            if self.blank:
                blank_N = is_among(
                    graph, cells.codes, [special_codes[token] for token in self.blank]
                )
                white_N = graph.op("Or", white_N, blank_N)
            cells = insert_spaces(
                graph,
                cells,
                white_N,
                boundary=boundary,
                code=ord(" "),
                kind=SPACE_CLASS,
            )
        if self.stripping:
            stripping, blank = (
                [special_codes[token] for token in tokens]
                for tokens in (self.stripping, self.blank)
            )
            cells = self._take_spaces(
                graph, cells, stripping, blank, first=-1 if words else 0
            )
        if self.prefix:
            begins = is_among(graph, graph.shift(cells.kinds, 1), [BOUND])
            spaced = is_among(graph, cells.kinds, [BOUND, SPACE_CLASS])
            needed = graph.op("And", begins, graph.op("Not", spaced))
            cells = insert(
                graph, cells, needed, code=ord(" "), kind=SPACE_CLASS, width=0
            )
        return (
            cells,
            graph.op("Concat", graph.constant(table), bytes_n4, axis=0),
            sizes_R,
        )

    def _take_spaces(
        self,
        graph: GraphBuilder,
        cells: Cells,
        stripping: Sequence[int],
        blank: Sequence[int],
        *,
        first: int,
    ) -> Cells:
        """Let special tokens take the white space before them, which their spans cover
        unless they are trimmed."""
        stripping_N = is_among(graph, cells.codes, stripping)
        blank_N = is_among(graph, cells.kinds, [SPACE_CLASS, WHITE_CLASS])
        if blank:
            blank_N = graph.op("Or", blank_N, is_among(graph, cells.codes, blank))
        kept, starts_N = take_spaces(
            graph, cells, stripping_N, blank_N, boundary=LISTED + len(self.special)
        )
        if not cells.starts or (self.trimmed and not self.kept):
            return kept
        wide_N = stripping_N
        if self.trimmed:
            one_N = graph.op(
                "Equal", graph.op("Sub", cells.starts, starts_N), graph.constant(1)
            )
            at_first = graph.op("Equal", starts_N, graph.constant(first))
            wide_N = graph.op("And", wide_N, graph.op("And", one_N, at_first))
        return replace(kept, starts=graph.op("Where", wide_N, starts_N, cells.starts))

    def _find_whole(self, graph: GraphBuilder, symbols_M: str, starts_M: str) -> str:
        """Add (M,): the ids of words that are one token, at their first symbols; -1
        elsewhere."""
        root, dead = (
            graph.constant(np.array(state, np.int32))
            for state in (*self.whole.roots, trie.DEAD)
        )
        small = graph.op("Cast", symbols_M, to=TensorProto.INT32)
        begin_M = graph.op("Where", starts_M, root, dead)
        words_M = graph.op("CumSum", graph.integers(starts_M), graph.constant(0))
        count = graph.size(symbols_M, 0)
        sizes = graph.sums(
            graph.full(count, 1), words_M, graph.op("Add", count, graph.constant([1]))
        )
        longest = graph.op("ReduceMax", sizes, keepdims=0)
        return trie.longest_matches(graph, self.whole, small, begin_M, longest=longest)[
            1
        ]

    def _merge(
        self, graph: GraphBuilder, ids_K: str, first_K: str, at_K: str
    ) -> tuple[str, str]:
        """Add the ids and places of the tokens of words, given the ids of their bytes,
        which of these are the first of a word, and their places. In each round every
        word merges all occurrences of its pair of the lowest rank, until none has a
        pair."""
        body = GraphBuilder(f"{graph.prefix}/merge")
        step, going, ids, first, at = (
            f"{body.prefix}/{name}" for name in ("step", "on", "ids", "first", "at")
        )
        # its children are the left ids
        root = int(self.pairs.base[self.pairs.roots[0]])
        base = body.constant(self.pairs.base[root : root + len(self.edges)])
        check = body.constant(self.pairs.check)
        value = body.constant(self.pairs.value)
        state = body.op("Add", ids, body.constant(root))
        place = body.op(
            "Add", body.integers(body.op("Gather", base, ids)), body.shift(ids, -1)
        )
        led = body.op("Equal", body.integers(body.op("Gather", check, place)), state)
        later = body.op("Not", first)
        joins = body.op("And", led, body.shift(later, -1, bool))
        none = body.constant(len(self.merged))
        rank = body.op(
            "Where", joins, body.integers(body.op("Gather", value, place)), none
        )
        # counted from 1
        word = body.op("CumSum", body.integers(first), body.constant(0))
        key = body.op(
            "Add", body.op("Mul", word, body.constant(len(self.merged) + 1)), rank
        )
        count = body.size(ids, 0)
        order = f"{body.prefix}/sorted"
        body.nodes.append(
            helper.make_node(
                "TopK", [key, count], [order, f"{order}_from"], name=order, largest=0
            )
        )
        lowest = body.op("Gather", order, body.flat(body.op("NonZero", first)))
        lowest = body.op("Gather", lowest, body.op("Sub", word, body.constant(1)))
        chosen = body.op("And", joins, body.op("Equal", key, lowest))
        # Of pairs that overlap, as in aaa, every second one
        other = body.op("Not", chosen)
        others = body.op(
            "Concat", body.constant([-1]), body.flat(body.op("NonZero", other)), axis=0
        )
        latest = body.op(
            "Gather", others, body.op("CumSum", body.integers(other), body.constant(0))
        )
        odd = body.op(
            "Mod", body.op("Sub", body.numbers(count), latest), body.constant(2)
        )
        chosen = body.op("And", chosen, body.op("Cast", odd, to=TensorProto.BOOL))
        made = body.op("Gather", body.constant(np.append(self.merged, 0)), rank)
        kept = body.op("Not", body.shift(chosen, 1, bool))
        after = [
            body.select(each, kept)
            for each in (body.op("Where", chosen, made, ids), first, at)
        ]
        more = body.op("Less", body.op("ReduceMin", rank, keepdims=0), none)
        types = TensorProto.INT64, TensorProto.BOOL, TensorProto.INT64
        inputs = [
            helper.make_tensor_value_info(step, TensorProto.INT64, []),
            helper.make_tensor_value_info(going, TensorProto.BOOL, []),
            *(
                helper.make_tensor_value_info(*each, [None])
                for each in zip((ids, first, at), types, strict=True)
            ),
        ]
        outputs = [
            helper.make_tensor_value_info(more, TensorProto.BOOL, []),
            *(
                helper.make_tensor_value_info(*each, [None])
                for each in zip(after, types, strict=True)
            ),
        ]
        rounds = helper.make_graph(body.nodes, "merge", inputs, outputs, body.constants)
        begin = graph.op(
            "Greater", graph.scalar(graph.size(ids_K, 0)), graph.constant(0)
        )
        ended = f"{graph.prefix}/Loop_{len(graph.nodes)}"
        given = ["", begin, ids_K, first_K, at_K]
        left = [f"{ended}/{name}" for name in ("ids", "first", "at")]
        graph.nodes.append(
            helper.make_node("Loop", given, left, name=ended, body=rounds)
        )
        return left[0], left[2]

    def _trim(
        self, graph: GraphBuilder, ids_T: str, starts_T: str, ends_T: str, *, first: int
    ) -> tuple[str, str]:
        """Add the spans (T,), (T,) without spaces, as tokenizers trims them; `first`:
        where texts begin."""
        edges = graph.op("Gather", graph.constant(self.edges), ids_T)
        before = graph.op("Gather", edges, graph.constant(0), axis=1)
        after = graph.op("Gather", edges, graph.constant(1), axis=1)
        if self.kept:
            at_first = graph.integers(
                graph.op("Equal", starts_T, graph.constant(first))
            )
            own = graph.op(
                "Mul",
                graph.integers(graph.op("Equal", before, graph.constant(1))),
                at_first,
            )
            before = graph.op("Sub", before, own)
        starts_T = graph.op("Min", graph.op("Add", starts_T, before), ends_T)
        shorter = graph.op("Sub", ends_T, after)
        possible = graph.op("GreaterOrEqual", shorter, graph.constant(first))
        return starts_T, graph.op(
            "Where", possible, graph.op("Max", shorter, starts_T), ends_T
        )


TRIMMING: Final = "ByteLevel", "RobertaProcessing"
"""The post-processors that trim offsets."""


def _is_blank(token: str) -> bool:
    kinds = _list_kinds()
    return all(kinds[ord(letter)] in (SPACE_CLASS, WHITE_CLASS) for letter in token)


def overlap(one: str, other: str) -> bool:
    """Check whether one text contains the other, or begins as the other ends."""
    return any(
        first in second
        or any(first[-size:] == second[:size] for size in range(1, len(first)))
        for first, second in ((one, other), (other, one))
    )


def _list_merges(model: Mapping[str, Any]) -> list[Sequence[str]]:
    return [
        pair.split(" ", 1) if isinstance(pair, str) else pair
        for pair in model["merges"]
    ]


def _list_normalizers(described: Mapping[str, Any]) -> list[str]:
    normalizer = described["normalizer"] or {"normalizers": []}
    return [each["type"] for each in normalizer.get("normalizers", [normalizer])]


def _list_processors(described: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    processor = described["post_processor"] or {"type": None}
    return processor["processors"] if processor["type"] == "Sequence" else [processor]


def _map_bytes() -> dict[str, int]:
    """Map GPT-2's letter of each byte to the byte: printable ones are their own, all
    others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


def _count_spaces(token: str) -> tuple[int, int]:
    """Count the spaces, written as a letter or not, at both ends of a token."""
    begins = len(token) - len(re.sub(r"^[\u0120\s]+", "", token))
    ends = len(token[::-1]) - len(re.sub(r"^[\u0120\s]+", "", token[::-1]))
    return begins, ends


def _split(graph: GraphBuilder, kinds_N: str) -> str:
    """Add (N,) bool: the cells at which a word begins by GPT-2's pattern, and all
    boundaries."""
    key = graph.shift(kinds_N, 1)
    for each in (kinds_N, graph.shift(kinds_N, -1), graph.shift(kinds_N, -2)):
        key = graph.op("Add", graph.op("Mul", key, graph.constant(CELL_KINDS)), each)
    flags = np.array(
        [_find_flags(*kinds) for kinds in product(range(CELL_KINDS), repeat=4)],
        np.uint8,
    )
    flags_N = graph.integers(graph.op("Gather", graph.constant(flags), key))
    starts = graph.op("Mod", flags_N, graph.constant(2))
    two = graph.integers(graph.op("Equal", flags_N, graph.constant(STARTS | TWO)))
    three = graph.integers(graph.op("Equal", flags_N, graph.constant(STARTS | THREE)))
    inside = graph.op("Add", graph.shift(two, 1), graph.shift(three, 1))
    after = graph.op("Add", graph.shift(two, 2), graph.shift(three, 3))
    return graph.op(
        "Greater",
        graph.op("Add", graph.op("Sub", starts, inside), after),
        graph.constant(0),
    )


def _find_flags(before: int, here: int, after: int, second: int) -> int:
    """Find the flags of a cell from its kind, that of the cell before it, and those of
    two cells after it.

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
def _list_kinds() -> NDArray[np.int64]:
    """List the kind of every character, as the regular expressions of tokenizers see
    it."""
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


def _find_kinds(graph: GraphBuilder, kinds: NDArray[np.int64], points_n: str) -> str:
    """Add the kinds of characters, given as code points."""
    blocks, numbers = np.unique(
        kinds.reshape(-1, WORDPIECE_BLOCK).astype(np.uint8), axis=0, return_inverse=True
    )
    size = graph.constant(WORDPIECE_BLOCK)
    block_n = graph.op(
        "Gather", graph.constant(numbers.reshape(-1)), graph.op("Div", points_n, size)
    )
    place_n = graph.op(
        "Add", graph.op("Mul", block_n, size), graph.op("Mod", points_n, size)
    )
    return graph.integers(
        graph.op("Gather", graph.constant(blocks.reshape(-1)), place_n)
    )


ROUND: Final = 1 << 32


def _find_bytes(graph: GraphBuilder, strings_n: str) -> tuple[str, str]:
    """Add the UTF-8 bytes (n, 4), the fourth of three NO_SYMBOL, and the code points
    (n,) of characters from U+0800 on.

    The hash is undone step by step, from the last to the first; seed 0, one block of
    four bytes or a rest of three.
    """
    long_n = graph.op(
        "Cast", contains(graph, strings_n, ((PLANE, UNICODE - 1),)), to=TensorProto.BOOL
    )
    four_n = graph.integers(long_n)
    value = graph.integers(graph.op("MurmurHash3", strings_n, domain=MICROSOFT, seed=0))
    for shift, factor in ((16, 0xC2B2AE35), (13, 0x85EBCA6B)):
        value = _divide(graph, _undo_shift(graph, value, shift), factor)
    lengths = np.array([[size >> bit & 1 for bit in range(32)] for size in (3, 4)])
    value = _undo_shift(
        graph, value, 16, flips=graph.op("Gather", graph.constant(lengths), four_n)
    )
    mixed = _divide(graph, graph.op("Sub", value, graph.constant(0xE6546B64)), 5)
    value = graph.op("Where", long_n, _rotate(graph, mixed, 13), value)
    value = _divide(
        graph, _rotate(graph, _divide(graph, value, 0x1B873593), 15), 0xCC9E2D51
    )
    places = graph.constant(
        [1 << 8 * place for place in range(MOST_BYTES_OF_CHARACTER)]
    )
    bytes_n4 = graph.op(
        "Mod", graph.op("Div", graph.columns(value), places), graph.constant(256)
    )
    shares = np.array([[1 << 12, 1 << 6, 1, 0], [1 << 18, 1 << 12, 1 << 6, 1]])
    marks = shares @ [[0xE0, 0xF0], [0x80, 0x80], [0x80, 0x80], [0, 0x80]]
    weighed = graph.op(
        "Mul", bytes_n4, graph.op("Gather", graph.constant(shares), four_n)
    )
    points_n = graph.op("ReduceSum", weighed, graph.constant([1]), keepdims=0)
    points_n = graph.op(
        "Sub", points_n, graph.op("Gather", graph.constant(marks.diagonal()), four_n)
    )
    missing = graph.op(
        "Gather",
        graph.constant(np.array([[0, 0, 0, NO_SYMBOL], [0] * MOST_BYTES_OF_CHARACTER])),
        four_n,
    )
    return graph.op("Add", bytes_n4, missing), points_n


def _undo_shift(
    graph: GraphBuilder, value: str, shift: int, flips: str | None = None
) -> str:
    """Add x of which x ^ (x >> shift) is `value`, with the bits `flips` (n, 32)
    inverted."""
    powers = graph.constant([1 << bit for bit in range(32)])
    bits = graph.op(
        "Mod", graph.op("Div", graph.columns(value), powers), graph.constant(2)
    )
    reads = sum(np.eye(32, k=-by, dtype=np.float32) for by in range(0, 32, shift))
    sums = graph.integers(
        graph.op(
            "MatMul",
            graph.op("Cast", bits, to=TensorProto.FLOAT),
            graph.constant(reads),
        )
    )
    bits = graph.op(
        "Mod", graph.op("Add", sums, flips) if flips else sums, graph.constant(2)
    )
    return graph.op(
        "ReduceSum", graph.op("Mul", bits, powers), graph.constant([1]), keepdims=0
    )


def _divide(graph: GraphBuilder, value: str, factor: int) -> str:
    """Add x of which x * factor is `value`, modulo 2^32."""
    inverse = pow(factor, -1, ROUND)
    # so that the product has 64 bits
    signed = inverse if inverse < ROUND // 2 else inverse - ROUND
    return graph.op(
        "Mod", graph.op("Mul", value, graph.constant(signed)), graph.constant(ROUND)
    )


def _rotate(graph: GraphBuilder, value: str, bits: int) -> str:
    """Add 32-bit numbers rotated to the right."""
    low = graph.op(
        "Mul",
        graph.op("Mod", value, graph.constant(1 << bits)),
        graph.constant(ROUND >> bits),
    )
    return graph.op("Add", graph.op("Div", value, graph.constant(1 << bits)), low)
