"""What every masking promises: whom it chooses, what becomes of them, and that the same seed draws the same."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.data.constants import IGNORE_INDEX
from compress.papers import albert, bert, distilbert, electra
from tests.papers import rows
from tests.papers.rows import CLS, FIRST, MASK, SEP, SIZE, UNK, words

MASKS: dict[str, tuple[Callable[..., dict[str, Tensor]], float, float]] = {
    "bert": (bert.mask, 0.8, 0.1),
    "albert": (albert.mask, 0.8, 0.1),
    "distilbert": (distilbert.mask, 0.8, 0.1),
    "electra": (electra.mask, 0.85, 0.15),
    "deberta-v3": (partial(bert.mask, masked=1.0, random=0.0), 1.0, 0.0),
}
"""Function, and the shares of the chosen tokens that become [MASK] and that stay as they are."""


def corrupt(name: str, batch: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    return MASKS[name][0](batch, words(counts=torch.ones(SIZE, dtype=torch.int64)), **options)


def long_rows(count: int) -> dict[str, Tensor]:
    return rows.batch(*[[CLS, *range(FIRST, FIRST + 254), SEP]] * count)


@pytest.mark.parametrize("name", MASKS)
def test_only_ordinary_tokens_are_chosen_and_nothing_else_changes(name: str) -> None:
    ids = [CLS, 7, UNK, SEP, 8, MASK, 9, SEP]
    batch = rows.batch(ids, [CLS, 7, SEP], [CLS, SEP])
    ordinary_BL = torch.tensor([[token in (7, 8, 9) for token in row] for row in batch["input_ids"].tolist()])
    for _ in range(30):
        masked = corrupt(name, batch, rate=0.9)
        chosen_BL = masked["labels"] != IGNORE_INDEX
        # ELECTRA draws with replacement
        assert torch.equal(chosen_BL & ordinary_BL, chosen_BL if name == "electra" else ordinary_BL)
        assert chosen_BL.any(-1).tolist() == [True, True, False]
        assert torch.equal(masked["labels"][chosen_BL], batch["input_ids"][chosen_BL])
        assert torch.equal(masked["input_ids"][~chosen_BL], batch["input_ids"][~chosen_BL])
        assert masked["attention_mask"] is batch["attention_mask"]


@pytest.mark.parametrize("name", MASKS)
def test_what_the_chosen_tokens_become(name: str) -> None:
    torch.manual_seed(0)
    batch = long_rows(60)
    masked = corrupt(name, batch)
    chosen_BL = masked["labels"] != IGNORE_INDEX
    if name in ("bert", "albert", "deberta-v3"):
        assert (chosen_BL.sum(-1) == round(0.15 * 256)).all()
    now, then = masked["input_ids"][chosen_BL], batch["input_ids"][chosen_BL]
    _, hidden, same = MASKS[name]
    tolerance = 4 * (0.16 / len(now)) ** 0.5
    assert (now == MASK).float().mean().item() == pytest.approx(hidden, abs=tolerance)
    assert (now == then).float().mean().item() == pytest.approx(same, abs=tolerance)
    random = now[(now != MASK) & (now != then)]
    assert len(set(random.tolist())) >= 0.8 * len(random), "any of the 1,000 tokens"


@pytest.mark.parametrize("name", MASKS)
def test_draws_follow_the_seed(name: str) -> None:
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(corrupt(name, long_rows(2)))
    assert all(torch.equal(value, drawn[1][column]) for column, value in drawn[0].items())
    assert not torch.equal(drawn[0]["labels"], drawn[2]["labels"])
