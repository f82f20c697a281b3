"""Find the texts that are nearest to others, by the vectors of a bundle. Imports neither torch nor transformers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from compress.data.task import Task
from compress.errors import BundleError
from compress.exporters.predictor import Nearest, Predictor, Text, encode

BLOCK = 256
"""Texts whose cosines with all others are held at once."""


@dataclass(frozen=True)
class NearestTexts:
    """Answer each text with those of `texts` that are nearest to it: an exact search over all of them.

    vectors_NE  the vectors of `texts`, of length 1; they may be another model's of the same space
    """

    predictor: Predictor
    texts: Sequence[str]
    vectors_NE: NDArray[np.float32]
    count: int

    @property
    def task(self) -> Task:
        return self.predictor.task

    @staticmethod
    def from_texts(predictor: Predictor, texts: Sequence[str], count: int = 5) -> "NearestTexts":
        """Compute the vectors of `texts`. Raises BundleError for a bundle that gives none, and for no texts."""
        if predictor.task.kind != "embedding":
            raise BundleError(
                f"this bundle answers {predictor.task.kind} tasks; expected one that gives vectors to compare texts by"
            )
        if not texts:
            raise BundleError("there are no texts to search among; expected one a line")
        found = [predictor.task.prompts[1] + text for text in texts]
        return NearestTexts(predictor, texts, _vectors(predictor, found), min(count, len(texts)))

    def predict(self, texts: Sequence[Text]) -> list[Nearest]:
        """Find the nearest texts to each."""
        found = list[Nearest]()
        for start in range(0, len(texts), BLOCK):
            asked = [f"{self.task.prompts[0]}{text}" for text in texts[start : start + BLOCK]]
            cosines = _vectors(self.predictor, asked) @ self.vectors_NE.T
            best = np.argsort(-cosines, axis=1, kind="stable")[:, : self.count]
            found += [
                Nearest(tuple((self.texts[n], float(row[n])) for n in numbers))
                for row, numbers in zip(cosines, best, strict=True)
            ]
        return found


def _vectors(predictor: Predictor, texts: Sequence[Text]) -> NDArray[np.float32]:
    vectors = predictor.logits(encode(predictor.tokenizer, texts))
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
