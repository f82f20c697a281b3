"""Which cases run: all of them, or a sample of some seconds; always the same ones for the same seed."""

import json
import os
import random
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

WHOLE = os.environ.get("COMPRESS_CAMPAIGN") == "whole"
SEED = int(os.environ.get("COMPRESS_CAMPAIGN_SEED", "0"))
T = TypeVar("T")
Record = Callable[[str, object], None]


def sample(everything: Sequence[T], count: int, *, quick: Sequence[T] | None = None) -> list[T]:
    """Return all cases in the whole campaign, else `count` of them, or of the `quick` ones, in their order."""
    chosen = list(everything if WHOLE or quick is None else quick)
    if WHOLE or count >= len(chosen):
        return chosen
    return [chosen[at] for at in sorted(draw("sample").sample(range(len(chosen)), count))]


def one_of_each(everything: Sequence[T], kind: Callable[[T], object]) -> list[T]:
    """Return all cases in the whole campaign, else one that is drawn of each kind, in their order."""
    if WHOLE:
        return list(everything)
    drawn = draw("sample").sample(range(len(everything)), len(everything))
    chosen = {kind(everything[at]): at for at in drawn}
    return [everything[at] for at in sorted(chosen.values())]


def draw(*of: object) -> random.Random:
    """Return random numbers for one purpose, which do not depend on what else is drawn."""
    return random.Random("/".join(map(str, (SEED, *of))))


def record(
    record_property: Record,
    kind: str,
    tried: int,
    faults: Mapping[str, object],
    ends: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Count cases of a kind for the table at the end, and fail where there are faults.

    ends   how many cases ended in which way, for a line below the table
    """
    record_property("campaign", kind)
    record_property("ends", dict(ends))
    record_property("cases", tried)
    record_property("faults", len(faults))
    assert not faults, json.dumps(faults, indent=1, default=str)
