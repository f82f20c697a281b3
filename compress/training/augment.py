"""Make more rows for a task: words are replaced by others that fit. Jiao et al. 2020, arXiv:1909.10351, Algorithm 1.

A word may be replaced when it is of letters a-z only and no stop word. One that is a single token is masked, in
`[CLS] masked text [SEP] text [SEP]`, and what the model finds most probable may stand for it, parts of words left out;
one of several tokens may be replaced by the words with the nearest vectors.

Deviations from the paper and from the authors' data_augmentation.py:
- of a pair each side gets its variants while the other stays as it is; theirs varies the second side beside the last
  variant of the first, because the row is changed in place.
- vectors are, unless a GloVe file is given, made of the model's own input embeddings, the mean over a word's tokens,
  over the words of the texts and of the vocabulary; a word is not its own neighbour.
- the rest of a text stays as written; theirs is lower-cased and joined by spaces, the same tokens to an uncased model.
- special tokens are never candidates; a word left without candidates stays.
- stop words are scikit-learn's English ones beside the authors', so that 207 more words stay, as `serious`, `interest`.
- words with accents stay; theirs, beside an uncased model, takes the accents off first.
- neighbours are words of letters a-z, looked up and given in lower case; theirs takes any token of the file, looks
  words up as they are written, and gives those that begin with a capital letter neighbours that do.
- questions about a text and tagged words, which the authors' code does not know, are varied as pairs and single texts.
- words behind the 128th token of a text stay as they are.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from compress.config.recipe import AnyStage, Prune, Recipe
from compress.config.reference import Call, source_files
from compress.data import cache
from compress.data.corpus import Corpus
from compress.data.tokenize import fingerprint
from compress.errors import DataError, ObjectiveError
from compress.training.replacements import Asked
from compress.training.replacements import candidates as find

if TYPE_CHECKING:
    from datasets import Dataset
    from numpy.typing import NDArray
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from compress.data.task import TaskData

ROWS_AT_ONCE: Final = 1000
TEXTS: Final = ("text", "text_pair", "question", "words")
"""Columns that get variants."""

Slots = list[tuple[int, int, list[str]]]
"""(start, end, candidates) of the words of a text, in its order."""


def augment(
    split: Dataset,
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    rng: np.random.Generator,
    copies: int = 20,
    probability: float = 0.4,
    candidates: int = 15,
    beside: bool = True,
    together: int = 1,
    vectors: str | None = None,
    classes_only: bool = False,
    limit: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield each row of the split, followed by up to `copies` different variants of each of its texts.

    Texts are `text`, `text_pair`, the `question` but not its context, in which answers have their place, and `words`,
    each of which keeps its tag; what else is in a row is copied.

    lm           a model with a masked language model's head, which uses `tokenizer`
    probability  that a word is replaced, p_t; `candidates`: how many words may stand for it, K; both Sec. 4.2's
    beside       masked texts are shown with the text as it is beside them (authors' code); without it half the cost
    together     words of a text that are masked in one pass; 1 is the paper's, more is that many times cheaper
    vectors      a GloVe text file; the first 100,000 rows are read
    classes_only only tasks of classes get variants, no numbers, spans or tags: the paper's prediction stage, which
                 takes STS-B and SQuAD as they are
    limit        at most so many rows, chosen at random, get variants

    Nothing but the texts, and a batch of rows, is held in memory. The same generator gives the same rows. Raises
    DataError for a model that fills in no masks, and for numbers that make no sense.
    """
    _check(copies, probability, candidates, together)
    asked = Asked(candidates, vectors, together=together, beside=beside)
    if classes_only and not _classes(split):
        return iter(split)
    return _vary(split, lm, tokenizer, asked, rng=rng, copies=copies, probability=probability, limit=limit)


