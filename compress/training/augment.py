"""Augment a task's rows by replacing words with others that fit. Jiao et al. 2020,
arXiv:1909.10351, Algorithm 1.

A word may be replaced if it consists of letters a-z and is not a stop word. A single
token is masked, in `[CLS] masked text [SEP] text [SEP]`, and replaced by one of the
model's most probable whole words; a word of several tokens is replaced by one of the
words with the nearest vectors.

Deviations from the paper and from the authors' data_augmentation.py:
- each side of a pair is varied while the other is unchanged; theirs varies the second
  side next to the last variant of the first, because the row is changed in place.
- unless a GloVe file is given, word vectors are the means of the model's input
  embeddings over a word's tokens, for the words of the texts and of the vocabulary; a
  word is not its own neighbour.
- the rest of a text stays as written; theirs is lower-cased and joined by spaces, the
  same tokens to an uncased model.
- special tokens are never candidates; a word without candidates stays.
- stop words are the authors' and scikit-learn's English ones, so that 207 more words
  stay, such as `serious`.
- words with accents stay; theirs, with an uncased model, removes the accents first.
- neighbours are words of letters a-z in lower case; theirs takes any token of the file,
  looks words up as they are written, and gives capitalised words capitalised
  neighbours.
- questions about a text, and tagged words, which the authors' code does not support,
  are varied like pairs and texts.
- words after the 128th token of a text are unchanged.
"""

import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress import io
from compress.arrays import Array
from compress.config.recipe import Recipe
from compress.config.reference import Call, OptionGroup
from compress.config.stages import AnyStage, Prune
from compress.data import cache
from compress.data.constants import IGNORE_INDEX
from compress.data.corpus import Corpus
from compress.data.task import TaskData
from compress.data.tokenize import fingerprint
from compress.errors import DataError, ObjectiveError
from compress.training.replacements import CandidateOptions, find_candidates

ROWS_PER_DRAW: Final = 1000
TEXT_COLUMNS: Final = ("text", "text_pair", "question", "words")
"""Columns that get variants."""

Slots = list[tuple[int, int, list[str]]]
"""(start, end, candidates) of the words of a text, in its order."""


@dataclass(frozen=True, kw_only=True)
class VariantOptions(OptionGroup):
    """Choose which rows get variants, and how many of their words are replaced.

    copies       the most variants of each text of a row
    probability  of replacing a word, p_t; `candidates`: the number of words that may
                 replace it, K; both Sec. 4.2's
    vectors      a GloVe text file; its first 100,000 rows are read
    classes_only vary tasks of classes only, no numbers, spans or tags: the paper's
                 prediction stage, which takes STS-B and SQuAD as they are
    limit        the most rows that get variants, drawn at random
    """

    copies: int = 20
    probability: float = 0.4
    candidates: int = 15
    vectors: str | None = None
    classes_only: bool = False
    limit: int | None = None


def augment(
    split: Dataset,
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    rng: np.random.Generator,
    variants: VariantOptions,
    beside: bool = True,
    together: int = 1,
) -> Iterator[dict[str, Any]]:
    """Yield each row of the split, followed by different variants of each of its texts.

    Texts are `text`, `text_pair`, the `question` but not its context, which contains
    the answers, and `words`, each of which keeps its tag; the other columns are copied.

    lm           a model with a masked language model's head, which uses `tokenizer`
    beside       show the original text next to the masked one (authors' code); half the
                 cost without
    together     words of a text that are masked in one pass: 1 in the paper; n words
                 cost 1/n

    Only the texts and a batch of rows are held in memory. The same generator gives the
    same rows. Raises DataError for a model that cannot fill in masks, and for invalid
    numbers."""
    source = CandidateOptions(
        variants.candidates, variants.vectors, together=together, beside=beside
    )
    return _vary(split, lm, tokenizer, source, options=variants, rng=rng)


