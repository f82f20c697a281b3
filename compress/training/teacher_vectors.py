"""Complete a task of sentence vectors with its teacher's width and its similarities of
unlabelled texts.

Shapes: N texts, D width of the encoder, E width of the vectors.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset
from numpy.typing import NDArray

from compress.arrays import Array, Floats, spaced
from compress.data import cache
from compress.data.collate import Collate
from compress.data.embedding import GROUP_SCHEMA
from compress.data.task import TaskData
from compress.data.text_preparation import (
    AS_IT_IS,
    DOCUMENT_PROMPT,
    QUERY,
    TextPreparation,
)
from compress.data.tokenize import encode
from compress.errors import TeacherError
from compress.evaluation import metrics
from compress.evaluation.embedding import unit
from compress.models.folder import MODULE_SETTINGS
from compress.models.sentence_encoder import (
    SentenceEncoder,
    keep_pooling,
    set_projection,
)
from compress.models.sentence_settings import settings_of, width_of
from compress.models.teacher import Teacher
from compress.slicing.shape import positions
from compress.training.processes import from_first

VECTORS_ENCODING = "4"
"""Part of every cache key: raise it when texts are compared differently."""
NEAREST = 5
RANDOM_OTHERS = 5
"""Texts that each text is compared with: the nearest according to the teacher, and
random ones."""
VECTORS_LENGTH = 512
"""The most tokens of a text whose vector is compared here, unless encoder or tokenizer
read fewer."""
FITTED = 4096
"""Texts on which the initial linear map into the space of a source's vectors is
fitted."""
RIDGE = 1e-3
"""The ridge penalty on that linear map, relative to the mean square of its inputs."""


class VectorSource(Protocol):
    """A source of vectors for texts other than a checkpoint, such as an endpoint.
    digest: of everything that the vectors depend on."""

    @property
    def name(self) -> str: ...
    @property
    def digest(self) -> str: ...
    def vectors(self, texts: Sequence[str]) -> NDArray[np.float16]:
        """Return vectors (N, E) for N texts. Raises TeacherError for texts without
        one."""
        ...


def with_teacher(data: TaskData, config: Any) -> TaskData:
    """Return data for sentence vectors with the width and prompts in the config of the
    teacher, or of what is made of it, and notes on prompts that will not be used and on
    another similarity than the cosine; other data unchanged."""
    if not data.task.vectors:
        return data
    settings = settings_of(config)
    preparation = settings.preparation
    task = replace(data.task, width=width_of(config), preparation=preparation)
    notes = list(data.notes)
    if preparation.unused:
        notes.append(
            "prompts of the teacher that no text is given: "
            f"{', '.join(preparation.unused)}; sentence-transformers uses "
            f"{QUERY} and {DOCUMENT_PROMPT} by themselves: rename them in "
            f"{MODULE_SETTINGS} to train with them"
        )
    if not settings.ranks_by_cosine:
        notes.append(
            f"similarity_fn_name of the teacher is {settings.similarity}; scores here "
            "compare vectors by their cosine"
        )
    return replace(data, task=task, notes=tuple(notes))


def with_similarities(data: TaskData, teacher: Teacher, max_length: int) -> TaskData:
    """Add the teacher's similarities to validation and test splits without gold ones,
    between each text, its nearest and some random texts, and add a note.

    max_length   the tokens of a text that are read in scoring, so that the teacher
                 agrees with itself

    Other data are unchanged. The data have the teacher's prompts: see `with_teacher`.
    Texts get the prompt for texts compared in pairs, as in scoring.
    """
    if not data.task.vectors:
        return data
    same = data.task.preparation.for_pairs()
    key = cache.digest(teacher.digest, str(max_length), *same.in_turn)
    return _with_similarities(
        data, key, lambda split: _encode_texts(teacher, split, max_length, same)
    )


def with_vectors(
    data: TaskData, source: VectorSource, start: Teacher
) -> tuple[TaskData, Teacher]:
    """Complete the data as `with_teacher` does, from the vectors of a source; also
    return a teacher that has recorded them.

    The model of this teacher, out of which students may be cut, is the model of `start`
    with a linear map into the space of the vectors, fitted on some training texts.
    Raises TeacherError for a task without vectors, and for texts for which the source
    has none.
    """
    if not data.task.vectors:
        raise TeacherError(
            f"teacher {source.name}: returns vectors, but the task of the data is "
            f"{data.task.kind}; pass --kind embedding to read only their texts"
        )
    splits = {"train": data.train, "validation": data.validation, "test": data.test}
    # an endpoint is asked once
    found = from_first(
        lambda: {
            role: source.vectors(split["text"][:])
            for role, split in splits.items()
            if split is not None
        }
    )
    vectors = {splits[role]._fingerprint: each for role, each in found.items()}
    data = replace(data, task=replace(data.task, width=found["train"].shape[1]))
    data = _with_similarities(
        data, source.digest, lambda split: vectors[split._fingerprint]
    )
    splits = {"train": data.train, "validation": data.validation, "test": data.test}
    _fit_projection(start, data.train, found["train"])
    answers = {splits[role]._fingerprint: each for role, each in found.items()}
    return data, start.record(source.name, source.digest, answers)


def _fit_projection(start: Teacher, split: Dataset, vectors_NE: Array) -> None:
    """Fit the linear map after an encoder's pooling to these vectors by ridge
    regression."""
    model = cast(SentenceEncoder, start.model)
    chosen = spaced(len(split), FITTED)
    keep_pooling(model)
    pooled_ND = _encode_texts(
        start, split.select(chosen), VECTORS_LENGTH, AS_IT_IS
    ).astype(np.float64)
    target_NE = np.asarray(vectors_NE[chosen], dtype=np.float64)
    square_DD = pooled_ND.T @ pooled_ND
    square_DD += RIDGE * np.trace(square_DD) / len(square_DD) * np.eye(len(square_DD))
    map_ED = np.linalg.solve(square_DD, pooled_ND.T @ target_NE).T
    lengths_N = np.linalg.norm(target_NE, axis=1)
    set_projection(
        model,
        torch.from_numpy(map_ED).float(),
        normalise=bool(np.allclose(lengths_N, 1, atol=1e-2)),
    )
    model.requires_grad_(False)


def _encode_texts(
    teacher: Teacher, split: Dataset, max_length: int, preparation: TextPreparation
) -> Floats:
    rows = encode(
        split,
        teacher.tokenizer,
        min(max_length, _most_tokens(teacher)),
        preparation=preparation,
    )
    return metrics.logits(teacher.model, rows, Collate(teacher.tokenizer))


def _most_tokens(teacher: Teacher) -> int:
    """Return the number of tokens of a text that the encoder reads, or else its
    tokenizer, at most VECTORS_LENGTH."""
    own = (
        settings_of(teacher.model.config).max_length
        or teacher.tokenizer.model_max_length
    )
    return min(filter(None, (own, positions(teacher.model), VECTORS_LENGTH)))


def _with_similarities(
    data: TaskData, digest: str, vectors: Callable[[Dataset], Array]
) -> TaskData:
    compared = {
        role: _compare_texts(split, digest, vectors)
        for role, split in (("validation", data.validation), ("test", data.test))
        if split is not None and not any(map(len, split["related"][:]))
    }
    note = (
        f"{' and '.join(compared)}: texts alone, scored by how well they agree with "
        "the teacher's similarities",
    )
    return replace(data, notes=data.notes + note * bool(compared), **compared)


def _compare_texts(
    split: Dataset, digest: str, vectors: Callable[[Dataset], Array]
) -> Dataset:
    def batches() -> Iterator[pa.RecordBatch]:
        vectors_NE = unit(vectors(split))
        rng = np.random.default_rng(0)
        cosines = vectors_NE @ vectors_NE.T
        np.fill_diagonal(cosines, -np.inf)
        for row, text in enumerate(split["text"][:]):
            some = rng.choice(len(split), min(RANDOM_OTHERS, len(split)), replace=False)
            others = sorted(
                {*np.argsort(-cosines[row])[:NEAREST].tolist(), *some.tolist()} - {row}
            )
            group = {
                "text": text,
                "related": others,
                "relevance": cosines[row, others].tolist(),
                "scores": [],
                "passage": False,
            }
            yield pa.RecordBatch.from_pylist([group], schema=GROUP_SCHEMA)

    key = cache.digest("compared", VECTORS_ENCODING, split._fingerprint, digest)
    return cache.rows("unlabelled", key, batches, empty="the split has no texts.")
