"""Encode single texts with the fastest library that returns the ids of `tokenizers`.

`nanotoken` encodes with WordPiece and `gigatoken` with byte-level BPE; both are in the
extra `fast`. They are young, so their rows are compared with those of `tokenizers`: for
each tokenizer on difficult strings when it is opened, then on the first texts that the
user encodes. A library whose rows differ is not used any more, and a note says so.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import BPE, WordPiece

from compress.progress import note

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from compress.arrays import Array, Longs

COMPARED_CHARACTERS: Final = 100_000
"""Characters of the user's first texts whose rows are compared."""
CACHED_WORDS: Final = 1 << 17
"""Words in nanotoken's cache, which takes about 80 MB."""
CHARACTERS_PER_CACHE: Final = 1 << 26
"""Characters after which gigatoken is opened again: it caches every word, at about 110
bytes each."""
DRAWN_STRINGS: Final = 400
"""Random strings that are compared besides the fixed ones."""

EncodeBatch = Callable[[list[str]], "tuple[Array, Array]"]
"""Texts -> the ids of all texts one after another, and the N + 1 bounds of N texts."""


@dataclass(frozen=True, eq=False)
class TokenArrays:
    """Hold the tokens of rows without a Python object for each token.

    ids      (T,): the token ids of all rows, concatenated
    bounds   (N + 1,): row n has the ids from bounds[n] to bounds[n + 1]
    types    (T,): the token types; None if the rows have none
    """

    ids: NDArray[np.uint32]
    bounds: Longs
    types: NDArray[np.int8] | None = None

    @classmethod
    def from_rows(
        cls,
        ids: Sequence[Sequence[int]],
        types: Sequence[Sequence[int]] | None = None,
    ) -> TokenArrays:
        """Copy the ids of rows, and their token types."""
        flat_types = None if types is None else _flatten(types, np.int8)
        return cls(_flatten(ids, np.uint32), _bounds(map(len, ids)), flat_types)

    @classmethod
    def concatenate(cls, parts: Sequence[TokenArrays]) -> TokenArrays:
        """Join rows without token types."""
        lengths = np.concatenate([part.lengths for part in parts])
        return cls(
            np.concatenate([part.ids for part in parts]), _bounds(lengths.tolist())
        )

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def lengths(self) -> Longs:
        """The number of tokens of each row."""
        return np.diff(self.bounds)

    def rows(self) -> Iterator[tuple[list[int], list[int]]]:
        """Yield the ids and the token types of each row; the types of rows without any
        are zeros."""
        ids = self.ids.tolist()
        types = [0] * len(ids) if self.types is None else self.types.tolist()
        bounds = self.bounds.tolist()
        for begin, end in pairwise(bounds):
            yield ids[begin:end], types[begin:end]

    def take(self, rows: Longs) -> TokenArrays:
        """Choose rows, in a new order."""
        lengths = self.lengths[rows]
        bounds = _bounds(lengths.tolist())
        shift = np.repeat(self.bounds[:-1][rows] - bounds[:-1], lengths)
        places = np.arange(len(shift)) + shift
        types = None if self.types is None else self.types[places]
        return TokenArrays(self.ids[places], bounds, types)

    def truncate(self, length: int, side: str) -> TokenArrays:
        """Keep at most `length` tokens of each row: the last ones if `side`, the end
        that is cut off, is left, else the first ones."""
        excess = np.maximum(self.lengths - length, 0)
        if not excess.any():
            return self
        kept = np.ones(len(self.ids), bool)
        rows = np.flatnonzero(excess)
        cut = self.bounds[:-1] if side == "left" else self.bounds[1:] - excess
        for begin, count in zip(cut[rows].tolist(), excess[rows].tolist(), strict=True):
            kept[begin : begin + count] = False
        types = None if self.types is None else self.types[kept]
        return TokenArrays(
            self.ids[kept],
            _bounds((self.lengths - excess).tolist()),
            types,
        )


def _flatten(rows: Iterable[Sequence[int]], kind: type) -> Array:
    return np.concatenate([np.empty(0, kind), *(np.asarray(row, kind) for row in rows)])


def _bounds(lengths: Iterable[int]) -> Longs:
    return np.fromiter(accumulate(lengths, initial=0), np.int64)


