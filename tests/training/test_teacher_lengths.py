"""A teacher reads as many tokens of a text as its encoder and its tokenizer allow, however few or many they are."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compress.data import TaskData, load_task
from compress.models import teacher as teachers
from compress.models.sentence_encoder import AutoModelForSentenceEmbedding
from compress.models.sentence_settings import SentenceSettings, set_settings
from compress.training.reranker import load_reranker, score_passages
from compress.training.teacher_vectors import with_similarities, with_teacher
from tests import tiny

WORDS = ("good", "bad", "film", "plot", "story", "never", "very", "slow", "sad", "fun")


def texts(count: int, words: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=words)) for _ in range(count)]


def save(folder: Path, model: Any, *, tokens: int) -> str:
    model.save_pretrained(folder)
    tokenizer = tiny.tokenizer()
    tokenizer.model_max_length = tokens
    tokenizer.save_pretrained(folder)
    return str(folder)


def unlabelled(folder: Path) -> TaskData:
    folder.mkdir()
    for split, seed in (("train", 1), ("validation", 2)):
        (folder / f"{split}.txt").write_text("\n".join(texts(12, 300, seed)), encoding="utf-8")
    return load_task(str(folder), kind="embedding")


@pytest.mark.parametrize(
    ("known", "own", "tokens", "read"),
    [(20, None, 10**9, 20), (400, None, 10**9, 302), (400, 30, 10**9, 30), (400, None, 40, 40), (16, 100, 50, 16)],
)
def test_similarities_are_those_of_what_the_encoder_reads(
    known: int, own: int | None, tokens: int, read: int, tmp_path: Path
) -> None:
    """known: positions of the encoder; own: the length that its folder sets; tokens: that of its tokenizer."""
    config = tiny.config("bert", max_position_embeddings=known)
    set_settings(config, SentenceSettings.pooled(config.hidden_size, normalise=True, max_length=own))
    torch.manual_seed(0)
    model = AutoModelForSentenceEmbedding.from_config(config).eval()
    data = unlabelled(tmp_path / "data")
    teacher = teachers.load("t", Path(save(tmp_path / "teacher", model, tokens=tokens)), data.task)
    split = with_similarities(with_teacher(data, teacher.model.config), teacher, 512).validation
    rows = tiny.tokenizer()(split["text"][:], truncation=True, max_length=read, return_tensors="pt", padding=True)
    with torch.no_grad():
        vectors = teacher.model(**rows).sentence_embedding.numpy()
    for row, (others, found) in enumerate(zip(split["related"][:], split["relevance"][:], strict=True)):
        np.testing.assert_allclose(found, vectors[others] @ vectors[row], atol=1e-4)


@pytest.mark.parametrize(("known", "tokens"), [(24, 10**9), (600, 32)])
def test_a_cross_encoder_of_few_positions_scores_long_passages(known: int, tokens: int, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for split, seed in (("train", 1), ("dev", 2)):
        lines = [f"{query}\t{positive}" for query, positive in zip(texts(6, 4, seed), texts(6, 90, seed), strict=True)]
        (folder / f"{split}.tsv").write_text("\n".join(["query\tpositive", *lines]), encoding="utf-8")
    data = load_task(str(folder), kind="embedding")
    model = tiny.bert(1, max_position_embeddings=known)
    reranker = load_reranker(Path(save(tmp_path / "reranker", model, tokens=tokens)))
    scored = score_passages(data, reranker).train
    query = next(row for row, others in enumerate(scored["related"][:]) if others)
    pairs = [(scored[query]["text"], scored[other]["text"]) for other in scored[query]["related"]]
    rows = reranker.tokenizer(
        *map(list, zip(*pairs, strict=True)),
        truncation=True,
        max_length=min(known, tokens),
        return_tensors="pt",
        padding=True,
    )
    with torch.no_grad():
        expected = model(**rows).logits[:, 0].numpy()
    np.testing.assert_allclose(scored[query]["scores"], expected, atol=1e-4)
