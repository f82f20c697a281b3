"""Tokenised rows, their cache, their batches and their order."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import ByteLevel, TemplateProcessing
from transformers import PreTrainedTokenizerFast

from compress.data.collate import Collate, LanguageSampled, LengthGrouped, Order, QueryGrouped, TokenBudget
from compress.data.encoder import TextEncoder
from compress.data.tokenize import encode, fingerprint
from compress.errors import DataError

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "c")


def tokenizer(**options: Any) -> PreTrainedTokenizerFast:
    """A word-level tokenizer that frames as BERT does."""
    model = Tokenizer(WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]"))
    model.pre_tokenizer = Whitespace()
    model.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    settings = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=model, **(settings | {"model_input_names": names} | options))


PAIRS = Dataset.from_dict({"text": ["a b", "c"], "text_pair": ["c", "a a a"], "label": [1, 0]})


def test_encode_pairs() -> None:
    encoded = encode(PAIRS, tokenizer(), max_length=6)
    assert encoded.to_list() == [
        {
            "input_ids": [2, 4, 5, 3, 6, 3],
            "token_type_ids": [0, 0, 0, 0, 1, 1],
            "attention_mask": [1] * 6,
            "labels": 1,
            "length": 6,
            "index": 0,
        },
        {  # the longer text is cut
            "input_ids": [2, 6, 3, 4, 4, 3],
            "token_type_ids": [0, 0, 0, 1, 1, 1],
            "attention_mask": [1] * 6,
            "labels": 0,
            "length": 6,
            "index": 1,
        },
    ]


def test_encode_without_labels_or_token_types() -> None:
    plain = tokenizer(model_input_names=["input_ids", "attention_mask"])
    encoded = encode(Dataset.from_dict({"text": ["a"] * 2500}), plain, max_length=8)
    assert set(encoded.column_names) == {"input_ids", "attention_mask", "length", "index"}
    assert encoded["index"][:] == list(range(2500))


def test_padding_and_truncation_settings_are_ignored() -> None:
    stale = tokenizer()
    stale.backend_tokenizer.enable_padding(length=12)
    stale.backend_tokenizer.enable_truncation(3)
    assert fingerprint(stale) == fingerprint(tokenizer())
    assert encode(PAIRS, stale, max_length=20)["length"][:] == [6, 7]


def test_encode_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    call = TextEncoder.encode

    def counted(self: TextEncoder, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return call(self, *args, **kwargs)

    monkeypatch.setattr(TextEncoder, "encode", counted)
    first = encode(PAIRS, tokenizer(), max_length=6)
    again = encode(PAIRS, tokenizer(), max_length=6)
    assert len(calls) == 1
    assert first.to_list() == again.to_list()
    assert first.cache_files == again.cache_files
    encode(PAIRS, tokenizer(), max_length=5)
    encode(PAIRS.select([1]), tokenizer(), max_length=6)
    other = tokenizer()
    other.add_tokens(["d"])
    encode(PAIRS, other, max_length=6)
    assert len(calls) == 4


@pytest.mark.parametrize("names", [["input_ids", "attention_mask"], ["input_ids", "token_type_ids", "attention_mask"]])
def test_a_text_without_tokens_is_a_padding_token(names: list[str]) -> None:
    bare = tokenizer(model_input_names=names, pad_token="c")
    bare.backend_tokenizer.post_processor = ByteLevel()
    rows = encode(Dataset.from_dict({"text": ["", "a b"]}), bare, max_length=6).to_list()
    assert [row["input_ids"] for row in rows] == [[bare.pad_token_id], bare.convert_tokens_to_ids(["a", "b"])]
    assert all(len(row[name]) == row["length"] == len(row["input_ids"]) for row in rows for name in names)


def test_an_empty_split_is_refused() -> None:
    with pytest.raises(DataError, match="no rows"):
        encode(Dataset.from_dict({"text": []}), tokenizer(), max_length=6)


@pytest.mark.parametrize("own", ["right", "left"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_is_on_the_side_of_the_model(own: str, side: str) -> None:
    tokens = tokenizer(padding_side=own, pad_token="c")
    texts = Dataset.from_dict({"text": ["a b a", "b", ""], "text_pair": ["a", "b", "c a b"]})
    batch = Collate(tokens, left=side == "left")(encode(texts, tokens, max_length=16).to_list())
    expected = tokens(texts["text"][:], texts["text_pair"][:], padding=True, padding_side=side, return_tensors="pt")
    places = batch.pop("position_ids", None)
    assert set(batch) == {"input_ids", "attention_mask", "token_type_ids", "index"}
    if side == "left":
        assert places is not None and places.tolist() == [[*range(7)], [0, 0, *range(5)], [0, *range(6)]]
    else:
        assert places is None
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        assert torch.equal(batch[name], expected[name])
        assert batch[name].dtype == torch.int64
    assert torch.equal(batch["index"], torch.arange(3))


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([2, 0], torch.tensor([2, 0])),
        ([2.5, 0.0], torch.tensor([[2.5], [0.0]])),
        ([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]], torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])),
    ],
)
def test_collate_labels(labels: list[Any], expected: torch.Tensor) -> None:
    split = Dataset.from_dict({"text": ["a", "b"], "label": labels})
    batch = Collate(tokenizer())(encode(split, tokenizer(), max_length=4).to_list())
    assert batch["labels"].dtype == expected.dtype
    assert torch.equal(batch["labels"], expected)


@pytest.mark.parametrize(
    ("side", "labels", "langs"),
    [("right", [[-100, 5, 7], [6, -100, -100]], [[1, 1, 2], [1, 0, 0]]),
     ("left", [[-100, 5, 7], [-100, -100, 6]], [[1, 1, 2], [0, 0, 1]])],
)  # fmt: skip
def test_collate_columns(side: str, labels: list[Any], langs: list[Any]) -> None:
    rows = [
        {"input_ids": [4, 5, 6], "labels": [-100, 5, 7], "langs": [1, 1, 2], "next_sentence": 1},
        {"input_ids": [4], "labels": [6], "langs": [1], "next_sentence": 0},
    ]
    beside = {"length": 3, "document": 8, "index": 5, "score": 0.5, "name": "x", "spans": [[0, 1], [1, 2], [2, 3]]}
    batch = Collate(tokenizer(), left=side == "left")([row | beside for row in rows])
    batch.pop("position_ids", None)
    assert list(batch) == ["attention_mask", "input_ids", "labels", "langs", "next_sentence", "index"]
    assert batch["labels"].tolist() == labels
    assert batch["langs"].tolist() == langs
    assert batch["next_sentence"].tolist() == [1, 0]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_collate_labels_of_several_ints() -> None:
    rows = [{"input_ids": [4, 5, 6], "labels": [1, 2]}, {"input_ids": [4, 5], "labels": [0, 0]}]
    labels = Collate(tokenizer())(rows)["labels"]
    assert (labels.dtype, labels.tolist()) == (torch.int64, [[1, 2], [0, 0]])


def test_tokenizer_without_padding_token() -> None:
    with pytest.raises(DataError, match="no padding token"):
        Collate(tokenizer(pad_token=None))


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 1003])
def test_every_row_comes_once(rows: int) -> None:
    assert sorted(LengthGrouped(np.arange(rows) % 50, 8, seed=0)) == list(range(rows))
    assert len(LengthGrouped(np.arange(rows), 8, seed=0)) == rows


@pytest.mark.parametrize(("rows", "batches"), [(0, 0), (1, 1), (7, 1), (8, 1), (9, 2), (1003, 126)])
def test_whole_batches_repeat_rows(rows: int, batches: int) -> None:
    order = LengthGrouped(np.arange(rows) % 50, 8, seed=0, whole=True)
    times = np.bincount(list(order), minlength=rows)
    assert times.sum() == len(order) == 8 * batches
    assert rows == 0 or times.max() - times.min() <= 1
    assert rows % 8 or list(order) == list(LengthGrouped(np.arange(rows) % 50, 8, seed=0))


def test_batches_have_similar_lengths() -> None:
    lengths = np.random.default_rng(0).integers(3, 120, 4003)
    grouped = lengths[list(LengthGrouped(lengths, 16, seed=0))][:4000].reshape(-1, 16)
    assert grouped.sum() / (16 * grouped.max(axis=1).sum()) > 0.95  # the share that is not padding; shuffled: 0.54
    assert grouped[0].max() == lengths.max()
    means = grouped[1:].mean(axis=1)
    assert abs(np.corrcoef(means[1:], means[:-1])[0, 1]) < 0.2  # batches are not in the order of their lengths


LENGTHS = np.random.default_rng(0).integers(3, 120, 500)


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: LengthGrouped(LENGTHS, 8, seed=seed),
        lambda seed: TokenBudget(LENGTHS, 256, seed=seed),
        lambda seed: QueryGrouped(*queries(), 32, seed=seed),
        lambda seed: languages(seed=seed),
    ],
)
def test_order_depends_on_seed_and_epoch(make: Callable[[int], Order]) -> None:
    def order(seed: int, epoch: int) -> list[Any]:
        sampler = make(seed)
        sampler.set_epoch(epoch)
        assert len(list(sampler)) == len(sampler)
        return list(sampler)

    first, second = order(0, 0), order(0, 1)
    np.random.seed(7)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    assert (order(0, 0), order(0, 1)) == (first, second)
    assert order(1, 0) != first != second
    assert torch.equal(torch.get_rng_state(), before)


def test_lists_and_arrays_give_the_same_order() -> None:
    assert list(LengthGrouped(LENGTHS.tolist(), 8, seed=0)) == list(LengthGrouped(LENGTHS, 8, seed=0))
    lists = [column.tolist() for column in queries()]
    assert list(QueryGrouped(*lists, 32, seed=0)) == list(QueryGrouped(*queries(), 32, seed=0))


def test_token_budget() -> None:
    lengths = np.random.default_rng(0).integers(3, 120, 4003)
    batches = list(TokenBudget(lengths, 1024, seed=0))
    assert sorted(row for batch in batches for row in batch) == list(range(4003))
    sizes = np.array([len(batch) * lengths[batch].max() for batch in batches])
    assert sizes.max() <= 1024
    assert sizes.mean() > 900
    assert len({len(batch) for batch in batches}) > 20


PARTS = np.repeat([0, 1, 2, 3], [1600, 100, 300, 100])
"""Rows of two languages, then of two pairs of them."""


def languages(*, power: float = 0.7, passes: int = 1, seed: int = 0) -> LanguageSampled:
    lengths = np.random.default_rng(1).integers(3, 40, len(PARTS))
    return LanguageSampled(PARTS, (PARTS > 1).astype(int), lengths, (120, 60), power=power, passes=passes, seed=seed)


@pytest.mark.parametrize("passes", [1, 3])
def test_a_step_is_of_one_language_or_pair_and_both_take_turns(passes: int) -> None:
    order = languages(passes=passes)
    lengths = np.random.default_rng(1).integers(3, 40, len(PARTS))
    steps = np.array([[set(PARTS[batch].tolist()) for batch in order]]).reshape(-1, passes)
    assert len(order) % passes == 0
    parts = [set.union(*step) for step in steps]
    assert {len(part) for part in parts} == {1}
    assert [part <= {2, 3} for part in parts] == [step % 2 == 1 for step in range(len(parts))]
    sizes = np.array([len(batch) * lengths[batch].max() for batch in order]).reshape(-1, passes)
    assert sizes[::2].max() <= 120 and sizes[1::2].max() <= 60
    assert sizes[::2].mean() > 100 and sizes[1::2].mean() > 40


@pytest.mark.parametrize("power", [0.0, 0.7, 1.0])
def test_a_language_is_drawn_by_its_share_to_a_power(power: float) -> None:
    order, drawn = languages(power=power), np.zeros(4)
    seen = set()
    for epoch in range(30):
        order.set_epoch(epoch)
        batches = list(order)
        assert len(batches) == pytest.approx(len(TokenBudget(np.full(1700, 20), 120, seed=0)) * 1.7, rel=0.3)
        for batch in batches:
            drawn[PARTS[batch[0]]] += 1
            seen.update(batch)
    fresh = languages(power=power)
    fresh.set_epoch(29)
    assert list(fresh) == batches, "as in a process that resumes"
    for rare, frequent, ratio in ((1, 0, 16), (3, 2, 3)):
        error = 4 * (drawn[rare] + drawn[frequent]) ** 0.5 / drawn[frequent]
        assert drawn[frequent] / drawn[rare] == pytest.approx(ratio**power, rel=error + 0.1)
    assert seen == set(range(len(PARTS))), "all rows come"


def test_rows_of_a_rare_language_are_shuffled_anew_when_they_are_used_up() -> None:
    order = languages(power=0.0)
    rare = [tuple(batch) for batch in order if PARTS[batch[0]] == 1]
    assert len(rare) > 2 * 100 * 20 / 120, "more than all of them twice"
    assert len(set(rare)) > 0.7 * len(rare)


def test_token_budget_below_a_row() -> None:
    assert sorted(TokenBudget(np.array([9, 2, 2]), 4, seed=0)) in ([[0], [1, 2]], [[0], [2, 1]])
    assert list(TokenBudget(np.array([], int), 4, seed=0)) == []


def queries(count: int = 300, *, most: int = 12) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The query, the length and the relevance of rows, those of a query scattered."""
    rng = np.random.default_rng(0)
    query = rng.permutation(np.repeat(np.arange(count), rng.integers(1, most + 1, count)))
    return query, rng.integers(3, 120, len(query)), (rng.random(len(query)) < 0.3).astype(float)


def test_query_grouped() -> None:
    query, lengths, relevance = queries()
    batches = list(QueryGrouped(query, lengths, relevance, 32, seed=3))
    assert sorted(row for batch in batches for row in batch) == list(range(len(query)))
    assert max(map(len, batches)) <= 32
    assert np.mean([len(batch) for batch in batches]) > 24
    homes = [{n for n, batch in enumerate(batches) if each in set(query[batch])} for each in range(300)]
    assert {len(home) for home in homes} == {1}
    assert lengths[batches[0]].max() == lengths.max()


def test_query_grouped_samples_large_queries() -> None:
    query, relevance = np.zeros(50, int), np.array([1.0] * 2 + [0.0] * 48)
    order = QueryGrouped(query, np.full(50, 9), relevance, 8, seed=0)
    drawn = []
    for epoch in range(3):
        order.set_epoch(epoch)
        (batch,) = list(order)
        assert len(set(batch)) == 8
        assert {0, 1} < set(batch)
        drawn.append(batch)
    assert drawn[0] != drawn[1] != drawn[2]
    (batch,) = list(QueryGrouped(query, np.full(50, 9), 1 - relevance, 8, seed=0))
    assert len({0, 1} & set(batch)) == 2
    assert len(batch) == 8