@dataclass(frozen=True)
class Surroundings:
    """Hold the special tokens before and after a text, each an id and its token type,
    and the type of the text's own tokens."""

    before: tuple[tuple[int, int], ...]
    after: tuple[tuple[int, int], ...]
    text_type: int

    @classmethod
    def from_backend(cls, backend: Tokenizer) -> Surroundings | None:
        """Find what a tokenizer puts around the letter a; None if its row does not
        contain that letter."""
        bare = backend.encode("a", add_special_tokens=False).ids
        row = backend.encode("a")
        tokens = tuple(zip(row.ids, row.type_ids, strict=True))
        for start in range(len(tokens) - len(bare) + 1):
            end = start + len(bare)
            if bare and row.ids[start:end] == bare:
                return cls(tokens[:start], tokens[end:], row.type_ids[start])
        return None

    @property
    def size(self) -> int:
        """The number of special tokens."""
        return len(self.before) + len(self.after)

    @property
    def has_zero_types(self) -> bool:
        """Return True if all tokens of a row have the type 0."""
        special = [type_ for _, type_ in (*self.before, *self.after)]
        return not any([*special, self.text_type])

    def add(self, tokens: TokenArrays) -> TokenArrays:
        """Make rows with special tokens and token types of rows without them."""
        bounds = tokens.bounds + self.size * np.arange(len(tokens.bounds))
        ids = np.empty(bounds[-1], np.uint32)
        types = np.full(bounds[-1], self.text_type, np.int8)
        of_text = np.ones(bounds[-1], bool)
        ends = bounds[1:] - len(self.after)
        for first, special in ((bounds[:-1], self.before), (ends, self.after)):
            for at, (token, type_) in enumerate(special):
                of_text[first + at] = False
                ids[first + at] = token
                types[first + at] = type_
        ids[of_text] = tokens.ids
        return TokenArrays(ids, bounds, types)


@dataclass(frozen=True, eq=False)
class FastLibrary:
    """Hold a fast library that was opened for a tokenizer, and the tokenizer itself,
    with which it is compared."""

    reference: Tokenizer
    surroundings: Surroundings
    encode_batch: EncodeBatch

    def encode(
        self,
        texts: list[str],
        max_length: int | None,
        side: str,
        special: bool,
    ) -> TokenArrays:
        """Encode texts: see `FastTokens.encode`."""
        ids, bounds = self.encode_batch(texts)
        tokens = TokenArrays(ids, bounds)
        if max_length is not None:
            room = max_length - self.surroundings.size if special else max_length
            tokens = tokens.truncate(room, side)
        return self.surroundings.add(tokens) if special else tokens

    def find_difference(self, texts: list[str]) -> str | None:
        """Return the first text whose row differs from that of `tokenizers`, if any."""
        found = self.encode(texts, None, "right", special=True)
        expected = self.reference.encode_batch_fast(texts)
        for text, row, right in zip(texts, found.rows(), expected, strict=True):
            if row != (right.ids, right.type_ids):
                return text
        return None


class FastTokens:
    """Encode single texts as a tokenizer of `tokenizers` does, until a difference is
    found.

    name      of the tokenizer, for the note
    library   agrees with it on difficult strings
    """

    def __init__(self, name: str, library: FastLibrary) -> None:
        self.name = name
        self.library = library
        self.unchecked = COMPARED_CHARACTERS
        self.agrees = True

    def encode(
        self,
        texts: Sequence[Any],
        max_length: int | None = None,
        *,
        side: str = "right",
        special: bool = True,
    ) -> TokenArrays | None:
        """Encode texts as rows of at most `max_length` tokens; None if `tokenizers` has
        to encode them, as for input that is not text.

        side      the end of a long text that is cut off
        special   add the special tokens

        Raises UnicodeError, as `tokenizers` does, for half a surrogate pair.
        """
        listed = list(texts)
        # bytes would be read, too
        if not self.agrees or set(map(type, listed)) - {str}:
            return None
        if self.unchecked > 0:
            ends = list(accumulate(map(len, listed)))
            sample = listed[: bisect_left(ends, self.unchecked) + 1]
            self.unchecked -= sum(map(len, sample))
            if (different := self.library.find_difference(sample)) is not None:
                self.agrees = False
                _say_dropped(self.name, different)
                return None
        return self.library.encode(listed, max_length, side, special)


def open_fast(backend: Tokenizer, name: str) -> FastTokens | None:
    """Open the fast library for a tokenizer; None if it is not installed, cannot read
    the tokenizer, or yields different rows.

    name   of the tokenizer, for the note
    """
    # a setting that tokenizer.json does not hold
    if backend.encode_special_tokens:
        return None
    library, different = _open_library(backend.to_str())
    if library is None:
        return None
    if different is not None:
        _say_dropped(name, different)
        return None
    return FastTokens(name, library)


def _say_dropped(name: str, text: str) -> None:
    note(
        f"{name}: {text!r:.60} gets other tokens from the fast library than from "
        "tokenizers, which is slower and is used instead"
    )


@lru_cache(maxsize=2)
def _open_library(state: str) -> tuple[FastLibrary | None, str | None]:
    """Open the library for a tokenizer.json, and find a difficult string on which it
    differs; either may be None."""
    # its own copy: another thread may set the truncation of the user's tokenizer
    reference = Tokenizer.from_str(state)
    reference.no_padding()
    reference.no_truncation()
    surroundings = Surroundings.from_backend(reference)
    open_batch = None
    if isinstance(reference.model, WordPiece):
        open_batch = _open_nanotoken
    elif isinstance(reference.model, BPE) and "ByteLevel" in repr(
        reference.pre_tokenizer
    ):
        open_batch = _open_gigatoken
    if surroundings is None or open_batch is None:
        return None, None
    try:
        encode_batch = open_batch(state)
    # ValueError: a setting that it does not know; RuntimeError: a byte without a token
    except (ImportError, ValueError, RuntimeError):
        return None, None
    library = FastLibrary(reference, surroundings, encode_batch)
    return library, library.find_difference(difficult_strings(reference))


