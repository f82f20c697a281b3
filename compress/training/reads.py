"""Write on a loss what it compares, by `reads`; nothing else.

Signals a loss can read are the names of `models.signals.Signals`: logits, embeddings, layers, scores, queries, keys,
values. A loss is a pure function (student, target, mask_BL, *, options) -> scalar, in float32; one that needs no mask
may leave it out. One that compares attention of ModernBERT is given mask_BLL where a layer sees a window only.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

Item = Literal["example", "token", "pair", "label", "query", "preference"]
Mask = Literal["tokens", "labels", "queries", "preferences"]
Difference = Literal["width", "heads", "head_size"]
Temperature = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Loss = TypeVar("Loss", bound=Callable[..., Any])
USUAL_ITEMS: Mapping[str, Item] = MappingProxyType({"logits": "example", "pair": "example", "scores": "pair"})
"""The items that a mean usually runs over, by the signal that is read; of all others, tokens."""


@dataclass(frozen=True)
class Reading:
    """Describe what a loss compares.

    signal    the student's signal it reads
    against   teacher: the same signal of the teacher; else the batch's column of that name, such as labels
    per       what its mean runs over; the frame needs it to make the mean exact when a batch is spread over several
              processes or accumulated in parts: examples, real tokens, pairs of real tokens, labelled positions;
              queries, or pairs of passages of a query of which the first is the more relevant
    mask      which positions the mask argument marks: real tokens, or those with a label (labels != -100); in batches
              of a ranking, where (B, B), which rows are of the same query (queries), and of these where the first row
              (first axis) is more relevant than the second (preferences)
    bridges   differences between student and teacher that the formula itself can bear
    layers    what the values of several compared layers become: their sum or their mean
    windows   the formula bears a mask (B, L, L) of the tokens (last axis) that each token sees in both layers, where
              their attention is local; without it such layers are refused
    kinds     the task kinds whose answers the formula is about, such as embedding; empty: any
    """

    signal: str
    against: str = "teacher"
    per: Item = "token"
    mask: Mask = "tokens"
    bridges: frozenset[Difference] = frozenset()
    layers: Literal["sum", "mean"] = "sum"
    windows: bool = False
    kinds: frozenset[str] = frozenset()


def reads(
    signal: str,
    *,
    against: str = "teacher",
    per: Item | None = None,
    mask: Mask = "tokens",
    bridges: tuple[Difference, ...] = (),
    layers: Literal["sum", "mean"] = "sum",
    windows: bool = False,
    kinds: tuple[str, ...] = (),
) -> Callable[[Loss], Loss]:
    """Mark a loss with the signal it reads, and how: see Reading.

        @compress.reads("logits")
        def margin(student, teacher, *, temperature=1.0): ...

    `per` left out: example for logits, pair for attention scores, token for the rest.
    """
    per = per or USUAL_ITEMS.get(signal, "token")
    reading = Reading(signal, against, per, mask, frozenset(bridges), layers, windows, frozenset(kinds))

    def write(loss: Loss) -> Loss:
        loss.reading = reading  # type: ignore[attr-defined]
        return loss

    return write
