"""A BERT whose embedding passes a linear map: a family that only a test knows."""

from dataclasses import dataclass
from typing import Any

from compress.families import bert
from compress.families.family import Family


@dataclass(frozen=True)
class Twig(Family):
    """A family with one more product behind its embedding."""

    def embedding_work(self, config: Any, shape: Any) -> int:
        return int(shape.hidden**2)


FAMILY = Twig(
    "twig",
    rules={**bert.FAMILY.rules, r"(?:.*\.)?embeddings\.bark": "bark: hidden hidden"},
    kin="twig",
    gates=True,
    prepared_mask=True,
    counted=True,
    masked_by_feature=True,
)
