"""Lan et al. 2020: sentence order and n-gram masking."""

from collections import Counter

import pytest
import torch

from compress.data.constants import IGNORE_INDEX
from compress.papers.albert import mask, sentence_order
from tests.papers import rows
from tests.papers.rows import CLS, FIRST, SEP, SIZE, document, frame, owner, rng, segments, words

THREE = [document(0, 4, 4, 4, 4), document(1, 3, 3), document(2, 5)]


def order(seed: int = 0, **options: object) -> list[dict[str, list[int]]]:
    settings = {"max_length": 19, "short": 0.0} | options
    return list(sentence_order(THREE, frame(), rng=rng(seed), **settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(30))
def test_three_documents_are_three_rows(seed: int) -> None:
    """All of document 0 in one row, in order or swapped; document 1 too; document 2, one sentence, gets another's."""
    zero, one, two = order(seed)
    for row, tokens in ((zero, [*range(100, 116)]), (one, [*range(200, 206)])):
        first, second = segments(row)
        assert (second + first if row["sentence_order"] else first + second) == tokens
        assert min(len(first), len(second)) % (4 if row is zero else 3) == 0
    first, second = segments(two)
    assert first == [*range(300, 305)]
    assert owner(second[0]) in (0, 1)
    assert two["sentence_order"] == 1
    assert [row["document"] for row in (zero, one, two)] == [0, 1, 2]


def test_half_of_the_rows_are_swapped() -> None:
    many = [document(n % 8, 2, 2, 2) for n in range(2000)]
    labels = [row["sentence_order"] for row in sentence_order(many, frame(), max_length=9, rng=rng(), short=0.0)]
    assert len(labels) == 2000
    assert sum(labels) / 2000 == pytest.approx(0.5, abs=4 * (0.25 / 2000) ** 0.5)


# mask

INSIDE = range(500, SIZE)
"""Tokens that continue a word."""


def chosen(ids: list[int], times: int, **options: float) -> list[list[int]]:
    """Which positions of the same row are predicted, that many times."""
    masked = mask(rows.batch(*[ids] * times), words(inside=INSIDE), **options)  # type: ignore[arg-type]
    return [row.nonzero().flatten().tolist() for row in masked["labels"] != IGNORE_INDEX]


def test_whole_words_are_chosen_and_never_more_than_the_rate() -> None:
    """Words of one to four tokens."""
    ids = [CLS, 7, 8, 500, 9, 501, 502, 10, SEP, 11, 503, 504, 505, 12, 13, 506, 14, 15, SEP, *range(20, 61)]
    parts = [(2, 3), (4, 5, 6), (9, 10, 11, 12), (14, 15)]
    for found in chosen(ids, 300):
        assert 0 < len(found) <= 9  # 60 tokens
        assert not {0, 8, 18} & set(found)
        for part in parts:
            assert len(set(part) & set(found)) in (0, len(part))


def test_n_grams_are_of_one_to_three_words_with_shares_of_one_over_n() -> None:
    """Three tokens to choose: n = 3 at once has p = 2/11, n = 1 twice and what is left (6/11)^2, all else two runs."""
    torch.manual_seed(0)
    ids = [CLS, *range(FIRST, FIRST + 400), SEP]
    found = chosen(ids, 1500, max_predictions=3)
    assert {len(each) for each in found} == {3}
    runs = Counter(sum(at - 1 not in each for at in each) for each in found)
    tolerance = 4 * (0.25 / 1500) ** 0.5
    assert runs[1] / 1500 == pytest.approx(2 / 11, abs=tolerance)
    assert runs[3] / 1500 == pytest.approx((6 / 11) ** 2, abs=tolerance)


def test_an_n_gram_never_runs_over_a_special_token() -> None:
    ids = [CLS, 5, SEP, 6, SEP, 7, SEP, 8, SEP]
    assert {len(found) for found in chosen(ids, 100, rate=0.12)} == {1}


def test_a_word_too_long_for_the_rate_is_passed_over() -> None:
    assert chosen([CLS, 7, 500, 501, SEP], 20) == [[]] * 20  # one token wanted, three to a word
    assert {tuple(found) for found in chosen([CLS, 7, 500, 501, 8, SEP], 20)} == {(4,)}
