"""Encode questions and words as rows of tokens, called windows: a long text takes
several of them.

`data.encoder` calls it, with a tokenizer that neither pads nor truncates. Each window
of a long text repeats the last tokens of the window before; each answer, and each word,
belongs to the window that has more context around it. Windows begin at the start of a
text; with a tokenizer that truncates on the left they end at its end, so that the row
which a truncated text would have is one of them.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Literal

import numpy as np
from tokenizers import Encoding, Tokenizer

from compress.errors import DataError

LONGEST_QUESTION = 64
"""The most tokens of a question, which also takes at most half of a row (Devlin et al.
2019, the authors' code)."""
SHARED_CONTEXT = 128
"""Tokens that two windows of a context share, at most a third of a row: 128 of 384 (the
authors' code)."""
SHARED_WORDS = 32
"""Tokens that two windows of a sentence share, at most a quarter of a row."""
CHINESE = (
    # kana and marks of repetition
    "\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\uff66-\uff9f"
    # Chinese characters
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
"""Chinese and Japanese characters, as in the brackets of a regular expression."""
SPACED_LETTER = rf"[^\W{CHINESE}]"
"""The regular expression of a letter or digit of other scripts; the graph of a text
file replaces it, and `\\s`."""


Side = Literal["right", "left"]
"""The end of a long text that a tokenizer cuts off."""


@cache
def word_pattern() -> re.Pattern[str]:
    """Compile the pattern of a word: a URL, a name with its @ or #, letters and digits
    joined by single punctuation marks; any other character alone, and so any Chinese or
    Japanese one. Data sets of tagged words are split about like this.

    A character includes what changes it: accents, the vowel signs of Hindi or Thai
    (which Python's `\\w` lacks), and the joiners and soft hyphens between letters.
    """
    codes = (*range(0x300, 0x20000), *range(0xE0100, 0xE01F0))
    signs = "\u00ad\u200c\u200d" + "".join(filter(is_sign, map(chr, codes)))
    word = f"{SPACED_LETTER}+(?:[{signs}]+{SPACED_LETTER}*)*"
    words = f"[@#]?{word}(?:[-.'’&]{word})*"
    return re.compile(rf"https?://[^\s]+|{words}|[^\s][{signs}]*")


def is_sign(character: str) -> bool:
    """Check whether a character changes the one before it, as an accent does."""
    return unicodedata.category(character)[0] == "M"


def slice_text(text: str, start: int, end: int) -> str:
    """Return the characters `start` to `end` of a text, with the signs that follow:
    tokenizers that drop accents do not count them."""
    while start < end < len(text) and is_sign(text[end]):
        end += 1
    return text[start:end]


def find_words(text: str) -> list[tuple[int, int]]:
    """Find the words of a text: the first character and the end of each."""
    return [match.span() for match in word_pattern().finditer(text)]


@dataclass(frozen=True)
class Window:
    """Hold a row: token ids, their segments, and the positions of the text's tokens
    among the special ones."""

    ids: list[int]
    types: list[int]
    text: list[int]

    def per_token(self, values: Sequence[int]) -> list[int]:
        """Place `values`, one for each token of the text, in the row, with -1 at
        special tokens."""
        row = [-1] * len(self.ids)
        for at, value in zip(self.text, values, strict=True):
            row[at] = value
        return row


@dataclass(frozen=True)
class QuestionWindow:
    """Hold a question with a window of its context: the characters that each token
    covers (-1 outside the context), and the token that stands for no answer."""

    row: Window
    starts: list[int]
    ends: list[int]
    null: int

    def span(self, start: int, end: int) -> list[int]:
        """Find the [first, last] token of the characters `start` to `end`; both `null`
        if the window lacks any."""
        inside = [
            at
            for at in self.row.text
            if self.starts[at] < end and self.ends[at] > start
        ]
        if not inside or self.starts[inside[0]] > start or self.ends[inside[-1]] < end:
            return [self.null, self.null]
        return [inside[0], inside[-1]]


@dataclass(frozen=True)
class WordWindow:
    """Hold a window of words: the number of the word that begins at each token and is
    predicted there, -1 elsewhere."""

    row: Window
    word: list[int]


def cover(windows: Sequence[QuestionWindow], start: int, end: int) -> tuple[int, int]:
    """Narrow the characters `start` to `end` of a context to those that tokens cover: a
    tokenizer may drop an accent or a zero-width space at either end."""
    places = np.concatenate([[each.starts, each.ends] for each in windows], axis=1)
    starts, ends = places.clip(start, end)
    inside = starts < ends
    first = int(starts[inside].min(initial=end))
    return first, int(ends[inside].max(initial=start))


def read_questions(
    tokenizer: Tokenizer,
    questions: Sequence[str],
    contexts: Sequence[str],
    max_length: int,
    *,
    side: Side = "right",
) -> list[list[QuestionWindow]]:
    """Return the windows of every question and its context, at least one, of at most
    `max_length` tokens each.

    A question that is too long is cut off at `side`. Raises DataError for rows too
    short for a question and some context, and for a tokenizer without a special token
    at either end, which stands for no answer.
    """
    special = tokenizer.num_special_tokens_to_add(is_pair=True)
    heads = tokenizer.encode_batch(list(questions), add_special_tokens=False)
    bodies = tokenizer.encode_batch(list(contexts), add_special_tokens=False)
    found = []
    for head, body in zip(heads, bodies, strict=True):
        head.truncate(min(LONGEST_QUESTION, max_length // 2), direction=side)
        room = max_length - special - len(head.ids)
        if room < 1:
            raise DataError(
                f"max_length {max_length} is too short for a question and its context; "
                "raise it."
            )
        shared = min(SHARED_CONTEXT, max_length // 3, room - 1)
        of_question = []
        for window in _split(body, room, shared, side):
            whole = tokenizer.post_process(head, window)
            # sequence_ids are not kept for the first of a pair
            marks = whole.special_tokens_mask
            if not (marks[0] or marks[-1]):
                raise DataError(
                    "this tokenizer adds no special token before or after a question "
                    "and its context, so none can stand for 'no answer'; choose a "
                    "model with one, such as BERT or RoBERTa."
                )
            row = Window(
                whole.ids,
                whole.type_ids,
                [at for at, of in enumerate(whole.sequence_ids) if of == 1],
            )
            starts, ends = (
                row.per_token([offset[edge] for offset in window.offsets])
                for edge in (0, 1)
            )
            # XLNet ends with its classification token
            null = 0 if marks[0] else len(whole.ids) - 1
            of_question.append(QuestionWindow(row, starts, ends, null))
        found.append(of_question)
    return found


def read_words(
    tokenizer: Tokenizer,
    sentences: Sequence[Sequence[str]],
    max_length: int,
    *,
    side: Side = "right",
) -> list[list[WordWindow]]:
    """Return the windows, of at most `max_length` tokens, of every sentence of words; a
    word is predicted in one.

    Every word is read as after a space. A word without tokens (a zero-width space) is
    predicted in none, and a sentence without any tokens, special ones included, has no
    window. Raises DataError if a window has no room for a word.
    """
    room = max_length - tokenizer.num_special_tokens_to_add(is_pair=False)
    if room < 1:
        raise DataError(f"max_length {max_length} is too short for a word; raise it.")
    shared = min(SHARED_WORDS, max_length // 4, room - 1)
    spaced = [[f" {word}" for word in words] for words in sentences]
    found = []
    for body in tokenizer.encode_batch(
        spaced, is_pretokenized=True, add_special_tokens=False
    ):
        numbers = body.word_ids
        begins = [
            now if now != before and now is not None else -1
            for before, now in pairwise([None, *numbers])
        ]
        windows = _split(body, room, shared, side)
        of_sentence = []
        at = 0
        for n, window in enumerate(windows):
            size = len(window.ids)
            first = shared // 2 if n else 0
            end = size if n == len(windows) - 1 else size - (shared - shared // 2)
            word = [-1] * size
            word[first:end] = begins[at + first : at + end]
            whole = tokenizer.post_process(window)
            text = [k for k, of in enumerate(whole.sequence_ids) if of is not None]
            row = Window(whole.ids, whole.type_ids, text)
            if row.ids:
                of_sentence.append(WordWindow(row, row.per_token(word)))
            at += size - shared
        found.append(of_sentence)
    return found


def _split(body: Encoding, room: int, shared: int, side: Side) -> list[Encoding]:
    """Split an encoding into windows of at most `room` tokens, in order, each sharing
    `shared` tokens with the next."""
    body.truncate(room, stride=shared, direction=side)
    parts = [body, *body.overflowing]
    return parts if side == "right" else parts[::-1]