def near_words(
    split: Dataset,
    encoder: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    rng: np.random.Generator,
    variants: VariantOptions,
    partners: int = 0,
) -> Iterator[dict[str, Any]]:
    """Augment as `augment` does, but replace every word by words with similar vectors,
    not only words of several tokens.

    partners     also pair each text of a pair with up to this many similar texts of
                 other pairs; these rows have no label, so they are for stages in which
                 a teacher answers

    This is not in the paper, which asks a language model first. It takes seconds, with
    any encoder. Raises DataError."""
    source = CandidateOptions(variants.candidates, variants.vectors, masked=False)
    varied = _vary(split, encoder, tokenizer, source, options=variants, rng=rng)
    return chain(varied, _pair_anew(split, partners, rng) if partners else ())


def _vary(
    split: Dataset,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: CandidateOptions,
    *,
    options: VariantOptions,
    rng: np.random.Generator,
) -> Iterator[dict[str, Any]]:
    copies = options.copies
    probability = options.probability
    if copies < 1 or source.most < 1 or source.together < 1 or not 0 < probability <= 1:
        raise DataError(
            f"augmentation: copies {copies}, candidates {source.most}, together "
            f"{source.together}, probability {probability}: expected at least 1 of the "
            "first three, and a probability above 0 and at most 1"
        )
    label = (
        split.features.arrow_schema.field("label").type
        if "label" in split.column_names
        else pa.null()
    )
    if options.classes_only and not (
        pa.types.is_integer(label) or pa.types.is_list(label)
    ):
        yield from split
        return
    chosen = np.zeros(len(split), bool)
    chosen[rng.permutation(len(split))[: options.limit]] = True
    columns = _read_texts(split)
    texts = pc.unique(
        pa.chunked_array(
            [
                c
                for each in columns.values()
                for c in each.filter(pa.array(chosen)).chunks
            ]
        )
    )
    table = find_candidates(texts, model, tokenizer, source)
    places = {
        name: pc.index_in(column, texts).to_numpy() for name, column in columns.items()
    }
    for start in range(0, len(split), ROWS_PER_DRAW):
        batch = slice(start, start + ROWS_PER_DRAW)
        rows = split.select(range(start, min(batch.stop, len(split)))).to_list()
        slots = {
            name: _read_slots(table, at[batch][chosen[batch]])
            for name, at in places.items()
        }
        for row, varied in zip(rows, chosen[batch].tolist(), strict=True):
            yield row
            for name in slots if varied else ():
                is_text = isinstance(row[name], str)
                text = row[name] if is_text else " ".join(row[name])
                if not is_text and any(" " in word for word in row[name]):
                    raise DataError(
                        f"augmentation: a word contains a space, as in {row[name]}; "
                        "leave `augment` out"
                    )
                for variant in make_variants(
                    text, next(slots[name]), rng, copies, probability
                ):
                    yield row | {name: variant if is_text else variant.split(" ")}


WIDER: Final = 4
"""Partners are drawn from the most similar texts, from this many times as many as
needed."""


def _pair_anew(
    split: Dataset, partners: int, rng: np.random.Generator
) -> Iterator[dict[str, Any]]:
    """Yield each row with one of its texts replaced by texts of the same column that
    share words with it.

    The words are weighted by tf-idf. Pairs that are in the split are left out.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.neighbors import NearestNeighbors

    if "text_pair" not in split.column_names:
        raise DataError(
            "augmentation: `partners` needs pairs of texts, and this task has none; "
            "leave it out"
        )
    columns = {name: split[name][:] for name in ("text", "text_pair")}
    known = set(zip(*columns.values(), strict=True))
    words = TfidfVectorizer(sublinear_tf=True, token_pattern=r"\w+").fit(
        chain(*columns.values())
    )
    similar = dict[str, dict[str, list[str]]]()
    for name, column in columns.items():
        texts = list(dict.fromkeys(column))
        vectors = words.transform(texts)
        search = NearestNeighbors(
            n_neighbors=min(WIDER * partners + 1, len(texts)), metric="cosine"
        ).fit(vectors)
        nearest = search.kneighbors(vectors, return_distance=False)
        similar[name] = {
            text: [texts[n] for n in near]
            for text, near in zip(texts, nearest, strict=True)
        }
    for row in split.to_iterable_dataset():
        unlabelled = row | (
            {"label": missing_label(row["label"])} if "label" in row else {}
        )
        for name in columns:
            made = [unlabelled | {name: text} for text in similar[name][row[name]]]
            fresh = [
                each for each in made if (each["text"], each["text_pair"]) not in known
            ]
            for at in rng.permutation(len(fresh))[:partners]:
                yield fresh[at]


def missing_label(label: Any) -> Any:
    """Return the placeholder for a missing label of the same type as `label`;
    `Distillation` replaces it by the teacher's answer."""
    if isinstance(label, list):
        return [float("nan")] * len(label)
    return float("nan") if isinstance(label, float) else IGNORE_INDEX


