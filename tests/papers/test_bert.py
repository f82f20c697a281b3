"""Devlin et al. 2019: masking and pairs of segments."""

from collections import Counter

import numpy as np
import pytest
import torch

from compress.config.recipe import Recipe
from compress.data.constants import IGNORE_INDEX
from compress.data.corpus import Document
from compress.errors import DataError
from compress.papers.bert import mask, segment_pairs, shorten, with_others
from tests.papers import rows
from tests.papers.rows import CLS, FIRST, SEP, SIZE, document, frame, owner, rng, segments, words


def long_row(tokens: int) -> list[int]:
    return [CLS, *[FIRST + n % (SIZE - FIRST) for n in range(tokens - 2)], SEP]


# mask


def test_fifteen_percent_of_each_rows_tokens_are_predicted_and_at_least_one() -> None:
    batch = rows.batch(long_row(200), long_row(100), long_row(10), long_row(4), [CLS, SEP])
    masked = mask(batch, words())
    assert (masked["labels"] != IGNORE_INDEX).sum(-1).tolist() == [30, 15, 2, 1, 0]  # round(1.5) is 2
    few = mask(batch, words(), rate=0.5, max_predictions=20)
    assert (few["labels"] != IGNORE_INDEX).sum(-1).tolist() == [20, 20, 5, 2, 0]


@pytest.mark.parametrize("name", ["albert", "ib-bert", "mobilebert", "mobilebert-tiny"])
def test_recipes_predict_as_many_of_512_tokens_as_their_authors_do(name: str) -> None:
    """20 by `max_predictions_per_seq` of the authors' commands, where 15 % would be 77."""
    found = [
        (stage.corrupt(rows.batch(long_row(stage.max_length)), words())["labels"] != IGNORE_INDEX).sum().item()
        for stage in Recipe.load(name).training
        if stage.corrupt is not None
    ]
    assert found == [20] * (3 if name.startswith("mobilebert") else 1)


def test_both_stages_of_the_recipe_are_one_decay_of_the_rate() -> None:
    """It falls from the end of the warm-up over both, without a jump between them."""
    short, long, _ = Recipe.load("bert").training
    assert short.steps and long.steps and short.lr != "auto"
    assert short.steps + long.steps == 1_000_000
    assert (short.lr_end, long.lr_end, long.warmup) == (long.lr, 0, 0)
    slopes = (short.lr - short.lr_end) / (short.steps * (1 - short.warmup)), short.lr_end / long.steps
    assert slopes[0] == pytest.approx(slopes[1], rel=0.02)


def test_each_position_is_as_likely() -> None:
    torch.manual_seed(0)
    batch = rows.batch(*[long_row(20)] * 4000)
    times_L = (mask(batch, words())["labels"] != IGNORE_INDEX).float().mean(0)
    assert times_L[1:-1].sub(3 / 18).abs().max() < 4 * (3 / 18 * 15 / 18 / 4000) ** 0.5


# segment_pairs

THREE = [document(0, 4, 4, 4, 4), document(1, 3, 3), document(2, 5)]


def pairs(documents: list[Document], seed: int = 0, **options: object) -> list[dict[str, list[int]]]:
    settings = {"max_length": 19, "short": 0.0} | options
    return list(segment_pairs(documents, frame(), rng=rng(seed), **settings))  # type: ignore[arg-type]


def test_three_documents_by_hand() -> None:
    """Document 0 has 16 tokens, the room of a row: a chunk of it is four sentences. What is left over begins again."""

    class Draws:
        """long target; cut after sentence 2; B follows | long; cut after 1, random, document 2 at 0; then the rest
        alone, random, document 2 | long; alone, random, document 0 from its second sentence on."""

        def __init__(self) -> None:
            self.random_draws = iter([0.9, 0.9, 0.9, 0.1, 0.9])
            self.integer_draws = iter([((1, 4), 2), ((1, 2), 1), ((2,), 1), ((1,), 0), ((2,), 1), ((1,), 0),
                                       ((2,), 0), ((4,), 1)])  # fmt: skip

        def random(self, size: int | None = None) -> object:
            return next(self.random_draws) if size is None else np.full(size, 0.9)  # from the front

        def integers(self, *bounds: int) -> int:
            expected, value = next(self.integer_draws)
            assert bounds == expected
            return value

    draws = Draws()
    found = list(segment_pairs(THREE, frame(), max_length=19, rng=draws, short=0.0))  # type: ignore[arg-type]
    first, alone, rest, last = found
    assert segments(first) == ([*range(100, 108)], [*range(108, 116)])
    assert segments(alone) == ([200, 201, 202], [*range(300, 305)])
    assert segments(rest) == ([203, 204, 205], [*range(300, 305)])
    assert segments(last) == ([*range(300, 305)], [*range(105, 116)])  # 12 tokens were one too many
    assert [row["next_sentence"] for row in found] == [0, 1, 1, 1]
    assert [row["document"] for row in found] == [0, 1, 1, 2]


