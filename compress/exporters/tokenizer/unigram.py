"""Build Unigram as a graph: SentencePiece's normalisation and the best segmentation of
every word, on all words of a batch at once.

All pieces that begin at each character are found in a trie. Then one round for each
character of the longest word computes the score of the best segmentation of every word
up to there, in double precision and adding in the same order as tokenizers; among equal
scores it takes the longest last piece, as tokenizers does.

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
from typing import Final, NamedTuple

import numpy as np
from onnx import TensorProto
from tokenizers import Tokenizer, normalizers

from compress.arrays import Doubles, Longs
from compress.errors import ExportError
from compress.exporters.tokenizer import trie
from compress.exporters.tokenizer.bytelevel import overlap
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
from compress.exporters.tokenizer.graph import (
    EVERYTHING,
    Value,
    arange,
    columns,
    concat,
    full,
    minimum,
    op,
    where,
)
from compress.exporters.tokenizer.nfc import compose, read_composition
from compress.exporters.tokenizer.wordpiece import (
    FIRST,
    NO_STATE,
    PAD,
    PIECE_END,
    UNICODE,
    UNKNOWN,
    TokenizerJson,
    Tokens,
    change_each,
    list_odd_tokens,
    number,
    spell,
)

PENALTY: Final = 10.0
"""The score of a character that is not a piece is this much below the lowest score of a
piece."""

SINGLE: Final = ("NFD", "NFKD", "StripAccents", "Lowercase", "Nmt")
"""The normalisers that change every character separately; NFD and NFKD do so if accents
are stripped after them."""

ONE_SPACE: Final = " "
SPACES_PATTERN: Final = {"Regex": " {2,}"}
BLANKS: Final = {"Regex": r"\s{2,}|[\n\r\t]"}

INNER, WHITE_KIND, SEPARATOR = range(3)
"""Kinds of characters: white space for tokenizers, and characters that are white space
only in Python's regular expressions."""

SEPARATORS: Final = frozenset("\x1c\x1d\x1e\x1f")
BLANK: Final = frozenset(filter(str.isspace, map(chr, range(UNICODE))))


@dataclass(frozen=True)
class Normalizer:
    """The steps of a normaliser, in order; any may be missing.

    replaced    texts that become others
    single      normalisers of single characters, as in tokenizer.json
    blanks      whether white space of several characters, or of several kinds, becomes
                a space
    composed    whether characters are composed, as by NFC
    before      the sides on which white space is stripped
    keys        the replacements of characters and clusters: see `charsmap`
    after       the sides on which white space is stripped
    joined      whether several spaces become one
    """

    replaced: Mapping[str, str]
    single: tuple[TokenizerJson, ...]
    blanks: bool
    composed: bool
    before: frozenset[str]
    keys: Mapping[str, str]
    after: frozenset[str]
    joined: bool


