"""Certify the int8 file of a model of vectors without data: by how it ranks the pairs
of some sentences, compared with its fp32 file."""

from itertools import islice

import numpy as np
from datasets import Dataset

from compress.benchmark.devices import open_device
from compress.data.corpus import load_corpus
from compress.data.sentences import split_sentences
from compress.evaluation.embedding import unit
from compress.exporters.artifact import Bundle
from compress.quantization.certify import Claim, attach_certificate, certify

CORPUS = "pydoc"
SENTENCES_SAMPLED = 200
MAX_RANK_DROP = 0.01
"""The largest 1 - Spearman's rho of the similarities and fp32's for which a file is
certified."""


def certify_vectors(bundle: Bundle) -> Bundle:
    """Certify the int8 file of a model of vectors; return other bundles as they are.

    The metric is Spearman's rho of the cosines of all pairs and fp32's, so that fp32
    itself has 1.
    """
    if not bundle.manifest.vectors:
        return bundle
    texts = _draw_sentences()
    vectors_NE = unit(bundle.embed(texts, precision="fp32"))
    others = [list(range(one + 1, len(texts))) for one in range(len(texts))]
    cosines_NN = vectors_NE @ vectors_NE.T
    split = Dataset.from_dict(
        {
            "text": texts,
            "related": others,
            "relevance": [cosines_NN[one, other] for one, other in enumerate(others)],
            "passage": np.zeros(len(texts), bool),
        }
    )
    claim = Claim("dynamic int8", MAX_RANK_DROP, "sampled", CORPUS)
    with open_device("local") as device:
        proof = certify(bundle, "int8", bundle.evaluator(split), device, claim)
    return attach_certificate(bundle, "int8", proof)[0]


def _draw_sentences() -> list[str]:
    found = (
        text
        for document in load_corpus(CORPUS).documents()
        for text in split_sentences(document)
        if 20 < len(text) < 200
    )
    return list(islice(found, SENTENCES_SAMPLED))