@pytest.mark.parametrize("seed", range(20))
def test_what_always_holds(seed: int) -> None:
    documents = [document(n, *lengths) for n, lengths in enumerate([(4, 9, 2), (1,), (30, 6), (3, 3, 3, 3, 3, 3)])]
    for row in pairs(documents, seed, max_length=15, short=0.3):
        first, second = segments(row)
        assert first and second and len(row["input_ids"]) <= 15
        assert owner(first[0]) == row["document"]
        assert rows.consecutive(first) and rows.consecutive(second)
        if row["next_sentence"]:
            assert owner(second[0]) != owner(first[0])
        else:
            assert owner(second[0]) == owner(first[0])
            assert first[-1] < second[0]


def test_uncut_segments_cover_every_token() -> None:
    documents = [document(n, 2, 3, 1, 4, 2, 3) for n in range(5)]
    seen: set[int] = set()
    for row in pairs(documents, max_length=60):
        first, second = segments(row)
        seen |= set(first) | (set() if row["next_sentence"] else set(second))
    assert seen == {token for each in documents for sentence in each.sentences for token in sentence}


def test_half_of_the_longer_chunks_and_all_single_sentences_get_a_random_next() -> None:
    many = [document(n % 8, *[2] * 10) for n in range(2000)]
    labels = [row["next_sentence"] for row in pairs(many, max_length=11)]
    # a chunk of four sentences follows half of the time; alone, at the end of a document, a sentence never does
    assert 0.5 < sum(labels) / len(labels) < 0.62
    assert all(row["next_sentence"] for row in pairs([document(n, 5) for n in range(8)]))


def test_a_share_of_the_documents_is_cut_short() -> None:
    many = [document(n % 8, *[1] * 90) for n in range(3000)]
    other = document(9, *[1] * 90)
    first = [pairs([each, other], seed, max_length=63, short=0.1)[0] for seed, each in enumerate(many)]
    lengths = [len(row["input_ids"]) for row in first if not row["next_sentence"]]
    share = sum(length < 63 for length in lengths) / len(lengths)
    assert share == pytest.approx(0.1 * 58 / 59, abs=4 * (0.09 / len(lengths)) ** 0.5)
    assert len({length for length in lengths if length < 63}) > 40


def test_the_same_seed_gives_the_same_rows() -> None:
    assert pairs(THREE, 3) == pairs(THREE, 3) != pairs(THREE, 4)


@pytest.mark.parametrize("seed", range(5))
def test_the_longer_loses_its_ends_until_both_fit(seed: int) -> None:
    first, second = list(range(20)), list(range(100, 106))
    a, b = shorten(first, second, 14, rng(seed))
    assert b == second and len(a) == 8 and a == list(range(a[0], a[0] + 8))
    a, b = shorten(first, second, 7, rng(seed))
    assert (len(a), len(b)) == (4, 3)  # of two as long, the second gives
    assert shorten(first, second, 26, rng(seed)) == (first, second)


def test_a_random_document_is_any_other_of_the_latest_and_never_itself() -> None:
    stream = [document(n % 8, 1) for n in range(8)]
    drawn = {n: Counter[int]() for n in range(8)}
    for seed in range(600):
        for each, another in with_others(stream, 4, rng(seed)):
            drawn[each.number][another().number] += 1
    latest = {0: {1, 2, 3}, 1: {0, 2, 3}, 2: {0, 1, 3}, 3: {0, 1, 2}}
    latest |= {n: {n - 1, n - 2, n - 3} for n in range(4, 8)}
    assert {n: set(found) for n, found in drawn.items()} == latest
    assert all(abs(count - 200) < 4 * (600 * 2 / 9) ** 0.5 for found in drawn.values() for count in found.values())


def test_documents_stream_and_no_more_than_the_nearest_are_held() -> None:
    stream = rows.Watched(10_000, 3, 3)
    found = segment_pairs(stream, frame(), max_length=16, rng=rng(), near=20)
    for _ in range(100):
        next(found)
    assert stream.read < 130


def test_a_single_document_and_too_short_rows_are_refused() -> None:
    with pytest.raises(DataError, match="one document, so no random segment"):
        pairs([THREE[0]])
    with pytest.raises(DataError, match="max_length 4: a pair needs 3 special tokens and room for two"):
        pairs(THREE, max_length=4)
    assert pairs([]) == []
