"""Whether a graph reads texts as the tokenizer does: the same ids, alone and in company, or a list of what differs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from compress.export.predictor import Text
from compress.export.text.frame import Frame
from compress.export.text.torture import PAIRS, TEXTS, lengths

TOGETHER = 16
"""Texts in a batch that is compared, so that rows of different length share one."""


@dataclass(frozen=True)
class Difference:
    """A text that the graph reads otherwise: the first token at which, and the ids from there on."""

    text: Text
    at: int
    expected: tuple[int, ...]
    found: tuple[int, ...]

    def __str__(self) -> str:
        shown = f"{self.text!r}" if len(f"{self.text!r}") < 80 else f"{self.text!r:.77}..."
        return f"{shown} at token {self.at}: expected {list(self.expected[:5])}, found {list(self.found[:5])}"


def torture(frame: Frame) -> list[Text]:
    """The texts, or pairs of texts, every file is held against."""
    edges = lengths(frame.room)
    if frame.pair:
        return [*PAIRS, *((one, other) for one in edges for other in edges)]
    return [*TEXTS, *edges]


def differences(
    session: onnxruntime.InferenceSession, tokenizer: Tokenizer, frame: Frame, texts: Sequence[Text]
) -> list[Difference]:
    """The texts whose row differs, from a session that gives input_ids, attention_mask and token_type_ids."""
    reference = Tokenizer.from_str(tokenizer.to_str())
    reference.enable_truncation(frame.max_length, strategy="longest_first")
    found = []
    for first in range(0, len(texts), TOGETHER):
        batch = texts[first : first + TOGETHER]
        expected = reference.encode_batch(list(batch))
        for size in (1, len(batch)) if len(batch) > 1 else (1,):
            rows = [row for start in range(0, len(batch), size) for row in _rows(session, batch[start : start + size])]
            pairs = zip(batch, expected, rows, strict=True)
            found += [each for text, row, ours in pairs if (each := _difference(text, row, ours, frame))]
    return list({each.text: each for each in found}.values())


def feeds(texts: Sequence[Text]) -> dict[str, NDArray[np.object_]]:
    """The inputs of a text file: `text`, and `text_pair` of pairs."""
    firsts = [text if isinstance(text, str) else text[0] for text in texts]
    given = {"text": np.array(firsts, dtype=object)}
    if not isinstance(texts[0], str):
        given["text_pair"] = np.array([text[1] for text in texts], dtype=object)
    return given


def _rows(session: onnxruntime.InferenceSession, texts: Sequence[Text]) -> Iterator[Mapping[str, list[int]]]:
    names = ["input_ids", "attention_mask", "token_type_ids"]
    for row in zip(*session.run(names, feeds(texts)), strict=True):
        yield {name: values.tolist() for name, values in zip(names, row, strict=True)}


def _difference(text: Text, expected: Encoding, found: Mapping[str, list[int]], frame: Frame) -> Difference | None:
    """None where ids, types and mask are the tokenizer's, followed by nothing but padding."""
    beyond = len(found["input_ids"]) - len(expected.ids)
    whole = {
        "input_ids": expected.ids + [frame.padding] * beyond,
        "attention_mask": [1] * len(expected.ids) + [0] * beyond,
        "token_type_ids": expected.type_ids + [0] * beyond,
    }
    wrong = [name for name, values in whole.items() if values != found[name]]
    if not wrong:
        return None
    ours, theirs = found[wrong[0]], whole[wrong[0]]
    same = [one == other for one, other in zip(ours, theirs, strict=False)]
    at = same.index(False) if False in same else len(same)
    return Difference(text, at, tuple(theirs[at:]), tuple(ours[at:]))
