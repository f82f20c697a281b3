"""Build Unigram as a graph: SentencePiece's normalisation and the best segmentation of
every word, on all words of a batch at once.

All pieces that begin at each character are found in a trie. Then one round for each
character of the longest word adds, for the segmentations of every word that end there,
the score of the best one, in double precision and in the order in which tokenizers
adds; of equal ones it takes the longest last piece, as tokenizers does.

Shapes: R texts, N cells (characters, special tokens, ends of texts), M the same after
normalisation, W words, T tokens of all texts, one after another; K characters of the
longest piece.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations, product
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper
from tokenizers import Tokenizer, normalizers

from compress.errors import ExportError
from compress.exporters.tokenizer import trie
from compress.exporters.tokenizer.bytelevel import overlap
from compress.exporters.tokenizer.cells import (
    Cells,
    cut_texts,
    drop_repeated,
    gather,
    insert,
    insert_spaces,
    is_among,
    measure,
    select,
    take_spaces,
)
from compress.exporters.tokenizer.charsmap import (
    CHARSMAP_CLASSES,
    CLUSTER_BYTES,
    CONTROL,
    JOINED,
    OTHER_CHARACTER,
    find_classes,
    is_cluster,
    list_odd_keys,
    read_charsmap,
)
from compress.exporters.tokenizer.nfc import compose, read_composition
from compress.exporters.tokenizer.trie import GraphBuilder
from compress.exporters.tokenizer.wordpiece import (
    FIRST,
    NO_STATE,
    PAD,
    PIECE_END,
    SURROGATES,
    UNICODE,
    UNKNOWN,
    WORDPIECE_BLOCK,
    Tokens,
    isolate,
    list_odd_tokens,
    number,
    spell,
)

PENALTY: Final = 10.0
"""A character that is not a piece scores this much less than the piece with the least
score."""

SINGLE: Final = ("NFD", "NFKD", "StripAccents", "Lowercase", "Nmt")
"""The normalisers that change every character by itself; NFD and NFKD do if accents are
stripped after them."""

ONE_SPACE: Final = " "
SPACES_PATTERN: Final = {"Regex": " {2,}"}
BLANKS: Final = {"Regex": r"\s{2,}|[\n\r\t]"}

INNER, WHITE_KIND, SEPARATOR = range(3)
"""Kinds of characters: white space for tokenizers, and what only Python's regular
expressions take for it."""

SEPARATORS: Final = frozenset("\x1c\x1d\x1e\x1f")
BLANK: Final = frozenset(filter(str.isspace, map(chr, range(UNICODE))))


@dataclass(frozen=True)
class Normalizer:
    """The steps of a normaliser, in order; any may be missing.

    replaced    texts that become others
    single      normalisers of single characters, as tokenizer.json has them
    blanks      whether white space of several characters, or of several kinds, becomes
                a space
    composed    whether characters are composed, as by NFC
    before      the sides on which white space is stripped
    keys        what characters and clusters of several become: see `charsmap`
    after       the sides on which white space is stripped
    joined      whether several spaces become one
    """

    replaced: Mapping[str, str]
    single: tuple[Mapping[str, Any], ...]
    blanks: bool
    composed: bool
    before: frozenset[str]
    keys: Mapping[str, str]
    after: frozenset[str]
    joined: bool


def read_normalizer(described: Mapping[str, Any] | None, mark: str) -> Normalizer:
    """Read a normaliser, given as JSON; `mark` stands for a space. Raises ExportError
    for one that has other steps, or another order."""
    parts = list(described.get("normalizers", [described])) if described else []

    def take(*kinds: str, most: int = 1) -> list[Mapping[str, Any]]:
        found: list[Mapping[str, Any]] = []
        while parts and parts[0]["type"] in kinds and len(found) < most:
            found.append(parts.pop(0))
        return found

    def sides(found: Sequence[Mapping[str, Any]]) -> frozenset[str]:
        return frozenset(
            side
            for each in found
            for side in ("left", "right")
            if each[f"strip_{side}"]
        )

    texts: dict[str, str] = {}
    while parts and parts[0]["type"] == "Replace" and "String" in parts[0]["pattern"]:
        replace_text = parts.pop(0)
        texts[replace_text["pattern"]["String"]] = replace_text["content"]
    for (one, made), (other, also) in combinations(texts.items(), 2):
        if set(one) & set(other + also) or set(other) & set(made):
            raise ExportError(
                f"normalizer Replace of {one!r} and {other!r}, which have a character "
                "in common"
            )
    single = take(*SINGLE, most=len(SINGLE))
    kinds = [each["type"] for each in single]
    for kind in {"NFD", "NFKD"}.intersection(kinds):
        if "StripAccents" not in kinds[kinds.index(kind) :]:
            raise ExportError(
                f"normalizer {kind} without StripAccents after it, which sorts the "
                "marks of a letter"
            )
    blanks = (
        bool(parts)
        and parts[0].get("pattern") == BLANKS
        and parts.pop(0)["content"] == ONE_SPACE
    )
    composed = bool(take("NFC"))
    before = sides(take("Strip"))
    maps = [
        read_charsmap(base64.b64decode(each["precompiled_charsmap"]))
        for each in take("Precompiled")
    ]
    after = sides(take("Strip"))
    joined = (
        bool(parts)
        and parts[0].get("pattern") == SPACES_PATTERN
        and parts[0]["content"] in (ONE_SPACE, mark)
    )
    if other_steps := parts[joined:]:
        kind = other_steps[0]["type"]
        pattern = other_steps[0].get("pattern", {})
        named = " of ".join((kind, *map(repr, pattern.values())))
        raise ExportError(
            f"normalizer {named} (expected Replace, {', '.join(SINGLE)}, NFC, Strip, "
            "Precompiled, Strip, and Replace of several spaces by one, in this order)"
        )
    return Normalizer(
        texts, tuple(single), blanks, composed, before, dict(*maps), after, joined
    )


@dataclass(frozen=True)
class Unigram:
    """The parts of a Unigram tokenizer.

    normal      its normaliser
    listed      character, or text that is replaced -> the characters that it is for the
                later steps
    symbols     character, or special token -> symbol
    pieces      the trie of pieces, special tokens and ends of texts, valued by their
                number
    ids         the token of each piece, -1 of the end of a text; then of a character
                that is no piece
    scores      the score of each of these; then minus infinity
    special     special tokens that are recognised in a text; stripping: those that take
                the white space before them
    unknown     the id of the unknown token
    mark        the character that stands for a space; prepended: where it is put before
                a text: first, always, never
    splits      whether every mark begins a word; blank: whether white space separates
                words
    """

    normal: Normalizer
    listed: Mapping[str, str]
    symbols: Mapping[str, int]
    pieces: trie.Trie
    ids: NDArray[np.int64]
    scores: NDArray[np.float64]
    special: tuple[str, ...]
    stripping: tuple[str, ...]
    unknown: int
    mark: str
    prepended: str
    splits: bool
    blank: bool

    @staticmethod
    def list_unsupported(described: Mapping[str, Any]) -> list[str]:
        """List what the graph does not support in a tokenizer, given as its JSON."""
        model = described["model"]
        wrong = list_odd_tokens(described, ("single_word", "rstrip", "normalized"))
        if model["unk_id"] is None:
            wrong.append("model Unigram without unk_id (expected an unknown token)")
        if model.get("byte_fallback"):
            wrong.append("model Unigram with byte_fallback (expected none)")
        if (least := min(score for _, score in model["vocab"])) > PENALTY:
            wrong.append(
                f"model Unigram with scores from {least} (expected log probabilities)"
            )
        splitters = _list_splitters(described)
        kinds = [part["type"] for part in splitters]
        if kinds not in (["Metaspace"], ["WhitespaceSplit", "Metaspace"]):
            return [
                *wrong,
                f"pre_tokenizer {' and '.join(kinds) or None} (expected "
                "WhitespaceSplit and Metaspace)",
            ]
        if len(kinds) == 2 and splitters[-1]["prepend_scheme"] == "first":
            wrong.append(
                "pre_tokenizer WhitespaceSplit and Metaspace with prepend_scheme first "
                "(expected always)"
            )
        try:
            normal = read_normalizer(
                described["normalizer"], splitters[-1]["replacement"]
            )
        except ExportError as error:
            return [*wrong, str(error)]
        if odd := list_odd_keys(normal.keys):
            wrong.append(
                f"normalizer Precompiled with {', '.join(map(repr, odd[:3]))} among "
                "its keys"
            )
        tokens = [token["content"] for token in described["added_tokens"]]
        wrong += [
            f"added token {one!r}, which overlaps {other!r}, which the normalizer "
            "replaces"
            for one, other in product(tokens, normal.replaced)
            if overlap(one, other)
        ]
        return wrong + [
            f"added token {token!r}, which begins with white space"
            for token in tokens
            if token[0] in BLANK
        ]

    @classmethod
    def from_tokenizer(
        cls, tokenizer: Tokenizer, described: Mapping[str, Any]
    ) -> "Unigram":
        """Read a tokenizer; `described`: its JSON, in which `list_unsupported` finds
        nothing."""
        model = described["model"]
        splitters = _list_splitters(described)
        mark: str = splitters[-1]["replacement"]
        normal = read_normalizer(described["normalizer"], mark)
        special = {token["content"]: token["id"] for token in described["added_tokens"]}
        changed = _list_changed(json.dumps(normal.single))
        pieces = {
            piece: (index, score)
            for index, (piece, score) in enumerate(model["vocab"])
            if piece
        }
        letters = {*BLANK, *"".join(pieces), *"".join(normal.keys)}
        if normal.keys:
            letters.update(
                map(chr, np.flatnonzero(find_classes() != OTHER_CHARACTER).tolist())
            )
        # nothing is left of these
        letters -= changed.keys() - set(
            "".join((*changed.values(), *normal.keys.values()))
        )
        letters |= {
            mark,
            ONE_SPACE,
            *(read_composition().letters if normal.composed else ()),
        }
        symbols = {letter: index for index, letter in enumerate(sorted(letters), FIRST)}
        listed = {
            each: changed.get(each, each)
            for each in sorted(letters | changed.keys() | BLANK)
        }
        listed |= {
            text: "".join(changed.get(each, each) for each in made)
            for text, made in normal.replaced.items()
        }
        spelled: dict[trie.Symbols, int] = {
            tuple(symbols[letter] for letter in piece): index
            for index, piece in enumerate(pieces)
            if letters.issuperset(piece)
        }
        own = range(FIRST + len(symbols), FIRST + len(symbols) + len(special))
        spelled |= {
            (symbol,): len(pieces) + index
            for index, symbol in enumerate((*own, PIECE_END))
        }
        scores = [score for _, score in pieces.values()]
        return cls(
            normal=normal,
            listed=listed,
            symbols=symbols,
            pieces=trie.build([spelled], own.stop),
            ids=np.array(
                [
                    *(key for key, _ in pieces.values()),
                    *special.values(),
                    -1,
                    model["unk_id"],
                ]
            ),
            scores=np.array(
                [*scores, *[0.0] * (len(special) + 1), min(scores) - PENALTY, -np.inf]
            ),
            special=tuple(special),
            stripping=tuple(
                token["content"]
                for token in described["added_tokens"]
                if token["lstrip"]
            ),
            unknown=model["unk_id"],
            mark=mark,
            prepended=splitters[-1]["prepend_scheme"],
            splits=splitters[-1].get("split", True),
            blank=len(splitters) == 2,
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
        space, or white space, which has no tokens."""
        cells, sizes_R = self._read(graph, texts_R, prompt, spans=spans, words=words)
        cells = self._split(graph, self._normalize(graph, cells))
        numbers_T, firsts_T, lasts_T = self._segment(graph, cells)
        ids_T = graph.look_up(self.ids, numbers_T)
        unknown_T = graph.op("Equal", ids_T, graph.constant(self.unknown))
        within_T = graph.op(
            "Equal", graph.op("Gather", cells.kinds, firsts_T), graph.constant(0)
        )
        # Of unknown characters in a row, in a word, all but the first
        more_T = graph.op(
            "And", graph.op("And", unknown_T, within_T), graph.shift(unknown_T, 1, bool)
        )
        real_T = graph.op("GreaterOrEqual", ids_T, graph.constant(0))
        begun_T = graph.op("And", real_T, graph.op("Not", more_T))
        firsts = graph.select(firsts_T, begun_T)
        tokens = Tokens(
            graph.select(ids_T, begun_T),
            graph.op("Gather", cells.rows, firsts),
            sizes_R=sizes_R,
        )
        if not spans:
            return tokens
        ended_T = graph.op(
            "And", real_T, graph.op("Not", graph.shift(more_T, -1, bool))
        )
        ends = graph.op("Gather", cells.ends, graph.select(lasts_T, ended_T))
        return replace(
            tokens,
            spans_T2=graph.columns(graph.op("Gather", cells.starts, firsts), ends),
        )

    def _number_special(self) -> dict[str, int]:
        """Return the symbols of special tokens."""
        return {
            token: index
            for index, token in enumerate(self.special, FIRST + len(self.symbols))
        }

    def _is_edge(self, graph: GraphBuilder, codes_N: str) -> str:
        return is_among(graph, codes_N, [PIECE_END, *self._number_special().values()])

    def _is_white(self, graph: GraphBuilder, codes_N: str) -> str:
        return is_among(
            graph,
            codes_N,
            [self.symbols[each] for each in BLANK - SEPARATORS if each in self.symbols],
        )

    def _read(
        self,
        graph: GraphBuilder,
        texts_R: str,
        prompt: str,
        *,
        spans: bool,
        words: bool,
    ) -> tuple[Cells, str]:
        """Add the cells of all texts, of which each ends with a boundary, as symbols,
        after the normalisers of single characters; and with `spans` the characters of
        each text."""
        rows = {_Row((UNKNOWN,)): 0, _Row((PIECE_END,), 0, 0): 1}
        numbers = {PAD: 1}
        for text, made in self.listed.items():
            spelled = tuple(self.symbols.get(each, UNKNOWN) for each in made)
            kind = INNER
            if text in BLANK:
                kind = SEPARATOR if text in SEPARATORS else WHITE_KIND
            row = _Row(spelled, len(text), 1, kind)
            numbers[text] = rows.setdefault(row, len(rows))
        for token, symbol in self._number_special().items():
            numbers[token] = rows.setdefault(
                _Row((symbol,), len(token), len(token)), len(rows)
            )
        strings_RC, rows_N = cut_texts(
            graph, texts_R, (*self.special, *self.normal.replaced), prompt
        )
        codes_RC = number(graph, strings_RC, numbers, 0)
        cells = Cells(graph.flat(codes_RC), rows_N)
        sizes_R = ""
        if spans:
            lengths, covered = (
                [getattr(row, name) for row in rows] for name in ("length", "covered")
            )
            cells, sizes_R = measure(
                graph, cells, graph.op("Shape", codes_RC), lengths, covered
            )
        boundary = numbers[PAD]
        cells = drop_repeated(graph, cells, boundary)
        white, dropped = (
            [index for row, index in rows.items() if row.kind in kinds]
            for kinds in ((WHITE_KIND,), (WHITE_KIND, SEPARATOR))
        )
        if words:
            dropped_N = is_among(graph, cells.codes, dropped)
            cells = insert_spaces(
                graph, cells, dropped_N, boundary=boundary, code=numbers[ONE_SPACE]
            )
        if self.stripping:
            stripping_N = is_among(
                graph, cells.codes, [numbers[token] for token in self.stripping]
            )
            white_N = is_among(graph, cells.codes, white)
            kept, starts_N = take_spaces(
                graph, cells, stripping_N, white_N, boundary=boundary
            )
            starts_N = starts_N and graph.op(
                "Where", stripping_N, starts_N, cells.starts
            )
            cells = replace(kept, starts=starts_N)
        if self.normal.blanks:
            cells = self._join_blanks(
                graph, cells, is_among(graph, cells.codes, white), numbers
            )
        symbols, places, _ = spell(graph, [row.symbols for row in rows], cells.codes)
        return replace(
            gather(graph, cells, places), codes=graph.integers(symbols)
        ), sizes_R

    def _join_blanks(
        self,
        graph: GraphBuilder,
        cells: Cells,
        white_N: str,
        numbers: Mapping[str, int],
    ) -> Cells:
        """Make one space, which covers the last character, of white space of several,
        and of a tab or a line's end."""
        several_N = graph.op("And", white_N, graph.shift(white_N, 1, bool))
        ended_N = is_among(graph, cells.codes, [numbers[each] for each in "\n\r\t"])
        space_N = graph.op("Or", several_N, ended_N)
        codes_N = graph.op(
            "Where", space_N, graph.constant(numbers[ONE_SPACE]), cells.codes
        )
        going_N = graph.op("And", white_N, graph.shift(white_N, -1, bool))
        return select(graph, replace(cells, codes=codes_N), graph.op("Not", going_N))

    def _normalize(self, graph: GraphBuilder, cells: Cells) -> Cells:
        """Add the cells after all other steps of the normaliser."""
        if self.normal.composed:
            cells = compose(
                graph,
                cells,
                {letter: self.symbols[letter] for letter in read_composition().letters},
            )
        cells = self._strip(graph, cells, self.normal.before)
        if self.normal.keys:
            cells = self._replace_clusters(graph, cells)
        cells = self._strip(graph, cells, self.normal.after)
        if not self.normal.joined:
            return cells
        space_N = is_among(graph, cells.codes, [self.symbols[ONE_SPACE]])
        return select(
            graph,
            cells,
            graph.op("Not", graph.op("And", space_N, graph.shift(space_N, -1, bool))),
        )

    def _strip(self, graph: GraphBuilder, cells: Cells, sides: frozenset[str]) -> Cells:
        """Remove white space next to special tokens and to the ends of texts."""
        if not sides:
            return cells
        solid_N = graph.op("Not", self._is_white(graph, cells.codes))
        solid = self._is_edge(graph, graph.select(cells.codes, solid_N))
        edges = graph.op(
            "Concat",
            graph.constant(np.array([True])),
            solid,
            graph.constant(np.array([True])),
            axis=0,
        )
        # the place of the last solid cell
        before_N = graph.op("CumSum", graph.integers(solid_N), graph.constant(0))
        places = [before_N] if "left" in sides else []
        places += (
            [graph.op("Add", before_N, graph.constant(1))] if "right" in sides else []
        )
        inner = [
            graph.op("Not", graph.op("Gather", edges, places_N)) for places_N in places
        ]
        inner_N = graph.op("And", *inner) if len(inner) == 2 else inner[0]
        return select(graph, cells, graph.op("Or", solid_N, inner_N))

    def _replace_clusters(self, graph: GraphBuilder, cells: Cells) -> Cells:
        """Replace characters and short clusters of them by what the map has for them.

        The characters that a cluster becomes cover the cluster's characters, one each,
        and the others its last one. As in tokenizers, the last of these others covers
        the character after the cluster, if that becomes nothing; and if the first
        characters of a text, or of a part of one between special tokens, become
        nothing, all characters cover those that are as many places before their own.
        """
        size = FIRST + len(self.symbols) + len(self.special)
        keys = {
            key: made
            for key, made in self.normal.keys.items()
            if set(key) <= self.symbols.keys()
        }
        classes = np.full(size, CONTROL)
        widths = np.zeros(size, np.int64)
        table: list[tuple[int, ...]] = [(), *((symbol,) for symbol in range(1, size))]
        classes[UNKNOWN] = OTHER_CHARACTER
        for letter, symbol in self.symbols.items():
            classes[symbol] = find_classes()[ord(letter)]
            widths[symbol] = len(letter.encode())
        clusters: dict[trie.Symbols, int] = {}
        for key, made in keys.items():
            spelled = tuple(self.symbols.get(letter, UNKNOWN) for letter in made)
            if len(key) == 1:
                table[self.symbols[key]] = spelled
            if is_cluster(key):
                clusters[tuple(self.symbols[letter] for letter in key)] = len(clusters)
                table.append(spelled)
        class_N = graph.look_up(classes, cells.codes)
        pair_N = graph.op(
            "Add",
            graph.op("Mul", graph.shift(class_N, 1), graph.constant(CHARSMAP_CLASSES)),
            class_N,
        )
        joined_N = graph.look_up(JOINED.reshape(-1), pair_N)
        # counted from 1
        cluster_N = graph.op(
            "CumSum", graph.integers(graph.op("Not", joined_N)), graph.constant(0)
        )
        places = graph.op("Add", graph.size(cluster_N, 0), graph.constant([1]))
        ones_N = graph.full(graph.op("Shape", cluster_N), 1)
        sizes_N = graph.op("Gather", graph.sums(ones_N, cluster_N, places), cluster_N)
        bytes_N = graph.op(
            "Gather",
            graph.sums(graph.look_up(widths, cells.codes), cluster_N, places),
            cluster_N,
        )
        several_N = graph.op("Greater", sizes_N, graph.constant(1))
        short_N = graph.op(
            "And",
            several_N,
            graph.op("LessOrEqual", bytes_N, graph.constant(CLUSTER_BYTES)),
        )
        found = trie.build([clusters], size)
        root, dead = (
            graph.constant(np.array(state, np.int32))
            for state in (*found.roots, trie.DEAD)
        )
        first_N = graph.op("And", short_N, graph.op("Not", joined_N))
        symbols_N = graph.op("Cast", cells.codes, to=TensorProto.INT32)
        _, values_N = trie.longest_matches(
            graph, found, symbols_N, graph.op("Where", first_N, root, dead)
        )
        at_N = graph.op("GreaterOrEqual", values_N, graph.constant(0))
        hits = graph.sums(graph.integers(at_N), cluster_N, places)
        hit_N = graph.op(
            "Cast", graph.op("Gather", hits, cluster_N), to=TensorProto.BOOL
        )
        codes_N = graph.op("Where", hit_N, graph.constant(NO_STATE), cells.codes)
        codes_N = graph.op(
            "Where", at_N, graph.op("Add", values_N, graph.constant(size)), codes_N
        )
        symbols_M, places_M, steps_M = spell(graph, table, codes_N)
        after = Cells(
            graph.integers(symbols_M), graph.op("Gather", cells.rows, places_M)
        )
        if not cells.starts:
            return after
        spread_N = graph.op("Where", at_N, sizes_N, graph.constant(1))
        end_M = graph.op("Add", places_M, graph.op("Gather", spread_N, places_M))
        # becomes nothing
        next_M = graph.op("Greater", graph.shift(places_M, -1), end_M)
        last_M = graph.op(
            "Sub", graph.op("Add", end_M, graph.integers(next_M)), graph.constant(1)
        )
        source_M = graph.op("Min", graph.op("Add", places_M, steps_M), last_M)
        source_M = graph.op(
            "Sub", source_M, self._count_lost(graph, after.codes, places_M)
        )
        starts_M = graph.op("Gather", cells.starts, source_M)
        ends_M = graph.op("Gather", cells.ends, source_M)
        return replace(after, starts=starts_M, ends=ends_M)

    def _count_lost(self, graph: GraphBuilder, codes_M: str, places_M: str) -> str:
        """Add (M,): how many characters became nothing before the first of each text,
        or part of one between special tokens; 0 for these."""
        inner_M = graph.op("Not", self._is_edge(graph, codes_M))
        begins_M = graph.op(
            "And", inner_M, graph.op("Not", graph.shift(inner_M, 1, bool))
        )
        before_M = graph.op(
            "Concat", graph.constant([-1]), graph.slice(places_M, 0, -1), axis=0
        )
        skipped_M = graph.op(
            "Sub", graph.op("Sub", places_M, before_M), graph.constant(1)
        )
        # counted from 1
        parts_M = graph.op("CumSum", graph.integers(begins_M), graph.constant(0))
        skipped_M = graph.op("Mul", skipped_M, graph.integers(begins_M))
        skipped = graph.sums(
            skipped_M,
            parts_M,
            graph.op("Add", graph.size(parts_M, 0), graph.constant([1])),
        )
        return graph.op(
            "Mul", graph.op("Gather", skipped, parts_M), graph.integers(inner_M)
        )

    def _split(self, graph: GraphBuilder, cells: Cells) -> Cells:
        """Add the cells with marks for spaces; their kinds are 1 where a word begins,
        and 0 elsewhere."""
        edge_N = self._is_edge(graph, cells.codes)
        mark = self.symbols[self.mark]
        inner_N = graph.op("Not", edge_N)
        if self.blank:
            white_N = self._is_white(graph, cells.codes)
            inner_N = graph.op("And", inner_N, graph.op("Not", white_N))
        else:
            space_N = is_among(graph, cells.codes, [self.symbols[ONE_SPACE]])
            cells = replace(
                cells,
                codes=graph.op("Where", space_N, graph.constant(mark), cells.codes),
            )
        begins_N = graph.op(
            "And", inner_N, graph.op("Not", graph.shift(inner_N, 1, bool))
        )
        mark_N = is_among(graph, cells.codes, [mark])
        starts_N = graph.op("Or", begins_N, edge_N)
        starts_N = graph.op("Or", starts_N, mark_N) if self.splits else starts_N
        kept = replace(cells, kinds=graph.integers(starts_N))
        if self.prepended != "never":
            needed_N = graph.op("And", begins_N, graph.op("Not", mark_N))
            if self.prepended == "first":
                special_N = graph.shift(
                    is_among(
                        graph,
                        cells.codes,
                        list(self._number_special().values()) or [NO_STATE],
                    ),
                    1,
                    bool,
                )
                needed_N = graph.op("And", needed_N, graph.op("Not", special_N))
            kinds_N = graph.op("And", starts_N, graph.op("Not", needed_N))
            kept = insert(
                graph,
                replace(cells, kinds=graph.integers(kinds_N)),
                needed_N,
                code=mark,
                kind=1,
                width=0,
            )
        if not self.blank:
            return kept
        return select(graph, kept, graph.op("Not", self._is_white(graph, kept.codes)))

    def _segment(self, graph: GraphBuilder, cells: Cells) -> tuple[str, str, str]:
        """Add the numbers (T,) of the pieces of the best segmentation of every word,
        and the places of their first and last cells."""
        starts_M = graph.op("Cast", cells.kinds, to=TensorProto.BOOL)
        count = graph.size(starts_M, 0)
        one = graph.constant(1)
        begin_W = graph.flat(graph.op("NonZero", starts_M))
        words_M = graph.op(
            "Sub", graph.op("CumSum", cells.kinds, graph.constant(0)), one
        )
        places_M = graph.op(
            "Sub", graph.numbers(count), graph.op("Gather", begin_W, words_M)
        )
        longest = graph.op("Add", graph.op("ReduceMax", places_M, keepdims=0), one)
        root = graph.op(
            "Expand", graph.constant(np.array(self.pieces.roots[0], np.int32)), count
        )
        symbols_M = graph.op("Cast", cells.codes, to=TensorProto.INT32)
        values_KM, steps_K1 = trie.find_matches(
            graph, self.pieces, symbols_M, root, longest=longest
        )
        values_KM = graph.integers(values_KM)
        zero_K1 = graph.op("Equal", steps_K1, graph.constant(0))
        lone_KM = graph.op(
            "And", zero_K1, graph.op("Less", values_KM, graph.constant(0))
        )
        values_KM = graph.op(
            "Where", lone_KM, graph.constant(len(self.ids) - 1), values_KM
        )
        values = graph.flat(values_KM)
        widest = graph.size(steps_K1, 0)
        best_LW = _search(
            graph,
            graph.look_up(self.scores, values),
            begin_W,
            count=count,
            widest=widest,
            longest=longest,
        )
        round_M = graph.op(
            "Add", graph.op("Mul", places_M, graph.size(begin_W, 0)), words_M
        )
        # characters of the piece that ends here, less one
        back_M = graph.op("Gather", graph.flat(best_LW), round_M)
        first_M = graph.op("Sub", graph.numbers(count), back_M)
        begun_M = graph.op("Gather", starts_M, first_M)
        jumps = graph.op("Where", begun_M, count, graph.op("Sub", first_M, one))
        # one place after all others, which leads to itself
        jumps = graph.op("Concat", jumps, count, axis=0)
        ends = graph.op(
            "Concat", graph.slice(cells.kinds, 1), graph.constant([1, 0]), axis=0
        )
        reached_M = graph.slice(trie.follow_chains(graph, ends, jumps, longest), 0, -1)
        firsts_T = graph.select(first_M, reached_M)
        lasts_T = graph.flat(graph.op("NonZero", reached_M))
        row_T = graph.op("Mul", graph.op("Sub", lasts_T, firsts_T), count)
        return (
            graph.op("Gather", values, graph.op("Add", row_T, firsts_T)),
            firsts_T,
            lasts_T,
        )


