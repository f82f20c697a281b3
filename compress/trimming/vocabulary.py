"""Find the tokens of a vocabulary that a corpus needs, and make the tokenizer that has only these.

What may go is decided so that every text of the corpus is encoded as before. WordPiece takes the longest match: a
token that never was one can go. Byte-pair encoding applies its merges in their order: those that build the tokens in
use are kept, with everything they build on the way, and at each step the first merge that applies is the same as
before. Unigram takes the most probable cut, which stays the most probable of fewer. So that texts outside the corpus
can still be spelled, single characters (and bytes) stay, in both forms where there are two.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from compress.errors import CompressError
from compress.progress import show_progress

CHUNK: Final = 1000
BYTE: Final = 6
"""Length of a byte's token where bytes stand in for unknown characters: <0x0A>."""


def counts(tokenizer: Tokenizer, texts: Iterable[str]) -> NDArray[np.int64]:
    """Count how often each token occurs in the texts: (vocabulary,)."""
    found = np.zeros(1 + max(tokenizer.get_vocab(with_added_tokens=True).values()), np.int64)
    for chunk in show_progress(chunks(texts), "counting tokens", unit="thousand texts"):
        for row in tokenizer.encode_batch_fast(chunk, add_special_tokens=False):
            np.add.at(found, row.ids, 1)
    return found


def chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield texts, many at a time."""
    texts = iter(texts)
    while chunk := list(islice(texts, CHUNK)):
        yield chunk


def needed(described: Mapping[str, Any], used: Iterable[int]) -> list[int]:
    """Find the ids, ascending, that go with the `used` ones: what builds these, what spells anything, what is special.

    `described`: the tokenizer's json. Raises CompressError for a model that is none of the three kinds.
    """
    model = described["model"]
    numbers = numbered(described)
    tokens = {number: token for token, number in numbers.items()}
    kept = set(used) | {token["id"] for token in described["added_tokens"]} | set(_framing(described["post_processor"]))
    if model["type"] == "WordPiece":
        prefix = model["continuing_subword_prefix"]
        kept |= {number for token, number in numbers.items() if len(token) == 1}
        kept |= {
            number for token, number in numbers.items() if len(token) == len(prefix) + 1 and token.startswith(prefix)
        }
        kept.add(numbers[model["unk_token"]])
    elif model["type"] == "BPE":
        if model.get("end_of_word_suffix") or model.get("continuing_subword_prefix"):
            raise CompressError(
                "tokenizer.json: BPE with marks inside words; expected byte BPE, as of RoBERTa and GPT-2"
            )
        built, _ = _find_parts(model, (tokens[number] for number in kept))
        kept |= {numbers[token] for token in built if token in numbers}
        kept |= _spelling(numbers)
        if model.get("unk_token"):
            kept.add(numbers[model["unk_token"]])
    elif model["type"] == "Unigram":
        kept |= _spelling(numbers)
        kept.add(int(np.argmin([score for _, score in model["vocab"]])))  # what is unknown is rated below this one
        if model.get("unk_id") is not None:
            kept.add(model["unk_id"])
    else:
        raise CompressError(f"tokenizer.json: its model is {model['type']}; expected WordPiece, BPE or Unigram")
    return sorted(kept)


def trimmed(described: Mapping[str, Any], kept: Sequence[int]) -> dict[str, Any]:
    """Cut the tokenizer's json down to these ids, numbered anew in their order."""
    new = {old: index for index, old in enumerate(kept)}
    model = dict(described["model"])
    if model["type"] == "Unigram":
        model["vocab"] = [entry for number, entry in enumerate(model["vocab"]) if number in new]
        model["unk_id"] = None if model.get("unk_id") is None else new[model["unk_id"]]
    else:
        model["vocab"] = {token: new[number] for token, number in model["vocab"].items() if number in new}
    if model["type"] == "BPE":
        _, merges = _find_parts(model, model["vocab"])
        model["merges"] = [merge for merge in model["merges"] if _pair(merge) in merges]
    padding = described.get("padding")
    return {
        **described,
        "model": model,
        "added_tokens": [{**token, "id": new[token["id"]]} for token in described["added_tokens"]],
        "post_processor": _renumber(described["post_processor"], new),
        "padding": padding and {**padding, "pad_id": new[padding["pad_id"]]},
    }


def numbered(described: Mapping[str, Any]) -> dict[str, int]:
    """Map tokens to ids, with those that were added."""
    vocabulary = described["model"]["vocab"]
    if isinstance(vocabulary, list):
        vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
    return {**vocabulary, **{token["content"]: token["id"] for token in described["added_tokens"]}}


def _spelling(numbers: Mapping[str, int]) -> set[int]:
    """Find single characters, which are bytes in byte BPE, and bytes that are written out."""
    return {
        number
        for token, number in numbers.items()
        if len(token) == 1 or (len(token) == BYTE and token.startswith("<0x") and token.endswith(">"))
    }


