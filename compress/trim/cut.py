"""What stays of a tokenizer, and the proof that it reads the corpus as before."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from compress.errors import CompressError
from compress.trim import vocabulary


@dataclass(frozen=True)
class Cut:
    """The tokens that stay, and the tokenizer of them (its json)."""

    kept: tuple[int, ...]
    described: dict[str, Any]

    @property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_str(json.dumps(self.described))


def cut(tokenizer: Tokenizer, texts: Iterable[str], *, min_count: int, keep: Sequence[str], pinned: set[int]) -> Cut:
    """What stays of a tokenizer; with min_count 1, every text is encoded to the same tokens as before."""
    described = json.loads(tokenizer.to_str())
    used = vocabulary.counts(tokenizer, texts) >= min_count
    used |= vocabulary.counts(tokenizer, keep) > 0
    chosen = set(np.flatnonzero(used).tolist()) | pinned
    found = _cut(described, chosen)
    if min_count > 1:
        return found
    if different := [text for text, same in encoded_alike(tokenizer, found.tokenizer, texts) if not same]:
        # words that were unknown: without the tokens at which they failed, another cut may get through
        normal = tokenizer.normalizer
        plain_texts = [text if normal is None else normal.normalize_str(text) for text in different]
        if described["model"]["type"] == "WordPiece":
            found = _cut(described, chosen | vocabulary.spelled_in(described, plain_texts))
            different = [text for text, same in encoded_alike(tokenizer, found.tokenizer, different) if not same]
    if different:
        raise CompressError(
            f"the trimmed tokenizer reads {len(different)} texts of the corpus otherwise, as {different[0]!r:.80}; "
            "nothing was kept. Please report it with the tokenizer.json"
        )
    return found


def encoded_alike(before: Tokenizer, after: Tokenizer, texts: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Each text, and whether both give it the same tokens."""
    for chunk in vocabulary.chunks(texts):
        pairs = zip(before.encode_batch(chunk), after.encode_batch(chunk), strict=True)
        for text, (one, other) in zip(chunk, pairs, strict=True):
            yield text, one.tokens == other.tokens


def _cut(described: dict[str, Any], chosen: set[int]) -> Cut:
    kept = vocabulary.needed(described, chosen)
    return Cut(tuple(kept), vocabulary.trimmed(described, kept))
