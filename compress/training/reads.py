"""Declare what a loss compares, with the decorator `reads`.

A loss can read the fields of `models.signals.Signals`: logits, embeddings, layers,
scores, queries, keys, values. It is a pure function (student, target, mask_BL, *,
options) -> float32 scalar, and may omit the mask if it does not need it. A loss on
attention gets mask_BLL for layers with local attention (ModernBERT) or causal attention
(GPT-2).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from compress.arguments import check_arguments

CountedItem = Literal["example", "token", "pair", "label", "query", "preference"]
Mask = Literal["tokens", "labels", "queries", "preferences", "answers"]
SizeDifference = Literal["width", "heads", "head_size"]
Temperature = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
LossFunction = TypeVar("LossFunction", bound=Callable[..., Any])
USUAL_ITEMS: Mapping[str, CountedItem] = MappingProxyType(
    {"logits": "example", "pair": "example", "scores": "pair"}
)
"""Signal -> the items that a mean runs over by default; tokens for all other
signals."""


@dataclass(frozen=True)
class Reading:
    """Describe the signals that a loss compares, and how.

    signal    the student's signal it reads
    against   teacher: the same signal of the teacher; otherwise the column of the
              batch, such as labels
    per       the items that its mean runs over, which keep the mean exact when a batch
              is split over processes or accumulated: examples, real tokens, pairs of
              real tokens, labelled positions; queries, or pairs of passages of a query
              of which the first is more relevant
    mask      what the mask argument marks: real tokens, or tokens with a label (labels
              != -100); in rankings, (B, B), rows of the same query (queries), or those
              where the first row (first axis) is more relevant (preferences); for
              vectors, (B, B), which passages (last axis) answer a query (answers): 1 a
              passage judged with it, 0 a passage of another query, -1 not a passage, or
              one that another group may judge with it
    bridges   differences between student and teacher that the formula supports
    layers    whether the values of several compared layers are summed or averaged
    windows   the formula supports a mask (B, L, L) of the tokens (last axis) that each
              token sees in both layers, for local and causal attention; other losses
              refuse such layers
    kinds     the task kinds that the formula is for, such as embedding; empty: any
    """

    signal: str
    against: str = "teacher"
    per: CountedItem = "token"
    mask: Mask = "tokens"
    bridges: frozenset[SizeDifference] = frozenset()
    layers: Literal["sum", "mean"] = "sum"
    windows: bool = False
    kinds: frozenset[str] = frozenset()


@check_arguments
def reads(
    signal: str,
    *,
    against: str = "teacher",
    per: CountedItem | None = None,
    mask: Mask = "tokens",
    bridges: tuple[SizeDifference, ...] = (),
    layers: Literal["sum", "mean"] = "sum",
    windows: bool = False,
    kinds: tuple[str, ...] = (),
) -> Callable[[LossFunction], LossFunction]:
    """Declare which signal a loss reads, and how: see Reading.

        @compress.reads("logits")
        def margin(student, teacher, *, temperature=1.0): ...

    The default of `per` is example for logits, pair for attention scores, and token for
    the rest.
    """
    per = per or USUAL_ITEMS.get(signal, "token")
    reading = Reading(
        signal,
        against,
        per,
        mask,
        frozenset(bridges),
        layers,
        windows,
        frozenset(kinds),
    )

    @check_arguments
    def mark(loss: LossFunction) -> LossFunction:
        loss.reading = reading  # type: ignore[attr-defined]
        return loss

    return mark
