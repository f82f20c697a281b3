"""Liu et al. 2019: the four formats, and masks that are fixed for good."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from compress.data.constants import IGNORE_INDEX
from compress.data.corpus import Document
from compress.data.masking import Frame
from compress.data.templates import Template
from compress.errors import DataError
from compress.papers import bert, roberta
from tests.papers import rows
from tests.papers.rows import CLS, MASK, SEP, document, frame, owner, rng, segments, words

THREE = [document(0, 4, 3, 5), document(1, 2), document(2, 9, 3)]


def made(builder: Callable[..., Any], seed: int = 0, documents: list[Document] = THREE, **options: Any) -> Any:
    return list(builder(documents, frame(), rng=rng(seed), **({"max_length": 12} | options)))


def texts(found: list[dict[str, Any]]) -> list[list[int]]:
    assert all(row["input_ids"][0] == CLS and row["input_ids"][-1] == SEP for row in found)
    assert all(row["token_type_ids"] == [0] * len(row["input_ids"]) for row in found)
    return [row["input_ids"][1:-1] for row in found]


def span(start: int, stop: int) -> list[int]:
    return list(range(start, stop))


def test_segment_pairs_are_berts() -> None:
    assert roberta.segment_pairs is bert.segment_pairs


def test_full_sentences_fill_rows_across_documents_with_a_separator() -> None:
    found = made(roberta.full_sentences)
    assert texts(found) == [
        span(100, 107),  # 5 more were too many
        [*span(107, 112), SEP, 200, 201],
        span(300, 309),
        span(309, 312),
    ]
    assert all(row.keys() == {"input_ids", "token_type_ids"} for row in found)


def test_a_sentence_longer_than_a_row_is_cut_and_nothing_is_lost() -> None:
    documents = [document(0, 25, 2), document(1, 7)]
    assert texts(made(roberta.full_sentences, documents=documents)) == [
        span(100, 110),
        span(110, 120),
        span(120, 127),
        span(200, 207),
    ]


def test_no_separator_begins_or_ends_a_row() -> None:
    documents = [document(n, *lengths) for n, lengths in enumerate([(5, 5), (4,), (5,), (1, 9), (10,), (2, 2)])]
    found = texts(made(roberta.full_sentences, documents=documents))
    assert found == [
        span(100, 110), [*span(200, 204), SEP, *span(300, 305)], span(400, 410), span(500, 510), span(600, 604),
    ]  # fmt: skip


def test_doc_sentences_never_cross() -> None:
    found = made(roberta.doc_sentences)
    assert texts(found) == [span(100, 107), span(107, 112), [200, 201], span(300, 309), span(309, 312)]
    assert [row["document"] for row in found] == [0, 0, 1, 2, 2]


@pytest.mark.parametrize("seed", range(20))
def test_sentence_pairs_of_three_documents(seed: int) -> None:
    found = made(roberta.sentence_pairs, seed, max_length=40)
    whole = [sentence for each in THREE for sentence in each.sentences]
    firsts = []
    for row in found:
        first, second = segments(row)
        assert first in whole and second in whole
        assert owner(first[0]) == row["document"]
        if row["next_sentence"]:
            assert owner(second[0]) != owner(first[0])
        else:
            assert second[0] == first[-1] + 1
        firsts += [first] if row["next_sentence"] else [first, second]
    assert firsts == whole  # each once, in order, but as a random partner


def test_half_of_the_sentences_that_have_a_next_get_a_random_one() -> None:
    labels = [
        row["next_sentence"]
        for row in made(roberta.sentence_pairs, documents=[document(n % 8, *[1] * 90) for n in range(60)])
    ]
    assert sum(labels) / len(labels) == pytest.approx(0.5, abs=0.01 + 4 * (0.25 / len(labels)) ** 0.5)


def test_pairs_too_long_are_cut_at_their_ends() -> None:
    for row in made(roberta.sentence_pairs, max_length=9):
        first, second = segments(row)
        assert len(row["input_ids"]) <= 9
        assert rows.consecutive(first) and rows.consecutive(second)


@pytest.mark.parametrize("builder", [roberta.full_sentences, roberta.doc_sentences, roberta.sentence_pairs])
def test_documents_stream(builder: Callable[..., Any]) -> None:
    stream = rows.Watched(10_000, 3, 3)
    options = {"near": 10} if builder is roberta.sentence_pairs else {}
    found = builder(stream, frame(), max_length=16, rng=rng(), **options)
    for _ in range(50):
        next(found)
    assert stream.read < 120


def test_unsuitable_corpora_and_tokenizers_are_refused() -> None:
    with pytest.raises(DataError, match="max_length 2: a row needs 2 special tokens"):
        made(roberta.doc_sentences, max_length=2)
    with pytest.raises(DataError, match="max_length 4: a pair needs 3"):
        made(roberta.sentence_pairs, max_length=4)
    with pytest.raises(DataError, match="one document"):
        made(roberta.sentence_pairs, documents=THREE[:1])
    bare = Frame(Template(([], []), None, None), Template(([], [], []), None, None), None, words())
    with pytest.raises(DataError, match="without a special token"):
        list(roberta.full_sentences(THREE, bare, max_length=8, rng=rng()))
    assert [row["input_ids"] for row in roberta.doc_sentences(THREE[1:2], bare, max_length=8, rng=rng())] == [
        [200, 201]
    ]


# Static masks


def test_each_row_comes_ten_times_with_masks_of_its_own() -> None:
    plain = made(roberta.full_sentences)
    found = made(roberta.static_mask)
    assert len(found) == 10 * len(plain)
    for number, row in enumerate(found):
        ids = plain[number // 10]["input_ids"]
        restored = [
            token if label == IGNORE_INDEX else label
            for token, label in zip(row["input_ids"], row["labels"], strict=True)
        ]
        assert restored == ids
        assert sum(label != IGNORE_INDEX for label in row["labels"]) == max(1, round(0.15 * len(ids)))
        assert all(label not in (CLS, SEP) for label in row["labels"])
    assert len({str(row["labels"]) for row in found[10:20]}) > 3


def test_fixed_masks_follow_the_rows_own_draws_and_leave_the_trainings_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = made(roberta.static_mask)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    assert made(roberta.static_mask) == first != made(roberta.static_mask, seed=1)
    masked = [token for row in first for token in row["input_ids"]].count(MASK)
    labelled = sum(label != IGNORE_INDEX for row in first for label in row["labels"])
    assert 0.5 < masked / labelled < 1


def test_fixed_masks_of_another_format_keep_its_columns() -> None:
    plain = made(roberta.sentence_pairs)
    found = made(roberta.static_mask, rows="sentence_pairs", copies=2)
    assert len(found) % 2 == 0
    assert found[0].keys() == plain[0].keys() | {"labels"}
