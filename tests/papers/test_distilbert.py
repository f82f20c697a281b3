"""Sanh et al. 2019: smoothed masking."""

import pytest
import torch

from compress.data.constants import IGNORE_INDEX
from compress.errors import DataError
from compress.papers.distilbert import mask
from tests.papers import rows
from tests.papers.rows import CLS, PAD, SEP, SIZE, words

COUNTS = torch.zeros(SIZE, dtype=torch.int64)
COUNTS[:5] = 1_000_000
COUNTS[7], COUNTS[8], COUNTS[9] = 1024, 1, 0


def test_of_the_batch_not_of_each_row_a_share_is_predicted() -> None:
    batch = rows.batch([CLS, *[7] * 98, SEP], [CLS, *[8] * 8, SEP], [CLS, SEP])
    for _ in range(20):
        masked = mask(batch, words(counts=COUNTS))
        assert (masked["labels"] != IGNORE_INDEX).sum() == 17  # ceil(0.15 * 112)
        assert (masked["labels"][1] != IGNORE_INDEX).sum() > 1  # rare
        assert not (masked["labels"] == PAD).any()


def test_tokens_are_drawn_by_their_counts_to_the_minus_0_7() -> None:
    """One token of two, with weights 1024^-0.7 = 1/128 and 1: of 40,000 draws 310 are of the frequent one."""
    torch.manual_seed(0)
    frequent = total = 0
    for _ in range(4000):
        masked = mask(rows.batch([CLS, 7, 8, SEP]), words(counts=COUNTS))
        chosen = masked["labels"][masked["labels"] != IGNORE_INDEX]
        assert len(chosen) == 1
        frequent += int(chosen == 7)
        total += 1
    p = 1 / 129
    assert frequent / total == pytest.approx(p, abs=4 * (p / total) ** 0.5)
    even = [
        mask(rows.batch([CLS, 7, 8, SEP]), words(counts=COUNTS), smoothing=0.0)["labels"][0, 1] for _ in range(1000)
    ]
    assert sum(label == 7 for label in even) / 1000 == pytest.approx(0.5, abs=4 * (0.25 / 1000) ** 0.5)


def test_an_unseen_token_counts_as_seen_once() -> None:
    torch.manual_seed(0)
    labels = [mask(rows.batch([CLS, 8, 9, SEP]), words(counts=COUNTS))["labels"][0, 1] for _ in range(1000)]
    assert sum(label == 8 for label in labels) / 1000 == pytest.approx(0.5, abs=4 * (0.25 / 1000) ** 0.5)


def test_all_positions_are_masked_if_there_are_too_few() -> None:
    masked = mask(rows.batch([CLS, 8, SEP]), words(counts=COUNTS), rate=0.9)
    assert masked["labels"].tolist() == [[IGNORE_INDEX, 8, IGNORE_INDEX]]
    assert mask(rows.batch([CLS, SEP]), words(counts=COUNTS))["labels"].tolist() == [[IGNORE_INDEX, IGNORE_INDEX]]


def test_without_counts_it_is_refused() -> None:
    with pytest.raises(DataError, match="were not counted"):
        mask(rows.batch([CLS, 8, SEP]), words())