def near_words(
    split: Dataset,
    encoder: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    rng: np.random.Generator,
    copies: int = 20,
    probability: float = 0.4,
    candidates: int = 15,
    vectors: str | None = None,
    classes_only: bool = False,
    limit: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Augment as `augment` does, with every word treated as one of several tokens: the nearest vectors replace it.

    Not the paper's, which asks its language model first: it takes seconds, and any encoder will do. Raises DataError.
    """
    _check(copies, probability, candidates, 1)
    if classes_only and not _classes(split):
        return iter(split)
    asked = Asked(candidates, vectors, masked=False)
    return _vary(split, encoder, tokenizer, asked, rng=rng, copies=copies, probability=probability, limit=limit)


def _vary(
    split: Dataset,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    asked: Asked,
    *,
    rng: np.random.Generator,
    copies: int,
    probability: float,
    limit: int | None,
) -> Iterator[dict[str, Any]]:
    chosen = np.zeros(len(split), bool)
    chosen[rng.permutation(len(split))[:limit]] = True
    columns = _texts(split)
    texts = pc.unique(pa.chunked_array([c for each in columns.values() for c in each.filter(pa.array(chosen)).chunks]))
    slots = find(texts, model, tokenizer, asked)
    places = {name: pc.index_in(column, texts).to_numpy() for name, column in columns.items()}
    for start in range(0, len(split), ROWS_AT_ONCE):
        some = slice(start, start + ROWS_AT_ONCE)
        rows = split.select(range(start, min(some.stop, len(split)))).to_list()
        words = {name: _slots(slots, at[some][chosen[some]]) for name, at in places.items()}
        for row, wanted in zip(rows, chosen[some].tolist(), strict=True):
            yield row
            for name in words if wanted else ():
                whole = isinstance(row[name], str)
                text = row[name] if whole else " ".join(row[name])
                if not whole and any(" " in word for word in row[name]):
                    raise DataError(f"augmentation: a word holds a space, as in {row[name]}; leave `augment` out here")
                for variant in variants(text, next(words[name]), rng, copies, probability):
                    yield row | {name: variant if whole else variant.split(" ")}


def variants(text: str, words: Slots, rng: np.random.Generator, copies: int, probability: float) -> list[str]:
    """Make up to `copies` texts, all different and none the original, each word replaced with `probability`."""
    if not words:
        return []
    counts = [len(some) for *_, some in words]
    replaced = rng.random((copies, len(words))) < probability
    picked = np.where(replaced, rng.integers(counts, size=replaced.shape), -1).tolist()
    cuts = [0, *(at for start, end, _ in words for at in (start, end)), len(text)]
    parts = [text[start:end] for start, end in pairwise(cuts)]  # what stays and what may go, in turn
    made = []
    for picks in picked:
        copy = parts.copy()
        for number, pick in enumerate(picks):
            if pick >= 0:
                copy[2 * number + 1] = words[number][2][pick]
        made.append("".join(copy))
    return [each for each in dict.fromkeys(made) if each != text]


def _texts(split: Dataset) -> dict[str, pa.ChunkedArray]:
    """Yield the columns of texts; words are joined by spaces."""
    names = [name for name in TEXTS if name in split.column_names]
    tables = list(split.select_columns(names).with_format("arrow").iter(ROWS_AT_ONCE))
    columns = {name: [chunk for table in tables for chunk in table[name].chunks] for name in names}
    if "words" in columns:
        columns["words"] = [pc.binary_join(chunk, " ") for chunk in columns["words"]]
    return {name: pa.chunked_array(chunks, pa.string()) for name, chunks in columns.items()}


def _classes(split: Dataset) -> bool:
    label = split.features.arrow_schema.field("label").type if "label" in split.column_names else pa.null()
    return bool(pa.types.is_integer(label) or pa.types.is_list(label))


def _slots(found: pa.Table, places: NDArray[Any]) -> Iterator[Slots]:
    table = found.take(pa.array(places.astype(np.int64)))
    for columns in zip(*(table[name].to_pylist() for name in ("starts", "ends", "candidates")), strict=True):
        yield list(zip(*columns, strict=True))


def _check(copies: int, probability: float, candidates: int, together: int) -> None:
    if copies < 1 or candidates < 1 or together < 1 or not 0 < probability <= 1:
        raise DataError(
            f"augmentation: copies {copies}, candidates {candidates}, together {together}, probability {probability}: "
            "expected at least 1 of the first three, and a probability above 0 and at most 1"
        )


FEW_ROWS: Final = 10_000
"""Rows of a training split up to which variants of them are tried."""
VARIANTS: Final = Call("tinybert.near_words", {"copies": 8})
QUICK_COPIES: Final = 4
"""Variants of a row, of all of its texts together, that a quick stage reads."""


def add_stages(recipe: Recipe, rows: int, *, corpus: bool = False, texts: int = 1) -> Recipe:
    """Let each stage of `augment: auto` be followed by one on more rows, whose student is kept where it is better.

    These are variants of the task's rows, where there are few, and the texts of the corpus, where there is one for the
    task. At the effort `quick` the stage itself reads variants, but fewer, from its first step on. Nothing is added
    where the length of the stage is given.

    rows, texts   of the training split, and of each row: those that may be varied
    """
    stages, suffix = list[AnyStage](), recipe.free_suffix("-augmented")
    for stage in recipe.stages:
        if isinstance(stage, Prune) or stage.augment != "auto":
            stages.append(stage)
            continue
        few, reads = texts > 0 and rows <= FEW_ROWS and stage.open_ended, corpus and stage.may_read_texts
        quick = few and stage.effort == "quick"
        fewer = Call("tinybert.near_words", {"copies": max(1, QUICK_COPIES // texts)}) if quick else None
        stages.append(stage.model_copy(update={"augment": fewer}))
        later = VARIANTS if few and not quick else None
        if stage.open_ended and (reads or later):
            more = {"augment": later, "corpus": reads}
            kept = "auto" if stage.cache_teacher else False  # outputs for so many rows are seldom read twice
            added = {"name": stage.name + suffix, "improve": True, "student": None, "cache_teacher": kept}
            stages.append(stage.model_copy(update=more | added))
    return recipe.model_copy(update={"stages": tuple(stages)})


ENCODING: Final = "1"
"""Part of every cache key: raise it when what is written of the same rows changes."""

CORPUS_COLUMNS: Final = ("text", "text_pair", "question", "context")


def asks_language_model(call: Call) -> bool:
    """Return True if this augmentation asks a language model, as its second parameter `lm` says; else any encoder."""
    try:
        return "lm" in inspect.signature(call.function).parameters
    except ObjectiveError:  # no such function: told where recipes are checked
        return True


def trains_language_model(recipe: Recipe) -> bool:
    """Return True if a stage asks the teacher's language model, which is trained where the teacher has none."""
    return any(
        (isinstance(each.augment, Call) and asks_language_model(each.augment))
        or (each.kind == "distill" and each.teacher == "general" and each.head == "masked_lm")
        for each in recipe.training
    )


def reads_corpus(recipe: Recipe) -> bool:
    """Return True if a stage reads unlabelled text, or the teacher's language model may be trained on it."""
    return (
        trains_language_model(recipe)
        or any(each.data == "text" for each in recipe.stages)
        or any(each.corpus for each in recipe.training)
    )


def augmented(
    split: Dataset, call: Call, lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, lm_digest: str, seed: int
) -> Dataset:
    """Return the rows that `call` (split, language model, tokenizer, rng) makes of a split, in the split's columns.

    Streamed once to the cache, by the fingerprints of split and tokenizer, the model's digest, the options and seed.
    """
    read, options = (split._fingerprint, fingerprint(tokenizer)), json.dumps(dict(call.options), sort_keys=True)
    key = cache.digest("augmented", ENCODING, *read, call.by, options, *source_files(call.code), lm_digest, str(seed))

    def batches() -> Iterator[pa.RecordBatch]:
        rows = iter(call.function(split, lm, tokenizer, rng=np.random.default_rng(seed), **call.options))
        while batch := list(islice(rows, ROWS_AT_ONCE)):
            yield pa.RecordBatch.from_pylist(batch, schema=split.features.arrow_schema)

    return cache.rows("augmented", key, batches, empty=f"{call.by} makes no row of this split.")


def task_text(data: TaskData, split: Dataset) -> Corpus:
    """Return the texts of a task's split as a corpus: one document for each example."""
    names = [name for name in CORPUS_COLUMNS if name in split.column_names]

    def documents() -> Iterator[str]:
        for batch in split.select_columns(names or ["words"]).iter(ROWS_AT_ONCE):
            columns = [batch[name] for name in names] or [[" ".join(words) for words in batch["words"]]]
            for texts in zip(*columns, strict=True):
                yield "\n".join(texts)

    return Corpus(f"{data.name}, its texts", cache.digest("texts of", split._fingerprint), documents)