def make_variants(
    text: str, words: Slots, rng: np.random.Generator, copies: int, probability: float
) -> list[str]:
    """Make up to `copies` different variants of a text, in which each word is replaced
    with `probability`."""
    if not words:
        return []
    counts = [len(some) for *_, some in words]
    replaced = rng.random((copies, len(words))) < probability
    picked = np.where(replaced, rng.integers(counts, size=replaced.shape), -1).tolist()
    cuts = [0, *(at for start, end, _ in words for at in (start, end)), len(text)]
    # fixed text and words, alternating
    parts = [text[start:end] for start, end in pairwise(cuts)]
    copied = []
    for picks in picked:
        copy = parts.copy()
        for number, pick in enumerate(picks):
            if pick >= 0:
                copy[2 * number + 1] = words[number][2][pick]
        copied.append("".join(copy))
    return [variant for variant in dict.fromkeys(copied) if variant != text]


def _read_texts(split: Dataset) -> dict[str, pa.ChunkedArray]:
    """Return the columns of texts; words are joined by spaces."""
    names = [name for name in TEXT_COLUMNS if name in split.column_names]
    tables = list(split.select_columns(names).with_format("arrow").iter(ROWS_PER_DRAW))
    columns = {
        name: [chunk for table in tables for chunk in table[name].chunks]
        for name in names
    }
    if "words" in columns:
        columns["words"] = [pc.binary_join(chunk, " ") for chunk in columns["words"]]
    return {
        name: pa.chunked_array(chunks, pa.string()) for name, chunks in columns.items()
    }


def _read_slots(candidates: pa.Table, places: Array) -> Iterator[Slots]:
    table = candidates.take(pa.array(places.astype(np.int64)))
    for columns in zip(
        *(table[name].to_pylist() for name in ("starts", "ends", "candidates")),
        strict=True,
    ):
        yield list(zip(*columns, strict=True))


FEW_ROWS_TO_LEARN: Final = 10_000
"""The most training rows for which variants are tried."""
COPIES = 20
COPIES_BESIDE_TEXTS = 8
QUICK_COPIES = 4
"""Variants of a row over all of its texts: usually, if a corpus is read too, and with
`quick` effort."""
PARTNERS = 5
QUICK_PARTNERS = 1
"""New pairs for each text of a pair."""