def _find_parts(model: Mapping[str, Any], tokens: Iterable[str]) -> tuple[set[str], set[tuple[str, str]]]:
    """Find what byte-pair encoding passes through to build these tokens: the parts, and the merges."""
    ranks = {_pair(merge): rank for rank, merge in enumerate(model["merges"])}
    parts: set[str] = set()
    merges: set[tuple[str, str]] = set()
    for token in tokens:
        symbols = list(token)
        parts.update(symbols)
        while True:
            pairs = [(ranks.get(pair, len(ranks)), at) for at, pair in enumerate(pairwise(symbols))]
            rank, at = min(pairs, default=(len(ranks), 0))
            if rank == len(ranks):
                break
            merges.add((symbols[at], symbols[at + 1]))
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
            parts.add(symbols[at])
    return parts, merges


def _pair(merge: str | Sequence[str]) -> tuple[str, str]:
    """Read a merge, of which there are two spellings."""
    first, second = merge.split(" ") if isinstance(merge, str) else merge
    return first, second


def _framing(post: Mapping[str, Any] | None) -> list[int]:
    """Find the ids that a post-processor puts around a text."""
    if post is None:
        return []
    if post["type"] == "Sequence":
        return [number for each in post["processors"] for number in _framing(each)]
    if post["type"] == "TemplateProcessing":
        return [number for special in post["special_tokens"].values() for number in special["ids"]]
    return [post[name][1] for name in ("cls", "sep") if name in post]


def _renumber(post: Mapping[str, Any] | None, new: Mapping[int, int]) -> dict[str, Any] | None:
    """Renumber the post-processor's ids."""
    if post is None:
        return None
    if post["type"] == "Sequence":
        return {**post, "processors": [_renumber(each, new) for each in post["processors"]]}
    if post["type"] == "TemplateProcessing":
        special = {
            token: {**each, "ids": [new[number] for number in each["ids"]]}
            for token, each in post["special_tokens"].items()
        }
        return {**post, "special_tokens": special}
    return {**post, **{name: [post[name][0], new[post[name][1]]] for name in ("cls", "sep") if name in post}}


@dataclass(frozen=True)
class TrimmedTokenizer:
    """The tokens that stay, and the tokenizer of them (its json)."""

    kept: tuple[int, ...]
    described: dict[str, Any]

    @classmethod
    def from_used(cls, described: Mapping[str, Any], used: Iterable[int]) -> "TrimmedTokenizer":
        """Cut a tokenizer's json down to the `used` tokens and what goes with them."""
        kept = needed(described, used)
        return cls(tuple(kept), trimmed(described, kept))

    @property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_str(json.dumps(self.described))


def cut(
    tokenizer: Tokenizer, texts: Iterable[str], *, min_count: int, keep: Sequence[str], pinned: set[int]
) -> TrimmedTokenizer:
    """Trim a tokenizer; with min_count 1, every text is encoded to the same tokens as before."""
    described = json.loads(tokenizer.to_str())
    used = counts(tokenizer, texts) >= min_count
    used |= counts(tokenizer, keep) > 0
    chosen = set(np.flatnonzero(used).tolist()) | pinned
    found = TrimmedTokenizer.from_used(described, chosen)
    if min_count > 1:
        return found
    if different := [text for text, same in compare_encodings(tokenizer, found.tokenizer, texts) if not same]:
        # words that were unknown: without the tokens at which they failed, another cut may get through
        normal = tokenizer.normalizer
        plain_texts = [text if normal is None else normal.normalize_str(text) for text in different]
        if described["model"]["type"] == "WordPiece":
            # every token whose characters stand in one of these texts, used or not
            prefix, whole = described["model"]["continuing_subword_prefix"], "\n".join(plain_texts)
            bare = ((token.removeprefix(prefix), number) for token, number in described["model"]["vocab"].items())
            chosen |= {number for part, number in bare if part and part in whole}
            found = TrimmedTokenizer.from_used(described, chosen)
            different = [text for text, same in compare_encodings(tokenizer, found.tokenizer, different) if not same]
    if different:
        raise CompressError(
            f"the trimmed tokenizer reads {len(different)} texts of the corpus otherwise, as {different[0]!r:.80}; "
            "nothing was kept. Please report it with the tokenizer.json"
        )
    return found


def compare_encodings(before: Tokenizer, after: Tokenizer, texts: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Yield each text, and whether both give it the same tokens."""
    for chunk in show_progress(chunks(texts), "comparing texts", unit="thousand texts"):
        pairs = zip(before.encode_batch(chunk), after.encode_batch(chunk), strict=True)
        for text, (one, other) in zip(chunk, pairs, strict=True):
            yield text, one.tokens == other.tokens
