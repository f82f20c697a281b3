"""Give a task of vectors what only its teacher knows: their width, and how near texts are that nobody compared."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa
from datasets import Dataset

from compress.data import cache
from compress.data.collate import Collate
from compress.data.embedding import SCHEMA
from compress.data.task import TaskData
from compress.data.tokenize import encode
from compress.evaluation import metrics
from compress.evaluation.embedding import unit
from compress.models.pooling import width_of
from compress.models.teacher import Teacher

ENCODING = "1"
"""Part of every cache key: raise it when texts are compared otherwise."""
NEAREST, OTHERS = 5, 5
"""Texts that each text is compared with: those nearest to it by the teacher, and others at random."""
MAX_LENGTH = 128
"""Tokens that the teacher reads of a text that it compares."""


def with_teacher(data: TaskData, teacher: Teacher, *, bf16: bool = False) -> TaskData:
    """Return the data with the teacher's width; texts of a validation or test split that nobody compared are compared
    by the teacher, with the nearest and with some at random, which is noted."""
    judged = {
        role: _compare_texts(split, teacher, bf16=bf16)
        for role, split in (("validation", data.validation), ("test", data.test))
        if split is not None and not any(map(len, split["related"][:]))
    }
    note = (f"{' and '.join(judged)}: texts alone, scored by how well they agree with the teacher's similarities",)
    task = replace(data.task, width=width_of(teacher.model.config))
    return replace(data, task=task, notes=data.notes + note * bool(judged), **judged)


def _compare_texts(split: Dataset, teacher: Teacher, *, bf16: bool) -> Dataset:
    def batches() -> Iterator[pa.RecordBatch]:
        rows = encode(split, teacher.tokenizer, MAX_LENGTH)
        vectors = unit(metrics.logits(teacher.model, rows, Collate(teacher.tokenizer), bf16=bf16))
        cosines, rng = vectors @ vectors.T, np.random.default_rng(0)
        np.fill_diagonal(cosines, -np.inf)
        for row, text in enumerate(split["text"][:]):
            some = rng.choice(len(split), min(OTHERS, len(split)), replace=False)
            others = sorted({*np.argsort(-cosines[row])[:NEAREST].tolist(), *some.tolist()} - {row})
            values = [text], [others], [cosines[row, others].tolist()], [False]
            yield pa.record_batch(
                [pa.array(value, kind.type) for value, kind in zip(values, SCHEMA, strict=True)], schema=SCHEMA
            )

    key = cache.digest("compared", ENCODING, split._fingerprint, teacher.digest, str(bf16))
    return cache.rows("unlabelled", key, batches, empty="the split has no texts.")
