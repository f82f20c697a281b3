"""Conneau & Lample 2019: translation language modelling."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from datasets import Dataset

from compress.config.recipe import Recipe
from compress.data.constants import IGNORE_INDEX
from compress.data.corpus import Corpus, Document, build_rows
from compress.errors import DataError
from compress.papers import roberta, xlm
from compress.training.stage import batches, shares
from tests import tiny
from tests.papers.rows import CLS, FIRST, SEP, batch, document, frame, rng, words

PAIRS = [document(0, 2, 3, parallel=True), document(1, 9, 9, parallel=True), document(2, 1, 1, parallel=True)]
PLAIN = [document(0, 2, 3), document(1, 4)]


def made(builder: Any, documents: list[Document], **options: Any) -> list[dict[str, Any]]:
    return list(builder(documents, frame(), max_length=12, rng=rng(), **options))


def test_a_sentence_and_its_translation_each_with_its_positions_and_language() -> None:
    first, last = made(xlm.translation_pairs, PAIRS)  # that between is too long
    assert first == {
        "input_ids": [CLS, 100, 101, SEP, 102, 103, 104, SEP],
        "position_ids": [0, 1, 2, 3, 0, 1, 2, 3],
        "langs": [0, 0, 0, 0, 1, 1, 1, 1],
    }
    assert last["position_ids"] == [0, 1, 2, 0, 1]
    other, _ = made(xlm.translation_pairs, PAIRS, languages=(4, 2))
    assert other["langs"] == [4, 4, 4, 4, 2, 2, 2, 2]
    known, _ = made(xlm.translation_pairs, [replace(each, languages=(3, 1)) for each in PAIRS])
    assert known["langs"] == [3, 3, 3, 3, 1, 1, 1, 1]


def test_streams_take_each_kind_of_text_as_the_paper_does() -> None:
    assert made(xlm.streams, PAIRS) == made(xlm.translation_pairs, PAIRS)
    assert made(xlm.streams, PLAIN) == made(roberta.full_sentences, PLAIN)
    assert made(xlm.streams, []) == []
    known = made(xlm.streams, [replace(each, languages=(3,)) for each in PLAIN])
    assert [row["input_ids"] for row in known] == [row["input_ids"] for row in made(roberta.full_sentences, PLAIN)]
    assert [row["langs"] for row in known] == [[3] * len(row["input_ids"]) for row in known]
    assert [row["position_ids"] for row in known] == [list(range(len(row["input_ids"]))) for row in known]
    assert known[0].keys() == made(xlm.streams, PAIRS)[0].keys(), "both are rows of one stage"


def test_text_that_is_not_parallel_is_refused() -> None:
    with pytest.raises(DataError, match=r"needs parallel text: a \.tsv"):
        made(xlm.translation_pairs, PLAIN)


def test_a_corpus_of_pairs_becomes_rows_that_xlm_reads() -> None:
    texts = ["the film was good\nthis movie is great", "a dull plot. so sad\na poor story. very bad"]
    corpus = Corpus("pairs", "pairs", lambda: iter(texts), parallel=True)
    tokenizer = tiny.tokenizer()
    rows = build_rows(corpus, tokenizer, xlm.translation_pairs, "xlm.translation_pairs", {}, max_length=32, seed=0)
    assert [tokenizer.decode(row) for row in rows["input_ids"]] == [
        "[CLS] the film was good [SEP] this movie is great [SEP]",
        "[CLS] a dull plot. so sad [SEP] a poor story. very bad [SEP]",
    ]
    assert rows["langs"][0] == [0] * 6 + [1] * 5
    with pytest.raises(DataError, match="needs parallel text"):
        plain = Corpus("plain", "plain", lambda: iter(texts))
        build_rows(plain, tokenizer, xlm.translation_pairs, "xlm.translation_pairs", {}, max_length=32, seed=0)


def test_language_and_position_change_what_xlm_computes() -> None:
    from transformers import XLMConfig, XLMModel

    torch.manual_seed(0)
    shape = {"emb_dim": 16, "n_layers": 1, "n_heads": 2, "vocab_size": 500, "n_langs": 2, "pad_index": 0}
    model = XLMModel(XLMConfig(**shape, embed_init_std=0.5)).eval()
    (row, _) = made(xlm.translation_pairs, PAIRS)
    inputs = {name: torch.tensor([row[name]]) for name in ("input_ids", "position_ids", "langs")}
    whole = model(**inputs)[0]
    for name in ("position_ids", "langs"):
        changed = model(**{key: value for key, value in inputs.items() if key != name})[0]
        assert not torch.allclose(whole, changed, atol=1e-3)


def test_the_recipe_takes_pairs_by_tokens_and_predicts_frequent_tokens_less_often() -> None:
    """4,000 tokens of pairs, 64 rows of plain text (Sec. 5.1); weights 1 / sqrt(frequency) (Sec. 3.3)."""
    pairs = Recipe.load("xlm").training[0]
    columns = {"part": [0, 1, 2] * 400, "paired": [0, 0, 1] * 400, "length": [256, 256, 40] * 400}
    sizes = [len(batch) for batch in batches(pairs, Dataset.from_dict(columns), seed=0)]
    assert set(sizes[::2]) <= {64, 400 % 64}, "rows of 256 tokens"
    assert set(sizes[1::2]) == {100}, "pairs of 40 tokens"
    (alone,) = {len(batch) for batch in batches(pairs, Dataset.from_dict({"length": [40] * 400}), seed=0)}
    assert alone == 100, "one file of pairs"
    assert shares(pairs, processes=1) == (64, 1), "the most that a pass holds"
    assert (pairs.schedule, pairs.language_sampling) == ("inverse_sqrt", 0.7)
    often, seldom = FIRST, FIRST + 1
    counts = torch.ones(1000, dtype=torch.long)
    counts[often] = 100
    torch.manual_seed(0)
    given = batch(*[[CLS, *[often, seldom] * 50, SEP]] * 100)
    assert pairs.corrupt is not None
    labels = pairs.corrupt(given, words(counts=counts))["labels"]
    assert (labels != IGNORE_INDEX).sum() == round(0.15 * 100 * 102)
    drawn = (labels == often).sum() / (labels == seldom).sum()
    assert 0.08 < drawn < 0.13, "about a tenth: without replacement, seldom ones become fewer"
