"""Encode questions and words as rows of tokens: what is too long for one row is read in several, its windows.

Made by `tokenizers` alone, so that a bundle reads what its model was trained on without torch or transformers. A long
text repeats the last tokens of a window at the beginning of the next; each answer, and each word, belongs to the
window that shows more of what is around it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tokenizers import Tokenizer

from compress.errors import DataError

LONGEST_QUESTION = 64
"""Tokens that are read of a question, and at most half of a row (Devlin et al. 2019, the authors' code)."""
SHARED_CONTEXT = 128
"""Tokens that two windows of a context share, and at most a third of a row: 128 of 384 (the authors' code)."""
SHARED_WORDS = 32
"""Tokens that two windows of a sentence share, and at most a quarter of a row."""


@dataclass(frozen=True)
class Window:
    """Hold one row: ids, the segment of each token; `text`: where its own tokens are among the special ones."""

    ids: list[int]
    types: list[int]
    text: list[int]

    def per_token(self, values: Sequence[int]) -> list[int]:
        """Spread `values`, one for each token of the text, over the row, with -1 at the others."""
        row = [-1] * len(self.ids)
        for at, value in zip(self.text, values, strict=True):
            row[at] = value
        return row


@dataclass(frozen=True)
class QuestionWindow:
    """Hold a question in one window of its context: the characters each token covers (-1: not of the context), and the
    token that stands for no answer."""

    row: Window
    starts: list[int]
    ends: list[int]
    null: int

    def span(self, start: int, end: int) -> list[int]:
        """Find the [first, last] token of the characters `start` to `end`; both `null` where not all are in it."""
        inside = [at for at in self.row.text if self.starts[at] < end and self.ends[at] > start]
        if not inside or self.starts[inside[0]] > start or self.ends[inside[-1]] < end:
            return [self.null, self.null]
        return [inside[0], inside[-1]]


@dataclass(frozen=True)
class WordWindow:
    """Hold words in one window: the number of the word that begins at each token and is judged there, -1 elsewhere."""

    row: Window
    word: list[int]


def plain(tokenizer: Tokenizer) -> Tokenizer:
    """Copy a tokenizer, to neither pad nor truncate: these are settings of the object, and others may use it."""
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.no_padding()
    copy.no_truncation()
    return copy


def read_questions(
    tokenizer: Tokenizer, questions: Sequence[str], contexts: Sequence[str], max_length: int
) -> Iterator[list[QuestionWindow]]:
    """Yield for every question and its context the windows, at least one, of at most `max_length` tokens each.

    Raises DataError for a row too short to hold a question and some context, and for a tokenizer that puts no special
    token at either end: the place that stands for no answer.
    """
    special = tokenizer.num_special_tokens_to_add(is_pair=True)
    heads = tokenizer.encode_batch(list(questions), add_special_tokens=False)
    bodies = tokenizer.encode_batch(list(contexts), add_special_tokens=False)
    for head, body in zip(heads, bodies, strict=True):
        head.truncate(min(LONGEST_QUESTION, max_length // 2))
        room = max_length - special - len(head.ids)
        if room < 1:
            raise DataError(f"max_length {max_length} leaves no room for a text beside its question; raise it.")
        body.truncate(room, stride=min(SHARED_CONTEXT, max_length // 3, room - 1))
        found = []
        for window in (body, *body.overflowing):
            whole = tokenizer.post_process(head, window)
            marks = whole.special_tokens_mask  # sequence_ids would do, were they kept for the first of a pair
            if not (marks[0] or marks[-1]):
                raise DataError(
                    "this tokenizer puts no special token before or after a question and its text, and so has none to "
                    "stand for 'no answer'; choose a model with one, such as BERT or RoBERTa."
                )
            row = Window(whole.ids, whole.type_ids, [at for at, of in enumerate(whole.sequence_ids) if of == 1])
            starts, ends = (row.per_token([offset[side] for offset in window.offsets]) for side in (0, 1))
            null = 0 if marks[0] else len(whole.ids) - 1  # XLNet ends with its classification token
            found.append(QuestionWindow(row, starts, ends, null))
        yield found


def read_words(tokenizer: Tokenizer, sentences: Sequence[Sequence[str]], max_length: int) -> Iterator[list[WordWindow]]:
    """Yield for every sentence, given as words, its windows of at most `max_length` tokens; a word is judged in one.

    A word is read as if a space came before it, whatever the tokenizer does with the first of a text. One that the
    tokenizer makes nothing of (a zero-width space) is judged nowhere. Raises DataError where there is room for no word.
    """
    room = max_length - tokenizer.num_special_tokens_to_add(is_pair=False)
    if room < 1:
        raise DataError(f"max_length {max_length} leaves no room for words; raise it.")
    shared = min(SHARED_WORDS, max_length // 4, room - 1)
    spaced = [[f" {word}" for word in words] for words in sentences]
    for body in tokenizer.encode_batch(spaced, is_pretokenized=True, add_special_tokens=False):
        numbers = body.word_ids
        begins = [now if now != before and now is not None else -1 for before, now in pairwise([None, *numbers])]
        body.truncate(room, stride=shared)
        windows = [body, *body.overflowing]
        found, at = [], 0
        for n, window in enumerate(windows):
            size = len(window.ids)
            own = slice(shared // 2 if n else 0, size if n == len(windows) - 1 else size - (shared - shared // 2))
            word = [-1] * size
            word[own] = begins[at : at + size][own]
            whole = tokenizer.post_process(window)
            text = [k for k, of in enumerate(whole.sequence_ids) if of is not None]
            row = Window(whole.ids, whole.type_ids, text)
            found.append(WordWindow(row, row.per_token(word)))
            at += room - shared
        yield found
