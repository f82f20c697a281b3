"""Conneau & Lample 2019, "Cross-lingual Language Model Pretraining", arXiv:1901.07291.

Sec. 3.3  distilbert.mask    masked language modelling of streams of any number of
                             sentences; frequent tokens less often
Sec. 3.4  translation_pairs  TLM: a sentence and its translation, each with positions
                             from 0, and a language id
Sec. 3.5  streams            both: translations become pairs, other text streams of
                             sentences

With a corpus of several languages (data.documents.find_languages) batches of MLM and of
TLM take turns, each of one language or pair, which is drawn by its share to the power
of 0.7 (data.collate.LanguageSampled); each token has the id of its language. Otherwise
the corpus is one text, without language ids, or one pair. The loss is bert.masked_lm.

Deviations
- shares are those of rows, of text of equal length; the paper's are of sentences (Sec.
  3.1).
- MLM and TLM take turns, step by step, as in Sec. 3.5; the authors' code takes up to
  five languages, then up to five pairs of them.
- TLM pairs are framed as the tokenizer frames pairs; theirs begins and ends each
  sentence with </s>. XLM's tokenizer of transformers writes one </s> between the two.
- pairs longer than a row are left out, as in the authors' code (there from 100 tokens
  on).
- streams of several documents have the separator of roberta.full_sentences between
  them; theirs is one stream of sentences, cut into rows of 256 tokens wherever that
  falls.
- masks are drawn as Sec. 3.3 says, by one over the root of a token's frequency; the
  authors' commands leave that out (sample_alpha 0), and mask each token, </s> too, with
  a probability of 0.15.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np

from compress.data.corpus import Document
from compress.data.masking import Frame
from compress.errors import DataError
from compress.papers.roberta import full_sentences


def translation_pairs(
    documents: Iterable[Document],
    frame: Frame,
    *,
    max_length: int,
    rng: np.random.Generator,
    languages: tuple[int, int] = (0, 1),
) -> Iterator[dict[str, Any]]:
    """Build rows of a sentence and its translation, with `position_ids` and `langs`,
    the id of each token's language.

    The special tokens before and between the sentences belong to the first, those at
    the end to the second. Languages take the place of token types. Raises DataError for
    text that is not parallel.
    """
    for document in documents:
        if not document.parallel:
            raise DataError(
                "xlm.translation_pairs needs parallel text: a .tsv or .jsonl file with "
                "two texts a line, or two files of aligned lines (name.en and "
                "name.fr, passed as name)."
            )
        first, second = document.sentences
        input_ids = frame.pair(first, second)["input_ids"]
        length = len(input_ids)
        if length <= max_length:
            begins = length - len(second) - len(frame.paired.ids[-1])
            counts = (begins, length - begins)
            yield {
                "input_ids": input_ids,
                "position_ids": list(chain.from_iterable(map(range, counts))),
                "langs": [
                    n
                    for n, times in zip(
                        document.languages or languages, counts, strict=True
                    )
                    for _ in range(times)
                ],
            }


def streams(
    documents: Iterable[Document],
    frame: Frame,
    *,
    max_length: int,
    rng: np.random.Generator,
    languages: tuple[int, int] = (0, 1),
) -> Iterator[dict[str, Any]]:
    """Build rows of `translation_pairs` from parallel text (TLM), of
    roberta.full_sentences from other text (MLM).

    Rows of a known language also have `position_ids` and `langs`.
    """
    stream = iter(documents)
    first = next(stream, None)
    whole = chain([] if first is None else [first], stream)
    if first is not None and first.parallel:
        return translation_pairs(
            whole, frame, max_length=max_length, rng=rng, languages=languages
        )
    rows = full_sentences(whole, frame, max_length=max_length, rng=rng)
    if first is None or not first.languages:
        return rows
    return (
        {
            "input_ids": ids,
            "position_ids": list(range(len(ids))),
            "langs": [first.languages[0]] * len(ids),
        }
        for ids in (row["input_ids"] for row in rows)
    )