def _open_nanotoken(state: str) -> EncodeBatch:
    nanotoken = import_module("nanotoken")
    nanotoken.set_cache_entries(CACHED_WORDS)
    library = nanotoken.Tokenizer.from_json(state)

    def encode_batch(texts: list[str]) -> tuple[Array, Array]:
        rows = library.encode_batch(texts, add_special_tokens=False)
        return rows.ids, rows.offsets

    return encode_batch


def _open_gigatoken(state: str) -> EncodeBatch:
    gigatoken = import_module("gigatoken")
    library = gigatoken.Tokenizer.from_json(state)
    encoded = 0

    def encode_batch(texts: list[str]) -> tuple[Array, Array]:
        nonlocal library, encoded
        encoded += sum(map(len, texts))
        if encoded > CHARACTERS_PER_CACHE:
            library = gigatoken.Tokenizer.from_json(state)
            encoded = 0
        # its call for a batch returns arrays of another library, and is not faster
        rows = list(map(library.backend.encode, texts))
        ids = np.concatenate([np.empty(0, np.uint32), *rows])
        return ids, _bounds(map(len, rows))

    return encode_batch


FIXED_STRINGS: Final = (
    "",
    " ",
    "\0",
    "a\0b",
    "\t\n\r\v\f",
    "It's a GOOD film, isn't it? They'd've SAID so.",
    "  Zoë's café \n\t in Ångström,  1,000.50 % \r\n",
    "e\u0301 o\u0308\u0323 \u0301a a\u0345 \u1e9b\u0323 ﬁne ½ ² Ⅷ ＡＢＣ １２３",
    "İstanbul ISPARTA ıI ΣΑΣ Σ ς ß ẞ ǅ",
    "東京に行く。你好！吗？ 안녕하세요 ㅎㅎ 각",
    "שָׁלוֹם مَرْحَبًا नमस्ते สวัสดี བོད་ ខ្មែរ",
    "🙂👍🏽👩\u200d👩\u200d👧\u200d👦🏳️\u200d🌈🇩🇪 \U0001f468\u200d",
    "a\u200bb\u200cc\u200dd\ufeffe\u2060f\u00adg\u061ch\u202ei",
    "a\u00a0b\u1680c\u2003d\u2028e\u2029f\u202fg\u205fh\u3000i\u0085j\u001ck\u001fl",
    "\u0000\u0001\u0007\u0008\u000e\u001b\u007f\u0080\u009f\ue000\uf8ff\ufffd\uffff",
    "\U000e0001\U0010ffff\U000f0000\u0378 \u2fff \u31ef",
    "don't 'S 'LL 'Ve ''re 's's x'D'dd",
    "a" * 99 + " " + "b" * 100 + " " + "c" * 101 + " " + "é" * 5000,
    "xyzzy" * 400 + "." * 300 + " " * 300 + "\n" * 50 + "0123456789" * 40,
    "_a_ a-b a–b a—b a…b $5 €5 5°C 5‰ #tag @name a/b\\c ~`^|<>{}[]",
    "https://example.org/a?b=c&d=%20e#f x@y.zz 127.0.0.1 1e-5 0x1F",
    "[ CLS ] [cls] [CLS [MASK]] <s> </s> <S><mask> <|endoftext|> ##ing ##",
    "Ġa ▁a Ċ Â Ã© â\u0080\u0099",
)


def difficult_strings(backend: Tokenizer) -> list[str]:
    """List strings on which libraries for tokens differ: fixed ones, the tokenizer's
    own added tokens, and drawn ones, the same each time."""
    added = [str(token) for token in backend.get_added_tokens_decoder().values()][:50]
    around = [
        text
        for token in added
        for text in (token, f"a{token}b", f" {token}  {token}{token} ", token.lower())
    ]
    rng = random.Random(0)
    pieces = [*FIXED_STRINGS[5:], *added, "a", "B", " ", "  ", "\n", "'", ".", "1"]
    drawn = []
    for _ in range(DRAWN_STRINGS):
        text = ""
        for _ in range(rng.randint(1, 12)):
            piece = rng.choice(pieces)
            begin = rng.randrange(len(piece))
            text += piece[begin : begin + rng.randint(1, 8)]
            text += chr(rng.randrange(rng.choice((128, 0x3000, 0xD800))))
        drawn.append(text)
    return [*FIXED_STRINGS, *around, *drawn]