def read_normalizer(described: TokenizerJson | None, mark: str) -> Normalizer:
    """Read a normaliser, given as JSON; `mark` stands for a space. Raises ExportError
    for other steps, or another order."""
    parts = list(described.get("normalizers", [described])) if described else []

    def take(*kinds: str, most: int = 1) -> list[TokenizerJson]:
        found: list[TokenizerJson] = []
        while parts and parts[0]["type"] in kinds and len(found) < most:
            found.append(parts.pop(0))
        return found

    def sides(found: Sequence[TokenizerJson]) -> frozenset[str]:
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
    listed      character, or replaced text -> its characters in the later steps
    symbols     character, or special token -> symbol
    pieces      the trie of pieces, special tokens and ends of texts, valued by their
                number
    ids         the token of each piece, -1 for the end of a text; then the token of a
                character that is no piece
    scores      the score of each of these tokens; then minus infinity
    special     special tokens that are recognised in a text; stripping: those that take
                the white space before them
    unknown     the id of the unknown token
    mark        the character that stands for a space; prepended: when it is put before
                a text: first, always, never
    splits      whether every mark begins a word; blank: whether white space separates
                words
    """

    normal: Normalizer
    listed: Mapping[str, str]
    symbols: Mapping[str, int]
    pieces: trie.Trie
    ids: Longs
    scores: Doubles
    special: tuple[str, ...]
    stripping: tuple[str, ...]
    unknown: int
    mark: str
    prepended: str
    splits: bool
    blank: bool

    @staticmethod
    def list_unsupported(described: TokenizerJson) -> list[str]:
        """List the features of a tokenizer, given as JSON, that the graph does not
        support."""
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
        cls, tokenizer: Tokenizer, described: TokenizerJson
    ) -> "Unigram":
        """Read a tokenizer; `described`: its JSON, for which `list_unsupported` returns
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
        # the normaliser removes these
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
        texts_R: Value,
        *,
        prompt: str = "",
        spans: bool = False,
        words: bool = False,
    ) -> Tokens:
        """Add the tokens of all texts, each after `prompt`, and with `spans` the
        characters that they cover; with `words` every text is a word that follows a
        space, or white space, which has no tokens."""
        cells, sizes_R = self._read(texts_R, prompt, spans=spans, words=words)
        cells = self._split(self._normalize(cells))
        numbers_T, firsts_T, lasts_T = self._segment(cells)
        ids_T = numbers_T.look_up(self.ids)
        unknown_T = ids_T.equals(self.unknown)
        within_T = cells.kinds[firsts_T].equals(0)
        # All but the first of consecutive unknown characters in a word
        more_T = unknown_T & within_T & unknown_T.shift(1, bool)
        real_T = ids_T >= 0
        begun_T = real_T & ~more_T
        firsts = firsts_T.select(begun_T)
        tokens = Tokens(
            ids_T.select(begun_T),
            cells.rows[firsts],
            sizes_R=sizes_R,
        )
        if cells.starts is None or cells.ends is None:
            return tokens
        ended_T = real_T & ~more_T.shift(-1, bool)
        ends = cells.ends[lasts_T.select(ended_T)]
        return replace(
            tokens,
            spans_T2=columns(cells.starts[firsts], ends),
        )

    def _number_special(self) -> dict[str, int]:
        """Return the symbols of special tokens."""
        return {
            token: index
            for index, token in enumerate(self.special, FIRST + len(self.symbols))
        }

    def _is_edge(self, codes_N: Value) -> Value:
        return is_among(codes_N, [PIECE_END, *self._number_special().values()])

    def _is_white(self, codes_N: Value) -> Value:
        return is_among(
            codes_N,
            [self.symbols[each] for each in BLANK - SEPARATORS if each in self.symbols],
        )

    def _read(
        self,
        texts_R: Value,
        prompt: str,
        *,
        spans: bool,
        words: bool,
    ) -> tuple[Cells, Value | None]:
        """Add the cells of all texts as symbols, each text ending with a boundary,
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
            texts_R, (*self.special, *self.normal.replaced), prompt
        )
        codes_RC = number(strings_RC, numbers, 0)
        codes_N = codes_RC.flat()
        cells = Cells(codes_N, rows_N, codes_N)
        sizes_R = None
        if spans:
            lengths = [row.length for row in rows]
            covered = [row.covered for row in rows]
            cells, sizes_R = measure(cells, codes_RC.shape(), lengths, covered)
        boundary = numbers[PAD]
        cells = drop_repeated(cells, boundary)
        white = [index for row, index in rows.items() if row.kind == WHITE_KIND]
        if words:
            dropped = [index for row, index in rows.items() if row.kind != INNER]
            dropped_N = is_among(cells.codes, dropped)
            cells = insert_spaces(
                cells, dropped_N, boundary=boundary, code=numbers[ONE_SPACE]
            )
        if self.stripping:
            stripping_N = is_among(
                cells.codes, [numbers[token] for token in self.stripping]
            )
            white_N = is_among(cells.codes, white)
            kept, starts_N = take_spaces(cells, stripping_N, white_N, boundary=boundary)
            if starts_N and cells.starts:
                starts_N = where(stripping_N, starts_N, cells.starts)
            cells = replace(kept, starts=starts_N)
        if self.normal.blanks:
            cells = self._join_blanks(cells, is_among(cells.codes, white), numbers)
        symbols, places, _ = spell([row.symbols for row in rows], cells.codes)
        return replace(cells.at(places), codes=symbols.integers()), sizes_R

    def _join_blanks(
        self,
        cells: Cells,
        white_N: Value,
        numbers: Mapping[str, int],
    ) -> Cells:
        """Turn runs of white space, and a tab or a line end, into one space that covers
        the last character."""
        several_N = white_N & white_N.shift(1, bool)
        ended_N = is_among(cells.codes, [numbers[each] for each in "\n\r\t"])
        space_N = several_N | ended_N
        codes_N = where(space_N, numbers[ONE_SPACE], cells.codes)
        going_N = white_N & white_N.shift(-1, bool)
        return replace(cells, codes=codes_N).select(~going_N)

    def _normalize(self, cells: Cells) -> Cells:
        """Add the cells after all other steps of the normaliser."""
        if self.normal.composed:
            cells = compose(
                cells,
                {letter: self.symbols[letter] for letter in read_composition().letters},
            )
        cells = self._strip(cells, self.normal.before)
        if self.normal.keys:
            cells = self._replace_clusters(cells)
        cells = self._strip(cells, self.normal.after)
        if not self.normal.joined:
            return cells
        space_N = is_among(cells.codes, [self.symbols[ONE_SPACE]])
        return cells.select(~(space_N & space_N.shift(-1, bool)))

    def _strip(self, cells: Cells, sides: frozenset[str]) -> Cells:
        """Remove white space next to special tokens and to the ends of texts."""
        if not sides:
            return cells
        solid_N = ~self._is_white(cells.codes)
        solid = self._is_edge(cells.codes.select(solid_N))
        edges = concat(np.array([True]), solid, np.array([True]))
        # for each cell: the number of cells up to it that are no white space
        before_N = solid_N.integers().cumsum()
        kept_N = solid_N
        if sides == {"left", "right"}:
            kept_N = solid_N | (~edges[before_N] & ~edges[before_N + 1])
        elif sides == {"left"}:
            kept_N = solid_N | ~edges[before_N]
        else:
            kept_N = solid_N | ~edges[before_N + 1]
        return cells.select(kept_N)

    def _replace_clusters(self, cells: Cells) -> Cells:
        """Replace characters and short clusters by their values in the map.

        The replacement's characters cover the cluster's characters one by one, and any
        further ones cover its last character. As in tokenizers, the last of these
        further ones covers the character after the cluster, if that is removed; and if
        the first characters of a text, or of a part between special tokens, are
        removed, all characters cover the text as many places before their own.
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
        class_N = cells.codes.look_up(classes)
        pair_N = class_N.shift(1) * CHARSMAP_CLASSES + class_N
        joined_N = pair_N.look_up(JOINED.reshape(-1))
        # counted from 1
        cluster_N = (~joined_N).integers().cumsum()
        places = cluster_N.size(0) + 1
        ones_N = full(cluster_N.shape(), 1)
        sizes_N = ones_N.sums(cluster_N, places)[cluster_N]
        bytes_N = cells.codes.look_up(widths).sums(cluster_N, places)[cluster_N]
        short_N = (sizes_N > 1) & (bytes_N <= CLUSTER_BYTES)
        _, values_N = trie.begin_matches(
            trie.build([clusters], size),
            cells.codes.cast(TensorProto.INT32),
            short_N & ~joined_N,
        )
        at_N = values_N >= 0
        hits = at_N.integers().sums(cluster_N, places)
        hit_N = hits[cluster_N].cast(TensorProto.BOOL)
        codes_N = where(hit_N, NO_STATE, cells.codes)
        codes_N = where(at_N, values_N + size, codes_N)
        symbols_M, places_M, steps_M = spell(table, codes_N)
        codes_M = symbols_M.integers()
        after = Cells(codes_M, cells.rows[places_M], codes_M)
        if cells.starts is None or cells.ends is None:
            return after
        spread_N = where(at_N, sizes_N, 1)
        end_M = places_M + spread_N[places_M]
        # becomes nothing
        next_M = places_M.shift(-1) > end_M
        last_M = end_M + next_M.integers() - 1
        source_M = minimum(places_M + steps_M, last_M)
        source_M = source_M - self._count_lost(codes_M, places_M)
        starts_M = cells.starts[source_M]
        ends_M = cells.ends[source_M]
        return replace(after, starts=starts_M, ends=ends_M)

    def _count_lost(self, codes_M: Value, places_M: Value) -> Value:
        """Add (M,): the number of removed characters at the beginning of each text, or
        part between special tokens; 0 for special tokens."""
        inner_M = ~self._is_edge(codes_M)
        begins_M = inner_M & ~inner_M.shift(1, bool)
        before_M = concat([-1], places_M[:-1])
        skipped_M = places_M - before_M - 1
        # counted from 1
        parts_M = begins_M.integers().cumsum()
        skipped_M = skipped_M * begins_M.integers()
        skipped = skipped_M.sums(parts_M, parts_M.size(0) + 1)
        return skipped[parts_M] * inner_M.integers()

    def _split(self, cells: Cells) -> Cells:
        """Add the cells with marks for spaces; their kinds are 1 where a word begins,
        and 0 elsewhere."""
        edge_N = self._is_edge(cells.codes)
        mark = self.symbols[self.mark]
        inner_N = ~edge_N
        if self.blank:
            white_N = self._is_white(cells.codes)
            inner_N = inner_N & ~white_N
        else:
            space_N = is_among(cells.codes, [self.symbols[ONE_SPACE]])
            cells = replace(cells, codes=where(space_N, mark, cells.codes))
        begins_N = inner_N & ~inner_N.shift(1, bool)
        mark_N = is_among(cells.codes, [mark])
        starts_N = begins_N | edge_N
        if self.splits:
            starts_N = starts_N | mark_N
        kept = replace(cells, kinds=starts_N.integers())
        if self.prepended != "never":
            needed_N = begins_N & ~mark_N
            if self.prepended == "first":
                special = list(self._number_special().values())
                special_N = is_among(cells.codes, special or [NO_STATE])
                needed_N = needed_N & ~special_N.shift(1, bool)
            kinds_N = starts_N & ~needed_N
            kept = insert(
                replace(cells, kinds=kinds_N.integers()),
                needed_N,
                code=mark,
                kind=1,
                width=0,
            )
        if not self.blank:
            return kept
        return kept.select(~self._is_white(kept.codes))

    def _segment(self, cells: Cells) -> tuple[Value, Value, Value]:
        """Add the numbers (T,) of the pieces of the best segmentation of every word,
        and the places of their first and last cells."""
        starts_M = cells.kinds.cast(TensorProto.BOOL)
        count = starts_M.size(0)
        begin_W = starts_M.nonzero()
        words_M = cells.kinds.cumsum() - 1
        places_M = arange(count) - begin_W[words_M]
        longest = places_M.max() + 1
        root = op("Expand", np.array(self.pieces.roots[0], np.int32), count)
        symbols_M = cells.codes.cast(TensorProto.INT32)
        values_KM, steps_K1 = trie.find_matches(self.pieces, symbols_M, root, longest)
        values_KM = values_KM.integers()
        lone_KM = steps_K1.equals(0) & (values_KM < 0)
        values_KM = where(lone_KM, len(self.ids) - 1, values_KM)
        values = values_KM.flat()
        widest = steps_K1.size(0)
        scores = values.look_up(self.scores)
        best_LW = _search(scores, begin_W, count, widest, longest)
        round_M = places_M * begin_W.size(0) + words_M
        # characters of the piece that ends here, less one
        back_M = best_LW.flat()[round_M]
        first_M = arange(count) - back_M
        begun_M = starts_M[first_M]
        jumps = where(begun_M, count, first_M - 1)
        # an additional last place, which leads to itself
        jumps = concat(jumps, count)
        ends = concat(cells.kinds[1:], [1, 0])
        reached_M = trie.follow_chains(ends, jumps, longest)[:-1]
        firsts_T = first_M.select(reached_M)
        lasts_T = reached_M.nonzero()
        row_T = (lasts_T - firsts_T) * count
        return values[row_T + firsts_T], firsts_T, lasts_T


