"""Divide documents into sentences, and encode these as parts of running text.

A document is running text, in which the end of a line is a space; for causal language
models, which have to learn where lines end, it is the text unchanged. The tokens of its
sentences, joined, are those that the tokenizer makes of that text, whatever it does
with spaces and with the beginning of a text: "Ġ" and "▁" stand where a space is, and
not after every full stop of a text without spaces.

Most tokenizers never join the characters on both sides of a bound between sentences. If
so, each sentence is encoded alone, with the space before it, which is many times as
fast as dividing the tokens of the text by the characters that they cover.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise, starmap
from typing import TYPE_CHECKING, Final

import numpy as np
from tokenizers.models import BPE
from tokenizers.normalizers import NFC, BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from compress.data.encoder import Encoder, TextEncoder
from compress.data.fast_tokens import TokenArrays
from compress.progress import note

if TYPE_CHECKING:
    from tokenizers import Encoding

    from compress.arrays import Longs

SENTENCES_PER_CALL: Final = 2000

LONGEST_SENTENCE: Final = 10_000
"""Characters after which text without an end of sentence is cut, at a space if there is
one."""

LONGEST_PASSAGE: Final = 20_000
"""Characters of a document that are tokenised as one text, so that memory stays
bounded."""

CHECKED_CHARACTERS: Final = 50_000
"""Characters of a corpus whose sentences are encoded in both ways."""

_SENTENCE_END = re.compile(r"[.!?。！？](?:(?<=[。！？])|[\"')\]”’]?(?=\s+(?![a-z])))")
_BERT_MARKS: Final = frozenset(".!?。！？\"')]”’")
"""Characters that may come before a bound; BERT's tokenizer splits off each as a
word."""
_JOINING: Final = re.compile(r"\s|[。！？]")
"""Characters next to bounds: an added token that contains one may cross a bound."""


def split_sentences(document: str) -> Iterator[str]:
    """Yield the sentences of a document; a line end always ends one."""
    for text in join_lines(0, document):
        yield from map(str.lstrip, text.sentences())


def _find_ends(line: str) -> list[int]:
    """Return the place after the last character of each sentence of a stripped line."""
    ends = [found.end() for found in _SENTENCE_END.finditer(line)]
    if line and (not ends or ends[-1] < len(line)):
        ends.append(len(line))
    if len(line) <= LONGEST_SENTENCE:
        return ends
    cut = []
    begin = 0
    for end in ends:
        begin = _skip_spaces(line, begin)
        while end - begin > LONGEST_SENTENCE:
            at = line.rfind(" ", begin + 1, begin + LONGEST_SENTENCE)
            cut.append(begin + LONGEST_SENTENCE if at < 0 else at)
            begin = _skip_spaces(line, cut[-1])
        cut.append(end)
        begin = end
    return cut


def _skip_spaces(line: str, begin: int) -> int:
    while begin < len(line) and line[begin].isspace():
        begin += 1
    return begin


EndsTokens = Callable[[str, int], bool]
"""(running text, bound) -> whether no token crosses the bound."""


@dataclass(frozen=True)
class RunningText:
    """Hold a text of a document, and the character positions that bound its sentences.

    A sentence begins where the previous one ends, so it includes the white space
    between them.
    """

    document: int
    text: str
    bounds: list[int]

    @property
    def size(self) -> int:
        """The number of sentences."""
        return len(self.bounds) - 1

    def sentences(self) -> list[str]:
        """Return the text of each sentence."""
        return [self.text[begin:end] for begin, end in pairwise(self.bounds)]

    def pieces(self, ends_tokens: EndsTokens) -> Iterator[RunningText]:
        """Divide the text at the bounds that no token crosses."""
        first = 0
        for at in range(1, self.size + 1):
            if at == self.size or ends_tokens(self.text, self.bounds[at]):
                begin = self.bounds[first]
                yield RunningText(
                    self.document,
                    self.text[begin : self.bounds[at]],
                    [bound - begin for bound in self.bounds[first : at + 1]],
                )
                first = at

    def passages(self) -> Iterator[RunningText]:
        """Divide a long text into whole sentences, with a sentence of context on each
        side: the text before the first bound and after the last. Tokenizers may join
        the characters on both sides of a bound."""
        first = 0
        while first < self.size:
            end = first + 1
            while (
                end < self.size
                and self.bounds[end] - self.bounds[first] < LONGEST_PASSAGE
            ):
                end += 1
            begin = self.bounds[max(0, first - 1)]
            yield RunningText(
                self.document,
                self.text[begin : self.bounds[min(end + 1, self.size)]],
                [bound - begin for bound in self.bounds[first : end + 1]],
            )
            first = end


@dataclass(frozen=True, eq=False)
class SentenceTokens:
    """Hold the tokens of sentences, without special tokens, and for each sentence the
    number of its document."""

    documents: Longs
    tokens: TokenArrays

    @classmethod
    def from_texts(
        cls,
        texts: list[RunningText],
        sentences: RunningTextEncoder,
    ) -> SentenceTokens:
        """Encode the sentences of texts."""
        numbers = np.array([text.document for text in texts], np.int64)
        sizes = [text.size for text in texts]
        return cls(np.repeat(numbers, sizes), sentences.encode(texts))


@dataclass(frozen=True)
class RunningTextEncoder:
    """Encode the sentences of texts, alone wherever no token crosses their bounds.

    encoder       of a fast tokenizer of `tokenizers`, or of another one
    ends_tokens   which bounds no token crosses
    """

    encoder: Encoder
    ends_tokens: EndsTokens

    @classmethod
    def from_encoder(
        cls,
        encoder: Encoder,
        texts: list[RunningText],
    ) -> RunningTextEncoder:
        """Choose the rule for bounds that no token crosses from the tokenizer's
        settings, if it holds for the first of these texts."""
        found = cls(encoder, _find_rule(encoder))
        checked = list(_take_first(texts))
        whole = found.encode_whole(checked)
        if list(found.encode(checked).rows()) == list(whole.rows()):
            return found
        note(
            f"{encoder.name}: its tokens cross sentence boundaries, so encoding is "
            "slower"
        )
        return cls(encoder, _refuse)

    def encode(self, texts: list[RunningText]) -> TokenArrays:
        """Encode each sentence alone, or with those that tokens may cross into."""
        alone: list[str] = []
        joined: list[RunningText] = []
        order: list[int] = []
        for text in texts:
            bounds = text.bounds[1:-1]
            if all(self.ends_tokens(text.text, bound) for bound in bounds):
                alone += text.sentences()
                order += [0] * text.size
                continue
            for piece in text.pieces(self.ends_tokens):
                if piece.size == 1:
                    alone.append(piece.text)
                else:
                    joined.append(piece)
                order += [piece.size > 1] * piece.size
        encoded = self.encoder.piece_arrays(alone)
        if not joined:
            return encoded
        together = self.encode_whole(joined)
        # the place of each row, with the sentences that are encoded alone first
        places = np.argsort(np.argsort(order, kind="stable"), kind="stable")
        return TokenArrays.concatenate([encoded, together]).take(places)

    def encode_whole(self, texts: list[RunningText]) -> TokenArrays:
        """Encode texts as wholes, and divide their tokens among the sentences."""
        passages = list(chain.from_iterable(text.passages() for text in texts))
        rows: list[list[int]] = []
        for batch in take_texts(passages):
            found = self.encoder.encodings([passage.text for passage in batch])
            if found is None:
                # it does not report which characters its tokens come from
                sentences = chain.from_iterable(each.sentences() for each in batch)
                rows += self.encoder.pieces(list(sentences))
                continue
            for encoding, passage in zip(found, batch, strict=True):
                bounds = _token_bounds(encoding, passage)
                rows += [encoding.ids[first:end] for first, end in pairwise(bounds)]
        return TokenArrays.from_rows(rows)


ReadDocument = Callable[[int, str], Iterable[RunningText]]
"""(number, document) -> its texts: one of the three functions that follow."""


def join_lines(number: int, document: str) -> list[RunningText]:
    """Join the lines of a document with spaces."""
    lines = _strip_lines(document)
    return _find_sentences(number, " ".join(lines), lines)


def keep_lines(number: int, document: str) -> list[RunningText]:
    """Take a document unchanged."""
    return _find_sentences(number, document, _strip_lines(document))


def split_lines(number: int, document: str) -> list[RunningText]:
    """Make a text of one sentence of each line."""
    lines = document.split("\n")
    return [RunningText(number, line, [0, len(line)]) for line in lines]


def _strip_lines(document: str) -> list[str]:
    return [line for line in map(str.strip, document.splitlines()) if line]


def _find_sentences(number: int, text: str, lines: list[str]) -> list[RunningText]:
    """Find the sentences of the lines of a text, which also holds white space around
    them."""
    bounds = [0]
    at = 0
    for line in lines:
        at = text.index(line, at)
        bounds += [at + end for end in _find_ends(line)]
        at += len(line)
    if at:
        bounds[-1] = len(text)
    return [RunningText(number, text, bounds)]


def read_texts(
    documents: Iterable[tuple[int, str]], read: ReadDocument
) -> Iterator[list[RunningText]]:
    """Read the texts of numbered documents, in the groups of `take_texts`."""
    return take_texts(chain.from_iterable(starmap(read, documents)))


def take_texts(texts: Iterable[RunningText]) -> Iterator[list[RunningText]]:
    """Group texts that have SENTENCES_PER_CALL sentences, or a few more."""
    batch: list[RunningText] = []
    taken = 0
    for text in texts:
        batch.append(text)
        taken += text.size
        if taken >= SENTENCES_PER_CALL:
            yield batch
            batch = []
            taken = 0
    if batch:
        yield batch


def _take_first(texts: Iterable[RunningText]) -> Iterator[RunningText]:
    """Yield the texts that contain the first CHECKED_CHARACTERS."""
    taken = 0
    for text in texts:
        if taken >= CHECKED_CHARACTERS:
            return
        yield text
        taken += len(text.text)


def _find_rule(encoder: Encoder) -> EndsTokens:
    """Return the rule for bounds that no token crosses, as far as the tokenizer's
    settings show one."""
    if not isinstance(encoder, TextEncoder):
        return _refuse
    backend = encoder.backend
    for token in backend.get_added_tokens_decoder().values():
        if token.rstrip or _JOINING.search(token.content):
            return _refuse
    bert = isinstance(backend.normalizer, BertNormalizer | None)
    plain = isinstance(backend.normalizer, NFC | None)
    before = backend.pre_tokenizer
    if isinstance(before, BertPreTokenizer) and bert:
        return _ends_word
    if isinstance(backend.model, BPE) and "ByteLevel" in repr(before) and plain:
        return _is_at_space
    return _refuse


def _refuse(text: str, bound: int) -> bool:
    return False


def _ends_word(text: str, bound: int) -> bool:
    """Check that a word of BERT's ends here: each punctuation mark is one."""
    return text[bound] == " " or text[bound - 1] in _BERT_MARKS


def _is_at_space(text: str, bound: int) -> bool:
    """Check that a word of byte-level BPE begins here, with the space before it."""
    return text[bound] == " "


def _token_bounds(encoding: Encoding, passage: RunningText) -> list[int]:
    """Return the number of the first token from each bound on; a token across it counts
    as after it."""
    token = len(encoding.ids)
    bounds = []
    for begin, end in reversed(list(pairwise([*passage.bounds, len(passage.text)]))):
        found = (encoding.char_to_token(at) for at in range(begin, end))
        token = min(token, next((each for each in found if each is not None), token))
        while (
            token > 0
            and begin < end
            and _is_space_after(encoding.token_to_chars(token - 1), begin)
        ):
            token -= 1
        bounds.append(token)
    bounds.reverse()
    return bounds


def _is_space_after(span: tuple[int, int] | None, begin: int) -> bool:
    """Return True for a token that covers no character from `begin` on: a space whose
    offset is not kept."""
    return span is not None and begin <= span[0] == span[1]