def _search(
    graph: GraphBuilder,
    scores: str,
    begin_W: str,
    *,
    count: str,
    widest: str,
    longest: str,
) -> str:
    """Add (L, W): how many characters before each character of every word the piece
    begins that ends there in the best segmentation. Where scores are equal, the longest
    piece is taken.

    scores   (K * M,) those of pieces of 1 to K (`widest`, (1,)) characters that begin
             at each of M (`count`, (1,)) ones
    longest  L, int64 scalar
    """
    one = graph.constant([1])
    back_K = graph.op("Sub", graph.op("Sub", widest, one), graph.numbers(widest))
    # A piece that begins k characters before round t of a word: at k * M + begin + t -
    # k
    places_WK = graph.op(
        "Add",
        graph.columns(begin_W),
        graph.op("Mul", back_K, graph.op("Sub", count, one)),
    )
    end = graph.op("Sub", graph.op("Mul", widest, count), one)
    none_K = graph.op(
        "Where",
        graph.op("Equal", back_K, graph.constant(0)),
        *(graph.constant(np.array(each)) for each in (0.0, -np.inf)),
    )
    state_WK = graph.op("Expand", none_K, graph.op("Shape", places_WK))
    body = GraphBuilder(f"{graph.prefix}/segment")
    state = f"{body.prefix}/state"
    step = f"{body.prefix}/step"
    places = body.op("Min", body.op("Add", places_WK, step), end)
    sums_WK = body.op("Add", body.op("Gather", scores, places), state)
    # of equal ones the first; ArgMax may take another
    best_W1 = f"{body.prefix}/best"
    at_W1 = f"{body.prefix}/at"
    body.nodes.append(
        helper.make_node(
            "TopK",
            [sums_WK, body.constant([1])],
            [best_W1, at_W1],
            name=best_W1,
            axis=1,
        )
    )
    best_W = body.flat(at_W1)
    others = body.op(
        "Slice",
        state,
        body.constant([1]),
        body.constant([trie.EVERYTHING]),
        body.constant([1]),
    )
    after = body.op("Concat", others, best_W1, axis=1)
    given = [(state, TensorProto.DOUBLE, [None, None]), (step, TensorProto.INT64, [])]
    made = [
        (after, TensorProto.DOUBLE, [None, None]),
        (best_W, TensorProto.INT64, [None]),
    ]
    inputs, outputs = (
        [helper.make_tensor_value_info(*each) for each in some]
        for some in (given, made)
    )
    rounds = helper.make_graph(body.nodes, "segment", inputs, outputs, body.constants)
    steps = graph.op("Range", graph.constant(0), longest, graph.constant(1))
    scan = f"{graph.prefix}/Scan_{len(graph.nodes)}"
    ends = [f"{scan}/state", f"{scan}/best"]
    graph.nodes.append(
        helper.make_node(
            "Scan", [state_WK, steps], ends, name=scan, body=rounds, num_scan_inputs=1
        )
    )
    return graph.op("Sub", graph.op("Sub", widest, one), ends[1])


class _Row(NamedTuple):
    """Hold the first step of a graph for a character, a special token, or a text that
    is replaced.

    symbols   what it becomes
    length    its characters; covered: the last ones of these, which the symbols cover
    kind      the kind of white space that it is
    """

    symbols: tuple[int, ...]
    length: int = 1
    covered: int = 1
    kind: int = INNER


def _list_splitters(described: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    splitter = described["pre_tokenizer"] or {"pretokenizers": []}
    return list(splitter.get("pretokenizers", [splitter]))


@lru_cache(maxsize=2)
def _list_changed(single: str) -> dict[str, str]:
    """List the characters that normalisers of single characters, given as JSON, change,
    and what they become (1 s)."""
    kinds = json.loads(single)
    if not kinds:
        return {}
    normalizer = normalizers.Sequence(
        [getattr(normalizers, kind["type"])() for kind in kinds]
    )
    changed = {}
    for first in (
        first for first in range(0, UNICODE, WORDPIECE_BLOCK) if first not in SURROGATES
    ):
        block = list(map(chr, range(first, first + WORDPIECE_BLOCK)))
        results = zip(block, isolate(block, normalizer.normalize_str), strict=True)
        changed.update(
            {character: result for character, result in results if result != character}
        )
    return changed
