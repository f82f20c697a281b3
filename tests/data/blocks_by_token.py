"""How blocks of a corpus were made by a token at a time: what `compress.data` must still write."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from compress.data.templates import Template

SENTENCES_PER_CALL = 2000
LONGEST_SENTENCE = 10_000
LONGEST_PASSAGE = 20_000
SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"')\]”’]))\s+(?![a-z])|(?<=[。！？])")


@dataclass(frozen=True)
class Passage:
    """Hold a part of a document that is tokenised as one text, and the characters
    between which its sentences are.

    A sentence begins where the one before it ends, so with the white space between
    them. The text before the first bound and after the last is context: tokenizers may
    join the characters on both sides of a bound.
    """

    document: int
    text: str
    bounds: list[int]


def tokenise(documents: Iterable[str], tokenizer: Any) -> Iterator[tuple[int, list[int]]]:
    """Yield (document number, token ids) of each sentence; ids may be empty.

    A document is tokenised as running text, in which the end of a line is a space, and
    its tokens are then divided among its sentences. So they are what the tokenizer
    makes of that text, whatever it does with spaces and with the beginning of a text:
    "Ġ" and "▁" stand where a space is, and not after every full stop of a text without
    spaces.
    """
    passages = (passage for number, document in enumerate(documents) for passage in _divide(number, document))
    no = {
        "add_special_tokens": False,
        "return_attention_mask": False,
        "return_token_type_ids": False,
        "verbose": False,
    }
    while batch := _take(passages, SENTENCES_PER_CALL):
        # it does not report which characters its tokens come from
        if not tokenizer.is_fast:
            spans = [(passage, *span) for passage in batch for span in pairwise(passage.bounds)]
            tokens = tokenizer([passage.text[begin:end] for passage, begin, end in spans], **no)["input_ids"]
            for (passage, _, _), ids in zip(spans, tokens, strict=True):
                yield passage.document, ids
            continue
        encoded = tokenizer([passage.text for passage in batch], **no)
        for row, passage in enumerate(batch):
            for first, end in pairwise(_token_bounds(encoded, row, passage)):
                yield passage.document, encoded["input_ids"][row][first:end]


def _divide(number: int, document: str) -> Iterator[Passage]:
    """Divide a document as running text into passages of whole sentences, with a
    sentence of context on each side."""
    lines = [line for line in map(str.strip, document.splitlines()) if line]
    text = " ".join(lines)
    bounds = [0]
    before = 0
    for line in lines:
        bounds += [before + end for _, end in _find_sentences(line)]
        before += len(line) + 1
    first = 0
    sentences = len(bounds) - 1
    while first < sentences:
        end = first + 1
        while end < sentences and bounds[end] - bounds[first] < LONGEST_PASSAGE:
            end += 1
        begin = bounds[max(0, first - 1)]
        context = text[begin : bounds[min(end + 1, sentences)]]
        yield Passage(number, context, [bound - begin for bound in bounds[first : end + 1]])
        first = end


def _take(passages: Iterator[Passage], count: int) -> list[Passage]:
    """Take passages until they have `count` sentences."""
    batch: list[Passage] = []
    taken = 0
    while taken < count and (passage := next(passages, None)) is not None:
        batch.append(passage)
        taken += len(passage.bounds) - 1
    return batch


def _token_bounds(encoded: Any, row: int, passage: Passage) -> list[int]:
    """Return the number of the first token from each bound on; a token across it counts
    as after it."""
    token = len(encoded["input_ids"][row])
    bounds = []
    for begin, end in reversed(list(pairwise([*passage.bounds, len(passage.text)]))):
        found = (encoded.char_to_token(row, at) for at in range(begin, end))
        token = min(token, next((each for each in found if each is not None), token))
        while token > 0 and _is_space_after(encoded.token_to_chars(row, token - 1), begin):
            token -= 1
        bounds.append(token)
    bounds.reverse()
    return bounds


def _is_space_after(span: Any, begin: int) -> bool:
    """Return True for a token that covers no character from `begin` on: a space, of
    which no offset is kept."""
    return span is not None and begin <= span.start == span.end


def _find_sentences(line: str) -> Iterator[tuple[int, int]]:
    """Yield the first character of each sentence of a line, and the one after its
    last."""
    begin = 0
    for end in [*(found.start() for found in SENTENCE_END.finditer(line)), len(line)]:
        begin = _skip_spaces(line, begin)
        while end - begin > LONGEST_SENTENCE:
            cut = line.rfind(" ", begin + 1, begin + LONGEST_SENTENCE)
            if cut < 0:
                cut = begin + LONGEST_SENTENCE
            yield begin, cut
            begin = _skip_spaces(line, cut)
        if begin < end:
            yield begin, end
            begin = end


def _skip_spaces(line: str, begin: int) -> int:
    while begin < len(line) and line[begin].isspace():
        begin += 1
    return begin


def blocks(documents: Iterable[str], tokenizer: Any, max_length: int) -> Iterator[dict[str, Any]]:
    """Yield blocks of at most `max_length` tokens: input_ids, token_type_ids if the tokenizer makes them, document."""
    template = Template.from_tokenizer(tokenizer, 1)
    room = max_length - template.size
    block: list[int] = []
    owner = 0
    for number, ids in tokenise(documents, tokenizer):
        if block and (number != owner or len(block) + len(ids) > room):
            yield template.fill(block) | {"document": owner}
            block = []
        owner = number
        cut = max(0, (len(ids) - 1) // room * room)
        for first in range(0, cut, room):
            yield template.fill(ids[first : first + room]) | {"document": number}
        block = block + ids[cut:]
    if block:
        yield template.fill(block) | {"document": owner}
