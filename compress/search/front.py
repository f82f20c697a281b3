"""The front: what nothing else equals or beats in everything."""

from collections.abc import Iterable


def undominated(placed: Iterable[tuple[tuple[float, ...], int]]) -> list[tuple[tuple[float, ...], int]]:
    """Of (values to minimise, number), those that no other equals or beats in all; of equals, the first number.

    In order of the values nothing is beaten by what comes later, so each is held against the kept ones alone.
    """
    kept: list[tuple[tuple[float, ...], int]] = []
    for values, number in sorted(placed):
        if not any(all(a <= b for a, b in zip(other, values, strict=True)) for other, _ in kept):
            kept.append((values, number))
    return kept
