"""Quantise a table of word embeddings with a codebook: 256 parts of four numbers for
each position in a row, so that one byte stands for four numbers.

Product quantisation of Jegou et al. 2011 (doi:10.1109/TPAMI.2010.57): rows are cut into
parts, and the parts at one position of all rows are clustered by k-means. Fan et al.
2021 (arXiv:2004.07320, Sec. 3.2) quantise embeddings this way, in parts of eight, which
lose too much here (docs/LOG.md).

Shapes: V vocabulary, D width, P parts of a row, C codes, N numbers of a part.
"""

import numpy as np
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # ships no types

from compress.arrays import Array, Floats

PART = 4
"""Numbers of a row that a byte stands for."""
CODES = 256
"""The values of a byte."""
ROUNDS = 10
"""Iterations of k-means."""
CLUSTERED = 8_192
"""Rows that are clustered: the rows of the most frequent tokens, and random ones."""
OCCURRENCE = 3.0
"""A row has the weight 1 + OCCURRENCE sqrt(n) if its token occurs n times."""


def saved_bytes(rows: int, width: int) -> int:
    """Return the bytes that a codebook saves of an int8 table; 0 if it does not
    apply."""
    if width % PART:
        return 0
    return max(0, rows * (width - width // PART) - CODES * width)


def find_codebook(table_VD: Array) -> tuple[Array, Array] | None:
    """Return the numbers (V, D / PART) of the parts of each row of bytes, and the parts
    (D / PART, CODES, PART), or None if a position has more than CODES different parts,
    or if this saves nothing."""
    if not saved_bytes(*table_VD.shape):
        return None
    words_VP = np.ascontiguousarray(table_VD).view(np.uint32)
    codes_VP = np.empty(words_VP.shape, np.uint8)
    book_PC = np.zeros((words_VP.shape[1], CODES), np.uint32)
    for place, words in enumerate(words_VP.T):
        different, codes = np.unique(words, return_inverse=True)
        if len(different) > CODES:
            return None
        codes_VP[:, place] = codes
        book_PC[place, : len(different)] = different
    return codes_VP, book_PC[..., None].view(np.uint8)


def round_table(table_VD: Floats, counts_V: Array) -> Floats:
    """Round the parts of a table's rows to CODES different ones per position; a
    position with no more than that is unchanged.

    counts_V: how often each token occurs.
    """
    # slow to import
    from sklearn.cluster import KMeans

    weights_V = 1 + OCCURRENCE * np.sqrt(counts_V)
    draw = np.random.default_rng(0).random(len(table_VD))
    # the most frequent, then others at random
    clustered = np.lexsort((draw, -counts_V))[:CLUSTERED]
    rounded_VD = table_VD.copy()
    for place in range(0, table_VD.shape[1], PART):
        columns = slice(place, place + PART)
        parts_VN = table_VD[:, columns]
        if len(np.unique(parts_VN, axis=0)) <= CODES:
            continue
        means = KMeans(CODES, init="random", n_init=1, max_iter=ROUNDS, random_state=0)
        with threadpool_limits(1):  # the same sums with any number of threads
            means.fit(parts_VN[clustered], sample_weight=weights_V[clustered])
            codes_V = means.predict(parts_VN)
        rounded_VD[:, columns] = means.cluster_centers_[codes_V]
    return rounded_VD