def add_stages(
    recipe: Recipe, rows: int, *, corpus: bool = False, texts: int = 1
) -> Recipe:
    """Let each stage with `augment: auto` and no fixed length read more than the task's
    rows.

    If there are few rows, the stage reads variants of them from its first step on, and
    new pairs of their texts if its teacher can answer for them. If there is a corpus
    for the task, a stage is added that continues with the corpus and variants, and
    whose student is kept if it is better; unless the effort is `quick`, only the added
    stage reads variants.

    rows, texts   number of training rows, and of texts of each row that may be varied
    """
    stages = list[AnyStage]()
    suffix = recipe.free_suffix("-augmented")
    for stage in recipe.stages:
        if isinstance(stage, Prune) or stage.augment != "auto":
            stages.append(stage)
            continue
        few = texts > 0 and rows <= FEW_ROWS_TO_LEARN and stage.open_ended
        quick = stage.effort == "quick"
        beside = corpus and stage.open_ended and stage.may_read_texts
        more: dict[str, Any] = {
            "augment": None,
            "cache_teacher": "auto" if stage.cache_teacher else False,
        }
        if few:
            copies = COPIES_BESIDE_TEXTS if beside else COPIES
            if quick:
                copies = QUICK_COPIES
            options = {"copies": max(1, copies // texts)}
            if texts == 2 and stage.may_read_texts:
                options["partners"] = QUICK_PARTNERS if quick else PARTNERS
            more["augment"] = Call("tinybert.near_words", options)
        # the stage that reads the corpus reads the variants too
        later = beside and not quick
        stages.append(
            stage.model_copy(update=more if few and not later else {"augment": None})
        )
        if beside:
            added = more if later else more | {"augment": None}
            added |= {
                "name": stage.name + suffix,
                "improve": True,
                "student": None,
                "corpus": True,
            }
            stages.append(stage.model_copy(update=added))
    return recipe.model_copy(update={"stages": tuple(stages)})


AUGMENT_ENCODING: Final = "1"
"""Part of every cache key: raise it when the rows made from the same split change."""

CORPUS_COLUMNS: Final = ("text", "text_pair", "question", "context")


def asks_language_model(call: Call) -> bool:
    """Return True if this augmentation needs a language model (its parameter `lm`)
    rather than any encoder."""
    try:
        return "lm" in inspect.signature(call.function).parameters
    except ObjectiveError:
        # no such function, which is reported where recipes are checked
        return True


def trains_language_model(recipe: Recipe) -> bool:
    """Return True if a stage needs the teacher's language model, which is trained if
    the teacher has none."""
    return any(
        (isinstance(stage.augment, Call) and asks_language_model(stage.augment))
        or (
            stage.kind == "distill"
            and stage.teacher == "general"
            and stage.head == "masked_lm"
        )
        for stage in recipe.training
    )


def reads_corpus(recipe: Recipe) -> bool:
    """Return True if a stage reads unlabelled text, or the teacher's language model may
    be trained on it."""
    return (
        trains_language_model(recipe)
        or any(stage.data == "text" for stage in recipe.stages)
        or any(stage.corpus for stage in recipe.training)
    )


def augment_split(
    split: Dataset,
    call: Call,
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    lm_digest: str,
    seed: int,
) -> Dataset:
    """Return the rows that `call` (split, language model, tokenizer, rng) makes from a
    split, with the split's columns.

    They are written to the cache once for the same split, tokenizer, model, options and
    seed.
    """
    read = (split._fingerprint, fingerprint(tokenizer))
    options = json.dumps(dict(call.options), sort_keys=True)
    vectors = call.options.get("vectors")
    key = cache.digest(
        "augmented",
        AUGMENT_ENCODING,
        *read,
        call.by,
        options,
        *io.source_files(call.code),
        *([Path(vectors)] if vectors and Path(vectors).is_file() else []),
        lm_digest,
        str(seed),
    )

    def batches() -> Iterator[pa.RecordBatch]:
        rows = iter(call(split, lm, tokenizer, rng=np.random.default_rng(seed)))
        while batch := list(islice(rows, ROWS_PER_DRAW)):
            yield pa.RecordBatch.from_pylist(batch, schema=split.features.arrow_schema)

    return cache.rows(
        "augmented", key, batches, empty=f"{call.by} makes no rows from this split."
    )


def task_text(data: TaskData, split: Dataset) -> Corpus:
    """Return the texts of a task's split as a corpus, with one document per example."""
    names = [name for name in CORPUS_COLUMNS if name in split.column_names]

    def documents() -> Iterator[str]:
        for batch in split.select_columns(names or ["words"]).iter(ROWS_PER_DRAW):
            columns = [batch[name] for name in names] or [
                [" ".join(words) for words in batch["words"]]
            ]
            for texts in zip(*columns, strict=True):
                yield "\n".join(texts)

    return Corpus(
        f"{data.name}, its texts",
        cache.digest("texts of", split._fingerprint),
        documents,
    )
