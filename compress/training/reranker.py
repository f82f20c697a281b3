"""Score the passages of queries with a cross-encoder, so that vectors can learn from
its scores."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from accelerate import PartialState
from datasets import Dataset

from compress import families
from compress.data import cache
from compress.data.collate import Collate
from compress.data.embedding import GROUP_SCHEMA
from compress.data.encoder import TokenizerSettings
from compress.data.ranking import NEGATIVES
from compress.data.retrieval import WordIndex
from compress.data.task import Task, TaskData
from compress.data.tokenize import encode
from compress.errors import TeacherError
from compress.evaluation import metrics
from compress.models.padding import pads_left
from compress.models.teacher import Teacher, load
from compress.slicing.shape import positions

SCORES_ENCODING = "2"
"""Part of every cache key: raise it when passages are chosen or scored differently."""
RERANKER_LENGTH = 512
"""The most tokens of a query and a passage that are read."""


def load_reranker(folder: Path, *, allow_pickle: bool = False) -> Teacher:
    """Load a cross-encoder. Raises TeacherError."""
    task = Task("ranking", ("query", "passage"), "relevance", (), "ndcg@10")
    return load(str(folder), folder, task, allow_pickle=allow_pickle)


def score_passages(
    data: TaskData, reranker: Teacher, *, bf16: bool = False
) -> TaskData:
    """Return the data with a cross-encoder's score of every passage that a training
    query is judged with.

    A query without an irrelevant passage gets the passages that BM25 ranks highest, as
    `data.ranking` does for rerankers.

    bf16  compute in bfloat16, unless the family of the cross-encoder cannot

    Raises TeacherError for data without queries, or data that already have scores.
    """
    split = data.train
    if not any(split["passage"][:]):
        raise TeacherError(
            f"teacher {reranker.name}: is a cross-encoder, which scores passages of "
            f"queries, but {data.name} has no queries; expected a table with the "
            "columns query and positive, or query, passage and relevance"
        )
    if any(map(len, split["scores"][:])):
        raise TeacherError(
            f"teacher {reranker.name}: is a cross-encoder, but {data.name} already has "
            "a teacher's scores: remove their column, or use a sentence encoder as "
            "the teacher"
        )

    bf16 = bf16 and not families.find(reranker.model.config.model_type).float32_only

    def batches() -> Iterator[pa.RecordBatch]:
        texts, related, relevance = _with_negatives(split)
        queries = [query for query, others in enumerate(related) for _ in others]
        pairs = {
            "text": [texts[query] for query in queries],
            "text_pair": [texts[other] for others in related for other in others],
        }
        own = TokenizerSettings.from_tokenizer(reranker.tokenizer).model_max_length
        longest = min(filter(None, (own, positions(reranker.model), RERANKER_LENGTH)))
        rows = encode(Dataset.from_dict(pairs), reranker.tokenizer, longest)
        model: Any = reranker.model
        collate = Collate(reranker.tokenizer, left=pads_left(model))
        scores = metrics.logits(
            model.to(PartialState().device), rows, collate, bf16=bf16
        )[:, 0]
        cuts = np.cumsum([len(others) for others in related])[:-1]
        columns = {
            "text": texts,
            "related": related,
            "relevance": relevance,
            "scores": [part.tolist() for part in np.split(scores, cuts)],
            "passage": split["passage"][:],
        }
        yield pa.RecordBatch.from_pydict(columns, schema=GROUP_SCHEMA)

    key = cache.digest(
        "reranked", SCORES_ENCODING, split._fingerprint, reranker.digest, str(bf16)
    )
    return replace(
        data,
        train=cache.rows(
            "reranked", key, batches, empty="the training split has no texts."
        ),
    )


def _with_negatives(
    split: Dataset,
) -> tuple[list[str], list[list[int]], list[list[float]]]:
    """Return the texts of a split, and for each text the texts that it is judged with
    and their relevance."""
    texts = split["text"][:]
    related = split["related"][:]
    relevance = split["relevance"][:]
    lacking = [
        row for row, judged in enumerate(relevance) if judged and min(judged) > 0
    ]
    if lacking:
        passages = np.flatnonzero(split["passage"][:])
        most = max(len(related[row]) for row in lacking)
        index = WordIndex.from_texts([texts[row] for row in passages])
        found, _ = index.search([texts[row] for row in lacking], NEGATIVES + most)
        for row, places in zip(lacking, passages[found].tolist(), strict=True):
            others = [
                other
                for other in places
                if other not in related[row] and texts[other] != texts[row]
            ][:NEGATIVES]
            related[row] = [*related[row], *others]
            relevance[row] = [*relevance[row], *[0.0] * len(others)]
    return texts, related, relevance