def _search(
    scores: Value, begin_W: Value, count: Value, widest: Value, longest: Value
) -> Value:
    """Add (L, W): for each character of every word, how many characters earlier the
    piece begins that ends there in the best segmentation. Among equal scores, the
    longest piece is taken.

    scores   (K * M,) those of pieces of 1 to K (`widest`, (1,)) characters that begin
             at each of M (`count`, (1,)) ones
    longest  L, int64 scalar
    """
    back_K = widest - 1 - arange(widest)
    # A piece that begins k characters before round t of a word: at k * M + begin + t -
    # k
    places_WK = columns(begin_W) + back_K * (count - 1)
    end = widest * count - 1
    none_K = where(back_K.equals(0), np.array(0.0), np.array(-np.inf))
    state_WK = op("Expand", none_K, places_WK.shape())
    body = scores.graph.body("segment")
    state = body.input("state", TensorProto.DOUBLE, [None, None])
    step = body.input("step", shape=[])
    places = minimum(places_WK + step, end)
    sums_WK = scores[places] + state
    # the first of equal scores, as ArgMax may take another one
    best_W1, at_W1 = body.add("TopK", sums_WK, [1], outputs=2, axis=1)
    best_W = at_W1.flat()
    others = op("Slice", state, [1], [EVERYTHING], [1])
    after = concat(others, best_W1, axis=1)
    body.output(after, TensorProto.DOUBLE, [None, None])
    body.output(best_W)
    steps = op("Range", 0, longest, 1)
    _, best_LW = scores.graph.run(body, state_WK, steps, scan=True)
    return widest - 1 - best_LW


class _Row(NamedTuple):
    """The first step of a graph for a character, a special token, or a replaced text.

    symbols   what it becomes
    length    its characters; covered: the last ones of these, which the symbols cover
    kind      the kind of white space that it is
    """

    symbols: tuple[int, ...]
    length: int = 1
    covered: int = 1
    kind: int = INNER


def _list_splitters(described: TokenizerJson) -> list[TokenizerJson]:
    splitter = described["pre_tokenizer"] or {"pretokenizers": []}
    return list(splitter.get("pretokenizers", [splitter]))


@lru_cache(maxsize=2)
def _list_changed(single: str) -> dict[str, str]:
    """Map each character that the normalisers of single characters, given as JSON,
    change to its replacement (takes 1 s)."""
    kinds = json.loads(single)
    if not kinds:
        return {}
    normalizer = normalizers.Sequence(
        [getattr(normalizers, kind["type"])() for kind in kinds]
    )
    return {
        character: result
        for character, result in change_each(normalizer.normalize_str)
        if result != character
    }
