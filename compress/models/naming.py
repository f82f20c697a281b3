"""One name for the same weight in every family, so that weights can be carried between them."""

from dataclasses import dataclass

from compress.slicing.rules import place

KNOWN = ("bert", "distilbert", "roberta", "xlm-roberta", "electra", "ernie", "deberta-v2")
"""Families whose blocks are the same, whatever they are called."""


@dataclass(frozen=True)
class Weight:
    """role as in `slicing.rules`; layer is None outside the encoder layers; part is `weight` or `bias`."""

    role: str
    layer: int | None
    part: str


def weight_of(name: str) -> Weight | None:
    """`bert.encoder.layer.3.attention.self.query.weight` -> Weight("query", 3, "weight"); None when not known."""
    found = place("bert", name)
    return None if found is None else Weight(found.role, found.layer, name.rpartition(".")[2])
