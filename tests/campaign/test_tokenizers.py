"""Tokenizers as the hub has them are read as transformers reads them, by training, by prediction and after saving."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from transformers.utils import logging

from compress.data.encoder import Encoder, Text, TextEncoder, TextRow, encoder_of
from compress.errors import DataError
from compress.models.checkpoints import save_checkpoint
from tests.campaign import cases, foreign
from tests.campaign.cases import Record

TOKENIZERS = 3000 if cases.WHOLE else 80
PARTS = 10 if cases.WHOLE else 2
TEXTS = 6
"""Of each kind: fixed ones, and ones that are drawn."""


class Anything:
    """A model that reads all inputs, for saving a tokenizer beside it."""

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": "bert"}), encoding="utf-8")

    def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> None: ...

    def get_output_embeddings(self) -> None: ...


@pytest.fixture(autouse=True)
def silent() -> Any:
    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    yield
    logging.set_verbosity(before)


def expected(tokenizer: Any, texts: Sequence[Text], max_length: int) -> list[TextRow]:
    """Encode with transformers; pairs as a batch, as an empty second text is none in a single call."""
    columns = [texts] if isinstance(texts[0], str) else list(map(list, zip(*texts, strict=True)))
    found = tokenizer(*columns, truncation=True, max_length=max_length)
    return [dict(zip(found, cells, strict=True)) for cells in zip(*found.values(), strict=True)]


def differences(found: Sequence[TextRow], wanted: Sequence[TextRow], texts: Sequence[Text]) -> list[Any]:
    """List the texts whose rows differ; transformers makes nothing of a text without tokens."""
    return [
        [text, ours, theirs]
        for text, ours, theirs in zip(texts, found, wanted, strict=True)
        if theirs["input_ids"] and ours != theirs | {"attention_mask": [1] * len(ours["input_ids"])}
    ]


@pytest.mark.parametrize("part", range(PARTS))
def test_rows_are_those_of_transformers(part: int, tmp_path: Path, record_property: Record) -> None:
    faults: dict[str, object] = {}
    tried = 0
    for number in range(part, TOKENIZERS, PARTS):
        draw = foreign.Draw(f"{cases.SEED} tokenizer {number}")
        folder = tmp_path / str(number)
        kind = foreign.write(folder, draw)
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except (TypeError, ValueError):  # its class cannot read this file
            continue
        tried += 1
        if problem := _compare(tokenizer, folder, draw, saved=number % 3 == 0):
            faults[f"{number}, {kind}"] = problem
    assert tried > 0.8 * TOKENIZERS / PARTS
    cases.record(record_property, "tokenizers, beside transformers", tried, faults)


def _compare(tokenizer: Any, folder: Path, draw: foreign.Draw, *, saved: bool) -> object:
    texts: list[Text] = list(draw.texts(TEXTS))
    if draw.often(0.4):
        texts = [(str(one), str(other)) for one, other in zip(texts, reversed(texts), strict=True)]
    max_length = draw.one(8, 12, 40, 150)
    encoder = encoder_of(tokenizer)
    wanted = expected(tokenizer, texts, max_length)
    try:
        found = encoder.encode(texts, max_length)
    except DataError as error:
        return _check_refusal(str(error), encoder, wanted, pair=not isinstance(texts[0], str))
    if problem := differences(found, wanted, texts):
        return problem
    if [encoder.encode([text], max_length)[0] for text in texts] != found:
        return "a text alone is encoded differently"
    if not saved:
        return None
    out = folder / "bundle"
    save_checkpoint(out, Anything(), tokenizer, max_length)
    opened = TextEncoder.from_folder(out)
    if opened.encode(texts, max_length) != found:
        return ["saved", opened.settings, encoder.settings]
    return differences(found, expected(AutoTokenizer.from_pretrained(out), texts, max_length), texts)


def _check_refusal(message: str, encoder: Encoder, wanted: Sequence[TextRow], *, pair: bool) -> object:
    """Return None for an error that names what is not supported, where it is so."""
    settings = encoder.settings
    if "truncation_strategy" in message and pair and settings.truncation_strategy != "longest_first":
        return None
    if "pad_token" in message and settings.pad_token_id is None and any(not row["input_ids"] for row in wanted):
        return None
    return message


def windows_of(encoder: Encoder, question: str, context: str, max_length: int) -> Mapping[str, Any]:
    (found,) = encoder.questions([question], [context], max_length)
    return encoder.row(found[-1 if encoder.settings.truncation_side == "left" else 0].row)


@pytest.mark.parametrize("part", range(PARTS))
def test_windows_contain_the_row_of_a_truncated_text(part: int, tmp_path: Path, record_property: Record) -> None:
    """The context of a question is cut as by `only_second`, words as by `is_split_into_words`."""
    faults: dict[str, object] = {}
    tried = 0
    for number in range(part, TOKENIZERS // 5, PARTS):
        draw = foreign.Draw(f"{cases.SEED} windows {number}")
        folder = tmp_path / str(number)
        kind = foreign.write(folder, draw)
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except (TypeError, ValueError):
            continue
        encoder = encoder_of(tokenizer)
        framed = tokenizer("a", "a", return_special_tokens_mask=True)["special_tokens_mask"]
        context = " ".join(draw.texts(TEXTS))
        length = draw.one(24, 40)
        if framed and (framed[0] or framed[-1]):
            tried += 1
            wanted = tokenizer("is it", context, truncation="only_second", max_length=length)
            if windows_of(encoder, "is it", context, length)["input_ids"] != wanted["input_ids"]:
                faults[f"{number}, {kind}, question"] = wanted["input_ids"]
        tried += 1
        words = [f" {word}" for word in context.split()]
        wanted = tokenizer(words, is_split_into_words=True, truncation=True, max_length=length)
        (found,) = encoder.words([context.split()], length)
        row = encoder.row(found[-1 if encoder.settings.truncation_side == "left" else 0].row)
        if row["input_ids"] != wanted["input_ids"]:
            faults[f"{number}, {kind}, words"] = [row["input_ids"], wanted["input_ids"]]
        seen = [at for window in found for at in window.word if at >= 0]
        if seen != sorted(set(seen)):
            faults[f"{number}, {kind}, words seen"] = seen
    cases.record(record_property, "windows, beside transformers", tried, faults)
